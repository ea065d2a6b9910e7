"""Writes event files for TensorBoard: one file for each job, which every writer continues.

TensorBoard reads the newest file of a run and follows it as it grows, so a continued file is displayed live
even after another coordinator took over. All numbers of a step are one record. After a rollback, a record
``SessionLog.START`` with the first repeated step makes TensorBoard drop its values from that step on.
"""

import io
import os
import socket
import struct
import time
from collections.abc import Sequence
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter, masked_crc32c

from ftd.observe.tracking.record import Cursor, append_synced
from ftd.observe.tracking.rows import LoggedRow

_HEADER = struct.Struct("<QI")
"""Length of a record and its checksum; then come the bytes and their checksum."""
_FOOTER = struct.Struct("<I")
_LARGEST_RECORD = 1 << 24
_OURS = ".ftd"
"""Suffix of the files of this sink; other tools may write into the same directory."""


class TensorBoardSink:
    """The event file of one job."""

    def __init__(self, directory: Path) -> None:
        """:param directory: directory of the job's run."""
        self._directory = directory
        self._file = -1
        self._size = 0

    def reopen(self, superseded: Sequence[int]) -> Cursor:
        """See ``TrackingSink``.
        :raises OSError: the file cannot be read or written.
        """
        self.close(None)
        self._directory.mkdir(parents=True, exist_ok=True)
        files = sorted(self._directory.glob(f"events.out.tfevents.*{_OURS}"))
        name = f"events.out.tfevents.{int(time.time())}.{socket.gethostname()}{_OURS}"
        path = files[-1] if files else self._directory / name
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        cursor, marks, self._size = _scan(path)
        os.ftruncate(self._file, self._size)
        if self._size == 0:
            self._append([Event(wall_time=time.time(), file_version="brain.Event:2")])
        for step in superseded[marks:]:
            start = SessionLog(status=SessionLog.START)
            self._append([Event(wall_time=time.time(), step=step, session_log=start)])
            cursor = _before(cursor, step)
        return cursor

    def write(self, rows: Sequence[LoggedRow]) -> None:
        """See ``TrackingSink``.
        :raises OSError: the rows cannot be written; none of them is.
        """
        self._append([_event(row) for row in rows])

    def close(self, outcome: str | None) -> None:
        """See ``TrackingSink``."""
        if self._file >= 0:
            file, self._file = self._file, -1
            os.close(file)

    def _append(self, events: Sequence[Event]) -> None:
        records = io.BytesIO()
        for event in events:
            RecordWriter(records).write(event.SerializeToString())
        self._size = append_synced(self._file, records.getvalue(), self._size)


def _event(row: LoggedRow) -> Event:
    values = [Summary.Value(tag=tag, simple_value=value) for tag, value in row.scalars().items()]
    return Event(wall_time=row.wall_time, step=row.step, summary=Summary(value=values))


def _before(cursor: Cursor, step: int) -> Cursor:
    return Cursor(step=min(cursor.step, step - 1), evaluation=min(cursor.evaluation, step - 1))


def _scan(path: Path) -> tuple[Cursor, int, int]:
    """Return the cursor at the end of the file, how many supersessions it contains, and where its last record
    ends.
    """
    cursor, marks, end = Cursor(), 0, 0
    with path.open("rb") as stream:
        while len(header := stream.read(_HEADER.size)) == _HEADER.size:
            size, checksum = _HEADER.unpack(header)
            if size > _LARGEST_RECORD or masked_crc32c(header[:8]) != checksum:
                break
            data, footer = stream.read(size), stream.read(_FOOTER.size)
            if len(data) < size or len(footer) < _FOOTER.size:
                break
            event = Event.FromString(data)
            if event.HasField("session_log"):
                marks += 1
                cursor = _before(cursor, event.step)
            elif event.HasField("summary"):
                tags = {value.tag for value in event.summary.value}
                cursor = Cursor(
                    step=event.step if "train/loss" in tags else cursor.step,
                    evaluation=event.step if "evaluation/loss" in tags else cursor.evaluation,
                )
            end = stream.tell()
    return cursor, marks, end
