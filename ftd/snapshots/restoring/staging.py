"""Targets of a restore: files for this node's trainers, or a stream of layers for a caller in this process."""

import asyncio
import errno
import os
import tempfile
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from ftd.snapshots.restoring.read_plan import ByteRange
from storage.free_memory import free_bytes
from storage.image import LayerImage, assemble_payload
from storage.image import payload_ranges as runs_in
from storage.pages import allocate, map_file
from storage.shards import Bytes
from storage.staged import BorrowedSnapshot, PayloadChunk, StagedLayer, write_staged

PutLayer = Callable[[int, bytes, Bytes], Awaitable[None]]
"""Function that takes a layer, its header and its payload, whose memory is reused as soon as it returns."""


LocatedLayer = tuple[LayerImage, Sequence[ByteRange]]
"""A layer, and where its bytes in the bucket are."""


class RestoreTarget(Protocol):
    """Target that a restore fills."""

    @property
    def borrows(self) -> bool:
        """Whether bytes of this node's own memory are passed by their location, instead of copied."""

    def group_layers(self, layers: Iterable[int]) -> list[list[int]]:
        """Return the layers in groups that are restored at once, ascending."""

    def allocate(self, size_bytes: int) -> Bytes:
        """Return memory for a group of layers.

        :raises OSError: there is too little memory.
        """

    async def put_located(self, run: Sequence[LocatedLayer], memory: Bytes) -> None:
        """Take the layers of a group; ``memory`` is what ``allocate`` returned last."""

    async def put(self, layer: int, header: bytes, payload: Bytes) -> None:
        """Take a layer with its whole payload."""


class LayerStream:
    """A target that passes each layer on as a whole. It needs the memory of two layers."""

    borrows = False

    def __init__(self, put: PutLayer) -> None:
        self._put = put
        self._memories: list[Bytes] = [np.empty(0, dtype=np.uint8)] * 2
        """Memory of one layer each, reused for later layers: fresh pages cost more than copying into them."""

    def group_layers(self, layers: Iterable[int]) -> list[list[int]]:
        return [[number] for number in sorted(layers)]

    def allocate(self, size_bytes: int) -> Bytes:
        self._memories.reverse()
        if len(self._memories[0]) < size_bytes:
            self._memories[0] = np.empty(size_bytes, dtype=np.uint8)
        return self._memories[0][:size_bytes]

    async def put_located(self, run: Sequence[LocatedLayer], memory: Bytes) -> None:
        for layer, _ in run:
            payload = await asyncio.to_thread(assemble_payload, layer, memory)
            await self.put(layer.layer, layer.header, payload)

    async def put(self, layer: int, header: bytes, payload: Bytes) -> None:
        await self._put(layer, header, payload)


class StagingDirectory:
    """A directory of staged layers in the format of ``storage.staged``.

    :param borrows: staged layers may refer to the snapshot's own slots.
    :param staged: called with each layer that is staged.
    """

    def __init__(
        self, directory: Path, *, borrows: bool = True, staged: Callable[[int], None] = lambda layer: None
    ) -> None:
        self.borrows = borrows
        self._directory = directory.absolute()
        self._staged = staged
        self._path = ""
        """Path of the memory that ``allocate`` returned last; empty once layers are staged in it."""
        self._borrowed: dict[Path, BorrowedSnapshot] = {}

    def group_layers(self, layers: Iterable[int]) -> list[list[int]]:
        """Return consecutive layers as one group."""
        runs: list[list[int]] = []
        for layer in sorted(layers):
            if runs and runs[-1][-1] + 1 == layer:
                runs[-1].append(layer)
            else:
                runs.append([layer])
        return runs

    def allocate(self, size_bytes: int) -> Bytes:
        if self._path:  # Reading failed, and what replaces it needs more.
            Path(self._path).unlink()
            self._path = ""
        self._path, memory = _make_file(self._directory, size_bytes)
        return memory

    async def put_located(self, run: Sequence[LocatedLayer], memory: Bytes) -> None:
        def write() -> None:
            for layer, ranges in run:
                chunks = tuple(_chunks(layer, ranges, self._path))
                borrowed = {self._borrowed_from(s): None for s in ranges if s.holder is not None}
                staged = StagedLayer(header=layer.header, chunks=chunks, borrowed=tuple(borrowed))
                write_staged(self._directory, layer.layer, staged)

        await asyncio.to_thread(write)
        self._path = ""
        for layer, _ in run:
            self._staged(layer.layer)

    async def put(self, layer: int, header: bytes, payload: Bytes) -> None:
        def write() -> None:
            chunks: tuple[PayloadChunk, ...] = ()
            if len(payload):
                path, memory = _make_file(self._directory, len(payload))
                memory[:] = payload
                chunks = (PayloadChunk(size_bytes=len(payload), path=path),)
            write_staged(self._directory, layer, StagedLayer(header=header, chunks=chunks))

        await asyncio.to_thread(write)
        self._staged(layer)

    def _borrowed_from(self, some: ByteRange) -> BorrowedSnapshot:
        assert some.holder is not None and some.holder.held is not None
        held = some.holder.held
        if held.directory not in self._borrowed:
            self._borrowed[held.directory] = held.as_borrowed()
        return self._borrowed[held.directory]


def _make_file(directory: Path, size_bytes: int) -> tuple[str, Bytes]:
    """Return a new file of ``size_bytes``, allocated, and its memory.

    :raises OSError: there is no room.
    """
    if not size_bytes:
        return "", np.empty(0, dtype=np.uint8)
    if size_bytes > free_bytes(directory):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(directory))
    descriptor, path = tempfile.mkstemp(prefix="bytes-", dir=directory)
    try:
        os.ftruncate(descriptor, size_bytes)
        memory = map_file(descriptor, size_bytes)
        allocate(descriptor, memory)
    finally:
        os.close(descriptor)
    return path, memory


def _chunks(layer: LayerImage, ranges: Sequence[ByteRange], path: str) -> Iterator[PayloadChunk]:
    """Yield the chunks of the layer's payload.

    :param path: file of the bytes that are not borrowed.
    :raises CorruptDataError: see ``payload_ranges``.
    """
    for run in runs_in(layer.decoded()):
        if not run.shared:
            data = layer.buffers[run.offset : run.offset + run.size_bytes]
            yield PayloadChunk(size_bytes=run.size_bytes, data=data)
            continue
        first = layer.offset + run.offset
        end = first + run.size_bytes
        for some in ranges:
            if some.first < end and first < some.end:
                yield _chunk(some.clipped(first, end), path)


def _chunk(some: ByteRange, path: str) -> PayloadChunk:
    size = some.end - some.first
    if some.holder is None:
        return PayloadChunk(size_bytes=size, path=path, offset=some.offset)
    held, part = some.holder.held, some.holder.shard
    assert held is not None and part is not None
    return PayloadChunk(
        size_bytes=size,
        path=str(held.slot.absolute()),
        offset=part.offset + some.offset,
        part=part.slice_blocks(some.offset, some.offset + size),
    )
