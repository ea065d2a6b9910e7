"""Snapshot intervals that follow from the measured cost of snapshots (``planner.intervals`` has the formula).

Nodes report how long training waited for a snapshot, and how long steps take. A snapshot of step s is
copied during step s + 1. So its cost is the time by which it makes that step longer than steps without one,
or the time that training waited, whichever is more. Every snapshot that is complete everywhere adds a
measurement, after which the interval is chosen again; it is also chosen again when a generation begins,
since a failure changes the estimate of the next one.
"""

from statistics import median

from planner.intervals import IntervalCost, choose_interval
from statemachine.cluster.phases import Running
from statemachine.cluster.snapshots import checkpoint_intervals
from statemachine.cluster.state import Cluster
from statemachine.messages.cluster import Stepped
from statemachine.messages.values import Job

FIRST_EVERY_STEPS = 5
"""Interval while too little is measured."""
ENOUGH_SNAPSHOTS = 2
ENOUGH_STEPS = 3
"""Steps without a snapshot that must be measured."""
GROWTH = 4
"""An interval grows by at most this factor: what the first few measurements suggest is soon checked again."""


def every_steps(c: Cluster, job: Job) -> int:
    """Return the steps from one snapshot to the next. A snapshot after every step leaves no step to compare
    with, so it is not used at first.
    """
    policy = job.snapshot
    if policy.auto_interval and policy.every_steps < 2 and len(c.snapshots.costs.plain_s) < ENOUGH_STEPS:
        return FIRST_EVERY_STEPS
    return policy.every_steps


def note_step(c: Cluster, signal: Stepped) -> None:
    """Record the duration of the newest step of the group that trains."""
    group, snapshots = c.state, c.snapshots
    if not isinstance(group, Running) or c.recovery is not None or not signal.steps or signal.step_s <= 0:
        return
    step = signal.steps[-1].step
    if signal.generation != group.generation or signal.requested_first is not None:
        return
    if step <= c.progress.known_step or step < group.resumption.step + 2:
        return  # an old one; or the first of a group, which compiles and allocates
    checkpoint_intervals.note_step(c, signal.generation, signal.step_s)
    costs = snapshots.costs
    if costs.last and step == costs.last + 1:
        costs.copying_s.append(signal.step_s)
    elif snapshots.pending is None or step <= costs.last:
        costs.plain_s.append(signal.step_s)


def note_snapshot(c: Cluster, *, stall_s: float) -> None:
    """Record a snapshot that is complete everywhere and the time that training waited for it."""
    costs = c.snapshots.costs
    costs.stall_s.append(stall_s)
    if len(costs.stall_s) < ENOUGH_SNAPSHOTS or len(costs.plain_s) < ENOUGH_STEPS:
        return
    step_s = median(costs.plain_s)
    slower_s = median(costs.copying_s) - step_s if costs.copying_s else 0.0
    choose(c, step_s, max(median(costs.stall_s), slower_s))


def choose(c: Cluster, step_s: float, cost_s: float) -> None:
    """Choose the interval of snapshots, if that is ftd's to choose.

    :param step_s: duration of a step without a snapshot.
    :param cost_s: time that a snapshot costs.
    """
    job, settled = c.current_job, c.snapshots.measured is not None
    nodes = len(c.planned) or sum(1 for node in c.alive() if node.ready)
    expected_s = c.horizon_s(nodes)
    if not job.snapshot.auto_interval or expected_s is None:
        return
    policy = job.snapshot
    # Checkpoints are made from snapshots; a chosen interval of checkpoints follows that of the snapshots instead.
    given = 0 if job.checkpoint.auto_interval else job.checkpoint.every_steps
    cost = IntervalCost(step_s=step_s, cost_s=cost_s, horizon_s=expected_s)
    choice = choose_interval(
        cost,
        present=policy.every_steps,
        most=min(given or job.steps, job.steps, GROWTH * policy.every_steps),
        cheap_share=policy.cheap_share,
        settled=settled,
    )
    c.snapshots.measured = cost
    checkpoint_intervals.change_interval(
        c,
        choice,
        settled,
        "SnapshotIntervalChosen",
        by="measurement",
        step_s=round(step_s, 6),
        cost_s=round(cost_s, 6),
        horizon_s=expected_s,
    )
