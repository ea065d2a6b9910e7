"""What a report's steps say of speed: throughput and goodput over the time of the run."""

from collections.abc import Sequence
from itertools import pairwise

from ftd.observe.view.document import Report, ReportedStep
from ftd.observe.view.text import throughput_words

Series = list[tuple[float, float]]
"""(seconds since the first event, value), in order."""


def committed_at_s(steps: Sequence[ReportedStep]) -> list[float]:
    """When each step was committed. Of those that were heard of all at once, since the broker or the
    coordinator had been away, only the last one's time is known; the others came before it, as they took.
    """
    times = [step.at_s for step in steps]
    together = [after.at_s - before.at_s < (after.step_s or 0.0) / 2 for before, after in pairwise(steps)]
    for index in range(len(steps) - 2, -1, -1):
        if together[index] or (index and together[index - 1]):
            times[index] = min(times[index], times[index + 1] - (steps[index + 1].step_s or 0.0))
    for index in range(1, len(times)):  # They took less, if they would reach behind the one before.
        times[index] = max(times[index], times[index - 1])
    return times


def begun_at_s(steps: Sequence[ReportedStep]) -> float:
    """When the first step began; there must be one."""
    return steps[0].at_s - (steps[0].step_s or 0.0)


def counts_tokens(report: Report) -> bool:
    """Whether the loss has tokens, so that speed is better told in these than in samples."""
    batch = report.job.global_batch
    return batch is not None and any((step.weight or 0.0) > batch for step in report.steps)


def amounts(report: Report) -> list[float]:
    """What each step computed: tokens where the loss has some, else samples; empty without a global batch."""
    batch = report.job.global_batch
    if not batch:
        return []
    if counts_tokens(report):
        return [step.weight or 0.0 for step in report.steps]
    return [float(batch)] * len(report.steps)


def throughput(report: Report, *, bins: int = 240) -> Series:
    """Tokens (see ``amounts``) per second, averaged over equal spans of time; empty without a global batch or
    two steps."""
    steps, computed = report.steps, amounts(report)
    if not computed or len(steps) < 2:
        return []
    begin, end = begun_at_s(steps), steps[-1].at_s
    width = max(end - begin, 1e-9) / bins
    sums = [0.0] * bins
    for at_s, amount in zip(committed_at_s(steps), computed, strict=True):
        sums[min(bins - 1, max(0, int((at_s - begin) / width)))] += amount
    # Where steps are few, a bin would count single ones: several bins together.
    return _together(sums, begin, width, max(1, round(4 * bins / len(steps))))


def median_throughput(report: Report) -> str:
    """``51,200 tokens/s`` of a step of median duration; empty where that is unknown."""
    speeds = sorted(
        amount / step.step_s
        for step, amount in zip(report.steps, amounts(report), strict=False)
        if step.step_s and amount
    )
    if not speeds:
        return ""
    median = speeds[len(speeds) // 2]
    return throughput_words(*((median, None) if counts_tokens(report) else (None, median)))


def learning_rates(report: Report) -> Series:
    """The learning rate of each step; empty where it is unknown or never changes."""
    times = committed_at_s(report.steps)
    series = [
        (at_s, step.learning_rate)
        for at_s, step in zip(times, report.steps, strict=True)
        if step.learning_rate is not None
    ]
    return series if len({value for _, value in series}) > 1 else []


def evaluated(report: Report) -> Series:
    """The loss of each evaluation, where it was a finite number."""
    return [(one.at_s, one.loss) for one in report.evaluations if one.loss is not None]


def goodput(report: Report) -> Series:
    """Behind each step: the part of the time since the first began that went into steps that last, 0 to 1."""
    if not report.steps:
        return []
    begin, useful_s, series = begun_at_s(report.steps), 0.0, []
    for step, at_s in zip(report.steps, committed_at_s(report.steps), strict=True):
        useful_s += step.step_s or 0.0
        elapsed_s = at_s - begin
        series.append((at_s, min(1.0, useful_s / elapsed_s) if elapsed_s > 0 else 1.0))
    return series


def _together(sums: Sequence[float], begin: float, width: float, group: int) -> Series:
    series = []
    for first in range(0, len(sums), group):
        part = sums[first : first + group]
        seconds = len(part) * width
        series.append((begin + first * width + seconds / 2, sum(part) / seconds))
    return series
