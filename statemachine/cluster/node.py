"""The node table (design §3, after REFT §4.4) and the coordinator's view of one node.

The table and the ignored pairs together name every (state, event) pair exactly once; a test holds that.
"""

from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum

from statemachine.messages.values import HeldSnapshot, NodeFacts, NodeState

MAX_RETIRED = 16
"""Incarnations of one name that are remembered as over; older ones are strangers, who must say Hello."""


class NodeEvent(StrEnum):
    """What a node's signals mean to the table."""

    HEALTHY = "HEALTHY"
    """A new incarnation said Hello, or every trainer is back (``Prepared``)."""
    SNAP = "SNAP"
    """A snapshot of a step has begun."""
    COMPLETED = "COMPLETED"
    """This node's part of the snapshot is complete in host memory."""
    COMMITTED = "COMMITTED"
    """Every node completed: the snapshot is globally committed."""
    ABANDONED = "ABANDONED"
    """The snapshot will not be completed everywhere: what this node has of it counts for nothing."""
    UNHEALTHY = "UNHEALTHY"
    """A trainer died, hung or raised; the host and its memory are there."""
    OFFLINE = "OFFLINE"
    """The last will, silence, or the node left."""


_S = NodeState
_E = NodeEvent

TABLE: dict[tuple[NodeState, NodeEvent], NodeState] = {
    (_S.HEALTHY, _E.HEALTHY): _S.HEALTHY,
    (_S.HEALTHY, _E.SNAP): _S.SNAP,
    (_S.HEALTHY, _E.UNHEALTHY): _S.UNHEALTHY,
    (_S.HEALTHY, _E.OFFLINE): _S.OFFLINE,
    (_S.SNAP, _E.COMPLETED): _S.COMPLETED,
    (_S.SNAP, _E.ABANDONED): _S.HEALTHY,
    (_S.SNAP, _E.UNHEALTHY): _S.UNHEALTHY,
    (_S.SNAP, _E.OFFLINE): _S.OFFLINE,
    (_S.COMPLETED, _E.SNAP): _S.SNAP,
    (_S.COMPLETED, _E.COMMITTED): _S.HEALTHY,
    (_S.COMPLETED, _E.ABANDONED): _S.HEALTHY,
    (_S.COMPLETED, _E.UNHEALTHY): _S.UNHEALTHY,
    (_S.COMPLETED, _E.OFFLINE): _S.OFFLINE,
    (_S.UNHEALTHY, _E.HEALTHY): _S.HEALTHY,
    (_S.UNHEALTHY, _E.OFFLINE): _S.OFFLINE,
    (_S.OFFLINE, _E.HEALTHY): _S.HEALTHY,
}

IGNORED: frozenset[tuple[NodeState, NodeEvent]] = frozenset(
    {
        # A part that completes or commits without a snapshot under way is a late message.
        (_S.HEALTHY, _E.COMPLETED),
        (_S.HEALTHY, _E.COMMITTED),
        # It is told to all, whether they had begun or not.
        (_S.HEALTHY, _E.ABANDONED),
        (_S.SNAP, _E.HEALTHY),
        (_S.SNAP, _E.SNAP),
        (_S.SNAP, _E.COMMITTED),
        (_S.COMPLETED, _E.HEALTHY),
        (_S.COMPLETED, _E.COMPLETED),
        # A node without trainers takes no part in snapshots, and cannot become less healthy.
        (_S.UNHEALTHY, _E.SNAP),
        (_S.UNHEALTHY, _E.COMPLETED),
        (_S.UNHEALTHY, _E.COMMITTED),
        (_S.UNHEALTHY, _E.ABANDONED),
        (_S.UNHEALTHY, _E.UNHEALTHY),
        # Nothing but a Hello brings a node back.
        (_S.OFFLINE, _E.SNAP),
        (_S.OFFLINE, _E.COMPLETED),
        (_S.OFFLINE, _E.COMMITTED),
        (_S.OFFLINE, _E.ABANDONED),
        (_S.OFFLINE, _E.UNHEALTHY),
        (_S.OFFLINE, _E.OFFLINE),
    }
)

ALIVE = frozenset({_S.HEALTHY, _S.SNAP, _S.COMPLETED, _S.UNHEALTHY})
USABLE = frozenset({_S.HEALTHY, _S.SNAP, _S.COMPLETED})


@dataclass(slots=True, kw_only=True)
class NodeMachine:
    """One name in the cluster: its present incarnation, and what the coordinator knows of it."""

    name: str
    incarnation: int
    facts: NodeFacts
    state: NodeState = NodeState.OFFLINE
    heard_at: float = 0.0
    """Time of the last signal of this incarnation."""
    prepare_sent: bool = False
    """``Prepare`` was sent for the present job and is not answered."""
    lost_message: tuple[str, float] | None = None
    """What its heartbeats say is missing, and since when (``acknowledgement``)."""
    build_progress: str = ""
    """What its trainers do to build the job, in words."""
    prepared: bool = False
    """Every trainer built the present job."""
    unfit: str | None = None
    """Why this node cannot build the present job (its trainers said so)."""
    draining: str | None = None
    """Reason, when it is to leave the plan."""
    leaving: bool = False
    """It asked to leave itself (SIGTERM there)."""
    released: bool = False
    """It may go: it gets no work until it comes back as a new incarnation."""
    returning: bool = False
    """It lost a trainer and has not taken part since."""
    counted_in: int = 0
    """Last resumed generation whose decision counted this node's report. See ``rules.trusted``."""
    obeyed: int = 0
    """Highest generation this incarnation said it obeyed: whatever it said before that is stale."""
    lost_after: int = 0
    """Generation that was the last resumed one when this node went OFFLINE."""
    gone: bool = False
    """It said goodbye or was fenced: it cannot come back with its state."""
    step: int = 0
    microbatch_ms: tuple[float, ...] = ()
    """``Heartbeat.microbatch_ms``, as last said under generation ``timed_in``."""
    timed_generation: int = 0
    speed: float = 1.0
    """What plans reckon with: below 1 for a straggler, relative to the others (``stragglers``)."""
    speed_changed_at: float | None = None
    """Since when it has computed at another speed than that."""
    snapshots: frozenset[HeldSnapshot] = frozenset()
    """Of the present job, complete in this node's memory as far as it said."""
    part_failures: Counter[HeldSnapshot] = field(default_factory=Counter)
    """How often a part of these turned out to be damaged or not to be had."""
    said_hello: bool = False
    """It said Hello since this coordinator started, and so what it has under way."""
    retained_step: int | None = None
    """``Heartbeat.kept``, as said since the last Hello."""
    retain_sent_step: int = 0
    """Step of the last ``KeepSnapshot`` sent, at ``keep_said_at``."""
    retain_sent_at: float = 0.0
    retired: tuple[int, ...] = ()
    """Incarnations of this name that are over, the last ``RETIRED_KEPT``."""

    def feed(self, event: NodeEvent) -> bool:
        """Take one step in the table; ``False`` when the table ignores the event in this state."""
        key = (self.state, event)
        if key in IGNORED:
            return False
        self.state = TABLE[key]
        return True

    @property
    def alive(self) -> bool:
        return self.state in ALIVE

    @property
    def ready(self) -> bool:
        """May take part in a generation."""
        return self.state in USABLE and self.prepared and not self.released

    def reset_job(self) -> None:
        """The job is over: what was true about this node and that job is no more."""
        self.prepare_sent = self.prepared = self.returning = False
        self.unfit, self.build_progress = None, ""
        self.counted_in = self.step = self.timed_generation = 0
        self.speed, self.speed_changed_at = 1.0, None
        self.snapshots, self.part_failures, self.retain_sent_step = frozenset(), Counter(), 0
