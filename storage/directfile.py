"""Writing large files past the page cache, in a thread of its own while the next bytes are prepared.

Through the page cache every page is allocated, filled, written and freed. That costs CPU time that training
on the same host lacks, and in a virtual machine whose host reclaims free memory it takes most of the time.
Instead two buffers are used again and again, also for the next file, since fresh memory is just as
expensive. If a file system rejects direct writes, the file is written as usual.
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
"""Size of a buffer, a multiple of every disk's block."""
SYNC_BYTES = 64 * 1024 * 1024
"""Number of bytes written through the cache before they are synchronised. Otherwise the kernel collects
gigabytes of dirty memory and delays every process that allocates memory, such as the training on this host.
"""
_spare: deque[Buffers] = deque(maxlen=2)
"""Buffers of files that were written, for the next files; about as many as are written at a time."""


def write_synced(path: Path, chunks: Iterable[memoryview]) -> None:
    """Write a file; the disk has it when this returns.

    What ``chunks`` raises ends the writing. A chunk is not used any more when the next is requested.

    :raises OSError: it cannot be written; a part of the file may be there.
    """
    with path.open("wb", buffering=0) as file, ThreadPoolExecutor(1, "ftd-disk") as thread:
        sink = _Sink(path, file.fileno())
        buffers = _buffers()
        under_way: list[Future[None] | None] = [None, None]
        number, filled = 0, 0
        try:
            for chunk in chunks:
                start = 0
                while start < len(chunk):
                    size = min(len(chunk) - start, BUFFER_BYTES - filled)
                    some = np.frombuffer(chunk[start : start + size], dtype=np.uint8)
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


def sync_path(path: Path) -> None:
    """Synchronise a file, or the names in a directory, with the disk.

    :raises OSError: the disk does not have them.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _buffers() -> Buffers:
    """Return two page-aligned buffers, as direct writes need them."""
    try:
        return _spare.pop()
    except IndexError:
        return [np.frombuffer(mmap.mmap(-1, BUFFER_BYTES), dtype=np.uint8) for _ in range(2)]


class _Sink:
    """The file that the buffers are written to, one after the other. Close it only when no thread writes any
    more.
    """

    def __init__(self, path: Path, descriptor: int) -> None:
        self._path, self._descriptor = path, descriptor
        self._direct: int | None = None
        self._rejected = not hasattr(os, "O_DIRECT")
        self._end = self._unsynced = 0

    def write(self, buffer: memoryview) -> None:
        """Write a full buffer."""
        if self._direct is None and not self._rejected:
            try:
                self._direct = os.open(self._path, os.O_WRONLY | os.O_DIRECT)
            except OSError:
                self._rejected = True
        if self._direct is not None:
            try:
                self._through(self._direct, buffer)
            except OSError as error:
                # Some file systems accept the flag and then reject the write; a full disk is a different
                # error.
                if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                    raise
                self.close()
                self._rejected = True
            else:
                return
        self._through(self._descriptor, buffer)
        self._unsynced += len(buffer)
        if self._unsynced >= SYNC_BYTES:
            os.fdatasync(self._descriptor)
            # Nobody reads the file soon, so its pages are of more use to the training.
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
