"""The document of a replay (``ftd replay --json``): what each policy committed, and where its time went.

``docs/reference/replay-report.md`` explains every field. ``docs/reference/replay.schema.json`` is generated from these
classes (``python -m ftd.replay.schema replay``), and a test keeps the two equal. Times end in ``_s`` and are seconds of
virtual time from the start of the trace.
"""

import statistics
from collections import defaultdict
from collections.abc import Sequence

import msgspec

from ftd.replay.comparison import Comparison, Estimate, ExcludedPolicy, PolicyResult
from ftd.replay.outcome import RecoveryKind
from ftd.replay.policies.registry import ThroughputSource
from ftd.replay.policy import CATEGORIES, Category
from ftd.replay.traces.trace import Trace

SCHEMA_VERSION = 1

MOST_WINDOWS = 120
"""Largest number of windows over which the throughput is averaged."""
_WINDOWS_S = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 21_600, 43_200, 86_400)
"""Lengths of windows that people can read; longer ones are whole days."""


class ReplayedJob(msgspec.Struct, frozen=True, kw_only=True):
    """The job that was replayed."""

    name: str
    source: str
    layers: int
    state_bytes: int
    """Parameters and optimizer state of the whole model."""
    global_batch: int
    tolerate: int
    """Simultaneous node failures that leave a copy of every layer under ``ftd`` and ``oobleck``."""
    fewest_nodes: int
    """Fewest nodes that can train."""


class ReplayedTrace(msgspec.Struct, frozen=True, kw_only=True):
    """The trace; of several generated ones, the first."""

    name: str
    source: str
    notes: tuple[str, ...]
    """Assumptions of the importer or the generator."""
    duration_s: float
    initial_nodes: int
    fewest_nodes: int
    most_nodes: int
    mean_nodes: float
    removals: int
    nodes: tuple[tuple[float, int], ...]
    """Number of nodes over time: pairs of a time and the number from then on."""


class ReportedRecoveries(msgspec.Struct, frozen=True, kw_only=True):
    """Recoveries of one kind, on all traces together."""

    kind: RecoveryKind
    count: int
    median_s: float
    """Median length of the pauses, without the time of waiting for nodes."""
    median_redone_s: float
    """Median of the computing time that was lost."""


class ReplayedPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one policy."""

    policy: str
    samples: Estimate
    """Samples of the iterations that count."""
    samples_per_s: Estimate
    goodput: Estimate | None
    """Samples as a share of those of ``ideal`` on the same traces; ``null`` if ``ideal`` commits none on one."""
    cost_per_sample: Estimate | None
    """``null`` without a price, or if no sample counts."""
    seconds: dict[Category, float]
    """Mean time in each category. They add up to the duration of the trace."""
    recoveries: tuple[ReportedRecoveries, ...]
    throughput: tuple[float, ...]
    """Mean samples per second in each window of the first trace."""
    committed: tuple[float, ...]
    """Samples that count at the end of each window of the first trace. What was undone later does not count."""


class ReplayReport(msgspec.Struct, frozen=True, kw_only=True):
    """The result of ``ftd replay``."""

    schema: int = SCHEMA_VERSION
    simulated: bool = True
    """Always true: nothing of this was measured on a cluster."""
    job: ReplayedJob
    trace: ReplayedTrace
    traces: int
    """Number of traces: more than 1 if they were generated."""
    precise: bool | None
    """Whether each confidence interval of a throughput is narrow enough; ``null`` with a trace from a file."""
    throughput: ThroughputSource
    parameters: str
    """Origin of the policies' parameters."""
    price_per_node_hour: float | None
    windows_s: tuple[float, ...]
    """Ends of the windows of ``throughput`` and ``committed``; the first one begins at 0."""
    policies: tuple[ReplayedPolicy, ...]
    excluded: tuple[ExcludedPolicy, ...]

    @property
    def used_categories(self) -> tuple[Category, ...]:
        """Return the categories in which at least one policy spent time."""
        return tuple(c for c in CATEGORIES if any(policy.seconds[c] > 0 for policy in self.policies))


def build_report(
    comparison: Comparison,
    *,
    generated: bool,
    parameters: str,
    price_per_node_hour: float | None = None,
) -> ReplayReport:
    """Return the document of a comparison.

    :param generated: whether the traces come from a failure model.
    :param parameters: origin of the policies' parameters.
    """
    job, trace = comparison.job, comparison.traces[0]
    edges_s = window_edges_s(trace.end_s)
    return ReplayReport(
        job=ReplayedJob(
            name=job.name,
            source=job.source,
            layers=len(job.profile.layers),
            state_bytes=job.state_bytes,
            global_batch=job.policy.global_batch,
            tolerate=job.policy.tolerate,
            fewest_nodes=job.planner.fewest_nodes,
        ),
        trace=_trace(trace),
        traces=len(comparison.traces),
        precise=comparison.is_precise if generated else None,
        throughput=comparison.throughput,
        parameters=parameters,
        price_per_node_hour=price_per_node_hour,
        windows_s=tuple(edges_s[1:]),
        policies=tuple(_policy(result, edges_s, price_per_node_hour) for result in comparison.results),
        excluded=comparison.excluded,
    )


def window_edges_s(duration_s: float) -> list[float]:
    """Return the edges of at most ``MOST_WINDOWS`` windows of equal length, of which the last may be cut short."""
    day_s = _WINDOWS_S[-1]
    days = -(-duration_s // (MOST_WINDOWS * day_s))
    window_s = next((w for w in _WINDOWS_S if duration_s <= w * MOST_WINDOWS), days * day_s)
    whole = int(duration_s // window_s)
    edges_s = [float(index * window_s) for index in range(whole + 1)]
    return edges_s if edges_s[-1] == duration_s else [*edges_s, duration_s]


def _trace(trace: Trace) -> ReplayedTrace:
    return ReplayedTrace(
        name=trace.name,
        source=trace.source,
        notes=trace.notes,
        duration_s=trace.end_s,
        initial_nodes=len(trace.initial_nodes),
        fewest_nodes=trace.fewest_nodes,
        most_nodes=trace.most_nodes,
        mean_nodes=trace.mean_nodes,
        removals=trace.removals,
        nodes=tuple(trace.node_counts()),
    )


def _policy(result: PolicyResult, edges_s: Sequence[float], price: float | None) -> ReplayedPolicy:
    throughput = result.outcomes[0].throughput(edges_s)
    committed, total = [], 0.0
    for index, rate in enumerate(throughput):
        total += rate * (edges_s[index + 1] - edges_s[index])
        committed.append(total)
    return ReplayedPolicy(
        policy=result.policy,
        samples=result.samples,
        samples_per_s=result.samples_per_s,
        goodput=result.goodput,
        cost_per_sample=None if price is None else result.cost_per_sample(price),
        seconds={c: statistics.fmean(o.seconds[c] for o in result.outcomes) for c in CATEGORIES},
        recoveries=_recoveries(result),
        throughput=tuple(throughput),
        committed=tuple(committed),
    )


def _recoveries(result: PolicyResult) -> tuple[ReportedRecoveries, ...]:
    by_kind: dict[RecoveryKind, list[tuple[float, float]]] = defaultdict(list)
    for outcome in result.outcomes:
        for recovery in outcome.recoveries:
            by_kind[recovery.kind].append((recovery.duration_s, recovery.redone_s))
    return tuple(
        ReportedRecoveries(
            kind=kind,
            count=len(times),
            median_s=statistics.median(duration_s for duration_s, _ in times),
            median_redone_s=statistics.median(redone_s for _, redone_s in times),
        )
        for kind, times in sorted(by_kind.items())
    )
