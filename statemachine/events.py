"""Events: past-tense facts that go into a machine's ``step``.

Each carries ``at`` (seconds, one monotonic clock) and ``cause``, the id that its effects get.
"""

from dataclasses import dataclass
from typing import Literal

from planner.values import ModelProfile, Plan
from statemachine.envelopes import FromNode, ToNode
from statemachine.values import (
    Checkpoint,
    DeviceReport,
    FailureCause,
    HeldSnapshot,
    Job,
    LayerOnDisk,
    NodeFacts,
    PassedOver,
    ProtectionChoice,
    Vote,
)


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
class BrokerLost(Event):
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
class JobSubmitted(Event):
    request: str
    """Id under which the driver answers the client."""
    job: Job
    profile: ModelProfile | None = None
    """Of the job's layers, where the user has one; ``None``: a node measures them."""
    begin: Checkpoint | None = None
    """The newest one of a job of this name at its place: what this job goes on from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StopRequested(Event):
    request: str
    job: str
    """Job id or name."""


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
class PlanWeighed(Event):
    """Estimated time of a step under the plan of ``generation`` and under the best one, by the profile.

    Both equal where there is no other plan.
    """

    generation: int
    present_s: float
    possible_s: float


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
class CheckpointWritten(Event):
    """``CommitCheckpoint``: it is complete and durable."""

    attempt: str
    step: int
    pruned: tuple[int, ...]
    """Steps of older ones that were removed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointFailed(Event):
    """``CommitCheckpoint``: it cannot be; the ones before stay."""

    attempt: str
    step: int
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointFound(Event):
    """Answers ``FindCheckpoint``."""

    generation: int
    checkpoint: Checkpoint | None
    skipped: tuple[PassedOver, ...]
    reason: str
    """For people: why there is none."""
    unreadable: bool = False
    """The place could not be read: there may be one."""


# --- the agent machine (one per node) ----------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentStarted(Event):
    """The daemon is up. ``incarnation`` is fresh; ``facts`` describe the node."""

    incarnation: int
    facts: NodeFacts


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandArrived(Event):
    message: ToNode


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerUp(Event):
    """The trainer process of ``device`` connected and takes instructions."""

    device: int
    pid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerPrepared(Event):
    device: int
    job_id: str
    profile: ModelProfile | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerQuiesced(Event):
    generation: int
    report: DeviceReport


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerResumed(Event):
    device: int
    generation: int
    bytes_moved: int
    rendezvous_s: float
    state_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerStepped(Event):
    device: int
    generation: int
    step: int
    vote: Vote
    step_s: float
    microbatch_ms: float = 0.0
    """Computing one microbatch, waiting excluded; 0: this device computed none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerBeat(Event):
    """Many times a second. ``progress`` counts the main thread's operations; ``waiting``: for others."""

    device: int
    progress: int
    waiting: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerSuspectedPeer(Event):
    device: int
    generation: int
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerReplicaDiverged(Event):
    device: int
    generation: int
    step: int
    layer: int
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerDone(Event):
    device: int
    generation: int
    step: int
    digests: dict[int, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerFailed(Event):
    """The process of ``device`` ended or its code raised (hangs are found by the machine itself)."""

    device: int
    pid: int
    cause_of_failure: FailureCause
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TerminationRequested(Event):
    """SIGTERM, or ``ftd chaos term``: leave gracefully, then exit."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldSnapshots(Event):
    """What the node's memory holds complete and verified: after a start of the daemon."""

    snapshots: tuple[HeldSnapshot, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CopiesHeld(Event):
    """All that this node keeps for others now: it has changed."""

    snapshots: tuple[HeldSnapshot, ...]
    """Each with its ``owner``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyCommitted(Event):
    """The buddy holds all of this node's part of the snapshot, verified."""

    generation: int
    step: int
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotSpoiled(Event):
    """Bytes of the kept snapshot of ``step`` changed here, and cannot be made again."""

    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyFailed(Event):
    generation: int
    step: int
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerSnapping(Event):
    """At the VOTE of ``step``: the copying of the state behind it is about to begin."""

    device: int
    generation: int
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerSnapped(Event):
    """The device's manifest is written."""

    device: int
    generation: int
    step: int
    size_bytes: int
    copy_s: float
    stall_s: float
    idle_bytes: int
    """Copied while the stage had to wait anyway."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerSnapshotFailed(Event):
    device: int
    generation: int
    step: int
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoringFailed(Event):
    """The daemon cannot put together what a device needs of the snapshot that ``TrainerResume`` names."""

    generation: int
    detail: str
    bad: tuple[str, ...] = ()
    """Nodes whose shards cannot be had or are damaged; none: it is this node's own fault."""
    damaged: bool = False
    """It is the persistent checkpoint's fault: a byte is not what was written, or a file is gone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayersWritten(Event):
    """``PersistLayers``: every layer of this node's share is on the disk."""

    attempt: str
    layers: tuple[LayerOnDisk, ...]
    took_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LayersFailed(Event):
    """``PersistLayers``: they cannot be written (a full disk, shards that cannot be had)."""

    attempt: str
    detail: str
