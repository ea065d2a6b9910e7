"""Rollback to the newest snapshot that is complete everywhere, when live replicas are not enough.

Hellos and the snapshot's completion show who holds a part of it; the coordinator computes whether that is
enough (``CheckRestore``). If it is, the decision of the generation is replaced: by the snapshot's step,
with every layer available on every device. What was committed after that step is undone with the Resume,
and never before it, since until then a node that holds it may return. The Resume begins a new *lineage*:
reports, heartbeats and votes of another lineage belong to steps that were undone.

If neither the present nodes nor those that may return have that snapshot, the newest persistent checkpoint
is searched for (``FindCheckpoint``) and restored in the same way; no snapshot counts from then on. A job
that begins from a checkpoint takes the same path: its steps are known, and no node holds them. A checkpoint
that a node finds corrupt is skipped.
"""

from dataclasses import replace
from typing import Any

from planner.values import Device, StatePart
from statemachine.cluster.node import NodeMachine
from statemachine.cluster.phases import Paused, Planning, Resuming
from statemachine.cluster.recovery import ask_plan, note_cause, pause, reconfigure
from statemachine.cluster.snapshots import persisting
from statemachine.cluster.snapshots.replica_peers import copy_of, held_copies
from statemachine.cluster.snapshots.snapshot_state import JobSnapshots
from statemachine.cluster.snapshots.snapshots import holders, key_of
from statemachine.cluster.spikes import give_up
from statemachine.cluster.state import FIND, PAUSE_LIMIT, Cluster, join_names
from statemachine.effects import CheckRestore, FindCheckpoint
from statemachine.events import CheckpointFound, RestoreChecked
from statemachine.messages.cluster import RestoreFailed, TrainerLost
from statemachine.messages.values import Snapshot, Vote

RESTORE_TRIES = 3
"""Failures to get a node's part after which the node counts as one that lost it."""
UNREADABLE_TRIES = 10
"""Attempts to read the checkpoint location within ``lost_state_s`` while it is unreadable."""


def request_check(c: Cluster, state: Planning, reason: str, lost_layers: tuple[int, ...]) -> bool:
    """Ask whether the newest snapshot can be restored. Return ``False`` if there is none."""
    newest = c.snapshots.newest
    if newest is None or not lost_layers or state.restore_check is not None:
        return False
    state.loss_reason = reason
    _send_check(c, state, newest)
    return True


def _sources(c: Cluster, newest: Snapshot, failures: int) -> tuple[str, ...]:
    """Return the present nodes that hold a part of it, or a copy of one."""
    copied = held_copies(c, newest, key_of(c, newest), failures=failures)
    return tuple(sorted({*holders(c, newest, failures=failures), *copied.values()}))


def _send_check(c: Cluster, state: Planning, newest: Snapshot, failures: int = 0) -> None:
    state.sources = _sources(c, newest, failures)
    c.out.append(
        CheckRestore(
            cause=c.cause,
            generation=state.generation,
            record=newest,
            present=holders(c, newest, failures=failures),
            copied=tuple(sorted(held_copies(c, newest, key_of(c, newest), failures=failures))),
        )
    )


def take_check(c: Cluster, event: RestoreChecked) -> str | None:
    """Continue from the snapshot, or wait for nodes that may help. Return why the job is lost, if it is."""
    state, newest = c.state, c.snapshots.newest
    if not isinstance(state, Planning) or newest is None or event.generation != state.generation:
        c.ignore("a check of a snapshot for an older generation")
        return None
    others = _sources(c, newest, RESTORE_TRIES - 1)
    if not event.possible and others != state.sources:
        # A node came back meanwhile; or a node whose part was unavailable before is needed after all.
        _send_check(c, state, newest, RESTORE_TRIES - 1)
        return None
    if not event.possible and c.spikes.pending is not None:
        give_up(c, f"the snapshot of step {newest.step} cannot be restored: {event.reason}")
        reconfigure(c, "the spike of the loss is accepted", "abort", state.recovery)
        return None
    if not event.possible:
        reason = (
            f"{state.loss_reason}; nor can the snapshot of step {newest.step} be restored: {event.reason}"
        )
        return wait_for_absent(c, reason)
    state.restore_check = event
    _plan_from(c, state, newest.step, newest.vote, newest.groups[-1].end_layer)
    return None


def wait_for_absent(c: Cluster, reason: str) -> str | None:
    """Wait a while for absent nodes that may still have the state, since no present node has it; return
    ``reason`` if there are none. What absent nodes hold besides snapshots does not count if it may be corrupt.
    """
    live = [
        node.name
        for _, node in sorted(c.nodes.items())
        if not node.alive
        and not node.ended
        and node.lost_after == c.resumed_generation
        and node.prepared
        and c.replicas.diverged is None
    ]
    newest = c.snapshots.newest
    holding = _may_hold(c, newest) if newest is not None else []
    snapshot_holders = [name for name in holding if name not in live]
    if c.checkpoints.wait_over or _checkpoint_is_newest(c) or not (live or snapshot_holders):
        return reason
    # Nodes that join without the state begin a generation, and must not make the wait longer.
    since = c.checkpoints.state_missing_since
    since = c.checkpoints.state_missing_since = c.at if since is None else since
    left_s = since + c.timing.lost_state_s - c.at
    if left_s <= 0:
        return reason
    then = "the newest checkpoint is searched for" if c.current_job.checkpoint.url else "the job fails"
    waited = (
        f"{reason}; {join_names(live + snapshot_holders)} may still hold it: waiting for their return for "
        f"{left_s:.3g} s, then {then}"
    )
    pause(c, waited, needed=None, pause_limited=True)
    c.set_timer(PAUSE_LIMIT, left_s)
    return None


def _checkpoint_is_newest(c: Cluster) -> bool:
    """Return whether nothing was committed after the persistent checkpoint, so that no absent node has more."""
    return c.checkpoints.newest is not None and c.progress.known_step <= c.checkpoints.newest.step


def _may_hold(c: Cluster, newest: Snapshot) -> list[str]:
    """Return the nodes that held a part or a copy and may still hold it: those that are absent, or have just
    returned and not checked their memory yet.
    """
    key = key_of(c, newest)
    held = [(name, key) for name in newest.owners]
    held += [(peer, copy_of(key, owner)) for owner, peer in newest.replica_peers.items()]
    return sorted(
        {name for name, part in held if not c.nodes[name].alive or part not in c.nodes[name].snapshots}
    )


# --- persistent checkpoints ----------------------------------------------------------------------


def search_checkpoint(c: Cluster, reason: str) -> bool:
    """Search for a persistent checkpoint before the job fails. Return ``False`` if the job writes none."""
    state, job = c.state, c.current_job
    if not job.checkpoint.url:
        return False
    assert isinstance(state, Planning), "only the answer to a plan or a check shows that state is lost"
    state.loss_reason = reason
    if c.at < c.checkpoints.retry_at:
        _wait_for_location(c, reason)
        return True
    corrupt_steps = tuple(sorted(c.checkpoints.corrupt_steps))
    c.set_timer(FIND, c.timing.checkpoint_location_s)
    c.out.append(
        FindCheckpoint(cause=c.cause, generation=state.generation, job=job, corrupt_steps=corrupt_steps)
    )
    return True


def _note_unreadable(c: Cluster) -> bool:
    """Note that the checkpoint location is unreadable; return whether to try again."""
    checkpoints = c.checkpoints
    if checkpoints.unreadable_since is None:
        checkpoints.unreadable_since = c.at
    checkpoints.retry_at = c.at + c.timing.lost_state_s / UNREADABLE_TRIES
    return c.at - checkpoints.unreadable_since < c.timing.lost_state_s


def _wait_for_location(c: Cluster, reason: str) -> None:
    pause(c, f"{reason}; {c.current_job.checkpoint.url} is tried again", needed=None, pause_limited=True)
    c.set_timer(PAUSE_LIMIT, c.checkpoints.retry_at - c.at)


def find_overdue(c: Cluster) -> str | None:
    """Handle a search for the newest checkpoint without an answer. Return why the job is lost, if it has
    waited long enough.
    """
    state = c.state
    if not isinstance(state, Planning):
        return None
    return _unreadable(
        c, f"{state.loss_reason}; and there was no answer in {c.timing.checkpoint_location_s:g} s"
    )


def _unreadable(c: Cluster, reason: str) -> str | None:
    if not _note_unreadable(c):
        return f"{reason}; this has lasted for {c.timing.lost_state_s:g} s"
    _wait_for_location(c, reason)
    return None


def return_to_checkpoint(c: Cluster, paused: Paused) -> bool:
    """Return to a persistent checkpoint after a pause in which no node with later state came. Return ``False``
    if the job writes none.
    """
    if not c.current_job.checkpoint.url:
        return False
    c.checkpoints.wait_over = True
    why = f"{paused.reason}; back to a persistent checkpoint"
    reconfigure(c, why, "abort", note_cause(c, "resumed", []))
    return True


def take_checkpoint_found(c: Cluster, event: CheckpointFound) -> str | None:
    """Continue from the checkpoint that was found. Return why the job is lost, if there is none."""
    state, checkpoint = c.state, event.checkpoint
    if (
        not isinstance(state, Planning)
        or state.restore_check is not None
        or event.generation != state.generation
    ):
        c.ignore("a checkpoint for an older generation")
        return None
    job = c.current_job
    c.cancel_timer(FIND)
    if event.unreadable:
        return _unreadable(c, f"{state.loss_reason}; and the checkpoints cannot be read: {event.reason}")
    for passed in event.skipped:
        c.emit("CheckpointSkipped", passed.reason, step=passed.step, url=job.checkpoint.url)
    if checkpoint is None:
        look = f"ftd checkpoint verify {job.checkpoint.url}"
        return f"{state.loss_reason}; nor is there a sound checkpoint: {event.reason} (see: {look})"
    assert c.profiled is not None, "a plan was requested"
    layers = len(c.profiled.profile.layers)
    if checkpoint.layers != layers:
        return (
            f"checkpoint.url: {job.checkpoint.url} holds a model of {checkpoint.layers} layers under the "
            f"name {job.name!r}, and this job's has {layers}: give the job another url or another name"
        )
    state.checkpoint, state.sources = checkpoint, ()
    state.restore_check = RestoreChecked(
        at=event.at,
        cause=event.cause,
        generation=event.generation,
        possible=True,
        reason=f"the newest persistent checkpoint in {job.checkpoint.url}",
        tier="persistent",
    )
    _plan_from(c, state, checkpoint.step, checkpoint.vote, layers)
    return None


def _plan_from(c: Cluster, state: Planning, step: int, vote: Vote, layers: int) -> None:
    """Request a plan as if every device held every layer at this step."""
    everything = frozenset(range(layers))
    devices = [
        Device(node=n, index=d) for n in sorted(state.members) for d in range(c.nodes[n].facts.devices)
    ]
    holdings = dict.fromkeys(devices, everything)
    whole = tuple(StatePart(layer=layer, start=0, end=1, of=1) for layer in range(layers))
    state.decision = replace(
        state.decision,
        step=step,
        vote=vote,
        holdings=holdings,
        ready={},
        parts=dict.fromkeys(devices, whole if state.decision.parted else ()),
    )
    ask_plan(c, state)


# --- carrying out the rollback -------------------------------------------------------------------


def roll_back(c: Cluster, state: Planning) -> None:
    """Undo, together with the Resume, what was committed after the target step."""
    target, event = state.checkpoint or c.snapshots.newest, state.restore_check
    assert target is not None, "it was checked"
    assert event is not None, "it was checked"
    progress, before = c.progress, c.progress.known_step
    progress.roll_back(target.step, target.vote)
    c.lineage = state.generation
    if state.checkpoint is not None:
        persisting.discard_after(c, state.checkpoint)
        # A job that begins from a checkpoint lost nothing, and a second try returns from the same loss.
        if c.resumption is not None and state.recovery.tier != "persistent":
            c.exposure.state_losses += 1
        c.snapshots = JobSnapshots()
    c.snapshots.last_order_step = target.step
    c.replicas.roll_back(target.step)
    c.spikes = c.spikes.rolled_back(target.step)
    for node in c.nodes.values():
        node.step = min(node.step, target.step)
    undone = before - target.step
    state.recovery.rolled_back_steps += undone
    state.recovery.tier = event.tier
    what = "checkpoint" if state.checkpoint is not None else "snapshot"
    continues, lost = f"the job continues after step {target.step}: {event.reason}", state.loss_reason
    details: dict[str, Any] = {
        "generation": state.generation,
        "step": target.step,
        "from_step": before,
        "to_step": target.step,
        "undone_steps": undone,
        "tier": event.tier,
        "sources": list(state.sources),
    }
    if c.resumption is None:
        c.emit("JobResumed", continues, **details)
    else:
        back = f"{lost}; back to the {what} of step {target.step}: {event.reason}"
        c.emit("RolledBack", back, **details)


def explain_foreign_state(c: Cluster, signal: TrainerLost) -> str | None:
    """Return why the job is lost, if a trainer cannot take the checkpoint's state because it belongs to
    another model.
    """
    restore, job = c.resumption.restore if c.resumption is not None else None, c.current_job
    if restore is None or not restore.url or signal.generation != c.resumed_generation:
        return None
    return (
        f"checkpoint.url: {restore.url} holds another model under the name {job.name!r} than this job's: "
        f"{signal.detail}; give the job another url or name, or the arguments of the one that wrote it"
    )


def take_restore_failed(c: Cluster, node: NodeMachine, signal: RestoreFailed) -> str | None:
    """Try again without the nodes whose shards are unavailable. Return why the job is lost, if it is."""
    group, newest = c.state, c.snapshots.newest
    restore = group.resumption.restore if isinstance(group, Resuming) else None
    if restore is None or signal.generation != c.resumed_generation:
        c.ignore("an unexpected RestoreFailed", node.name)
        return None
    for name in signal.bad:
        if name in c.nodes and newest is not None:
            c.nodes[name].part_failures[key_of(c, newest)] += 1
    c.emit("RestoreFailed", signal.detail, node=node.name, bad=list(signal.bad))
    what = f"{'checkpoint' if restore.url else 'snapshot'} of step {restore.step}"
    if restore.url and signal.corrupt:
        c.checkpoints.corrupt_steps.add(restore.step)
        c.emit("CheckpointSkipped", f"{node.name}: {signal.detail}", step=restore.step, url=restore.url)
    elif restore.url:
        if not _note_unreadable(c):
            return f"{node.name} cannot restore the {what}: {signal.detail}"
    elif not signal.bad:
        c.raised += 1
        if c.raised >= c.timing.raise_limit:
            return f"{node.name} cannot restore the {what}: {signal.detail}"
    record = note_cause(c, "connection_lost", [], "no_answer")
    reconfigure(c, f"{node.name} cannot restore the {what}: {signal.detail}", "abort", record)
    return None
