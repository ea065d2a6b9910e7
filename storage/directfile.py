"""Large files written past the page cache, by a thread of their own while the next bytes are prepared.

Through the page cache every page is allocated, filled, written and let go again: CPU time that a training
beside it lacks, and in a virtual machine whose host takes free memory back most of the time that it takes.
Two buffers are used again and again instead, also for the next file: fresh memory is as dear. What a file
system refuses is written as usual.
"""

import errno
import mmap
import os
from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

Buffers = list[NDArray[np.uint8]]

BUFFER_BYTES = 4 * 1024 * 1024
"""A multiple of every disk's block."""
SYNC_BYTES = 64 * 1024 * 1024
"""So much is written through the cache before the disk must have it: else the kernel saves up gigabytes of
dirty memory and holds up whoever allocates, which on a training host is the training."""
_spare: deque[Buffers] = deque(maxlen=2)
"""Of files that were written; as many as are written at a time, usually."""


def write_synced(path: Path, pieces: Iterable[memoryview]) -> None:
    """The disk has it when this returns. :raises OSError: it does not; a part of the file may be there.

    What ``pieces`` raises ends it, too. A piece is not used any more when the next is asked for.
    """
    with path.open("wb", buffering=0) as file, ThreadPoolExecutor(1, "ftd-disk") as thread:
        sink = _Sink(path, file.fileno())
        buffers = _buffers()
        under_way: list[Future[None] | None] = [None, None]
        number, filled = 0, 0
        try:
            for piece in pieces:
                start = 0
                while start < len(piece):
                    size = min(len(piece) - start, BUFFER_BYTES - filled)
                    some = np.frombuffer(piece[start : start + size], dtype=np.uint8)
                    buffers[number][filled : filled + size] = some
                    start, filled = start + size, filled + size
                    if filled == BUFFER_BYTES:
                        under_way[number] = thread.submit(sink.write, buffers[number].data)
                        number, filled = 1 - number, 0
                        if (before := under_way[number]) is not None:
                            before.result()
            for last in under_way:
                if last is not None:
                    last.result()
            sink.end(buffers[number][:filled].data)
        finally:
            thread.shutdown()
            sink.close()
            _spare.append(buffers)


def sync_directory(path: Path) -> None:
    """Have the disk know the names in a directory. :raises OSError: it does not."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _buffers() -> Buffers:
    """Two, of whole pages, as such writes want them."""
    try:
        return _spare.pop()
    except IndexError:
        return [np.frombuffer(mmap.mmap(-1, BUFFER_BYTES), dtype=np.uint8) for _ in range(2)]


class _Sink:
    """Where the buffers go, one after the other. Closing is for when no thread writes any more."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self._path, self._descriptor = path, descriptor
        self._direct: int | None = None
        self._refused = not hasattr(os, "O_DIRECT")
        self._end = self._unsynced = 0

    def write(self, buffer: memoryview) -> None:
        """A full buffer."""
        if self._direct is None and not self._refused:
            try:
                self._direct = os.open(self._path, os.O_WRONLY | os.O_DIRECT)
            except OSError:
                self._refused = True
        if self._direct is not None:
            try:
                self._through(self._direct, buffer)
            except OSError as error:
                # Some take the flag and then no such write; a full disk is another thing.
                if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                    raise
                self.close()
                self._refused = True
            else:
                return
        self._through(self._descriptor, buffer)
        self._unsynced += len(buffer)
        if self._unsynced >= SYNC_BYTES:
            os.fdatasync(self._descriptor)
            # Nobody reads it soon: its pages are of more use to the training.
            os.posix_fadvise(self._descriptor, 0, self._end, os.POSIX_FADV_DONTNEED)
            self._unsynced = 0

    def end(self, rest: memoryview) -> None:
        self._through(self._descriptor, rest)
        os.fsync(self._descriptor)

    def close(self) -> None:
        if self._direct is not None:
            os.close(self._direct)
            self._direct = None

    def _through(self, descriptor: int, buffer: memoryview) -> None:
        start = self._end
        while start < self._end + len(buffer):
            start += os.pwrite(descriptor, buffer[start - self._end :], start)
        self._end = start
