"""State of a plain script and speed of its machine, for all parts of ``benchmarks.snapshot``.

The state is matrices of 1024 × 1024 with Adam's state. The optimizer changes only one of them, so that a
step consists of computing.
"""

import json
import mmap
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

WIDTH = 1024
GIB = 1024**3
SHM = Path("/dev/shm")


class Light(torch.optim.Optimizer):
    """Optimizer with Adam's state whose step changes one matrix."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__(parameters, {})
        for p in parameters:
            self.state[p] = {"exp_avg": torch.ones_like(p), "exp_avg_sq": torch.ones_like(p)}

    def step(self, closure: Any = None) -> Any:
        first = self.param_groups[0]["params"][0]
        with torch.no_grad():
            first.add_(1e-3)


def state_of(gib: float) -> tuple[nn.Module, Light, list[Tensor]]:
    """Return a model, its optimizer, and the tensors of both, ``gib`` GiB in all."""
    matrices = round(gib * GIB / (3 * 4 * WIDTH * WIDTH))
    model = nn.Module()
    model.layers = nn.ParameterList(nn.Parameter(torch.randn(WIDTH, WIDTH)) for _ in range(matrices))
    optimizer = Light(list(model.parameters()))
    tensors = [t for s in optimizer.state.values() for t in s.values()] + list(model.parameters())
    return model, optimizer, [t.detach() for t in tensors]


def timed(work: Callable[[], Any]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def plain_copy(tensors: list[Tensor]) -> Callable[[], None]:
    """Return a single-threaded copy of all tensors into warm memory for a quarter of them, which is reused."""
    some = tensors[: max(1, len(tensors) // 4)]
    warm = [torch.ones_like(t) for t in some]

    def copy() -> None:
        for number, source in enumerate(tensors):
            warm[number % len(some)].copy_(source)

    return copy


def memcpy_s(tensors: list[Tensor]) -> float:
    """Return the median seconds of a plain copy by one thread."""
    copy = plain_copy(tensors)
    return statistics.median(timed(copy) for _ in range(5))


def memcpy_by_two_s(tensors: list[Tensor]) -> float:
    """Return the seconds of the same copy split over two threads."""
    with ThreadPoolExecutor(2) as threads:
        return max(threads.map(memcpy_s, (tensors[::2], tensors[1::2])))


def first_touch_s(size_bytes: int) -> float:
    """Return the seconds in which one thread touches new memory on huge pages.

    After it that memory is free for a moment, so the next allocation gets it quickly.
    """
    with mmap.mmap(-1, max(1, size_bytes)) as memory:
        memory.madvise(mmap.MADV_HUGEPAGE)
        return timed(partial(np.frombuffer(memory, dtype=np.uint8).fill, 0))


def computing(seconds: float) -> Callable[[], None]:
    """Return matrix products that take about ``seconds``; their number is fixed in advance."""
    a = torch.randn(512, 512)
    once = statistics.median(timed(lambda: [a @ a for _ in range(10)]) for _ in range(5)) / 10
    count = max(1, round(seconds / once))

    def compute() -> None:
        for _ in range(count):
            a @ a

    return compute


def free_bytes() -> int:
    """Return the free bytes that both processes and shared memory can use."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    available = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    return min(available, shutil.disk_usage(SHM).free)


def phase(*options: str, environment: Mapping[str, str] | None = None) -> Any:
    """Run ``benchmarks.snapshot`` with these options in a new process and return the JSON that it prints last.

    The memory of that process is free when it has ended.

    :raises subprocess.CalledProcessError: the process failed.
    """
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.snapshot", *options],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | dict(environment or {}),
    )
    return json.loads(done.stdout.splitlines()[-1])


def die_first() -> None:
    """Make the kernel choose this process if memory runs out."""
    Path("/proc/self/oom_score_adj").write_text("1000")
