"""Snapshots of the whole cluster: ordered, followed on every node, complete everywhere or abandoned.

A snapshot counts once every planned node has sent ``SnapshotCompleted``: that is made durable, and only
then are nodes ordered to release its predecessor (``RetainSnapshot``). So one snapshot is always complete
everywhere, whichever node dies or is slow. Heartbeats confirm ``RetainSnapshot``; no other snapshot is
ordered before all of them have, since only three fit into a node's memory (``storage.arena``).
"""

from collections.abc import Iterable, Mapping

from planner.reasons import join_names
from planner.values import Plan
from statemachine.cluster.node import NodeEvent, NodeMachine
from statemachine.cluster.phases import Running
from statemachine.cluster.progress import learn, publish_steps
from statemachine.cluster.replicas import is_verified
from statemachine.cluster.snapshots import intervals, requests
from statemachine.cluster.snapshots.replica_peers import copy_of, held_copies, key_of, same_snapshot
from statemachine.cluster.snapshots.snapshot_state import PendingSnapshot, SnapshotCosts
from statemachine.cluster.spikes import is_judged
from statemachine.cluster.state import SNAPSHOT, Cluster
from statemachine.messages.cluster import Heartbeat, Hello, RetainSnapshot, SnapshotCompleted
from statemachine.messages.common import SnapshotFailed, SnapshotStarted
from statemachine.messages.values import CommittedStep, HeldSnapshot, Restore, Snapshot, SnapshotGroup

FEW_SHARE = 8
"""Divisor of the number of nodes: a command to fewer nodes than this share is sent to them one by one."""


def groups_of(
    plan: Plan, protection: str, replica_peers: Mapping[str, str] | None = None, *, zero1: bool = False
) -> tuple[SnapshotGroup, ...]:
    """Return maximal runs of layers that the same stages own, one in each pipeline.

    :param replica_peers: replica peer of each owner that has one.
    :param zero1: each owner has only its part of the optimizer state.
    """
    layers = plan.pipelines[0].stages[-1].end_layer
    owners: list[list[tuple[str, int]]] = [[] for _ in range(layers)]
    sharded: set[int] = set()
    for pipeline in plan.pipelines:
        for number, stage in enumerate(pipeline.stages):
            for layer in range(stage.first_layer, stage.end_layer):
                owners[layer].append((stage.devices[0].node, number))
            if stage.within != "replicate" and len(stage.devices) > 1:
                sharded.update(range(stage.first_layer, stage.end_layer))
    begins = [layer for layer in range(layers) if layer == 0 or owners[layer] != owners[layer - 1]]
    return tuple(
        SnapshotGroup(
            first_layer=first,
            end_layer=end,
            owners=tuple(node for node, _ in owners[first]),
            protection=protection,
            replica_peer=(replica_peers or {}).get(owners[first][0][0], ""),
            whole=first in sharded and not zero1,
        )
        for first, end in zip(begins, [*begins[1:], layers], strict=True)
    )


def holders(c: Cluster, record: Snapshot, *, failures: int = 0) -> tuple[str, ...]:
    """Return the present owners that hold their part, which was unavailable at most ``failures`` times."""
    key = key_of(c, record)
    here = [c.nodes[name] for name in record.owners if name in c.nodes]
    return tuple(n.name for n in here if n.alive and key in n.snapshots and n.part_failures[key] <= failures)


def is_whole(c: Cluster, record: Snapshot) -> bool:
    """Return whether every node that held a part of it, or a copy of one, is present and has it."""
    owners, copied = holders(c, record), held_copies(c, record)
    return len(owners) == len(record.owners) and copied == record.replica_peers


# --- life of a snapshot --------------------------------------------------------------------------


def _is_pending(c: Cluster, node: NodeMachine, generation: int, step: int) -> bool:
    """Return whether this is about the pending snapshot, or about one that becomes the pending one.

    A coordinator that was restarted finds one that its predecessor ordered. A later step than that of the
    pending one shows that the older one was overtaken.
    """
    snapshots, group, job = c.snapshots, c.state, c.job
    if not isinstance(group, Running) or job is None or node.name not in group.planned:
        return False
    over = max(snapshots.last_abandoned_step, snapshots.newest_step)
    if generation != group.generation or job.snapshot.every_steps < 1 or step <= over:
        return False
    pending = snapshots.pending
    if pending is not None and (
        step <= pending.after_step or (pending.step is not None and step < pending.step)
    ):
        return False
    if pending is not None and pending.step is not None and step > pending.step:
        abandon(c, f"a snapshot of step {step} has begun")
        pending = None
    if pending is None:
        pending = snapshots.pending = PendingSnapshot(
            generation=generation, after_step=step - 1, began_at=c.at
        )
        snapshots.last_order_step = max(snapshots.last_order_step, step - 1)
        c.set_timer(SNAPSHOT, c.timing.snapshot_limit_s(c.progress.step_s))
    pending.step = snapshots.costs.last = step
    return True


def take_started(c: Cluster, node: NodeMachine, signal: SnapshotStarted) -> None:
    if not _is_pending(c, node, signal.generation, signal.step):
        c.ignore("an unexpected SnapshotStarted", node.name)
        return
    pending = c.snapshots.pending
    if pending is not None and node.name not in pending.completed:
        node.feed(NodeEvent.SNAP)
        c.publish()


def take_completed(c: Cluster, node: NodeMachine, signal: SnapshotCompleted) -> None:
    """Record a node's completed part; with the last planned node the snapshot is complete everywhere."""
    if not _is_pending(c, node, signal.generation, signal.step):
        c.ignore("an unexpected SnapshotCompleted", node.name)
        return
    pending, job = c.snapshots.pending, c.current_job
    assert pending is not None, "a snapshot is pending"
    node.feed(NodeEvent.SNAP)  # if its SnapshotStarted was lost
    node.feed(NodeEvent.COMPLETED)
    pending.completed[node.name] = signal
    node.snapshots |= {HeldSnapshot(job_id=job.job_id, step=signal.step, generation=signal.generation)}
    if signal.step > c.progress.known_step:
        learn(c, [CommittedStep(step=signal.step, vote=signal.vote)])
        c.persist()
        publish_steps(c)
        c.dirty = True
    record_if_complete(c)
    c.publish()


def record_if_complete(c: Cluster) -> None:
    """Record the pending snapshot if it is complete everywhere, the replicas were compared after its step, and no
    loss up to it is a spike.
    """
    pending = c.snapshots.pending
    if pending is None or not pending.completed or not is_complete_everywhere(c, pending):
        return
    signal = next(iter(pending.completed.values()))
    if is_verified(c, signal.step) and is_judged(c, signal.step):
        c.dirty = True
        record_complete(c, pending, signal)
        c.persist()
        c.publish()


def is_complete_everywhere(c: Cluster, pending: PendingSnapshot) -> bool:
    """Return whether every planned node completed its part."""
    return len(pending.completed) >= len(c.planned) and set(c.planned) <= set(pending.completed)


def record_complete(c: Cluster, pending: PendingSnapshot, signal: SnapshotCompleted) -> None:
    """Record the snapshot as complete everywhere: durable before any node releases the one before."""
    job, resumption = c.current_job, c.resumption
    assert resumption is not None, "a group trains"
    parts = pending.completed.values()
    record = Snapshot(
        step=signal.step,
        generation=signal.generation,
        vote=signal.vote,
        groups=groups_of(
            resumption.plan, resumption.protection, resumption.replica_peers, zero1=job.policy.zero1
        ),
        size_bytes=sum(one.size_bytes for one in parts),
        at=c.at,
    )
    c.snapshots.newest, c.snapshots.pending = record, None
    c.cancel_timer(SNAPSHOT)
    c.snapshots.abandoned_in_a_row = 0
    key = key_of(c, record)
    for node in c.alive():
        node.feed(NodeEvent.COMMITTED)
        node.snapshots = frozenset(held for held in node.snapshots if same_snapshot(held, key))
    _send_retain(c, c.alive(), record)
    for owner, peer in record.replica_peers.items():
        c.nodes[peer].snapshots |= {copy_of(key, owner)}
    alone = [group for group in record.groups if len(group.owners) == 1 and not group.replica_peer]
    c.emit(
        "SnapshotCompleted",
        f"the state after step {record.step} is in the memory of {join_names(record.owners)}"
        f"{_unprotected_words(alone)}",
        step=record.step,
        generation=record.generation,
        protection=resumption.protection,
        replica_peers=record.replica_peers,
        unprotected=[[group.first_layer, group.end_layer - 1] for group in alone],
        size_bytes=record.size_bytes,
        copy_s=max(one.copy_s for one in parts),
        stall_s=max(one.stall_s for one in parts),
        took_s=round(c.at - pending.began_at, 6),
    )
    intervals.note_snapshot(c, stall_s=max(one.stall_s for one in parts))
    requests.accept_completed(c, pending.requests, record)


def _unprotected_words(alone: list[SnapshotGroup]) -> str:
    if not alone:
        return ""
    layers = ", ".join(f"{group.first_layer} to {group.end_layer - 1}" for group in alone)
    return f"; layers {layers} are in the memory of one node only, unprotected"


def take_failed(c: Cluster, node: NodeMachine, signal: SnapshotFailed) -> None:
    if not _is_pending(c, node, signal.generation, signal.step):
        c.ignore("an unexpected SnapshotFailed", node.name)
        return
    _abandon_pending(c, f"{node.name}: {signal.detail}")


def overdue(c: Cluster) -> None:
    """Abandon a snapshot that some node did not complete in time. Other means find out whether it is slow,
    dead or cut off.
    """
    pending = c.snapshots.pending
    if pending is None:
        return
    missing = [name for name in c.planned if name not in pending.completed]
    late = f"{', '.join(missing)} did not complete it in time"
    _abandon_pending(c, late if missing else "it was not known in time whether its state is sound")


def _abandon_pending(c: Cluster, why: str) -> None:
    """Abandon the pending snapshot. That of the last step is not tried again: the job ends without its
    checkpoint.
    """
    pending, job = c.snapshots.pending, c.job
    last = pending is not None and job is not None and (pending.last or pending.step == job.steps)
    abandon(c, why)
    if last and job is not None and job.checkpoint.every_steps > 0:
        abandon_last_checkpoint(c, f"there is no snapshot of the last step: {why}")


def abandon_last_checkpoint(c: Cluster, why: str) -> None:
    """Let the job end without a checkpoint of its last step."""
    c.checkpoints.final_abandoned = c.dirty = True
    c.persist()
    c.emit("CheckpointAbandoned", why, last_complete_step=c.checkpoints.last_step or None)


def interrupt(c: Cluster, why: str) -> None:
    """Abandon what is not complete everywhere, since the group has ended. The next snapshot need not wait as
    long.
    """
    abandon(c, why)
    snapshots = c.snapshots
    snapshots.last_abandoned_step = snapshots.abandoned_in_a_row = 0
    snapshots.last_order_step = snapshots.newest.step if snapshots.newest is not None else 0
    for node in c.nodes.values():
        node.feed(NodeEvent.ABANDONED)
    # The next group has other stages and costs. Until they are measured, the old ones count.
    snapshots.costs = SnapshotCosts()
    if snapshots.measured is not None:
        intervals.choose(c, snapshots.measured.step_s, snapshots.measured.cost_s)


def abandon(c: Cluster, why: str) -> None:
    """Abandon the pending snapshot: what nodes have of it does not count, and the one before is still complete
    everywhere.

    The reasons for which it was wanted at once still hold.
    """
    snapshots, pending = c.snapshots, c.snapshots.pending
    if pending is None:
        return
    snapshots.pending, c.dirty = None, True
    snapshots.urgent = snapshots.urgent or pending.urgent
    snapshots.user_requested = snapshots.user_requested or pending.user_requested
    snapshots.requests = pending.requests | snapshots.requests
    snapshots.abandoned_in_a_row += 1
    c.cancel_timer(SNAPSHOT)
    for node in c.nodes.values():
        node.feed(NodeEvent.ABANDONED)
    if pending.step is not None:
        snapshots.last_abandoned_step = max(snapshots.last_abandoned_step, pending.step)
    c.emit(
        "SnapshotAbandoned",
        why,
        step=pending.step,
        generation=pending.generation,
        last_complete_step=snapshots.newest_step or None,
    )
    c.publish()


# --- snapshots that nodes hold -------------------------------------------------------------------


def take_held(c: Cluster, node: NodeMachine, signal: Hello, *, is_back: bool = False) -> bool:
    """Record what a Hello says the node's memory holds. Return whether more of the newest snapshot is present
    now.

    :param is_back: the node was absent until now.
    """
    node.retained_step, node.said_hello = None, True
    job, newest = c.job, c.snapshots.newest
    if job is None:
        return False
    before = node.snapshots
    node.snapshots |= {held for held in signal.snapshots if held.job_id == job.job_id}
    if node.snapshots != before:
        c.persist()
    added = node.snapshots if is_back else node.snapshots - before
    return newest is not None and any(same_snapshot(held, key_of(c, newest)) for held in added)


def take_retained(c: Cluster, node: NodeMachine, signal: Heartbeat) -> bool:
    """Record the retained snapshot that a heartbeat names; it counts only after a Hello, which reports the
    node's pending work. Return whether it reports for the first time that the newest snapshot is corrupt there.
    """
    newest = c.snapshots.newest
    if not node.said_hello or not c.active:
        return False
    changed, node.retained_step = node.retained_step != signal.retained_step, signal.retained_step
    # Only the last node's confirmation changes what others wait for.
    c.dirty = c.dirty or (
        changed and not any(c.nodes[name].retained_step != signal.retained_step for name in c.planned)
    )
    if newest is None or not node.prepared:
        return False
    if signal.retained_step != newest.step:
        c.snapshots.retain_unconfirmed.add(node.name)
    elif signal.corrupt_step == newest.step and not node.part_failures[key_of(c, newest)]:
        # A new one is wanted at once. For a rollback the sound parts here still count.
        node.part_failures[key_of(c, newest)] += 1
        c.snapshots.urgent = c.dirty = True
        return True
    return False


def take_repairs(node: NodeMachine, signal: Heartbeat) -> int:
    """Return how many times bytes of a snapshot changed in a node's memory and were repaired since it last
    reported. A coordinator that has just started only records the number.
    """
    known = node.repairs
    node.repairs = max(known or 0, signal.repairs)
    return 0 if known is None else node.repairs - known


def repeat_retain(c: Cluster) -> None:
    """Repeat RetainSnapshot to all nodes whose heartbeat did not name the newest snapshot, together; called at
    every tick.
    """
    owed, c.snapshots.retain_unconfirmed = c.snapshots.retain_unconfirmed, set()
    newest = c.snapshots.newest
    if owed and newest is not None and c.active:
        named = [node for node in c.alive() if node.name in owed and node.prepared]
        _send_retain(c, [node for node in named if node.retained_step != newest.step], newest)


def _send_retain(c: Cluster, nodes: list[NodeMachine], record: Snapshot) -> None:
    """Send RetainSnapshot, but not after every heartbeat, since the confirmation takes a while.

    It names all parts and where they are, so that a node can repair its own. Of a thousand nodes, a few are
    sent it one by one, since the broker sends a broadcast to all nodes.
    """
    job, late = c.current_job, c.at - 2 * c.timing.heartbeat_s
    due = [node for node in nodes if node.retain_sent_step != record.step or node.retain_sent_at <= late]
    for node in due:
        node.retain_sent_step, node.retain_sent_at = record.step, c.at
    if not due:
        return
    keep = RetainSnapshot(
        job_id=job.job_id,
        step=record.step,
        pinned=pinned_step(c, record),
        lineage=c.lineage,
        restore=restore_from(
            c, record, sorted({*record.owners, *record.replica_peers.values()} & set(c.nodes))
        ),
    )
    if len(due) * FEW_SHARE >= len(c.alive()):
        c.send_all(due, keep)
    else:
        for node in due:
            c.send(node, keep)


def restore_from(c: Cluster, record: Snapshot, names: Iterable[str]) -> Restore:
    """Return how to restore a snapshot from these nodes."""
    return Restore(
        job_id=c.current_job.job_id,
        step=record.step,
        generation=record.generation,
        groups=record.groups,
        sources={name: c.nodes[name].facts.snapshot_server for name in names},
    )


def pinned_step(c: Cluster, record: Snapshot) -> int:
    """Return the step of the older snapshot that is being written to storage, or 0."""
    writing = c.checkpoints.writing
    return writing.record.step if writing is not None and writing.record.step < record.step else 0
