"""Computes speed over the time of a run from a report's steps: throughput and goodput."""

from collections.abc import Sequence
from itertools import pairwise

from ftd.observe.view.document import Report, ReportedStep
from ftd.observe.view.text import throughput_words

Series = list[tuple[float, float]]
"""Pairs (seconds since the first event, value), in order of time."""


def committed_at_s(steps: Sequence[ReportedStep]) -> list[float]:
    """Return when each step was committed.

    When steps arrived all at once, because the broker or the coordinator had been away, only the time of
    the last one is known. The others are placed before it by their durations.
    """
    times = [step.at_s for step in steps]
    together = [after.at_s - before.at_s < (after.step_s or 0.0) / 2 for before, after in pairwise(steps)]
    for index in range(len(steps) - 2, -1, -1):
        if together[index] or (index and together[index - 1]):
            times[index] = min(times[index], times[index + 1] - (steps[index + 1].step_s or 0.0))
    for index in range(1, len(times)):  # Their durations must not reach back before the previous step.
        times[index] = max(times[index], times[index - 1])
    return times


def started_at_s(report: Report) -> float:
    """Return when the first step began, which a rollback may have undone. There must be a step."""
    first, start = report.steps[0], report.start
    committed_at = first.at_s
    if start is not None:
        committed_at = min(committed_at, start.at_s + (start.total_ms - (start.detected_ms or 0.0)) / 1000)
    return committed_at - (first.step_s or 0.0)


def counts_tokens(report: Report) -> bool:
    """Return whether the loss has tokens, in which case speed is given in tokens instead of samples."""
    batch = report.job.global_batch
    return batch is not None and any((step.weight or 0.0) > batch for step in report.steps)


def amounts_per_step(report: Report) -> list[float]:
    """Return the tokens or samples (see ``counts_tokens``) of each step; empty without a global batch."""
    batch = report.job.global_batch
    if not batch:
        return []
    if counts_tokens(report):
        return [step.weight or 0.0 for step in report.steps]
    return [float(batch)] * len(report.steps)


def throughput_series(report: Report, *, bins: int = 240) -> Series:
    """Return tokens or samples per second (see ``counts_tokens``), averaged over equal intervals.

    The result is empty without a global batch or with fewer than two steps.
    """
    steps, computed = report.steps, amounts_per_step(report)
    if not computed or len(steps) < 2:
        return []
    begin, end = started_at_s(report), steps[-1].at_s
    width = max(end - begin, 1e-9) / bins
    sums = [0.0] * bins
    for at_s, amount in zip(committed_at_s(steps), computed, strict=True):
        sums[min(bins - 1, max(0, int((at_s - begin) / width)))] += amount
    # With few steps an interval would hold single steps, so several intervals are averaged together.
    return _together(sums, begin, width, max(1, round(4 * bins / len(steps))))


def median_throughput(report: Report) -> str:
    """Return the throughput of a step of median duration, such as ``51,200 tokens/s``; empty if unknown."""
    speeds = sorted(
        amount / step.step_s
        for step, amount in zip(report.steps, amounts_per_step(report), strict=False)
        if step.step_s and amount
    )
    if not speeds:
        return ""
    median = speeds[len(speeds) // 2]
    return throughput_words(*((median, None) if counts_tokens(report) else (None, median)))


def learning_rates(report: Report) -> Series:
    """Return the learning rate of each step; empty if it is unknown or never changes."""
    times = committed_at_s(report.steps)
    series = [
        (at_s, step.learning_rate)
        for at_s, step in zip(times, report.steps, strict=True)
        if step.learning_rate is not None
    ]
    return series if len({value for _, value in series}) > 1 else []


def evaluation_losses(report: Report) -> Series:
    """Return the finite losses of the evaluations."""
    return [(one.at_s, one.loss) for one in report.evaluations if one.loss is not None]


def goodput_series(report: Report) -> Series:
    """Return after each step the share (0 to 1) of the time since the first step began that went into lasting
    steps.
    """
    if not report.steps:
        return []
    begin, useful_s, series = started_at_s(report), 0.0, []
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
