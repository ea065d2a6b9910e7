"""Writes to one sink on a thread of its own, so that a server that hangs delays no other sink."""

import threading
from collections.abc import Callable

import structlog

from ftd.observe.tracking.protocol import FromWriter, SinkFailed, SinkRestored
from ftd.observe.tracking.record import Cursor, JobRecord
from ftd.observe.tracking.sink import TrackingSink

_log = structlog.get_logger("ftd.observe.tracking")

BATCH = 500
_FIRST_RETRY_S, _LAST_RETRY_S = 1.0, 30.0


class SinkThread:
    """The thread that writes all rows of the job record to one sink, in order, and retries after errors."""

    def __init__(
        self,
        name: str,
        make: Callable[[], TrackingSink],
        record: JobRecord,
        report: Callable[[FromWriter], None],
    ) -> None:
        """:param make: creates the sink, on this thread, because some packages take seconds to import."""
        self.name = name
        self._make, self._record, self._report = make, record, report
        self._sink: TrackingSink | None = None
        self._cursor: Cursor | None = None
        self._superseded = 0
        self._new_rows = threading.Event()
        self._ending = threading.Event()
        self._outcome: str | None = None
        self.complete = False
        """Whether the sink was closed after it had received all rows of the record."""
        self._problem = ""
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """Announce new rows in the record."""
        self._new_rows.set()

    def finish(self, outcome: str | None) -> None:
        """Make one last attempt to write what is left and close the sink; ``join`` waits for it."""
        self._outcome = outcome
        self._ending.set()
        self._new_rows.set()

    def join(self, timeout_s: float) -> None:
        self._thread.join(max(timeout_s, 0.0))

    def _run(self) -> None:
        retry_s = _FIRST_RETRY_S
        while True:
            ending = self._ending.is_set()
            self._new_rows.clear()
            succeeded = self._attempt()
            if ending:
                self.complete = self._close(self._outcome) and succeeded
                return
            if succeeded:
                retry_s = _FIRST_RETRY_S
                self._new_rows.wait()
            else:
                self._ending.wait(retry_s)
                retry_s = min(2 * retry_s, _LAST_RETRY_S)

    def _attempt(self) -> bool:
        """Write new rows; return whether that worked."""
        try:
            self._write_new()
        except Exception as error:  # A sink's library may raise anything, and must not disturb training.
            self._cursor = None
            self._close(None)
            problem = f"{type(error).__name__}: {error}"
            if not self._problem:
                self._report(SinkFailed(sink=self.name, detail=problem[:1000]))
            self._problem = problem
            return False
        if self._problem:
            self._problem = ""
            self._report(SinkRestored(sink=self.name))
        return True

    def _write_new(self) -> None:
        while True:
            superseded = tuple(self._record.superseded)
            if self._sink is None:
                self._sink = self._make()
            if self._cursor is None or len(superseded) != self._superseded:
                self._cursor = self._sink.reopen(superseded)
                self._superseded = len(superseded)
            rows = self._record.read_rows(self._cursor, BATCH)
            if len(self._record.superseded) != self._superseded:
                continue  # A supersession came in between: some of these rows may have been taken back.
            if not rows:
                return
            self._sink.write(rows)
            self._cursor = self._cursor.after(rows)

    def _close(self, outcome: str | None) -> bool:
        if self._sink is None:
            return True
        try:
            self._sink.close(outcome)
        except Exception as error:
            _log.warning("close_failed", sink=self.name, problem=str(error))
            return False
        return True
