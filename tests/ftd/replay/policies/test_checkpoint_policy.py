"""Rules of restarts from disk. The job's state is 800 MB, and 2 nodes hold it."""

from pathlib import Path

import pytest

from ftd.errors import ConfigurationError
from ftd.replay.outcome import Outcome
from ftd.replay.parameters import Parameters, read_parameters
from ftd.replay.policies.registry import make_policy
from ftd.replay.policy import Reaction
from ftd.replay.replay import replay
from planner.intervals import IntervalCost, best_interval
from tests.helpers.replay_jobs import change, make_job, make_trace, names

JOB = make_job()
LOAD_S = 0.8 / 1.36
STALL_S = 0.4 / 22
WRITE_S = 0.8 / 0.81


@pytest.fixture(name="set_parameters")
def _set_parameters(tmp_path: Path) -> Path:
    return tmp_path / "parameters.toml"


def parameters(path: Path, text: str) -> Parameters:
    path.write_text(f"[checkpoint]\n{text}\n", encoding="utf-8")
    return read_parameters(path)


def iteration_s(nodes: int) -> float:
    found = JOB.iteration_s(nodes)
    assert found is not None
    return found


def run(
    *events: tuple[float, str, str], end_s: float, nodes: int = 4, given: Parameters | None = None
) -> Outcome:
    policy = make_policy("checkpoint", JOB, given or read_parameters())
    return replay(policy, make_trace(nodes, *events, end_s=end_s))


def test_a_failure_restarts_from_the_newest_complete_checkpoint(set_parameters: Path) -> None:
    given = parameters(set_parameters, f"every_s = {10 * iteration_s(4)}")
    cycle_s = 10 * iteration_s(4) + STALL_S
    found = run((2 * cycle_s + 2.0, "remove", "n0"), end_s=2 * cycle_s + 30.0, given=given)
    assert found.recoveries[0].seconds == pytest.approx(
        {"detecting": 15.0, "restarting": 4.0, "moving": LOAD_S}
    )
    assert found.seconds["redone"] == pytest.approx(2.0)
    # A second before, the checkpoint is not written yet.
    early = run((2 * cycle_s + 0.5, "remove", "n0"), end_s=2 * cycle_s + 18.0, given=given)
    assert WRITE_S > 0.5 and early.iterations == 10


def test_a_synchronous_checkpoint_stops_training_until_it_is_written(set_parameters: Path) -> None:
    given = parameters(set_parameters, f"every_s = {10 * iteration_s(4)}\nasynchronous = false")
    found = run(end_s=10 * iteration_s(4) + WRITE_S + 1.0, given=given)
    assert found.seconds["stalled"] == pytest.approx(WRITE_S)


def test_another_failure_during_the_restart_starts_it_again() -> None:
    found = run((100.0, "remove", "n0"), (115.0, "remove", "n1"), end_s=200.0)
    assert found.seconds["detecting"] == pytest.approx(30.0)
    assert found.seconds["restarting"] == pytest.approx(4.0)


def test_nodes_that_join_restart_the_job_at_once_or_wait_for_the_next_restart(set_parameters: Path) -> None:
    at_once = run((101.0, "add", "x"), end_s=200.0)
    assert at_once.seconds["restarting"] == 4.0 and at_once.seconds["detecting"] == 0.0
    assert at_once.seconds["redone"] > 0
    given = parameters(set_parameters, 'joins = "next_restart"')
    later = run((101.0, "add", "x"), (150.0, "remove", "n0"), end_s=200.0, given=given)
    assert len(later.recoveries) == 1 and later.recoveries[0].at_s == 150.0
    assert later.spans[-1].samples / (later.spans[-1].end_s - later.spans[-1].begin_s) == pytest.approx(
        JOB.samples_per_s(4), rel=0.01
    )


def test_with_too_few_nodes_the_job_waits_and_then_loads_the_checkpoint() -> None:
    found = run((100.0, "remove", "n0"), (200.0, "add", "n0"), end_s=300.0, nodes=2)
    assert found.seconds["waiting"] == pytest.approx(100.0 - 15.0)
    assert found.seconds["restarting"] == 4.0 and found.seconds["moving"] == pytest.approx(LOAD_S)


def interval(reaction: Reaction | None) -> int:
    assert reaction is not None and reaction.running is not None and reaction.running.checkpoints is not None
    return reaction.running.checkpoints.every_iterations


def test_the_interval_is_that_of_daly_for_the_given_or_the_learned_rate(set_parameters: Path) -> None:
    def best(horizon_s: float, nodes: int) -> int:
        cost = IntervalCost(step_s=iteration_s(nodes), cost_s=WRITE_S, horizon_s=horizon_s)
        return best_interval(cost, 10_000)

    given = parameters(set_parameters, "asynchronous = false\nfailure_every_s = 7200.0")
    policy = make_policy("checkpoint", JOB, given)
    assert interval(policy.start(names(4))) == best(7200.0, 4)
    learned = parameters(set_parameters, "asynchronous = false")
    policy = make_policy("checkpoint", JOB, learned)
    assert interval(policy.start(names(4))) == best(3600.0, 4)
    reaction = policy.change(change(1400.0, names(3), removed=("n3",)))
    assert interval(reaction) == best((3600.0 + 1400.0) / 2, 3)
    assert best(3600.0, 4) != best(2500.0, 3)


def test_the_learned_interval_takes_effect_at_restarts_alone(set_parameters: Path) -> None:
    learned = parameters(set_parameters, 'asynchronous = false\njoins = "next_restart"')
    policy = make_policy("checkpoint", JOB, learned)
    first = interval(policy.start(names(4)))
    assert interval(policy.change(change(100.0, (*names(4), "x"), added=("x",)))) == first
    assert interval(policy.change(change(200.0, names(4), removed=("x",)))) == first, "x has not trained"
    restart = policy.change(change(300.0, (*names(3), "y"), removed=("n3",), added=("y",)))
    assert interval(restart) < first


def test_a_wrong_parameter_is_named(set_parameters: Path) -> None:
    with pytest.raises(ConfigurationError, match="joins"):
        run(end_s=1.0, given=parameters(set_parameters, 'joins = "never"'))
    with pytest.raises(ConfigurationError, match="store_bytes_per_s"):
        run(end_s=1.0, given=parameters(set_parameters, "store_bytes_per_s = 0"))
