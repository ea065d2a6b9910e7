"""ReCycle's rules. The job has 4 stages of 200 MB, so 12 nodes are 3 pipelines: n0 to n3, n4 to n7, n8 to n11."""

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from ftd.replay.job import ReplayJob
from ftd.replay.parameters import read_parameters
from ftd.replay.policies.registry import make_policy
from ftd.replay.policy import Pause, PolicyExcluded, Reaction, RecoveryPolicy
from ftd.replay.replay import replay
from ftd.replay.rerouting import Pipeline, estimate_iteration_s
from tests.helpers.replay_jobs import change, make_job, make_trace, names

JOB = make_job(fewest=4)
PARAMETERS = read_parameters()
DETECTED = Pause(category="detecting", seconds=0.024)
REROUTED = Pause(category="restarting", seconds=2.0)
COPIED = Pause(category="moving", seconds=0.2)
"""The state of a stage, 200 MB, at the 1 GB/s of the job's link."""


def started(nodes: int, job: ReplayJob = JOB) -> RecoveryPolicy:
    policy = make_policy("recycle", job, PARAMETERS)
    assert policy.start(names(nodes)).running is not None
    return policy


def failing(policy: RecoveryPolicy, nodes: tuple[str, ...], *gone: str, at_s: float = 100.0) -> Reaction:
    """Return the reaction to the failure of ``gone``, which are among ``nodes``."""
    left = tuple(name for name in nodes if name not in gone)
    reaction = policy.change(change(at_s, left, removed=gone))
    assert reaction is not None
    return reaction


def iteration_s(reaction: Reaction) -> float:
    assert reaction.running is not None
    return reaction.running.iteration_s


def fault_free_s(nodes: int) -> float:
    found = JOB.iteration_s(nodes)
    assert found is not None
    return found


def test_a_failure_loses_the_iteration_in_flight_and_moves_no_state() -> None:
    reaction = failing(started(12), names(12), "n6")
    assert (reaction.undo, reaction.pauses) == ("iteration", (DETECTED, REROUTED))
    # The two live workers of the stage have 32 microbatches instead of 22, and 3 bubbles less.
    assert iteration_s(reaction) == pytest.approx(fault_free_s(12) * 32 / (22 + 4 - 1))


def test_which_worker_of_a_stage_fails_makes_no_difference() -> None:
    found = {node: iteration_s(failing(started(12), names(12), node)) for node in ("n1", "n5", "n9")}
    assert len(set(found.values())) == 1


@pytest.mark.parametrize(
    ("settings", "slots"),
    [
        ("", 27),
        ("staggered = false", 29),
        ("staggered = false\ndecoupled = false", 36),
        ("staggered = false\ndecoupled = false\nmemory_cap = '1f1b'", 44),
        ("baseline = 'same'", 27 * 27 / 19),
    ],
)
def test_the_iteration_is_longer_as_in_the_small_case_of_rerouting(
    settings: str, slots: float, tmp_path: Path
) -> None:
    """With 18 microbatches the job is the small case, which takes 27 slots without failures (19 with the paper's
    techniques).
    """
    file = tmp_path / "parameters.toml"
    file.write_text(f"[recycle]\n{settings}\n", encoding="utf-8")
    job = replace(JOB, policy=msgspec.structs.replace(JOB.policy, global_batch=18))
    policy = make_policy("recycle", job, read_parameters(file))
    before = policy.start(names(12))
    assert iteration_s(failing(policy, names(12), "n6")) == pytest.approx(iteration_s(before) * slots / 27)


def test_equal_pipelines_may_take_the_time_that_the_planner_has_for_them(tmp_path: Path) -> None:
    """Nine nodes hold 10 layers best as pipelines of 5 and 4 nodes. Three equal ones have a stage of 4 layers, and
    22 of the 64 microbatches.
    """
    file = tmp_path / "parameters.toml"
    file.write_text('[recycle]\nbaseline = "equal"\n', encoding="utf-8")
    job = make_job(layers=10, fewest=3)
    found = {}
    for baseline, parameters in {"1f1b": PARAMETERS, "equal": read_parameters(file)}.items():
        policy = make_policy("recycle", job, parameters)
        found[baseline] = iteration_s(policy.start(names(9)))
        after = iteration_s(failing(policy, names(9), "n4"))
        found[f"{baseline}, a node lost"] = after / found[baseline]
    assert found["1f1b"] == job.iteration_s(9)
    assert found["equal"] == pytest.approx(22 * 4 * 0.03 + 0.12)  # The first and the last one's way through.
    assert found["equal, a node lost"] == pytest.approx(found["1f1b, a node lost"])


def test_a_node_that_joins_takes_the_empty_position_and_copies_the_state_from_a_peer() -> None:
    policy = started(12)
    left = tuple(name for name in names(12) if name != "n6")
    failing(policy, names(12), "n6")
    reaction = policy.change(change(200.0, (*left, "new"), added=("new",), boundary_s=0.5))
    assert reaction is not None
    assert (reaction.undo, reaction.after_s, reaction.pauses) == ("nothing", 0.5, (REROUTED, COPIED))
    assert iteration_s(reaction) == fault_free_s(12)


def test_a_node_that_joins_during_a_pause_copies_after_it() -> None:
    policy = started(12)
    failing(policy, names(12), "n6")
    nodes = (*(name for name in names(12) if name != "n6"), "new")
    reaction = policy.change(change(101.0, nodes, added=("new",), running=False))
    assert reaction is not None
    assert [pause.category for pause in reaction.pauses] == ["restarting", "restarting", "moving"]
    assert reaction.pauses[0].seconds == pytest.approx(2.024 - 1)
    # Until the copy is complete, the two others are the only ones with the state of the stage.
    assert failing(policy, nodes, "n2", "n10", at_s=102.0).undo == "checkpoint"


def test_a_spare_takes_the_place_of_a_dead_node_at_once() -> None:
    reaction = failing(started(13), names(13), "n6")
    assert reaction.pauses == (DETECTED, REROUTED, COPIED)
    assert iteration_s(reaction) == fault_free_s(12)
    idle = started(13).change(change(100.0, names(12), removed=("n12",)))
    assert idle is not None and (idle.pauses, idle.undo) == ((), "nothing")


def test_spares_that_make_a_whole_pipeline_become_one() -> None:
    policy = started(12)
    spare = policy.change(change(100.0, names(15), added=("n12", "n13", "n14"), boundary_s=0.5))
    assert spare is not None and (spare.pauses, iteration_s(spare)) == ((), fault_free_s(12))
    reaction = policy.change(change(200.0, names(16), added=("n15",), boundary_s=0.5))
    assert reaction is not None and reaction.pauses == (REROUTED, COPIED)
    assert iteration_s(reaction) == fault_free_s(16)


def test_failures_are_spread_over_the_stages() -> None:
    """Two of the three workers of a stage are dead; a worker of another stage moves there and copies its state."""
    reaction = failing(started(12), names(12), "n2", "n6")
    assert reaction.pauses == (DETECTED, REROUTED, COPIED)
    policy = started(12)
    failing(policy, names(12), "n2")
    elsewhere = failing(policy, tuple(name for name in names(12) if name != "n2"), "n7", at_s=200.0)
    assert elsewhere.pauses == (DETECTED, REROUTED)
    assert iteration_s(reaction) == pytest.approx(iteration_s(elsewhere))


def test_a_lost_stage_starts_the_job_again_from_a_checkpoint_on_the_nodes_that_are_left() -> None:
    loading = (DETECTED, Pause(category="restarting", seconds=4.0), JOB.state_bytes / 0.735e9)
    reaction = failing(started(12), names(12), "n2", "n6", "n10")
    assert reaction.undo == "checkpoint"
    assert (*reaction.pauses[:2], reaction.pauses[2].seconds) == loading
    # Of the 9 nodes, 8 are two pipelines and one is a spare.
    assert iteration_s(reaction) == fault_free_s(8)


def test_a_job_without_enough_nodes_waits_and_goes_back_to_its_checkpoint() -> None:
    trace = make_trace(4, (4000.0, "remove", "n0"), (4100.0, "add", "n0"), end_s=4200.0)
    found = replay(make_policy("recycle", JOB, PARAMETERS), trace)
    every = round(3600 / fault_free_s(4))
    assert found.seconds["waiting"] == pytest.approx(100 - 0.024)
    load_s = JOB.state_bytes / 0.735e9
    assert found.seconds["restarting"] == 4.0 and found.seconds["moving"] == pytest.approx(load_s)
    assert found.seconds["redone"] == pytest.approx(4000 - 0.19 - every * fault_free_s(4))
    assert found.iterations == every + int((100 - 4 - load_s) / fault_free_s(4))


def test_with_notice_a_node_leaves_at_the_last_end_of_an_iteration_unless_its_stage_would_be_lost() -> None:
    trace = make_trace(12, (100.0, "remove", "n0"), end_s=200.0, notice_s=30.0)
    found = replay(make_policy("recycle", JOB, PARAMETERS), trace)
    assert found.seconds["redone"] == 0.0 and found.seconds["detecting"] == 0.0
    (recovery,) = found.recoveries
    assert 100 - fault_free_s(12) < recovery.at_s <= 100
    last = make_trace(4, (100.0, "remove", "n0"), (150.0, "add", "n0"), end_s=200.0, notice_s=30.0)
    assert replay(make_policy("recycle", JOB, PARAMETERS), last).seconds["redone"] > 0


def test_recomputed_activations_are_no_work_for_the_weights() -> None:
    """A stage that recomputes has twice the forward's time for its input, and once for its weights."""
    recomputing = make_job(fewest=4)
    policy = msgspec.structs.replace(recomputing.policy, activation_checkpointing="full")
    started_policy = make_policy("recycle", replace(recomputing, policy=policy), PARAMETERS)
    before = started_policy.start(names(12))
    work = [
        Pipeline(
            forward_s=(0.02,) * 4,
            backward_input_s=(0.04,) * 4,
            backward_weight_s=(0.02,) * 4,
            microbatches=share,
        )
        for share in (22, 21, 21)
    ]
    expected = estimate_iteration_s(work, [(1, 2)], decoupled=True, staggered=True) / estimate_iteration_s(
        work, decoupled=False, staggered=False, memory_cap="1f1b"
    )
    reaction = failing(started_policy, names(12), "n6")
    assert iteration_s(reaction) / iteration_s(before) == pytest.approx(expected)


def test_divided_optimizer_state_is_excluded() -> None:
    job = replace(make_job(fewest=4), policy=msgspec.structs.replace(JOB.policy, zero1=True))
    with pytest.raises(PolicyExcluded, match="ZeRO-1"):
        make_policy("recycle", job, PARAMETERS)
