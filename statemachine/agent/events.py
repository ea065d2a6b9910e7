"""Events of the agent machine, one per node: what its trainers did and what its coordinator sent."""

from dataclasses import dataclass

from statemachine.events import Event
from statemachine.messages.cluster import LayersPersisted, PersistFailed, RestoreFailed, ToNode
from statemachine.messages.common import SnapshotFailed
from statemachine.messages.trainer import MachineReport
from statemachine.messages.values import FailureCause, HealthReport, HeldSnapshot, NodeFacts


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentStarted(Event):
    """The daemon has started. ``incarnation`` is new; ``facts`` describe the node."""

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
    """A message of the trainer of ``device`` was received."""

    device: int
    report: MachineReport


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerStarved(Event):
    """The trainer was runnable for this long, since the last such event, while its host let other processes
    run.
    """

    device: int
    for_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerFailed(Event):
    """The process of ``device`` ended or its code raised. (The machine itself detects hangs.)"""

    device: int
    pid: int
    cause_of_failure: FailureCause
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthCheckEnded(Event):
    """Answer to ``RunHealthCheck``."""

    report: HealthReport


@dataclass(frozen=True, slots=True, kw_only=True)
class TerminationRequested(Event):
    """SIGTERM or ``ftd chaos term`` asked the node to leave gracefully and then to exit."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotsFound(Event):
    """After a start of the daemon, these snapshots were found complete and verified in the node's memory."""

    snapshots: tuple[HeldSnapshot, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotCopiesChanged(Event):
    """The set of snapshot copies that this node holds for other nodes changed."""

    snapshots: tuple[HeldSnapshot, ...]
    """All copies, each with its ``owner``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotCopyCommitted(Event):
    """The replica peer holds all of this node's part of the snapshot, verified."""

    generation: int
    step: int
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotCorrupted(Event):
    """Bytes of the retained snapshot of ``step`` are corrupt here and cannot be repaired."""

    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotRepaired(Event):
    """Bytes of the retained snapshot of ``step`` had changed in this node's memory, and all were repaired."""

    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotCopyFailed(Event):
    """Answer to ``SendSnapshotCopy``: the replica peer has no copy of this node's part of the snapshot."""

    failure: SnapshotFailed


@dataclass(frozen=True, slots=True, kw_only=True)
class StagingFailed(Event):
    """The daemon cannot reconstruct what a device needs of the snapshot that ``ResumeTrainer`` names."""

    failure: RestoreFailed


@dataclass(frozen=True, slots=True, kw_only=True)
class PersistEnded(Event):
    """Answer to ``PersistLayers``: every layer of this node's share is on the disk, or they cannot be written
    (a full disk, unavailable shards).
    """

    answer: LayersPersisted | PersistFailed
