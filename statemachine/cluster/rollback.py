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

from planner.reasons import join_names, three_digits
from planner.values import Device, StatePart
from statemachine.cluster.drains import next_left_out
from statemachine.cluster.jobs import fail
from statemachine.cluster.node import NodeMachine
from statemachine.cluster.phases import Paused, Planning, Resuming
from statemachine.cluster.recovery import ask_plan, note_cause, pause, reconfigure
from statemachine.cluster.replicas import explain_loss, explain_repetition
from statemachine.cluster.snapshots.replica_peers import copy_of, held_copies, key_of
from statemachine.cluster.snapshots.snapshots import holders
from statemachine.cluster.spikes import accept
from statemachine.cluster.state import FIND, PAUSE_LIMIT, Cluster
from statemachine.effects import CheckRestore, FindCheckpoint
from statemachine.events import CheckpointFound, PlanImpossible, RestoreChecked
from statemachine.messages.cluster import RestoreFailed, TrainerLost
from statemachine.messages.values import Snapshot, Vote

RESTORE_TRIES = 3
"""Failures to get a node's part after which the node counts as one that lost it."""
UNREADABLE_TRIES = 10
"""Attempts to read the checkpoint location within ``lost_state_s`` while it is unreadable."""


def take_no_plan(c: Cluster, event: PlanImpossible) -> None:
    """Handle that there is no plan for these nodes now. If state is lost, ask whether the newest snapshot can be
    restored.
    """
    state, newest, reason = c.state, c.snapshots.newest, event.reason
    if not isinstance(state, Planning) or event.generation != state.generation:
        c.ignore("a plan of an older generation")
        return
    if state.left_out:
        ask_plan(c, state, next_left_out(c, state, reason))
        return
    if event.too_few:
        pause(c, reason, needed=event.needed)
        return
    if (repeated := explain_repetition(c)) is not None:
        fail(c, repeated)
        return
    if c.replicas.diverged is not None:
        reason = explain_loss(c, c.replicas.diverged)
    elif c.spikes.pending is not None:
        reason = c.spikes.pending.describe()
    if newest is None or not event.lost_layers or state.restore_check is not None:
        _wait_for_absent(c, reason)
        return
    state.loss_reason = reason
    _send_check(c, state, newest)


def _sources(c: Cluster, newest: Snapshot, failures: int) -> tuple[str, ...]:
    """Return the present nodes that hold a part of it, or a copy of one."""
    copied = held_copies(c, newest, failures=failures)
    return tuple(sorted({*holders(c, newest, failures=failures), *copied.values()}))


def _send_check(c: Cluster, state: Planning, newest: Snapshot, failures: int = 0) -> None:
    state.sources = _sources(c, newest, failures)
    c.out.append(
        CheckRestore(
            cause=c.cause,
            generation=state.generation,
            record=newest,
            present=holders(c, newest, failures=failures),
            copied=tuple(sorted(held_copies(c, newest, failures=failures))),
        )
    )


def take_check(c: Cluster, event: RestoreChecked) -> None:
    """Continue from the snapshot, or wait for nodes that may help."""
    state, newest = c.state, c.snapshots.newest
    if not isinstance(state, Planning) or newest is None or event.generation != state.generation:
        c.ignore("a check of a snapshot for an older generation")
        return
    others = _sources(c, newest, RESTORE_TRIES - 1)
    if not event.possible and others != state.sources:
        # A node came back meanwhile; or a node whose part was unavailable before is needed after all.
        _send_check(c, state, newest, RESTORE_TRIES - 1)
        return
    if not event.possible and c.spikes.pending is not None:
        why = f"the snapshot of step {newest.step} cannot be restored: {event.reason}, so it is accepted"
        accept(c, c.spikes.pending, why)
        reconfigure(c, "the spike of the loss is accepted", "abort", state.recovery)
        return
    if not event.possible:
        reason = (
            f"{state.loss_reason}; nor can the snapshot of step {newest.step} be restored: {event.reason}"
        )
        _wait_for_absent(c, reason)
        return
    state.restore_check = event
    _plan_from(c, state, newest.step, newest.vote, newest.groups[-1].end_layer)


def _wait_for_absent(c: Cluster, reason: str) -> None:
    """Wait a while for absent nodes that may still have the state, since no present node has it; if there are
    none, it is lost. What absent nodes hold besides snapshots does not count if it may be corrupt.
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
    checkpoint = c.checkpoints.newest
    # If nothing was committed after the persistent checkpoint, no absent node has more.
    newest_is_written = checkpoint is not None and c.progress.known_step <= checkpoint.step
    if c.checkpoints.wait_over or newest_is_written or not (live or snapshot_holders):
        _continue_without_memory(c, reason)
        return
    # Nodes that join without the state begin a generation, and must not make the wait longer.
    since = c.checkpoints.state_missing_since
    since = c.checkpoints.state_missing_since = c.at if since is None else since
    left_s = since + c.timing.lost_state_s - c.at
    if left_s <= 0:
        _continue_without_memory(c, reason)
        return
    then = "the newest checkpoint is searched for" if c.current_job.checkpoint.url else "the job fails"
    waited = (
        f"{reason}; {join_names(live + snapshot_holders)} may still hold it: waiting for their return for "
        f"{three_digits(left_s)} s, then {then}"
    )
    pause(c, waited, needed=None, pause_limited=True)
    c.set_timer(PAUSE_LIMIT, left_s)


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


def _continue_without_memory(c: Cluster, reason: str) -> None:
    """Search for a persistent checkpoint, since no memory has the state; fail the job if it writes none."""
    if not search_checkpoint(c, reason):
        # Restores that failed are counted with the errors of the job's code, and leave no error of it.
        raised = c.last_failure.strip().splitlines()[-1] if c.raised and c.repeated_error is not None else ""
        why = f"the job's code raised, {raised}, and then {reason}" if raised else reason
        fail(c, f"{why}; last failure: {c.last_failure}" if c.last_failure else why)


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


def restart_waits(c: Cluster) -> None:
    """Begin the waits for lost state again, since the broker is back: during the outage no absent node could return,
    and nobody tried the checkpoint location.
    """
    checkpoints = c.checkpoints
    limit_s = c.timing.lost_state_s
    if checkpoints.state_missing_since is not None:
        checkpoints.state_missing_since = c.at
    if checkpoints.unreadable_since is not None:
        checkpoints.unreadable_since = c.at
        limit_s /= UNREADABLE_TRIES
    if isinstance(c.state, Paused) and c.state.pause_limited:
        c.set_timer(PAUSE_LIMIT, limit_s)


def find_overdue(c: Cluster) -> None:
    """Handle a search for the newest checkpoint without an answer."""
    if isinstance(c.state, Planning):
        limit = f"{c.timing.checkpoint_location_s:g} s"
        _take_unreadable(c, f"{c.state.loss_reason}; and there was no answer in {limit}")


def _take_unreadable(c: Cluster, reason: str) -> None:
    """Try the checkpoint location again, or fail the job if it has been unreadable for long enough."""
    if _note_unreadable(c):
        _wait_for_location(c, reason)
    else:
        fail(c, f"{reason}; this has lasted for {c.timing.lost_state_s:g} s")


def pause_overdue(c: Cluster) -> None:
    """End a pause in which no node with the missing state came: return to a persistent checkpoint, if the job
    writes any.
    """
    paused = c.state
    if not isinstance(paused, Paused):
        return
    if any(node.prepare_sent for node in c.alive()):
        c.set_timer(PAUSE_LIMIT, c.timing.lost_state_s)  # It may hold what is missing.
    elif c.current_job.checkpoint.url:
        c.checkpoints.wait_over = True
        why = f"{paused.reason}; back to a persistent checkpoint"
        reconfigure(c, why, "abort", note_cause(c, "resumed", []))
    else:
        fail(c, paused.reason)


def take_checkpoint_found(c: Cluster, event: CheckpointFound) -> None:
    """Continue from the checkpoint that was found."""
    state, checkpoint = c.state, event.checkpoint
    if (
        not isinstance(state, Planning)
        or state.restore_check is not None
        or event.generation != state.generation
    ):
        c.ignore("a checkpoint for an older generation")
        return
    job = c.current_job
    c.cancel_timer(FIND)
    if event.unreadable:
        _take_unreadable(c, f"{state.loss_reason}; and the checkpoints cannot be read: {event.reason}")
        return
    for passed in event.skipped:
        c.emit("CheckpointSkipped", passed.reason, step=passed.step, url=job.checkpoint.url)
    if checkpoint is None:
        look = f"ftd checkpoint verify {job.checkpoint.url}"
        fail(c, f"{state.loss_reason}; nor is there a sound checkpoint: {event.reason} (see: {look})")
        return
    assert c.profiled is not None, "a plan was requested"
    layers = len(c.profiled.profile.layers)
    if checkpoint.layers != layers:
        fail(
            c,
            f"checkpoint.url: {job.checkpoint.url} holds a model of {checkpoint.layers} layers under the "
            f"name {job.name!r}, and this job's has {layers}: give the job another url or another name",
        )
        return
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


# --- a restore that failed -------------------------------------------------------------------------


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


def take_restore_failed(c: Cluster, node: NodeMachine, signal: RestoreFailed) -> None:
    """Try again without the nodes whose shards are unavailable."""
    group, newest = c.state, c.snapshots.newest
    restore = group.resumption.restore if isinstance(group, Resuming) else None
    if restore is None or signal.generation != c.resumed_generation:
        c.ignore("an unexpected RestoreFailed", node.name)
        return
    for name in signal.bad:
        if name in c.nodes and newest is not None:
            c.nodes[name].part_failures[key_of(c, newest)] += 1
    c.emit("RestoreFailed", signal.detail, node=node.name, bad=list(signal.bad))
    kind = "checkpoint" if restore.url else "snapshot"
    why, lost = f"{node.name} cannot restore the {kind} of step {restore.step}: {signal.detail}", False
    if restore.url and signal.corrupt:
        c.checkpoints.corrupt_steps.add(restore.step)
        c.emit("CheckpointSkipped", f"{node.name}: {signal.detail}", step=restore.step, url=restore.url)
    elif restore.url:
        lost = not _note_unreadable(c)
    elif not signal.bad:
        c.raised += 1
        lost = c.raised >= c.timing.raise_limit
    if lost:
        fail(c, why)
    else:
        reconfigure(c, why, "abort", note_cause(c, "connection_lost", [], "no_answer"))
