"""Shards made straight out of the tensors' memory, in units small enough for a pause of a millisecond.

A bucket never exists as one run of bytes: it is a list of *spans*, each the memory of a tensor, with zeros
between them. A *unit* is a part of one shard, the XOR of some ranges of the bucket; one range is a copy.
numpy copies and XORs without the interpreter lock.
"""

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from threading import local

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from runtime.side_stream import SideStreams, copy_piece
from runtime.tensor_image import gathered
from storage.shards import ALIGNMENT_BYTES, ShardLayout, xor_into

Bytes = NDArray[np.uint8]
Source = Bytes | Tensor
"""Host memory, or a flat uint8 tensor on a device."""

UNIT_BYTES = 2 * 1024 * 1024
"""Read for one unit: what is under way when a pause ends is late by less than a millisecond."""
BLOCK_BYTES = 1024 * 1024
"""Made at a time: the sources of an XOR come while the target is still in the cache."""


def source_of(tensor: Tensor) -> Source:
    """The tensor's bytes, row-major: its own memory, or a copy where that has gaps or another order."""
    flat = tensor.reshape(-1).view(torch.uint8) if tensor.is_contiguous() else gathered(tensor)
    return flat.numpy() if flat.device.type == "cpu" else flat


@dataclass(slots=True, eq=False)
class Staging:
    """Bytes of a device in pinned host memory, a block at a time, one block for each thread.

    Written for CUDA and never run on it so far: plain and correct before quick. The copy runs on a stream
    beside the computing, behind what was computed before ``begin``; ``fetch`` waits for it on the host, so
    whoever waits for the last unit may change the tensors.
    """

    side: SideStreams = field(default_factory=SideStreams)
    _blocks: local = field(default_factory=local)

    def begin(self, device: torch.device) -> None:
        """On the main thread, when the tensors hold what is to be copied."""
        self.side.begin({device})

    def fetch(self, source: Tensor) -> Bytes:
        """Valid until this thread's next call. :param source: at most ``BLOCK_BYTES``."""
        block = getattr(self._blocks, "block", None)
        if block is None:
            block = self._blocks.block = torch.empty(BLOCK_BYTES, dtype=torch.uint8, pin_memory=True)
        part: Bytes = block[: source.numel()].numpy()
        with self.side.on(source.device):
            copy_piece(part, source)
        self.side.finish({source.device})
        return part


@dataclass(slots=True, eq=False)
class Bucket:
    """A group's bytes. Spans are added in ascending order."""

    staging: Staging
    size_bytes: int = 0
    _starts: list[int] = field(default_factory=list)
    _sources: list[Source] = field(default_factory=list)

    def add(self, source: Source, padded_bytes: int) -> None:
        """Behind the last; zeros follow it up to ``padded_bytes``."""
        if len(source):
            self._starts.append(self.size_bytes)
            self._sources.append(source)
        self.size_bytes += padded_bytes

    def copy(self, start: int, target: Bytes) -> None:
        """``target`` becomes the bucket's bytes from ``start`` on; zeros where there are none."""
        done = 0
        for offset, part in self._parts(start, start + len(target)):
            target[done:offset] = 0
            done = offset + len(part)
            target[offset:done] = part
        target[done:] = 0

    def xor(self, start: int, target: Bytes) -> None:
        for offset, part in self._parts(start, start + len(target)):
            xor_into(target[offset : offset + len(part)], part)

    def whole(self, start: int, size: int) -> NDArray[np.uint64] | None:
        """The bytes from ``start`` on as words, uncopied, where they lie in one tensor's memory."""
        number = bisect_right(self._starts, start) - 1
        if number < 0 or size % 8:
            return None
        begin, source = start - self._starts[number], self._sources[number]
        if isinstance(source, Tensor) or begin + size > len(source) or (source.ctypes.data + begin) % 8:
            return None
        return source[begin : begin + size].view(np.uint64)

    def _parts(self, start: int, end: int) -> Iterator[tuple[int, Bytes]]:
        """What there is between, each with its place behind ``start``."""
        for number in range(max(0, bisect_right(self._starts, start) - 1), len(self._starts)):
            begin, source = self._starts[number], self._sources[number]
            if begin >= end:
                return
            low, high = max(start, begin), min(end, begin + len(source))
            if low < high:
                part = source[low - begin : high - begin]
                yield low - start, self.staging.fetch(part) if isinstance(part, Tensor) else part


@dataclass(frozen=True, slots=True)
class Unit:
    """Bytes ``[offset, offset + size_bytes)`` of the slot: the XOR of the bucket from each of ``starts``."""

    bucket: Bucket
    offset: int
    size_bytes: int
    starts: tuple[int, ...]

    @property
    def read_bytes(self) -> int:
        return self.size_bytes * len(self.starts)

    def make(self, slot: Bytes) -> None:
        for done in range(0, self.size_bytes, BLOCK_BYTES):
            size = min(BLOCK_BYTES, self.size_bytes - done)
            target = slot[self.offset + done : self.offset + done + size]
            starts = [start + done for start in self.starts]
            first, second = (self.bucket.whole(start, size) for start in (starts[0], starts[-1]))
            if len(starts) > 1 and first is not None and second is not None:
                # The common case: one pass instead of a copy and a pass.
                np.bitwise_xor(first, second, out=target.view(np.uint64))
                starts = starts[1:-1]
            else:
                self.bucket.copy(starts.pop(0), target)
            for start in starts:
                self.bucket.xor(start, target)


def units_of(layout: ShardLayout, owner: int, bucket: Bucket, offset: int) -> list[Unit]:
    """The owner's shard of the bucket, at ``offset`` of the slot: in order, each byte once."""
    units: list[Unit] = []
    for piece in layout.pieces(owner):
        most = max(1, UNIT_BYTES // len(piece.sources) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        for done in range(0, piece.size_bytes, most):
            size = min(most, piece.size_bytes - done)
            starts = tuple(source + done for source in piece.sources)
            units.append(Unit(bucket, offset + piece.offset + done, size, starts))
    return units
