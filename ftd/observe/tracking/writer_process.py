"""The coordinator's end of the writer: starts it while the coordinator leads a job that is logged."""

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import structlog

from ftd.observe.tracking.protocol import (
    FromWriter,
    LoggedJobEnded,
    SinkFailed,
    SinkRestored,
    StepsMissing,
    StepsSkipped,
    WriterAssignment,
)
from ftd.observe.tracking.writer import FINISH_S, INCOMPLETE, OVER_S
from ftd.processes import module_command
from statemachine.messages.values import Job

_log = structlog.get_logger("ftd.observe.tracking")

COMMAND = module_command("ftd.observe.tracking.writer")
_FIRST_RETRY_S, _LAST_RETRY_S = 1.0, 30.0
CLOSING_S = 60.0
"""Time that a coordinator that ends gives its writer."""
_MOST_TRIES = 5
"""Writers for a job that is over."""
_LINE_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedJob:
    """A job that is to be logged, as it is now."""

    job: Job
    term: int
    outcome: str | None
    """``FINISHED`` or ``FAILED`` after the end of the job: the rest is logged, and the writer ends."""


class TrackingWriterProcess:
    """Keeps one writer running for as long as something is to be logged. All of it on the event loop."""

    def __init__(
        self,
        journal: Path,
        *,
        on_failed: Callable[[str, str], None],
        on_missing: Callable[[int, int], None],
        command: Sequence[str] = COMMAND,
    ) -> None:
        """:param failed: called with the sink and what is wrong, once for each outage.
        :param missed: called with the first and the last step that the journal lacks.
        """
        self._journal, self._failed, self._missed, self._command = journal, on_failed, on_missing, command
        self._wanted: LoggedJob | None = None
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._over: set[str] = set()
        """Jobs that are over and written."""
        self._closing = False
        self._told: LoggedJob | None = None
        """Whose outcome the present writer knows."""
        self._pid: int | None = None
        self._refused = ""

    @property
    def idle(self) -> bool:
        """Nothing is logged, and no writer is left."""
        return self._task is None

    @property
    def pid(self) -> int | None:
        """The writer's process, while one runs."""
        return self._pid

    def set_job(self, job: Job | None, term: int, outcome: str | None) -> None:
        """Log this job from now on; cheap to call again with the same.

        :param job: the job that this coordinator leads; ``None``: it leads none.
        :param outcome: ``FINISHED`` or ``FAILED`` after the end of the job.
        """
        wanted = None
        if job is not None and job.logging.directory and job.job_id not in self._over:
            wanted = LoggedJob(job=job, term=term, outcome=outcome)
        before = self._wanted
        if wanted is None and before is None:
            return
        if wanted is not None and before is not None:
            same = wanted.job.job_id == before.job.job_id and wanted.term == before.term
            if same and wanted.outcome == before.outcome:
                return
        self._wanted = wanted
        self._changed.set()
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run())

    async def close(self) -> None:
        """Let the writer finish, and leave none behind."""
        self._closing = True
        self._changed.set()
        if self._task is not None:
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        """Start writers until nothing is to be logged any more."""
        retry_s, tries = _FIRST_RETRY_S, 0
        while (wanted := self._wanted) is not None:
            if self._closing and (tries or wanted.outcome is None):
                break
            self._changed.clear()
            problem = await self._write(wanted)
            last = self._wanted
            tries = tries + 1 if last is not None and last.outcome is not None else 0
            if last is not None and (tries >= _MOST_TRIES or (last is self._told and not problem)):
                self._over.add(last.job.job_id)
                self._wanted = None
            if problem:
                self._report(SinkFailed(sink="writer", detail=problem))
                await self._rest(retry_s)
                retry_s = min(2 * retry_s, _LAST_RETRY_S)
            else:
                retry_s, self._refused = _FIRST_RETRY_S, ""
                if self._wanted == wanted:  # It left by itself: a later leader's writer is there.
                    await self._rest(_LAST_RETRY_S)
        self._task = None

    async def _rest(self, for_s: float) -> None:
        """Wait until something changes, at most for so long."""
        if self._closing:
            return
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._changed.wait(), for_s)

    async def _write(self, wanted: LoggedJob) -> str:
        """Have one process write for as long as this is wanted; return what went wrong, or an empty text."""
        try:
            process = await asyncio.create_subprocess_exec(
                *self._command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                limit=_LINE_BYTES,
            )
        except OSError as error:
            return f"it cannot be started: {error}"
        assert process.stdin and process.stdout, "both were asked for"
        self._pid = process.pid
        hearing = asyncio.ensure_future(self._hear(process.stdout))
        ended = asyncio.create_task(process.wait())
        try:
            self._say(process.stdin, self._assignment(wanted))
            await self._while_wanted(wanted, process.stdin, ended)
        finally:
            process.stdin.close()
            await self._ended(ended)
            if not ended.done():
                process.kill()
            await asyncio.gather(ended, hearing, return_exceptions=True)
            with contextlib.suppress(OSError):
                await process.stdin.wait_closed()
            self._pid = None
        if process.returncode == INCOMPLETE:
            return "it left before everything was logged"
        if process.returncode != 0:
            return f"it ended with {process.returncode}"
        return ""

    async def _ended(self, ended: "asyncio.Task[int]") -> None:
        """Wait for the writer's end: longer if the job is over and nothing else is to be logged."""
        wanted = self._wanted
        if wanted is not None and wanted is self._told:
            self._changed.clear()
            changed = asyncio.create_task(self._changed.wait())
            await asyncio.wait({ended, changed}, timeout=OVER_S, return_when=asyncio.FIRST_COMPLETED)
            changed.cancel()
        await asyncio.wait([ended], timeout=CLOSING_S if self._closing else FINISH_S + 5.0)

    async def _while_wanted(
        self, wanted: LoggedJob, stdin: asyncio.StreamWriter, ended: "asyncio.Task[int]"
    ) -> None:
        """Return when it is to write no longer, or has ended."""
        job = wanted.job.job_id
        while True:
            now = self._wanted
            if now is None or (now.job.job_id, now.term) != (job, wanted.term):
                return
            if now.outcome is not None:
                self._told = now
                self._say(stdin, LoggedJobEnded(outcome=now.outcome))
                return
            if self._closing:
                return
            self._changed.clear()
            changed = asyncio.create_task(self._changed.wait())
            await asyncio.wait({changed, ended}, return_when=asyncio.FIRST_COMPLETED)
            changed.cancel()
            if ended.done():
                return

    def _assignment(self, wanted: LoggedJob) -> WriterAssignment:
        job = wanted.job
        return WriterAssignment(
            journal=str(self._journal),
            job=job.job_id,
            term=wanted.term,
            policy=job.logging,
            parameters=_parameters(job),
        )

    def _say(self, stdin: asyncio.StreamWriter, said: WriterAssignment | LoggedJobEnded) -> None:
        with contextlib.suppress(OSError):  # It has ended; its exit status says why.
            stdin.write(msgspec.json.encode(said) + b"\n")

    async def _hear(self, stdout: asyncio.StreamReader) -> None:
        while line := await stdout.readline():
            try:
                self._report(_FROM_WRITER.decode(line))
            except msgspec.DecodeError:
                _log.warning("not_understood", said=line[:200].decode("utf-8", errors="replace"))

    def _report(self, said: FromWriter) -> None:
        match said:
            case SinkFailed():
                if said.sink == "writer" and said.detail == self._refused:
                    return
                if said.sink == "writer":
                    self._refused = said.detail
                self._failed(said.sink, said.detail)
            case SinkRestored():
                _log.info("restored", sink=said.sink)
            case StepsMissing():
                self._missed(said.first, said.last)
            case StepsSkipped():
                which = (
                    f"step {said.first}" if said.first == said.last else f"steps {said.first} to {said.last}"
                )
                self._failed(
                    "record", f"{which} are in no journal and no node's memory: the logs leave them out"
                )


_FROM_WRITER: msgspec.json.Decoder[FromWriter] = msgspec.json.Decoder(FromWriter)


def _parameters(job: Job) -> dict[str, Any]:
    """Return the job as a flat table: ``training.seed``, ``training.arguments.width``."""
    found: dict[str, Any] = {"name": job.name, "steps": job.steps}

    def gather(prefix: str, table: dict[str, Any]) -> None:
        for key, value in table.items():
            if isinstance(value, dict):
                gather(f"{prefix}{key}.", value)
            else:
                found[f"{prefix}{key}"] = value

    gather("training.", {name: value for name, value in job.training.items() if name != "steps"})
    return found
