"""What a report's steps say of speed: throughput and goodput over the time of the run."""

from collections.abc import Sequence

from ftd.view.document import Report, StepRecord

Series = list[tuple[float, float]]
"""(seconds since the first event, value), in order."""


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
    for step in steps:
        counts[min(bins - 1, max(0, int((step.at_s - begin) / width)))] += 1
    # Where steps are few, a bin would count single ones: several bins together.
    return _together(counts, begin, width, batch, max(1, round(4 * bins / len(steps))))


def goodput(report: Report) -> Series:
    """Behind each step: the part of the time since the first began that went into steps that last, 0 to 1."""
    if not report.steps:
        return []
    begin, useful_s, series = begun_at_s(report.steps), 0.0, []
    for step in report.steps:
        useful_s += step.step_s or 0.0
        elapsed_s = step.at_s - begin
        series.append((step.at_s, min(1.0, useful_s / elapsed_s) if elapsed_s > 0 else 1.0))
    return series


def _together(counts: Sequence[int], begin: float, width: float, batch: int, group: int) -> Series:
    series = []
    for first in range(0, len(counts), group):
        part = counts[first : first + group]
        seconds = len(part) * width
        series.append((begin + first * width + seconds / 2, sum(part) * batch / seconds))
    return series
