"""Health checks: nodes whose devices compute wrongly are in no plan, and neither are slow ones.

A node tests its devices before it may take part, and in orders of the coordinator while it is idle (``agent.health``).
A wrong product proves that the device is bad, and the node is set aside at once (``quarantine``). Speed is relative:
a device is slow if it reaches less than ``HealthLimits.min_speed`` of the median of the other nodes' devices of the
same kind. Since a busy host is slow once, the check is repeated at once, and the node is set aside if it is slow
again; it is not taken in before. A test that hangs or crashes counts like a slow one. While fewer than
``HealthLimits.min_others`` others are known, speeds are not compared, and the repeated test is passed if it ends. The
network is judged by the quickest of the transfers from some random peers, so that a slow peer does not count.

Nodes that train are not tested, and their speed is the matter of ``stragglers``.

A node that was set aside because it was slow is readmitted when it has passed two checks in a row. One whose
results were wrong stays until a user readmits it, since a device that is wrong at times is as bad; it is tested once
more before it takes part.
"""

import hashlib
from statistics import median

from planner.reasons import three_digits
from statemachine.cluster.node import USABLE, DeviceSpeeds, NodeMachine
from statemachine.cluster.phases import Planning, Quiescing, Running
from statemachine.cluster.quarantine import (
    HEALTH_CAUSES,
    WRONG_RESULTS,
    make_failure,
    quarantine_node,
    readmit_command,
    readmit_node,
)
from statemachine.cluster.recovery import recover_from_loss
from statemachine.cluster.state import Cluster
from statemachine.messages.cluster import CheckHealth
from statemachine.messages.values import HealthReport, NodeFailure, ReplicaPeer

_IN_A_ROW = 2
"""Slow checks after which a node is set aside, and passed ones after which it is readmitted."""
_PEERS = 3
"""Peers from which a transfer is timed."""
_ORDERED_AGAIN_S = 10.0
"""Time after which a check that was ordered and not reported is ordered again."""
_ORDERS_PER_TICK = 50


def restore(c: Cluster) -> None:
    """Continue after a restart of the coordinator. The nodes report their last results again, which are judged again,
    unless a node is to be tested once more: it was readmitted since, or its last result was bad.
    """
    for node in c.nodes.values():
        node.health_pending &= c.hardware.health.enabled
        node.suspected &= c.hardware.health.enabled
        if not (node.health_pending or node.suspected or node.quarantine is not None):
            node.judged_check = 0


# --- results --------------------------------------------------------------------------------------


def take_report(c: Cluster, node: NodeMachine, report: HealthReport) -> None:
    """Take the result of a check, and set the node aside if its devices are bad."""
    if node.health is not None and report.number <= node.health.number:
        return
    node.health, node.health_at, node.device_speeds = report, c.at, _speeds_by_kind(report)
    c.publish()
    if report.number <= node.judged_check:
        return
    node.health_pending, node.health_ordered_at = False, None
    c.dirty = True
    if c.hardware.health.enabled:
        _judge(c, node)


def judge_waiting(c: Cluster) -> None:
    """Judge results that could not be compared with others so far; called at every tick."""
    waiting, c.unjudged_health = c.unjudged_health, set()
    for name in sorted(waiting):
        if (node := c.nodes.get(name)) is not None and node.alive:
            _judge(c, node)


def _judge(c: Cluster, node: NodeMachine) -> None:
    report = node.health
    if report is None or report.number <= node.judged_check:
        return
    wrong = [f"device {one.device}: {one.wrong}" for one in report.devices if one.wrong]
    if wrong:
        node.judged_check = report.number
        _note_bad(c, node, (make_failure(c, "wrong_device", "; ".join(wrong)),))
        return
    if _is_needed(c, node):
        c.unjudged_health.add(node.name)  # Its speed is judged later.
        return
    slow, compared = _find_slow(c, node, report)
    doubted = bool(node.slow_checks) or node.suspected or node.quarantine is not None
    if slow is None and not compared and not doubted:
        c.unjudged_health.add(node.name)
        return
    node.judged_check = report.number
    c.dirty = True  # It may take part now, and a tick brings nothing else that a paused job would notice.
    c.publish()
    if slow is None:
        _note_passed(c, node)
        return
    node.slow_checks = (*node.slow_checks, slow)
    node.health_problem, node.passed_checks = slow.detail, 0
    node.suspected = not _in_use(c, node)
    if len(node.slow_checks) >= _IN_A_ROW:
        _note_bad(c, node, node.slow_checks)


def _note_bad(c: Cluster, node: NodeMachine, evidence: tuple[NodeFailure, ...]) -> None:
    last = evidence[-1]
    node.health_problem, node.passed_checks = last.detail, 0
    node.suspected, node.slow_checks = False, ()
    if node.quarantine is not None:
        return
    in_use = _in_use(c, node)
    reason = f"its health check failed: {last.detail}"
    if quarantine_node(c, node, last.cause, evidence, reason, fenced=in_use) and in_use:
        recover_from_loss(c, node, "node_lost", "quarantine", f"{node.name} is set aside")


def _note_passed(c: Cluster, node: NodeMachine) -> None:
    node.health_problem, node.suspected, node.slow_checks = "", False, ()
    aside = node.quarantine
    if aside is None or aside.cause not in HEALTH_CAUSES:
        return
    node.passed_checks += 1
    if aside.cause not in WRONG_RESULTS and node.passed_checks >= _IN_A_ROW:
        readmit_node(c, node, "health", f"it passed {_IN_A_ROW} health checks in a row")
    elif node.passed_checks == 1:
        command = readmit_command(node)
        then = (
            f"it stays set aside, because its results were wrong before; to readmit it: {command}"
            if aside.cause in WRONG_RESULTS
            else "it takes part again if it passes the next one too"
        )
        c.emit(
            "HealthCheckPassed",
            f"{node.name} passed a health check; {then}",
            node=node.name,
            cause=aside.cause,
        )


def _is_needed(c: Cluster, node: NodeMachine) -> bool:
    """Return whether a node trains, or may hold state that a job needs which does not train at present."""
    may_hold_state = c.active and node.counted_in > 0 and not isinstance(c.state, Running)
    return node.name in c.planned or may_hold_state


def _in_use(c: Cluster, node: NodeMachine) -> bool:
    return node.name in c.members or node.name in c.required_nodes


# --- comparison -----------------------------------------------------------------------------------


def _find_slow(c: Cluster, node: NodeMachine, report: HealthReport) -> tuple[NodeFailure | None, bool]:
    """Return what is slow, if anything is, and whether enough other nodes are known to compare everything."""
    others = [one for one in c.alive() if one is not node and one.health is not None]
    compared = True
    usual = {kind: _usual_speeds(c, others, kind) for kind in node.device_speeds}
    for device in report.devices:
        name = f"device {device.device}"
        if device.failed:
            return make_failure(c, "slow_device", f"{name}: {device.failed}"), True
        for own, other, what, unit in (
            (device.compute_gflops, usual[device.kind].compute_gflops, "matrix products", "GFLOP/s"),
            (device.memory_gb_s, usual[device.kind].memory_gb_s, "copies in memory", "GB/s"),
        ):
            compared = compared and (other > 0 or own <= 0)
            if 0 < own < c.hardware.health.min_speed * other:
                detail = (
                    f"{name} ({device.kind}): {what} at {three_digits(own)} {unit}, "
                    f"and the other nodes at {three_digits(other)}"
                )
                return make_failure(c, "slow_device", detail), True
    fewest = c.hardware.health.min_others
    own, other = _link_speed(node), _usual([_link_speed(one) for one in others], fewest)
    if 0 < own < c.hardware.health.min_link_speed * other:
        detail = (
            f"transfers from other nodes at {three_digits(own)} MB/s, "
            f"and those of the other nodes at {three_digits(other)}"
        )
        return make_failure(c, "slow_link", detail), True
    return None, compared


def _usual_speeds(c: Cluster, others: list[NodeMachine], kind: str) -> DeviceSpeeds:
    """Return the medians of the other nodes' devices of a kind; 0: too few are known."""
    speeds = [one.device_speeds[kind] for one in others if kind in one.device_speeds]
    fewest = c.hardware.health.min_others
    return DeviceSpeeds(
        compute_gflops=_usual([one.compute_gflops for one in speeds], fewest),
        memory_gb_s=_usual([one.memory_gb_s for one in speeds], fewest),
    )


def _usual(speeds: list[float], fewest: int = 1) -> float:
    """Return the median of the known speeds; 0 if there are fewer than ``fewest``."""
    known = [speed for speed in speeds if speed > 0]
    return median(known) if len(known) >= max(fewest, 1) else 0.0


def _speeds_by_kind(report: HealthReport) -> dict[str, DeviceSpeeds]:
    """Return the median speeds of a node's devices, by their kind."""
    return {
        kind: DeviceSpeeds(
            compute_gflops=_usual([one.compute_gflops for one in report.devices if one.kind == kind]),
            memory_gb_s=_usual([one.memory_gb_s for one in report.devices if one.kind == kind]),
        )
        for kind in {one.kind for one in report.devices}
    }


def _link_speed(node: NodeMachine) -> float:
    """Return the speed of the quickest transfer to a node; 0 if it is unknown."""
    return max((link.mb_s for link in node.health.links), default=0.0) if node.health is not None else 0.0


# --- orders ---------------------------------------------------------------------------------------


def order_checks(c: Cluster) -> None:
    """Order the checks that are due on nodes that do not work; called at every tick."""
    left = _ORDERS_PER_TICK
    serving = [one for one in c.alive() if one.state in USABLE and one.facts.snapshot_port]
    hosts = {one.facts.host for one in serving}
    for node in c.alive():
        if not left:
            return
        ordered = node.health_ordered_at
        if not _may_be_checked(c, node) or (ordered is not None and c.at - ordered < _ORDERED_AGAIN_S):
            continue
        first_links = not node.links_ordered and bool(hosts - {node.facts.host})
        if first_links or _is_due(c, node):
            peers = _choose_peers(node, serving)
            node.health_ordered_at, node.links_ordered = c.at, node.links_ordered or bool(peers)
            c.send(node, CheckHealth(peers=peers))
            left -= 1


def _may_be_checked(c: Cluster, node: NodeMachine) -> bool:
    awaited = isinstance(c.state, Quiescing | Planning) and node.name in c.required_nodes
    measures = node.name == c.profiler and not c.profiled
    return node.health is not None and node.name not in c.planned and not awaited and not measures


def _is_due(c: Cluster, node: NodeMachine) -> bool:
    """Return whether a result is missing or old; a slow one is repeated at once."""
    if node.health_ordered_at is not None or node.health_pending or node.slow_checks or node.suspected:
        return True
    every_s = c.hardware.health.every_s
    return not node.prepare_sent and 0 < every_s <= c.at - node.health_at


def _choose_peers(node: NodeMachine, serving: list[NodeMachine]) -> tuple[ReplicaPeer, ...]:
    """Return some nodes on other hosts, whose snapshot servers answer: others for each check."""
    there = [one for one in serving if one.facts.host != node.facts.host]
    count = min(_PEERS, len(there))
    number = node.health.number if node.health is not None else 0
    first = int.from_bytes(hashlib.sha256(f"{node.name}:{number}".encode()).digest()[:8])
    chosen = [there[(first + at * len(there) // count) % len(there)] for at in range(count)]
    return tuple(ReplicaPeer(node=one.name, address=one.facts.snapshot_server) for one in chosen)
