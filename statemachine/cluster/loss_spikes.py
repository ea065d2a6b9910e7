"""Values of ``spikes``: the losses that are compared, and the batches that the sample order leaves out."""

from collections.abc import Collection
from dataclasses import dataclass, replace
from statistics import median

_TO_STANDARD_DEVIATION = 1.4826
"""Standard deviation of a normal distribution over its median absolute deviation."""
_LEAST_DEVIATION = 0.01
"""Least deviation, as a share of the median."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spike:
    """A step that is to be undone."""

    step: int
    loss: float
    batch: int
    threshold: float

    def describe(self) -> str:
        return f"the loss of step {self.step} is a spike: {self.loss:.4g} is above {self.threshold:.4g}"


@dataclass(frozen=True, slots=True, kw_only=True)
class LossSpikes:
    """Losses of the last published steps, and what followed from their spikes. It is durable."""

    losses: tuple[tuple[int, float], ...] = ()
    """The last published steps with an update, and their losses; at most ``spike_window``."""
    skipped_batches: tuple[int, ...] = ()
    """Batches that the sample order leaves out, ascending."""
    pending: Spike | None = None
    """Spike for which a rollback is under way or about to begin."""
    tried_step: int = 0
    tries: int = 0
    """Batches that were left out since a step after ``tried_step``, the last one of these spikes, was reached."""

    def with_loss(self, step: int, loss: float, window: int) -> "LossSpikes":
        """Return the state after one more step was accepted."""
        return replace(self, losses=(*self.losses, (step, loss))[-window:])

    def rolled_back(self, step: int) -> "LossSpikes":
        """Return the state after all nodes returned to ``step``. The batch of a pending spike is left out from
        now on, if its step was undone.
        """
        skipped, tries, tried_step, spike = self.skipped_batches, self.tries, self.tried_step, self.pending
        if spike is not None and spike.step > step:
            skipped = tuple(sorted({*skipped, spike.batch}))
            tries = tries + 1 if spike.step <= tried_step else 1
            tried_step = max(tried_step, spike.step)
        return replace(
            self,
            losses=tuple((number, loss) for number, loss in self.losses if number <= step),
            skipped_batches=skipped,
            pending=None,
            tries=tries,
            tried_step=tried_step,
        )


def threshold_of(losses: Collection[float], deviations: float) -> float:
    """Return the loss above which the next one is a spike."""
    middle = median(losses)
    spread = _TO_STANDARD_DEVIATION * median(abs(loss - middle) for loss in losses)
    return middle + deviations * max(spread, _LEAST_DEVIATION * abs(middle))
