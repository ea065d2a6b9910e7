"""Policies side by side: goodput, exclusions, and how many generated traces are enough."""

import math

import pytest
from scipy import stats

from ftd.errors import ConfigurationError
from ftd.replay import comparison as module
from ftd.replay.comparison import LEAST_TRACES, compare, estimate
from ftd.replay.job import ReplayJob
from ftd.replay.parameters import read_parameters
from ftd.replay.policies.registry import make_policy
from ftd.replay.policy import PolicyExcluded
from ftd.replay.traces.generate import AbsenceLaw, FailureLaw, FailureModel, generate
from tests.helpers.replay_jobs import make_job, make_trace

JOB = make_job()
PARAMETERS = read_parameters()
TRACE = make_trace(6, (300.0, "remove", "n5"), (600.0, "add", "n5"), end_s=1000.0)
MODEL = FailureModel(nodes=6, duration_h=2.0, failures=FailureLaw(mean_h=4.0), repair=AbsenceLaw(mean_h=0.5))


def test_goodput_is_what_counts_as_a_share_of_ideal_on_the_same_trace() -> None:
    found = compare(JOB, lambda _: TRACE, PARAMETERS, most_traces=1, policies=["varuna"])
    assert [result.policy for result in found.results] == ["ideal", "varuna"]
    ideal, varuna = found.results
    assert ideal.goodput is not None and ideal.goodput.mean == 1.0
    assert varuna.goodput is not None
    assert varuna.goodput.mean == varuna.outcomes[0].samples / ideal.outcomes[0].samples
    assert 0 < varuna.goodput.mean < 1
    assert varuna.goodput.half_width is None


def test_a_sample_costs_the_time_of_all_present_nodes() -> None:
    [ideal] = compare(JOB, lambda _: TRACE, PARAMETERS, most_traces=1, policies=["ideal"]).results
    cost = ideal.cost_per_sample(7.2)
    assert cost is not None
    node_s = 6 * 300.0 + 5 * 300.0 + 6 * 400.0
    assert cost.mean == pytest.approx(node_s * 0.002 / ideal.outcomes[0].samples)


def test_without_a_committed_sample_there_is_no_goodput_and_no_cost() -> None:
    trace = make_trace(2, (0.1, "remove", "n0"), end_s=10.0)
    [ideal] = compare(JOB, lambda _: trace, PARAMETERS, most_traces=1, policies=["ideal"]).results
    assert ideal.samples.mean == 0
    assert ideal.goodput is None and ideal.cost_per_sample(1.0) is None


def test_a_policy_whose_assumption_is_violated_is_named_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An assumption may turn out to be violated on a later trace; results of earlier ones are then dropped."""
    asked = []

    def reluctant(name: str, job: ReplayJob, *rest: object) -> object:
        asked.append(name)
        if name == "varuna" and asked.count("varuna") == 3:
            raise PolicyExcluded("it wants two nodes")
        return make_policy(name, job, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(module, "make_policy", reluctant)
    found = compare(JOB, lambda seed: generate(MODEL, seed), PARAMETERS, policies=["varuna"], most_traces=4)
    assert [(each.policy, each.reason) for each in found.excluded] == [("varuna", "it wants two nodes")]
    assert [result.policy for result in found.results] == ["ideal"]
    assert asked.count("varuna") == 3


def test_the_half_width_is_that_of_students_t() -> None:
    values = [1.0, 2.0, 4.0, 4.5]
    found = estimate(values)
    low, high = stats.t.interval(0.95, 3, loc=found.mean, scale=stats.sem(values))
    assert found.half_width == pytest.approx((high - low) / 2)
    assert found.mean == pytest.approx((low + high) / 2)
    assert not found.is_precise
    assert estimate([1.0, 1.0, 1.01]).is_precise and not estimate([1.0]).is_precise


@pytest.mark.long
def test_generated_traces_are_added_until_every_policy_is_known_precisely() -> None:
    found = compare(JOB, lambda seed: generate(MODEL, seed), PARAMETERS, seed=3)
    count = len(found.traces)
    assert count > LEAST_TRACES and found.is_precise
    assert found.traces[1] == generate(MODEL, 4)
    fewer = compare(JOB, lambda seed: generate(MODEL, seed), PARAMETERS, seed=3, most_traces=count - 1)
    assert len(fewer.traces) == count - 1 and not fewer.is_precise
    again = compare(JOB, lambda seed: generate(MODEL, seed), PARAMETERS, seed=3)
    assert again.results == found.results


def test_progress_ends_at_its_total_and_never_goes_back() -> None:
    seen: list[tuple[int, int]] = []
    compare(
        JOB,
        lambda seed: generate(MODEL, seed),
        PARAMETERS,
        policies=["varuna"],
        most_traces=3,
        on_progress=lambda done, total: seen.append((done, total)),
    )
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert seen[0] == (0, 2 * 3 * 120)
    assert all(done <= total for done, total in seen)
    assert math.isclose(seen[-1][0], seen[-1][1], rel_tol=0.2)


def test_wrong_requests_are_rejected() -> None:
    with pytest.raises(ConfigurationError, match="there is no policy 'magic'"):
        compare(JOB, lambda _: TRACE, PARAMETERS, most_traces=1, policies=["magic"])
    with pytest.raises(ConfigurationError, match="--repeat"):
        compare(JOB, lambda seed: generate(MODEL, seed), PARAMETERS, most_traces=0)
