"""The report of a soak, which ``ftd chaos soak --report`` writes. docs/how-to/soak.md explains it."""

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ftd.local.soak.monitor import ObservedRecovery, Violation

SCHEMA_VERSION = 1
BINS = 60
"""The number of points of the goodput over time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultRecord:
    """A fault, and whether it could be injected."""

    number: int
    at_s: float
    """Time at which the fault was injected, or at which it was clear that it could not be."""
    fault: str
    node: str | None
    for_s: float
    factor: float
    problem: str
    """Reason why the fault could not be injected (no node was available, it was rejected, nobody answered);
    empty if it was.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class CauseTimes:
    """The number and durations of all recoveries of one cause, from the detection to the next committed step."""

    count: int
    median_ms: float
    worst_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SoakGoodput:
    """New steps, compared with an undisturbed run of the same duration."""

    ratio: float | None
    """Goodput, or null if jobs trained for less than a point of ``series``: new steps that are published
    together in a moment say nothing.
    """
    new_steps: int
    repeated_steps: int
    """Steps that had been committed before: they were undone by a rollback, or published twice."""
    step_s: float
    """Seconds per step of the undisturbed run."""
    between_jobs_s: float
    """Time that does not count: from the end of one round's job to the first step of the next."""
    series: tuple[tuple[float, float | None], ...]
    """Seconds, and the goodput since the previous point; null between two jobs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SoakReport:
    """The whole document. ``at_s`` counts from the first moment at which faults could be injected."""

    schema: int = SCHEMA_VERSION
    simulated: bool = False
    job: str
    seed: int
    rate_per_min: float
    nodes: int
    steps: int
    """Steps of each round's job."""
    rounds: int
    """Jobs that reached their last step under faults."""
    duration_s: float
    complete: bool
    """True if the soak ran to its end; false if a signal or an error ended it."""
    passed: bool
    """True if the soak is complete and no rule was violated."""
    violations: tuple[Violation, ...]
    faults: tuple[FaultRecord, ...]
    by_kind: dict[str, int]
    """The number of injected faults by name."""
    not_injected: int
    """Faults that were never injected because earlier ones had not been recovered from."""
    recoveries: tuple[ObservedRecovery, ...]
    by_cause: dict[str, CauseTimes]
    rollbacks: int
    unprovoked: tuple[str, ...]
    """Nodes and trainers that counted as lost although no fault was injected into them, as happens on a busy
    machine.
    """
    goodput: SoakGoodput
    repeat_command: str
    """The command that injects the same faults again."""
    logs: str | None
    """The directory with the logs of all processes."""


def count_by_kind(faults: Sequence[FaultRecord]) -> dict[str, int]:
    """Return how often each fault was injected, the most frequent first."""
    return dict(Counter(fault.fault for fault in faults if not fault.problem).most_common())


def time_by_cause(recoveries: Sequence[ObservedRecovery]) -> dict[str, CauseTimes]:
    """Return the recovery times by cause."""
    found: dict[str, list[float]] = {}
    for recovery in recoveries:
        found.setdefault(recovery.cause, []).append(recovery.total_ms)
    return {
        cause: CauseTimes(
            count=len(times), median_ms=round(statistics.median(times), 1), worst_ms=round(max(times), 1)
        )
        for cause, times in sorted(found.items())
    }


def measure_goodput(
    commits: Sequence[tuple[float, int]],
    *,
    until_s: float,
    step_s: float,
    gaps: Sequence[tuple[float, float]],
    repeated_steps: int,
) -> SoakGoodput:
    """Return the goodput of commits ``(at_s, new steps)`` in ``[0, until_s)``.

    :param gaps: times (from, to) in which no job was running.
    """
    width_s = until_s / BINS
    new = [0.0] * BINS
    for at_s, count in commits:
        if 0 <= at_s < until_s:
            new[min(int(at_s / width_s), BINS - 1)] += count  # The last instant is rounded up.
    series: list[tuple[float, float | None]] = []
    for index, here in enumerate(new):
        begin, end = index * width_s, (index + 1) * width_s
        free_s = width_s - sum(max(0.0, min(end, b) - max(begin, a)) for a, b in gaps)
        enough = free_s > 0.2 * width_s  # The rest of a bin between two jobs says little.
        series.append((round(end, 3), round(here * step_s / free_s, 4) if enough else None))
    between_s = sum(max(0.0, min(until_s, b) - max(0.0, a)) for a, b in gaps)
    total = int(sum(new))
    trained_s = until_s - between_s
    return SoakGoodput(
        ratio=round(total * step_s / trained_s, 4) if trained_s >= width_s else None,
        new_steps=total,
        repeated_steps=repeated_steps,
        step_s=round(step_s, 6),
        between_jobs_s=round(between_s, 3),
        series=tuple(series),
    )


def render_lines(report: SoakReport) -> list[str]:
    """Return the report as lines for people."""
    kinds = ", ".join(f"{kind} {count}" for kind, count in report.by_kind.items()) or "none"
    rejected = sum(1 for fault in report.faults if fault.problem)
    good = report.goodput
    share = (
        "unknown, since jobs trained too briefly"
        if good.ratio is None
        else f"{good.ratio:.0%} of an undisturbed run"
    )
    found = [
        f"soaked {report.job} on {report.nodes} nodes for {report.duration_s:.0f} s, seed {report.seed}: "
        f"{report.rounds} jobs of {report.steps} steps finished",
        f"faults: {kinds} ({rejected} could not be injected, {report.not_injected} waited too long for nodes to "
        "recover)",
        *_recovery_lines(report.by_cause),
        f"goodput: {share} ({good.new_steps} new steps, {good.repeated_steps} computed again, "
        f"{report.rollbacks} rollbacks)",
    ]
    found += [f"lost without an injected fault: {what}" for what in report.unprovoked]
    if not report.complete:
        found.append("the soak ended early")
    if not report.violations:
        return [*found, "every rule held" if report.complete else "every rule held so far"]
    found += [f"VIOLATION at {v.at_s:.1f} s ({v.rule}): {v.detail}" for v in report.violations]
    return [*found, f"repeat with: {report.repeat_command}", f"logs: {report.logs}"]


def _recovery_lines(causes: Mapping[str, CauseTimes]) -> list[str]:
    return [
        f"recovered from {cause}: {times.count} times, median {times.median_ms:.0f} ms, "
        f"worst {times.worst_ms:.0f} ms"
        for cause, times in causes.items()
    ]
