"""Memory on huge pages where the kernel provides them, so that copying is not limited by address translation.

With pages of 4 KiB a copy translates a new address every 4 KiB, which in a virtual machine costs up to a
third of the bandwidth. ``MADV_COLLAPSE`` (Linux 6.1) merges existing pages into huge ones whatever the
system's policy for new pages is, and takes no additional memory: only whole huge pages inside of a range
change.
"""

import ctypes
import functools
import mmap
import os
import weakref
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
HUGE_BYTES = 2 * 1024 * 1024
_POPULATE_READ = 22
_HUGE = 14
_COLLAPSE = 25
_RUN_BYTES = 32 * HUGE_BYTES
"""Number of bytes filled by one thread at a time."""
_THREADS = 4
_FIXED = 0x10
_REFUSED = ctypes.c_void_p(-1).value


def map_file(descriptor: int, size_bytes: int, *, writable: bool = True) -> Bytes:
    """Map the file's bytes, shared, at an address where huge pages are possible. They are unmapped with their
    last view.

    :raises OSError: the kernel refuses.
    """
    access = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    library = ctypes.CDLL(None, use_errno=True)
    map_, unmap = library.mmap, library.munmap
    map_.restype = ctypes.c_void_p
    map_.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    unmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    # Reserve more addresses than needed, then map the file over an aligned part of them.
    room = size_bytes + HUGE_BYTES
    begin = map_(None, room, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    address = -(-begin // HUGE_BYTES) * HUGE_BYTES if begin != _REFUSED else None
    flags = mmap.MAP_SHARED | _FIXED
    if address is None or map_(address, size_bytes, access, flags, descriptor, 0) != address:
        number = ctypes.get_errno()
        if address is not None:
            unmap(begin, room)
        raise OSError(number, os.strerror(number))
    memory = (ctypes.c_uint8 * size_bytes).from_address(address)
    weakref.finalize(memory, unmap, begin, room).atexit = False
    view = memoryview(memory)
    return np.frombuffer(view if writable else view.toreadonly(), dtype=np.uint8)


def allocate(descriptor: int, view: Bytes, first: int = 0) -> None:
    """Allocate a memory file from byte ``first`` on, under ``view``, the mapping of all of it.

    One small page is written in each huge page, and the kernel is asked to collapse the page with the holes
    around it. So it clears 2 MiB at a time and handles no page fault. Where it refuses, small pages are
    allocated. The present bytes may be lost.

    :raises OSError: there is too little memory; a part of it may be allocated.
    """
    begin = first // HUGE_BYTES * HUGE_BYTES

    def run(start: int) -> None:
        end = min(start + _RUN_BYTES, len(view))
        for place in range(start, end - HUGE_BYTES + 1, HUGE_BYTES):
            os.pwrite(descriptor, b"\0", place)
        collapse_pages([(view.ctypes.data + start, end - start)])

    # In a virtual machine the host handles the first touch of a page, which takes ten times as long.
    with ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1)) as threads:
        for _ in threads.map(run, range(begin, len(view), _RUN_BYTES)):
            pass
    os.posix_fallocate(descriptor, 0, len(view))
    prefault(view)


def prefault(view: Bytes) -> None:
    """Fill the page tables of mapped memory, so that copying meets no page fault. Other threads run meanwhile."""
    if not _advise(view.ctypes.data, len(view), _POPULATE_READ):
        np.bitwise_or.reduce(view[:: mmap.PAGESIZE])


def prefer_huge(ranges: Iterable[tuple[int, int]]) -> None:
    """Ask for huge pages for ranges (address, size) of this process's memory that nobody has written yet."""
    for start, end in _merged(ranges):
        if end - start >= HUGE_BYTES:
            begin, size = start // mmap.PAGESIZE * mmap.PAGESIZE, end - start // mmap.PAGESIZE * mmap.PAGESIZE
            _advise(begin, -(-size // mmap.PAGESIZE) * mmap.PAGESIZE, _HUGE)
            # Where the allocator has written its own data, the pages around it are small already.
            collapse_pages([(start, end - start)])


def collapse_pages(ranges: Iterable[tuple[int, int]]) -> int:
    """Ask for huge pages under these ranges (address, size in bytes), which this process has mapped.

    This is best effort: where the kernel refuses (an older kernel, too little contiguous memory, a range
    that is not mapped any more), nothing changes. It takes a second for 0.3 to 2 GiB of small pages, and
    next to nothing the second time. Other threads run meanwhile.

    :returns: number of bytes on huge pages, including those that were there before.
    """
    done = 0
    for start, end in _merged(ranges):
        # One page at a time: a refusal ends a call, and the kernel's lock is held for one call.
        for address in range(-(-start // HUGE_BYTES) * HUGE_BYTES, end - HUGE_BYTES + 1, HUGE_BYTES):
            if _advise(address, HUGE_BYTES, _COLLAPSE):
                done += HUGE_BYTES
    return done


def _advise(address: int, size_bytes: int, advice: int) -> bool:
    return bool(_madvise()(address, size_bytes, advice) == 0)


@functools.cache
def _madvise() -> Any:
    found = ctypes.CDLL(None).madvise
    found.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return found


def _merged(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return (start, end) of the ranges. Neighbours on the same or the next page are joined, as all pages
    between them are there.
    """
    merged: list[tuple[int, int]] = []
    for start, size_bytes in sorted(ranges):
        if merged and start // mmap.PAGESIZE - merged[-1][1] // mmap.PAGESIZE <= 1:
            merged[-1] = (merged[-1][0], max(merged[-1][1], start + size_bytes))
        else:
            merged.append((start, start + size_bytes))
    return merged
