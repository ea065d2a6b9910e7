"""Rules for the cost models of other systems, on traces with many failures, joins and notices, also during pauses."""

import math
import random

import pytest

from ftd.replay.job import ReplayJob
from ftd.replay.parameters import read_parameters
from ftd.replay.policies.registry import make_policy
from ftd.replay.policy import PolicyExcluded
from ftd.replay.replay import replay
from ftd.replay.traces.trace import Trace
from tests.helpers.replay_jobs import linear, make_job, make_trace, names

SYSTEMS = ("oobleck", "varuna", "varuna-no-checkpoints", "bamboo", "torchft", "checkpoint", "reft")
PUBLISHED = {system: linear(global_batch=30.0) for system in ("oobleck", "varuna", "bamboo")}
JOBS = [make_job(fewest=fewest, tolerate=1, published=PUBLISHED) for fewest in (1, 2, 3)]


def busy_trace(seed: int) -> Trace:
    """Return an hour in which a node fails or comes every minute on average, half of the time within 50 s."""
    generator = random.Random(seed)
    present, events, at_s = list(names(8)), [], 1.0
    for index in range(60):
        at_s += generator.choice([0.2, 3.0, 20.0, 50.0, 200.0])
        if len(present) > 1 and generator.random() < 0.55:
            events.append((at_s, "remove", present.pop(generator.randrange(len(present)))))
        else:
            present.append(f"x{index}")
            events.append((at_s, "add", present[-1]))
    return make_trace(8, *events, end_s=at_s + 100.0, notice_s=generator.choice([0.0, 0.0, 30.0, 120.0]))


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("system", SYSTEMS)
def test_the_account_is_complete_and_no_system_does_better_than_ideal(system: str, seed: int) -> None:
    job: ReplayJob = JOBS[seed % len(JOBS)]
    trace = busy_trace(seed)
    ideal = replay(make_policy("ideal", job, read_parameters()), trace)
    for throughput in ("common", "published"):
        try:
            policy = make_policy(system, job, read_parameters(), throughput)  # type: ignore[arg-type]
        except PolicyExcluded:
            assert system == "torchft" and job.planner.n0 > 1
            continue
        found = replay(policy, trace)
        assert math.fsum(found.seconds.values()) == pytest.approx(trace.end_s)
        assert min(found.seconds.values()) >= -1e-6
        if throughput == "common":
            assert found.samples <= ideal.samples + job.policy.global_batch
