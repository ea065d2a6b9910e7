"""The record of a job's steps: one file of JSON lines next to the other logs, continued by every writer.

The record keeps the logs complete when the leading coordinator changes: the next writer reads here which
steps were logged, with which values, and continues after them. Lines are only appended. When steps ran
again with other values after a rollback, a line ``superseded`` takes the earlier rows back. A line that was
cut off by a kill or a full disk is removed by the next process that opens or writes the file.
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
    """The position of a sink: the newest step and evaluation that it has; 0 if it has none."""

    step: int = 0
    evaluation: int = 0

    def after(self, rows: Iterable[LoggedRow]) -> "Cursor":
        """Return the cursor after the given rows."""
        step, evaluation = self.step, self.evaluation
        for row in rows:
            if row.kind == "step":
                step = max(step, row.step)
            else:
                evaluation = max(evaluation, row.step)
        return Cursor(step=step, evaluation=evaluation)


def append_synced(file: int, data: bytes, size: int) -> int:
    """Append to a file of ``size`` bytes, sync it to disk, and return its new size.

    :raises OSError: the bytes cannot be written; none of them is.
    """
    try:
        os.pwrite(file, data, size)
        if os.fstat(file).st_size != size + len(data):
            raise OSError(28, os.strerror(28))  # A short write: the file system is full.
        os.fsync(file)
    except OSError:
        os.ftruncate(file, size)
        raise
    return size + len(data)


class JobRecord:
    """The open record file. One thread writes; other threads may call ``read_rows``."""

    def __init__(self, path: Path) -> None:
        """Open or create the file and read it.

        :raises OSError: the file cannot be opened or repaired.
        :raises ValueError: the file contains a line that is not part of a record.
        """
        self.superseded: list[int] = []
        """Steps from which on all earlier rows were taken back, in the order of the rollbacks."""
        self._lock = threading.Lock()
        self._first = 0
        self._fingerprints = array("Q")
        """Fingerprint of each step from ``_first`` on; 0 for a step that is not in the record."""
        self._offsets = array("q")
        self._evaluations: dict[int, tuple[int, int]] = {}
        """Fingerprint and offset of each evaluation by step, ordered by step."""
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
        """The newest logged step; 0 if there is none."""
        return self._first + len(self._offsets) - 1 if self._offsets else 0

    @property
    def last_evaluation(self) -> int:
        """The newest step with a logged evaluation; 0 if there is none."""
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
            self._drop(step)

    def append(self, rows: Sequence[LoggedRow]) -> None:
        """Append rows and sync them to disk. The steps must be in order and newer than the last one.

        :raises OSError: the rows cannot be written; none of them is.
        """
        lines = [encode_row(row) for row in rows]
        offset = self._append(b"".join(lines))
        with self._lock:
            for row, line in zip(rows, lines, strict=True):
                self._index_row(row, offset)
                offset += len(line)

    def read_rows(self, after: Cursor, limit: int) -> list[LoggedRow]:
        """Return the next rows after a cursor, at most ``limit`` of each kind, ordered by step."""
        with self._lock:
            begin = max(after.step + 1 - self._first, 0)
            # More steps may be missing than fit into one answer, and an empty one means the end.
            while begin < len(self._offsets) and self._offsets[begin] < 0:
                begin += 1
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
        """Append bytes and return their offset."""
        begin, self._size = self._size, append_synced(self._file, data, self._size)
        return begin

    def _read(self) -> None:
        with os.fdopen(os.dup(self._file), "rb") as stream:
            for line in stream:
                if not line.endswith(b"\n"):
                    return
                entry = decode_row(line)
                if isinstance(entry, int):
                    self._drop(entry)
                else:
                    self._index_row(entry, self._size)
                self._size += len(line)

    def _at(self, offset: int) -> LoggedRow:
        line = b""
        while not line.endswith(b"\n"):
            line += os.pread(self._file, 1024, offset + len(line))
            line = line[: line.find(b"\n") + 1] or line
        row = decode_row(line)
        assert isinstance(row, LoggedRow), "the offset is that of a row"
        return row

    def _index_row(self, row: LoggedRow, offset: int) -> None:
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

    def _drop(self, step: int) -> None:
        self.superseded.append(step)
        keep = max(step - self._first, 0)
        while 0 < keep <= len(self._offsets) and self._offsets[keep - 1] < 0:
            keep -= 1
        del self._fingerprints[keep:], self._offsets[keep:]
        for known in [one for one in self._evaluations if one >= step]:
            del self._evaluations[known]
