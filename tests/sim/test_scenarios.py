"""Scenarios in the simulator: the files that are also played on the real service, judged by the same rules."""

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

from ftd.cli.main import app
from ftd.errors import ConfigurationError
from ftd.faults.chaos.player import ScenarioResult
from ftd.faults.chaos.report import build_document, render_junit, render_text
from ftd.faults.chaos.scenario import load_scenario, parse_scenario
from ftd.faults.sim.scenario import play_simulated
from ftd.faults.sim.scenario_setup import make_scenario_setup, unsupported_faults
from statemachine.cluster.machine import ClusterMachine
from statemachine.events import NodeVanished

pytestmark = pytest.mark.long

EXAMPLES = Path(__file__).parents[2] / "examples"
SCENARIOS = sorted((EXAMPLES / "chaos").glob("*.toml"))
SEEDS = range(3)


def played(path: Path, seed: int) -> ScenarioResult:
    scenario = load_scenario(path)
    return play_simulated(scenario, make_scenario_setup(scenario, None, None, path.name), seed)[0]


def supported(path: Path) -> bool:
    scenario = load_scenario(path)
    return not unsupported_faults(scenario, make_scenario_setup(scenario, None, None, path.name))


@pytest.mark.parametrize("path", SCENARIOS, ids=lambda path: path.stem)
def test_the_example_scenarios_meet_their_expectations_in_the_simulator(path: Path) -> None:
    for seed in SEEDS:
        found = played(path, seed)
        assert found.met, render_text(found)


def test_all_example_scenarios_can_be_simulated() -> None:
    assert [path.name for path in SCENARIOS if not supported(path)] == []


def test_equal_seeds_give_equal_runs_and_other_seeds_other_runs() -> None:
    first, again, other = (
        build_document(played(EXAMPLES / "chaos" / "node-killed.toml", s)) for s in (1, 1, 2)
    )
    assert first == again
    assert first["took_s"] != other["took_s"]
    assert first["simulated"] == {"seed": 1, "skipped": (), "problems": ()}


def scenario_file(directory: Path, **fault: Any) -> Path:
    """Write a scenario with one fault at step 10 on four nodes."""
    values = "\n".join(f"{name} = {json.dumps(value)}" for name, value in fault.items() if name != "expect")
    expect = f"expect = {fault['expect']}" if "expect" in fault else ""
    path = directory / "scenario.toml"
    path.write_text(
        f'[cluster]\njob = "{EXAMPLES / "chaos-job.toml"}"\nnodes = 4\n'
        f"[[fault]]\nat_step = 10\n{values}\n{expect}\n"
        '[expect]\nno_events = ["JobFailed"]\n'
    )
    return path


KILL = {"do": "kill", "node": "node-2"}


def test_an_expectation_fails_where_a_bug_is_planted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A coordinator that ignores last wills notices the loss by silence, much later."""
    path = scenario_file(tmp_path, **KILL, expect="{ resumed_within_s = 1.0 }")
    assert played(path, 0).met
    real = ClusterMachine._dispatch

    def ignoring_last_wills(self: ClusterMachine, event: Any) -> None:
        if not isinstance(event, NodeVanished):
            real(self, event)

    monkeypatch.setattr(ClusterMachine, "_dispatch", ignoring_last_wills)
    found = played(path, 0)
    assert not found.met
    assert [verdict.description for verdict in found.verdicts if not verdict.met] == ["resumed within 1 s"]


def test_a_broken_invariant_fails_a_scenario_that_does_not_expect_anything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("statemachine.cluster.recovery.next_generation", lambda c: max(c.generation, 1))
    found = played(scenario_file(tmp_path, **KILL), 0)
    assert not found.met
    assert found.simulated is not None
    assert "was used twice" in found.simulated.problems[0]
    assert "was used twice" in render_text(found)
    suite = ElementTree.fromstring(render_junit([found])).find("testsuite")
    assert suite is not None
    assert suite.get("errors") == "1"


def ftd(*arguments: object) -> tuple[int, str]:
    """Return the exit code of a command, and what it printed or the message of its error."""
    done = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if isinstance(done.exception, ConfigurationError):
        return done.exception.exit_code, str(done.exception)
    return done.exit_code, done.output


SHORT = {"do": "hang", "node": "node-1", "for_s": 0.2}


def test_unsupported_faults_are_rejected_or_skipped_with_a_report(tmp_path: Path) -> None:
    path, junit = scenario_file(tmp_path, **SHORT), tmp_path / "junit.xml"
    code, printed = ftd("sim", "--scenario", path)
    assert code == 2
    assert "do not wake up again" in printed
    assert "--skip-unsupported" in printed
    code, printed = ftd("sim", "--scenario", path, "--skip-unsupported", "--junit", junit)
    assert code == 0
    assert "left out" in printed
    suite = ElementTree.parse(junit).getroot().find("testsuite")
    assert suite is not None
    assert (suite.get("skipped"), "simulated" in str(suite.get("name"))) == ("1", True)


def test_a_trainer_that_is_stopped_briefly_is_not_lost(tmp_path: Path) -> None:
    """A trainer that is stopped for longer is ended and started again."""
    for for_s, lost in ((0.2, "no_events"), (20.0, "events")):
        stop = {"do": "stop", "target": "trainer", "node": "node-1", "for_s": for_s}
        path = scenario_file(tmp_path, **stop, expect=f'{{ {lost} = ["TrainerLost"] }}')
        for seed in SEEDS:
            found = played(path, seed)
            assert found.met, render_text(found)


def test_faults_that_wait_for_a_skipped_fault_are_skipped(tmp_path: Path) -> None:
    path = scenario_file(tmp_path, id="short", **SHORT)
    with path.open("a") as file:
        file.write('[[fault]]\nid = "next"\nafter_fault = "short"\ndo = "kill"\nnode = "node-0"\n')
        file.write('[[fault]]\nid = "kill"\nat_step = 12\ndo = "kill"\nnode = "node-3"\n')
    code, printed = ftd("sim", "--scenario", path, "--skip-unsupported", "--json")
    assert code == 0
    [found] = json.loads(printed)
    assert {fault["id"] for fault in found["faults"]} == {"kill"}
    assert [name for name, _ in found["simulated"]["skipped"]] == ["short", "next"]


def test_the_exit_code_says_whether_all_expectations_are_met(tmp_path: Path) -> None:
    path = scenario_file(tmp_path, **KILL, expect='{ events = ["NodeLost"] }')
    assert ftd("sim", "--scenario", path, "--seeds", 2)[0] == 0
    path = scenario_file(tmp_path, **KILL, expect='{ no_events = ["NodeLost"] }')
    code, printed = ftd("sim", "--scenario", path)
    assert code == 1
    assert "no NodeLost" in printed


def test_a_scenario_without_a_cluster_needs_a_job_and_nodes(tmp_path: Path) -> None:
    path = tmp_path / "bare.toml"
    path.write_text('[[fault]]\nat_step = 10\ndo = "kill"\nnode = "node-2"\n')
    code, printed = ftd("sim", "--scenario", path)
    assert code == 2
    assert "--job and --nodes" in printed
    assert ftd("sim", "--scenario", path, "--job", EXAMPLES / "mlp.toml", "--nodes", 3)[0] == 0
    assert ftd("sim", "--nodes", 3, "--seed", 1)[0] == 2


def test_a_fault_on_an_unknown_node_is_not_met(tmp_path: Path) -> None:
    found = played(scenario_file(tmp_path, do="kill", node="node-9"), 0)
    assert not found.met
    assert any("node-9" in verdict.measured for verdict in found.verdicts)


def test_losses_equal_those_of_the_undisturbed_run() -> None:
    scenario = parse_scenario({"fault": [], "expect": {"same_losses": True}}, "none")
    setup = make_scenario_setup(scenario, EXAMPLES / "chaos-job.toml", 2, "none")
    assert play_simulated(scenario, setup, 0)[0].met


def test_broker_and_coordinator_recover_when_they_are_killed_together() -> None:
    """The broker has forgotten everything then, and a coordinator without standbys need not wait for anybody."""
    first = {"id": "early", "at_step": 3, "do": "kill", "role": "coordinator", "restart_after_s": 0.5}
    broker = {"id": "b", "at_step": 30, "do": "kill", "role": "broker", "restart_after_s": 1.0}
    coordinator = {"after_fault": "b", "do": "kill", "role": "coordinator", "restart_after_s": 1.0}
    node = {"on_event": "CoordinatorStarted", "occurrence": 2, "do": "kill", "node": "node-1"}
    faults = [first, broker, coordinator, {**node, "expect": {"resumed_within_s": 5}}]
    scenario = parse_scenario({"fault": faults, "limit_s": 20}, "reboot")
    setup = make_scenario_setup(scenario, EXAMPLES / "chaos-job.toml", 4, "reboot")
    for seed in SEEDS:
        found = play_simulated(scenario, setup, seed)[0]
        assert found.met, render_text(found)


def test_an_irreparable_snapshot_is_replaced_even_if_the_next_one_does_not_fit() -> None:
    """Two shards of one group are corrupt and there is no room for a while; the next snapshot is due much
    later.
    """
    moment = {"on_event": "SnapshotCompleted"}
    flips = [{**moment, "do": "flip", "node": node} for node in ("node-0", "node-1")]
    full = {**moment, "do": "fill_memory", "node": "node-2", "for_s": 3.0}
    again = {"on_event": "SnapshotAbandoned", "do": "slow", "node": "node-2", "for_s": 0.1}
    faults = [*flips, full, {**again, "expect": {"events": ["SnapshotCompleted"]}}]
    override = {"snapshot": {"every_steps": 200, "protection": "aec"}}
    cluster = {"job": str(EXAMPLES / "chaos-job.toml"), "nodes": 4, "override": override}
    cluster["timing"] = {"scrub_s": 0.5}
    scenario = parse_scenario({"fault": faults, "limit_s": 35, "cluster": cluster}, "beyond repair")
    setup = make_scenario_setup(scenario, None, None, "beyond repair")
    for seed in SEEDS:
        found = play_simulated(scenario, setup, seed)[0]
        assert found.met, render_text(found)
