"""Events of the agent machine, one per node: what its trainers did and what its coordinator sent."""

from dataclasses import dataclass

from statemachine.events import Event
from statemachine.messages.cluster import LayersPersisted, PersistFailed, RestoreFailed, ToNode
from statemachine.messages.common import SnapshotFailed
from statemachine.messages.trainer import MachineReport
from statemachine.messages.values import FailureCause, HeldSnapshot, NodeFacts


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentStarted(Event):
    """The daemon is up. ``incarnation`` is fresh; ``facts`` describe the node."""

    incarnation: int
    facts: NodeFacts


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandArrived(Event):
    message: ToNode


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerConnected(Event):
    """The trainer process of ``device`` connected and takes instructions."""

    device: int
    pid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerReported(Event):
    """A message of the trainer of ``device``."""

    device: int
    report: MachineReport


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerStarved(Event):
    """It wanted to run for so long, since this was last said, and its host let others run."""

    device: int
    for_s: float


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
class SnapshotsFound(Event):
    """What the node's memory holds complete and verified: after a start of the daemon."""

    snapshots: tuple[HeldSnapshot, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotCopiesChanged(Event):
    """All that this node keeps for others now: it has changed."""

    snapshots: tuple[HeldSnapshot, ...]
    """Each with its ``owner``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotCopyCommitted(Event):
    """The buddy holds all of this node's part of the snapshot, verified."""

    generation: int
    step: int
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotCorrupted(Event):
    """Bytes of the kept snapshot of ``step`` changed here, and cannot be made again."""

    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotCopyFailed(Event):
    """``SendSnapshotCopy``: the buddy has no copy of this node's part of the snapshot."""

    failure: SnapshotFailed


@dataclass(frozen=True, slots=True, kw_only=True)
class StagingFailed(Event):
    """The daemon cannot put together what a device needs of the snapshot that ``ResumeTrainer`` names."""

    failure: RestoreFailed


@dataclass(frozen=True, slots=True, kw_only=True)
class PersistEnded(Event):
    """``PersistLayers``: every layer of this node's share is on the disk, or they cannot be written (a full disk,
    shards that cannot be had)."""

    answer: LayersPersisted | PersistFailed
