"""Memory on huge pages, where the kernel can: copied at the speed of memory, not of address tables.

With pages of 4 KiB a copy loads a new address every 4 KiB, which in a virtual machine costs up to a third of
the bandwidth. ``MADV_COLLAPSE`` (Linux 6.1) puts pages that are there already together, whatever the
system's policy for new ones is, and takes no byte more: only whole huge pages inside of a range change.
"""

import ctypes
import mmap
import os
import sys
import weakref
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
HUGE_BYTES = 2 * 1024 * 1024
_COLLAPSE = 25
_FIXED = 0x10
_REFUSED = ctypes.c_void_p(-1).value


def mapped(descriptor: int, size_bytes: int) -> Bytes:
    """The file's bytes, shared, at an address where huge pages may be; unmapped when no view of them is left.

    :raises OSError: the kernel refuses.
    """
    if not sys.platform.startswith("linux"):
        return np.frombuffer(mmap.mmap(descriptor, size_bytes), dtype=np.uint8)
    library = ctypes.CDLL(None, use_errno=True)
    map_, unmap = library.mmap, library.munmap
    map_.restype = ctypes.c_void_p
    map_.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    unmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    # Addresses first, more than needed, then the file over a part of them.
    room = size_bytes + HUGE_BYTES
    begin = map_(None, room, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    address = -(-begin // HUGE_BYTES) * HUGE_BYTES if begin != _REFUSED else None
    access, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _FIXED
    if address is None or map_(address, size_bytes, access, flags, descriptor, 0) != address:
        number = ctypes.get_errno()
        if address is not None:
            unmap(begin, room)
        raise OSError(number, os.strerror(number))
    memory = (ctypes.c_uint8 * size_bytes).from_address(address)
    weakref.finalize(memory, unmap, begin, room).atexit = False
    return np.frombuffer(memoryview(memory), dtype=np.uint8)


def put_together(ranges: Iterable[tuple[int, int]]) -> int:
    """Ask for huge pages under these ranges (address, size in bytes), which this process has mapped.

    Best effort: where it is refused (an older kernel, too little contiguous memory, a range that is not
    mapped any more), nothing changes. Takes a second for 0.3 to 2 GiB the first time, and next to nothing
    when it was done before; other threads run.

    :returns: bytes that lie on huge pages now because of it, or did before.
    """
    if not sys.platform.startswith("linux"):
        return 0
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    done = 0
    for start, end in _merged(ranges):
        # One at a time: a refusal ends a call, and the kernel's lock is held for one.
        for address in range(-(-start // HUGE_BYTES) * HUGE_BYTES, end - HUGE_BYTES + 1, HUGE_BYTES):
            if madvise(address, HUGE_BYTES, _COLLAPSE) == 0:
                done += HUGE_BYTES
    return done


def _merged(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """As (start, end); neighbours on the same or the next page are one, as the pages between are there."""
    merged: list[tuple[int, int]] = []
    for start, size_bytes in sorted(ranges):
        if merged and start // mmap.PAGESIZE - merged[-1][1] // mmap.PAGESIZE <= 1:
            merged[-1] = (merged[-1][0], max(merged[-1][1], start + size_bytes))
        else:
            merged.append((start, start + size_bytes))
    return merged
