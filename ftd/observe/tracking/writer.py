"""The tracking writer, a process that logs a job's steps: ``python -P -m ftd.observe.tracking.writer``.

The leading coordinator starts it. It reads the coordinator's journal, continues the record that all
coordinators share (``record``), and writes the rows of the record to each sink (``sink_thread``). Nothing
waits for it: however slow a sink is, the journal keeps the steps that are not written yet.

Only one writer writes at a time; it holds a lock file next to the record. A coordinator that takes over
starts its own writer, which announces its term there. The older writer then finishes and leaves, and an
older one that starts late leaves at once.
"""

import fcntl
import json
import os
import select
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec
import structlog

from ftd.config.tracking import sinks_of
from ftd.logs import configure_logs
from ftd.observe.tracking.journal_reader import JournalReader
from ftd.observe.tracking.protocol import (
    FromWriter,
    LoggedJobEnded,
    SinkFailed,
    SinkRestored,
    StepsMissing,
    StepsSkipped,
    ToWriter,
    WriterAssignment,
)
from ftd.observe.tracking.record import JobRecord
from ftd.observe.tracking.rows import LoggedRow
from ftd.observe.tracking.sink import TrackingSink
from ftd.observe.tracking.sink_thread import SinkThread

_log = structlog.get_logger("ftd.observe.tracking")

PERIOD_S = 0.5
BATCH = 2000
ASK_S, GAP_S = 2.0, 15.0
"""Period at which a writer reports missing steps while the journal has later ones, and the time for which it
waits for them.
"""
FINISH_S, OVER_S = 20.0, 300.0
"""Time that all sinks together have to finish: while the job goes on, and after its end."""
INCOMPLETE = 3
"""Exit status if a sink did not receive all rows."""
LEAVE_S = 30.0
"""A writer that waits longer than this for an earlier one to leave reports it."""
_LOCK_PERIOD_S = 0.1
_RETRY_S = 5.0
_NICENESS = 5


class NewerWriterError(Exception):
    """A writer of a later leader has announced its term."""


class WriterLock:
    """The lock on the directory of one job's logs."""

    def __init__(self, directory: Path, term: int) -> None:
        """:raises OSError: the directory cannot be created."""
        directory.mkdir(parents=True, exist_ok=True)
        self._term_file, self._term = directory / "writer.json", term
        self._lock = os.open(directory / "writer.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)

    def announce_term(self) -> None:
        """Announce our term, so that an older writer leaves.

        :raises NewerWriterError: a later leader's writer has announced its term.
        :raises OSError: the directory cannot be read or written.
        """
        try:
            newest = int(json.loads(self._term_file.read_bytes())["term"])
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            newest = -1  # There is none yet, or a power failure cut it off.
        if newest > self._term:
            raise NewerWriterError
        if newest < self._term:
            draft = self._term_file.with_suffix(f".{os.getpid()}")
            draft.write_text(json.dumps({"term": self._term, "pid": os.getpid()}) + "\n")
            draft.replace(self._term_file)

    def try_lock(self) -> bool:
        """Take the lock without waiting; return whether we hold it."""
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def close(self) -> None:
        os.close(self._lock)


class TrackingWriter:
    """The writer of one job; ``run`` returns when stdin ends or a later leader's writer comes."""

    def __init__(
        self, assignment: WriterAssignment, report: Callable[[FromWriter], None], *, input_fd: int = 0
    ) -> None:
        """:param input_fd: delivers the coordinator's lines after the assignment; its end means that the
        coordinator ended.
        """
        self._assignment, self._report, self._input_fd = assignment, report, input_fd
        self._directory = Path(assignment.policy.directory) / assignment.job
        self._writer_lock: WriterLock | None = None
        self._record: JobRecord | None = None
        self._journal: JournalReader | None = None
        self._sink_threads: list[SinkThread] = []
        self._retry_at = 0.0
        self._problem = ""
        self._waiting_since = 0.0
        self._asked_at = 0.0
        self._gap: tuple[int, float] | None = None
        """The first missing step, and the time since which it is missing."""
        self._input = b""
        self._outcome: str | None = None

    def run(self) -> bool:
        """Write until it is time to leave; return whether all rows are in the record and in all sinks."""
        ended = waits = False
        while not ended or waits:
            if ended:
                time.sleep(_LOCK_PERIOD_S)
            else:
                ended = self._read_messages(PERIOD_S)
            if not ended and time.monotonic() < self._retry_at:
                continue
            try:
                waits = not self._work()
            except NewerWriterError:
                _log.info("newer_writer_found", job=self._assignment.job, term=self._assignment.term)
                break
            except (OSError, ValueError) as error:
                waits = False
                self._failed(error)
        return self._end()

    # --- one pass ------------------------------------------------------------------------------------

    def _work(self) -> bool:
        """Write all new rows. Return False while another writer holds the lock.

        :raises OSError: the record or the journal cannot be read or written.
        :raises ValueError: the record is corrupt.
        :raises NewerWriterError: see ``WriterLock.announce_term``.
        """
        if self._writer_lock is None:
            self._writer_lock = WriterLock(self._directory, self._assignment.term)
        self._writer_lock.announce_term()
        if self._record is None:
            if not self._holds_lock(self._writer_lock):
                return False
            self._record = JobRecord(self._directory / "steps.jsonl")
            self._sink_threads = self._start_sinks(self._record)
        if self._journal is None:
            self._journal = JournalReader(Path(self._assignment.journal), self._assignment.job)
        while self._continue(self._record, self._journal):
            self._wake()
            self._writer_lock.announce_term()
        self._wake()
        if self._problem:
            self._problem = ""
            self._report(SinkRestored(sink="record"))
        return True

    def _holds_lock(self, writer_lock: WriterLock) -> bool:
        """Return whether we hold the lock.
        :raises OSError: another writer has held it for ``LEAVE_S``.
        """
        if writer_lock.try_lock():
            return True
        self._waiting_since = self._waiting_since or time.monotonic()
        if time.monotonic() - self._waiting_since > LEAVE_S:
            raise OSError("the writer of an earlier leader holds the lock and does not leave")
        return False

    def _continue(self, record: JobRecord, journal: JournalReader) -> bool:
        """Append one batch to the record; return whether there may be more."""
        new_rows = journal.read_new(BATCH)
        contradicted = [row.step for row in new_rows if record.contradicts(row)]
        if contradicted:
            record.supersede(min(contradicted))
        rows = journal.read_range("step", record.last_step, BATCH)
        batch = self._contiguous(record, rows)
        newest = batch[-1].step if batch else record.last_step
        batch += journal.read_range("evaluation", record.last_evaluation, BATCH, last=newest)
        batch.sort(key=lambda row: (row.step, row.kind != "step"))
        if batch:
            record.append(batch)
        return len(new_rows) >= BATCH or len(batch) >= BATCH

    def _contiguous(self, record: JobRecord, rows: list[LoggedRow]) -> list[LoggedRow]:
        """Return the rows up to the first gap, or the row after a gap that nobody filled in time."""
        due = record.last_step + 1 if record.last_step else rows[0].step if rows else 0
        for number, row in enumerate(rows):
            if row.step != due + number:
                return rows[:number] or self._past_gap(due, rows)
        self._gap = None
        return rows

    def _past_gap(self, due: int, rows: list[LoggedRow]) -> list[LoggedRow]:
        now = time.monotonic()
        if self._gap is None or self._gap[0] != due:
            self._gap, self._asked_at = (due, now), -ASK_S
        if now - self._asked_at >= ASK_S:
            self._asked_at = now
            self._report(StepsMissing(first=due, last=rows[0].step - 1))
        if now - self._gap[1] < GAP_S and self._outcome is None:
            return []
        self._gap = None
        self._report(StepsSkipped(first=due, last=rows[0].step - 1))
        return rows[:1]

    def _start_sinks(self, record: JobRecord) -> list[SinkThread]:
        names = sinks_of(self._assignment.policy)
        _log.info("logging_started", job=self._assignment.job, directory=str(self._directory), sinks=names)
        return [
            SinkThread(
                name, partial(_make_sink, name, self._assignment, self._directory), record, self._report
            )
            for name in names
        ]

    def _wake(self) -> None:
        for thread in self._sink_threads:
            thread.wake()

    def _failed(self, error: Exception) -> None:
        """Report the error once and schedule a retry."""
        self._retry_at = time.monotonic() + _RETRY_S
        if self._journal is not None:
            self._journal.close()
            self._journal = None
        if not self._problem:
            self._report(SinkFailed(sink="record", detail=f"{self._directory}: {error}"[:1000]))
        self._problem = str(error)

    # --- the coordinator -----------------------------------------------------------------------------

    def _read_messages(self, for_s: float) -> bool:
        """Read the coordinator's messages for ``for_s``; return whether the coordinator closed the pipe."""
        deadline = time.monotonic() + for_s
        while (left_s := deadline - time.monotonic()) > 0:
            if not select.select([self._input_fd], [], [], left_s)[0]:
                return False
            data = os.read(self._input_fd, 65536)
            if not data:
                return True
            *lines, self._input = (self._input + data).split(b"\n")
            for line in lines:
                message = _TO_WRITER.decode(line)
                if isinstance(message, LoggedJobEnded):
                    self._outcome = message.outcome
        return False

    def _end(self) -> bool:
        for thread in self._sink_threads:
            thread.finish(self._outcome)
        deadline = time.monotonic() + (FINISH_S if self._outcome is None else OVER_S)
        for thread in self._sink_threads:
            thread.join(deadline - time.monotonic())
        if self._journal is not None:
            self._journal.close()
        if self._writer_lock is not None:
            self._writer_lock.close()
        return not self._problem and all(thread.complete for thread in self._sink_threads)


_TO_WRITER: msgspec.json.Decoder[ToWriter] = msgspec.json.Decoder(ToWriter)


def _make_sink(name: str, assignment: WriterAssignment, directory: Path) -> TrackingSink:
    """Create a sink.
    :raises ImportError: its package is not installed.
    """
    policy, job, parameters = assignment.policy, assignment.job, assignment.parameters
    if name == "tensorboard":
        from ftd.observe.tracking.tensorboard_sink import TensorBoardSink

        return TensorBoardSink(Path(policy.tensorboard) / job)
    if name == "mlflow":
        from ftd.observe.tracking.mlflow_sink import MlflowSink

        assert policy.mlflow is not None, "a configured sink has a policy"
        return MlflowSink(policy.mlflow, job, parameters)
    from ftd.observe.tracking.wandb_sink import WandbSink

    assert policy.wandb is not None, "a configured sink has a policy"
    return WandbSink(policy.wandb, directory, job, parameters)


def main() -> None:
    """Read the assignment from stdin and carry it out."""
    # These signals go to the whole process group; the coordinator ends us.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    os.nice(_NICENESS)
    out = os.dup(1)
    os.dup2(2, 1)  # Output of libraries must not mix with our messages.
    configure_logs(daemon="tracking")

    def report(message: FromWriter) -> None:
        try:  # A single write keeps the lines of several threads apart.
            os.write(out, msgspec.json.encode(message) + b"\n")
        except OSError:
            _log.warning("report_failed", message=msgspec.to_builtins(message))

    line = b""
    while not line.endswith(b"\n"):
        byte = os.read(0, 1)
        if not byte:
            return
        line += byte
    assignment = _TO_WRITER.decode(line)
    assert isinstance(assignment, WriterAssignment), "the assignment comes first"
    complete = TrackingWriter(assignment, report).run()
    os._exit(0 if complete else INCOMPLETE)  # Do not wait for the thread of a sink that hangs.


if __name__ == "__main__":
    main()
