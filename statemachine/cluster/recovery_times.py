"""The duration of a recovery and of its phases: the one place that computes them.

A recovery lasts from the fault, or its best estimate, to the next committed step::

    detected_ms   the fault … the coordinator knows of the loss; ``None`` if nothing is known before that
    waited_ms     … enough nodes are present again; 0 if training did not have to pause
    quiesce_ms    … every survivor has stopped and reported
    plan_ms       … the plan is chosen
    state_ms      … all ranks have met and hold their layers
    resume_ms     … the next step is committed
    total_ms      the sum of them

``RecoveryCompleted`` carries these numbers, and everything else (report, dashboard, metrics, soak) shows them.
The best estimate of a fault is the moment announced by its injection, unless a step was committed with the node
since; else the last sign of life: the last message of a silent node, the last progress of a trainer that hangs.
"""

from collections.abc import Collection, Iterable

from statemachine.cluster.node import NodeMachine
from statemachine.cluster.phases import ActiveRecovery
from statemachine.cluster.state import LOSSES, AnnouncedFault, Cluster
from statemachine.events import FaultAnnounced
from statemachine.messages.values import RECOVERY_PHASES

FAULT_ATTRIBUTION_S = 60.0
"""Longest time between an injected fault and a loss that is attributed to it."""
REPORTED_S = 2.0
"""Longest time between a commit and its report, unless the broker was away."""
SAME_CLOCK_S = 5.0
"""Largest age of an event by its publisher's clock at which that clock counts as this host's."""


def take_announced_fault(c: Cluster, event: FaultAnnounced) -> None:
    """Remember the moment of a fault that is about to be injected into a node, on this host's clock."""
    own_clock = 0 <= event.at - event.announced_at < SAME_CLOCK_S
    fault_at = event.fault_at if own_clock else event.at + event.fault_at - event.announced_at
    c.faults[event.node] = AnnouncedFault(at=fault_at)


def note_survivors(c: Cluster, nodes: Collection[str], since: float) -> None:
    """Note that these nodes committed a step: a fault before ``since`` did not interrupt them."""
    for name in c.faults.keys() & nodes:
        c.faults[name].outlived |= c.faults[name].at < since


def note_time_of_failure(c: Cluster, node: NodeMachine, estimate_at: float | None = None) -> float | None:
    """Note when a node or its trainer that is lost now really failed, and return that time, or ``None`` if
    nothing is known before the loss was noticed.

    :param estimate_at: time of its last sign of life.
    """
    fault = c.faults.pop(node.name, None)
    node.failed_by_fault = fault is not None and 0 <= c.at - fault.at <= FAULT_ATTRIBUTION_S
    if fault is not None and node.failed_by_fault and not fault.outlived:
        node.failed_at, node.measured_from = fault.at, "fault"
    elif estimate_at is not None:
        node.failed_at, node.measured_from = min(estimate_at, c.at), "estimate"
    else:
        node.failed_at, node.measured_from = None, "detection"
    return node.failed_at


def find_begin(c: Cluster, record: ActiveRecovery, nodes: Iterable[str]) -> None:
    """Move the begin of a recovery back to the earliest known failure of these nodes."""
    for name in nodes:
        node = c.nodes.get(name)
        if node is None or not (record.cause in LOSSES or record.cause == "node_drained"):
            continue
        if record.cause == "node_drained":
            note_time_of_failure(c, node)
        if node.failed_at is not None and node.failed_at < record.began_at:
            record.began_at, record.measured_from = node.failed_at, node.measured_from
        node.failed_at = None


def estimate_begin(record: ActiveRecovery, at: float) -> None:
    """Move the begin of a recovery back to ``at``, the first hint of what is noticed now."""
    if at < record.began_at:
        record.began_at, record.measured_from = at, "estimate"


def continue_after_pause(record: ActiveRecovery, past: ActiveRecovery, at: float) -> None:
    """Let a recovery continue the times of the one that had to wait for nodes: training has stood still since."""
    record.detected_at, record.waited_until = past.detected_at, at
    record.detected_how = record.detected_how or past.detected_how
    record.began_at, record.measured_from = past.began_at, past.measured_from


def durations_ms(record: ActiveRecovery) -> dict[str, float | None]:
    """Return the duration of each phase and ``total_ms``, in milliseconds to the microsecond.

    Each phase is the difference of two rounded times since the begin, so the phases add up to the total.
    """
    ends = (
        record.detected_at,
        record.waited_until,
        record.quiesced_at,
        record.planned_at,
        record.resumed_at,
        record.committed_at,
    )
    found: dict[str, float | None] = {}
    since_us = 0
    for name, end in zip(RECOVERY_PHASES.values(), ends, strict=True):
        end_us = since_us if end is None else max(since_us, round(1e6 * (end - record.began_at)))
        found[name] = (end_us - since_us) / 1e3
        since_us = end_us
    if record.measured_from == "detection":
        found["detected_ms"] = None
    return {**found, "total_ms": since_us / 1e3}
