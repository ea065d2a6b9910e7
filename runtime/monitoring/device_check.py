"""The test of one device that a node's health checks run: whether it computes exactly, and how fast.

The factors of the products are integers that are small enough for every partial sum to be exact in the dtype,
so a sound device gives the exact product in any order of summation. The product is checked with exact integers
on the host, as by Freivalds: (A B) R must equal A (B R) for a random matrix R of few columns, which takes a
hundredth of the time of another product. R has no zeros, so a row with one wrong element is always found, and
one with several is missed with a probability of at most 1 in 512.

On a CPU, speeds are measured in the thread's CPU time, so that other processes of a busy host do not count.
"""

import contextlib
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from runtime.device import device_time_s
from runtime.precision import dtype_name
from statemachine.messages.values import DeviceHealth, PlantedFault

_DEPTH = 256
"""Terms of each element of a product."""
_LARGEST: dict[torch.dtype, int] = {
    torch.float64: 1 << 20,
    torch.float32: 64,
    torch.bfloat16: 1,
    torch.float16: 2,
}
"""Largest absolute value of a factor by dtype: ``_DEPTH`` times its square is exact in the dtype."""
_SEED = 20_261
_REPEATS = 8
"""Measurements of which the best counts: one that was disturbed says nothing about the device."""
_CPU_PAUSE_S = 0.01
"""Pause between two measurements of a CPU, which take less than a millisecond: another process on the core, or
another guest of the host, disturbs all that follow each other at once.
"""
_SLOWED = 8
"""Times that the work is done if a slow device is to be simulated."""


@dataclass(frozen=True, slots=True)
class WorkSize:
    """Amount of work of a test: small enough for a CPU core to take some milliseconds, and large enough to use
    all multiprocessors of an accelerator.
    """

    rows: int
    """Rows and columns of a product."""
    copied_bytes: int
    """Bytes of a copy; 0 on a CPU: everything that runs on its host shares the memory's bandwidth."""
    dtypes: tuple[torch.dtype, ...]


_SIZES = {
    "cpu": WorkSize(256, 0, (torch.float32, torch.float64)),
    "cuda": WorkSize(2048, 256 << 20, (torch.float32, torch.float64, torch.bfloat16, torch.float16)),
}


def check_device(index: int, planted: PlantedFault = "", *, gpu: int = 0) -> DeviceHealth:
    """Test the device that a trainer of this environment would use.

    :param index: number of the device on its node.
    :param planted: fault to simulate; ``hung`` makes this function wait forever.
    :param gpu: number of the GPU among those that this process sees; a trainer sees one.
    """
    while planted == "hung":
        time.sleep(3600.0)
    torch.set_num_threads(1)
    device = torch.device("cuda", gpu) if torch.cuda.is_available() else torch.device("cpu")
    size = _SIZES[device.type]
    wrong = [
        problem
        for dtype in size.dtypes
        if (problem := find_wrong_product(device, dtype, size.rows, wrong=planted == "wrong"))
    ]
    times = _SLOWED if planted == "slow" else 1
    return DeviceHealth(
        device=index,
        kind=device_kind(device),
        wrong="; ".join(wrong),
        compute_gflops=_measure(lambda: _measure_product(device, size.rows, times)),
        memory_gb_s=_measure(lambda: _measure_copy(device, size.copied_bytes, times))
        if size.copied_bytes
        else 0.0,
    )


def _measure(measure: Callable[[], float]) -> float:
    """Return a speed, or 0, which is compared with nothing, if a trainer leaves too little memory for the test."""
    try:
        return round(measure(), 3)
    except torch.OutOfMemoryError:
        return 0.0


def device_kind(device: torch.device) -> str:
    """Return the name of the device's model; only devices of one kind are compared."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(errors="replace").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name" and value.strip():
                return value.strip()
    return platform.machine() or "cpu"


def find_wrong_product(device: torch.device, dtype: torch.dtype, rows: int, *, wrong: bool = False) -> str:
    """Return which element of a product is wrong, and empty text if the whole product is exact.

    :param wrong: change one element of the product, as a wrong device would.
    """
    generator = torch.Generator().manual_seed(_SEED)
    largest = _LARGEST[dtype]

    def draw(*shape: int, low: int, high: int) -> torch.Tensor:
        return torch.randint(low, high + 1, shape, generator=generator)

    left = draw(rows, _DEPTH, low=-largest, high=largest)
    right = draw(_DEPTH, rows, low=-largest, high=largest)
    # Elements of the product are at most 2**48 (float64), so the sums below stay within 64 bits.
    factors = draw(rows, 3, low=1, high=8)
    product = left.to(device, dtype) @ right.to(device, dtype)
    if wrong:
        product[rows // 2, rows // 3] += 1
    computed = product.cpu()
    expected = left @ (right @ factors)
    actual = computed.to(torch.int64) @ factors
    bad = (actual != expected).any(dim=1).nonzero().flatten().tolist()
    name = dtype_name(dtype)
    if not torch.isfinite(computed).all():
        return f"a product of {name} matrices is not finite"
    if not bad:
        return ""
    return f"a product of {name} matrices is wrong in {len(bad)} of {rows} rows, first in row {bad[0]}"


def _measure_product(device: torch.device, rows: int, times: int) -> float:
    """Return the speed of a product of float32 matrices in 10**9 operations a second."""
    left, right = torch.ones(rows, rows, device=device), torch.ones(rows, rows, device=device)
    out = torch.empty_like(left)
    return 2.0 * rows**3 / _best_s(device, times, lambda: torch.mm(left, right, out=out)) / 1e9


def _measure_copy(device: torch.device, size_bytes: int, times: int) -> float:
    """Return the bandwidth of a copy in 10**9 bytes a second, each byte counted once."""
    source = torch.ones(size_bytes // 8, dtype=torch.float64, device=device)
    target = torch.empty_like(source)
    return size_bytes / _best_s(device, times, lambda: target.copy_(source)) / 1e9


def _best_s(device: torch.device, times: int, work: Callable[[], object]) -> float:
    """Return the shortest time that the device takes to do this work so many times, in seconds."""
    is_cpu = device.type == "cpu"
    now_s = time.thread_time if is_cpu else partial(device_time_s, device)
    taken: list[float] = []
    work()  # The first time includes loading kernels and touching memory.
    for _ in range(_REPEATS):
        if is_cpu:
            time.sleep(_CPU_PAUSE_S)
        started = now_s()
        for _ in range(times):
            work()
        taken.append(now_s() - started)
    return max(min(taken), 1e-9)
