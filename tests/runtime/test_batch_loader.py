"""Loading microbatches, in the trainer and in worker processes, with equal results."""

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from runtime.data.batches import leaves_of
from runtime.data.loader import BatchLoader
from runtime.data.sampling import Sampler

ROWS = 4
GLOBAL_BATCH = 12
LENGTH = 40


class Noisy:
    """Samples with random numbers of all three generators."""

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {
            "index": index,
            "torch": torch.rand(3, dtype=torch.float64),
            "random": random.random(),
            "numpy": np.random.rand(2, 2),
            "ids": [index, index + 1],
            "name": f"sample {index}",
            "nothing": None,
        }


@contextmanager
def loader(dataset: Any, *, workers: int = 0, collate: Any = None, **fields: Any) -> Iterator[BatchLoader]:
    sampler = Sampler(len(dataset), GLOBAL_BATCH, 7)
    made = BatchLoader(dataset, collate, sampler, microbatch_rows=ROWS, seed=7, workers=workers, **fields)
    try:
        yield made
    finally:
        made.close()


def keys_of(*steps: int) -> list[tuple[int, int]]:
    return [(step, microbatch) for step in steps for microbatch in range(GLOBAL_BATCH // ROWS)]


def same(one: Any, other: Any) -> bool:
    pairs = zip(leaves_of(one), leaves_of(other), strict=True)
    return all(torch.equal(a, b) if isinstance(a, Tensor) else a == b for a, b in pairs)


def test_workers_give_the_batches_of_the_trainer_itself() -> None:
    keys = keys_of(1, 2, 3, 4)
    with loader(Noisy()) as alone, loader(Noisy(), workers=2) as shared:
        shared.plan(keys)
        batches = [shared.load(*key) for key in keys]
        assert all(same(batch, alone.load(*key)) for key, batch in zip(keys, batches, strict=True))
        assert same(shared.load(2, 1), batches[4])  # Without having been announced.
    indices = [index for batch in batches for index in batch["index"].tolist()]
    assert indices == [
        index for step in range(1, 5) for index in Sampler(LENGTH, GLOBAL_BATCH, 7).indices(step)
    ]
    assert batches[0]["ids"].shape == (ROWS, 2) and batches[0]["nothing"] is None
    assert batches[0]["name"] == [f"sample {i}" for i in indices[:ROWS]]


def test_random_numbers_follow_from_the_sample_and_the_epoch() -> None:
    """A sample is drawn otherwise in the next epoch, and its trainer's generators stay as they were."""

    def collate(samples: list[dict[str, Any]]) -> dict[str, Tensor]:
        return {
            "index": torch.tensor([sample["index"] for sample in samples]),
            "drawn": torch.stack([sample["torch"] for sample in samples]),
            "mask": torch.rand(ROWS),
        }

    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    with loader(Noisy(), collate=collate) as alone:
        batches = [alone.load(*key) for key in keys_of(*range(1, 21))]
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1] and np.random.get_state()[1].tolist() == states[2]
    drawn: dict[int, set[tuple[float, ...]]] = {}
    for batch in batches:
        for index, numbers in zip(batch["index"].tolist(), batch["drawn"].tolist(), strict=True):
            drawn.setdefault(index, set()).add(tuple(numbers))
    epochs = 20 * GLOBAL_BATCH // LENGTH
    assert len(drawn) == LENGTH and {len(each) for each in drawn.values()} == {epochs}
    assert len({tuple(batch["mask"].tolist()) for batch in batches}) == len(batches)


def test_floating_point_numbers_get_the_type_of_the_job() -> None:
    with loader(Noisy(), dtype=torch.float32, workers=1) as shared:
        batch = shared.load(1, 0)
    assert {batch[name].dtype for name in ("torch", "random", "numpy")} == {torch.float32}
    assert {batch[name].dtype for name in ("index", "ids")} == {torch.int64}


class Slow(Noisy):
    def __getitem__(self, index: int) -> dict[str, Any]:
        time.sleep(0.5)
        return super().__getitem__(index)


def test_waiting_for_a_worker_can_be_interrupted() -> None:
    class Stop(Exception):
        pass

    calls: list[float] = []

    def check() -> None:
        calls.append(time.monotonic())
        if len(calls) > 5:
            raise Stop

    with loader(Slow(), workers=1) as shared:
        started = time.monotonic()
        with pytest.raises(Stop):
            shared.load(1, 0, check)
        assert time.monotonic() - started < 0.4
