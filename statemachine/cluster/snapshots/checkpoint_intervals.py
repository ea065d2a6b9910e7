"""Intervals of persistent checkpoints that follow from what they cost and from how often they are needed
(``planner.intervals`` and ``planner.state_loss`` have the formulas).

Training continues while a checkpoint is written, so its cost is the share of the write by which it makes
those steps longer (``planner.intervals.checkpoint_cost_share``). Until enough steps with and without a
write are measured it counts as all of the write, the most that it can be. The first snapshot of a job is
written as a checkpoint, which measures the write and shows that the location works.

A checkpoint is needed once no memory holds the state. What the plan's layers withstand, the learned failure
rate, and the job's own share of failures that did lose the state give the expected time to that.

The interval is chosen again when a checkpoint is complete, and after each recovery. It is journaled
with the job, as that of snapshots is.
"""

import math
from collections.abc import Mapping
from statistics import median
from typing import Any, Literal

from msgspec.structs import replace

from planner.changes.parts import stages_by_layer
from planner.intervals import (
    IntervalChoice,
    IntervalCost,
    checkpoint_cost_share,
    choose_checkpoint_interval,
)
from planner.state_loss import HolderGroup, common_cause_share, state_loss_horizon_s
from planner.values import Plan
from statemachine.cluster.snapshots.snapshot_state import CheckpointCost, CheckpointCosts
from statemachine.cluster.state import Cluster

FIRST_EVERY_STEPS = 1
"""Interval until the first checkpoint is complete: the first snapshot becomes one."""
ENOUGH_STEPS = 3
"""Steps with a write, and without one, that must be measured."""


def change_interval(
    c: Cluster,
    choice: IntervalChoice,
    settled: bool,
    event: Literal["SnapshotIntervalChosen", "CheckpointIntervalChosen"],
    **figures: Any,
) -> None:
    """Let the job continue with the chosen interval of snapshots or of checkpoints.

    :param settled: whether the interval so far was chosen from measurements too; if it was and stays, nothing
        is reported.
    :param event: event that reports the interval.
    :param figures: measurements and assumptions of the choice, for the event.
    """
    job = c.current_job
    of_snapshots = event == "SnapshotIntervalChosen"
    policy = job.snapshot if of_snapshots else job.checkpoint
    if choice.every_steps == policy.every_steps and settled:
        return
    changed = replace(policy, every_steps=choice.every_steps)
    c.job = replace(job, snapshot=changed) if of_snapshots else replace(job, checkpoint=changed)
    c.persist()
    c.emit(
        event,
        choice.reason,
        every_steps=choice.every_steps,
        before=policy.every_steps,
        **figures,
        lost_share=round(choice.lost_share, 6),
    )
    c.publish()


def note_step(c: Cluster, generation: int, step_s: float) -> None:
    """Record the duration of a step of the group that trains.

    A new generation has other stages and nodes, and may follow a failure: measurements begin again, and the
    interval is chosen again from the old ones.
    """
    checkpoints = c.checkpoints
    if checkpoints.costs.generation != generation:
        checkpoints.costs = CheckpointCosts(generation=generation)
        if checkpoints.measured is not None:
            _choose(c, checkpoints.measured)
    costs = checkpoints.costs
    (costs.plain_s if checkpoints.writing is None else costs.writing_s).append(step_s)


def note_checkpoint(c: Cluster, *, took_s: float) -> None:
    """Record a checkpoint that is complete, and the time since its order."""
    costs = c.checkpoints.costs
    costs.took_s.append(took_s)
    step_s = median(costs.plain_s) if costs.plain_s else c.progress.step_s
    if step_s <= 0:
        return  # A coordinator that took over knows no step yet.
    write_s, share = median(costs.took_s), 1.0
    if min(len(costs.plain_s), len(costs.writing_s)) >= ENOUGH_STEPS:
        share = checkpoint_cost_share(step_s, median(costs.writing_s))
    _choose(c, CheckpointCost(step_s=step_s, cost_s=write_s * share, write_s=write_s))


def holder_groups(plan: Plan, peers: Mapping[str, str], protection: str, *, zero1: bool) -> list[HolderGroup]:
    """Return the sets of nodes that hold the same layers, and the losses that each withstands.

    All owners but one may be lost; a single owner may be, if a replica peer has a copy. With ZeRO-1 each owner
    has its own part of the optimizer state, which survives the loss of an owner if ``aor`` replicates it.

    :param peers: replica peer of each owner that has one.
    """
    owners = [
        {device.node for stage in stages for device in stage.devices}
        for stages in stages_by_layer(plan.pipelines, plan.pipelines[0].stages[-1].end_layer)
    ]
    sets = {frozenset(names | {peers[name] for name in names if name in peers}) for names in owners}
    most = int("aor" in protection or bool(peers)) if zero1 else math.inf
    sizes = sorted(len(nodes) for nodes in sets)
    return [HolderGroup(nodes=size, tolerated=int(min(size - 1, most))) for size in sizes]


def _choose(c: Cluster, measured: CheckpointCost) -> None:
    job, checkpoints, resumption = c.current_job, c.checkpoints, c.resumption
    policy, settled = job.checkpoint, c.checkpoints.measured is not None
    if not policy.auto_interval or resumption is None:
        return
    checkpoints.measured = measured
    nodes, exposure = len(resumption.plan.nodes), c.exposure
    failure_s = c.horizon_s(nodes)
    assert failure_s is not None, "a job trains on some nodes"
    share = common_cause_share(exposure.failures, exposure.state_losses)
    loss_s = state_loss_horizon_s(
        failure_s,
        nodes,
        holder_groups(
            resumption.plan, resumption.replica_peers, resumption.protection, zero1=job.policy.zero1
        ),
        repair_s=c.timing.resume_s,
        common_share=share,
    )
    choice = choose_checkpoint_interval(
        IntervalCost(step_s=measured.step_s, cost_s=measured.cost_s, horizon_s=loss_s),
        present=policy.every_steps,
        least=max(1, job.snapshot.every_steps),
        most=job.steps,
        write_s=measured.write_s,
        settled=settled,
    )
    change_interval(
        c,
        choice,
        settled,
        "CheckpointIntervalChosen",
        step_s=round(measured.step_s, 6),
        cost_s=round(measured.cost_s, 6),
        write_s=round(measured.write_s, 6),
        failure_horizon_s=failure_s,
        loss_horizon_s=round(loss_s, 1),
    )
