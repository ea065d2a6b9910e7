"""Oobleck's rules. The job's templates have 2 nodes and more, each of which holds up to 4 of 8 layers (100 MB)."""

import pytest

from ftd.replay.parameters import read_parameters
from ftd.replay.policies.registry import make_policy
from ftd.replay.policy import Pause, PolicyExcluded, RecoveryPolicy
from ftd.replay.replay import replay
from tests.helpers.replay_jobs import change, linear, make_job, make_trace, names

JOB = make_job()
PARAMETERS = read_parameters()
FAILURE = (Pause(category="detecting", seconds=0.024), Pause(category="restarting", seconds=2.0))


def started(nodes: int) -> RecoveryPolicy:
    policy = make_policy("oobleck", JOB, PARAMETERS)
    assert policy.start(names(nodes)).running is not None
    return policy


def without(nodes: int, *gone: str) -> tuple[str, ...]:
    return tuple(name for name in names(nodes) if name not in gone)


def test_a_failure_loses_the_iteration_in_flight_and_copies_the_missing_layers() -> None:
    policy = started(6)
    # The survivor of the broken pair borrows no node: [2, 2, 1] merges to [2, 3], whose middle stage is copied.
    reaction = policy.change(change(100.0, without(6, "n5"), removed=("n5",)))
    assert reaction is not None and reaction.running is not None
    assert reaction.undo == "iteration" and reaction.pauses[:2] == FAILURE
    # The new stages are layers 0 to 2, 3 to 5 and 6 to 7. Pipelines keep their nodes, so the middle one goes to a
    # node with layers 0 to 3, which receives layers 4 and 5 at 1 GB/s.
    assert reaction.pauses[2] == Pause(category="moving", seconds=0.2)
    assert reaction.running.iteration_s == JOB.iteration_s(5)


def test_nodes_that_join_are_taken_in_at_the_end_of_the_iteration_without_a_loss() -> None:
    reaction = started(4).change(change(100.0, names(6), added=("n4", "n5"), boundary_s=1.5))
    assert reaction is not None and reaction.running is not None
    assert (reaction.undo, reaction.after_s) == ("nothing", 1.5)
    assert [pause.category for pause in reaction.pauses] == ["restarting", "moving"]
    assert reaction.running.iteration_s == JOB.iteration_s(6)


def test_below_f_plus_1_replicas_the_job_stores_its_progress_and_waits() -> None:
    store_s = JOB.state_bytes / 0.735e9
    trace = make_trace(4, (100.0, "remove", "n0"), (200.0, "add", "n0"), end_s=300.0)
    found = replay(make_policy("oobleck", JOB, PARAMETERS), trace)
    iteration_s = JOB.iteration_s(4)
    assert iteration_s is not None
    assert found.seconds["stalled"] == pytest.approx(store_s)
    assert found.seconds["waiting"] == pytest.approx(100 - 0.024 - store_s)
    assert found.seconds["restarting"] == 4.0
    assert found.seconds["moving"] == pytest.approx(store_s)
    assert found.seconds["redone"] == pytest.approx(100 % iteration_s)


def test_progress_that_was_stored_survives_a_failure_while_it_is_loaded() -> None:
    events = ((100.0, "remove", "n0"), (200.0, "add", "n0"), (204.5, "remove", "n1"), (300.0, "add", "n1"))
    found = replay(make_policy("oobleck", JOB, PARAMETERS), make_trace(4, *events, end_s=301.0))
    iteration_s = JOB.iteration_s(4)
    assert iteration_s is not None
    assert found.iterations == int(100 / iteration_s)


def test_a_layer_that_no_survivor_holds_is_loaded_from_the_checkpoint() -> None:
    # The pairs are (n0, n1), (n2, n3), …; the first of each holds the first half of the model.
    firsts, pairs = ("n0", "n2", "n4", "n6"), ("n0", "n1", "n2", "n3")
    lost = started(8).change(change(100.0, without(8, *firsts), removed=firsts))
    assert lost is not None and lost.undo == "checkpoint"
    kept = started(8).change(change(100.0, without(8, *pairs), removed=pairs))
    assert kept is not None and kept.undo == "iteration"


@pytest.mark.parametrize(("later_s", "undo"), [(0.1, "checkpoint"), (10.0, "iteration")])
def test_a_failure_before_the_copies_are_complete_finds_the_layers_where_they_were(
    later_s: float, undo: str
) -> None:
    policy = started(8)
    gone = ("n0", "n2", "n4")
    assert policy.change(change(100.0, without(8, *gone), removed=gone)) is not None
    # n6 has the only copy of the first half until the others have received it.
    reaction = policy.change(
        change(100.0 + later_s, without(8, *gone, "n6"), removed=("n6",), running=later_s > 5)
    )
    assert reaction is not None and reaction.undo == undo
    assert reaction.pauses[:1] == FAILURE[:1]


def test_with_notice_nodes_leave_at_the_last_end_of_an_iteration_and_their_removal_costs_nothing() -> None:
    trace = make_trace(6, (100.0, "remove", "n0"), end_s=200.0, notice_s=30.0)
    found = replay(make_policy("oobleck", JOB, PARAMETERS), trace)
    assert found.seconds["redone"] == 0.0 and found.seconds["detecting"] == 0.0
    (recovery,) = found.recoveries
    iteration_s = JOB.iteration_s(6)
    assert iteration_s is not None and 100 - iteration_s < recovery.at_s <= 100


def test_published_throughput_has_a_pause_for_each_change_and_goes_by_the_number_of_nodes() -> None:
    job = make_job(published={"oobleck": linear()})
    trace = make_trace(10, (98.5, "remove", "n0"), end_s=200.0)
    found = replay(make_policy("oobleck", job, PARAMETERS, "published"), trace)
    assert found.seconds["restarting"] == 5.0
    assert found.seconds["redone"] == pytest.approx(0.5)
    assert found.iterations == 98 + int((200 - 98.5 - 5) / (10 / 9))


def test_a_job_without_published_throughput_is_excluded() -> None:
    with pytest.raises(PolicyExcluded, match="no published throughput under oobleck"):
        make_policy("oobleck", JOB, PARAMETERS, "published")
