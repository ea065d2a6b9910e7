"""Which samples a step trains on: a pure function of (seed, step), so it survives any reconfiguration.

Epoch after epoch, each a permutation of the data set, form one endless stream of indices; step t (from 1)
takes positions ``[(t - 1) * B, t * B)`` of it. So every sample is used exactly once an epoch, nothing is
dropped where an epoch ends in the middle of a batch, and such a batch holds the rest of one epoch and the
beginning of the next.

A permutation is a Feistel network over the next power of four, walked until it falls into the data set
(Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002). It needs no memory and no start-up, so
a trainer that joins at step 10^6 of a data set of 10^9 samples finds its indices at once.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from runtime.layers.randomness import stream_seed

_Words = npt.NDArray[np.uint64]
_ROUNDS = 6
_SAMPLING = -1
"""Takes the place of a step in the key, so that indices share no stream with any layer."""


class Sampler:
    """:param dataset_length: samples of the data set, at least 1."""

    def __init__(self, dataset_length: int, global_batch: int, seed: int) -> None:
        if dataset_length < 1 or global_batch < 1:
            raise ValueError(f"{dataset_length} samples for a global batch of {global_batch}")
        self._length = dataset_length
        self._global_batch = global_batch
        self._seed = seed
        half_bits = max(1, ((dataset_length - 1).bit_length() + 1) // 2)
        self._shift = np.uint64(half_bits)
        self._half_mask = np.uint64((1 << half_bits) - 1)

    def indices(self, step: int) -> list[int]:
        """Data set indices of step ``step`` (the first step is 1), row by row of the global batch."""
        if step < 1:
            raise ValueError(f"steps are counted from 1, not {step}")
        position = (step - 1) * self._global_batch
        missing = self._global_batch
        indices: list[int] = []
        while missing:
            epoch, first = divmod(position, self._length)
            count = min(missing, self._length - first)
            indices += self._permuted(epoch, first, count)
            position += count
            missing -= count
        return indices

    def load(self, dataset: Any, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        """The samples at ``indices`` as (inputs, targets), each with the rows in dim 0."""
        samples = [dataset[index] for index in indices]
        return torch.stack([s[0] for s in samples]), torch.stack([s[1] for s in samples])

    def _permuted(self, epoch: int, first: int, count: int) -> list[int]:
        """Elements ``[first, first + count)`` of the epoch's permutation."""
        keys = [np.uint64(stream_seed(self._seed, _SAMPLING, epoch, r)) for r in range(_ROUNDS)]
        words = np.arange(first, first + count, dtype=np.uint64)
        outside = np.ones(count, dtype=bool)
        while outside.any():
            words[outside] = self._feistel(words[outside], keys)
            outside = words >= self._length
        return [int(word) for word in words]

    def _feistel(self, words: _Words, keys: list[np.uint64]) -> _Words:
        left, right = words >> self._shift, words & self._half_mask
        for key in keys:
            left, right = right, left ^ (_mix(right + key) & self._half_mask)
        return (left << self._shift) | right


def _mix(words: _Words) -> _Words:
    """The output function of SplitMix64 (Steele, Lea, Flood 2014): every input bit moves every output bit."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))
