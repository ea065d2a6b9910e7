"""What a report's steps say of speed: throughput and goodput over the time of the run."""

from collections.abc import Sequence
from itertools import pairwise

from ftd.view.document import Report, StepRecord

Series = list[tuple[float, float]]
"""(seconds since the first event, value), in order."""


def committed_at_s(steps: Sequence[StepRecord]) -> list[float]:
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


def begun_at_s(steps: Sequence[StepRecord]) -> float:
    """When the first step began; there must be one."""
    return steps[0].at_s - (steps[0].step_s or 0.0)


def throughput(report: Report, *, bins: int = 240) -> Series:
    """Samples per second, averaged over equal spans of time; empty without a global batch or two steps."""
    batch, steps = report.job.global_batch, report.steps
    if not batch or len(steps) < 2:
        return []
    begin, end = begun_at_s(steps), steps[-1].at_s
    width = max(end - begin, 1e-9) / bins
    counts = [0] * bins
    for at_s in committed_at_s(steps):
        counts[min(bins - 1, max(0, int((at_s - begin) / width)))] += 1
    # Where steps are few, a bin would count single ones: several bins together.
    return _together(counts, begin, width, batch, max(1, round(4 * bins / len(steps))))


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


def _together(counts: Sequence[int], begin: float, width: float, batch: int, group: int) -> Series:
    series = []
    for first in range(0, len(counts), group):
        part = counts[first : first + group]
        seconds = len(part) * width
        series.append((begin + first * width + seconds / 2, sum(part) * batch / seconds))
    return series
