"""Events: past-tense facts that go into a machine's ``step``. These are the events of both machines and of the
cluster machine.

Each carries ``at`` (seconds on one monotonic clock) and ``cause``, the id that its effects inherit.
"""

from dataclasses import dataclass
from typing import Literal

from planner.values import ModelProfile, Plan
from statemachine.messages.cluster import FromNode
from statemachine.messages.values import CheckpointRecord, Job, ProtectionChoice, SkippedCheckpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    at: float
    cause: str


# --- both machines -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class TimerFired(Event):
    """The timer ``name`` that ``SetTimer`` set is due (never after ``CancelTimer``)."""

    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerConnected(Event):
    """The MQTT session is open, for the first time or again, and the subscriptions are in place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerDisconnected(Event):
    """The MQTT session broke. The other side may be fine, so this declares nobody dead."""


# --- the cluster machine -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class SignalArrived(Event):
    """A message of a node was received; it may be a duplicate, late, or of an older incarnation."""

    message: FromNode


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeVanished(Event):
    """The broker published the node's last will, or its clean goodbye (``graceful``)."""

    node: str
    incarnation: int
    graceful: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultAnnounced(Event):
    """A fault is about to be injected into a node on purpose. It decides nothing: recoveries are measured from
    it.
    """

    node: str
    fault_at: float
    """Time of the fault, in seconds on the CLOCK_MONOTONIC of the host that announced it."""
    announced_at: float
    """Time of the announcement on the same clock."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SubmitRequested(Event):
    request: str
    """Id under which the driver answers the client."""
    job: Job
    profile: ModelProfile | None = None
    """Profile of the job's layers, if the user supplied one; ``None``: a node measures them."""
    start_checkpoint: CheckpointRecord | None = None
    """The newest checkpoint of a job of this name at its checkpoint location, from which this job continues."""


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
    """A user requested that a node leaves, or cancelled that."""

    request: str
    node: str
    when_possible: bool = False
    """Whether the drain waits if there is no plan without the node."""
    cancel: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadmitRequested(Event):
    request: str
    node: str
    """A node that was set aside."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotRequested(Event):
    """A user requested a snapshot now, or another policy from now on."""

    request: str
    now: bool = False
    every_steps: int | Literal["auto"] | None = None
    """New interval in steps; 0: no snapshots for now."""
    protection: str | None = None
    """A scheme that the owners can have, or ``auto``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplatesReady(Event):
    """``BuildTemplates`` is done; ``ComputePlan`` may be used for this job."""

    job_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplatesFailed(Event):
    """The job cannot run on any such cluster; the reason names the user's error and the remedy."""

    job_id: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanReady(Event):
    generation: int
    plan: Plan
    protection: ProtectionChoice | None = None
    """Protection of its snapshots; ``None``: as the job says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanCompared(Event):
    """The estimated times of a step under the plan of ``generation`` and under the best plan are known, by the
    profile.

    Both are equal if there is no other plan.
    """

    generation: int
    current_s: float
    best_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainChecked(Event):
    """Answer to ``CheckDrain``."""

    generation: int
    nodes: tuple[str, ...]
    problem: str | None = None
    """Reason why there is no plan without these nodes; ``None``: there is one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanImpossible(Event):
    """There is no plan now. ``too_few``: wait for nodes (PAUSED). Otherwise state is lost (FAILED)."""

    generation: int
    too_few: bool
    reason: str
    needed: int | None = None
    """Number of nodes that a plan would need, if the planner knows it."""
    lost_layers: tuple[int, ...] = ()
    """Layers that no usable device holds complete."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreChecked(Event):
    """Answer to ``CheckRestore``: whether the snapshot can be restored from the nodes that hold parts of it."""

    generation: int
    possible: bool
    reason: str
    """Text that says what is decoded, or what is missing."""
    tier: str = "memory"
    """``memory``: every shard is present; ``decoded``: some are reconstructed from parity; ``buddy``: some
    come from copies.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointCommitted(Event):
    """Answer to ``CommitCheckpoint``: the checkpoint is complete and durable."""

    attempt: str
    step: int
    pruned: tuple[int, ...]
    """Steps of older checkpoints that were removed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointCommitFailed(Event):
    """Answer to ``CommitCheckpoint``: the checkpoint could not be committed; earlier ones stay."""

    attempt: str
    step: int
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportCompleted(Event):
    """Answer to ``ExportCheckpoint``: the directory is complete."""

    job_id: str
    step: int
    directory: str
    size_bytes: int
    """Size of all weights."""
    took_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportFailed(Event):
    """Answer to ``ExportCheckpoint``: the export failed and left nothing."""

    job_id: str
    step: int
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointFound(Event):
    """Answer to ``FindCheckpoint``."""

    generation: int
    checkpoint: CheckpointRecord | None
    skipped: tuple[SkippedCheckpoint, ...]
    reason: str
    """Text that says why there is no checkpoint."""
    unreadable: bool = False
    """Whether the checkpoint location could not be read, so that there may be one."""
