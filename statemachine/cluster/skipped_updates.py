"""Committed steps that updated nothing although they should have: how many there were, in a row and in total.

A NaN in the data, the code or the parameters makes every following update void, and the job would go on to
its last step and seem to have trained. So the steps are counted, through rollbacks and takeovers, and the
job fails when too many updates were skipped. float16 skips updates as well while it looks for a loss scale
(as ``torch.amp.GradScaler`` does); these steps do not count.
"""

from dataclasses import dataclass, replace

from statemachine.messages.values import NotFinite, Vote

MAX_RUNS = 100
"""Most runs of skipped updates that are remembered one by one; of older ones the number of steps is."""

_VALUES = {
    "output": "the output of {layer}",
    "loss": "the loss of the output of {layer}",
    "gradient": "the gradient from the backward pass of {layer}",
    "parameter_gradient": "the gradient of a parameter of {layer}",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SkippedUpdates:
    """Steps of the current lineage, up to the last published one, that count as skipped updates."""

    runs: tuple[tuple[int, int], ...] = ()
    """First and last step of each run of consecutive steps, ascending; at most ``MAX_RUNS``."""
    older: int = 0
    """Number of such steps before ``runs``."""
    first: NotFinite | None = None
    """Place of the first value that was not finite in the first step of the last run, if it is known."""

    @property
    def total(self) -> int:
        """Return the number of all of them."""
        return self.older + sum(last - first + 1 for first, last in self.runs)

    def in_row(self, step: int) -> int:
        """Return the number of consecutive ones that end with ``step``."""
        first, last = self.runs[-1] if self.runs else (0, 0)
        return last - first + 1 if self.runs and last == step else 0

    def added(self, step: int, place: NotFinite | None) -> "SkippedUpdates":
        """Return these steps and one that is newer than all of them."""
        if self.in_row(step - 1):
            return replace(self, runs=(*self.runs[:-1], (self.runs[-1][0], step)))
        runs = (*self.runs, (step, step))
        forgotten = sum(last - first + 1 for first, last in runs[:-MAX_RUNS])
        return SkippedUpdates(runs=runs[-MAX_RUNS:], older=self.older + forgotten, first=place)

    def rolled_back(self, step: int) -> "SkippedUpdates":
        """Return these steps without those after ``step``, which were undone."""
        runs = tuple((first, min(last, step)) for first, last in self.runs if first <= step)
        same_run = len(runs) == len(self.runs)
        return SkippedUpdates(runs=runs, older=min(self.older, step), first=self.first if same_run else None)


def is_counted(vote: Vote) -> bool:
    """Return whether a step's update was skipped for another reason than that its loss scale was too high.

    The loss scale has no influence on the forward pass, nor can it be lowered below 1.
    """
    if not vote.skipped:
        return False
    in_forward_pass = vote.not_finite is not None and vote.not_finite.value in ("output", "loss")
    return vote.loss_scale <= 1 or vote.weight == 0 or in_forward_pass


def explain(vote: Vote) -> str:
    """Return why the update of a step was skipped."""
    if vote.not_finite is not None:
        return f"{describe(vote.not_finite)} is not finite"
    return "no term of the loss counted" if vote.weight == 0 else "the gradients are not finite"


def describe(place: NotFinite) -> str:
    """Return a value, its layer and its nodes in words."""
    return f"{_VALUES[place.value].format(layer=place.name)} on {', '.join(place.nodes)}"


def find_failure(skipped: SkippedUpdates, *, step: int, steps: int, max_skipped: int) -> str | None:
    """Return why the job fails, if too many updates were skipped.

    :param step: the last published step.
    :param steps: number of steps of the job.
    :param max_skipped: limit of updates in a row; 0: the job never fails.
    """
    if not max_skipped or not skipped.runs:
        return None
    in_row, (first, _) = skipped.in_row(step), skipped.runs[-1]
    if in_row >= max_skipped:
        what = (
            f"the updates of {in_row} steps in a row were skipped, from step {first} on"
            if in_row > 1
            else f"the update of step {first} was skipped"
        )
        remedy = "training.max_skipped sets the limit"
    elif skipped.total * 2 > steps:
        what = (
            f"{skipped.total} of the job's {steps} updates were skipped, the last ones from step {first} on"
        )
        remedy = "more than half of them are too many, unless training.max_skipped is 0"
    else:
        return None
    where = (
        f"; in step {first} the first value that was not finite was {describe(skipped.first)}"
        if skipped.first is not None
        else ""
    )
    return f"{what}{where}; {remedy}"
