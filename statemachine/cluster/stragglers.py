"""Stragglers: nodes that have become slow are detected, reported, and given less work until they recover.

Heartbeats say how long each device computes on one microbatch without waiting (runtime/watch/stopwatch.py).
That time over the profile's time for the same layers is the slowness of the device, and a node is as slow
as its slowest device. A wrong profile is wrong for all nodes alike, so what counts is the slowness relative
to the cluster's median. Of two middle nodes the faster one counts, as with two nodes of which one is slow.
A node that stays slow for a while is a straggler: its speed goes into every plan from then on.

Before a new plan is used because of speeds alone, its gain is computed (``ComparePlan``) while training
continues. Only if it saves a notable part of a step, and in the remaining steps more than a reconfiguration
costs, the nodes stop at a step boundary, on the path of a join.
"""

from statistics import median_low

from planner.reasons import count_noun, three_digits
from planner.stages.layers import expected_ms
from planner.values import Situation
from statemachine.cluster.node import NodeMachine
from statemachine.cluster.phases import Running
from statemachine.cluster.recovery import note_cause, reconfigure
from statemachine.cluster.rules import owned_layers
from statemachine.cluster.state import JOIN, Cluster
from statemachine.effects import ComparePlan
from statemachine.events import PlanCompared
from statemachine.messages.cluster import Heartbeat


def take_times(node: NodeMachine, signal: Heartbeat) -> None:
    if signal.microbatch_ms is not None:
        node.microbatch_ms, node.timed_generation = signal.microbatch_ms, signal.generation


def check_stragglers(c: Cluster) -> None:
    """Check which nodes are slow or fast again, and whether another plan is worth it; called at every tick."""
    if not _steady(c):
        for node in c.nodes.values():
            node.speed_changed_at = None
        return
    found = _slowness(c)
    if found is None:
        return
    usual = c.straggler_state.profile_error = median_low(found.values())
    for name, slowness in sorted(found.items()):
        _update_speed(c, c.nodes[name], usual / slowness)
    _compare(c)


def _steady(c: Cluster) -> bool:
    """Return whether the group trains and nothing else is about to change it."""
    return isinstance(c.state, Running) and c.recovery is None


def _slowness(c: Cluster) -> dict[str, float] | None:
    """Return measured over expected time of each planned node; ``None`` while some node's is not known."""
    if c.profiled is None or c.resumption is None:
        return None
    plan, balance = c.resumption.plan, c.straggler_state
    if balance.expected_for is not plan:
        balance.expected_for = plan
        balance.expected_ms = expected_ms(c.profiled.profile, c.profiled.job.policy, plan.pipelines)
    found: dict[str, float] = {}
    for device, expected in balance.expected_ms.items():
        node = c.nodes.get(device.node)
        if node is None or node.timed_generation != c.generation or device.index >= len(node.microbatch_ms):
            return None
        measured = node.microbatch_ms[device.index]
        if measured > 0 and expected > 0:
            found[device.node] = max(found.get(device.node, 0.0), measured / expected)
    return found if len(found) == len(plan.nodes) else None


def _update_speed(c: Cluster, node: NodeMachine, speed: float) -> None:
    """Report a change of speed once the node's speed has differed for long enough from the one that plans
    assume.
    """
    timing = c.timing
    slow = speed < timing.straggler_speed
    if node.speed == 1.0:
        odd = slow
    else:
        another = not node.speed * timing.straggler_speed <= speed <= node.speed / timing.straggler_speed
        odd = speed >= timing.straggler_recovered_speed or (slow and another)
    if not odd:
        node.speed_changed_at = None
        return
    if node.speed_changed_at is None:
        node.speed_changed_at = c.at
    if c.at - node.speed_changed_at < timing.straggler_s:
        return
    node.speed_changed_at = None
    before, node.speed = node.speed, round(max(speed, 0.01), 2) if slow else 1.0
    if slow:
        name, reason = "StragglerDetected", f"{node.name} computes at {node.speed:.0%} of the others' speed"
    else:
        name, reason = "StragglerRecovered", f"{node.name} is as fast as the others again"
    c.emit(
        name,
        reason,
        node=node.name,
        speed=node.speed,
        previous_speed=before,
        microbatch_ms=list(node.microbatch_ms),
    )
    c.persist()
    c.publish()


def _compare(c: Cluster) -> None:
    """Ask what another plan would save, if speeds differ from those that the plan was made for."""
    balance, group = c.straggler_state, c.state
    if not isinstance(group, Running) or not c.templates_ready:
        return
    if c.speeds == balance.speeds or JOIN in c.due:
        return
    if balance.pending_comparison is not None and balance.pending_comparison.generation == c.generation:
        return
    if balance.compared_at is not None and c.at - balance.compared_at < c.timing.straggler_replan_s:
        return
    usable = tuple(name for name in sorted(group.members) if c.nodes[name].ready)
    situation = Situation(
        nodes=usable,
        holdings=owned_layers(group.resumption.plan),
        previous=group.resumption.plan,
        speeds=c.speeds,
        horizon_s=c.horizon_s(len(usable)),
    )
    balance.pending_comparison = ComparePlan(cause=c.cause, generation=c.generation, situation=situation)
    c.out.append(balance.pending_comparison)


def take_comparison(c: Cluster, event: PlanCompared) -> None:
    """Stop at the next boundary for the other plan, or continue with the current one."""
    balance, asked = c.straggler_state, c.straggler_state.pending_comparison
    if asked is None or event.generation != c.generation or not _steady(c):
        c.ignore("a comparison of plans for an older generation")
        return
    speeds = asked.situation.speeds
    changed = sorted(
        name for name in {*speeds, *balance.speeds} if speeds.get(name, 1.0) != balance.speeds.get(name, 1.0)
    )
    balance.pending_comparison, balance.compared_at, balance.speeds = None, c.at, dict(speeds)
    saved_s = (event.current_s - event.best_s) * balance.profile_error
    step_s = max(c.progress.step_s, event.current_s * balance.profile_error)
    left = c.current_job.steps - c.progress.known_step
    names = ", ".join(changed)
    if saved_s < c.timing.straggler_gain * step_s or saved_s * left < c.timing.straggler_cost_s:
        c.emit(
            "ReplanSkipped",
            f"another plan for the speed of {names} would save {three_digits(1e3 * max(saved_s, 0.0))} ms of a "
            f"step of {three_digits(1e3 * step_s)} ms, with {count_noun(left, 'step')} left",
            nodes=changed,
            saved_s=max(saved_s, 0.0),
            step_s=step_s,
        )
        return
    why = f"the speed of {names} changed: another plan saves {three_digits(1e3 * saved_s)} ms a step"
    reconfigure(c, why, "boundary", note_cause(c, "speed_changed", changed))
