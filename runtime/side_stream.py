"""Copies from a device to the arena in parallel with computing: on a stream of their own, into pinned memory.

The stream begins after the work that the computing stream was given before the snapshot. A thread that will
change the tensors makes the computing stream wait for the copies on the device, so that the host never
waits. The arena's memory is registered with the driver (page-locked), without which such copies are not
asynchronous.
"""

import mmap
from collections.abc import Callable
from contextlib import AbstractContextManager

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from runtime.device import DeviceRuntime, DeviceStream, device_runtime


class SideStreams:
    """A side stream for each device that is used.

    :param runtime_of: returns a device's runtime.
    """

    def __init__(self, runtime_of: Callable[[torch.device], DeviceRuntime] = device_runtime) -> None:
        self._runtime_of = runtime_of
        self._streams: dict[torch.device, tuple[DeviceRuntime, DeviceStream]] = {}
        self._pinned: dict[int, tuple[int, int]] = {}

    def begin(self, devices: set[torch.device]) -> None:
        """Let copies begin after everything that was computed so far; called by the training thread."""
        for device in devices:
            if device not in self._streams:
                runtime = self._runtime_of(device)
                self._streams[device] = runtime, runtime.stream()
            runtime, stream = self._streams[device]
            computed = runtime.event()
            computed.record()
            stream.wait(computed)

    def prepare_thread(self, devices: set[torch.device]) -> None:
        """Prepare a thread other than the training thread, so that the driver does not allocate memory on the
        first device for it.
        """
        for device in sorted(devices, key=str)[:1]:
            self._runtime_of(device).prepare_thread()

    def on(self, device: torch.device) -> AbstractContextManager[None]:
        """Return a context in which the device's side stream is the current one."""
        runtime, stream = self._streams[device]
        return runtime.on(stream)

    def make_compute_wait(self, devices: set[torch.device]) -> None:
        """Let everything that is computed from now on begin after the copies; called by the training thread."""
        for device in devices:
            runtime, stream = self._streams[device]
            copied = runtime.event()
            with runtime.on(stream):
                copied.record()
            runtime.current().wait(copied)

    def finish(self, devices: set[torch.device]) -> None:
        """Make the host wait until the copies are complete."""
        for device in devices:
            self._streams[device][1].synchronize()

    def pin(self, number: int, view: NDArray[np.uint8]) -> None:
        """Register the slot's memory with the driver, once; if the driver rejects it, copies are slower.

        Whole pages are registered, as in slots, because a snapshot's size varies by some bytes.
        """
        address, size = view.ctypes.data, -(-view.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        known_address, known_size = self._pinned.get(number, (0, 0))
        if known_address == address and known_size >= size:
            return
        self._unpin(number)
        if size and self._driver.register(address, size):
            self._pinned[number] = (address, size)

    def close(self) -> None:
        """Unregister all memory from the driver."""
        for number in list(self._pinned):
            self._unpin(number)

    @property
    def _driver(self) -> DeviceRuntime:
        """The runtime of any device: the driver registers memory for all of them."""
        known = next(iter(self._streams.values()), None)
        return self._runtime_of(torch.device("cuda")) if known is None else known[0]

    def _unpin(self, number: int) -> None:
        address, _ = self._pinned.pop(number, (0, 0))
        if address:
            self._driver.unregister(address)


def copy_async(target: NDArray[np.uint8], source: Tensor) -> None:
    """Begin a copy on the current stream. If ``target`` is pinned, it returns before the bytes are there."""
    torch.from_numpy(target).copy_(source, non_blocking=True)
