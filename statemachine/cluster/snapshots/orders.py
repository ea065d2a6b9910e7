"""Orders of snapshots: at the job's interval, at its end, and at once if one is needed.

A snapshot is needed if a user requests one, and if the newest one lacks a part: nodes that held it are
gone, or one of them reports that its part is corrupt and cannot be repaired. After an abandoned snapshot
the next one is tried sooner than it would be due: after the next step, then two steps later, then four.
"""

from msgspec.structs import replace

from statemachine.cluster.phases import Running
from statemachine.cluster.snapshots import intervals, requests
from statemachine.cluster.snapshots.protections import AUTO
from statemachine.cluster.snapshots.snapshot_state import PendingSnapshot
from statemachine.cluster.snapshots.snapshots import abandon, is_whole
from statemachine.cluster.state import SNAPSHOT, Cluster
from statemachine.events import SnapshotRequested
from statemachine.messages.cluster import TakeSnapshot
from statemachine.messages.values import NodeState


def reconcile(c: Cluster, group: Running) -> None:
    """Order a snapshot when it is time, while the group trains."""
    snapshots, job = c.snapshots, c.current_job
    if job.snapshot.every_steps < 1:
        return
    if (
        snapshots.pending is not None
        and snapshots.pending.step is None
        and not snapshots.pending.last
        and group.all_finished
    ):
        abandon(c, "the last step was committed first")
    if c.recovery is not None or snapshots.pending is not None or not c.connected or not _is_due(c):
        return
    # An idle replica peer counts too: it has no more slots than others.
    planned = [c.nodes[name] for name in group.needed if name in c.nodes]
    # A node that names none or an older one has no room yet. One that names a newer one obeyed a coordinator whose
    # journal was lost since; it drops that when the next one is complete.
    newest_step = snapshots.newest_step
    if any(
        node.state is not NodeState.HEALTHY or node.retained_step is None or node.retained_step < newest_step
        for node in planned
    ):
        return
    known, last = c.progress.known_step, group.all_finished
    # Trainers that are done take part in no VOTE, so one of them cannot ask the others.
    asked = group.planned if last else (group.resumption.plan.devices[0].node,)
    snapshots.pending = PendingSnapshot(
        generation=group.generation,
        after_step=known - 1 if last else known,
        began_at=c.at,
        snap_after=known,
        ordered=asked,
        last=last,
        urgent=snapshots.urgent,
        user_requested=snapshots.user_requested,
        requests=snapshots.requests,
    )
    snapshots.requests = {}
    snapshots.last_order_step, snapshots.urgent, snapshots.user_requested = known, False, False
    c.send_all((c.nodes[name] for name in asked), TakeSnapshot(generation=group.generation, after_step=known))
    c.set_timer(SNAPSHOT, c.timing.snapshot_limit_s(c.progress.step_s))


def _is_due(c: Cluster) -> bool:
    """Return whether enough steps have passed since the last one, or whether one is needed sooner."""
    snapshots, job, known = c.snapshots, c.current_job, c.progress.known_step
    if c.ended:
        return known >= job.steps and last_checkpoint_missing(c) and snapshots.newest_step < job.steps
    if known + 1 >= job.steps or known <= snapshots.last_order_step:
        return False
    newest, every_steps = snapshots.newest, intervals.every_steps(c, job)
    urgent = newest is not None and snapshots.urgent and not is_whole(c, newest) and not job.snapshot.paused
    if snapshots.user_requested or urgent:
        # If one after another is abandoned, training must be able to continue in between.
        return known >= snapshots.last_order_step + min(1 << snapshots.abandoned_in_a_row, every_steps)
    return not job.snapshot.paused and known >= snapshots.last_order_step + every_steps


def last_checkpoint_missing(c: Cluster) -> bool:
    """Return whether all steps are done and the state after the last one has yet to be written to a
    checkpoint.
    """
    job, checkpoints = c.job, c.checkpoints
    if job is None or job.checkpoint.every_steps < 1 or checkpoints.final_abandoned or not c.ended:
        return False
    return checkpoints.last_step < job.steps


# --- users' requests: a snapshot now, another interval, another protection ------------------------


def take_request(c: Cluster, event: SnapshotRequested) -> None:
    """Handle a user's request. It is journaled with the job, so that a restarted coordinator knows it."""
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
    if event.now and (obstacle := requests.find_obstacle(c)):
        c.answer(event.request, False, f"no snapshot is taken, and nothing has changed: {obstacle}")
        return
    said: list[str] = []
    if event.every_steps is not None:
        said.append(_set_interval(c, event.every_steps))
    if event.protection is not None:
        said.append(_set_protection(c, event.protection))
    if event.now:
        requests.add(c, event.request, "; ".join(said))
    else:
        c.answer(event.request, True, "; ".join(said) or "nothing was requested")


def _set_interval(c: Cluster, every: int | str) -> str:
    before = c.current_job.snapshot
    if isinstance(every, str):
        after = replace(before, auto_interval=True, paused=False)
        words = f"at an interval chosen from measurements, now every {_steps(after.every_steps)}"
        c.snapshots.measured = None  # The next snapshot chooses, whatever was chosen before.
    elif every == 0:
        after = replace(before, auto_interval=False, paused=True)
        words = "none from now on; the newest stays"
    else:
        after = replace(before, auto_interval=False, paused=False, every_steps=every)
        words = f"every {_steps(every)}"
    if after != before:
        c.job = replace(c.current_job, snapshot=after)
        c.dirty = True
        c.persist()
        c.emit(
            "SnapshotIntervalChosen",
            f"requested by a user: {words}",
            every_steps=0 if after.paused else after.every_steps,
            before=0 if before.paused else before.every_steps,
            by="user",
        )
        c.publish()
    return f"snapshots: {words}"


def _set_protection(c: Cluster, scheme: str) -> str:
    """Set the requested protection; it takes effect at the next boundary (``boundaries.follow_running``)."""
    before = c.current_job.snapshot
    auto = scheme == AUTO
    after = replace(before, auto_protection=auto, protection=before.protection if auto else scheme)
    if after == before:
        return f"protection: it is {scheme} already"
    c.job = replace(c.current_job, snapshot=after)
    c.dirty = True
    c.persist()
    c.publish()
    return f"protection: {'chosen with each plan' if auto else scheme}, from the next step boundary on"


def _steps(count: int) -> str:
    return "step" if count == 1 else f"{count} steps"
