"""Varuna's rules. The job's pipelines have 2 nodes; its state is 800 MB."""

import pytest

from ftd.replay.outcome import Outcome
from ftd.replay.parameters import read_parameters
from ftd.replay.policies.registry import make_policy
from ftd.replay.policy import PolicyExcluded
from ftd.replay.replay import replay
from tests.helpers.replay_jobs import linear, make_job, make_trace

JOB = make_job()
PUBLISHED = make_job(
    published={"varuna": linear(restart_s=20.0, checkpoint_every=10, checkpoint_stall_s=5.0, granularity=2)}
)
"""On 10 nodes an iteration takes 1 s, on 8 or 9 nodes 1.25 s."""


def run(
    *events: tuple[float, str, str],
    end_s: float,
    nodes: int = 10,
    name: str = "varuna",
    notice_s: float = 0.0,
) -> Outcome:
    policy = make_policy(name, PUBLISHED, read_parameters(), "published")
    return replay(policy, make_trace(nodes, *events, end_s=end_s, notice_s=notice_s))


def test_every_tenth_iteration_stops_for_a_checkpoint_and_a_failure_falls_back_to_it() -> None:
    # Checkpoints end at 15 and 30 s. The failure at 37.5 s undoes 7 iterations and the one in flight.
    found = run((37.5, "remove", "n0"), end_s=67.5)
    assert found.seconds["stalled"] == 10.0
    assert found.seconds["redone"] == 7.5
    assert found.seconds["restarting"] == 20.0
    assert found.iterations == 20 + 8


def test_only_whole_pipelines_train() -> None:
    found = run(end_s=10.0, nodes=9)
    assert found.iterations == 8 and found.seconds["reduced"] == pytest.approx(10 / 9)
    common = replay(make_policy("varuna", JOB, read_parameters()), make_trace(5, end_s=30.0))
    iteration_s = JOB.iteration_s(4)
    assert iteration_s is not None and common.iterations == int(30 / iteration_s)


def test_a_failure_during_a_restart_starts_it_again_and_undoes_nothing_more() -> None:
    found = run((16.0, "remove", "n0"), (26.0, "remove", "n1"), end_s=56.0)
    assert found.seconds["restarting"] == 30.0 and found.seconds["redone"] == 1.0
    assert found.iterations == 10 + 8


def test_a_failure_during_a_checkpoint_falls_back_to_the_one_before() -> None:
    assert run((27.0, "remove", "n0"), end_s=28.0).iterations == 10


def test_nodes_that_join_wait_for_a_checkpoint_at_the_end_of_the_iteration() -> None:
    found = run((2.0, "add", "x"), (2.0, "add", "y"), end_s=42.5, nodes=8)
    assert found.seconds["redone"] == 0.0
    assert found.seconds["stalled"] == 5.0 + 5.0
    assert found.seconds["restarting"] == 20.0
    # Two of 1.25 s until 2.5 s, and ten of 1 s from 27.5 s on.
    assert found.iterations == 2 + 10


def test_the_checkpoint_for_a_join_is_one_to_fall_back_to() -> None:
    assert (
        run((2.0, "add", "x"), (2.0, "add", "y"), (29.5, "remove", "x"), end_s=30.0, nodes=8).iterations == 2
    )


def test_a_node_that_completes_no_pipeline_is_idle_and_interrupts_nothing() -> None:
    found = run((2.0, "add", "x"), end_s=10.0, nodes=8)
    assert found.iterations == 8 and found.seconds["restarting"] == 0.0
    assert found.seconds["reduced"] == pytest.approx(8 / 9)


def test_an_idle_node_that_fails_interrupts_nothing() -> None:
    policy = make_policy("varuna", JOB, read_parameters())
    found = replay(policy, make_trace(5, (10.0, "remove", "n4"), end_s=20.0))
    assert found.seconds["restarting"] == 0.0 and found.seconds["redone"] == 0.0


@pytest.mark.parametrize(
    ("at_s", "notice_s", "redone_s", "stalled_s"), [(9.5, 7.0, 0.0, 5.0), (7.7, 5.5, 7.7, 0.0)]
)
def test_with_enough_notice_a_checkpoint_comes_before_the_removal(
    at_s: float, notice_s: float, redone_s: float, stalled_s: float
) -> None:
    # The notices come 0.5 s and 0.8 s before the end of an iteration, and a checkpoint takes 5 s.
    found = run((at_s, "remove", "n0"), end_s=30.0, notice_s=notice_s)
    assert found.seconds["redone"] == pytest.approx(redone_s)
    assert found.seconds["stalled"] == stalled_s
    assert found.seconds["restarting"] == 20.0


def test_without_nodes_for_a_pipeline_the_job_waits_and_then_restarts() -> None:
    found = run((2.0, "remove", "n0"), (12.0, "add", "n0"), end_s=34.0, nodes=2)
    assert found.seconds["waiting"] == 10.0
    assert found.seconds["restarting"] == 20.0
    assert found.seconds["redone"] == 2.0


def test_without_the_cost_of_checkpoints_a_failure_undoes_two_iterations_at_most() -> None:
    found = run((37.5, "remove", "n0"), end_s=57.5, name="varuna-no-checkpoints")
    assert found.seconds["stalled"] == 0.0
    assert found.seconds["redone"] == 1.5 and found.iterations == 36


def test_other_jobs_store_and_load_their_bytes() -> None:
    iteration_s = JOB.iteration_s(4)
    assert iteration_s is not None
    trace = make_trace(5, (15 * iteration_s + 9.0, "remove", "n0"), end_s=160.0)
    found = replay(make_policy("varuna", JOB, read_parameters()), trace)
    assert found.recoveries[0].seconds == pytest.approx({"restarting": 31.0, "moving": 0.8 / 0.108})
    assert found.seconds["stalled"] == pytest.approx(2 * (7.0 + 0.8 / 0.735))


def test_a_job_without_published_throughput_is_excluded() -> None:
    with pytest.raises(PolicyExcluded, match="no published throughput under varuna"):
        make_policy("varuna", JOB, read_parameters(), "published")
