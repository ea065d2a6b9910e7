"""What the cluster machine knows of a job's snapshots and checkpoints: parts of ``state.Cluster``."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from planner.intervals import SnapshotCost
from statemachine.messages.cluster import SnapshotCompleted
from statemachine.messages.values import Checkpoint, LayerFile, Snapshot


@dataclass(slots=True, kw_only=True)
class PendingSnapshot:
    """A snapshot from its order until it is complete everywhere, or given up."""

    generation: int
    after_step: int
    """It is of a later step than this: the newest committed one when it was ordered."""
    began_at: float
    snap_after: int = 0
    """``Snap.behind`` of the order."""
    ordered: tuple[str, ...] = ()
    """Nodes that it was sent to; empty where another coordinator ordered it."""
    last: bool = False
    """Of the last step, whose trainers are done."""
    urgent: bool = False
    """It was ordered because the newest one lacks a part."""
    user_requested: bool = False
    """It was ordered because a user wants one."""
    step: int | None = None
    """Of which it is; known when the first node began."""
    completed: dict[str, SnapshotCompleted] = field(default_factory=dict)


def _recent(most: int) -> Callable[[], deque[float]]:
    return lambda: deque(maxlen=most)


@dataclass(slots=True, kw_only=True)
class SnapshotCosts:
    """Seconds measured under the present generation, for ``intervals``."""

    plain_s: deque[float] = field(default_factory=_recent(32))
    """Of steps without a snapshot."""
    copying_s: deque[float] = field(default_factory=_recent(8))
    """Of steps beside which one was copied."""
    stall_s: deque[float] = field(default_factory=_recent(8))
    """That training waited for one."""
    last: int = 0
    """Step of the last snapshot that began."""


@dataclass(slots=True, kw_only=True)
class JobSnapshots:
    """The job's snapshots, for ``snapshots`` and ``rollback``."""

    newest: Snapshot | None = None
    """Complete everywhere."""
    pending: PendingSnapshot | None = None
    last_order_step: int = 0
    """The newest committed step when the last one was ordered."""
    last_abandoned_step: int = 0
    """Step of the last one given up under this generation."""
    urgent: bool = False
    """The newest may lack a part: one that does is replaced at once."""
    user_requested: bool = False
    """A user wants one now."""
    abandoned_in_a_row: int = 0
    """So many in a row were given up under this generation."""
    costs: SnapshotCosts = field(default_factory=SnapshotCosts)
    retain_unconfirmed: set[str] = field(default_factory=set)
    """Nodes whose last heartbeats named another one as kept than the newest."""
    measured: SnapshotCost | None = None
    """What the interval was last chosen for, by this process."""


@dataclass(slots=True, kw_only=True)
class CheckpointWrite:
    """A snapshot that is being written to the disk, from the order to the commit."""

    record: Snapshot
    attempt: str
    shares: dict[str, tuple[int, ...]]
    """Layers by the node that writes them."""
    incarnations: dict[str, int]
    """Of those nodes: a new one knows nothing of the order."""
    sources: dict[str, str]
    """``Persist.sources``."""
    began_at: float
    files: dict[str, tuple[LayerFile, ...]] = field(default_factory=dict)
    """By the nodes that are done."""
    committing: bool = False
    """All are done, and the manifest is being written."""


@dataclass(slots=True, kw_only=True)
class JobCheckpoints:
    """The job's persistent checkpoints, for ``checkpoints`` and ``rollback``."""

    newest: Checkpoint | None = None
    """Last committed, or gone on from."""
    writing: CheckpointWrite | None = None
    last_tried_step: int = 0
    """Step of the last snapshot of which one was begun."""
    final_abandoned: bool = False
    """The last step's was given up: the job ends without it."""
    corrupt_steps: set[int] = field(default_factory=set)
    """Steps of those that turned out to be damaged."""
    wait_over: bool = False
    """Nobody came who may hold a later state: the next one is gone on from."""
    unreadable_since: float | None = None
    """When the place could not be read for the first time since a step was committed."""
    retry_at: float = 0.0
    """It is not looked at before this."""
    unanswered: dict[str, int] = field(default_factory=dict)
    """Steps by attempt whose commit was given up before its end was heard of: they may be there yet."""

    exporting: int | None = None
    """Step of the checkpoint whose export is under way."""
    exported_step: int = 0
    """Step of the last checkpoint whose export was complete or given up."""

    @property
    def last_step(self) -> int:
        return self.newest.step if self.newest is not None else 0
