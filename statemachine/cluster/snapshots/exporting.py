"""Exports of persistent checkpoints for ``from_pretrained``, beside training.

Every so many steps the newest complete checkpoint is exported (``ExportCheckpoint``), and the last step's
always. Training never waits for it; the job's end does, as long as for the last checkpoint itself. One is under
way at a time. A coordinator that takes over exports again what it does not know to be done: whoever exports
finds that it is there already.
"""

from statemachine.cluster.state import Cluster
from statemachine.effects import ExportCheckpoint
from statemachine.events import CheckpointExported, CheckpointExportFailed


def pursue(c: Cluster) -> None:
    """Begin one when it is time."""
    job, persisting = c.job, c.persisting
    if job is None or persisting.exporting is not None or not _due(c):
        return
    assert persisting.newest is not None, "a checkpoint is due"
    persisting.exporting = persisting.newest.step
    c.out.append(
        ExportCheckpoint(cause=c.cause, job=job, step=persisting.newest.step, limit_s=c.timing.persist_s)
    )


def _due(c: Cluster) -> bool:
    job, newest, exported_step = c.job, c.persisting.newest, c.persisting.exported_step
    if job is None or newest is None or job.checkpoint.huggingface_every_steps < 1:
        return False
    if newest.step <= exported_step:
        return False
    return newest.step - exported_step >= job.checkpoint.huggingface_every_steps or newest.step >= job.steps


def last_export_wanted(c: Cluster) -> bool:
    """Return whether all steps are done, and the checkpoint of the last one has yet to be exported."""
    job, newest = c.job, c.persisting.newest
    return job is not None and c.ended and newest is not None and newest.step >= job.steps and _due(c)


def exported(c: Cluster, event: CheckpointExported) -> None:
    """Take word that an export is complete."""
    if not _concerns(c, event.job_id, event.step):
        c.ignore("an export that nobody waits for")
        return
    _settle(c, event.step)
    c.emit(
        "CheckpointExported",
        f"the state after step {event.step} can be loaded from {event.directory}",
        step=event.step,
        directory=event.directory,
        size_bytes=event.size_bytes,
        took_s=event.took_s,
    )


def export_failed(c: Cluster, event: CheckpointExportFailed) -> None:
    """Take word that an export cannot be; the next checkpoint that is due is tried."""
    if not _concerns(c, event.job_id, event.step):
        c.ignore("a failed export that nobody waits for")
        return
    _give_up(c, event.step, event.detail)


def end_overdue(c: Cluster, limit_s: float) -> None:
    """The last step's export is not there in time: the job ends without it."""
    if last_export_wanted(c) and c.persisting.newest is not None:
        step = c.persisting.newest.step
        _give_up(c, step, f"it is not complete {limit_s:g} s after the last step")


def _give_up(c: Cluster, step: int, why: str) -> None:
    job = c.job
    assert job is not None, "a checkpoint is of a job"
    _settle(c, step)
    c.emit("CheckpointExportFailed", why, step=step, directory=job.checkpoint.huggingface_directory)


def _concerns(c: Cluster, job_id: str, step: int) -> bool:
    return c.job is not None and c.job.job_id == job_id and c.persisting.exporting == step


def _settle(c: Cluster, step: int) -> None:
    c.persisting.exporting = None
    # Everybody may have gone back meanwhile: what was exported is of a past that was undone.
    newest = c.persisting.newest
    c.persisting.exported_step = min(step, newest.step) if newest is not None else step
    c.dirty = True
    c.persist()
