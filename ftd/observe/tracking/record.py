"""The record of a job's steps: one file of JSON lines beside the other logs, which every writer continues.

It is what makes the logs whole over a change of the leading coordinator: the next writer reads here which
steps were logged, with which values, and goes on after them. The file is only appended to. Where a rollback
made steps run again with other values, a line ``superseded`` takes the earlier ones back. A line that was cut
off, by a kill or a full disk, is removed by whoever opens or writes the file next.
"""

import os
import threading
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ftd.observe.tracking.rows import LoggedRow, decode_row, encode_row, encode_superseded


@dataclass(frozen=True, slots=True, kw_only=True)
class Cursor:
    """How far a sink has come; 0: it has none."""

    step: int = 0
    evaluation: int = 0

    def after(self, rows: Iterable[LoggedRow]) -> "Cursor":
        """Return the cursor after these rows as well."""
        step, evaluation = self.step, self.evaluation
        for row in rows:
            if row.kind == "step":
                step = max(step, row.step)
            else:
                evaluation = max(evaluation, row.step)
        return Cursor(step=step, evaluation=evaluation)


class JobRecord:
    """The open file. One thread writes; others may call ``rows``."""

    def __init__(self, path: Path) -> None:
        """Open or create the file and read what is there.

        :raises OSError: it cannot be opened or mended.
        :raises ValueError: a line in it is none of a record.
        """
        self.superseded: list[int] = []
        """Steps from which on everything earlier was taken back, in order."""
        self._lock = threading.Lock()
        self._first = 0
        self._fingerprints = array("Q")
        """Fingerprint of each step from ``_first`` on; 0: that step is not there."""
        self._offsets = array("q")
        self._evaluations: dict[int, tuple[int, int]] = {}
        """Step → fingerprint, offset; in the order of the steps."""
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._size = 0
        try:
            self._read()
            os.ftruncate(self._file, self._size)
        except BaseException:
            os.close(self._file)
            raise

    @property
    def last_step(self) -> int:
        """The newest step that is logged; 0: none is."""
        return self._first + len(self._offsets) - 1 if self._offsets else 0

    @property
    def first_step(self) -> int:
        """The oldest step that is logged; 0: none is."""
        return self._first

    @property
    def last_evaluation(self) -> int:
        """The newest step whose evaluation is logged; 0: none is."""
        return max(self._evaluations, default=0)

    def contradicts(self, row: LoggedRow) -> bool:
        """Return whether this step is logged with other values."""
        known = 0
        if row.kind == "evaluation":
            known = self._evaluations.get(row.step, (0, 0))[0]
        elif self._first <= row.step <= self.last_step:
            known = self._fingerprints[row.step - self._first]
        return known not in (0, row.fingerprint)

    def supersede(self, step: int) -> None:
        """Take back this step and all later ones.

        :raises OSError: the line cannot be written; nothing is taken back.
        """
        self._append(encode_superseded(step))
        with self._lock:
            self._forget(step)

    def append(self, rows: Sequence[LoggedRow]) -> None:
        """Write rows, steps in order and each newer than the last; they are on the disk when this returns.

        :raises OSError: they cannot be written; none of them is.
        """
        lines = [encode_row(row) for row in rows]
        offset = self._append(b"".join(lines))
        with self._lock:
            for row, line in zip(rows, lines, strict=True):
                self._note(row, offset)
                offset += len(line)

    def rows(self, after: Cursor, limit: int) -> list[LoggedRow]:
        """Return the next rows after a cursor, at most ``limit`` of each kind, ordered by step."""
        with self._lock:
            begin = max(after.step + 1 - self._first, 0)
            offsets = [offset for offset in self._offsets[begin : begin + limit] if offset >= 0]
            more = begin + limit < len(self._offsets)
            newest = self._first + begin + limit - 1 if more else None
            offsets += [
                offset
                for step, (_, offset) in self._evaluations.items()
                if step > after.evaluation and (newest is None or step <= newest)
            ][:limit]
        rows = [self._at(offset) for offset in offsets]
        return sorted(rows, key=lambda row: (row.step, row.kind != "step"))

    def close(self) -> None:
        os.close(self._file)

    # --- the file ------------------------------------------------------------------------------------

    def _append(self, data: bytes) -> int:
        """Return the offset at which the bytes are."""
        begin = self._size
        try:
            os.pwrite(self._file, data, begin) if data else 0
            if os.fstat(self._file).st_size != begin + len(data):
                raise OSError(28, os.strerror(28))  # A short write: the file system has no room for the rest.
            os.fsync(self._file)
        except OSError:
            os.ftruncate(self._file, begin)
            raise
        self._size = begin + len(data)
        return begin

    def _read(self) -> None:
        with os.fdopen(os.dup(self._file), "rb") as stream:
            for line in stream:
                if not line.endswith(b"\n"):
                    return
                said = decode_row(line)
                if isinstance(said, int):
                    self._forget(said)
                else:
                    self._note(said, self._size)
                self._size += len(line)

    def _at(self, offset: int) -> LoggedRow:
        line = b""
        while not line.endswith(b"\n"):
            line += os.pread(self._file, 1024, offset + len(line))
            line = line[: line.find(b"\n") + 1] or line
        row = decode_row(line)
        assert isinstance(row, LoggedRow), "an offset of a row"
        return row

    def _note(self, row: LoggedRow, offset: int) -> None:
        if row.kind == "evaluation":
            self._evaluations[row.step] = row.fingerprint, offset
            return
        if not self._offsets:
            self._first = row.step
        missing = row.step - self.last_step - 1 if self._offsets else 0
        if missing < 0:
            raise ValueError(f"step {row.step} is recorded after step {self.last_step}")
        self._fingerprints.extend([0] * missing + [row.fingerprint])
        self._offsets.extend([-1] * missing + [offset])

    def _forget(self, step: int) -> None:
        self.superseded.append(step)
        keep = max(step - self._first, 0)
        while 0 < keep <= len(self._offsets) and self._offsets[keep - 1] < 0:
            keep -= 1
        del self._fingerprints[keep:], self._offsets[keep:]
        for known in [one for one in self._evaluations if one >= step]:
            del self._evaluations[known]
