"""What a soak found, as a document: written by ``ftd chaos soak --report``, explained in docs/how-to/soak.md."""

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from ftd.local.soak.monitor import ObservedRecovery, Violation

SCHEMA_VERSION = 1
BINS = 60
"""Points of the goodput over time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultRecord:
    """A fault and what came of the order to do it."""

    number: int
    at_s: float
    """When it struck; of one that could not, when that was clear."""
    fault: str
    node: str | None
    for_s: float
    factor: float
    problem: str
    """Why it could not strike (nobody to strike, a refusal, no answer); empty: it did."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CauseTimes:
    """All recoveries of one cause; times from the detection to the next committed step."""

    count: int
    median_ms: float
    worst_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SoakGoodput:
    """Steps that were new, against what an undisturbed run makes in the same time."""

    ratio: float
    new_steps: int
    repeated_steps: int
    """Steps that were committed before and undone by a rollback, or told twice."""
    step_s: float
    """Of the undisturbed run."""
    between_jobs_s: float
    """Not counted: from the end of one round's job to the first step of the next."""
    series: tuple[tuple[float, float | None], ...]
    """Seconds, and the ratio of the time up to then since the point before; null between two jobs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SoakReport:
    """The whole document. ``at_s`` counts from when faults began."""

    schema: int = SCHEMA_VERSION
    simulated: bool = False
    job: str
    seed: int
    rate_per_min: float
    nodes: int
    steps: int
    """Of each round's job."""
    rounds: int
    """Jobs that came to their last step under faults."""
    duration_s: float
    passed: bool
    """No rule was broken."""
    violations: tuple[Violation, ...]
    faults: tuple[FaultRecord, ...]
    by_kind: dict[str, int]
    """Faults that struck."""
    not_injected: int
    """Faults that never struck, because a node that was struck before was not well again."""
    recoveries: tuple[ObservedRecovery, ...]
    by_cause: dict[str, CauseTimes]
    rollbacks: int
    unprovoked: tuple[str, ...]
    """Nodes and trainers taken for lost though nothing struck them, as a busy machine makes happen."""
    goodput: SoakGoodput
    repeat_command: str
    """The command that lets the same faults strike again."""
    logs: str | None
    """Where the logs of all processes are."""

    def to_bytes(self) -> bytes:
        """An indented JSON document, newline at its end."""
        return msgspec.json.format(msgspec.json.encode(self), indent=2) + b"\n"


def by_kind(faults: Sequence[FaultRecord]) -> dict[str, int]:
    """How often each fault struck, the most frequent first."""
    return dict(Counter(fault.fault for fault in faults if not fault.problem).most_common())


def by_cause(recoveries: Sequence[ObservedRecovery]) -> dict[str, CauseTimes]:
    """Without the starts of jobs."""
    found: dict[str, list[float]] = {}
    for recovery in recoveries:
        if recovery.cause != "start":
            found.setdefault(recovery.cause, []).append(recovery.total_ms)
    return {
        cause: CauseTimes(
            count=len(times), median_ms=round(statistics.median(times), 1), worst_ms=round(max(times), 1)
        )
        for cause, times in sorted(found.items())
    }


def goodput(
    commits: Sequence[tuple[float, int]],
    *,
    until_s: float,
    step_s: float,
    gaps: Sequence[tuple[float, float]],
    done_again: int,
) -> SoakGoodput:
    """Of commits ``(at_s, new steps)`` in ``[0, until_s)``.

    :param gaps: from, to: no job was under way.
    """
    width_s = until_s / BINS
    new = [0.0] * BINS
    for at_s, count in commits:
        if 0 <= at_s < until_s:
            new[int(at_s / width_s)] += count
    series: list[tuple[float, float | None]] = []
    for index, here in enumerate(new):
        begin, end = index * width_s, (index + 1) * width_s
        free_s = width_s - sum(max(0.0, min(end, b) - max(begin, a)) for a, b in gaps)
        enough = free_s > 0.2 * width_s  # What is left of a bin between two jobs says little.
        series.append((round(end, 3), round(here * step_s / free_s, 4) if enough else None))
    between_s = sum(max(0.0, min(until_s, b) - max(0.0, a)) for a, b in gaps)
    total = int(sum(new))
    trained_s = max(until_s - between_s, 1e-9)
    return SoakGoodput(
        ratio=round(total * step_s / trained_s, 4),
        new_steps=total,
        repeated_steps=done_again,
        step_s=round(step_s, 6),
        between_jobs_s=round(between_s, 3),
        series=tuple(series),
    )


def render_lines(report: SoakReport) -> list[str]:
    """For people, plainly."""
    kinds = ", ".join(f"{kind} {count}" for kind, count in report.by_kind.items()) or "none"
    refused = sum(1 for fault in report.faults if fault.problem)
    good = report.goodput
    told = [
        f"soaked {report.job} on {report.nodes} nodes for {report.duration_s:.0f} s, seed {report.seed}: "
        f"{report.rounds} jobs of {report.steps} steps finished",
        f"faults: {kinds} ({refused} could not strike, {report.not_injected} waited for a node to be well again)",
        *_recovery_lines(report.by_cause),
        f"goodput: {good.ratio:.0%} of an undisturbed run ({good.new_steps} new steps, {good.repeated_steps} "
        f"done again, {report.rollbacks} rollbacks)",
    ]
    told += [f"taken for lost, and not struck: {what}" for what in report.unprovoked]
    if report.passed:
        return [*told, "every rule held"]
    told += [f"VIOLATION at {v.at_s:.1f} s ({v.rule}): {v.detail}" for v in report.violations]
    return [*told, f"the same faults again: {report.repeat_command}", f"logs: {report.logs}"]


def _recovery_lines(causes: Mapping[str, CauseTimes]) -> list[str]:
    return [
        f"recovered from {cause}: {times.count} times, median {times.median_ms:.0f} ms, "
        f"worst {times.worst_ms:.0f} ms"
        for cause, times in causes.items()
    ]
