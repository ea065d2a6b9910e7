"""Persistent checkpoints: the first snapshot that is far enough after the last checkpoint is written to
storage.

Its layers are divided among the nodes that hold it (``Persist``), which write them into a draft while
training continues. Once all have done so (``LayersPersisted``), the checkpoint is committed, and only then
does it exist. Until then the snapshot is *pinned*: nodes retain it next to the newest one. If anything goes
wrong, the attempt is abandoned, and the next snapshot is tried. Training never waits for this; the job's
end waits for the checkpoint of the last step.

Checkpoints are exported for ``from_pretrained`` while training continues. Every so many steps the newest
complete checkpoint is exported (``ExportCheckpoint``), and that of the last step always. Training never
waits for it; the job's end does, as long as for the last checkpoint itself. One export is under way at a
time. A coordinator that takes over exports again what it does not know to be done; the export then finds
that it exists already.
"""

from planner.reasons import join_names
from planner.values import ModelProfile
from statemachine.cluster.node import NodeMachine
from statemachine.cluster.phases import Running
from statemachine.cluster.snapshots import checkpoint_intervals
from statemachine.cluster.snapshots.orders import last_checkpoint_missing
from statemachine.cluster.snapshots.snapshot_state import CheckpointWrite
from statemachine.cluster.snapshots.snapshots import abandon_last_checkpoint, holders
from statemachine.cluster.state import FINISH, PERSIST, Cluster
from statemachine.effects import AbandonCheckpoint, CommitCheckpoint, ExportCheckpoint
from statemachine.events import (
    CheckpointCommitFailed,
    CheckpointCommitted,
    ExportCompleted,
    ExportFailed,
)
from statemachine.messages.cluster import (
    CancelPersist,
    Hello,
    LayersPersisted,
    Persist,
    PersistFailed,
    RetainSnapshot,
)
from statemachine.messages.values import CheckpointRecord, Job, Snapshot
from storage.values import job_mark, short_digest


def attempt_of(job: Job, record: Snapshot) -> str:
    """Return the name of the draft, which no other job and no other state of this job shares."""
    return f"{record.generation}_{record.step}_{short_digest(job.job_id)}{job_mark(job.name)}"


def share_layers(
    record: Snapshot, owners: tuple[str, ...], profile: ModelProfile
) -> dict[str, tuple[int, ...]]:
    """Assign each layer to one of its present owners, so that all write about as many bytes.

    A layer that none of them owns is left out.
    """
    load = dict.fromkeys(owners, 0)
    shares: dict[str, list[int]] = {name: [] for name in owners}
    layers = [
        (layer, [name for name in group.owners if name in load])
        for group in record.groups
        for layer in range(group.first_layer, group.end_layer)
    ]
    for layer, names in sorted(layers, key=lambda one: (-profile.layers[one[0]].state_bytes, one[0])):
        if names:
            least = min(names, key=lambda name: (load[name], len(shares[name]), name))
            load[least] += profile.layers[layer].state_bytes
            shares[least].append(layer)
    return {name: tuple(sorted(share)) for name, share in shares.items() if share}


# --- beginning a checkpoint ----------------------------------------------------------------------


def reconcile(c: Cluster) -> None:
    """Begin a checkpoint when it is time; abandon one that cannot be finished."""
    writing, newest = c.checkpoints.writing, c.snapshots.newest
    if not c.connected:
        return  # no node can be heard, so none counts as gone
    _limit_end(c)
    if writing is not None:
        gone = sorted(name for name in writing.shares if _is_gone(c, writing, name))
        if gone and not writing.committing:
            abandon(c, f"{', '.join(gone)} held a part of the snapshot and is gone")
    elif newest is not None and isinstance(c.state, Running) and _is_due(c, newest):
        _begin(c, newest)


def _limit_end(c: Cluster) -> None:
    """Limit the time for which a finished job waits for its last checkpoint or export, whatever delays them."""
    if not isinstance(c.state, Running) or not (last_checkpoint_missing(c) or last_export_missing(c)):
        c.cancel_timer(FINISH)
    elif FINISH not in c.due:
        c.set_timer(FINISH, _finish_limit_s(c))


def _finish_limit_s(c: Cluster) -> float:
    layers = c.profiled.profile.layers if c.profiled is not None else ()
    return c.timing.finish_limit_s(sum(layer.state_bytes for layer in layers))


def _is_gone(c: Cluster, writing: CheckpointWrite, name: str) -> bool:
    node = c.nodes.get(name)
    here = node is not None and node.alive and node.incarnation == writing.incarnations.get(name)
    return not here and name not in writing.files


def _is_due(c: Cluster, newest: Snapshot) -> bool:
    """Return whether the snapshot is far enough after the last checkpoint and whole; that of the last step
    need not be whole.
    """
    checkpoints, job = c.checkpoints, c.current_job
    if job.checkpoint.every_steps < 1 or newest.step <= checkpoints.last_tried_step:
        return False
    if newest.step >= job.steps:
        return newest.step > checkpoints.last_step
    whole = len(holders(c, newest)) == len(newest.owners)
    return whole and newest.step - checkpoints.last_step >= job.checkpoint.every_steps


def _begin(c: Cluster, newest: Snapshot) -> None:
    job, profiled, checkpoints = c.current_job, c.profiled, c.checkpoints
    assert profiled is not None, "a job that trains was measured"
    owners = holders(c, newest)
    shares = share_layers(newest, owners, profiled.profile)
    checkpoints.last_tried_step = newest.step
    if sum(map(len, shares.values())) < newest.groups[-1].end_layer:
        _publish_abandoned(c, newest, "no node is left that held some of its layers")
        return
    checkpoints.writing = CheckpointWrite(
        record=newest,
        attempt=attempt_of(job, newest),
        shares=shares,
        incarnations={name: c.nodes[name].incarnation for name in shares},
        sources={name: c.nodes[name].facts.snapshot_server for name in owners},
        began_at=c.at,
    )
    c.persist()
    for name in shares:
        send_order(c, c.nodes[name])
    c.set_timer(PERSIST, c.timing.persist_s)
    c.emit(
        "CheckpointStarted",
        f"{join_names(list(shares))} write the state after step {newest.step} to {job.checkpoint.url}",
        step=newest.step,
        url=job.checkpoint.url,
        layers={name: len(share) for name, share in shares.items()},
    )
    c.publish()


def send_order(c: Cluster, node: NodeMachine) -> None:
    """Send a node the order to write its share."""
    job, writing = c.current_job, c.checkpoints.writing
    assert writing is not None, "one is being written"
    c.send(
        node,
        Persist(
            job_id=job.job_id,
            job_name=job.name,
            url=job.checkpoint.url,
            attempt=writing.attempt,
            record=writing.record,
            layers=writing.shares[node.name],
            sources=writing.sources,
        ),
    )


def repeat_order(c: Cluster, node: NodeMachine, signal: Hello) -> None:
    """Repeat a node's order, which it may have missed; the node itself reports what it has done."""
    writing, job = c.checkpoints.writing, c.job
    if writing is None or job is None or signal.job_id != job.job_id:
        return
    if node.name in writing.unwritten and not _is_gone(c, writing, node.name):
        send_order(c, node)


# --- its outcome ---------------------------------------------------------------------------------


def _concerns(c: Cluster, node: NodeMachine, signal: LayersPersisted | PersistFailed) -> bool:
    writing = c.checkpoints.writing
    return (
        writing is not None
        and signal.attempt == writing.attempt
        and signal.step == writing.record.step
        and node.name in writing.shares
        and not writing.committing
    )


def take_persisted(c: Cluster, node: NodeMachine, signal: LayersPersisted) -> None:
    """Record a node's files; with the last node's report every layer is on the disk."""
    writing, job = c.checkpoints.writing, c.job
    if writing is None or job is None or not _concerns(c, node, signal):
        c.ignore("an unexpected LayersPersisted", node.name)
        return
    if tuple(file.layer for file in signal.layers) != writing.shares[node.name]:
        abandon(c, f"{node.name} wrote other layers than it was ordered to")
        return
    writing.files[node.name] = signal.layers
    if all_written(writing):
        writing.committing = True
        c.set_timer(PERSIST, c.timing.checkpoint_location_s)
        c.out.append(
            CommitCheckpoint(
                cause=c.cause,
                job=job,
                attempt=writing.attempt,
                step=writing.record.step,
                vote=writing.record.vote,
                layers=tuple(file for files in writing.files.values() for file in files),
            )
        )


def all_written(writing: CheckpointWrite) -> bool:
    return not writing.unwritten


def take_persist_failed(c: Cluster, node: NodeMachine, signal: PersistFailed) -> None:
    if _concerns(c, node, signal):
        abandon(c, f"{node.name}: {signal.detail}")
    else:
        c.ignore("an unexpected PersistFailed", node.name)


def take_committed(c: Cluster, event: CheckpointCommitted) -> None:
    """Record the checkpoint as complete, since its manifest is written."""
    writing, checkpoints = c.checkpoints.writing, c.checkpoints
    if writing is None or event.attempt != writing.attempt or event.step != writing.record.step:
        checkpoints.unanswered.pop(event.attempt, None)
        c.ignore("an abandoned checkpoint that is complete nevertheless")
        return
    record, files = writing.record, [file for files in writing.files.values() for file in files]
    checkpoints.newest = CheckpointRecord(
        step=record.step,
        vote=record.vote,
        layers=len(files),
        size_bytes=sum(file.size_bytes for file in files),
    )
    checkpoints.writing = None
    checkpoints.corrupt_steps.discard(record.step)
    c.cancel_timer(PERSIST)
    c.persist()
    c.emit(
        "CheckpointCompleted",
        f"the state after step {record.step} is complete on the disk",
        step=record.step,
        size_bytes=checkpoints.newest.size_bytes,
        took_s=round(c.at - writing.began_at, 6),
        pruned=list(event.pruned),
    )
    _unpin(c, record)
    checkpoint_intervals.note_checkpoint(c, took_s=c.at - writing.began_at)


def take_commit_failed(c: Cluster, event: CheckpointCommitFailed) -> None:
    writing = c.checkpoints.writing
    if writing is None or event.attempt != writing.attempt or event.step != writing.record.step:
        c.checkpoints.unanswered.pop(event.attempt, None)
        c.ignore("a failed commit of an abandoned checkpoint")
        return
    writing.committing = False
    abandon(c, event.detail)


def overdue(c: Cluster) -> None:
    writing = c.checkpoints.writing
    if writing is not None and writing.committing:
        abandon(
            c, f"every layer is written, and the commit did not end in {c.timing.checkpoint_location_s:g} s"
        )
    elif writing is not None:
        late = writing.unwritten
        abandon(c, f"{', '.join(late)} did not write the layers in {c.timing.persist_s:g} s")


def end_overdue(c: Cluster) -> None:
    """End the job without the checkpoint of the last step, or its export, since it is not complete in time."""
    late = f"it is not complete {_finish_limit_s(c):g} s after the last step"
    if last_export_missing(c) and c.checkpoints.newest is not None:
        _abandon_export(c, c.checkpoints.newest.step, late)
    if not last_checkpoint_missing(c):
        return
    abandon(c, late)
    if not c.checkpoints.final_abandoned:
        abandon_last_checkpoint(c, f"there is no checkpoint of the last step: {late}")


def abandon(c: Cluster, why: str) -> None:
    """Abandon the checkpoint that is being written, if one is; the next snapshot is tried."""
    writing, job = c.checkpoints.writing, c.job
    if writing is None or job is None:
        return
    c.checkpoints.writing = None
    if writing.committing:
        c.checkpoints.unanswered[writing.attempt] = writing.record.step
    c.cancel_timer(PERSIST)
    ordered = [c.nodes[name] for name in writing.shares if name in c.nodes and c.nodes[name].alive]
    c.send_all(ordered, CancelPersist(job_id=job.job_id, attempt=writing.attempt))
    c.out.append(AbandonCheckpoint(cause=c.cause, job=job, attempt=writing.attempt, step=writing.record.step))
    _publish_abandoned(c, writing.record, why)
    _unpin(c, writing.record)


def _publish_abandoned(c: Cluster, record: Snapshot, why: str) -> None:
    checkpoints, job = c.checkpoints, c.current_job
    checkpoints.final_abandoned = checkpoints.final_abandoned or record.step >= job.steps
    c.persist()
    c.emit("CheckpointAbandoned", why, step=record.step, last_complete_step=checkpoints.last_step or None)
    c.publish()
    c.dirty = True


def _unpin(c: Cluster, record: Snapshot) -> None:
    """Release the older snapshot. If this message is lost, the next RetainSnapshot repeats it."""
    newest, job = c.snapshots.newest, c.job
    if newest is not None and newest.step > record.step and job is not None:
        keep = RetainSnapshot(job_id=job.job_id, step=newest.step, lineage=c.lineage)
        c.send_all((node for node in c.alive() if node.prepared), keep)
    c.publish()
    c.dirty = True


# --- rollback ------------------------------------------------------------------------------------


def discard_after(c: Cluster, checkpoint: CheckpointRecord) -> None:
    """Discard what was written or tried after this checkpoint, to which all trainers return."""
    checkpoints = c.checkpoints
    abandon(c, f"all trainers go back to step {checkpoint.step}")
    checkpoints.newest, checkpoints.last_tried_step = checkpoint, checkpoint.step
    checkpoints.exported_step = min(checkpoints.exported_step, checkpoint.step)
    checkpoints.final_abandoned = False
    # What may still be committed belongs to steps that are undone.
    checkpoints.corrupt_steps |= {step for step in checkpoints.unanswered.values() if step > checkpoint.step}


# --- exports --------------------------------------------------------------------------------------


def reconcile_export(c: Cluster) -> None:
    """Begin an export when it is time."""
    job, checkpoints = c.job, c.checkpoints
    if job is None or checkpoints.exporting is not None or not _export_due(c):
        return
    assert checkpoints.newest is not None, "a checkpoint is due"
    checkpoints.exporting = checkpoints.newest.step
    c.out.append(
        ExportCheckpoint(cause=c.cause, job=job, step=checkpoints.newest.step, limit_s=c.timing.persist_s)
    )


def _export_due(c: Cluster) -> bool:
    job, newest, exported_step = c.job, c.checkpoints.newest, c.checkpoints.exported_step
    if job is None or newest is None or job.checkpoint.huggingface_every_steps < 1:
        return False
    if newest.step <= exported_step:
        return False
    return newest.step - exported_step >= job.checkpoint.huggingface_every_steps or newest.step >= job.steps


def last_export_missing(c: Cluster) -> bool:
    """Return whether all steps are done and the checkpoint of the last one has yet to be exported."""
    job, newest = c.job, c.checkpoints.newest
    return job is not None and c.ended and newest is not None and newest.step >= job.steps and _export_due(c)


def take_exported(c: Cluster, event: ExportCompleted) -> None:
    """Record that an export is complete."""
    if not _concerns_export(c, event.job_id, event.step):
        c.ignore("an unexpected export")
        return
    _end_export(c, event.step)
    c.emit(
        "CheckpointExported",
        f"the state after step {event.step} can be loaded from {event.directory}",
        step=event.step,
        directory=event.directory,
        size_bytes=event.size_bytes,
        took_s=event.took_s,
    )


def take_export_failed(c: Cluster, event: ExportFailed) -> None:
    """Record that an export failed; the next checkpoint that is due is tried."""
    if not _concerns_export(c, event.job_id, event.step):
        c.ignore("an unexpected failed export")
        return
    _abandon_export(c, event.step, event.detail)


def _abandon_export(c: Cluster, step: int, why: str) -> None:
    job = c.current_job
    _end_export(c, step)
    c.emit("CheckpointExportFailed", why, step=step, directory=job.checkpoint.huggingface_directory)


def _concerns_export(c: Cluster, job_id: str, step: int) -> bool:
    return c.job is not None and c.job.job_id == job_id and c.checkpoints.exporting == step


def _end_export(c: Cluster, step: int) -> None:
    c.checkpoints.exporting = None
    # A rollback may have happened meanwhile, so that the export is of steps that were undone.
    newest = c.checkpoints.newest
    c.checkpoints.exported_step = min(step, newest.step) if newest is not None else step
    c.dirty = True
    c.persist()
