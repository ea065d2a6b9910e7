"""Which rows of the held-out data set an evaluation takes, and when one is due: pure functions of the job.

An evaluation goes through the held-out set in order, from its first sample, in global batches of as many rows as
training's. The last global batch ends where the set does: its microbatches beyond the end are left out, and the one
that the end falls into has fewer rows. So every sample counts once, and none is counted twice to fill a batch.
"""

from dataclasses import dataclass

from runtime.data.sampling import Draw

_EPOCH = -1
"""Takes the place of an epoch in the keys of random numbers, which training shares with no evaluation."""
_FIRST_STEP = -16
"""Held-out batches take the places of the steps from here downwards in the keys of random numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOutSampler:
    """The evaluations of one job."""

    length: int
    """Samples of the held-out data set."""
    global_batch: int
    microbatch_rows: int
    steps: int
    every_steps: int
    """Evaluate after every so many steps, and after the last one; 0: never."""
    max_batches: int = 0
    """Global batches of one evaluation, at most; 0: all there are."""

    @property
    def batches(self) -> int:
        """Global batches of one evaluation."""
        there = -(-self.length // self.global_batch)
        return min(there, self.max_batches or there)

    @property
    def samples(self) -> int:
        """Rows of one evaluation."""
        return min(self.length, self.batches * self.global_batch)

    @property
    def last_microbatch_rows(self) -> int:
        """Rows of the microbatch that the end of the set falls into; 0 where they are all whole."""
        return self.samples % self.microbatch_rows

    def is_due(self, step: int) -> bool:
        """Whether the state after ``step`` is to be evaluated."""
        if self.every_steps < 1 or step < 1:
            return False
        return step % self.every_steps == 0 or step == self.steps

    def rows(self, batch: int, microbatch: int) -> int:
        """Return the number of rows of a microbatch; 0 where it lies beyond the end.

        :param batch: number of the global batch, from 0.
        """
        first = batch * self.global_batch + microbatch * self.microbatch_rows
        return max(0, min(self.microbatch_rows, self.samples - first))

    def pseudo_step(self, batch: int) -> int:
        """Return what stands for a batch where random numbers follow from a step."""
        return _FIRST_STEP - batch

    def batch_of(self, step: int) -> int:
        """Undo ``pseudo_step``."""
        return _FIRST_STEP - step

    @property
    def dataset_length(self) -> int:
        """Samples of the held-out data set, for who reads it."""
        return self.length

    def draws(self, step: int, first_row: int, rows: int) -> list[Draw]:
        """Return rows ``[first_row, first_row + rows)`` of a batch, as far as there are any.

        :param step: what stands for the batch (``pseudo_step``).
        """
        start = self.batch_of(step) * self.global_batch + first_row
        return [Draw(_EPOCH, index) for index in range(start, min(start + rows, self.samples))]
