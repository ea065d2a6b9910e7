"""Events: past-tense facts that go into a machine's ``step``. These are the events of both machines and of the
cluster machine.

Each carries ``at`` (seconds on one monotonic clock) and ``cause``, the id that its effects inherit.
"""

from typing import Literal

from msgspec import Struct

from planner.values import ModelProfile, Plan
from statemachine.messages.cluster import FromNode
from statemachine.messages.values import CheckpointRecord, Job, ProtectionChoice, SkippedCheckpoint


class Event(Struct, frozen=True, kw_only=True):
    at: float
    cause: str


# --- both machines -----------------------------------------------------------------------------


class TimerFired(Event, frozen=True, kw_only=True):
    """The timer ``name`` that ``SetTimer`` set is due (never after ``CancelTimer``)."""

    name: str


class BrokerConnected(Event, frozen=True, kw_only=True):
    """The MQTT session is open, for the first time or again, and the subscriptions are in place."""


class BrokerDisconnected(Event, frozen=True, kw_only=True):
    """The MQTT session broke. The other side may be fine, so this declares nobody dead."""


# --- the cluster machine -----------------------------------------------------------------------


class SignalArrived(Event, frozen=True, kw_only=True):
    """A message of a node was received; it may be a duplicate, late, or of an older incarnation."""

    message: FromNode


class NodeVanished(Event, frozen=True, kw_only=True):
    """The broker published the node's last will, or its clean goodbye (``graceful``)."""

    node: str
    incarnation: int
    graceful: bool = False


class FaultAnnounced(Event, frozen=True, kw_only=True):
    """A fault is about to be injected into a node on purpose. It decides nothing: recoveries are measured from
    it.
    """

    node: str
    fault_at: float
    """Time of the fault, in seconds on the CLOCK_MONOTONIC of the host that announced it."""
    announced_at: float
    """Time of the announcement on the same clock."""


class SubmitRequested(Event, frozen=True, kw_only=True):
    request: str
    """Id under which the driver answers the client."""
    job: Job
    profile: ModelProfile | None = None
    """Profile of the job's layers, if the user supplied one; ``None``: a node measures them."""
    start_checkpoint: CheckpointRecord | None = None
    """The newest checkpoint of a job of this name at its checkpoint location, from which this job continues."""


class StopRequested(Event, frozen=True, kw_only=True):
    request: str
    job: str
    """Job id or name."""


class StepsMissed(Event, frozen=True, kw_only=True):
    """The coordinator's history lacks steps that another coordinator reported while this one was away."""

    first: int
    last: int


class DrainRequested(Event, frozen=True, kw_only=True):
    """A user requested that a node leaves, or cancelled that."""

    request: str
    node: str
    when_possible: bool = False
    """Whether the drain waits if there is no plan without the node."""
    cancel: bool = False


class ReadmitRequested(Event, frozen=True, kw_only=True):
    request: str
    node: str
    """A node that was set aside."""


class SnapshotRequested(Event, frozen=True, kw_only=True):
    """A user requested a snapshot now, or another policy from now on."""

    request: str
    now: bool = False
    every_steps: int | Literal["auto"] | None = None
    """New interval in steps; 0: no snapshots for now."""
    protection: str | None = None
    """A scheme that the owners can have, or ``auto``."""


class TemplatesReady(Event, frozen=True, kw_only=True):
    """``BuildTemplates`` is done; ``ComputePlan`` may be used for this job."""

    job_id: str


class TemplatesFailed(Event, frozen=True, kw_only=True):
    """The job cannot run on any such cluster; the reason names the user's error and the remedy."""

    job_id: str
    reason: str


class PlanReady(Event, frozen=True, kw_only=True):
    generation: int
    plan: Plan
    protection: ProtectionChoice | None = None
    """Protection of its snapshots; ``None``: as the job says."""


class PlanCompared(Event, frozen=True, kw_only=True):
    """The estimated times of a step under the plan of ``generation`` and under the best plan are known, by the
    profile.

    Both are equal if there is no other plan.
    """

    generation: int
    current_s: float
    best_s: float


class DrainChecked(Event, frozen=True, kw_only=True):
    """Answer to ``CheckDrain``."""

    generation: int
    nodes: tuple[str, ...]
    problem: str | None = None
    """Reason why there is no plan without these nodes; ``None``: there is one."""


class PlanImpossible(Event, frozen=True, kw_only=True):
    """There is no plan now. ``too_few``: wait for nodes (PAUSED). Otherwise state is lost (FAILED)."""

    generation: int
    too_few: bool
    reason: str
    needed: int | None = None
    """Number of nodes that a plan would need, if the planner knows it."""
    lost_layers: tuple[int, ...] = ()
    """Layers that no usable device holds complete."""


class RestoreChecked(Event, frozen=True, kw_only=True):
    """Answer to ``CheckRestore``: whether the snapshot can be restored from the nodes that hold parts of it."""

    generation: int
    possible: bool
    reason: str
    """Text that says what is decoded, or what is missing."""
    tier: str = "memory"
    """``memory``: every shard is present; ``decoded``: some are reconstructed from parity; ``buddy``: some
    come from copies.
    """


class CheckpointCommitted(Event, frozen=True, kw_only=True):
    """Answer to ``CommitCheckpoint``: the checkpoint is complete and durable."""

    attempt: str
    step: int
    pruned: tuple[int, ...]
    """Steps of older checkpoints that were removed."""


class CheckpointCommitFailed(Event, frozen=True, kw_only=True):
    """Answer to ``CommitCheckpoint``: the checkpoint could not be committed; earlier ones stay."""

    attempt: str
    step: int
    detail: str


class ExportCompleted(Event, frozen=True, kw_only=True):
    """Answer to ``ExportCheckpoint``: the directory is complete."""

    job_id: str
    step: int
    directory: str
    size_bytes: int
    """Size of all weights."""
    took_s: float


class ExportFailed(Event, frozen=True, kw_only=True):
    """Answer to ``ExportCheckpoint``: the export failed and left nothing."""

    job_id: str
    step: int
    detail: str


class CheckpointFound(Event, frozen=True, kw_only=True):
    """Answer to ``FindCheckpoint``."""

    generation: int
    checkpoint: CheckpointRecord | None
    skipped: tuple[SkippedCheckpoint, ...]
    reason: str
    """Text that says why there is no checkpoint."""
    unreadable: bool = False
    """Whether the checkpoint location could not be read, so that there may be one."""
