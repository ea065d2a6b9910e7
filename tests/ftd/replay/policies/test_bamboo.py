"""Bamboo's rules. The job's 8 layers (100 MB each, 200 MB with redundancy) need pipelines of 4 nodes of 400 MB."""

from dataclasses import replace

import pytest
from msgspec import structs

from ftd.replay.outcome import Outcome
from ftd.replay.parameters import read_parameters
from ftd.replay.policies.registry import make_policy
from ftd.replay.policy import PolicyExcluded
from ftd.replay.replay import replay
from tests.helpers.replay_jobs import linear, make_job, make_trace

JOB = make_job()
RECONFIGURE_S = 60.0 + 0.8 / 0.205
RESTART_S = 30.0 + 0.8 / 0.205


def run(*events: tuple[float, str, str], end_s: float, nodes: int = 9, notice_s: float = 0.0) -> Outcome:
    policy = make_policy("bamboo", JOB, read_parameters())
    return replay(policy, make_trace(nodes, *events, end_s=end_s, notice_s=notice_s))


def iteration_s(nodes: int) -> float:
    """Return the time of an iteration on so many nodes that train: redundancy takes half of the throughput."""
    found = JOB.iteration_s(nodes)
    assert found is not None
    return 2 * found


def test_redundant_computation_takes_half_of_the_throughput_and_an_incomplete_pipeline_is_idle() -> None:
    found = run(end_s=100.0)
    assert found.iterations == int(100 / iteration_s(8))
    assert found.seconds["reduced"] > 50.0


def test_a_failure_slows_the_iteration_in_flight_and_then_the_nodes_form_new_pipelines() -> None:
    at_s = 10.25 * iteration_s(8)
    found = run((at_s, "remove", "n1"), end_s=200.0)
    assert found.seconds["redone"] == pytest.approx(0.0)
    assert found.seconds["detecting"] == pytest.approx(0.024)
    assert found.seconds["restarting"] == 60.0 and found.seconds["moving"] == pytest.approx(0.8 / 0.205)
    resumed_s = at_s + 0.024 + 1.5 * 0.75 * iteration_s(8) + RECONFIGURE_S
    # The idle node replaces the failed one.
    assert found.iterations == 11 + int((200.0 - resumed_s) / iteration_s(8))


def test_adjacent_failures_lose_the_state_and_others_do_not() -> None:
    adjacent = run((50.0, "remove", "n1"), (50.0, "remove", "n2"), end_s=130.0)
    assert adjacent.seconds["restarting"] == 30.0 and adjacent.seconds["redone"] == pytest.approx(50.0)
    around = run((50.0, "remove", "n0"), (50.0, "remove", "n3"), end_s=130.0)
    assert around.seconds["redone"] == pytest.approx(50.0), "the last stage holds the first one's state"
    apart = run((50.0, "remove", "n1"), (50.0, "remove", "n3"), end_s=130.0)
    assert apart.seconds["redone"] == pytest.approx(0.0) and apart.seconds["restarting"] == 60.0
    pipelines = run((50.0, "remove", "n3"), (50.0, "remove", "n4"), end_s=130.0)
    assert pipelines.seconds["redone"] == pytest.approx(0.0)


def test_the_node_that_took_over_must_not_fail_before_the_reconfiguration_is_complete() -> None:
    early = run((50.0, "remove", "n2"), (70.0, "remove", "n1"), end_s=130.0, nodes=12)
    assert early.seconds["redone"] > 50.0
    late = run((50.0, "remove", "n2"), (129.0, "remove", "n1"), end_s=130.0, nodes=12)
    assert late.seconds["redone"] == pytest.approx(0.0)


def test_another_failure_during_a_reconfiguration_starts_it_again() -> None:
    found = run((50.0, "remove", "n0"), (100.0, "remove", "n4"), end_s=300.0, nodes=12)
    slow_s = found.recoveries[0].at_s
    assert slow_s == 50.0 and found.seconds["redone"] == pytest.approx(0.0)
    assert 60.0 < found.seconds["restarting"] < 120.0


def test_nodes_that_join_are_idle_until_they_complete_a_pipeline() -> None:
    idle = run((50.0, "add", "x"), end_s=100.0)
    assert idle.seconds["restarting"] == 0.0
    complete = run(*((50.0, "add", f"x{index}") for index in range(3)), end_s=200.0)
    assert complete.seconds["restarting"] == 60.0 and complete.seconds["redone"] == 0.0
    assert complete.recoveries[0].at_s == pytest.approx(50.0 + iteration_s(8) - 50.0 % iteration_s(8))


def test_an_idle_node_that_fails_interrupts_nothing() -> None:
    assert run((50.0, "remove", "n8"), end_s=100.0).recoveries == ()


def test_with_notice_the_nodes_reconfigure_before_the_removal() -> None:
    found = run((100.0, "remove", "n0"), end_s=200.0, notice_s=30.0)
    assert found.seconds["detecting"] == 0.0 and found.seconds["redone"] == 0.0
    assert 100.0 - iteration_s(8) < found.recoveries[0].at_s <= 100.0


def test_with_too_few_nodes_the_job_waits_with_its_state() -> None:
    found = run((50.0, "remove", "n0"), (100.0, "add", "y"), end_s=101.0, nodes=4)
    assert found.seconds["waiting"] > 30.0 and found.seconds["redone"] == pytest.approx(0.0)


def test_published_throughput_brings_its_own_reconfiguration_and_loses_no_checkpoint() -> None:
    job = make_job(published={"bamboo": linear(nodes=24, samples_per_s=24.0)})
    policy = make_policy("bamboo", job, read_parameters(), "published")
    trace = make_trace(
        24, (10.0, "remove", "n1"), (50.0, "remove", "n3"), (50.0, "remove", "n4"), end_s=100.0
    )
    found = replay(policy, trace)
    assert found.seconds["restarting"] == 5.0 + 30.0
    assert found.seconds["redone"] < 10 / 23


def test_jobs_without_a_next_stage_or_room_for_it_are_excluded() -> None:
    with pytest.raises(PolicyExcluded, match="one layer"):
        make_policy("bamboo", make_job(layers=1, fewest=1), read_parameters())
    memory = structs.replace(JOB.profile, device_memory_bytes=150_000_000)
    with pytest.raises(PolicyExcluded, match="does not fit into memory"):
        make_policy("bamboo", replace(JOB, profile=memory), read_parameters())
    with pytest.raises(PolicyExcluded, match="no published throughput under bamboo"):
        make_policy("bamboo", JOB, read_parameters(), "published")
