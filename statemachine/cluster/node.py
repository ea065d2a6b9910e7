"""The node table (after REFT §4.4) and the coordinator's view of one node.

The table names every (state, event) pair, which a test checks.
"""

from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum

from statemachine.messages.values import (
    BuildProgress,
    HealthReport,
    HeldSnapshot,
    MeasuredFrom,
    NodeFacts,
    NodeFailure,
    NodeState,
    Quarantine,
)

MAX_RETIRED = 16
"""Past incarnations of one name that are remembered; older ones count as unknown and must send Hello."""


class NodeEvent(StrEnum):
    """Events of the node table, derived from a node's signals."""

    HEALTHY = "HEALTHY"
    """A new incarnation sent Hello, or every trainer is back (``Prepared``)."""
    SNAP = "SNAP"
    """A snapshot of a step has begun."""
    COMPLETED = "COMPLETED"
    """This node's part of the snapshot is complete in host memory."""
    COMMITTED = "COMMITTED"
    """Every node completed: the snapshot is globally committed."""
    ABANDONED = "ABANDONED"
    """The snapshot will not be completed everywhere: what this node has of it does not count."""
    UNHEALTHY = "UNHEALTHY"
    """A trainer died, hung or raised; the host and its memory are there."""
    OFFLINE = "OFFLINE"
    """The broker published the last will, the node was silent, or it left."""


_S = NodeState

_ROWS: dict[NodeState, tuple[NodeState | None, ...]] = {
    # HEALTHY, SNAP, COMPLETED, COMMITTED, ABANDONED, UNHEALTHY, OFFLINE
    _S.HEALTHY: (_S.HEALTHY, _S.SNAP, None, None, None, _S.UNHEALTHY, _S.OFFLINE),
    _S.SNAP: (None, None, _S.COMPLETED, None, _S.HEALTHY, _S.UNHEALTHY, _S.OFFLINE),
    _S.COMPLETED: (None, _S.SNAP, None, _S.HEALTHY, _S.HEALTHY, _S.UNHEALTHY, _S.OFFLINE),
    _S.UNHEALTHY: (_S.HEALTHY, None, None, None, None, None, _S.OFFLINE),
    _S.OFFLINE: (_S.HEALTHY, None, None, None, None, None, None),
}
"""State that follows each event, in the order of ``NodeEvent``; ``None``: the event is ignored.

A part that completes or commits without a snapshot under way is a late message, and all nodes receive ABANDONED,
whether they had begun or not. A node without trainers takes no part in snapshots, and cannot become less healthy.
Only a Hello brings a node back.
"""

TABLE: dict[tuple[NodeState, NodeEvent], NodeState] = {
    (state, event): after
    for state, row in _ROWS.items()
    for event, after in zip(NodeEvent, row, strict=True)
    if after is not None
}

ALIVE = frozenset({_S.HEALTHY, _S.SNAP, _S.COMPLETED, _S.UNHEALTHY})
USABLE = frozenset({_S.HEALTHY, _S.SNAP, _S.COMPLETED})


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSpeeds:
    """Median speeds of a node's devices of one kind; 0: not measured."""

    compute_gflops: float
    memory_gb_s: float


@dataclass(slots=True, kw_only=True)
class NodeMachine:
    """One name in the cluster: its current incarnation, and what the coordinator knows of it."""

    name: str
    incarnation: int
    facts: NodeFacts
    state: NodeState = NodeState.OFFLINE
    heard_at: float = 0.0
    """Time of the last signal of this incarnation."""
    prepare_sent: bool = False
    """Whether ``Prepare`` was sent for the current job and is not answered."""
    lost_message: tuple[str, float] | None = None
    """Order or report that is missing according to the node's heartbeats, and since when
    (``acknowledgement``).
    """
    building: BuildProgress | None = None
    """``Heartbeat.building``, as last reported."""
    prepared: bool = False
    """Whether every trainer has built the current job."""
    build_error: str | None = None
    """Reason why this node cannot build the current job, as its trainers reported it."""
    draining: str | None = None
    """Reason why the node is to leave the plan; ``None``: it is not."""
    drain_granted: bool = False
    """Whether there was a plan without it when that was last asked: it leaves at the next step boundary."""
    drain_waits: str = ""
    """Reason why there is no plan without it, so that it stays for now although it is to leave."""
    leaving: bool = False
    """Whether the node asked to leave by itself (SIGTERM there)."""
    released: bool = False
    """Whether the node may leave: it gets no work until it returns as a new incarnation."""
    returning: bool = False
    """Whether the node lost a trainer and has not taken part since."""
    trainers_lost: bool = False
    """True from the loss of a trainer until the node has built the job again. The loss counts once: a node that
    was absent meanwhile reports it again.
    """
    counted_in: int = 0
    """Last resumed generation whose decision counted this node's report. See ``rules.is_trusted``."""
    obeyed: int = 0
    """Highest generation that this incarnation reported to have obeyed; whatever it sent before that is stale."""
    lost_after: int = 0
    """The last resumed generation when this node went OFFLINE."""
    ended: bool = False
    """Whether the incarnation said goodbye or was fenced, so that it cannot return with its state."""
    fenced: bool = False
    """Whether the incarnation was fenced, so that its daemon returns as a new one by itself."""
    step: int = 0
    microbatch_ms: tuple[float, ...] = ()
    """``Heartbeat.microbatch_ms``, as last reported under ``timed_generation``."""
    timed_generation: int = 0
    speed: float = 1.0
    """Speed that plans assume: below 1 for a straggler, relative to the others (``stragglers``)."""
    speed_changed_at: float | None = None
    """Time since which the node has computed at a different speed."""
    snapshots: frozenset[HeldSnapshot] = frozenset()
    """Snapshots of the current job that the node reported complete in its memory."""
    part_failures: Counter[HeldSnapshot] = field(default_factory=Counter)
    """Number of times that a part of each of these snapshots turned out to be corrupt or unavailable."""
    failed_at: float | None = None
    """Time at which the node or its trainer really failed when it was last lost, as far as that is known."""
    measured_from: MeasuredFrom = "detection"
    """Meaning of ``failed_at``, as in the record of a recovery."""
    failed_by_fault: bool = False
    """True if an injected fault explains that loss, so that it does not count against the node."""
    said_hello: bool = False
    """Whether the node sent Hello since this coordinator started, so that its pending work is known."""
    retained_step: int | None = None
    """``Heartbeat.retained_step``, as reported since the last Hello."""
    repairs: int | None = 0
    """``Heartbeat.repairs``, as last reported; ``None`` until a restarted coordinator hears it."""
    retain_sent_step: int = 0
    """Step of the last ``RetainSnapshot``, which was sent at ``retain_sent_at``."""
    retain_sent_at: float = 0.0
    failures: tuple[NodeFailure, ...] = ()
    """Recent failures that count towards a quarantine, oldest first (``quarantine``)."""
    health: HealthReport | None = None
    """Result of the last health check of this incarnation, as reported …"""
    health_at: float = 0.0
    """… at this time."""
    device_speeds: dict[str, DeviceSpeeds] = field(default_factory=dict)
    """Speeds of its devices in that check, by kind."""
    health_pending: bool = False
    """Whether it takes part only when another health check has ended."""
    health_ordered_at: float | None = None
    """Time at which a health check was ordered that is not reported yet."""
    links_ordered: bool = False
    """Whether a check of its links was ordered."""
    judged_check: int = 0
    """Number of the last health check that was compared with the other nodes', or that no longer counts."""
    slow_checks: tuple[NodeFailure, ...] = ()
    """Results of the last health checks in a row that were slow."""
    suspected: bool = False
    """Whether it takes no part because its check was slow, until that was repeated."""
    passed_checks: int = 0
    """Number of health checks in a row that it passed while it was set aside."""
    health_problem: str = ""
    """Problem that its last health check found; empty: none."""
    quarantine: Quarantine | None = None
    """Reason why the node is set aside, across incarnations and jobs; ``None``: it is not."""
    needed_by: int = 0
    """Number of the other nodes when they had no plan for the job without it, so that it was readmitted; 0: they
    had, as far as known.
    """
    retired: tuple[int, ...] = ()
    """Past incarnations of this name, the last ``MAX_RETIRED``."""

    def feed(self, event: NodeEvent) -> None:
        """Take one step in the table."""
        self.state = TABLE.get((self.state, event), self.state)

    @property
    def alive(self) -> bool:
        return self.state in ALIVE

    @property
    def ready(self) -> bool:
        """Return whether it may take part in a generation."""
        usable = self.state in USABLE and self.prepared and not self.released
        return usable and self.quarantine is None and not self.health_pending and not self.suspected

    @property
    def departing(self) -> bool:
        """Return whether it leaves, or has left: no plan from the next step boundary on uses it."""
        return self.draining is not None and (self.drain_granted or self.released)

    def reset_job(self) -> None:
        """Reset what was known about this node and a job that is over."""
        self.prepare_sent = self.prepared = self.returning = self.trainers_lost = False
        self.build_error = None
        self.counted_in = self.step = self.timed_generation = self.needed_by = 0
        self.speed, self.speed_changed_at = 1.0, None
        self.snapshots, self.part_failures, self.retain_sent_step = frozenset(), Counter(), 0
