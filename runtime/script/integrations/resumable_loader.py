"""A data loader that can continue in the middle of an epoch, with the samples that an undisturbed run takes.

The order of an epoch's samples follows from the states of random generators when the epoch begins. They
are saved; to continue, they are set again, the batches that were used are skipped, and then the random
states of the snapshot are set.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, Sampler

from runtime.script.random_states import random_states, set_random_states

EpochStart = dict[str, Any]
"""The states of all generators at the beginning of an epoch (``global`` and ``own``), and whether it began with workers
of the epoch before (``workers_stay``, for ``persistent_workers``): a loader draws a number for new ones.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumePoint:
    """The point of an epoch from which a loader continues.

    :param start: states at the epoch's beginning.
    :param batches: number of batches to skip.
    :param random: the global random states before the next batch is read.
    """

    start: EpochStart
    batches: int
    random: dict[str, Any]


def _continued(batches: Iterable[Any], point: ResumePoint, *, skipped: int) -> Iterator[Any]:
    """Yield the batches after the first ``skipped`` ones, with the random states of the point."""
    iterator = iter(batches)
    for _ in range(skipped):
        next(iterator, None)
    set_random_states(point.random)
    yield from iterator


def _set_start(start: EpochStart, generators: list[torch.Generator]) -> None:
    set_random_states(start["global"])
    for generator, state in zip(generators, start["own"], strict=False):
        generator.set_state(state)


class Wrapper:
    """An object with the length and the attributes of the one that it wraps."""

    wrapped: Any

    def __len__(self) -> int:
        return len(self.wrapped)

    def __getattr__(self, name: str) -> Any:
        if name == "wrapped":  # While it is unpickled in a worker.
            raise AttributeError(name)
        return getattr(self.wrapped, name)


class _SkippingBatches(Wrapper, Sampler[Any]):
    """A batch sampler that skips the first batches of one epoch without reading their samples."""

    def __init__(self, batches: Any) -> None:
        self.wrapped = batches
        self.resume_point: ResumePoint | None = None
        self.generators: list[torch.Generator] = []
        """Those of the loader, for the point."""

    def __iter__(self) -> Iterator[Any]:
        # A loader with workers makes two iterators and reads one of them: only that one takes the point.
        point, self.resume_point = self.resume_point, None
        if point is not None and point.start.get("workers_stay"):
            _set_start(point.start, self.generators)  # The loader has drawn a number for new workers.
        if point is None or not point.batches:
            yield from self.wrapped
        else:
            yield from _continued(self.wrapped, point, skipped=point.batches)


class ResumableLoader(Wrapper):
    """A data loader of torch or accelerate with its position.

    Map-style data is skipped without being read. A loader with a state of its own (``StatefulDataLoader``)
    must have been restored, or is given the state here. Other iterable data is read up to the position.

    :param loader: the loader. Its batch sampler is replaced by one that can skip batches.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        self.wrapped = loader
        self.start: EpochStart = {}
        """The states at the beginning of the current epoch."""
        self._resume_point: ResumePoint | None = None
        self._state: dict[str, Any] | None = None
        base = getattr(loader, "base_dataloader", loader)
        self.has_state = hasattr(base, "state_dict")
        self._batches: _SkippingBatches | None = None
        by_index = base.batch_sampler is not None and not isinstance(base.dataset, IterableDataset)
        if by_index and not self.has_state:
            self._batches = _SkippingBatches(base.batch_sampler)
            # A DataLoader refuses to change its batch sampler, which workers that stay have read already. This one
            # begins again.
            object.__setattr__(base, "batch_sampler", self._batches)
            base._iterator = None

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Keep a state for the loader, which has one: it belongs to the points at which it is resumed."""
        self._state = state

    def resume(self, point: ResumePoint) -> None:
        """Let the next epoch begin at the point."""
        self._resume_point = point

    def generator_states(self) -> EpochStart:
        """Return what the next epoch begins with."""
        base = getattr(self.wrapped, "base_dataloader", self.wrapped)
        return {
            "global": random_states(),
            "own": [g.get_state() for g in self._generators()],
            "workers_stay": base.persistent_workers and base._iterator is not None,
        }

    def __iter__(self) -> Iterator[Any]:
        point, self._resume_point = self._resume_point, None
        if point is None:
            self.start = self.generator_states()
            return iter(self.wrapped)
        generators = self._generators()
        _set_start(point.start, generators)
        self.start = point.start
        if self._batches is not None:
            self._batches.resume_point, self._batches.generators = point, generators
            return iter(self.wrapped)
        if not point.batches:
            return iter(self.wrapped)
        if self._state is not None:
            self.wrapped.load_state_dict(self._state)
        return _continued(self.wrapped, point, skipped=0 if self.has_state else point.batches)

    def _generators(self) -> list[torch.Generator]:
        """Return the generators of the loader and of all samplers within it, each once."""
        found: list[torch.Generator] = []
        waiting: list[Any] = [self.wrapped]
        known = set[int]()
        while waiting:
            part = waiting.pop()
            if part is None or id(part) in known:
                continue
            known.add(id(part))
            for name in ("generator", "synchronized_generator"):
                generator = getattr(part, name, None)
                if isinstance(generator, torch.Generator) and not any(generator is g for g in found):
                    found.append(generator)
            waiting += [getattr(part, name, None) for name in ("base_dataloader", "sampler", "batch_sampler")]
        return found
