"""Where restored layers go, and what was fetched of shards on the way there."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from pathlib import Path

import numpy as np

from storage.shards import Bytes

Put = Callable[[int, bytes, Bytes], Awaitable[None]]
"""Takes a layer, its header and its payload, which is another layer's memory as soon as it returns."""


class Store:
    """Ranges of another node's shard, fetched."""

    def __init__(self, ranges: Sequence[range]) -> None:
        self.pieces = [(some, np.empty(len(some), dtype=np.uint8)) for some in ranges]

    @property
    def size_bytes(self) -> int:
        return sum(len(some) for some, _ in self.pieces)

    def read(self, offset: int, size: int) -> Bytes:
        for some, memory in self.pieces:
            if some.start <= offset and offset + size <= some.stop:
                return memory[offset - some.start : offset - some.start + size]
        raise LookupError(f"bytes {offset} to {offset + size} were not asked for")


def runs_of(layers: Iterable[int]) -> list[list[int]]:
    """Layers that follow each other."""
    runs: list[list[int]] = []
    for layer in sorted(layers):
        if runs and runs[-1][-1] + 1 == layer:
            runs[-1].append(layer)
        else:
            runs.append([layer])
    return runs


def staged_in(directory: Path) -> Put:
    """Puts a layer as ``layer-<n>.header`` and ``layer-<n>.payload``: what ``runtime.engine`` reads.

    :raises OSError: there is no room.
    """

    def write(layer: int, header: bytes, payload: Bytes) -> None:
        (directory / f"layer-{layer}.payload").write_bytes(payload.data)
        (directory / f"layer-{layer}.header").write_bytes(header)

    async def put(layer: int, header: bytes, payload: Bytes) -> None:
        await asyncio.to_thread(write, layer, header, payload)

    return put
