"""Events of the agent machine, one per node: what its trainers did and what its coordinator sent."""

from statemachine.events import Event
from statemachine.messages.cluster import LayersPersisted, PersistFailed, RestoreFailed, ToNode
from statemachine.messages.common import SnapshotFailed
from statemachine.messages.trainer import MachineReport
from statemachine.messages.values import FailureCause, HealthReport, HeldSnapshot, NodeFacts


class AgentStarted(Event, frozen=True, kw_only=True):
    """The daemon has started. ``incarnation`` is new; ``facts`` describe the node."""

    incarnation: int
    facts: NodeFacts


class CommandArrived(Event, frozen=True, kw_only=True):
    message: ToNode


class TrainerConnected(Event, frozen=True, kw_only=True):
    """The trainer process of ``device`` connected and takes instructions."""

    device: int
    pid: int


class TrainerReported(Event, frozen=True, kw_only=True):
    """A message of the trainer of ``device`` was received."""

    device: int
    report: MachineReport


class TrainerStarved(Event, frozen=True, kw_only=True):
    """The trainer was runnable for this long, since the last such event, while its host let other processes
    run.
    """

    device: int
    for_s: float


class TrainerFailed(Event, frozen=True, kw_only=True):
    """The process of ``device`` ended or its code raised. (The machine itself detects hangs.)"""

    device: int
    pid: int
    cause_of_failure: FailureCause
    detail: str


class HealthCheckEnded(Event, frozen=True, kw_only=True):
    """Answer to ``RunHealthCheck``."""

    report: HealthReport


class TerminationRequested(Event, frozen=True, kw_only=True):
    """SIGTERM or ``ftd chaos term`` asked the node to leave gracefully and then to exit."""

    reason: str


class SnapshotsFound(Event, frozen=True, kw_only=True):
    """After a start of the daemon, these snapshots were found complete and verified in the node's memory."""

    snapshots: tuple[HeldSnapshot, ...]


class SnapshotCopiesChanged(Event, frozen=True, kw_only=True):
    """The set of snapshot copies that this node holds for other nodes changed."""

    snapshots: tuple[HeldSnapshot, ...]
    """All copies, each with its ``owner``."""


class SnapshotCopyCommitted(Event, frozen=True, kw_only=True):
    """The replica peer holds all of this node's part of the snapshot, verified."""

    generation: int
    step: int
    size_bytes: int


class SnapshotCorrupted(Event, frozen=True, kw_only=True):
    """Bytes of the retained snapshot of ``step`` are corrupt here and cannot be repaired."""

    step: int


class SnapshotRepaired(Event, frozen=True, kw_only=True):
    """Bytes of the retained snapshot of ``step`` had changed in this node's memory, and all were repaired."""

    step: int


class SnapshotCopyFailed(Event, frozen=True, kw_only=True):
    """Answer to ``SendSnapshotCopy``: the replica peer has no copy of this node's part of the snapshot."""

    failure: SnapshotFailed


class StagingFailed(Event, frozen=True, kw_only=True):
    """The daemon cannot reconstruct what a device needs of the snapshot that ``ResumeTrainer`` names."""

    failure: RestoreFailed


class PersistEnded(Event, frozen=True, kw_only=True):
    """Answer to ``PersistLayers``: every layer of this node's share is on the disk, or they cannot be written
    (a full disk, unavailable shards).
    """

    answer: LayersPersisted | PersistFailed
