"""Tests of loading microbatches in the trainer and in worker processes, with equal results."""

import contextlib
import itertools
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.random import mtrand
from torch import Tensor

from runtime.data.batches import leaves_of
from runtime.data.loader import BatchLoader
from runtime.data.reading import BatchReader, MicrobatchKey, preserve_generators
from runtime.data.sampling import Sampler, sample_indices
from runtime.errors import TrainingError
from runtime.wire.frames import MAX_FRAME_BYTES
from tests.helpers.waiting import until

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
    reader = BatchReader(dataset, collate, sampler, microbatch_rows=ROWS, seed=7, **fields)
    made = BatchLoader(reader, workers=workers)
    try:
        yield made
    finally:
        made.close()


def keys_of(*steps: int) -> list[tuple[int, int]]:
    return [(step, microbatch) for step in steps for microbatch in range(GLOBAL_BATCH // ROWS)]


def planned(keys: Iterable[tuple[int, int]]) -> Iterator[MicrobatchKey]:
    """Yield the keys of microbatches of training, given as (step, microbatch)."""
    return (MicrobatchKey(step, 0, microbatch) for step, microbatch in keys)


def same(one: Any, other: Any) -> bool:
    pairs = zip(leaves_of(one), leaves_of(other), strict=True)
    return all(torch.equal(a, b) if isinstance(a, Tensor) else a == b for a, b in pairs)


def test_workers_give_the_batches_of_the_trainer_itself() -> None:
    keys = keys_of(1, 2, 3, 4)
    with loader(Noisy()) as alone, loader(Noisy(), workers=2) as shared:
        shared.plan(planned(keys))
        batches = [shared.load(*key) for key in keys]
        assert all(same(batch, alone.load(*key)) for key, batch in zip(keys, batches, strict=True))
        assert same(shared.load(2, 1), batches[4])  # No plan announced it.
    indices = [index for batch in batches for index in batch["index"].tolist()]
    assert indices == [
        index for step in range(1, 5) for index in Sampler(LENGTH, GLOBAL_BATCH, 7).indices(step)
    ]
    assert batches[0]["ids"].shape == (ROWS, 2) and batches[0]["nothing"] is None
    assert batches[0]["name"] == [f"sample {i}" for i in indices[:ROWS]]


def test_generators_are_preserved_within_each_other() -> None:
    def drawn() -> tuple[float, float, float]:
        return torch.rand(1).item(), random.random(), float(np.random.rand())

    def seed() -> None:
        torch.manual_seed(3), random.seed(3), np.random.seed(3)

    seed()
    wanted = [drawn() for _ in range(3)]
    seed()
    assert drawn() == wanted[0]
    with preserve_generators():
        seed()
        assert drawn() == wanted[0]
        with preserve_generators():
            seed()
            assert [drawn(), drawn()] == wanted[:2]
        assert drawn() == wanted[1]
    assert [drawn(), drawn()] == wanted[1:]


def test_generators_are_preserved_after_contexts_that_overlapped() -> None:
    own = mtrand.get_bit_generator()
    try:
        one, other = preserve_generators(), preserve_generators()
        one.__enter__(), other.__enter__()
        one.__exit__(None, None, None), other.__exit__(None, None, None)
        test_generators_are_preserved_within_each_other()
    finally:
        mtrand.set_bit_generator(own)


def test_random_numbers_follow_from_the_sample_and_the_epoch() -> None:
    """A sample is drawn differently in the next epoch, and the trainer's generators are unchanged."""

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


# --- plans -----------------------------------------------------------------------------------------


class Logged:
    """A data set that appends every index that is read to a file, from any process, and can be blocked."""

    def __init__(self, directory: Path) -> None:
        self.log = directory / "read"
        self.gate = directory / "gate"
        self.log.touch()

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> Tensor:
        with self.log.open("a") as log:
            log.write(f"{index}\n")
        while self.gate.exists():
            time.sleep(0.005)
        return torch.tensor([index])

    def read(self) -> list[int]:
        return [int(line) for line in self.log.read_text().split()]

    def microbatches_read(self) -> set[tuple[int, int]]:
        """Return the microbatches of the first epoch of which at least one sample was read."""
        indices = set(self.read())
        sampler = Sampler(LENGTH, GLOBAL_BATCH, 7)
        steps = range(1, LENGTH // GLOBAL_BATCH + 1)
        return {
            (step, row // ROWS)
            for step in steps
            for row, index in enumerate(sampler.indices(step))
            if index in indices
        }


def test_workers_read_ahead_in_the_order_of_the_plan_and_no_further(tmp_path: Path) -> None:
    dataset = Logged(tmp_path)
    taken = 0

    def endless() -> Iterator[tuple[int, int]]:
        nonlocal taken
        for step in itertools.count(1):
            for key in keys_of(step):
                taken += 1
                yield key

    with loader(dataset, workers=2) as shared:
        shared.plan(planned(endless()))
        until(lambda: dataset.microbatches_read() == {(1, 0), (1, 1), (1, 2), (2, 0)})
        time.sleep(0.1)
        assert len(dataset.microbatches_read()) == 4 and taken <= 4
        shared.load(1, 0)
        until(lambda: len(dataset.microbatches_read()) == 5)
        assert (2, 1) in dataset.microbatches_read()


def test_a_new_plan_reuses_what_is_needed_and_waits_for_nothing(tmp_path: Path) -> None:
    dataset, sampler = Logged(tmp_path), Sampler(LENGTH, GLOBAL_BATCH, 7)
    with loader(dataset, workers=2) as shared:
        shared.plan(planned(keys_of(1, 2, 3)))
        until(lambda: len(dataset.microbatches_read()) == 4)
        shared.load(1, 0)
        wanted = {*sampler.indices(1), *sampler.indices(2)[: 2 * ROWS]}
        until(lambda: set(dataset.read()) == wanted)
        time.sleep(0.1)
        before = len(dataset.read())
        dataset.gate.touch()
        started = time.monotonic()
        # Microbatch (1, 2) went to another pipeline, and step 1 is repeated.
        shared.plan(planned([(1, 0), (1, 1), (2, 0), (2, 1), (3, 0), (3, 1)]))
        assert time.monotonic() - started < 1
        assert shared.load(2, 0).tolist() and shared.load(2, 1).tolist()
        # Next are read step 1's first microbatch again, and the third step.
        dataset.gate.unlink()
        for key in [(3, 0), (3, 1)]:
            first = key[1] * ROWS
            assert shared.load(*key).flatten().tolist() == sampler.indices(3)[first : first + ROWS]
    assert not set(sampler.indices(2)) & set(dataset.read()[before:])


def test_a_step_that_is_redone_is_read_by_all_workers_though_later_ones_are_ready(tmp_path: Path) -> None:
    dataset = Logged(tmp_path)
    with loader(dataset, workers=2) as shared:
        shared.plan(planned(keys_of(2, 3)))
        until(lambda: len(dataset.microbatches_read()) == 4)
        time.sleep(0.1)
        dataset.gate.touch()
        shared.plan(planned(keys_of(1, 2, 3)))
        until(lambda: len(dataset.microbatches_read() & {(1, 0), (1, 1)}) == 2)
        dataset.gate.unlink()
        loaded = [shared.load(*key) for key in keys_of(1, 2)]
    sampler = Sampler(LENGTH, GLOBAL_BATCH, 7)
    assert torch.cat(loaded).flatten().tolist() == sampler.indices(1) + sampler.indices(2)


def test_a_read_in_progress_that_is_not_needed_is_dropped(tmp_path: Path) -> None:
    dataset = Logged(tmp_path)
    with loader(dataset, workers=2) as shared:
        dataset.gate.touch()
        shared.plan(planned(keys_of(1)))
        until(lambda: len(dataset.microbatches_read()) == 2)
        shared.plan(planned(keys_of(3)))
        shared.plan(planned(keys_of(1)))
        dataset.gate.unlink()
        loaded = [shared.load(*key) for key in keys_of(1)]
    assert torch.cat(loaded).flatten().tolist() == Sampler(LENGTH, GLOBAL_BATCH, 7).indices(1)


def test_every_sample_is_used_exactly_once_an_epoch_whatever_the_pipelines(tmp_path: Path) -> None:
    """The trainers have their own workers, on 2, 1, 4 and 3 pipelines; each change interrupts a step."""
    dataset = Logged(tmp_path)
    microbatches = GLOBAL_BATCH // ROWS
    committed: list[int] = []
    with ExitStack() as stack:
        trainers = [stack.enter_context(loader(dataset, workers=number % 3)) for number in range(3)]
        step = 1
        for pipelines, steps in ((2, 5), (1, 3), (3, 7), (2, 10)):
            mine = {
                trainer: [m for m in range(microbatches) if m % pipelines == number]
                for number, trainer in enumerate(trainers[:pipelines])
            }
            for trainer, its in mine.items():
                trainer.plan(planned((s, m) for s in itertools.count(step) for m in its))
            for _ in range(steps):
                rows = {m: trainer.load(step, m) for trainer, its in mine.items() for m in its}
                committed += torch.cat([rows[m] for m in range(microbatches)]).flatten().tolist()
                step += 1
            for trainer, its in mine.items():
                trainer.load(step, its[0])  # This step does not commit: it is repeated on the next layout.
    epochs = [committed[first : first + LENGTH] for first in range(0, len(committed), LENGTH)]
    assert len(committed) == 25 * GLOBAL_BATCH and len(epochs) > 7
    assert all(sorted(epoch) == list(range(LENGTH)) for epoch in epochs[:-1])
    assert len(set(epochs[-1])) == len(epochs[-1])
    assert committed == [i for s in range(1, 26) for i in sample_indices(LENGTH, GLOBAL_BATCH, 7, s)]
    assert not Counter(committed) - Counter(dataset.read())


# --- bad input ---------------------------------------------------------------------------------------


class Broken(Noisy):
    """A data set in which one index, the second of step 1, cannot be read."""

    bad = Sampler(LENGTH, GLOBAL_BATCH, 7).indices(1)[1]

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index == self.bad:
            raise OSError("shard 3 is corrupt")
        return super().__getitem__(index)


@pytest.mark.parametrize("workers", [0, 2])
def test_an_index_that_raises_is_named_with_the_users_line(workers: int) -> None:
    with loader(Broken(), workers=workers) as shared:
        shared.plan(planned(keys_of(1)))
        with pytest.raises(TrainingError) as caught:
            shared.load(1, 0)
        # The job's state is intact: the other samples can still be read.
        assert shared.load(1, 1)["index"].tolist() == Sampler(LENGTH, GLOBAL_BATCH, 7).indices(1)[4:8]
    text = str(caught.value)
    assert (
        f"Training.dataset raised for index {Broken.bad} (row 1 of step 1, epoch 0): OSError: shard 3 is"
        in text
    )
    assert "(test_batch_loader.py, line " in text and "in __getitem__)" in text
    assert 'raise OSError("shard 3 is corrupt")' in text and "reading.py" not in text


class Wordy(Noisy):
    def __init__(self, text: str) -> None:
        self.text = text

    def __getitem__(self, index: int) -> dict[str, Any]:
        if self.text == "raise":
            raise OSError("\ud800" + "x" * MAX_FRAME_BYTES)
        return {"index": index, "text": self.text}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "x" * (MAX_FRAME_BYTES // ROWS),
            r"microbatch 0 of step 1 has 6\d{7} bytes besides its tensors .*workers = 0",
        ),
        ("\ud800", r"microbatch 0 of step 1 has a text that is no Unicode.*'\\ud800'"),
        ("raise", r"Training.dataset raised for index \d+ .*OSError: \\ud800xxx"),
    ],
    ids=["too large", "no Unicode", "a large error"],
)
def test_what_a_worker_cannot_send_is_named(text: str, message: str) -> None:
    with loader(Wordy(text), workers=1) as shared, pytest.raises(TrainingError, match=message):
        shared.load(1, 0)


class Exiting(Noisy):
    def __getitem__(self, index: int) -> dict[str, Any]:
        sys.exit("the licence server is away")


@pytest.mark.parametrize("workers", [0, 1])
def test_a_data_set_that_exits_is_reported_like_one_that_raises(workers: int) -> None:
    with (
        loader(Exiting(), workers=workers) as shared,
        pytest.raises(TrainingError, match="SystemExit: the lic"),
    ):
        shared.load(1, 0)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    ("collate", "said"),
    [
        (
            lambda samples: samples[0]["missing"],
            r"collate function raised for microbatch 0 of step 1 \(samples \d+, .*"
            r"KeyError: 'missing' \(test_batch_loader.py, line \d+, in <lambda>\)",
        ),
        (
            lambda samples: {1},
            r"microbatch 0 of step 1 \(samples .*\): batch, as the collate function returned it, is a set",
        ),
        (lambda samples: None, r"microbatch 0 of step 1 .* returned None, which contains no tensor"),
    ],
)
def test_a_collate_function_that_fails_is_named_with_its_microbatch(
    workers: int, collate: Any, said: str
) -> None:
    with (
        loader(Noisy(), workers=workers, collate=collate) as shared,
        pytest.raises(TrainingError, match=said),
    ):
        shared.load(1, 0)


@pytest.mark.parametrize("workers", [0, 1])
def test_samples_of_unequal_length_name_the_field_and_the_ways_out(workers: int) -> None:
    dataset = [{"ids": torch.zeros(5 + index % 2)} for index in range(LENGTH)]
    with (
        loader(dataset, workers=workers) as shared,
        pytest.raises(TrainingError, match=r"of step 1 .*sample\['ids'\] has shape .*pad/pack the samples"),
    ):
        shared.load(1, 0)


class OwnGenerator(Noisy):
    def __init__(self) -> None:
        self.generator = np.random.default_rng(0)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"index": index, "noise": self.generator.random()}


@pytest.mark.parametrize("workers", [0, 1])
def test_unseeded_generators_are_detected(workers: int) -> None:
    said = r"differ in batch\['noise'\]: the data set or the collate function draws random numbers"
    with loader(OwnGenerator(), workers=workers) as shared, pytest.raises(TrainingError, match=said):
        shared.load(1, 0)
    generator = torch.Generator().manual_seed(3)

    def collate(samples: list[Any]) -> Tensor:
        samples[0].clear()  # Collators of transformers change samples, too.
        return torch.rand(ROWS, generator=generator)

    with (
        loader(Noisy(), workers=workers, collate=collate) as shared,
        pytest.raises(TrainingError, match="differ"),
    ):
        shared.load(1, 0)


class Growing(Noisy):
    def __init__(self, size: Path) -> None:
        self.size = size
        size.write_text(str(LENGTH))

    def __len__(self) -> int:
        return int(self.size.read_text())


@pytest.mark.parametrize("workers", [0, 1])
def test_a_data_set_that_grows_is_rejected(workers: int, tmp_path: Path) -> None:
    dataset = Growing(tmp_path / "size")
    with loader(dataset, workers=workers) as shared:
        shared.load(1, 0)
        dataset.size.write_text("41")
        with pytest.raises(TrainingError, match=r"41 samples now and had 40 when the job began.*not change"):
            shared.load(2, 0)


# --- workers that are lost ------------------------------------------------------------------------------


class Mortal(Noisy):
    """A data set that kills the reading process as many times as the file has lines."""

    def __init__(self, deaths: Path, how: Callable[[], object]) -> None:
        self.deaths, self.how = deaths, how

    def __getitem__(self, index: int) -> dict[str, Any]:
        left = self.deaths.read_text().splitlines()
        if left:
            self.deaths.write_text("\n".join(left[1:]))
            self.how()
        return super().__getitem__(index)


def kill_myself() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_worker_that_is_killed_is_replaced_and_the_batch_is_read_again(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    deaths = tmp_path / "deaths"
    deaths.write_text("once")
    with loader(Mortal(deaths, kill_myself), workers=1) as shared, loader(Noisy()) as alone:
        assert same(shared.load(1, 0), alone.load(1, 0))
        assert same(shared.load(1, 1), alone.load(1, 1))
    said = capfd.readouterr().err
    assert re.search(
        r"data worker 0 \(process \d+\) was killed by SIGKILL while it read microbatch 0 of step 1", said
    )
    assert "it is replaced" in said


@pytest.mark.parametrize(
    ("how", "said"),
    [
        (kill_myself, "was killed by SIGKILL"),
        (lambda: os.kill(os.getpid(), signal.SIGRTMIN + 1), "was killed by signal 35"),
        (lambda: os._exit(7), "exited with code 7"),
    ],
)
def test_a_batch_that_costs_two_workers_is_an_error(
    how: Callable[[], object], said: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    deaths = tmp_path / "deaths"
    deaths.write_text("twice\nin a row")
    with loader(Mortal(deaths, how), workers=2) as shared, loader(Noisy()) as alone:
        with pytest.raises(
            TrainingError,
            match=rf"data worker \d \(process \d+\) {said} while .*, and so did the worker before",
        ):
            shared.load(1, 0)
        for key in keys_of(1, 2):
            assert same(shared.load(*key), alone.load(*key))
    capfd.readouterr()


def lives(pid: int) -> bool:
    """Return whether a process runs; one that has ended may not have been reaped yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def children_of(pid: int) -> list[int]:
    words = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(word) for word in words if lives(int(word))]


@pytest.fixture
def others() -> set[int]:
    """Return this process's children from earlier tests."""
    return set(children_of(os.getpid()))


def new_children(others: set[int]) -> list[int]:
    return [pid for pid in children_of(os.getpid()) if pid not in others]


def test_a_worker_that_dies_between_batches_is_replaced(
    capfd: pytest.CaptureFixture[str], others: set[int]
) -> None:
    with loader(Noisy(), workers=1) as shared, loader(Noisy()) as alone:
        shared.load(1, 0)
        [server] = new_children(others)
        [worker] = children_of(server)
        os.kill(worker, signal.SIGKILL)
        assert same(shared.load(1, 1), alone.load(1, 1))
        assert children_of(server) != [worker]
    assert "was killed by SIGKILL" in capfd.readouterr().err


def test_without_the_server_a_lost_worker_ends_the_job(others: set[int]) -> None:
    with loader(Noisy(), workers=2) as shared:
        shared.load(1, 0)
        [server] = new_children(others)
        workers = children_of(server)
        os.kill(server, signal.SIGKILL)
        until(lambda: not any(lives(worker) for worker in workers))
        with pytest.raises(
            TrainingError, match=rf"process {server}, from which data workers are forked, has ended"
        ):
            shared.load(1, 1)


def test_closing_ends_everything_at_once_and_twice(tmp_path: Path, others: set[int]) -> None:
    dataset = Logged(tmp_path)
    dataset.gate.touch()
    with loader(dataset, workers=2) as shared:
        shared.plan(planned(keys_of(1)))
        until(lambda: len(dataset.read()) == 2)
        [server] = new_children(others)
        started = time.monotonic()
        shared.close()
        assert time.monotonic() - started < 2
        until(lambda: not lives(server))
    until(lambda: not any(lives(worker) for worker in new_children(others)))
    with pytest.raises(RuntimeError, match="closed"):
        shared.load(1, 0)


def sockets_of(pid: int) -> set[str]:
    """Return the sockets that a process has, except its output."""
    links = set()
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # It was closed meanwhile.
            if int(path.name) > 2:
                links.add(str(path.readlink()))
    return {link for link in links if "socket:" in link}


def test_no_worker_outlives_its_trainer(tmp_path: Path) -> None:
    """A trainer that is killed with SIGKILL leaves no process, and its connections are closed."""
    code = f"""
import socket, sys, time
from runtime.data.loader import BatchLoader
from runtime.data.reading import BatchReader, MicrobatchKey
from runtime.data.sampling import Sampler

peer = socket.create_connection(("127.0.0.1", int(sys.argv[1])))

class Rows:
    def __len__(self): return {LENGTH}
    def __getitem__(self, index): time.sleep(60)

reader = BatchReader(Rows(), None, Sampler({LENGTH}, 4, 1), microbatch_rows=4, seed=1)
shared = BatchLoader(reader, workers=2)
shared.plan(MicrobatchKey(step, 0, 0) for step in (1, 2))
peer.sendall(b"!")
time.sleep(60)
"""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        trainer = subprocess.Popen([sys.executable, "-c", code, str(listener.getsockname()[1])])
        connection, _ = listener.accept()
        assert connection.recv(1) == b"!"
        [server] = children_of(trainer.pid)
        workers = children_of(server)
        assert len(workers) == 2
        # Only the trainer has its connections, so that peers see them closed as soon as it ends.
        pairs = list(itertools.combinations((trainer.pid, server, *workers), 2))
        assert len(sockets_of(trainer.pid)) > 1
        until(lambda: not any(sockets_of(one) & sockets_of(other) for one, other in pairs))
        trainer.kill()
        trainer.wait()
        assert connection.recv(1) == b""
        connection.close()
    until(lambda: not any(lives(pid) for pid in (server, *workers)))
