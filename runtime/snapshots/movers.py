"""Copies and XORs into the arena: with numpy where tensors are in host memory, on a side stream where they are
not.

``Mover`` uses numpy, which lets other threads run meanwhile. ``DeviceMover`` issues chunked copies on a
side stream, directly into the arena's memory, which is registered with the driver (page-locked). It
computes XORs on the device, so that only their result crosses the link.
"""

import threading
from collections.abc import Sequence

import torch
from torch import Tensor

from runtime.script.tensor_image import Bytes, Source
from runtime.side_stream import SideStreams, copy_async
from storage.shards import xor_of


class Mover:
    """Copies and XORs, from any thread: of host memory, unless a method is overridden."""

    def copy(self, target: Bytes, source: Source) -> None:
        assert not isinstance(source, Tensor)
        target[:] = source

    def xor(self, target: Bytes, sources: Sequence[Source]) -> None:
        """Set ``target`` to the XOR of two or more sources, each of its own length."""
        xor_of(target, [source for source in sources if not isinstance(source, Tensor)])

    def finish(self) -> None:
        """Wait until the results of this thread's calls are complete."""


class DeviceMover(Mover):
    """A mover of device memory.

    :param streams: side streams that begin after the computation of the tensors.
    """

    def __init__(self, device: torch.device, streams: SideStreams) -> None:
        self._device = device
        self._streams = streams
        self._own = threading.local()

    def copy(self, target: Bytes, source: Source) -> None:
        if not isinstance(source, Tensor):
            target[:] = source  # Optimizers count their steps in host memory.
            return
        with self._streams.on(self._device):
            copy_async(target, source)

    def xor(self, target: Bytes, sources: Sequence[Source]) -> None:
        with self._streams.on(self._device):
            first, second, *rest = map(self._brought, sources)
            # Stream order keeps the scratch memory intact until its copy is complete.
            result = self._scratch(len(target))
            torch.bitwise_xor(first, second, out=result)
            for source in rest:
                result.bitwise_xor_(source)
            copy_async(target, result)

    def finish(self) -> None:
        self._streams.finish({self._device})

    def _brought(self, source: Source) -> Tensor:
        return source if isinstance(source, Tensor) else torch.from_numpy(source).to(self._device)

    def _scratch(self, size_bytes: int) -> Tensor:
        """Return memory on the device that belongs to this thread."""
        scratch: Tensor | None = getattr(self._own, "scratch", None)
        if scratch is None or scratch.numel() < size_bytes:
            scratch = self._own.scratch = torch.empty(size_bytes, dtype=torch.uint8, device=self._device)
        return scratch[:size_bytes]
