"""The bytes that an owner holds of a bucket: a code's cells as copies and XORs of byte ranges.

A bucket is a run of bytes, extended by zeros to a whole number of cells. A *shard* is what one owner holds:
its segment, then its extra cells. Each shard is made from a short list of byte ranges, so that it can be
made in slices of any size, at any time, in any order.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from storage.codes import Code, StoredCell, solve_lost_cells
from storage.errors import TooManyLossesError

Bytes = NDArray[np.uint8]
ALIGNMENT_BYTES = 64
"""Alignment of cells, so that XOR runs over whole words and whole cache lines."""

_RUN_BYTES = 8 * 1024 * 1024
"""Number of bytes decoded by one thread at a time."""
_BLOCK_BYTES = 512 * 1024
_THREADS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class XorRange:
    """``size_bytes`` bytes of a shard from ``offset`` on: the XOR of the bucket's bytes from each source on.
    One source is a copy.
    """

    offset: int
    size_bytes: int
    sources: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardLayout:
    """The placement of one bucket's bytes in the shards of its owners."""

    code: Code
    bucket_bytes: int

    @property
    def cell_bytes(self) -> int:
        cells = self.code.owners * self.code.cells
        return -(-max(1, self.bucket_bytes) // (cells * ALIGNMENT_BYTES)) * ALIGNMENT_BYTES

    def shard_bytes(self, owner: int) -> int:
        return (self.code.cells + len(self.code.extra[owner])) * self.cell_bytes

    def xor_ranges(self, owner: int) -> tuple[XorRange, ...]:
        """Return how the owner makes its shard from the bucket: its segment, then its extra cells."""
        size, cells = self.cell_bytes, self.code.cells
        segment = XorRange(offset=0, size_bytes=cells * size, sources=(owner * cells * size,))
        extra = [
            XorRange(
                offset=(cells + index) * size, size_bytes=size, sources=tuple(c * size for c in sorted(kept))
            )
            for index, kept in enumerate(self.code.extra[owner])
        ]
        return (segment, *extra)

    def origins(self, owner: int, offset: int, end: int) -> Iterator[tuple[int, int, int]]:
        """Yield the bytes of the bucket whose XOR the shard's bytes [offset, end) are: offset in the shard, offset
        in the bucket, and their number. The bucket is followed by zeros.
        """
        for xor_range in self.xor_ranges(owner):
            low, high = max(offset, xor_range.offset), min(end, xor_range.offset + xor_range.size_bytes)
            for source in xor_range.sources:
                start = source + low - xor_range.offset
                size = min(high - low, self.bucket_bytes - start)
                if size > 0:
                    yield low, start, size


def make_shard(layout: ShardLayout, owner: int, bucket: Bytes, shard: Bytes) -> None:
    """Fill ``shard``, of ``layout.shard_bytes(owner)`` bytes, from the whole bucket."""
    for xor_range in layout.xor_ranges(owner):
        target = shard[xor_range.offset : xor_range.offset + xor_range.size_bytes]
        for number, start in enumerate(xor_range.sources):
            source = bucket[start : start + xor_range.size_bytes]
            if number == 0:
                target[: len(source)] = source
                target[len(source) :] = 0
            else:
                xor_into(target, source)


def xor_into(target: Bytes, source: Bytes) -> None:
    """Compute ``target ^= source`` over the source's length, in words if both are aligned."""
    words = len(source) // 8 * 8
    if words and target.ctypes.data % 8 == 0 and source.ctypes.data % 8 == 0:
        wide = target[:words].view(np.uint64)
        np.bitwise_xor(wide, source[:words].view(np.uint64), out=wide)
    else:
        words = 0
    rest = target[words : len(source)]
    np.bitwise_xor(rest, source[words:], out=rest)


def xor_of(target: Bytes, sources: Sequence[Bytes]) -> None:
    """Set ``target`` to the XOR of the sources, each of its length; the first two take one pass."""
    first, *rest = sources
    words = [array.view(np.uint64) for array in (target, first, *rest[:1]) if _in_words(array)]
    if len(words) == 3:
        np.bitwise_xor(words[1], words[2], out=words[0])
        del rest[0]
    else:
        target[:] = first
    for source in rest:
        xor_into(target, source)


def _in_words(array: Bytes) -> bool:
    return len(array) % 8 == 0 and array.ctypes.data % 8 == 0


Fetch = Callable[[int, int, int], Bytes]
"""Function that returns as many bytes of an owner's shard from an offset on as the third argument says."""


def decode_bucket(
    layout: ShardLayout,
    present: frozenset[int],
    fetch: Fetch,
    bucket: Bytes,
    first: int = 0,
    placed: Mapping[int, tuple[int, int]] | None = None,
) -> None:
    """Fill ``bucket`` with the bucket's bytes from ``first`` on, from the shards of the owners ``present``.

    Large ranges are decoded on several threads, so ``fetch`` must be thread-safe.

    :param placed: source that is in its place already, by the first byte of a range.
    :raises TooManyLossesError: the present shards do not determine the lost ones.
    """
    runs: list[tuple[int, int, bool, list[tuple[int, int]]]] = []
    for begin, end, all_sources in range_sources(layout, present, first, first + len(bucket)):
        there = (placed or {}).get(begin)
        others = [source for source in all_sources if source != there]
        for low in range(begin, end, _RUN_BYTES):
            moved = [(owner, offset + low - begin) for owner, offset in others]
            runs.append((low, min(low + _RUN_BYTES, end), there is not None, moved))

    def fill(run: tuple[int, int, bool, list[tuple[int, int]]]) -> None:
        low, high, in_place, sources = run
        # Bytes of several shards are combined block by block, while the block is in the cache.
        step = _BLOCK_BYTES if in_place + len(sources) > 1 else _RUN_BYTES
        for begin in range(low, high, step):
            target = bucket[begin - first : min(begin + step, high) - first]
            found = [fetch(owner, offset + begin - low, len(target)) for owner, offset in sources]
            xor_of(target, [target, *found] if in_place else found)

    if len(runs) < 2:
        for run in runs:
            fill(run)
        return
    with ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1)) as threads:
        for _ in threads.map(fill, runs):
            pass


RangeSources = tuple[int, int, list[tuple[int, int]]]
"""Bytes [low, high) of the bucket: the XOR of these owners' shards, each from the given byte on."""


def range_sources(
    layout: ShardLayout, present: frozenset[int], first: int, end: int
) -> Iterator[RangeSources]:
    """Yield the sources of the bucket's bytes [first, end), ascending.

    :raises TooManyLossesError: see ``decode_bucket``.
    """
    code, size = layout.code, layout.cell_bytes
    lost = frozenset(range(code.owners)) - present
    made = solve_lost_cells(code, lost)
    if made is None:
        raise TooManyLossesError(
            f"owners {sorted(lost)} of {code.owners} are lost, and the others cannot make up for them"
        )
    end = min(end, layout.bucket_bytes)
    for cell in range(first // size, -(-end // size)):
        low, high = max(first, cell * size), min(end, (cell + 1) * size)
        stored = made.get(cell) or (StoredCell(owner=cell // code.cells, index=cell % code.cells),)
        within = low - cell * size
        yield low, high, [(source.owner, source.index * size + within) for source in stored]


def merge_ranges(ranges: Iterable[range]) -> list[range]:
    """Return the same bytes as ascending ranges that do not touch."""
    found: list[range] = []
    for one in sorted(ranges, key=lambda r: r.start):
        if found and one.start <= found[-1].stop:
            found[-1] = range(found[-1].start, max(found[-1].stop, one.stop))
        else:
            found.append(one)
    return found
