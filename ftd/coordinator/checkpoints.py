"""The coordinator's part of persistent checkpoints: it finds them, commits them and removes old ones.

All of this waits for a disk or a network, so it happens in threads: one thread makes all changes in order,
and each look-up has a thread of its own. They are daemon threads, so that a file system that hangs cannot
keep the coordinator from ending. Nodes write the bytes (``ftd.snapshots.persist``); the coordinator reads
only headers, and the node that reads a layer verifies its bytes.
"""

import asyncio
import os
import queue
import threading
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import msgspec
import structlog

import ftd
from ftd.errors import CheckpointError, ConfigurationError
from ftd.snapshots.checkpoint_export import run_export
from statemachine.effects import AbandonCheckpoint, CommitCheckpoint, ExportCheckpoint, FindCheckpoint
from statemachine.events import (
    CheckpointCommitFailed,
    CheckpointCommitted,
    CheckpointFound,
    Event,
    ExportCompleted,
    ExportFailed,
)
from statemachine.messages.values import CheckpointRecord, Job, SkippedCheckpoint, Vote
from storage.checkpoint import CheckpointManifest, CheckpointStore
from storage.errors import LocationError, StorageError
from storage.layerstate import fingerprint_of

_log = structlog.get_logger("ftd.checkpoints")


class CheckpointService:
    """The operations on checkpoint locations that the machine and clients request."""

    def __init__(self, feed: Callable[[Event], None], now: Callable[[], float]) -> None:
        self._feed = feed
        self._now = now
        self._changes: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._changing = False
        self._exporting: list[int] = []
        """Steps of the checkpoints that are being exported, which must not be removed."""

    # --- the machine's effects -------------------------------------------------------------------

    def commit(self, effect: CommitCheckpoint) -> None:
        """Commit a checkpoint and feed CheckpointCommitted or CheckpointCommitFailed."""
        self._change(lambda: commit(effect, self._now(), spared=tuple(self._exporting)))

    def abandon(self, effect: AbandonCheckpoint) -> None:
        """Remove the files of an attempt. What cannot be removed now is removed by the next ``prune``."""
        self._change(lambda: abandon(effect))

    def export(self, effect: ExportCheckpoint) -> None:
        """Export a checkpoint and feed ExportCompleted or ExportFailed. The checkpoint is not removed before
        that.
        """
        self._exporting.append(effect.step)

        def work() -> ExportCompleted | ExportFailed:
            try:
                return export(effect, self._now)
            finally:
                self._exporting.remove(effect.step)

        _start(self._with_answer(work))

    def find(self, effect: FindCheckpoint) -> None:
        """Find the newest usable checkpoint and feed CheckpointFound."""
        _start(self._with_answer(lambda: find(effect, self._now())))

    # --- before a job is submitted ---------------------------------------------------------------

    def find_initial(self, job: Job, then: Callable[[CheckpointRecord | None, str], None]) -> None:
        """Call ``then`` with the checkpoint that the job begins from, and with the reason why it may not
        begin, or ``""``.
        """
        loop = asyncio.get_running_loop()

        def look() -> None:
            begin, rejection = None, ""
            try:
                begin = find_initial_checkpoint(job)
            except ConfigurationError as error:
                rejection = str(error)
            except Exception as error:
                rejection = _describe_unexpected(error)
            _call_on_loop(loop, lambda: then(begin, rejection))

        _start(look)

    # --- threads ---------------------------------------------------------------------------------

    def _change(self, work: Callable[[], Event | None]) -> None:
        self._changes.put(self._with_answer(work))
        if not self._changing:
            self._changing = True
            _start(self._run_changes)

    def _run_changes(self) -> None:
        while True:
            self._changes.get()()

    def _with_answer(self, work: Callable[[], Event | None]) -> Callable[[], None]:
        loop = asyncio.get_running_loop()

        def answer() -> None:
            event = work()
            if event is not None:
                _call_on_loop(loop, lambda: self._feed(event))

        return answer


def _start(work: Callable[[], None]) -> None:
    threading.Thread(target=work, name="checkpoints", daemon=True).start()


def _call_on_loop(loop: asyncio.AbstractEventLoop, action: Callable[[], None]) -> None:
    if not loop.is_closed():  # The coordinator may have ended in the meantime.
        loop.call_soon_threadsafe(action)


# --- the work itself ---------------------------------------------------------------------------------


def _describe_unexpected(error: Exception) -> str:
    """Log an unexpected error and return it in words: the machine waits for an answer, and the thread has
    other work.
    """
    _log.exception("unexpected_error")
    return f"{type(error).__name__}: {error}"


def _store(job: Job, *, create: bool = False) -> CheckpointStore:
    return CheckpointStore.at(job.checkpoint.url, job=job.name, create=create)


def export(effect: ExportCheckpoint, now: Callable[[], float]) -> ExportCompleted | ExportFailed:
    """Export a checkpoint of the job. Every error is returned as ``ExportFailed``."""
    job, began_at = effect.job, now()
    policy = job.checkpoint
    try:
        done = run_export(policy.url, job.name, effect.step, policy.huggingface_directory, effect.limit_s)
    except Exception as error:
        detail = str(error) if isinstance(error, CheckpointError) else _describe_unexpected(error)
        return ExportFailed(at=now(), cause=effect.cause, job_id=job.job_id, step=effect.step, detail=detail)
    return ExportCompleted(
        at=now(),
        cause=effect.cause,
        job_id=job.job_id,
        step=effect.step,
        directory=done.directory,
        size_bytes=done.size_bytes,
        took_s=round(now() - began_at, 6),
    )


def commit(
    effect: CommitCheckpoint, at: float, spared: Collection[int] = ()
) -> CheckpointCommitted | CheckpointCommitFailed:
    """Write the manifest of what the nodes have written, then remove checkpoints that are too old.

    :param spared: steps of checkpoints that must not be removed yet.
    """
    job = effect.job
    fields: dict[str, Any] = {"at": at, "cause": effect.cause, "attempt": effect.attempt, "step": effect.step}
    try:
        store = _store(job)
        store.commit(
            store.begin(effect.step, effect.attempt),
            effect.layers,
            job=job.name,
            job_id=job.job_id,
            vote=msgspec.to_builtins(effect.vote),
            written_at=time.time(),
            ftd_version=ftd.__version__,
        )
    except (StorageError, ValueError) as error:
        return CheckpointCommitFailed(**fields, detail=str(error))
    except Exception as error:
        return CheckpointCommitFailed(**fields, detail=_describe_unexpected(error))
    pruned: tuple[int, ...] = ()
    try:
        pruned = store.prune(job.checkpoint.keep, newest=effect.step, exempt=spared)
    except Exception as error:
        # The checkpoint is committed; old ones are removed next time.
        _log.warning("prune_failed", url=job.checkpoint.url, reason=str(error))
    return CheckpointCommitted(**fields, pruned=pruned)


def abandon(effect: AbandonCheckpoint) -> None:
    """Remove the files of an attempt, unless they were committed: then they belong to a checkpoint, although
    the commit was never acknowledged.
    """
    job = effect.job
    try:
        store = _store(job)
        if not any(_is_of(manifest, effect) for manifest in store.manifests()):
            store.abandon(store.begin(effect.step, effect.attempt))
    except Exception as error:
        _log.warning("abandon_failed", url=job.checkpoint.url, reason=f"{type(error).__name__}: {error}")


def _is_of(manifest: CheckpointManifest, effect: AbandonCheckpoint) -> bool:
    if manifest.step != effect.step:
        return False
    return any(file.name.endswith(f"-{effect.attempt}.bin") for file in manifest.layers)


def find(effect: FindCheckpoint, at: float) -> CheckpointFound:
    """Find the newest checkpoint that is complete and not known to be corrupt."""
    fields: dict[str, Any] = {"at": at, "cause": effect.cause, "generation": effect.generation}
    try:
        found, skipped = find_newest_checkpoint(effect.job, effect.corrupt_steps)
    except Exception as error:
        reason = str(error) if isinstance(error, StorageError) else _describe_unexpected(error)
        return CheckpointFound(**fields, checkpoint=None, skipped=(), reason=reason, unreadable=True)
    reason = (
        ""
        if found is not None
        else f"{effect.job.checkpoint.url} has no checkpoint of job {effect.job.name!r}"
    )
    return CheckpointFound(**fields, checkpoint=found, skipped=skipped, reason=reason)


def find_newest_checkpoint(
    job: Job, corrupt_steps: tuple[int, ...] = ()
) -> tuple[CheckpointRecord | None, tuple[SkippedCheckpoint, ...]]:
    """Return the newest usable checkpoint, and the newer ones that were skipped.

    :raises StorageError: the location cannot be read.
    """
    store = _store(job)
    manifests = store.manifests()
    skipped = [SkippedCheckpoint(step=None, reason=note) for note in (*store.problems, *store.unfinished)]
    for manifest in manifests:
        if manifest.step in corrupt_steps:
            skipped.append(SkippedCheckpoint(step=manifest.step, reason="a node found it corrupt"))
        elif problem := _problem_of(store, manifest):
            skipped.append(SkippedCheckpoint(step=manifest.step, reason=problem))
        else:
            return _checkpoint(manifest), tuple(skipped)
    return None, tuple(skipped)


def _problem_of(store: CheckpointStore, manifest: CheckpointManifest) -> str:
    """Return what is wrong with a checkpoint, as far as its headers show, or an empty string.

    :raises LocationError: they cannot be read; that does not make an older checkpoint the newest usable one.
    """
    try:
        _vote(manifest)
        if fingerprint_of(store.open(manifest.step).headers()) != manifest.fingerprint:
            return "the model's fingerprint is not that of its layers"
    except LocationError:
        raise
    except (StorageError, msgspec.ValidationError) as error:
        return str(error)
    return ""


def _vote(manifest: CheckpointManifest) -> Vote:
    """Return the vote that the manifest holds.

    :raises msgspec.ValidationError: the manifest holds no vote.
    """
    return msgspec.convert(manifest.vote, Vote)


def _checkpoint(manifest: CheckpointManifest) -> CheckpointRecord:
    return CheckpointRecord(
        step=manifest.step,
        vote=_vote(manifest),
        layers=len(manifest.layers),
        size_bytes=manifest.size_bytes,
    )


def find_initial_checkpoint(job: Job) -> CheckpointRecord | None:
    """Return the checkpoint that a submitted job begins from, and create the directory if necessary.

    :raises ConfigurationError: the location cannot be used, or holds checkpoints that the job would mix
        with.
    """
    policy = job.checkpoint
    if not policy.url:
        return None
    if policy.huggingface_directory:
        _make_exports(policy.huggingface_directory)
    try:
        _store(job, create=True)
        begin, skipped = find_newest_checkpoint(job)
    except StorageError as error:
        raise ConfigurationError(
            str(error),
            field="checkpoint.url",
            remedy="the coordinator and every node must be able to write there, under the same name",
        ) from None
    if begin is not None and not policy.resume:
        raise ConfigurationError(
            f"{policy.url} holds checkpoints of a job {job.name!r}, the newest of step {begin.step}",
            field="checkpoint.resume",
            remedy="set it to true to continue from it, or give this job another url or name",
        )
    for passed in skipped:
        _log.warning("checkpoint_skipped", url=policy.url, step=passed.step, reason=passed.reason)
    return begin


def _make_exports(directory: str) -> None:
    """Create the directory for exports.

    :raises ConfigurationError: nothing can be exported there.
    """
    try:
        Path(directory).mkdir(parents=True, exist_ok=True)
        problem = "" if os.access(directory, os.W_OK | os.X_OK) else "it cannot be written"
    except OSError as error:
        problem = error.strerror or str(error)
    if problem:
        raise ConfigurationError(
            f"{directory}: {problem}",
            field="checkpoint.huggingface_directory",
            remedy="name a directory that every coordinator can write to, under the same name",
        )
