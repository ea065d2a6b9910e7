"""The coordinator's side of tracking: runs a writer process while the coordinator leads a job that is logged."""

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
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
"""Time that a coordinator gives its writer when it ends."""
_MAX_TRIES = 5
"""Number of writers that are started for a job that has ended."""
_LINE_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedJob:
    """A job to log; it is the same one while id, term and outcome are the same."""

    job: Job = field(compare=False)
    job_id: str
    term: int
    outcome: str | None
    """``FINISHED`` or ``FAILED`` once the job has ended; the writer then logs the rest and ends."""


class TrackingWriterProcess:
    """The owner of the writer process, of which one runs for as long as there is a job to log. All methods
    run on the event loop.
    """

    def __init__(
        self,
        journal: Path,
        *,
        on_failed: Callable[[str, str], None],
        on_missing: Callable[[int, int], None],
    ) -> None:
        """:param on_failed: called with the sink and the problem, once for each outage.
        :param on_missing: called with the first and last step that the journal lacks.
        """
        self._journal = journal
        self._on_failed, self._on_missing = on_failed, on_missing
        self._logged: LoggedJob | None = None
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._logged_jobs: set[str] = set()
        """Jobs that have ended and are completely logged."""
        self._closing = False
        self._finishing: LoggedJob | None = None
        """The job whose outcome the current writer has received."""
        self._reported_problem = ""

    @property
    def idle(self) -> bool:
        """Whether no job is being logged and no writer is left."""
        return self._task is None

    def set_job(self, job: Job | None, term: int, outcome: str | None) -> None:
        """Log this job from now on. Repeated calls with the same arguments do nothing.

        :param job: the job that this coordinator leads; ``None`` if it leads none.
        :param outcome: ``FINISHED`` or ``FAILED`` once the job has ended.
        """
        logged = None
        if job is not None and job.logging.directory and job.job_id not in self._logged_jobs:
            logged = LoggedJob(job=job, job_id=job.job_id, term=term, outcome=outcome)
        if logged == self._logged:
            return
        self._logged = logged
        self._changed.set()
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run())

    async def close(self) -> None:
        """Let the writer finish and wait for its end."""
        self._closing = True
        self._changed.set()
        if self._task is not None:
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        """Start writers until there is nothing to log any more."""
        retry_s, tries = _FIRST_RETRY_S, 0
        while (logged := self._logged) is not None:
            if self._closing and (tries or logged.outcome is None):
                break
            self._changed.clear()
            problem = await self._write(logged)
            last = self._logged
            tries = tries + 1 if last is not None and last.outcome is not None else 0
            if last is not None and (tries >= _MAX_TRIES or (last is self._finishing and not problem)):
                self._logged_jobs.add(last.job_id)
                self._logged = None
            if problem:
                self._report(SinkFailed(sink="writer", detail=problem))
                await self._wait_for_change(retry_s)
                retry_s = min(2 * retry_s, _LAST_RETRY_S)
            else:
                retry_s, self._reported_problem = _FIRST_RETRY_S, ""
                if self._logged == logged:  # The writer left by itself: a later leader's writer took over.
                    await self._wait_for_change(_LAST_RETRY_S)
        self._task = None

    async def _wait_for_change(self, for_s: float) -> None:
        """Wait for a change, for at most ``for_s``."""
        if self._closing:
            return
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._changed.wait(), for_s)

    async def _write(self, logged: LoggedJob) -> str:
        """Run one writer process while the job is to be logged. Return what went wrong, or an empty string."""
        try:
            process = await asyncio.create_subprocess_exec(
                *COMMAND,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                limit=_LINE_BYTES,
            )
        except OSError as error:
            return f"the writer cannot be started: {error}"
        assert process.stdin and process.stdout, "both are pipes"
        reading = asyncio.ensure_future(self._read_messages(process.stdout))
        ended = asyncio.create_task(process.wait())
        try:
            self._send(process.stdin, self._assignment(logged))
            await self._until_changed(logged, process.stdin, ended)
        finally:
            process.stdin.close()
            await self._await_end(ended)
            if not ended.done():
                process.kill()
            await asyncio.gather(ended, reading, return_exceptions=True)
            with contextlib.suppress(OSError):
                await process.stdin.wait_closed()
        if process.returncode == INCOMPLETE:
            return "the writer left before everything was logged"
        if process.returncode != 0:
            return f"the writer exited with status {process.returncode}"
        return ""

    async def _await_end(self, ended: "asyncio.Task[int]") -> None:
        """Wait for the writer to end; wait longer if the job has ended and no other one is to be logged."""
        logged = self._logged
        if logged is not None and logged is self._finishing:
            self._changed.clear()
            changed = asyncio.create_task(self._changed.wait())
            await asyncio.wait({ended, changed}, timeout=OVER_S, return_when=asyncio.FIRST_COMPLETED)
            changed.cancel()
        await asyncio.wait([ended], timeout=CLOSING_S if self._closing else FINISH_S + 5.0)

    async def _until_changed(
        self, logged: LoggedJob, stdin: asyncio.StreamWriter, ended: "asyncio.Task[int]"
    ) -> None:
        """Return when this job is no longer to be logged, or the writer has ended."""
        while True:
            now = self._logged
            if now is None or (now.job_id, now.term) != (logged.job_id, logged.term):
                return
            if now.outcome is not None:
                self._finishing = now
                self._send(stdin, LoggedJobEnded(outcome=now.outcome))
                return
            if self._closing:
                return
            self._changed.clear()
            changed = asyncio.create_task(self._changed.wait())
            await asyncio.wait({changed, ended}, return_when=asyncio.FIRST_COMPLETED)
            changed.cancel()
            if ended.done():
                return

    def _assignment(self, logged: LoggedJob) -> WriterAssignment:
        job = logged.job
        return WriterAssignment(
            journal=str(self._journal),
            job=job.job_id,
            term=logged.term,
            policy=job.logging,
            parameters=_parameters(job),
        )

    def _send(self, stdin: asyncio.StreamWriter, message: WriterAssignment | LoggedJobEnded) -> None:
        with contextlib.suppress(OSError):  # The writer has ended; its exit status says why.
            stdin.write(msgspec.json.encode(message) + b"\n")

    async def _read_messages(self, stdout: asyncio.StreamReader) -> None:
        while line := await stdout.readline():
            try:
                self._report(_FROM_WRITER.decode(line))
            except msgspec.DecodeError:
                _log.warning("malformed_message", line=line[:200].decode("utf-8", errors="replace"))

    def _report(self, message: FromWriter) -> None:
        match message:
            case SinkFailed():
                if message.sink == "writer" and message.detail == self._reported_problem:
                    return
                if message.sink == "writer":
                    self._reported_problem = message.detail
                self._on_failed(message.sink, message.detail)
            case SinkRestored():
                _log.info("sink_restored", sink=message.sink)
            case StepsMissing():
                self._on_missing(message.first, message.last)
            case StepsSkipped():
                which = (
                    f"step {message.first}"
                    if message.first == message.last
                    else f"steps {message.first} to {message.last}"
                )
                self._on_failed(
                    "record", f"{which} are in no journal and no node's memory: the logs leave them out"
                )


_FROM_WRITER: msgspec.json.Decoder[FromWriter] = msgspec.json.Decoder(FromWriter)


def _parameters(job: Job) -> dict[str, Any]:
    """Return the job as a flat table with keys such as ``training.seed`` and ``training.arguments.width``."""
    found: dict[str, Any] = {"name": job.name, "steps": job.steps}

    def gather(prefix: str, table: dict[str, Any]) -> None:
        for key, value in table.items():
            if isinstance(value, dict):
                gather(f"{prefix}{key}.", value)
            else:
                found[f"{prefix}{key}"] = value

    gather("training.", {name: value for name, value in job.training.items() if name != "steps"})
    return found
