"""Snapshots of a script's state, timed (``benchmarks.snapshot``): calls, iterations, restoring, decoding."""

import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import torch

from benchmarks.script_state import (
    computing,
    first_touch_s,
    memcpy_by_two_s,
    memcpy_s,
    plain_copy,
    state_of,
    timed,
)
from ftd import Snapshotter
from runtime.script.filling import Filling, spans_of
from runtime.script.saved import NOTHING
from runtime.script.tensor_image import Image
from storage.codes import make_code
from storage.shards import ShardLayout, fetch_from, make_shard, restore

NAME = "bench"
STEP_PER_COPY = 3.5
HURRIED = 4
LOADS = 5


class Training:
    """A loop that takes snapshots, and how long what takes."""

    def __init__(
        self,
        snapshots: Snapshotter,
        optimizer: torch.optim.Optimizer,
        memcpy: float,
        beside: Callable[[], object],
    ) -> None:
        """:param beside: copies as many bytes as a snapshot has."""
        self._snapshots, self._optimizer, self._beside = snapshots, optimizer, beside
        self._compute = computing(STEP_PER_COPY * memcpy)
        self._step = 0

    def _iteration(self, *, taking: bool = False, beside: Callable[[], object] = lambda: None) -> float:
        self._step += 1
        began = time.perf_counter()
        thread = threading.Thread(target=beside)
        thread.start()
        self._compute()
        self._optimizer.step()
        if taking:
            self._snapshots.snapshot(self._step)
        thread.join()
        return time.perf_counter() - began

    def calls(self, rounds: int) -> dict[str, list[float]]:
        """With a forward pass until the next update."""
        calls, behind = [], []
        for _ in range(rounds):
            self._step += 1
            calls.append(timed(partial(self._snapshots.snapshot, self._step)))
            self._compute()
            behind.append(timed(self._optimizer.step))
        return {"call_s": calls, "step_behind_s": behind}

    def hurried(self) -> list[float]:
        """With an update at once."""

        def hurry() -> None:
            self._snapshots.snapshot(self._step)
            self._optimizer.step()

        seconds = []
        for _ in range(HURRIED):
            self._snapshots.wait()
            self._step += 1
            seconds.append(timed(hurry))
        self._snapshots.wait()
        return seconds

    def rounds(self, count: int) -> list[tuple[float, float, float]]:
        """Iterations without and with a snapshot in each, and beside a plain copy in each."""
        rounds = []
        for _ in range(count):
            without = [self._iteration() for _ in range(2)]
            taking = [self._iteration(taking=True) for _ in range(3)][1:]
            self._compute()
            self._snapshots.wait()
            copying = [self._iteration(beside=self._beside) for _ in range(2)]
            rounds.append((mean(without), mean(taking), mean(copying)))
        return rounds


def measure_own(gib: float, place: Path, rounds: int) -> dict[str, Any]:
    """All but restoring in new processes; a snapshot stays in ``place``, for these."""
    torch.set_num_threads(1)
    model, optimizer, tensors = state_of(gib)
    memcpy, size = memcpy_s(tensors), sum(t.nbytes for t in tensors)
    found: dict[str, Any] = {"memcpy_s": memcpy, "memcpy_by_two_s": memcpy_by_two_s(tensors)}

    def start() -> Snapshotter:
        return Snapshotter(NAME, directory=place, model=model, optimizer=optimizer)

    began = time.perf_counter()
    snapshots = start()
    found["start_s"] = time.perf_counter() - began
    snapshots.remove()
    found["touch_s"] = first_touch_s(2 * size)
    began = time.perf_counter()
    snapshots = start()
    found["start_touched_s"] = time.perf_counter() - began
    snapshots.restore()
    training = Training(snapshots, optimizer, memcpy, plain_copy(tensors))
    found |= training.calls(rounds)
    found["hurried_s"] = training.hurried()
    found["rounds_s"] = training.rounds(rounds)
    found["completed"] = snapshots.counts.completed
    found["load_s"] = [timed(snapshots.restore) for _ in range(LOADS)]
    snapshots.close()
    return found


def restored_anew(gib: float, place: Path, *, touch: bool) -> list[float]:
    """``restore()`` in a process whose optimizer did not step yet, mapping and all; and again, four times."""
    torch.set_num_threads(1)
    model, optimizer, tensors = state_of(gib)
    size = sum(t.nbytes for t in tensors)
    del tensors
    optimizer.state.clear()
    snapshots = Snapshotter(NAME, directory=place, model=model, optimizer=optimizer)
    if touch:
        first_touch_s(size)
    seconds = [timed(snapshots.restore) for _ in range(LOADS)]
    snapshots.close()
    return seconds


def measure_decoding(gib: float) -> list[float]:
    """What one of three hosts kept is made again out of the other two's segments and parity (aec)."""
    torch.set_num_threads(1)
    _, _, tensors = state_of(gib)
    size = sum(t.nbytes for t in tensors)
    layout = ShardLayout(code=make_code("aec", 3), bucket_bytes=size)
    bucket = np.ones(size, dtype=np.uint8)
    shards = {owner: np.ones(layout.shard_bytes(owner), dtype=np.uint8) for owner in (1, 2)}
    for owner, shard in shards.items():
        make_shard(layout, owner, bucket, shard)
    fetch = fetch_from(shards)

    image = Image(known={})
    for tensor in tensors:
        image.add(tensor, "a tensor", at_once=False)
    assert image.own_bytes == size

    def load() -> None:
        restore(layout, frozenset({1, 2}), fetch, bucket)
        filling = Filling(entries=image.entries, images={False: bucket, True: NOTHING})
        for number, tensor in enumerate(tensors):
            filling.take(number, tensor, None)
        filling.verify(spans_of(bucket, shared=False))
        filling.finish()

    return [timed(load) for _ in range(3)]
