"""Layers that the node staged (``storage.staged``), on their way into this trainer's tensors.

Straight out of where they lie, on several threads: each block that the node lends is verified and, while it
is in the cache, copied, while the next layer is made ready. A layer counts when ``verify`` has found all of it
sound, and what was lent still there.
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

from runtime.layers.state import LayerStates, ReusedMemory
from storage.errors import CorruptDataError
from storage.layerstate import LayerEntry, padded_size
from storage.manifest import BLOCK_BYTES, SnapshotPart
from storage.pages import Bytes, map_file
from storage.staged import BorrowedSnapshot, PayloadChunk, read_staged

_THREADS = 4
_TASK_BYTES = 4 * BLOCK_BYTES
"""Of one task of a thread."""


class StagingCorruptedError(RuntimeError):
    """What was staged is not what was written, or is gone; ``part`` is to blame where it is known."""

    def __init__(self, detail: str, part: str = "") -> None:
        self.part = part
        super().__init__(detail)


@dataclass(frozen=True, slots=True)
class _Run:
    """Memory for the payload's bytes from ``start`` on."""

    start: int
    memory: Bytes

    @property
    def end(self) -> int:
        return self.start + len(self.memory)


@dataclass(slots=True)
class _Block:
    """Bytes that are verified, where they are lent, and copied."""

    lent: SnapshotPart | None
    number: int
    """Of ``lent``."""
    data: Bytes
    copies: list[tuple[Bytes, Bytes]] = field(default_factory=list)
    """Each: into the first from the second."""

    @property
    def part(self) -> str:
        return self.lent.name if self.lent is not None else ""

    def copy(self) -> bool:
        """False: it is not as it was written."""
        if self.lent is not None and not self.lent.is_block_intact(self.number, self.data):
            return False
        for target, source in self.copies:
            target[:] = source
        return True


@dataclass(frozen=True, slots=True)
class _Begun:
    """A layer on its way."""

    layer: int
    tasks: list[Future[_Block | None]]
    """Each gives a block that is not as it was written."""
    others: list[tuple[Bytes, Tensor]]
    """What is to be copied by torch from where it is put."""


class StagedStateLoader:
    """``with StagedStateLoader(directory, states, tick) as staged``.

    :param tick: called now and then by the thread that calls ``load_layer``.
    :param reuse: the optimizer's tensors of layers that are held are filled, and not made anew.
    """

    def __init__(
        self, directory: Path, states: LayerStates, tick: Callable[[], None], *, reuse: bool = False
    ) -> None:
        self._directory = directory
        self._states = states
        self._tick = tick
        self._files: dict[str, Bytes] = {}
        self._lenders: set[BorrowedSnapshot] = set()
        self._reused: ReusedMemory | None = {} if reuse else None
        self._begun: _Begun | None = None
        self._beside: Bytes = np.empty(0, dtype=np.uint8)
        """For what has no memory here that bytes can be copied into; made once, as fresh memory is slow."""

    def __enter__(self) -> Self:
        self._threads = ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1), "restore")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._threads.shutdown(cancel_futures=True)
        self._begun = None
        self._files.clear()

    def load_layer(self, layer: int) -> None:
        """Begin to hold the layer; when this returns, the one before is copied.

        :raises StateError: it is of another model. :raises StagingCorruptedError: its bytes, or those of the one
        before, are not what was written, or are not there any more.
        """
        try:
            staged = read_staged(self._directory, layer)
            sources = [(piece, self._file(piece)) for piece in staged.chunks]
        except (OSError, CorruptDataError) as error:
            raise StagingCorruptedError(f"layer {layer}: {error}") from error
        places = self._states.allocate(layer, staged.header, staged.size_bytes, self._reused)
        runs, others = self._runs(places)
        tasks = [self._threads.submit(_copied, some) for some in _batches(_blocks(sources, runs))]
        self.finish()
        self._begun = _Begun(layer, tasks, others)
        self._lenders |= set(staged.borrowed)
        if others:
            self.finish()  # The next one's are put into the same memory.

    def verify(self) -> None:
        """All layers are held.

        :raises StagingCorruptedError: the last one is not what was written, or what was copied may have been written
        over meanwhile.
        """
        self.finish()
        for lender in self._lenders:
            if not lender.there():
                raise StagingCorruptedError(f"{lender.manifest} is gone or another one")

    def finish(self) -> None:
        """Return when the layer that was taken last is copied.

        :raises StagingCorruptedError: it is not what was written.
        """
        begun, self._begun = self._begun, None
        if begun is None:
            return
        for task in begun.tasks:
            self._tick()
            if (block := task.result()) is not None:
                raise StagingCorruptedError(f"layer {begun.layer}: its digest does not match", block.part)
        for memory, tensor in begun.others:
            tensor.copy_(torch.from_numpy(memory).view(tensor.dtype).view(tensor.shape))

    def _file(self, piece: PayloadChunk) -> Bytes:
        """All of the file that a piece lies in. :raises OSError, CorruptDataError: it is not there."""
        if not piece.path:
            return np.frombuffer(piece.data, dtype=np.uint8)
        if piece.path not in self._files:
            with Path(piece.path).open("r+b") as file:
                self._files[piece.path] = map_file(file.fileno(), os.fstat(file.fileno()).st_size)
        memory = self._files[piece.path]
        part = piece.part or piece
        if max(piece.offset + piece.size_bytes, part.offset + part.size_bytes) > len(memory):
            raise CorruptDataError(f"{piece.path} has only {len(memory)} bytes")
        return memory

    def _runs(
        self, places: Sequence[tuple[LayerEntry, Tensor]]
    ) -> tuple[list[_Run], list[tuple[Bytes, Tensor]]]:
        """Where the payload's bytes go, ascending; and of tensors that bytes cannot be copied into what is
        copied for them instead."""
        apart = [_memory(tensor) is None for _, tensor in places]
        sizes = [padded_size(entry.size_bytes) for entry, _ in places]
        needed = sum(size for size, beside in zip(sizes, apart, strict=True) if beside)
        if len(self._beside) < needed:
            self._beside = np.empty(needed, dtype=np.uint8)
        runs: list[_Run] = []
        others: list[tuple[Bytes, Tensor]] = []
        end = 0
        for (entry, tensor), size in zip(places, sizes, strict=True):
            if not entry.size_bytes:
                continue
            memory = _memory(tensor)
            if memory is None:
                memory = self._beside[end : end + entry.size_bytes]
                others.append((memory, tensor))
                end += size
            runs.append(_Run(entry.offset, memory))
        return runs, others


def _memory(tensor: Tensor) -> Bytes | None:
    """Its bytes in the order of a payload; ``None``: it has no such on the host."""
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        return None
    memory: Bytes = tensor.reshape(-1).view(torch.uint8).numpy()
    return memory


def _blocks(pieces: Iterable[tuple[PayloadChunk, Bytes]], runs: Sequence[_Run]) -> list[_Block]:
    """What is copied together, and verified before: each block of what is lent once."""
    ends = [run.end for run in runs]
    found: dict[tuple[str, int], _Block] = {}
    start = 0
    for piece, file in pieces:
        for number, block in _cut(piece):
            low, high = max(piece.offset, block.start), min(piece.offset + piece.size_bytes, block.stop)
            copies = list(_copies(file, low, high, start + low - piece.offset, runs, ends))
            if copies:
                key = piece.path or f"piece at {start}", block.start
                found.setdefault(key, _Block(piece.part, number, file[block.start : block.stop]))
                found[key].copies += copies
        start += piece.size_bytes
    return list(found.values())


def _batches(blocks: Iterable[_Block]) -> Iterator[list[_Block]]:
    """For one task each."""
    batch: list[_Block] = []
    size = 0
    for block in blocks:
        batch.append(block)
        size += len(block.data)
        if size >= _TASK_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _copied(blocks: Iterable[_Block]) -> _Block | None:
    """The first that is not as it was written; the others behind it are not copied."""
    return next((block for block in blocks if not block.copy()), None)


def _cut(piece: PayloadChunk) -> Iterator[tuple[int, range]]:
    """The blocks of its file that it lies in, numbered where they are verified."""
    part, end = piece.part, piece.offset + piece.size_bytes
    if part is None:
        for first in range(piece.offset, end, BLOCK_BYTES):
            yield 0, range(first, min(first + BLOCK_BYTES, end))
        return
    for number in part.covering(piece.offset - part.offset, end - part.offset):
        low, high = part.block(number)
        yield number, range(part.offset + low, part.offset + high)


def _copies(
    file: Bytes, low: int, high: int, start: int, runs: Sequence[_Run], ends: Sequence[int]
) -> Iterator[tuple[Bytes, Bytes]]:
    """The file's bytes [low, high), which are the payload's from ``start`` on, with their places."""
    end = start + high - low
    for number in range(bisect_right(ends, start), len(runs)):
        run = runs[number]
        if run.start >= end:
            break
        first, last = max(start, run.start), min(end, run.end)
        yield run.memory[first - run.start : last - run.start], file[low + first - start : low + last - start]
