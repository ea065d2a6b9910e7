"""Kills at random moments of a process that takes one snapshot after another (``benchmarks.snapshot``)."""

import os
import random
import shutil
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from benchmarks.script_state import SHM
from ftd import Snapshotter

KILLS = 20
WIDTH = 4096


def kills() -> int:
    """After how many of ``KILLS`` the last completed snapshot is there, and right."""
    place, draw = Path(tempfile.mkdtemp(dir=SHM)), random.Random(4)
    try:
        return sum(_survived(place, draw) for _ in range(KILLS))
    finally:
        shutil.rmtree(place, ignore_errors=True)


def _survived(place: Path, draw: random.Random) -> bool:
    reading, writing = os.pipe()
    child = _forked(lambda: _victim(place, writing))
    os.close(writing)
    told = b""
    while not any(int(line) for line in told.split(b"\n")[:-1]):
        more = os.read(reading, 4096)
        if not more:
            raise RuntimeError("the victim ended before it was killed")
        told += more
    time.sleep(draw.uniform(0.01, 0.2))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    while more := os.read(reading, 65536):
        told += more
    os.close(reading)
    newest = max(int(line) for line in told.split(b"\n")[:-1] if line)
    checker = _forked(lambda: _right(place, newest))
    return os.waitpid(checker, 0)[1] == 0


def _forked(work: Callable[[], bool]) -> int:
    """Fork, as importing torch takes seconds; the child's id. It ends with 0 when ``work`` says True."""
    child = os.fork()
    if child:
        return child
    try:
        os._exit(0 if work() else 1)
    finally:
        os._exit(2)


def _open(place: Path) -> tuple[nn.Parameter, Snapshotter]:
    matrix = nn.Parameter(torch.zeros(WIDTH, WIDTH))
    optimizer = torch.optim.SGD([matrix], lr=1.0)
    return matrix, Snapshotter(
        "killed", directory=place, model=nn.ParameterList([matrix]), optimizer=optimizer
    )


def _victim(place: Path, told: int) -> bool:
    matrix, snapshots = _open(place)
    step = snapshots.restore() or 0
    while True:
        step += 1
        with snapshots.changing(), torch.no_grad():
            matrix.fill_(step)
        snapshots.snapshot(step)
        os.write(told, f"{snapshots.counts.completed_step or 0}\n".encode())


def _right(place: Path, at_least: int) -> bool:
    matrix, snapshots = _open(place)
    step = snapshots.restore()
    fine = step is not None and step >= at_least and bool((matrix == step).all())
    snapshots.close()
    return fine
