"""State of a job's snapshots and checkpoints in the cluster machine: parts of ``state.Cluster``."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from planner.intervals import IntervalCost
from statemachine.messages.cluster import SnapshotCompleted
from statemachine.messages.values import CheckpointRecord, LayerFile, Snapshot


@dataclass(slots=True, kw_only=True)
class PendingSnapshot:
    """A snapshot from its order until it is complete everywhere or abandoned."""

    generation: int
    after_step: int
    """The newest committed step when the snapshot was ordered; the snapshot is of a later step."""
    began_at: float
    snap_after: int = 0
    """``TakeSnapshot.after_step`` of the order."""
    ordered: tuple[str, ...] = ()
    """Nodes that the order was sent to; empty if another coordinator ordered the snapshot."""
    last: bool = False
    """Whether the snapshot is of the last step, so that trainers are done."""
    urgent: bool = False
    """Whether the snapshot was ordered because the newest one lacks a part."""
    user_requested: bool = False
    """Whether the snapshot was ordered because a user requested one."""
    requests: dict[str, str] = field(default_factory=dict)
    """Requests that this snapshot answers once it is complete (``requests``)."""
    step: int | None = None
    """Step of the snapshot, known once the first node began."""
    completed: dict[str, SnapshotCompleted] = field(default_factory=dict)


def _recent(most: int) -> Callable[[], deque[float]]:
    return lambda: deque(maxlen=most)


@dataclass(slots=True, kw_only=True)
class SnapshotCosts:
    """Durations measured under the current generation, in seconds, for ``intervals``."""

    plain_s: deque[float] = field(default_factory=_recent(32))
    """Durations of steps without a snapshot."""
    copying_s: deque[float] = field(default_factory=_recent(8))
    """Durations of steps during which a snapshot was copied."""
    stall_s: deque[float] = field(default_factory=_recent(8))
    """Times that training waited for a snapshot."""
    last: int = 0
    """Step of the last snapshot that began."""


@dataclass(slots=True, kw_only=True)
class JobSnapshots:
    """The job's snapshots, for ``snapshots`` and ``rollback``."""

    newest: Snapshot | None = None
    """The newest snapshot that is complete everywhere."""
    pending: PendingSnapshot | None = None
    last_order_step: int = 0
    """The newest committed step when the last snapshot was ordered."""
    last_abandoned_step: int = 0
    """Step of the last snapshot that was abandoned under this generation."""
    urgent: bool = False
    """Whether the newest snapshot may lack a part; a snapshot that does is replaced at once."""
    user_requested: bool = False
    """Whether a user requested a snapshot that was not ordered yet."""
    requests: dict[str, str] = field(default_factory=dict)
    """Users' requests that wait for it to be ordered, with what else they changed (``requests``)."""
    abandoned_in_a_row: int = 0
    """Number of consecutive snapshots that were abandoned under this generation."""
    costs: SnapshotCosts = field(default_factory=SnapshotCosts)
    retain_unconfirmed: set[str] = field(default_factory=set)
    """Nodes whose last heartbeats named a different retained snapshot than the newest."""
    measured: IntervalCost | None = None
    """The cost for which this process last chose the interval."""

    @property
    def newest_step(self) -> int:
        """Return the step of the newest snapshot; 0: there is none."""
        return self.newest.step if self.newest is not None else 0


@dataclass(slots=True, kw_only=True)
class CheckpointWrite:
    """A snapshot that is being written as a persistent checkpoint, from the order to the commit."""

    record: Snapshot
    attempt: str
    shares: dict[str, tuple[int, ...]]
    """Layers by the node that writes them."""
    incarnations: dict[str, int]
    """Incarnations of those nodes: a new incarnation does not know the order."""
    sources: dict[str, str]
    """``Persist.sources``."""
    began_at: float
    files: dict[str, tuple[LayerFile, ...]] = field(default_factory=dict)
    """Files by the nodes that are done."""
    committing: bool = False
    """Whether all nodes are done and the manifest is being written."""

    @property
    def unwritten(self) -> list[str]:
        """Return the nodes that have yet to write their share."""
        return [name for name in self.shares if name not in self.files]


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointCost:
    """Measurements from which the interval of checkpoints is chosen."""

    step_s: float
    """Time of a step while no checkpoint is written."""
    cost_s: float
    """Training time that one checkpoint takes."""
    write_s: float
    """Time from the order of a checkpoint until it is complete."""


@dataclass(slots=True, kw_only=True)
class CheckpointCosts:
    """Durations measured under one generation, in seconds, for ``checkpoint_intervals``."""

    generation: int = 0
    plain_s: deque[float] = field(default_factory=_recent(32))
    """Durations of steps during which no checkpoint was written."""
    writing_s: deque[float] = field(default_factory=_recent(32))
    """Durations of steps during which a checkpoint was written."""
    took_s: deque[float] = field(default_factory=_recent(8))
    """Times from the order of a checkpoint until it was complete."""


@dataclass(slots=True, kw_only=True)
class JobCheckpoints:
    """The job's persistent checkpoints, for ``persisting`` and ``rollback``."""

    newest: CheckpointRecord | None = None
    """The last checkpoint that was committed, or that the job continued from."""
    writing: CheckpointWrite | None = None
    last_tried_step: int = 0
    """Step of the last snapshot from which a checkpoint was begun."""
    final_abandoned: bool = False
    """Whether the checkpoint of the last step was abandoned, so that the job ends without it."""
    corrupt_steps: set[int] = field(default_factory=set)
    """Steps of checkpoints that turned out to be corrupt."""
    wait_over: bool = False
    """Whether the wait for nodes with later state is over, so that the job continues from the next checkpoint
    found; until a step is committed.
    """
    state_missing_since: float | None = None
    """Time at which the job first waited for absent nodes with state since a step was committed."""
    unreadable_since: float | None = None
    """Time at which the checkpoint location was first unreadable since a step was committed."""
    retry_at: float = 0.0
    """Time before which it is not read again."""
    unanswered: dict[str, int] = field(default_factory=dict)
    """Steps by attempt whose commit was abandoned before its outcome was known: they may exist."""

    exporting: int | None = None
    """Step of the checkpoint whose export is under way."""
    costs: CheckpointCosts = field(default_factory=CheckpointCosts)
    measured: CheckpointCost | None = None
    """The measurements from which this process last chose the interval."""

    exported_step: int = 0
    """Step of the last checkpoint whose export was completed or abandoned."""

    @property
    def last_step(self) -> int:
        return self.newest.step if self.newest is not None else 0
