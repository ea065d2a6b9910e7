"""When a snapshot is ordered: as often as the job wants, at its end, and at once where it is needed.

It is needed where a user asks, and where the newest one lacks a part: nodes that kept it are gone, or one of
them says that its part is spoiled and cannot be made again. One that is given up is tried again sooner than
the next would be due: behind the next step, then two steps later, then four.
"""

from statemachine.cluster.phases import Running
from statemachine.cluster.snapshots import intervals
from statemachine.cluster.snapshots.keeping import Underway
from statemachine.cluster.snapshots.snapshots import give_up, whole
from statemachine.cluster.state import SNAPSHOT, Cluster
from statemachine.messages.cluster import Snap
from statemachine.messages.values import NodeState


def pursue(c: Cluster, group: Running) -> None:
    """While the group trains: order one when it is time."""
    keeping, job = c.keeping, c.job
    if job is None or job.snapshot.every_steps < 1:
        return
    if (
        keeping.underway is not None
        and keeping.underway.step is None
        and not keeping.underway.last
        and group.ended
    ):
        give_up(c, "the last step came first")
    if c.recovery is not None or keeping.underway is not None or not c.connected or not _time(c):
        return
    newest = keeping.newest
    # Also an idle buddy: it has no more slots than others.
    planned = [
        c.nodes[name] for name in {*group.planned, *group.resumption.buddies.values()} if name in c.nodes
    ]
    kept = newest.step if newest is not None else 0
    if any(node.state is not NodeState.HEALTHY or node.kept != kept for node in planned):
        return
    known, last = c.ledger.known_step, group.ended
    # Whose trainers are done has no ballot to ask the others in.
    asked = group.planned if last else (group.resumption.plan.devices[0].node,)
    keeping.underway = Underway(
        generation=group.generation,
        behind=known - 1 if last else known,
        began_at=c.at,
        snap_after=known,
        ordered=asked,
        last=last,
        urgent=keeping.urgent,
        asked=keeping.asked,
    )
    keeping.behind, keeping.urgent, keeping.asked = known, False, False
    c.send_all((c.nodes[name] for name in asked), Snap(generation=group.generation, behind=known))
    c.set_timer(SNAPSHOT, c.timing.snapshot_limit_s(c.ledger.step_s))


def _time(c: Cluster) -> bool:
    """Enough steps since the last one; or the last one lacks a part since nodes were lost."""
    keeping, job, known = c.keeping, c.job, c.ledger.known_step
    assert job is not None, "a job is under way"
    if c.ended:
        there = keeping.newest is not None and keeping.newest.step >= job.steps
        return known >= job.steps and last_wanted(c) and not there
    if known + 1 >= job.steps or known <= keeping.behind:
        return False
    newest, every_steps = keeping.newest, intervals.every_steps(c, job)
    urgent = newest is not None and keeping.urgent and not whole(c, newest) and not job.snapshot.paused
    if keeping.asked or urgent:
        # Where one after the other is given up, training is to go on beside.
        return known >= keeping.behind + min(1 << keeping.misses, every_steps)
    return not job.snapshot.paused and known >= keeping.behind + every_steps


def last_wanted(c: Cluster) -> bool:
    """All steps are done, and the state behind the last one has yet to be written to a checkpoint."""
    job, persisting = c.job, c.persisting
    if job is None or job.checkpoint.every_steps < 1 or persisting.done or not c.ended:
        return False
    return persisting.last_step < job.steps
