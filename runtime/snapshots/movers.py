"""Who carries bytes into the arena: numpy where tensors are host memory, a side stream where they are not.

``HostMover`` copies and XORs with numpy, which lets other threads run meanwhile. ``DeviceMover`` asks a
stream beside the computing for chunked copies straight into the arena's memory, which is registered with the
driver (page-locked), and makes XORs on the device, so that only their result crosses the link. It knows
the device by ``Streams`` alone: the tests put late ones in its place. With CUDA's own it has never run.
"""

import contextlib
import threading
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from runtime.side_stream import copy_async
from storage.shards import xor_of

Bytes = NDArray[np.uint8]
Source = Bytes | Tensor
"""Host memory, or a flat uint8 tensor on a device."""


class Mover(Protocol):
    """Any thread; what was asked for is in ``target`` when that thread's ``finish`` returns."""

    def copy(self, target: Bytes, source: Source) -> None: ...

    def xor(self, target: Bytes, sources: Sequence[Source]) -> None:
        """``target`` becomes the XOR of two or more, of its own length each."""

    def finish(self) -> None: ...


class HostMover:
    """Nothing is under way when a call returns."""

    def copy(self, target: Bytes, source: Source) -> None:
        assert not isinstance(source, Tensor)
        target[:] = source

    def xor(self, target: Bytes, sources: Sequence[Source]) -> None:
        xor_of(target, [source for source in sources if not isinstance(source, Tensor)])

    def finish(self) -> None:
        pass


class Streams(Protocol):
    """``runtime.side_stream.SideStreams``, or a test's."""

    def on(self, device: torch.device) -> contextlib.AbstractContextManager[None]: ...

    def finish(self, devices: set[torch.device]) -> None: ...


class DeviceMover:
    """:param streams: whose side stream begins behind what the tensors were computed by."""

    def __init__(self, device: torch.device, streams: Streams) -> None:
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
            # The stream's order keeps the scratch until its copy is done.
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
        """On the device, this thread's own."""
        scratch: Tensor | None = getattr(self._own, "scratch", None)
        if scratch is None or scratch.numel() < size_bytes:
            scratch = self._own.scratch = torch.empty(size_bytes, dtype=torch.uint8, device=self._device)
        return scratch[:size_bytes]
