"""Loading of layers that the node staged (``storage.staged``) into this trainer's tensors.

Several threads read the layers where they lie. They verify each block of the borrowed memory and copy it
while it is in the cache, and meanwhile the next layer is prepared. Bytes for a device go through one of two
buffers of pinned memory, so that the link carries one layer while threads read the next. A device that holds
a part of each layer reads the blocks that its part is in, and has memory for nothing else. A layer counts as
loaded only after ``verify`` has found all of its bytes intact and the borrowed memory unchanged.
"""

import os
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
import torch
from torch import Tensor

from runtime.device import DeviceEvent, DeviceRuntime
from runtime.grouping import grouped
from runtime.layers.state import LayerStates, PayloadTarget, ReusedMemory
from storage.errors import CorruptDataError
from storage.layerstate import LayerHeader, padded_size
from storage.manifest import BLOCK_BYTES, SnapshotPart
from storage.pages import Bytes, map_file
from storage.staged import BorrowedSnapshot, PayloadChunk, read_staged

_THREADS = 4
_TASK_BYTES = 4 * BLOCK_BYTES
"""Bytes per task of a thread."""


class StagingCorruptedError(RuntimeError):
    """Staged bytes that have changed or are missing; ``part`` names the part at fault if it is known."""

    def __init__(self, detail: str, part: str = "") -> None:
        self.part = part
        super().__init__(detail)


@dataclass(frozen=True, slots=True)
class _Target:
    """Memory for the payload's bytes from ``start`` on."""

    start: int
    memory: Bytes

    @property
    def end(self) -> int:
        return self.start + len(self.memory)


@dataclass(slots=True)
class _Block:
    """Bytes that are verified, if they are borrowed, and copied."""

    lent: SnapshotPart | None
    number: int
    """Block number within ``lent``."""
    data: Bytes
    copies: list[tuple[Bytes, Bytes]] = field(default_factory=list)
    """Pairs of a target and a source."""

    @property
    def part(self) -> str:
        return self.lent.name if self.lent is not None else ""

    def copy(self) -> bool:
        """Copy the block; return ``False``, without copying, if its bytes have changed."""
        if self.lent is not None and not self.lent.is_block_intact(self.number, self.data):
            return False
        for target, source in self.copies:
            target[:] = source
        return True


@dataclass(slots=True, eq=False)
class _StagingBuffer:
    """Memory for the bytes of one layer that threads cannot copy to their tensors."""

    runtime: DeviceRuntime
    memory: Bytes = field(default_factory=lambda: np.empty(0, dtype=np.uint8))
    copied: DeviceEvent | None = None
    """End of the copies from this memory."""

    def begin(self, size_bytes: int) -> None:
        """Wait until the memory may be overwritten, and make it large enough."""
        self.wait()
        if len(self.memory) < size_bytes:
            self.memory = self.runtime.pinned(size_bytes, torch.uint8).numpy()

    def copy(self, pairs: Iterable[tuple[Bytes, Tensor]]) -> None:
        """Begin to copy parts of this memory to tensors."""
        for memory, tensor in pairs:
            source = torch.from_numpy(memory).view(tensor.dtype).view(tensor.shape)
            tensor.copy_(source, non_blocking=True)
        self.copied = self.runtime.event()
        self.copied.record()

    def wait(self) -> None:
        """Make the host wait for the copies."""
        if self.copied is not None:
            self.copied.synchronize()
            self.copied = None


@dataclass(frozen=True, slots=True)
class _LoadingLayer:
    """A layer that is being loaded."""

    layer: int
    tasks: list[Future[_Block | None]]
    """Tasks, each of which returns a block whose bytes have changed, if any."""
    others: list[tuple[Bytes, Tensor]]
    """Parts of ``buffer``, with the tensor that torch copies each to."""
    buffer: _StagingBuffer


class StagedStateLoader:
    """A context that loads layers: ``with StagedStateLoader(directory, states, tick) as staged``.

    :param tick: called now and then by the thread that calls ``load_layer``.
    :param share: returns the tensors of a part of a layer, ascending by the offset of their bytes; other bytes
        are not read. By default, layers are loaded whole, and existing tensors of the optimizer are filled again.
    """

    def __init__(
        self,
        directory: Path,
        states: LayerStates,
        tick: Callable[[], None],
        *,
        share: Callable[[LayerHeader], Sequence[PayloadTarget]] | None = None,
    ) -> None:
        self._directory = directory
        self._states = states
        self._share = share
        self._tick = tick
        self._files: dict[str, Bytes] = {}
        self._borrowed: set[BorrowedSnapshot] = set()
        self._reused: ReusedMemory = {}
        self._loading: _LoadingLayer | None = None
        self._buffers = _StagingBuffer(states.runtime), _StagingBuffer(states.runtime)
        """The buffer of the next layer, and that of the one before."""

    def __enter__(self) -> Self:
        self._threads = ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1), "restore")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._threads.shutdown(cancel_futures=True)
        for buffer in self._buffers:
            buffer.wait()
        self._loading = None
        self._files.clear()

    def load_layer(self, layer: int) -> None:
        """Begin to load a layer; the previous one has been read when this returns.

        :raises StateError: it belongs to a different model.
        :raises StagingCorruptedError: its bytes, or those of the previous layer, have changed or are
            missing.
        """
        try:
            staged = read_staged(self._directory, layer)
            sources = [(chunk, self._file(chunk)) for chunk in staged.chunks]
        except (OSError, CorruptDataError) as error:
            raise StagingCorruptedError(f"layer {layer}: {error}") from error
        given = layer, staged.header, staged.size_bytes
        if self._share is None:
            places: Sequence[PayloadTarget] = self._states.allocate(*given, self._reused)
        else:
            places = self._share(self._states.accept(*given))
        buffer, before = self._buffers
        targets, others = self._targets(places, buffer)
        groups = grouped(_blocks(sources, targets), lambda block: len(block.data), _TASK_BYTES)
        tasks = [self._threads.submit(_copy_until_changed, some) for some in groups]
        self.finish()
        self._loading = _LoadingLayer(layer, tasks, others, buffer)
        self._borrowed |= set(staged.borrowed)
        self._buffers = before, buffer

    def verify(self) -> None:
        """Finish, and check that all layers were loaded intact.

        :raises StagingCorruptedError: the last layer's bytes have changed, or the borrowed memory may have
            been overwritten meanwhile.
        """
        self.finish()
        for snapshot in self._borrowed:
            if not snapshot.is_present():
                raise StagingCorruptedError(f"{snapshot.manifest} is missing or was replaced")

    def finish(self) -> None:
        """Wait until the last layer has been read; the device may still be copying it.

        :raises StagingCorruptedError: its bytes have changed.
        """
        loading, self._loading = self._loading, None
        if loading is None:
            return
        for task in loading.tasks:
            self._tick()
            if (block := task.result()) is not None:
                raise StagingCorruptedError(f"layer {loading.layer}: its digest does not match", block.part)
        if loading.others:
            loading.buffer.copy(loading.others)

    def _file(self, chunk: PayloadChunk) -> Bytes:
        """Return all bytes of the file that contains a staged range.

        :raises OSError: the file is missing.
        :raises CorruptDataError: the file is too short.
        """
        if not chunk.path:
            return np.frombuffer(chunk.data, dtype=np.uint8)
        if chunk.path not in self._files:
            with Path(chunk.path).open("r+b") as file:
                self._files[chunk.path] = map_file(file.fileno(), os.fstat(file.fileno()).st_size)
        memory = self._files[chunk.path]
        part = chunk.part or chunk
        if max(chunk.offset + chunk.size_bytes, part.offset + part.size_bytes) > len(memory):
            raise CorruptDataError(f"{chunk.path} has only {len(memory)} bytes")
        return memory

    def _targets(
        self, places: Sequence[PayloadTarget], buffer: _StagingBuffer
    ) -> tuple[list[_Target], list[tuple[Bytes, Tensor]]]:
        """Return the memory for the payload's bytes, ascending, and the tensors to be copied from the buffer."""
        own = [_memory(tensor, self._states.runtime) for _, tensor in places]
        sizes = [tensor.nbytes for _, tensor in places]
        buffer.begin(
            sum(padded_size(size) for size, memory in zip(sizes, own, strict=True) if memory is None)
        )
        targets: list[_Target] = []
        others: list[tuple[Bytes, Tensor]] = []
        end = 0
        for (start, tensor), size, memory in zip(places, sizes, own, strict=True):
            if not size:
                continue
            if memory is not None:
                targets.append(_Target(start, memory))
                continue
            staging = buffer.memory[end : end + size]
            others.append((staging, tensor))
            targets.append(_Target(start, staging))
            end += padded_size(size)
        return targets, others


def _memory(tensor: Tensor, runtime: DeviceRuntime) -> Bytes | None:
    """Return the tensor's bytes in the payload's order; ``None`` if they are not on the host, or not in that
    order.
    """
    if runtime.holds(tensor) or not tensor.is_contiguous():
        return None
    memory: Bytes = tensor.reshape(-1).view(torch.uint8).numpy()
    return memory


def _blocks(chunks: Iterable[tuple[PayloadChunk, Bytes]], targets: Sequence[_Target]) -> list[_Block]:
    """Return the blocks to verify and copy; each block of borrowed memory occurs once."""
    ends = [target.end for target in targets]
    found: dict[tuple[str, int], _Block] = {}
    start = 0
    for chunk, file in chunks:
        for number, block in _blocks_of(chunk):
            low, high = max(chunk.offset, block.start), min(chunk.offset + chunk.size_bytes, block.stop)
            copies = list(_copies(file, low, high, start + low - chunk.offset, targets, ends))
            if copies:
                key = chunk.path or f"chunk at {start}", block.start
                found.setdefault(key, _Block(chunk.part, number, file[block.start : block.stop]))
                found[key].copies += copies
        start += chunk.size_bytes
    return list(found.values())


def _copy_until_changed(blocks: Iterable[_Block]) -> _Block | None:
    """Copy blocks until one has changed; return that one."""
    return next((block for block in blocks if not block.copy()), None)


def _blocks_of(chunk: PayloadChunk) -> Iterator[tuple[int, range]]:
    """Yield the blocks of its file that contain the range, with their numbers if they are verified."""
    part, end = chunk.part, chunk.offset + chunk.size_bytes
    if part is None:
        for first in range(chunk.offset, end, BLOCK_BYTES):
            yield 0, range(first, min(first + BLOCK_BYTES, end))
        return
    for number in part.blocks_covering(chunk.offset - part.offset, end - part.offset):
        low, high = part.block(number)
        yield number, range(part.offset + low, part.offset + high)


def _copies(
    file: Bytes, low: int, high: int, start: int, targets: Sequence[_Target], ends: Sequence[int]
) -> Iterator[tuple[Bytes, Bytes]]:
    """Yield targets and sources for the file's bytes [low, high), which are the payload's bytes from ``start``
    on.
    """
    end = start + high - low
    for number in range(bisect_right(ends, start), len(targets)):
        target = targets[number]
        if target.start >= end:
            break
        first, last = max(start, target.start), min(end, target.end)
        yield (
            target.memory[first - target.start : last - target.start],
            file[low + first - start : low + last - start],
        )
