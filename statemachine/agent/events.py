"""Events of the agent machine, one per node: what its trainers did and what its coordinator sent."""

from dataclasses import dataclass

from planner.values import ModelProfile
from statemachine.events import Event
from statemachine.messages.cluster import ToNode
from statemachine.messages.values import (
    DeviceReport,
    Evaluation,
    FailureCause,
    HeldSnapshot,
    LayerOnDisk,
    NodeFacts,
    Vote,
)


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
    """Many times a second. ``progress`` counts the main thread's operations; ``waiting``: for others;
    ``reading``: samples of the data set, which takes as long as disks and file servers make it take."""

    device: int
    progress: int
    waiting: bool
    reading: bool = False
    doing: str = ""
    """What it does before it is prepared, in words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerStarved(Event):
    """It wanted to run for so long, since this was last said, and its host let others run."""

    device: int
    for_s: float


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
    evaluation: Evaluation | None = None
    """Of the state after the last step, if this group evaluated it."""


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
