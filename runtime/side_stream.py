"""Copies from a device to the arena beside the computing: a stream of their own, and pinned memory.

The stream begins after what the computing stream was given before the snapshot, and whoever changes the
tensors next makes the computing stream wait for it, on the device: the host waits for nothing. The arena's
memory is registered with the driver (page-locked), without which such copies are not asynchronous.
"""

import contextlib
import mmap
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class SideStreams:
    """One side stream for each CUDA device that is used."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._pinned: dict[int, tuple[int, int]] = {}

    def begin(self, devices: set[torch.device]) -> None:
        """On the training thread: the copies come after what was computed so far."""
        for device in devices:
            if device not in self._streams:
                self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self._streams[device].wait_stream(torch.cuda.current_stream(device))

    def adopt(self, devices: set[torch.device]) -> None:
        """On a thread beside training: what it asks the driver for is not to be done on the first device,
        where it would take memory."""
        for device in sorted(devices, key=str)[:1]:
            torch.cuda.set_device(device)

    @contextlib.contextmanager
    def on(self, device: torch.device) -> Iterator[None]:
        with torch.cuda.stream(self._streams[device]):
            yield

    def hold(self, devices: set[torch.device]) -> None:
        """On the training thread: what is computed from here on comes after the copies."""
        for device in devices:
            torch.cuda.current_stream(device).wait_stream(self._streams[device])

    def finish(self, devices: set[torch.device]) -> None:
        """Wait, on the host, until the bytes are there."""
        for device in devices:
            self._streams[device].synchronize()

    def pin(self, number: int, view: NDArray[np.uint8]) -> None:
        """Register the slot's memory with the driver, once; where that is refused, copies are slower.

        In whole pages, as slots are: what is written there is some bytes longer or shorter each time.
        """
        address, size = view.ctypes.data, -(-view.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        known_address, known_size = self._pinned.get(number, (0, 0))
        if known_address == address and known_size >= size:
            return
        self._unpin(number)
        driver: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        if size and int(driver.cudaHostRegister(address, size, 0)) == 0:
            self._pinned[number] = (address, size)
        elif size:
            # The driver tells this thread's next kernel of it, which is to be one that nobody needs.
            with contextlib.suppress(RuntimeError):
                torch.zeros(1, device="cuda")

    def close(self) -> None:
        for number in list(self._pinned):
            self._unpin(number)

    def _unpin(self, number: int) -> None:
        address, _ = self._pinned.pop(number, (0, 0))
        if address:
            driver: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            driver.cudaHostUnregister(address)


def copy_piece(target: NDArray[np.uint8], source: Tensor) -> None:
    """Ask the current stream for it; returns before the bytes are there when ``target`` is pinned."""
    torch.from_numpy(target).copy_(source, non_blocking=True)
