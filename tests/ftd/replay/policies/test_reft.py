"""REFT's rules. The job's state is 800 MB; pipelines have 2 nodes: (n0, n1), (n2, n3), …; stage 0 is on n0, n2, …"""

from pathlib import Path

import pytest

from ftd.errors import ConfigurationError
from ftd.replay.outcome import Outcome
from ftd.replay.parameters import Parameters, read_parameters
from ftd.replay.policies.registry import make_policy
from ftd.replay.replay import replay
from tests.helpers.replay_jobs import make_job, make_trace

JOB = make_job()
MEMORY_S, STORAGE_S = 0.8 / 22.4, 0.8 / 2.03


def iteration_s(nodes: int) -> float:
    found = JOB.iteration_s(nodes)
    assert found is not None
    return found


def run(
    *events: tuple[float, str, str], end_s: float, nodes: int = 6, given: Parameters | None = None
) -> Outcome:
    policy = make_policy("reft", JOB, given or read_parameters())
    return replay(policy, make_trace(nodes, *events, end_s=end_s))


def parameters(tmp_path: Path, text: str) -> Parameters:
    path = tmp_path / "parameters.toml"
    path.write_text(f"[reft]\n{text}\n", encoding="utf-8")
    return read_parameters(path)


def test_every_iteration_has_a_snapshot_that_stops_training_for_a_small_share() -> None:
    found = run(end_s=100.0)
    assert found.seconds["stalled"] == pytest.approx(100 * 0.0096 / 1.0096, rel=0.03)


def test_a_lost_node_costs_the_iteration_in_flight_and_a_restart_from_memory() -> None:
    found = run((100.0, "remove", "n0"), end_s=200.0)
    assert found.recoveries[0].seconds == pytest.approx(
        {"detecting": 15.0, "restarting": 4.0, "moving": MEMORY_S}
    )
    assert found.seconds["redone"] < iteration_s(6)


def test_nodes_of_different_sharding_groups_may_be_lost_together() -> None:
    found = run((100.0, "remove", "n0"), (100.0, "remove", "n3"), end_s=200.0)
    assert found.seconds["redone"] < iteration_s(6)


def test_two_lost_nodes_of_a_sharding_group_need_the_persistent_checkpoint(tmp_path: Path) -> None:
    events = ((100.0, "remove", "n0"), (100.0, "remove", "n2"))
    begin = run(*events, end_s=200.0, given=parameters(tmp_path, "persist_every_s = 3600.0"))
    assert begin.seconds["moving"] == pytest.approx(STORAGE_S)
    assert begin.seconds["redone"] > 90.0
    persisted = run(*events, end_s=200.0)
    assert 40.0 - iteration_s(6) < persisted.seconds["redone"] < 40.0 + iteration_s(6)
    both = parameters(tmp_path, 'protection = ["ARC", "AEC"]')
    assert run(*events, end_s=200.0, given=both).seconds["redone"] < iteration_s(6)


def test_a_sharding_group_of_one_node_has_no_redundancy() -> None:
    found = run((100.0, "remove", "n0"), end_s=200.0, nodes=3)
    assert found.seconds["moving"] == pytest.approx(STORAGE_S) and found.seconds["redone"] > 30.0


@pytest.mark.parametrize(("later_s", "loses"), [(10.0, True), (40.0, False)])
def test_until_a_restart_is_complete_nodes_hold_what_they_held_before(later_s: float, loses: bool) -> None:
    found = run((100.0, "remove", "n0"), (100.0 + later_s, "remove", "n2"), end_s=200.0, nodes=8)
    assert (found.seconds["redone"] > 30.0) == loses


def test_a_node_that_completes_a_pipeline_restarts_the_job_from_memory_and_others_are_idle() -> None:
    idle = run((100.0, "add", "x"), end_s=200.0)
    assert idle.recoveries == () and idle.seconds["reduced"] > 0
    complete = run((100.0, "add", "x"), (100.0, "add", "y"), end_s=200.0)
    assert complete.seconds["restarting"] == 4.0 and complete.seconds["detecting"] == 0.0
    assert complete.seconds["redone"] < iteration_s(6)


def test_with_too_few_nodes_the_job_waits_and_then_loads_the_persistent_checkpoint() -> None:
    found = run((100.0, "remove", "n0"), (150.0, "add", "n0"), end_s=200.0, nodes=2)
    assert found.seconds["waiting"] == pytest.approx(50.0 - 15.0)
    assert found.seconds["redone"] > 30.0 and found.seconds["moving"] == pytest.approx(STORAGE_S)


def test_a_wrong_protection_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="protection"):
        run(end_s=1.0, given=parameters(tmp_path, 'protection = ["RAID"]'))
    with pytest.raises(ConfigurationError, match="protection names a method twice"):
        run(end_s=1.0, given=parameters(tmp_path, 'protection = ["ARC", "ARC"]'))
    with pytest.raises(ConfigurationError, match="store_bytes_per_s: 1e-300 is not allowed"):
        run(end_s=1.0, given=parameters(tmp_path, "store_bytes_per_s = 1e-300"))
    with pytest.raises(ConfigurationError, match="snapshot_share lacks AOR"):
        text = 'protection = ["ARC", "AOR"]\nsnapshot_share = { ARC = 0.1 }'
        run(end_s=1.0, given=parameters(tmp_path, text))
    with pytest.raises(
        ConfigurationError, match=r"snapshot_share\.AEX: 'AEX' is not known \(did you mean 'AEC'"
    ):
        run(end_s=1.0, given=parameters(tmp_path, "snapshot_share = { AEX = 0.1 }"))
