"""A plain script's state, and what its machine can do: what all parts of ``benchmarks.snapshot`` need.

Matrices of 1024 × 1024 with Adam's state, and an optimizer that changes one of them: a step is computing.
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
    """Adam's state, and a step that changes one matrix of it."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__(parameters, {})
        for p in parameters:
            self.state[p] = {"exp_avg": torch.ones_like(p), "exp_avg_sq": torch.ones_like(p)}

    def step(self, closure: Any = None) -> None:
        first = self.param_groups[0]["params"][0]
        with torch.no_grad():
            first.add_(1e-3)


def state_of(gib: float) -> tuple[nn.Module, Light, list[Tensor]]:
    """A model, its optimizer, and the tensors of both, ``gib`` GiB in all."""
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
    """One thread's, of as many bytes into memory that was touched: a part of them again and again."""
    some = tensors[: max(1, len(tensors) // 4)]
    warm = [torch.ones_like(t) for t in some]

    def copy() -> None:
        for number, source in enumerate(tensors):
            warm[number % len(some)].copy_(source)

    return copy


def memcpy_s(tensors: list[Tensor]) -> float:
    """A plain copy's."""
    copy = plain_copy(tensors)
    return statistics.median(timed(copy) for _ in range(5))


def memcpy_by_two_s(tensors: list[Tensor]) -> float:
    """As ``memcpy_s``, by two threads."""
    with ThreadPoolExecutor(2) as threads:
        return max(threads.map(memcpy_s, (tensors[::2], tensors[1::2])))


def first_touch_s(size_bytes: int) -> float:
    """Of memory on huge pages by one thread; for a moment that memory is at hand for whoever comes next."""
    with mmap.mmap(-1, max(1, size_bytes)) as memory:
        memory.madvise(mmap.MADV_HUGEPAGE)
        return timed(partial(np.frombuffer(memory, dtype=np.uint8).fill, 0))


def computing(seconds: float) -> Callable[[], None]:
    """Matrix products for about so long; the number is fixed beforehand."""
    a = torch.randn(512, 512)
    once = statistics.median(timed(lambda: [a @ a for _ in range(10)]) for _ in range(5)) / 10
    count = max(1, round(seconds / once))

    def compute() -> None:
        for _ in range(count):
            a @ a

    return compute


def free_bytes() -> int:
    """Of memory that shared memory may take, too."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    available = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    return min(available, shutil.disk_usage(SHM).free)


def phase(*options: str, environment: Mapping[str, str] | None = None) -> Any:
    """What ``benchmarks.snapshot`` prints last when it is started so, which is JSON: a process of its own,
    whose memory is free when it has ended.

    :raises subprocess.CalledProcessError: it failed.
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
    """Should memory end after all, this process is the one to go."""
    Path("/proc/self/oom_score_adj").write_text("1000")
