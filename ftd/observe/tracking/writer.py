"""The process that logs a job's steps: ``python -P -m ftd.observe.tracking.writer``.

The leading coordinator starts one. It reads the coordinator's journal, continues the record that all
coordinators share (``record``), and brings what the record has to each sink (``channel``). Nothing waits for
it: however slow a sink is, the journal keeps what is not written yet.

One writer writes at a time: it holds a lock beside the record. A coordinator that took over starts its own,
which announces its term there; the older one finishes and leaves, and stays away should it come late.
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
"""How often a writer reports that the journal lacks a step and has later ones, and how long it waits for it."""
FINISH_S, OVER_S = 20.0, 300.0
"""Time that all sinks together have to end: while the job goes on, and after its end."""
INCOMPLETE = 3
"""Exit status where a sink has not got all that it should."""
LEAVE_S = 30.0
"""A writer waits for so long for an earlier one to leave before it reports that."""
_LOCK_PERIOD_S = 0.1
_RETRY_S = 5.0
_NICENESS = 5


class NewerWriterError(Exception):
    """A writer of a later leader is there."""


class WriterLock:
    """The directory of one job's logs: who may write there."""

    def __init__(self, directory: Path, term: int) -> None:
        """:raises OSError: it cannot be made."""
        directory.mkdir(parents=True, exist_ok=True)
        self._term_file, self._term = directory / "writer.json", term
        self._lock = os.open(directory / "writer.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)

    def check(self) -> None:
        """Announce our term, so that an older writer leaves.

        :raises Superseded: a later leader's writer announced its own.
        :raises OSError: the directory cannot be read or written.
        """
        try:
            newest = int(json.loads(self._term_file.read_bytes())["term"])
        except FileNotFoundError:
            newest = -1
        except (ValueError, KeyError, TypeError):
            newest = -1  # Cut off by a power failure.
        if newest > self._term:
            raise NewerWriterError
        if newest < self._term:
            draft = self._term_file.with_suffix(f".{os.getpid()}")
            draft.write_text(json.dumps({"term": self._term, "pid": os.getpid()}) + "\n")
            draft.replace(self._term_file)

    def taken(self) -> bool:
        """Return whether we are the one that writes; asked until we are."""
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def close(self) -> None:
        os.close(self._lock)


class TrackingWriter:
    """``run`` until stdin ends or a later leader's writer comes."""

    def __init__(
        self, assignment: WriterAssignment, report: Callable[[FromWriter], None], *, input_fd: int = 0
    ) -> None:
        """:param input_fd: the coordinator's lines after the assignment; its end is the coordinator's."""
        self._assignment, self._report, self._input_fd = assignment, report, input_fd
        self._directory = Path(assignment.policy.directory) / assignment.job
        self._place: WriterLock | None = None
        self._record: JobRecord | None = None
        self._journal: JournalReader | None = None
        self._channels: list[SinkThread] = []
        self._retry_at = 0.0
        self._problem = ""
        self._waiting_since = 0.0
        self._asked_at = 0.0
        self._gap: tuple[int, float] | None = None
        """The first step that is missing, and since when."""
        self._input = b""
        self._outcome: str | None = None

    def run(self) -> bool:
        """Write until it is time to leave; return whether everything is where it should be."""
        ended = waits = False
        while not ended or waits:
            if ended:
                time.sleep(_LOCK_PERIOD_S)
            else:
                ended = self._listen(PERIOD_S)
            if not ended and time.monotonic() < self._retry_at:
                continue
            try:
                waits = not self._work()
            except NewerWriterError:
                _log.info("superseded", job=self._assignment.job, term=self._assignment.term)
                break
            except (OSError, ValueError) as error:
                waits = False
                self._failed(error)
        return self._end()

    # --- one pass ------------------------------------------------------------------------------------

    def _work(self) -> bool:
        """Return False while another writer holds the lock.

        :raises OSError: the record or the journal cannot be read or written.
        :raises ValueError: the record is damaged. :raises Superseded: as ``Place.check``.
        """
        if self._place is None:
            self._place = WriterLock(self._directory, self._assignment.term)
        self._place.check()
        if self._record is None:
            if not self._is_ours(self._place):
                return False
            self._record = JobRecord(self._directory / "steps.jsonl")
            self._channels = self._new_channels(self._record)
        if self._journal is None:
            self._journal = JournalReader(Path(self._assignment.journal), self._assignment.job)
        while self._continue(self._record, self._journal):
            self._wake()
            self._place.check()
        self._wake()
        if self._problem:
            self._problem = ""
            self._report(SinkRestored(sink="record"))
        return True

    def _is_ours(self, place: WriterLock) -> bool:
        """:raises OSError: another writer has not left for long."""
        if place.taken():
            return True
        self._waiting_since = self._waiting_since or time.monotonic()
        if time.monotonic() - self._waiting_since > LEAVE_S:
            raise OSError("the writer of an earlier leader holds the lock and does not leave")
        return False

    def _continue(self, record: JobRecord, journal: JournalReader) -> bool:
        """Append one batch to the record; return whether there may be more."""
        news = journal.news(BATCH)
        wrong = [row.step for row in news if record.contradicts(row)]
        if wrong:
            record.supersede(min(wrong))
        rows = journal.steps(record.last_step, BATCH)
        whole = self._contiguous(record, rows)
        newest = whole[-1].step if whole else record.last_step
        whole += journal.evaluations(record.last_evaluation, newest, BATCH)
        whole.sort(key=lambda row: (row.step, row.kind != "step"))
        if whole:
            record.append(whole)
        return len(news) >= BATCH or len(whole) >= BATCH

    def _contiguous(self, record: JobRecord, rows: list[LoggedRow]) -> list[LoggedRow]:
        """Return the rows up to the first gap, or one after it if nobody filled it in time."""
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

    def _new_channels(self, record: JobRecord) -> list[SinkThread]:
        names = sinks_of(self._assignment.policy)
        _log.info("logging", job=self._assignment.job, directory=str(self._directory), sinks=names)
        return [
            SinkThread(name, partial(_made, name, self._assignment, self._directory), record, self._report)
            for name in names
        ]

    def _wake(self) -> None:
        for channel in self._channels:
            channel.wake()

    def _failed(self, error: Exception) -> None:
        """Report it once, and try again in a while."""
        self._retry_at = time.monotonic() + _RETRY_S
        if self._journal is not None:
            self._journal.close()
            self._journal = None
        if not self._problem:
            self._report(SinkFailed(sink="record", detail=f"{self._directory}: {error}"[:1000]))
        self._problem = str(error)

    # --- the coordinator -----------------------------------------------------------------------------

    def _listen(self, for_s: float) -> bool:
        """Wait, and take what the coordinator says; return whether it has gone."""
        deadline = time.monotonic() + for_s
        while (left_s := deadline - time.monotonic()) > 0:
            if not select.select([self._input_fd], [], [], left_s)[0]:
                return False
            data = os.read(self._input_fd, 65536)
            if not data:
                return True
            *lines, self._input = (self._input + data).split(b"\n")
            for line in lines:
                said = _TO_WRITER.decode(line)
                if isinstance(said, LoggedJobEnded):
                    self._outcome = said.outcome
        return False

    def _end(self) -> bool:
        for channel in self._channels:
            channel.end(self._outcome)
        deadline = time.monotonic() + (FINISH_S if self._outcome is None else OVER_S)
        for channel in self._channels:
            channel.join(deadline - time.monotonic())
        if self._journal is not None:
            self._journal.close()
        if self._place is not None:
            self._place.close()
        return not self._problem and all(channel.complete for channel in self._channels)


_TO_WRITER: msgspec.json.Decoder[ToWriter] = msgspec.json.Decoder(ToWriter)


def _made(name: str, assignment: WriterAssignment, directory: Path) -> TrackingSink:
    """:raises ImportError: its package is not there."""
    policy, job, parameters = assignment.policy, assignment.job, assignment.parameters
    if name == "tensorboard":
        from ftd.observe.tracking.tensorboard_sink import TensorBoardSink

        return TensorBoardSink(Path(policy.tensorboard) / job)
    if name == "mlflow":
        from ftd.observe.tracking.mlflow_sink import MlflowSink

        assert policy.mlflow is not None, "it is wanted"
        return MlflowSink(policy.mlflow, job, parameters)
    from ftd.observe.tracking.wandb_sink import WandbSink

    assert policy.wandb is not None, "it is wanted"
    return WandbSink(policy.wandb, directory, job, parameters)


def main() -> None:
    """Read the assignment from stdin and carry it out."""
    for number in (signal.SIGINT, signal.SIGTERM):  # Sent to all of a group: the coordinator ends us.
        signal.signal(number, signal.SIG_IGN)
    os.nice(_NICENESS)
    out = os.dup(1)
    os.dup2(2, 1)  # What a library prints must not get between the lines.
    configure_logs(daemon="tracking")

    def report(said: FromWriter) -> None:
        try:
            os.write(out, msgspec.json.encode(said) + b"\n")  # One write, so that threads do not mix.
        except OSError:
            _log.warning("unreported", said=msgspec.to_builtins(said))

    line = b""
    while not line.endswith(b"\n"):
        some = os.read(0, 1)
        if not some:
            return
        line += some
    assignment = _TO_WRITER.decode(line)
    assert isinstance(assignment, WriterAssignment), "it comes first"
    complete = TrackingWriter(assignment, report).run()
    os._exit(0 if complete else INCOMPLETE)  # A sink that hangs keeps nobody.


if __name__ == "__main__":
    main()
