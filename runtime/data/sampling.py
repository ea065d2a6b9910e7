"""The samples on which a step trains: a pure function of (seed, step), which survives every reconfiguration.

The epochs, each a permutation of the data set, form one endless stream of indices; batch b (from 1) is
positions ``[(b - 1) * B, b * B)`` of it. So every sample is used exactly once per epoch, and nothing is
dropped if an epoch ends in the middle of a batch: such a batch contains the end of one epoch and the
beginning of the next. Step t uses batch t, unless batches are left out because the loss spiked
(``statemachine.messages.values.batch_of``).

A permutation is a Feistel network over the next power of four, applied repeatedly until the result is in
the data set (Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002). It needs neither memory nor
preparation, so a trainer that joins at step 10^6 of a data set of 10^9 samples finds its indices at once.
"""

import random
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

from statemachine.messages.values import batch_of

_Words = npt.NDArray[np.uint64]
_ROUNDS = 6
_CHUNK_ROWS = 256
_SAMPLING = -1
"""Value in place of a step in the key, so that indices share no random stream with a layer."""


@dataclass(frozen=True, slots=True)
class Draw:
    """One row of a step: sample ``index`` of the data set in epoch ``epoch`` (from 0)."""

    epoch: int
    index: int


class Sampler:
    """The order of samples of one job.

    :param dataset_length: number of samples of the data set, at least 1.
    """

    def __init__(self, dataset_length: int, global_batch: int, seed: int) -> None:
        if dataset_length < 1 or global_batch < 1:
            raise ValueError(f"{dataset_length} samples for a global batch of {global_batch}")
        self.dataset_length = dataset_length
        self.global_batch = global_batch
        self._seed = seed
        half_bits = max(1, ((dataset_length - 1).bit_length() + 1) // 2)
        self._shift = np.uint64(half_bits)
        self._half_mask = np.uint64((1 << half_bits) - 1)
        self._chunk = max(1, _CHUNK_ROWS // global_batch)
        self._drawn: tuple[int, list[int], list[int]] = (-1, [], [])
        """The chunk of steps that was asked for last, and the epoch and index of each row of their batches: steps
        follow each other, and drawing two rows takes nearly as long as drawing a hundred.
        """

    def indices(self, step: int) -> list[int]:
        """Return the data set indices of the rows of step ``step``'s global batch; the first step is 1."""
        return [draw.index for draw in self.draws(step, 0, self.global_batch)]

    def draws(self, step: int, first_row: int, rows: int) -> list[Draw]:
        """Return rows ``[first_row, first_row + rows)`` of the global batch of step ``step``."""
        if step < 1:
            raise ValueError(f"steps are counted from 1, not {step}")
        if not 0 <= first_row <= first_row + rows <= self.global_batch:
            raise ValueError(f"rows {first_row} to {first_row + rows} of a batch of {self.global_batch}")
        chunk, step_in_chunk = divmod(step - 1, self._chunk)
        drawn = self._drawn
        if drawn[0] != chunk:
            drawn = self._drawn = chunk, *self._draw(chunk)
        _, epochs, indices = drawn
        first = step_in_chunk * self.global_batch + first_row
        return list(map(Draw, epochs[first : first + rows], indices[first : first + rows]))

    def _draw(self, chunk: int) -> tuple[list[int], list[int]]:
        """Return the epoch and the index of each row of the batches of a chunk of steps."""
        position = chunk * self._chunk * self.global_batch
        end = position + self._chunk * self.global_batch
        epochs: list[int] = []
        indices: list[int] = []
        while position < end:
            epoch, first = divmod(position, self.dataset_length)
            count = min(end - position, self.dataset_length - first)
            epochs += [epoch] * count
            indices += self._permuted(epoch, first, count)
            position += count
        return epochs, indices

    def _permuted(self, epoch: int, first: int, count: int) -> list[int]:
        """Return elements ``[first, first + count)`` of the epoch's permutation."""
        keys = [np.uint64(stream_seed(self._seed, _SAMPLING, epoch, r)) for r in range(_ROUNDS)]
        words = np.arange(first, first + count, dtype=np.uint64)
        outside = np.ones(count, dtype=bool)
        while outside.any():
            words[outside] = self._feistel(words[outside], keys)
            outside = words >= self.dataset_length
        return words.tolist()

    def _feistel(self, words: _Words, keys: list[np.uint64]) -> _Words:
        left, right = words >> self._shift, words & self._half_mask
        for key in keys:
            left, right = right, left ^ (_mix(right + key) & self._half_mask)
        return (left << self._shift) | right


def sample_indices(
    dataset_length: int, global_batch: int, seed: int, step: int, skipped_batches: Sequence[int] = ()
) -> list[int]:
    """Return the data set indices on which a job trains in step ``step``.

    Use it to feed the same samples to a training loop of your own and compare the losses. Row r of the
    global batch is sample ``sample_indices(...)[r]``; microbatch m consists of the rows from ``m *
    microbatch``. The result depends on these arguments alone, not on the layout, failures or resumptions.

    Examples:
        >>> indices = sample_indices(len(dataset), global_batch=256, seed=0, step=1)

    Args:
        dataset_length: ``len(dataset)``.
        global_batch: ``[training] global_batch`` of the job file.
        seed: ``[training] seed`` of the job file.
        step: Number of the step; the first is 1.
        skipped_batches: Batches that the job left out after spikes of its loss, in any order: the field
            ``batch`` of the events ``LossSpiked`` with ``skipped``.

    Returns:
        One index for each row of the global batch.
    """
    batch = batch_of(step, tuple(sorted(skipped_batches)))
    return Sampler(dataset_length, global_batch, seed).indices(batch)


def stream_seed(*key: int) -> int:
    """Return a 63-bit seed of a random stream for a tuple of integers; close keys give unrelated seeds."""
    digest = blake2b(struct.pack(f"<{len(key)}q", *key), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def _mix(words: _Words) -> _Words:
    """Apply SplitMix64's output function (Steele, Lea, Flood 2014): each input bit moves every output bit."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def seed_host(seed: int) -> None:
    """Seed the global generators of ``random`` and numpy. This takes several times as long as those of torch."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
