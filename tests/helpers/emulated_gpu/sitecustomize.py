"""Makes ``torch.cuda`` a GPU that is emulated in host memory, in every Python process whose ``PYTHONPATH`` has this
folder, as soon as the process imports torch.

``device.cpp`` is the device; this module is the part of ``torch.cuda`` that the project and torch itself use.
"""

import ctypes
import importlib.abc
import importlib.util
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

LIBRARY = "FTD_EMULATED_GPU"
"""Environment variable with the path of the compiled ``device.cpp``."""
TOTAL_BYTES = 8 << 30


class Event:
    """A time: work is complete when it is given."""

    def __init__(self, **_: Any) -> None:
        self._at_s = 0.0

    def record(self, stream: "Stream | None" = None) -> None:
        self._at_s = time.perf_counter()

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, later: "Event") -> float:
        return 1e3 * (later._at_s - self._at_s)


class Stream:
    """A queue that is always empty."""

    def __init__(self, device: object = None, **_: Any) -> None:
        pass

    def wait_event(self, event: Event) -> None:
        pass

    def synchronize(self) -> None:
        pass


def emulate(torch: Any) -> None:
    """Let ``torch.cuda`` be the emulated device."""
    cuda, device = torch.cuda, torch.ops.emulated_gpu
    only, generator = Stream(), device.default_generator()

    @contextmanager
    def on(stream: Stream) -> Iterator[None]:
        yield

    def properties(index: Any = None) -> SimpleNamespace:
        own = f"GPU {number_of(index)} of process {os.getpid()}"
        return SimpleNamespace(name="emulated GPU", total_memory=TOTAL_BYTES, uuid=own, major=9, minor=0)

    def number_of(index: Any) -> int:
        number = torch.device(index).index if isinstance(index, str | torch.device) else index
        return device.current_index() if number is None else number

    def exchange(index: int) -> int:
        before: int = device.current_index()
        if index >= 0:
            device.set_index(index)
        return before

    replaced = {
        "_lazy_init": lambda: None,
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": device.count,
        "current_device": device.current_index,
        "set_device": lambda index: device.set_index(number_of(index)),
        "_exchange_device": exchange,
        "_maybe_exchange_device": exchange,
        "get_device_name": lambda index=None: "emulated GPU",
        "get_device_capability": lambda index=None: (9, 0),
        "get_device_properties": properties,
        "memory_allocated": lambda index=None: device.allocated_bytes(),
        "max_memory_allocated": lambda index=None: device.peak_bytes(),
        "empty_cache": lambda: None,
        "is_bf16_supported": lambda including_emulation=True: True,
        "synchronize": lambda index=None: None,
        "Stream": Stream,
        "Event": Event,
        "current_stream": lambda index=None: only,
        "stream": on,
        "cudart": lambda: SimpleNamespace(
            cudaHostRegister=lambda address, size_bytes, flags: 0, cudaHostUnregister=lambda address: 0
        ),
        "manual_seed": generator.manual_seed,
        "manual_seed_all": generator.manual_seed,
        "get_rng_state": lambda index=None: generator.get_state(),
        "set_rng_state": lambda state, index=None: generator.set_state(state),
    }
    for name, value in replaced.items():
        setattr(cuda, name, value)

    from emulated_nccl import ProcessGroupNCCL

    torch.distributed.ProcessGroupNCCL = ProcessGroupNCCL


class _AfterImport(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Emulates the device when torch is imported."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return None
        self._loader, spec.loader = spec.loader, self
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        # Torch asks which devices there are while it is imported, and remembers the answer.
        ctypes.CDLL(os.environ[LIBRARY])
        self._loader.exec_module(module)
        emulate(module)


if __name__ == "sitecustomize" and LIBRARY in os.environ:
    sys.meta_path.insert(0, _AfterImport())
