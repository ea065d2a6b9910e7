"""The data loader of a loop that the script keeps, with its own training code: plain, DDP or accelerate."""

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import DataLoader

from runtime.script.integrations.resumable_loader import EpochStart, ResumableLoader, ResumePoint, Wrapper
from runtime.script.plain_state import SnapshotError
from runtime.script.random_states import random_states
from runtime.script.ranks import Ranks
from runtime.script.snapshotter import Snapshotter

log = logging.getLogger("ftd.snapshotter")


class ProtectedLoader(Wrapper):
    """A data loader that saves a snapshot after the code for a batch, and continues where a run was killed.

    The script iterates over it once per epoch, and may leave one early. An epoch begins with the step of an optimizer
    for its first batch, or when its second batch is asked for. So an iterator that gave one batch to look at changes
    nothing: the next one begins at the same place. An epoch that was completed before the restart yields no batches.
    After the last epoch the snapshots are removed.

    :param loader: the script's loader, not begun.
    :param every: number of optimizer steps between snapshots; without accelerate, of batches.
    :param epochs: number of times that the script iterates over the loader.
    :param accelerator: accelerate's ``Accelerator``, after ``prepare``; its objects are registered.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        name: str,
        every: int,
        missing: Any,
        *,
        epochs: int | None = None,
        accelerator: Any = None,
        **options: Any,
    ) -> None:
        if isinstance(epochs, bool) or not isinstance(epochs, int) or epochs < 1:
            raise SnapshotError(
                f"protect: epochs must say how often the script runs over the loader, not {epochs!r}"
            )
        self.wrapped = ResumableLoader(loader)
        self._every = every
        self._epochs = epochs
        self._accelerator = accelerator
        # Which steps were done, in which epoch, and how many of its batches by each of so many ranks.
        self._position: dict[str, Any] = {"step": 0, "epoch": 0, "batches": 0, "ranks": 1, "start": {}}
        objects = accelerator_objects(accelerator) if accelerator is not None else {}
        if self.wrapped.has_state:
            objects["loader"] = self.wrapped
        self.snapshots = Snapshotter(name, position=self._position, **objects, **options)
        self._completed_epochs = 0
        self._resume_point: ResumePoint | None = None
        """The point at which iterators begin until one of them continues the epoch."""
        self._current: object | None = None
        """The iterator of the epoch that has begun and is not over."""
        self._open = False
        """Whether that iterator is in use. If not, the script has left the epoch early (``break``)."""
        try:
            restored = self.snapshots.restore(missing=missing)
        except BaseException:
            self.snapshots.close()
            raise
        if restored is not None:
            self._completed_epochs = self._position["epoch"]
            batches = self._batches_of(Ranks.current().count)
            self._position["batches"] = batches
            self._resume_point = ResumePoint(
                start=self._position["start"], batches=batches, random=random_states()
            )
        self._position["ranks"] = Ranks.current().count

    def _batches_of(self, ranks: int) -> int:
        """Return how many batches of each rank the epoch's samples are that were used; another number of ranks has
        other batches.
        """
        used = self._position["batches"] * self._position["ranks"]
        if used % ranks:
            log.warning(
                "the epoch continues with %d ranks after %d batches in all: %d of them are used again",
                ranks,
                used,
                used % ranks,
            )
        return int(used // ranks)

    @property
    def step(self) -> int:
        """Number of optimizer steps that were done, of the run before a restart too."""
        return int(self._position["step"])

    def epochs(self) -> Iterator[int]:
        """Yield the numbers of the epochs that are left, beginning with the one that was interrupted.

        Use it where the script does something after each epoch that it should not repeat after a restart.
        """
        self._completed_epochs = 0
        yield from range(self._position["epoch"], self._epochs)

    def __iter__(self) -> Iterator[Any]:
        if self._completed_epochs:
            if self._completed_epochs == self._position["epoch"] and Ranks.current().rank == 0:
                log.warning(
                    "the loops over the %d epochs that were completed before the restart take no batches, but the code "
                    "after each of them runs again: if it changes what is saved (scheduler.step()), iterate over "
                    "loader.epochs()",
                    self._completed_epochs,
                )
            self._completed_epochs -= 1
            return
        if self._current is not None and not self._open:
            self._leave()
        place, this = self._position, object()
        if hasattr(self.wrapped, "set_epoch"):  # accelerate's
            self.wrapped.set_epoch(place["epoch"])
        if self._resume_point is not None:
            self.wrapped.resume(self._resume_point)
        iterator = iter(self.wrapped)
        start = self.wrapped.start
        try:
            for batch in iterator:
                if self._current is this:
                    yield batch
                else:
                    with self._begin_at_step(this, start):
                        yield batch
                    self._begin(this, start)
                place["batches"] += 1
                self._count_step()
        finally:
            if self._current is this:
                self._open = False
        self._current = self._resume_point = None
        self._next_epoch()
        if place["epoch"] == self._epochs:
            self.snapshots.remove()

    @contextlib.contextmanager
    def _begin_at_step(self, this: object, start: EpochStart) -> Iterator[None]:
        """Return a context in which an optimizer's step begins the epoch of an iterator."""

        def stepped(*_: Any) -> None:
            # With an epoch under way, this batch was only looked at.
            if not self._open:
                self._begin(this, start)

        handle = register_optimizer_step_post_hook(stepped)
        try:
            yield
        finally:
            handle.remove()

    def _begin(self, this: object, start: EpochStart) -> None:
        """Let the epoch that is next begin, or continue, with an iterator.

        :param start: states of the generators at its beginning.
        :raises SnapshotError: all epochs are over.
        """
        if self._current is this:
            return
        if self._current is not None:
            self._next_epoch()
        if self._position["epoch"] >= self._epochs:
            raise SnapshotError(
                f"the script trains more epochs than protect() was given (epochs={self._epochs}), after which its "
                "snapshots are removed: give it the number of epochs that the script trains"
            )
        self._position["start"] = start
        self._current, self._open = this, True
        self._resume_point = None

    def _next_epoch(self) -> None:
        self._position["epoch"] += 1
        self._position["batches"] = 0

    def _leave(self) -> None:
        """End the epoch that the script has left early. The code for its last batch has run, too."""
        self._current = None
        self._next_epoch()
        self._position["start"] = self.wrapped.generator_states()
        # What a loader with a state would save is its place in the epoch that was left.
        self._count_step(snapshot=not self.wrapped.has_state)

    def _count_step(self, *, snapshot: bool = True) -> None:
        """Count the step of a batch whose code has run, and save a snapshot if it is time for one."""
        if self._accelerator is None or self._accelerator.sync_gradients:
            self._position["step"] += 1
            if snapshot and self._position["step"] % self._every == 0:
                self.snapshots.snapshot(self._position["step"])


def accelerator_objects(accelerator: Any) -> dict[str, Any]:
    """Return what an ``Accelerator`` has prepared and what was registered with it, by name.

    :raises SnapshotError: nothing was prepared yet.
    """
    found = {
        "model": accelerator._models,
        "optimizer": accelerator._optimizers,
        "scheduler": accelerator._schedulers,
        "custom": accelerator._custom_objects,
        "scaler": [accelerator.scaler] if accelerator.scaler is not None else [],
    }
    if not found["model"]:
        raise SnapshotError("protect: call it after accelerator.prepare(model, optimizer, …)")
    return {f"{kind}_{number}": part for kind, parts in found.items() for number, part in enumerate(parts)}
