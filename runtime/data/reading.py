"""Reading of one microbatch: its samples one by one, then the collate function, under seeded generators.

A microbatch is a pure function of (seed, step, microbatch). So every stage and every device of a job gets
the same masks and augmentations, also when a step is repeated elsewhere. For this, the generators of torch
(CPU), random and numpy are seeded by (seed, epoch, index) before a sample is read, and by (seed, step,
microbatch) before the samples are collated. The caller's own generators are restored afterwards. Each
process reads a part of its first microbatch twice, to detect generators that are not seeded.
"""

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.random import mtrand
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from runtime.data.batches import (
    Batch,
    cast_floating,
    check_batch,
    default_collate,
    describe_type,
    first_difference,
)
from runtime.data.held_out import HeldOutSampler
from runtime.data.sampling import Draw, seed_host, stream_seed
from runtime.device import CPU
from runtime.errors import TrainingError
from runtime.tracebacks import describe_error, user_traceback

_SAMPLE, _COLLATE = -2, -3
"""Values in place of a step in the key, so that data shares no random stream with the sampler or a layer."""

FindProblem = Callable[[Batch], tuple[int, str] | None]


def check_dataset(dataset: Any, name: str) -> None:
    """Check that samples can be read by their index.

    :param name: name of the data set, for messages.
    :raises TrainingError: the data set is not map-style, or it is empty.
    """
    if isinstance(dataset, DataLoader):
        raise TrainingError(
            f"{name} is a DataLoader; pass the loader's dataset (and its collate_fn as "
            "Training.collate), as ftd forms the batches"
        )
    if isinstance(dataset, Mapping):
        names = ", ".join(map(repr, list(dataset)[:5]))
        raise TrainingError(
            f"{name} is {describe_type(dataset)} with {names}; pass one of them, "
            f"such as dataset[{next(iter(dataset), 'train')!r}]"
        )
    getitem = getattr(type(dataset), "__getitem__", None)
    missing = [] if hasattr(type(dataset), "__len__") else ["__len__"]
    # torch's base class has a __getitem__ that only raises, which IterableDataset inherits.
    missing += ["__getitem__"] if getitem in (None, Dataset.__getitem__) else []
    if missing:
        raise TrainingError(
            f"{name} is {describe_type(dataset)}, which has no {' and no '.join(missing)}. Which "
            "samples a step uses follows from (seed, step), and after a failure any sample must be found "
            "again by its index, which is impossible in a stream. Pass a map-style data set (len() "
            "and [i]): with Hugging Face datasets load without streaming=True, else write the samples to "
            "files that can be addressed by index, such as Parquet, Arrow or token files"
        )
    if _length_of(dataset, name) < 1:
        raise TrainingError(f"{name} is empty")


def _length_of(dataset: Any, name: str) -> int:
    try:
        return len(dataset)
    except Exception as error:
        raise TrainingError(
            f"len() of {name} raised {describe_error(error)}\n{user_traceback(error)}"
        ) from error


def read_sample(dataset: Any, index: int, name: str, place: str) -> Any:
    """Return a sample.

    :param name: name of the data set, for messages.
    :param place: what the sample is read for, for messages.
    :raises TrainingError: the data set raised.
    """
    try:
        return dataset[index]
    except (Exception, SystemExit) as error:
        raise TrainingError(
            f"{name} raised for index {index} ({place}): {describe_error(error)}; make dataset[{index}] work, or "
            f"leave this sample out of the data set\n{user_traceback(error)}"
        ) from error


def collate_samples(collate: Callable[[list[Any]], Any] | None, samples: list[Any], where: str) -> Batch:
    """Return the batch of the samples.

    :param collate: list of samples -> batch; ``None`` for :func:`default_collate`, which stacks tensors.
    :param where: names the samples in errors.
    :raises TrainingError: the collate function raised, or returned something unusable.
    """
    try:
        return check_batch((collate or default_collate)(samples))
    except TrainingError as error:
        raise TrainingError(f"{where}: {error}") from error
    except (Exception, SystemExit) as error:
        raise TrainingError(
            f"the collate function raised for {where}: {describe_error(error)}\n{user_traceback(error)}"
        ) from error


class SampleOrder(Protocol):
    """The samples that make up the rows of each global batch."""

    @property
    def dataset_length(self) -> int:
        """Number of samples of the data set."""

    def draws(self, step: int, first_row: int, rows: int) -> list[Draw]:
        """Return rows ``[first_row, first_row + rows)`` of the global batch of ``step``."""


class MicrobatchKey(NamedTuple):
    """The key of one microbatch. Keys are ordered as a job uses them."""

    step: int
    """Step that it belongs to, or after which it is evaluated; the first is 1."""
    batch: int
    """0 for the step's own global batch, n for the n-th held-out one."""
    microbatch: int
    """Number within the global batch, from 0."""

    @property
    def random_step(self) -> int:
        """Step that identifies the global batch where samples and random numbers depend on the step."""
        return HeldOutSampler.pseudo_step(self.batch - 1) if self.batch else self.step

    @property
    def batch_name(self) -> str:
        """Name of the global batch, for messages."""
        return f"held-out batch {self.batch - 1}" if self.batch else f"step {self.step}"

    def describe(self) -> str:
        """Return a name of the microbatch, for messages."""
        return f"microbatch {self.microbatch} of {self.batch_name}"


class BatchReader:
    """A reader of the microbatches of one data set.

    :param collate: list of samples -> batch; ``None`` for :func:`default_collate`, which stacks tensors.
    :param dtype: type of the batch's floating-point tensors; with ``None`` they keep theirs.
    :param find_problem: returns the row of a batch that the model cannot take, and why, if there is one.
    :param name: name of the data set, for messages.
    :raises TrainingError: the data set is not map-style, or it is empty.
    """

    def __init__(
        self,
        dataset: Any,
        collate: Callable[[list[Any]], Any] | None,
        sampler: SampleOrder,
        *,
        microbatch_rows: int,
        seed: int,
        dtype: torch.dtype | None = None,
        find_problem: FindProblem | None = None,
        name: str = "Training.dataset",
    ) -> None:
        check_dataset(dataset, name)
        self._name = name
        self._find_problem = find_problem
        self._dataset = dataset
        self._collate = collate
        self._sampler = sampler
        self._rows = microbatch_rows
        self._seed = seed
        self._dtype = dtype
        self._found_repeatable = False

    def read(self, key: MicrobatchKey, check: Callable[[], None] = lambda: None) -> Batch:
        """Return a microbatch.

        :param check: called before every sample; an exception from it ends the read.
        :raises TrainingError: the data set or the collate function raised, or returned something unusable.
        """
        self._check_length()
        draws = self._sampler.draws(key.random_step, key.microbatch * self._rows, self._rows)
        with preserve_generators():
            samples = self._samples(draws, key, check)
            if self._found_repeatable:
                return self._collated(samples, draws, key)
            try:
                again = [_copied(sample) for sample in samples]
                again[:1] = self._samples(draws[:1], key, check)
            except TypeError:
                again = self._samples(draws, key, check)
            batch = self._collated(samples, draws, key)
            _check_equal(batch, self._collated(again, draws, key))
            self._found_repeatable = True
            return batch

    def _check_length(self) -> None:
        length = _length_of(self._dataset, self._name)
        if length != self._sampler.dataset_length:
            raise TrainingError(
                f"{self._name} has {length} samples now and had {self._sampler.dataset_length} when the job "
                "began; which samples a step uses follows from that number, so it must not change during a "
                "job: take a snapshot of the data, or fix the length in __len__"
            )

    def _samples(self, draws: list[Draw], key: MicrobatchKey, check: Callable[[], None]) -> list[Any]:
        samples = []
        for row, draw in enumerate(draws, key.microbatch * self._rows):
            check()
            samples.append(self._sample(draw, key, row))
        return samples

    def _sample(self, draw: Draw, key: MicrobatchKey, row: int) -> Any:
        _seed_generators(stream_seed(self._seed, _SAMPLE, draw.epoch, draw.index))
        place = f"row {row} of {key.batch_name}" + (f", epoch {draw.epoch}" if draw.epoch >= 0 else "")
        return read_sample(self._dataset, draw.index, self._name, place)

    def _collated(self, samples: list[Any], draws: list[Draw], key: MicrobatchKey) -> Batch:
        _seed_generators(stream_seed(self._seed, _COLLATE, key.random_step, key.microbatch))
        where = f"{key.describe()} (samples {', '.join(str(d.index) for d in draws)})"
        batch = collate_samples(self._collate, samples, where)
        problem = None if self._find_problem is None else self._find_problem(batch)
        if problem is not None:
            row, what = problem
            sample = f"sample {draws[row].index}" if row < len(draws) else f"row {row}"
            raise TrainingError(f"{where}: {sample} of {self._name} {what}")
        return batch if self._dtype is None else cast_floating(batch, self._dtype)


class BatchReaders:
    """The readers of all microbatches of one job."""

    def __init__(self, training: BatchReader, held_out: BatchReader | None) -> None:
        self._training = training
        self._held_out = held_out

    def read(self, key: MicrobatchKey, check: Callable[[], None] = lambda: None) -> Batch:
        """Return a microbatch: see ``BatchReader.read``."""
        reader = self._held_out if key.batch else self._training
        assert reader is not None, "there is a held-out data set"
        return reader.read(key, check)


def _copied(sample: Any) -> Any:
    """Return a copy, since collate functions may change samples in place.

    ``deepcopy`` of a tensor's view would copy the whole tensor.

    :raises TypeError: it contains more than numbers, strings, arrays and tensors in dicts, tuples and
        lists.
    """
    match sample:
        case Tensor():
            return sample.clone()
        case np.ndarray():
            return sample.copy()
        case str() | bytes() | bool() | int() | float() | np.generic() | None:
            return sample
    if type(sample) is dict:
        return {key: _copied(item) for key, item in sample.items()}
    if type(sample) in (tuple, list):
        return type(sample)(_copied(item) for item in sample)
    raise TypeError(f"{type(sample).__name__} cannot be copied")


def _check_equal(batch: Batch, again: Batch) -> None:
    """Compare two readings of one microbatch.

    :raises TrainingError: the readings differ.
    """
    path = first_difference(batch, again)
    if path is not None:
        raise TrainingError(
            f"reading one microbatch twice gave two results, which differ in batch{path}: the data set or "
            "the collate function draws random numbers from a generator of its own, or has other state. "
            "Every stage of a pipeline, and every repetition of a step after a failure, must get the same "
            "batch. Draw from the global generators of torch, random or numpy.random, which are seeded for "
            "each sample and each microbatch (give a collator no seed of its own), or seed your generator by "
            "the index"
        )


def _seed_generators(seed: int) -> None:
    torch.default_generator.manual_seed(seed)
    seed_host(seed)


_SPARE_GENERATORS: list[np.random.MT19937] = []
"""Generators for numpy to draw from while its own is left alone: copying its state takes 0.3 ms, longer than to read a
small microbatch.
"""


@contextmanager
def preserve_generators(device: torch.device = CPU) -> Iterator[None]:
    """Return a context after which this process's generators have their earlier states: those of torch on the
    host and on ``device``, of random and of numpy. (numpy draws normal values in pairs; the second value of a
    pair that was begun is dropped.) The generators belong to the process: contexts of several threads that overlap
    end with one of these states, which nobody else draws from.
    """
    own = random.getstate(), mtrand.get_bit_generator()
    spare = _SPARE_GENERATORS.pop() if _SPARE_GENERATORS else np.random.MT19937(0)
    mtrand.set_bit_generator(spare)
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        try:
            yield
        finally:
            random.setstate(own[0])
            # If another context that has not ended found the spare generator in use, it will bring it back.
            if mtrand.get_bit_generator() is spare:
                _SPARE_GENERATORS.append(spare)
            mtrand.set_bit_generator(own[1])
