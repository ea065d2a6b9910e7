"""Shards made directly from the tensors' memory, in units small enough for a pause of a millisecond.

A bucket never exists as contiguous bytes: it is a list of *spans*, each the memory of a tensor, with zeros
between them. A *unit* is a byte range of one shard: the XOR of some ranges of the bucket, or a copy of one
range. ``runtime.snapshots.movers`` copies the bytes.
"""

import sys
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from runtime.device import DeviceRuntime
from runtime.script.tensor_image import Bytes, Source, row_major_bytes
from runtime.snapshots.movers import Mover
from storage.manifest import BLOCK_BYTES, PartDigester
from storage.shards import ALIGNMENT_BYTES, ShardLayout


def source_of(tensor: Tensor, runtime: DeviceRuntime | None = None) -> Source:
    """Return the tensor's bytes in row-major order: its own memory, or a copy if that has gaps or another
    order.

    :param runtime: runtime of the device that the tensor may be on; without one, the tensor is in host
        memory.
    """
    flat = tensor.reshape(-1).view(torch.uint8) if tensor.is_contiguous() else row_major_bytes(tensor)
    return flat if runtime is not None and runtime.holds(flat) else flat.numpy()


@dataclass(slots=True, eq=False)
class SnapshotBucket:
    """The bytes of a layer group. Spans are added in ascending order."""

    mover: Mover
    size_bytes: int = 0
    _starts: list[int] = field(default_factory=list)
    _sources: list[Source] = field(default_factory=list)
    _changing: list[tuple[int, int]] = field(default_factory=list)
    """Byte ranges that training changes, in ascending order."""
    has_frozen: bool = False

    def add(self, source: Source, padded_bytes: int, *, frozen: bool = False) -> None:
        """Append a span, followed by zeros up to ``padded_bytes``.

        :param frozen: training does not change it.
        """
        if len(source):
            self._starts.append(self.size_bytes)
            self._sources.append(source)
        end = self.size_bytes + padded_bytes
        if frozen:
            self.has_frozen = True
        elif self._changing and self._changing[-1][1] == self.size_bytes:
            self._changing[-1] = self._changing[-1][0], end
        else:
            self._changing.append((self.size_bytes, end))
        self.size_bytes = end

    def is_frozen(self, start: int, end: int) -> bool:
        """Return whether training changes none of the bytes [start, end)."""
        number = bisect_right(self._changing, start, key=lambda one: one[1])
        return number == len(self._changing) or self._changing[number][0] >= end

    def fill(self, target: Bytes, starts: tuple[int, ...], digests: PartDigester | None = None) -> None:
        """Set ``target`` to the XOR of the bucket's bytes from each of ``starts`` on.

        :param digests: updated block by block while each is in the cache; for host memory only.
        """
        done, most = 0, len(target) if len(starts) == 1 and digests is None else BLOCK_BYTES
        while done < len(target):
            # Stop where the next span of any source begins or ends.
            size = min(most, len(target) - done, *(self._run(start + done) for start in starts))
            sources = [part for start in starts if (part := self._part(start + done, size)) is not None]
            block = target[done : done + size]
            match sources:
                case []:
                    block[:] = 0
                case [only]:
                    if digests is not None:
                        # Hashed before copying: a streaming store does not leave it in the cache.
                        digests.update(only)
                    self.mover.copy(block, only)
                case _:
                    self.mover.xor(block, sources)
            if digests is not None and len(sources) != 1:
                digests.update(block)
            done += size
        self.mover.finish()

    def host_ranges(self) -> Iterator[tuple[int, int]]:
        """Return address and size of each span in host memory."""
        for source in self._sources:
            if not isinstance(source, Tensor):
                yield source.ctypes.data, len(source)

    def _run(self, start: int) -> int:
        """Return the number of bytes from ``start`` on that belong to one span, or to the zeros between two."""
        number = bisect_right(self._starts, start)
        if number and (left := self._starts[number - 1] + len(self._sources[number - 1]) - start) > 0:
            return left
        return self._starts[number] - start if number < len(self._starts) else sys.maxsize

    def _part(self, start: int, size: int) -> Source | None:
        """Return ``size`` bytes from ``start`` on, all of one span; ``None`` if they are zeros."""
        number = bisect_right(self._starts, start) - 1
        if number < 0 or (begin := start - self._starts[number]) >= len(self._sources[number]):
            return None
        return self._sources[number][begin : begin + size]


@dataclass(frozen=True, slots=True)
class ShardUnit:
    """Bytes ``[offset, offset + size_bytes)`` of the slot: the XOR of the bucket's bytes from each of
    ``starts`` on.
    """

    bucket: SnapshotBucket
    offset: int
    size_bytes: int
    starts: tuple[int, ...]
    frozen: bool = False
    """Whether training changes none of these bytes."""

    @property
    def read_bytes(self) -> int:
        """Number of bytes that are read for the unit."""
        return self.size_bytes * len(self.starts)

    def write(self, slot: Bytes, digests: PartDigester | None = None) -> None:
        """Write the unit's bytes into the slot. A device copy may still be in progress when it returns."""
        self.bucket.fill(slot[self.offset : self.offset + self.size_bytes], self.starts, digests)


def shard_units(
    layout: ShardLayout, owner: int, bucket: SnapshotBucket, offset: int, unit_bytes: int
) -> list[ShardUnit]:
    """Return the units of the owner's shard of the bucket, in order, each byte once.

    :param offset: offset of the shard in the slot.
    :param unit_bytes: maximum number of bytes read for one unit (``CopySchedule.unit_bytes``).
    """
    units: list[ShardUnit] = []
    frozen = _frozen_blocks(layout, owner, bucket) if bucket.has_frozen else frozenset()
    for xor_range in layout.xor_ranges(owner):
        most = max(1, unit_bytes // len(xor_range.sources) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        done = 0
        while done < xor_range.size_bytes:
            size = min(most, xor_range.size_bytes - done)
            first = xor_range.offset + done
            still = first // BLOCK_BYTES in frozen
            if frozen:
                # A unit consists only of frozen blocks, or only of others.
                end = first // BLOCK_BYTES + 1
                while end * BLOCK_BYTES < first + size and (end in frozen) == still:
                    end += 1
                size = min(size, end * BLOCK_BYTES - first)
            # Where a unit holds whole blocks, it ends with one, so that they can be hashed at once.
            last = (first + size) // BLOCK_BYTES * BLOCK_BYTES
            if last > first and done + size < xor_range.size_bytes:
                size = last - first
            starts = tuple(source + done for source in xor_range.sources)
            units.append(ShardUnit(bucket, offset + first, size, starts, still))
            done += size
    return units


def _frozen_blocks(layout: ShardLayout, owner: int, bucket: SnapshotBucket) -> frozenset[int]:
    """Return the numbers of the blocks of the owner's shard (``storage.manifest.SnapshotPart``) that training
    does not change.
    """
    changing: set[int] = set()
    for xor_range in layout.xor_ranges(owner):
        end = xor_range.offset + xor_range.size_bytes
        for number in range(xor_range.offset // BLOCK_BYTES, -(-end // BLOCK_BYTES)):
            first = max(number * BLOCK_BYTES, xor_range.offset) - xor_range.offset
            last = min((number + 1) * BLOCK_BYTES, end) - xor_range.offset
            if not all(bucket.is_frozen(source + first, source + last) for source in xor_range.sources):
                changing.add(number)
    # The last block, which may be incomplete, always counts as changing.
    return frozenset(range(layout.shard_bytes(owner) // BLOCK_BYTES)) - changing
