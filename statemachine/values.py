"""The vocabulary that messages, events and effects share: plain immutable values.

Three numbers fence stale messages (design: "Fencing"): a node's *incarnation* (an integer, new at each
start of its daemon), the *generation* of the plan (one per reconfiguration, never reused), the *step*.
Times named ``at`` are seconds on one monotonic clock; durations end in ``_s``.
"""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal

from planner.values import ModelProfile, Policy


class NodeState(StrEnum):
    """REFT §4.4."""

    HEALTHY = "HEALTHY"
    SNAP = "SNAP"
    COMPLETED = "COMPLETED"
    UNHEALTHY = "UNHEALTHY"
    OFFLINE = "OFFLINE"


class ClusterPhase(StrEnum):
    WAITING = "WAITING"
    """No job, or a job whose first plan is not running yet."""
    RUNNING = "RUNNING"
    QUIESCING = "QUIESCING"
    """A new generation is announced; reports of (step, phase, holdings) are coming in."""
    RECOVERING = "RECOVERING"
    """A plan is being made, or survivors rendezvous and move state under it."""
    PAUSED = "PAUSED"
    """Too few nodes. Survivors hold their state and wait."""
    FINISHED = "FINISHED"
    FAILED = "FAILED"


FailureCause = Literal["exited", "raised", "hung", "unprepared"]
"""Of a trainer: its process ended; its code raised; it made no progress; it could not build the job."""

QuiesceMode = Literal["abort", "boundary"]
"""Stop at once and unwind; or stop together behind the step in flight (joins, drains)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Vote:
    """What the VOTE all-reduce of one step told every rank (design §4)."""

    loss: float
    """Mean loss over the global batch."""
    gradient_norm: float
    skipped: bool = False
    """A gradient was not finite: the step commits without an update, as AMP does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A submitted job. ``training`` is plain data for the runtime, opaque here."""

    job_id: str
    name: str
    steps: int
    policy: Policy
    training: dict[str, Any] = field(default_factory=dict)
    horizon_s: float | None = None
    """Expected time to the next failure, where the user knows; ``None``: learned (``horizon``)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceReport:
    """What the trainer of one device says when it has quiesced.

    ``committed_step`` is the last step it applied. ``ready_step`` is ``committed_step + 1`` when it holds
    the complete, all-reduced gradients of that step (it is at VOTE), else ``None``. ``held`` names the
    layers whose state it holds complete at ``committed_step``; ``vote`` is that step's vote.
    """

    device: int
    committed_step: int
    ready_step: int | None
    vote: Vote | None
    held: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFacts:
    """What a node says about itself when it appears."""

    devices: int
    host: str
    """Address under which other nodes reach its trainers and its rendezvous server."""
    rendezvous_port: int
    chaos_allowed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CommittedStep:
    step: int
    vote: Vote


@dataclass(frozen=True, slots=True, kw_only=True)
class Profiled:
    """A job with its measured profile: all that templates depend on."""

    job: Job
    profile: ModelProfile
