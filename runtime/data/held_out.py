"""The rows of the held-out data set in an evaluation, and the steps after which one is due: pure functions of
the job.

An evaluation reads the held-out set in order, from its first sample, in global batches as large as
training's. The last global batch ends where the set does: microbatches beyond the end are left out, and the
last microbatch may have fewer rows. So every sample counts once, and none is repeated to fill a batch.
"""

from dataclasses import dataclass

from runtime.data.sampling import Draw

_EPOCH = -1
"""Value in place of an epoch in the keys of random numbers, so that evaluation shares none with training."""
_FIRST_STEP = -16
"""First of the steps that held-out batches use in the keys of random numbers; they count downwards."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOutSampler:
    """The evaluations of one job: when they are due, and which rows they read."""

    dataset_length: int
    """Number of samples of the held-out data set."""
    global_batch: int
    microbatch_rows: int
    steps: int
    every_steps: int
    """Evaluate after every so many steps and after the last one; 0: never."""
    max_batches: int = 0
    """Maximum number of global batches of one evaluation; 0 for all."""

    @property
    def batches(self) -> int:
        """Number of global batches of one evaluation."""
        there = -(-self.dataset_length // self.global_batch)
        return min(there, self.max_batches or there)

    @property
    def samples(self) -> int:
        """Number of rows of one evaluation."""
        return min(self.dataset_length, self.batches * self.global_batch)

    @property
    def last_microbatch_rows(self) -> int:
        """Number of rows of the last, incomplete microbatch; 0 if all microbatches are complete."""
        return self.samples % self.microbatch_rows

    def is_due(self, step: int) -> bool:
        """Return whether the state after ``step`` must be evaluated."""
        if self.every_steps < 1 or step < 1:
            return False
        return step % self.every_steps == 0 or step == self.steps

    def rows(self, batch: int, microbatch: int) -> int:
        """Return the number of rows of a microbatch; 0 if it lies beyond the end.

        :param batch: number of the global batch, from 0.
        """
        first = batch * self.global_batch + microbatch * self.microbatch_rows
        return max(0, min(self.microbatch_rows, self.samples - first))

    @staticmethod
    def pseudo_step(batch: int) -> int:
        """Return the negative step that identifies a batch where random numbers depend on the step."""
        return _FIRST_STEP - batch

    def draws(self, step: int, first_row: int, rows: int) -> list[Draw]:
        """Return rows ``[first_row, first_row + rows)`` of a batch, as far as they exist.

        :param step: step that identifies the batch (``pseudo_step``).
        """
        start = (_FIRST_STEP - step) * self.global_batch + first_row
        return [Draw(_EPOCH, index) for index in range(start, min(start + rows, self.samples))]
