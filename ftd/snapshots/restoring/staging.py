"""Where restored layers go: into files for this node's trainers, or one after the other to somebody here."""

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
from storage.image import runs_of as runs_in
from storage.pages import allocate, map_file
from storage.shards import Bytes
from storage.staged import BorrowedSnapshot, PayloadChunk, StagedLayer, write_staged

Put = Callable[[int, bytes, Bytes], Awaitable[None]]
"""Takes a layer, its header and its payload, which is another layer's memory as soon as it returns."""


Found = tuple[LayerImage, Sequence[ByteRange]]
"""A layer, and where its bytes in the bucket are."""


class RestoreTarget(Protocol):
    """What a restore fills."""

    @property
    def lends(self) -> bool:
        """Is it to be told where this node's own memory has bytes, instead of given them?"""

    def runs(self, layers: Iterable[int]) -> list[list[int]]:
        """What of these layers is to be had at once, ascending."""

    def room(self, size_bytes: int) -> Bytes:
        """Memory for what a run needs. :raises OSError: there is too little."""

    async def take(self, run: Sequence[Found], memory: Bytes) -> None:
        """A run's layers; memory is the last ``room``."""

    async def put(self, layer: int, header: bytes, payload: Bytes) -> None:
        """A layer as a whole."""


class LayerStream:
    """Hands on each layer as a whole. Takes the memory of two."""

    lends = False

    def __init__(self, put: Put) -> None:
        self._put = put
        self._memories: list[Bytes] = [np.empty(0, dtype=np.uint8)] * 2
        """Of one layer, used for later ones: fresh pages cost more than what is copied into them."""

    def runs(self, layers: Iterable[int]) -> list[list[int]]:
        return [[number] for number in sorted(layers)]

    def room(self, size_bytes: int) -> Bytes:
        self._memories.reverse()
        if len(self._memories[0]) < size_bytes:
            self._memories[0] = np.empty(size_bytes, dtype=np.uint8)
        return self._memories[0][:size_bytes]

    async def take(self, run: Sequence[Found], memory: Bytes) -> None:
        for layer, _ in run:
            payload = await asyncio.to_thread(assemble_payload, layer, memory)
            await self.put(layer.layer, layer.header, payload)

    async def put(self, layer: int, header: bytes, payload: Bytes) -> None:
        await self._put(layer, header, payload)


class StagingDirectory:
    """A directory of what ``storage.staged`` says.

    :param lends: the snapshot's own slots may be named there.
    :param staged: called with each layer that is there.
    """

    def __init__(
        self, directory: Path, *, lends: bool = True, staged: Callable[[int], None] = lambda layer: None
    ) -> None:
        self.lends = lends
        self._directory = directory.absolute()
        self._staged = staged
        self._path = ""
        """Of the last ``room``."""
        self._lenders: dict[Path, BorrowedSnapshot] = {}

    def runs(self, layers: Iterable[int]) -> list[list[int]]:
        """Layers that follow each other."""
        runs: list[list[int]] = []
        for layer in sorted(layers):
            if runs and runs[-1][-1] + 1 == layer:
                runs[-1].append(layer)
            else:
                runs.append([layer])
        return runs

    def room(self, size_bytes: int) -> Bytes:
        self._path, memory = _made(self._directory, size_bytes)
        return memory

    async def take(self, run: Sequence[Found], memory: Bytes) -> None:
        def write() -> None:
            for layer, stretches in run:
                pieces = tuple(_pieces(layer, stretches, self._path))
                lenders = {self._lender(s): None for s in stretches if s.lender is not None}
                staged = StagedLayer(header=layer.header, chunks=pieces, borrowed=tuple(lenders))
                write_staged(self._directory, layer.layer, staged)

        await asyncio.to_thread(write)
        for layer, _ in run:
            self._staged(layer.layer)

    async def put(self, layer: int, header: bytes, payload: Bytes) -> None:
        def write() -> None:
            pieces: tuple[PayloadChunk, ...] = ()
            if len(payload):
                path, memory = _made(self._directory, len(payload))
                memory[:] = payload
                pieces = (PayloadChunk(size_bytes=len(payload), path=path),)
            write_staged(self._directory, layer, StagedLayer(header=header, chunks=pieces))

        await asyncio.to_thread(write)
        self._staged(layer)

    def _lender(self, stretch: ByteRange) -> BorrowedSnapshot:
        assert stretch.lender is not None and stretch.lender.held is not None
        held = stretch.lender.held
        if held.directory not in self._lenders:
            self._lenders[held.directory] = held.lender()
        return self._lenders[held.directory]


def _made(directory: Path, size_bytes: int) -> tuple[str, Bytes]:
    """A new file of so many bytes, allocated, and its memory.

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


def _pieces(layer: LayerImage, stretches: Sequence[ByteRange], path: str) -> Iterator[PayloadChunk]:
    """The layer's payload. :param path: of what is not lent. :raises CorruptDataError: see ``runs_in``."""
    for run in runs_in(layer.decoded()):
        if not run.shared:
            data = layer.buffers[run.offset : run.offset + run.size_bytes]
            yield PayloadChunk(size_bytes=run.size_bytes, data=data)
            continue
        first = layer.offset + run.offset
        end = first + run.size_bytes
        for stretch in stretches:
            if stretch.first < end and first < stretch.end:
                yield _piece(stretch.clipped(first, end), path)


def _piece(stretch: ByteRange, path: str) -> PayloadChunk:
    size = stretch.end - stretch.first
    if stretch.lender is None:
        return PayloadChunk(size_bytes=size, path=path, offset=stretch.offset)
    held, part = stretch.lender.held, stretch.lender.shard
    assert held is not None and part is not None
    return PayloadChunk(
        size_bytes=size,
        path=str(held.slot.absolute()),
        offset=part.offset + stretch.offset,
        part=part.cut(stretch.offset, stretch.offset + size),
    )
