"""Snapshots on one node: orders go to its trainers, and what they wrote is reported as one signal.

What the node's memory holds outlives trainers and daemons. Besides the retained snapshot, only the newest
one counts, since a new snapshot may overwrite an older one (``storage.arena``).
"""

from collections.abc import Iterable

from msgspec.structs import replace

from statemachine.agent.events import SnapshotCopiesChanged, SnapshotCopyCommitted
from statemachine.agent.state import BUILT, Agent, LocalSnapshot, TrainerPhase
from statemachine.effects import (
    InstructTrainer,
    RemoveSnapshots,
    RetainSnapshotCopies,
    SendSnapshotCopy,
)
from statemachine.messages import trainer
from statemachine.messages.cluster import RetainSnapshot, SnapshotCompleted, TakeSnapshot
from statemachine.messages.common import SnapshotFailed, SnapshotStarted
from statemachine.messages.values import HeldSnapshot, NodeState, Restore


def order_snapshot(a: Agent, command: TakeSnapshot) -> None:
    """Order a snapshot, once for each order: a late duplicate would begin a snapshot that the coordinator does
    not expect.

    Only one trainer gets the order, because a second one might get it after the VOTE in which the first one
    asked, and begin another snapshot.
    """
    order = command.generation, command.after_step
    if a.resume is None or command.generation != a.resume.generation or command.generation != a.generation:
        a.ignore("a TakeSnapshot of another generation")
        return
    if order <= a.last_snapshot_order:
        a.ignore("a TakeSnapshot that was obeyed before")
        return
    a.last_snapshot_order = order
    last = a.job is not None and command.after_step >= a.job.steps
    for device in a.ranked_devices(a.resume) if last else a.ranked_devices(a.resume)[:1]:
        if a.trainers[device].phase is (TrainerPhase.DONE if last else TrainerPhase.TRAINING):
            instruction = trainer.StartSnapshot(generation=command.generation, last=last)
            a.out.append(InstructTrainer(cause=a.cause, device=device, instruction=instruction))


def retain(a: Agent, command: RetainSnapshot) -> None:
    """Retain a snapshot. The coordinator repeats the command until a heartbeat confirms it."""
    order = command.lineage, command.step
    old = order < (a.retained_lineage, a.retained_step) or command.lineage < a.lineage
    if a.job is None or command.job_id != a.job.job_id or old:
        a.ignore("a RetainSnapshot of another job or of an older snapshot")
        return
    is_new, a.retained_step, a.pinned_step = (
        order > (a.retained_lineage, a.retained_step),
        command.step,
        command.pinned,
    )
    a.retained_lineage = command.lineage
    a.snapshots = [
        held
        for held in a.snapshots
        if held.job_id != command.job_id or held.step >= a.retained_step or held.step == a.pinned_step
    ]
    a.out.append(RetainSnapshotCopies(cause=a.cause, order=command))
    for one in a.trainers:
        if one.phase in BUILT:
            send_retained(a, one.device)
    if a.local_snapshot is not None and a.local_snapshot.started.step <= a.retained_step:
        a.local_snapshot = None
    if is_new:
        end_snapshot(a, f"the snapshot of step {a.retained_step} is complete everywhere")


def send_retained(a: Agent, device: int) -> None:
    """Send the trainer of ``device`` the step of the retained snapshot. A new trainer finds snapshots in its
    memory and does not know which one counts.
    """
    if a.retained_step:
        instruction = trainer.RetainLocalSnapshot(step=a.retained_step, pinned=a.pinned_step)
        a.out.append(InstructTrainer(cause=a.cause, device=device, instruction=instruction))


def end_snapshot(a: Agent, reason: str) -> None:
    """Note that no snapshot is under way here any more."""
    a.local_snapshot = None
    if a.state in (NodeState.SNAP, NodeState.COMPLETED):
        a.publish(NodeState.HEALTHY, reason)


def free_job(a: Agent, job_id: str) -> None:
    """Free the snapshots of a job that is over."""
    a.snapshots = [held for held in a.snapshots if held.job_id != job_id]
    a.out.append(RemoveSnapshots(cause=a.cause, job_id=job_id))


def begin_lineage(a: Agent, restore: Restore | None) -> None:
    """Begin a lineage after a rollback, in which this node perhaps took no part. What it retains counts only
    if it is what is restored.

    If it still counts otherwise, the next heartbeat lets the coordinator repeat the order to retain it. A
    node that did not drop it would name it forever: the next snapshot to retain may be of an earlier step,
    and none is ordered while a node names another.
    """
    if restore is None or restore.url or restore.step != a.retained_step:
        a.retained_step = a.pinned_step = 0


def drop_all(a: Agent) -> None:
    """Drop all snapshots of the job: the state comes from a persistent checkpoint."""
    a.retained_step = a.pinned_step = a.corrupt_step = 0
    a.snapshots = [held for held in a.snapshots if a.job is None or held.job_id != a.job.job_id]


def add_found(a: Agent, found: Iterable[HeldSnapshot]) -> None:
    """Add what the daemon found in memory to what was completed since."""
    a.snapshots += [held for held in found if held not in a.snapshots]


def set_copies(a: Agent, event: SnapshotCopiesChanged) -> None:
    """Replace the list of copies that are held for other nodes. Their owners report them; a Hello names them
    again.
    """
    a.snapshots = [held for held in a.snapshots if not held.owner]
    add_found(a, event.snapshots)


def send_snapshot_state(a: Agent) -> None:
    """Report the state of the snapshot that is under way."""
    if a.local_snapshot is not None:
        a.send(a.local_snapshot.started)
        if a.local_snapshot.completed is not None:
            a.send(a.local_snapshot.completed)
    if a.snapshot_failed is not None:
        a.send(a.snapshot_failed)


def reported_step(a: Agent) -> int:
    """Return the step of the snapshot whose end was reported last under the present group, or 0."""
    if a.local_snapshot is not None and a.local_snapshot.completed is not None:
        return a.local_snapshot.completed.step
    return a.snapshot_failed.step if a.snapshot_failed is not None and a.local_snapshot is None else 0


# --- trainers ------------------------------------------------------------------------------------


def note_started(a: Agent, report: SnapshotStarted) -> None:
    """Note that a snapshot has begun; the first report of a trainer counts for the node. All older snapshots
    but two are dropped.

    Those two are the retained one and the newest. If the newest came after the pinned one, it was
    abandoned.
    """
    if a.job is None or a.resume is None or report.generation != a.resume.generation:
        return
    if a.local_snapshot is not None and report.step <= a.local_snapshot.started.step:
        return
    own = [held for held in a.snapshots if held.job_id == a.job.job_id and not held.owner]
    mine = [held for held in own if held.step != report.step]
    pinned = a.pinned_step if a.pinned_step != a.retained_step else 0
    others = [held for held in mine if (held.step == pinned if pinned else held.step != a.retained_step)]
    spared = {max(others, key=lambda held: (held.generation, held.step))} if others else set()
    spared |= {held for held in mine if held.step == a.retained_step}
    a.snapshots = [held for held in a.snapshots if held not in own or held in spared]
    a.snapshot_failed = None
    a.local_snapshot = LocalSnapshot(started=report)
    a.send(a.local_snapshot.started)
    a.publish(NodeState.SNAP, f"taking a snapshot of step {report.step}")


def note_written(a: Agent, device: int, report: trainer.ShardWritten) -> None:
    """Record a written part. With the last trainer that has a rank, the node's part is complete in its own
    memory.
    """
    local = a.local_snapshot
    if local is None or a.resume is None or a.job is None or local.written is not None:
        return
    if (report.generation, report.step) != (local.started.generation, local.started.step):
        return
    local.shards[device] = report
    committed = a.history.get(report.step)
    if committed is None or any(one not in local.shards for one in a.ranked_devices(a.resume)):
        return
    shards = local.shards.values()
    a.snapshots.append(
        HeldSnapshot(job_id=a.job.job_id, step=report.step, generation=report.generation),
    )
    local.written = SnapshotCompleted(
        generation=report.generation,
        step=report.step,
        vote=committed.vote,
        size_bytes=sum(shard.size_bytes for shard in shards),
        copy_s=max(shard.copy_s for shard in shards),
        stall_s=max(shard.stall_s for shard in shards),
    )
    peer = a.resume.replica_peers.get(a.name)
    if peer is None:
        complete(a, local.written)
        return
    a.out.append(
        SendSnapshotCopy(
            cause=a.cause,
            job_id=a.job.job_id,
            step=report.step,
            generation=report.generation,
            replica_peer=peer,
        )
    )


def note_copied(a: Agent, event: SnapshotCopyCommitted) -> None:
    """Complete the node's part, now that its replica peer holds a copy and this host may fail."""
    local = a.local_snapshot
    if local is None or local.written is None or local.completed is not None:
        return
    written = local.written
    if (event.generation, event.step) == (written.generation, written.step):
        complete(a, replace(written, size_bytes=written.size_bytes + event.size_bytes))


def complete(a: Agent, part: SnapshotCompleted) -> None:
    assert a.local_snapshot is not None, "a snapshot is under way"
    a.local_snapshot.completed = part
    a.send(part)
    a.publish(NodeState.COMPLETED, f"the snapshot of step {part.step} is complete here")


def note_failed(a: Agent, failure: SnapshotFailed) -> None:
    local = a.local_snapshot
    if local is None or local.completed is not None:
        return
    if (failure.generation, failure.step) != (local.started.generation, local.started.step):
        return
    a.snapshot_failed = failure
    a.send(failure)
    end_snapshot(a, f"no snapshot of step {failure.step}: {failure.detail}")
