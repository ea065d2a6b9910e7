"""torchft's rules. The job's state is 800 MB, its link moves 1 GB/s, and its replicas fit on one node or need two."""

from dataclasses import replace
from pathlib import Path

import pytest
from msgspec.structs import replace as changed

from ftd.replay.outcome import Outcome
from ftd.replay.parameters import read_parameters
from ftd.replay.policies.registry import make_policy
from ftd.replay.policy import PolicyExcluded
from ftd.replay.replay import replay
from tests.helpers.replay_jobs import make_job, make_trace

JOB = make_job(fewest=1)
READY_S = 2.05 + 0.8


def run(*events: tuple[float, str, str], end_s: float, nodes: int = 4) -> Outcome:
    return replay(make_policy("torchft", JOB, read_parameters()), make_trace(nodes, *events, end_s=end_s))


def iteration_s(nodes: int) -> float:
    found = JOB.iteration_s(nodes)
    assert found is not None
    return found


def test_a_failure_loses_one_attempt_and_the_batch_shrinks() -> None:
    found = run((100.0, "remove", "n0"), end_s=200.0)
    assert found.seconds["detecting"] == 0.53
    assert found.seconds["redone"] == pytest.approx(100 % iteration_s(4))
    before, after = (span.samples / (span.end_s - span.begin_s) for span in found.spans)
    assert before == pytest.approx(64 / iteration_s(4))
    assert after == pytest.approx(min(48 / iteration_s(4), 64 / iteration_s(3)))


def test_a_node_that_returns_starts_while_the_others_train_and_joins_at_an_end_of_an_iteration() -> None:
    found = run((100.0, "remove", "n0"), (120.0, "add", "n0"), end_s=200.0)
    assert found.seconds["restarting"] == pytest.approx(0.1)
    assert found.seconds["redone"] == pytest.approx(100 % iteration_s(4))
    assert found.recoveries[-1].at_s == pytest.approx(120.0 + READY_S, abs=iteration_s(4))
    assert found.recoveries[-1].at_s >= 120.0 + READY_S
    last = found.spans[-1]
    assert last.samples / (last.end_s - last.begin_s) == pytest.approx(64 / iteration_s(4))


def test_too_few_groups_for_the_job_wait_with_their_state() -> None:
    job = replace(JOB, policy=changed(JOB.policy, minimum="oobleck"))
    trace = make_trace(2, (100.0, "remove", "n0"), (120.0, "add", "n0"), end_s=200.0)
    found = replay(make_policy("torchft", job, read_parameters()), trace)
    assert found.seconds["waiting"] == pytest.approx(20.0 + READY_S - 0.53)
    assert [recovery.kind for recovery in found.recoveries] == ["loss"]
    assert found.samples <= replay(make_policy("ideal", job, read_parameters()), trace).samples


def test_more_groups_than_at_the_start_divide_the_jobs_batch() -> None:
    found = run((100.0, "add", "x"), end_s=300.0)
    last = found.spans[-1]
    assert last.samples / (last.end_s - last.begin_s) == pytest.approx(64 / iteration_s(5))


def test_checkpoints_are_as_far_apart_with_more_groups_whose_iterations_are_shorter() -> None:
    found = run(*((100.0, "add", f"x{number}") for number in range(7)), end_s=6100.0, nodes=1)
    assert found.seconds["stalled"] == pytest.approx(10 * 0.19, abs=0.19)


def test_a_node_that_fails_while_it_starts_interrupts_nothing() -> None:
    found = run((100.0, "add", "x"), (101.0, "remove", "x"), end_s=200.0)
    assert found.recoveries == () and found.iterations == int(200 / iteration_s(4))


def test_a_group_that_is_ready_in_a_pause_joins_after_it() -> None:
    found = run((100.0, "add", "x"), (100.0 + READY_S - 0.1, "remove", "n0"), end_s=200.0)
    assert found.seconds["detecting"] == pytest.approx(0.53)
    assert found.seconds["restarting"] == pytest.approx(0.1)


def test_another_failure_in_the_pause_begins_it_again() -> None:
    found = run((100.0, "remove", "n0"), (100.3, "remove", "n1"), end_s=200.0)
    assert found.seconds["detecting"] == pytest.approx(0.83)
    assert found.seconds["redone"] == pytest.approx(100 % iteration_s(4))


def test_without_a_group_the_job_goes_back_to_the_checkpoint() -> None:
    found = run((100.0, "remove", "n0"), (150.0, "add", "n0"), end_s=170.0, nodes=1)
    assert found.seconds["waiting"] == pytest.approx(50 - 0.53)
    assert found.seconds["redone"] == pytest.approx(100.0)
    assert found.seconds["moving"] == pytest.approx(0.8 / 0.81)


def test_a_replica_of_several_nodes_is_excluded_unless_groups_may_have_them(tmp_path: Path) -> None:
    job = make_job()
    with pytest.raises(PolicyExcluded, match="a replica of the model needs 2 nodes"):
        make_policy("torchft", job, read_parameters())
    path = tmp_path / "parameters.toml"
    path.write_text("[torchft]\nseveral_nodes = true\n", encoding="utf-8")
    policy = make_policy("torchft", job, read_parameters(path))
    # Groups are (n0, n1) and (n2, n3). n1 is idle until n4 and it form a group.
    found = replay(policy, make_trace(5, (100.0, "remove", "n0"), end_s=200.0))
    assert found.seconds["detecting"] == 0.53 and found.seconds["restarting"] == pytest.approx(0.1)
    assert found.seconds["reduced"] > 0
