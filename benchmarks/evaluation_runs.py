"""The replayed runs of the papers' evaluation, which the tables and the figures of ``benchmarks.evaluation`` share."""

from functools import cache
from pathlib import Path

from ftd.replay.cards import read_card
from ftd.replay.job import ReplayJob
from ftd.replay.outcome import Outcome
from ftd.replay.parameters import read_parameters
from ftd.replay.policies.registry import ThroughputSource, make_policy
from ftd.replay.policy import PolicyExcluded
from ftd.replay.replay import replay
from ftd.replay.traces.reading import read_trace
from ftd.replay.traces.trace import Trace

TRACES = Path(__file__).with_name("traces")
MODELS = ("bert-large", "gpt2", "gpt3-medium", "gpt3-2.7b", "gpt3-6.7b")
SYSTEMS = ("bamboo", "varuna", "oobleck")
RATES = ("6h", "1h", "10m")
"""Times between two failures of the controlled experiments."""
SPOT = ("oobleck_ec2_p3_scaled", "oobleck_gcp_scaled")
"""Traces of Figures 10 and 12."""


def shared_traces() -> tuple[str, ...]:
    """Return the names of all shared traces."""
    return tuple(sorted(path.stem for path in TRACES.glob("*.csv")))


@cache
def trace_of(name: str) -> Trace:
    """Return a shared trace."""
    return read_trace(TRACES / f"{name}.csv")


@cache
def job_of(model: str, nodes: int = 30) -> ReplayJob:
    """Return a card's job for at most ``nodes`` nodes, whose planner keeps what it has computed.

    Plans depend on the most nodes for which templates exist, so traces with other numbers have their own planner.
    """
    return read_card(model)


@cache
def run(policy: str, model: str, trace: str, source: ThroughputSource) -> Outcome | str:
    """Return the outcome of a policy, or why the job excludes it."""
    return run_job(policy, job_of(model, trace_of(trace).most_nodes), trace_of(trace), source)


def run_job(policy: str, job: ReplayJob, trace: Trace, source: ThroughputSource) -> Outcome | str:
    """Return the outcome of a policy, or why the job excludes it."""
    try:
        return replay(make_policy(policy, job, read_parameters(), source), trace)
    except PolicyExcluded as excluded:
        return str(excluded)
