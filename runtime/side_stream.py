"""Copies from a device to the arena beside the computing: a stream of their own, and pinned memory.

The stream begins after what the computing stream was given before the snapshot, and whoever changes the
tensors next makes the computing stream wait for it, on the device: the host waits for nothing. The arena's
memory is registered with the driver (page-locked), without which such copies are not asynchronous.
"""

import mmap
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from runtime.device import DeviceRuntime, Stream, device_runtime


class SideStreams:
    """One side stream for each device that is used.

    :param runtime_of: a device's runtime.
    """

    def __init__(self, runtime_of: Callable[[torch.device], DeviceRuntime] = device_runtime) -> None:
        self._runtime_of = runtime_of
        self._streams: dict[torch.device, tuple[DeviceRuntime, Stream]] = {}
        self._pinned: dict[int, tuple[int, int]] = {}

    def begin(self, devices: set[torch.device]) -> None:
        """On the training thread: the copies come after what was computed so far."""
        for device in devices:
            if device not in self._streams:
                runtime = self._runtime_of(device)
                self._streams[device] = runtime, runtime.stream()
            runtime, stream = self._streams[device]
            computed = runtime.event()
            computed.record()
            stream.wait(computed)

    def prepare_thread(self, devices: set[torch.device]) -> None:
        """On a thread beside training: what it asks the driver for is not to be done on the first device,
        where it would take memory."""
        for device in sorted(devices, key=str)[:1]:
            self._runtime_of(device).prepare_thread()

    @contextmanager
    def on(self, device: torch.device) -> Iterator[None]:
        runtime, stream = self._streams[device]
        with runtime.on(stream):
            yield

    def make_compute_wait(self, devices: set[torch.device]) -> None:
        """On the training thread: what is computed from here on comes after the copies."""
        for device in devices:
            runtime, stream = self._streams[device]
            copied = runtime.event()
            with runtime.on(stream):
                copied.record()
            runtime.current().wait(copied)

    def finish(self, devices: set[torch.device]) -> None:
        """Wait, on the host, until the bytes are there."""
        for device in devices:
            self._streams[device][1].synchronize()

    def pin(self, number: int, view: NDArray[np.uint8]) -> None:
        """Register the slot's memory with the driver, once; where that is refused, copies are slower.

        In whole pages, as slots are: what is written there is some bytes longer or shorter each time.
        """
        address, size = view.ctypes.data, -(-view.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        known_address, known_size = self._pinned.get(number, (0, 0))
        if known_address == address and known_size >= size:
            return
        self._unpin(number)
        if size and self._driver.register(address, size):
            self._pinned[number] = (address, size)

    def close(self) -> None:
        for number in list(self._pinned):
            self._unpin(number)

    @property
    def _driver(self) -> DeviceRuntime:
        """Any device: the driver registers memory for all of them."""
        known = next(iter(self._streams.values()), None)
        return self._runtime_of(torch.device("cuda")) if known is None else known[0]

    def _unpin(self, number: int) -> None:
        address, _ = self._pinned.pop(number, (0, 0))
        if address:
            self._driver.unregister(address)


def copy_async(target: NDArray[np.uint8], source: Tensor) -> None:
    """Ask the current stream for it; returns before the bytes are there when ``target`` is pinned."""
    torch.from_numpy(target).copy_(source, non_blocking=True)
