"""Events: past-tense facts that go into a machine's ``step``; here those of both, and of the cluster machine.

Each carries ``at`` (seconds, one monotonic clock) and ``cause``, the id that its effects get.
"""

from dataclasses import dataclass
from typing import Literal

from planner.values import ModelProfile, Plan
from statemachine.messages.cluster import FromNode
from statemachine.messages.values import Checkpoint, Job, ProtectionChoice, SkippedCheckpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    at: float
    cause: str


# --- both machines -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class TimerFired(Event):
    """The timer ``name`` that ``SetTimer`` asked for is due (never after ``CancelTimer``)."""

    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerConnected(Event):
    """The MQTT session is up, first time or again; subscriptions are in place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerDisconnected(Event):
    """The MQTT session broke. The other side may be fine: nobody is declared dead for this."""


# --- the cluster machine -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class SignalArrived(Event):
    """A node's message; may be a duplicate, late, or of an older incarnation."""

    message: FromNode


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeVanished(Event):
    """The broker published the node's last will, or its clean goodbye (``graceful``)."""

    node: str
    incarnation: int
    graceful: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SubmitRequested(Event):
    request: str
    """Id under which the driver answers the client."""
    job: Job
    profile: ModelProfile | None = None
    """Of the job's layers, where the user has one; ``None``: a node measures them."""
    start_checkpoint: Checkpoint | None = None
    """The newest one of a job of this name at its place: what this job goes on from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StopRequested(Event):
    request: str
    job: str
    """Job id or name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepsMissed(Event):
    """The coordinator's history lacks steps that another coordinator reported while this one was away."""

    first: int
    last: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainRequested(Event):
    request: str
    node: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotRequested(Event):
    """A user wants a snapshot now, or another policy from now on."""

    request: str
    now: bool = False
    every_steps: int | Literal["auto"] | None = None
    """0: none for now."""
    protection: str | None = None
    """A scheme that the owners can have, or ``auto``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplatesReady(Event):
    """``BuildTemplates`` is done; ``ComputePlan`` may be used for this job."""

    job_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplatesFailed(Event):
    """The job cannot run on any such cluster (user's error, names the remedy)."""

    job_id: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanReady(Event):
    generation: int
    plan: Plan
    protection: ProtectionChoice | None = None
    """Of its snapshots; ``None``: as the job says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanCompared(Event):
    """Estimated time of a step under the plan of ``generation`` and under the best one, by the profile.

    Both equal where there is no other plan.
    """

    generation: int
    current_s: float
    best_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanImpossible(Event):
    """No plan now. ``too_few``: wait for nodes (PAUSED). Otherwise state is lost (FAILED)."""

    generation: int
    too_few: bool
    reason: str
    needed: int | None = None
    """Nodes that a plan would take, where the planner knows."""
    lost_layers: tuple[int, ...] = ()
    """Held complete by no usable device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreChecked(Event):
    """Answers ``CheckRestore``: can the snapshot be put together from those who hold parts of it?"""

    generation: int
    possible: bool
    reason: str
    """For people: what is decoded, or what is missing."""
    tier: str = "memory"
    """``memory``: every shard is there; ``decoded``: some are made from parity; ``buddy``: or copies."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointCommitted(Event):
    """``CommitCheckpoint``: it is complete and durable."""

    attempt: str
    step: int
    pruned: tuple[int, ...]
    """Steps of older ones that were removed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointCommitFailed(Event):
    """``CommitCheckpoint``: it cannot be; the ones before stay."""

    attempt: str
    step: int
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportCompleted(Event):
    """``ExportCheckpoint``: the directory is complete."""

    job_id: str
    step: int
    directory: str
    size_bytes: int
    """All weights."""
    took_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportFailed(Event):
    """``ExportCheckpoint``: it cannot be exported; nothing of it is left."""

    job_id: str
    step: int
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointFound(Event):
    """Answers ``FindCheckpoint``."""

    generation: int
    checkpoint: Checkpoint | None
    skipped: tuple[SkippedCheckpoint, ...]
    reason: str
    """For people: why there is none."""
    unreadable: bool = False
    """The place could not be read: there may be one."""
