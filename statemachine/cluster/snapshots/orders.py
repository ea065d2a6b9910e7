"""When a snapshot is ordered: as often as the job wants, at its end, and at once where it is needed.

It is needed where a user asks, and where the newest one lacks a part: nodes that kept it are gone, or one of
them says that its part is spoiled and cannot be made again. One that is given up is tried again sooner than
the next would be due: behind the next step, then two steps later, then four.
"""

from msgspec.structs import replace

from statemachine.cluster.phases import Running
from statemachine.cluster.snapshots import intervals
from statemachine.cluster.snapshots.protections import AUTO
from statemachine.cluster.snapshots.snapshot_state import PendingSnapshot
from statemachine.cluster.snapshots.snapshots import abandon, is_whole
from statemachine.cluster.state import SNAPSHOT, Cluster
from statemachine.events import SnapshotRequested
from statemachine.messages.cluster import TakeSnapshot
from statemachine.messages.values import NodeState


def reconcile(c: Cluster, group: Running) -> None:
    """While the group trains: order one when it is time."""
    keeping, job = c.snapshots, c.current_job
    if job.snapshot.every_steps < 1:
        return
    if (
        keeping.pending is not None
        and keeping.pending.step is None
        and not keeping.pending.last
        and group.all_finished
    ):
        abandon(c, "the last step came first")
    if c.recovery is not None or keeping.pending is not None or not c.connected or not _is_due(c):
        return
    newest = keeping.newest
    # Also an idle buddy: it has no more slots than others.
    planned = [c.nodes[name] for name in group.needed if name in c.nodes]
    kept = newest.step if newest is not None else 0
    if any(node.state is not NodeState.HEALTHY or node.retained_step != kept for node in planned):
        return
    known, last = c.progress.known_step, group.all_finished
    # Whose trainers are done has no ballot to ask the others in.
    asked = group.planned if last else (group.resumption.plan.devices[0].node,)
    keeping.pending = PendingSnapshot(
        generation=group.generation,
        after_step=known - 1 if last else known,
        began_at=c.at,
        snap_after=known,
        ordered=asked,
        last=last,
        urgent=keeping.urgent,
        user_requested=keeping.user_requested,
    )
    keeping.last_order_step, keeping.urgent, keeping.user_requested = known, False, False
    c.send_all((c.nodes[name] for name in asked), TakeSnapshot(generation=group.generation, after_step=known))
    c.set_timer(SNAPSHOT, c.timing.snapshot_limit_s(c.progress.step_s))


def _is_due(c: Cluster) -> bool:
    """Enough steps since the last one; or the last one lacks a part since nodes were lost."""
    keeping, job, known = c.snapshots, c.current_job, c.progress.known_step
    if c.ended:
        there = keeping.newest is not None and keeping.newest.step >= job.steps
        return known >= job.steps and last_checkpoint_missing(c) and not there
    if known + 1 >= job.steps or known <= keeping.last_order_step:
        return False
    newest, every_steps = keeping.newest, intervals.every_steps(c, job)
    urgent = newest is not None and keeping.urgent and not is_whole(c, newest) and not job.snapshot.paused
    if keeping.user_requested or urgent:
        # Where one after the other is given up, training is to go on beside.
        return known >= keeping.last_order_step + min(1 << keeping.abandoned_in_a_row, every_steps)
    return not job.snapshot.paused and known >= keeping.last_order_step + every_steps


def last_checkpoint_missing(c: Cluster) -> bool:
    """All steps are done, and the state behind the last one has yet to be written to a checkpoint."""
    job, persisting = c.job, c.checkpoints
    if job is None or job.checkpoint.every_steps < 1 or persisting.final_abandoned or not c.ended:
        return False
    return persisting.last_step < job.steps


# --- what users want of a running job: one now, another interval, another protection --------------


def take_request(c: Cluster, event: SnapshotRequested) -> None:
    """Journaled with the job, so a coordinator that comes back knows it."""
    job = c.job
    if job is None or not c.active:
        c.answer(event.request, False, "no job is under way")
        return
    replicas_alone = job.policy.zero1 and not event.now and event.every_steps is None
    if job.snapshot.every_steps < 1 and not replicas_alone:
        c.answer(
            event.request,
            False,
            f"job {job.name!r} was submitted without snapshots, so its nodes set no memory aside for them: "
            'stop it, write [snapshot] every_steps = "auto" into its file, and submit it again',
        )
        return
    said: list[str] = []
    if event.every_steps is not None:
        said.append(_set_interval(c, event.every_steps))
    if event.protection is not None:
        said.append(_set_protection(c, event.protection))
    if event.now:
        c.snapshots.user_requested, c.dirty = True, True
        c.persist()
        said.append(f"a snapshot follows the {'step in flight' if c.planned else 'first step'}")
    c.answer(event.request, True, "; ".join(said) or "nothing was asked for")


def _set_interval(c: Cluster, every: int | str) -> str:
    before = c.current_job.snapshot
    if isinstance(every, str):
        after = replace(before, auto_interval=True, paused=False)
        words = f"as often as measurements say, now every {_steps(after.every_steps)}"
        c.snapshots.measured = None  # The next snapshot chooses, whatever was chosen before.
    elif every == 0:
        after = replace(before, auto_interval=False, paused=True)
        words = "none is taken from now on; the newest stays"
    else:
        after = replace(before, auto_interval=False, paused=False, every_steps=every)
        words = f"every {_steps(every)}"
    if after != before:
        c.job = replace(c.current_job, snapshot=after)
        c.dirty = True
        c.persist()
        c.emit(
            "SnapshotIntervalChosen",
            f"a user asked: {words}",
            every_steps=0 if after.paused else after.every_steps,
            before=0 if before.paused else before.every_steps,
            by="user",
        )
        c.publish()
    return f"snapshots: {words}"


def _set_protection(c: Cluster, scheme: str) -> str:
    """Met at the next boundary (``jobs.change_protection``)."""
    before = c.current_job.snapshot
    auto = scheme == AUTO
    after = replace(before, auto_protection=auto, protection=before.protection if auto else scheme)
    if after == before:
        return f"protection: it is {scheme} already"
    c.job = replace(c.current_job, snapshot=after)
    c.dirty = True
    c.persist()
    c.publish()
    return f"protection: {'what suits the plan' if auto else scheme}, from the next step boundary on"


def _steps(count: int) -> str:
    return "step" if count == 1 else f"{count} steps"
