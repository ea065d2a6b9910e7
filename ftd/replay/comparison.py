"""Policies side by side: each one replays the same traces, and what it commits is related to ``ideal``."""

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from ftd.errors import ConfigurationError
from ftd.replay.job import ReplayJob
from ftd.replay.outcome import Outcome
from ftd.replay.parameters import Parameters
from ftd.replay.policies.registry import POLICIES, ThroughputSource, make_policy, require_policies
from ftd.replay.policy import PolicyExcluded
from ftd.replay.replay import replay
from ftd.replay.traces.trace import Trace

REFERENCE = "ideal"
"""Policy to which goodput is related. It is always replayed."""
LEAST_TRACES = 5
"""Number of generated traces from which on their spread is believed."""
MOST_TRACES = 200
"""Largest number of generated traces, unless the user gives one."""
CONFIDENCE = 0.95
PRECISION = 0.05
"""Half-width of a confidence interval, as a share of the mean, at which no more traces are needed."""

ProgressCallback = Callable[[int, int], None]
"""Progress of a comparison, or of advice, in minutes of virtual time: done, and in total as far as it is known."""


class Estimate(msgspec.Struct, frozen=True, kw_only=True):
    """Mean of a figure over the traces."""

    mean: float
    half_width: float | None
    """Half of the width of the 95% confidence interval (Student's t); ``null`` with one trace."""

    @property
    def is_precise(self) -> bool:
        """Whether the interval is as narrow as ``PRECISION`` says."""
        return self.half_width is not None and self.half_width <= PRECISION * abs(self.mean)


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyResult:
    """Outcomes of one policy, one for each trace."""

    policy: str
    outcomes: tuple[Outcome, ...]
    reference: tuple[Outcome, ...]
    """Outcomes of ``ideal`` on the same traces."""

    @property
    def samples(self) -> Estimate:
        """Return the samples that count."""
        return estimate([outcome.samples for outcome in self.outcomes])

    @property
    def samples_per_s(self) -> Estimate:
        """Return the throughput over the whole time."""
        return estimate([outcome.samples_per_s for outcome in self.outcomes])

    @property
    def goodput(self) -> Estimate | None:
        """Return the samples that count as a share of those of ``ideal``; ``None`` if it has none on some trace."""
        if any(ideal.samples == 0 for ideal in self.reference):
            return None
        pairs = zip(self.outcomes, self.reference, strict=True)
        return estimate([outcome.samples / ideal.samples for outcome, ideal in pairs])

    def cost_per_sample(self, price_per_node_hour: float) -> Estimate | None:
        """Return the price of a sample that counts; ``None`` if there are none on some trace.

        :param price_per_node_hour: price of each node that is present, whether it works or not.
        """
        if any(outcome.samples == 0 for outcome in self.outcomes):
            return None
        return estimate([o.node_s / 3600 * price_per_node_hour / o.samples for o in self.outcomes])


class ExcludedPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """A policy without a result, because the job or the trace violates one of its assumptions."""

    policy: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Policies on the same traces."""

    job: ReplayJob
    throughput: ThroughputSource
    traces: tuple[Trace, ...]
    results: tuple[PolicyResult, ...]
    """Results in the order of ``POLICIES``."""
    excluded: tuple[ExcludedPolicy, ...]

    @property
    def is_precise(self) -> bool:
        """Whether the confidence interval of each policy's throughput is narrow enough."""
        return all(result.samples_per_s.is_precise for result in self.results)


def estimate(values: Sequence[float]) -> Estimate:
    """Return the mean of independent values with its confidence interval."""
    mean = statistics.fmean(values)
    if len(values) < 2:
        return Estimate(mean=mean, half_width=None)
    from scipy.stats import t

    quantile = float(t.ppf((1 + CONFIDENCE) / 2, len(values) - 1))
    return Estimate(mean=mean, half_width=quantile * statistics.stdev(values) / math.sqrt(len(values)))


def compare(
    job: ReplayJob,
    make_trace: Callable[[int], Trace],
    parameters: Parameters,
    *,
    seed: int = 0,
    most_traces: int = MOST_TRACES,
    policies: Sequence[str] = POLICIES,
    throughput: ThroughputSource = "common",
    on_progress: ProgressCallback | None = None,
) -> Comparison:
    """Replay policies on traces until the throughput of each is known precisely enough.

    :param make_trace: returns the trace of a seed; the seeds are ``seed``, ``seed`` + 1 and so on.
    :param most_traces: number of traces after which to stop in any case; 1 for a trace that was not generated.
    :raises ConfigurationError: a policy or a parameter is wrong, or the job cannot be planned.
    """
    if most_traces < 1:
        raise ConfigurationError(f"{most_traces} is not allowed", field="--repeat", remedy="write at least 1")
    require_policies(policies)
    names = tuple(dict.fromkeys((REFERENCE, *policies)))
    replays = _Replays(job, parameters, names, throughput, on_progress)
    for count in range(1, most_traces + 1):
        replays.add(make_trace(seed + count - 1), more=max(0, min(LEAST_TRACES, most_traces) - count))
        if count >= LEAST_TRACES and replays.comparison().is_precise:
            break
    return replays.comparison()


@dataclass(slots=True)
class _Replays:
    """Outcomes so far."""

    job: ReplayJob
    parameters: Parameters
    policies: tuple[str, ...]
    throughput: ThroughputSource
    on_progress: ProgressCallback | None
    outcomes: defaultdict[str, list[Outcome]] = field(default_factory=lambda: defaultdict(list))
    excluded: dict[str, str] = field(default_factory=dict)
    traces: list[Trace] = field(default_factory=list)
    done_s: float = 0.0

    def add(self, trace: Trace, *, more: int) -> None:
        """Replay every policy on one more trace.

        :param more: number of traces that follow for certain, for the progress.
        """
        self.job.prepare(trace.most_nodes)
        self.traces.append(trace)
        for index, name in enumerate(self.policies):
            left_s = trace.end_s * (len(self.policies) * (1 + more) - index)
            if name not in self.excluded:
                self._replay(name, trace, left_s)
            self.done_s += trace.end_s

    def _replay(self, name: str, trace: Trace, left_s: float) -> None:
        def report(at_s: float) -> None:
            if self.on_progress is not None:
                self.on_progress(round((self.done_s + at_s) / 60), round((self.done_s + left_s) / 60))

        report(0.0)
        try:
            policy = make_policy(name, self.job, self.parameters, self.throughput)
            self.outcomes[name].append(replay(policy, trace, report))
        except PolicyExcluded as error:
            self.excluded[name] = str(error)

    def comparison(self) -> Comparison:
        """Return the comparison so far."""
        reference = tuple(self.outcomes[REFERENCE])
        return Comparison(
            job=self.job,
            throughput=self.throughput,
            traces=tuple(self.traces),
            results=tuple(
                PolicyResult(policy=name, outcomes=tuple(self.outcomes[name]), reference=reference)
                for name in sorted(self.policies, key=POLICIES.index)
                if name not in self.excluded
            ),
            excluded=tuple(ExcludedPolicy(policy=name, reason=why) for name, why in self.excluded.items()),
        )
