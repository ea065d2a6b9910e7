"""The differences between devices: streams, events, pinned host memory, and waiting for results.

On a CPU an operation is complete when its call returns. A CUDA device is only *given* work: operations of
one stream run in order, those of different streams in any order unless an event orders them, and the host
sees a result only after it has waited for it. All code in this package that depends on this uses
``DeviceRuntime``, so that tests can substitute a device whose streams are late at random
(``tests/helpers/late_device.py``).
"""

import contextlib
import ctypes
import time
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

CPU = torch.device("cpu")


def flat_bytes(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor in row-major order: its own memory if that is contiguous, else a copy."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def device_time_s(device: torch.device) -> float:
    """Return a monotonic time in seconds after the device has finished all work given to it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


class DeviceEvent:
    """A position in the work of a stream; ``record`` may be called again for another position.

    On a CPU all work that was given before is complete, so only the time is recorded.
    """

    def __init__(self) -> None:
        self._at_s = 0.0

    def record(self) -> None:
        """Mark the end of the work that the current stream was given so far."""
        self._at_s = time.perf_counter()

    def done(self) -> bool:
        """Return whether the device has reached the position, without waiting."""
        return True

    def synchronize(self) -> None:
        """Make the host wait until the device has reached the position."""

    def ms_since(self, earlier: Any) -> float:
        """Return milliseconds from an earlier event of this device to this one; wait for both."""
        return float(1e3 * (self._at_s - earlier._at_s))


class DeviceStream:
    """A queue of work for a device. On a CPU, work is complete when it is given."""

    def wait(self, event: Any) -> None:
        """Let work that is given from now on begin after ``event``; the host does not wait."""

    def synchronize(self) -> None:
        """Make the host wait until all work that was given so far is complete."""


class DeviceRuntime:
    """The operations of one device: of a CPU, unless a method is overridden. Any thread may use it; each has its
    own current stream, at first the default one.

    :param device: device of the tensors.
    """

    is_async = False
    """Whether the host runs ahead of the device, so that it must wait before it reads a result."""

    def __init__(self, device: torch.device = CPU) -> None:
        self.device = device

    def holds(self, tensor: Tensor) -> bool:
        """Return whether the tensor is in the device's own memory, not the host's."""
        return False

    def event(self) -> DeviceEvent:
        """Return a new event, which is not recorded yet."""
        return DeviceEvent()

    def stream(self) -> DeviceStream:
        """Return a new stream in addition to the default one."""
        return DeviceStream()

    def current(self) -> DeviceStream:
        """Return the calling thread's current stream."""
        return DeviceStream()

    def on(self, stream: Any) -> AbstractContextManager[None]:
        """Return a context in which ``stream`` is the calling thread's current stream."""
        return contextlib.nullcontext()

    def prepare_thread(self) -> None:
        """Prepare a thread other than the main thread to use the device."""

    def synchronize(self) -> None:
        """Make the host wait for all work of all streams."""

    def pinned(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return uninitialised host memory that the device can copy from and to asynchronously."""
        return torch.empty(numel, dtype=dtype)

    def to_host(self, tensor: Tensor) -> Tensor:
        """Return the tensor in host memory (itself if it is there); wait for the current stream."""
        return tensor.detach()

    def register(self, address: int, size_bytes: int) -> bool:
        """Pin existing host memory, and return whether that succeeded; copies are slower if not."""
        return False

    def unregister(self, address: int) -> None:
        """Undo ``register``."""

    def values(self, tensor: Tensor) -> Any:
        """Return the tensor's numbers as (nested) lists; wait for the current stream."""
        return self.to_host(tensor).tolist()


class CudaEvent(DeviceEvent):
    """An event of a CUDA device, with its time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]

    def record(self) -> None:
        self.event.record(torch.cuda.current_stream(self._device))

    def done(self) -> bool:
        return bool(self.event.query())

    def synchronize(self) -> None:
        self.event.synchronize()

    def ms_since(self, earlier: Any) -> float:
        earlier.synchronize()
        self.synchronize()
        return float(earlier.event.elapsed_time(self.event))


class CudaStream(DeviceStream):
    """A stream of a CUDA device."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.stream = stream

    def wait(self, event: Any) -> None:
        self.stream.wait_event(event.event)

    def synchronize(self) -> None:
        self.stream.synchronize()


class CudaRuntime(DeviceRuntime):
    """A CUDA device."""

    is_async = True

    def holds(self, tensor: Tensor) -> bool:
        return tensor.device.type == "cuda"

    def event(self) -> CudaEvent:
        return CudaEvent(self.device)

    def stream(self) -> CudaStream:
        return CudaStream(torch.cuda.Stream(self.device))  # type: ignore[no-untyped-call]

    def current(self) -> CudaStream:
        return CudaStream(torch.cuda.current_stream(self.device))

    def on(self, stream: CudaStream) -> AbstractContextManager[None]:
        return torch.cuda.stream(stream.stream)

    def prepare_thread(self) -> None:
        # Otherwise the driver would use the first device for this thread's requests, and allocate memory
        # there.
        torch.cuda.set_device(self.device)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def pinned(self, numel: int, dtype: torch.dtype) -> Tensor:
        # torch reuses this memory only after the copies that use it.
        return torch.empty(numel, dtype=dtype, device="cpu", pin_memory=True)

    def to_host(self, tensor: Tensor) -> Tensor:
        return tensor.detach().cpu()

    def register(self, address: int, size_bytes: int) -> bool:
        driver: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        if int(driver.cudaHostRegister(address, size_bytes, 0)) == 0:
            return True
        # The driver reports the failure to the thread's next kernel, so launch one whose result nobody
        # needs.
        with contextlib.suppress(RuntimeError):
            torch.zeros(1, device="cuda")
        return False

    def unregister(self, address: int) -> None:
        driver: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        driver.cudaHostUnregister(address)


def create_cuda_context() -> None:
    """Create the context of this process's first GPU, which takes a second, and many seconds while other
    processes do the same.

    torch does this while it holds the interpreter's lock, so that no other thread could send heartbeats
    meanwhile. An error is ignored: torch meets it again, and describes it.
    """
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return
    device, context = ctypes.c_int(), ctypes.c_void_p()
    if driver.cuInit(0) == 0 and driver.cuDeviceGet(ctypes.byref(device), 0) == 0:
        # The process keeps this reference until it ends.
        driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)


def device_runtime(device: torch.device) -> DeviceRuntime:
    """Return the runtime of a device."""
    return CudaRuntime(device) if device.type == "cuda" else DeviceRuntime(device)
