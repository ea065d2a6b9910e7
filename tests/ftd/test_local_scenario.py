"""Chaos scenarios: what they may say, and when their faults are due."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from ftd.errors import ConfigurationError, FtdError, Unreachable
from ftd.local.conductor import Conductor, Cues
from ftd.local.inject import require_known_nodes, require_remote
from ftd.local.scenario import AfterTime, AtStep, Fault, OnEvent, load_scenario, parse_scenario

EXAMPLES = Path(__file__).parents[2] / "examples"


def one(**fields: Any) -> Fault:
    [fault] = parse_scenario({"fault": [fields]}, "s.toml").faults
    return fault


def event(name: str, monotonic: float = 0.0, **fields: Any) -> dict[str, Any]:
    return {"event": name, "monotonic": monotonic, "cause": "c", **fields}


def test_every_field_is_understood() -> None:
    assert one(at_step=20, do="kill", node="node-2") == Fault(
        trigger=AtStep(step=20), do="kill", nodes=("node-2",), target="node"
    )
    assert one(after_s=1.5, do="stop", nodes=["a", "b"], device=1, for_s=2.0) == Fault(
        trigger=AfterTime(delay_s=1.5), do="stop", nodes=("a", "b"), target="trainer", device=1, for_s=2.0
    )
    assert one(on_event="PlanChosen", occurrence=2, do="kill_broker", restart_after_s=0.5) == Fault(
        trigger=OnEvent(event="PlanChosen", occurrence=2), do="kill_broker", restart_after_s=0.5
    )
    assert one(at_step=1, do="hang", node="a").target == "trainer"
    assert one(at_step=1, do="stop", node="a", target="node").device is None


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"do": "kill", "node": "a"}, "exactly one of at_step, after_s, on_event"),
        ({"at_step": 1, "after_s": 1, "do": "kill", "node": "a"}, "at_step and after_s"),
        ({"at_step": 0, "do": "kill", "node": "a"}, "the first committed step is 1"),
        ({"after_s": -1, "do": "kill", "node": "a"}, "must not be negative"),
        ({"at_step": 1, "do": "explode", "node": "a"}, "do"),
        ({"at_step": 1, "do": "kill"}, 'node = "node-1"'),
        ({"at_step": 1, "do": "kill", "node": "a", "nodes": ["b"]}, "not both"),
        ({"at_step": 1, "do": "kill", "nodes": ["a", "a"]}, "twice"),
        ({"at_step": 1, "do": "kill", "node": "a/b"}, "not a usable name"),
        ({"at_step": 1, "do": "kill", "node": "a", "nodde": "b"}, "did you mean 'node'"),
        ({"at_step": "x", "do": "kill", "node": "a"}, "at_step"),
        ({"at_step": 1, "do": "kill_broker", "node": "a"}, "strikes no node"),
        ({"at_step": 1, "occurrence": 2, "do": "kill", "node": "a"}, "occurrence belongs to on_event"),
        ({"on_event": "E", "occurrence": 0, "do": "kill", "node": "a"}, "the first one is number 1"),
        ({"at_step": 1, "do": "kill", "node": "a", "for_s": 1}, "for_s has no effect on kill"),
        ({"at_step": 1, "do": "kill", "node": "a", "device": 0}, "device has no effect on kill"),
        ({"at_step": 1, "do": "hang", "node": "a", "for_s": -2}, "negative"),
        ({"at_step": 1, "do": "hang", "node": "a", "device": -2}, "numbered from 0"),
        ({"at_step": 1, "do": "slow", "node": "a", "factor": 0.5}, "1 is as quick as it is"),
        ({"at_step": 1, "do": "hang", "node": "a", "factor": 2.0}, "it belongs to slow"),
        ({"at_step": 1, "do": "term", "node": "a", "target": "trainer"}, "target has no effect on term"),
        ({"at_step": 1, "do": "start", "node": "a", "restart_after_s": 1}, "restart_after_s has no effect"),
    ],
)
def test_a_wrong_fault_is_named_with_the_remedy(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        parse_scenario({"fault": [{"at_step": 5, "do": "term", "node": "a"}, fields]}, "s.toml")
    assert said in str(caught.value)
    assert "s.toml: fault 2" in str(caught.value)


def test_files_that_are_no_scenario(tmp_path: Path) -> None:
    path = tmp_path / "s.toml"
    with pytest.raises(ConfigurationError, match="does not exist"):
        load_scenario(path)
    path.write_text("[[fault]\n")
    with pytest.raises(ConfigurationError, match="not valid TOML"):
        load_scenario(path)
    path.write_text("name = 'gpt'\n")
    with pytest.raises(ConfigurationError, match="fault"):
        load_scenario(path)


def test_the_demo_scenario_fits_its_cluster() -> None:
    scenario = load_scenario(EXAMPLES / "demo-chaos.toml")
    assert scenario.faults
    require_known_nodes(scenario, [f"node-{index}" for index in range(4)], "demo-chaos.toml")


def test_faults_for_nodes_that_are_not_there() -> None:
    scenario = parse_scenario({"fault": [{"at_step": 1, "do": "kill", "node": "node-9"}]}, "s.toml")
    with pytest.raises(ConfigurationError, match=r"there is no node-9.*node-0"):
        require_known_nodes(scenario, ["node-0"], "s.toml")
    remote = parse_scenario({"fault": [{"at_step": 1, "do": "start", "node": "node-9"}]}, "s.toml")
    require_known_nodes(remote, ["node-0"], "s.toml")
    with pytest.raises(ConfigurationError, match="ftd local"):
        require_remote(remote, "s.toml")
    require_remote(scenario, "s.toml")


def test_cues_come_once_each() -> None:
    faults = [
        {"at_step": 10, "do": "kill", "node": "a"},
        {"at_step": 10, "do": "kill", "node": "b"},
        {"on_event": "NodeLost", "do": "kill", "node": "c"},
        {"on_event": "NodeLost", "occurrence": 2, "do": "kill", "node": "d"},
        {"after_s": 3, "do": "kill", "node": "e"},
    ]
    cues = Cues(parse_scenario({"fault": faults}, "s.toml"))

    def nodes(due: list[Fault]) -> list[str]:
        return [node for fault in due for node in fault.nodes]

    assert nodes(cues.on_event(event("StepCommitted", step=9))) == []
    assert nodes(cues.on_event(event("StepCommitted", step=12))) == ["a", "b"]
    assert nodes(cues.on_event(event("StepCommitted", step=13))) == []
    assert nodes(cues.on_event(event("NodeLost", 1.0))) == ["c"]
    assert nodes(cues.on_event(event("NodeLost", 1.0))) == []  # MQTT delivered it twice.
    assert nodes(cues.on_event(event("NodeLost", 2.0))) == ["d"]
    assert cues.next_delay_s == 3
    assert nodes(cues.on_time(2.9)) == []
    assert nodes(cues.on_time(3.0)) == ["e"]
    assert cues.next_delay_s is None
    assert cues.waiting == ()


def test_the_conductor_injects_what_is_due_and_survives_what_fails() -> None:
    injected: list[str] = []
    failed: list[str] = []

    async def inject(fault: Fault) -> None:
        injected.append(fault.nodes[0])
        if fault.nodes[0] == "gone":
            raise Unreachable("nobody answers")

    def on_failure(fault: Fault, error: FtdError) -> None:
        failed.append(f"{fault}: {error}")

    async def main() -> None:
        faults = [
            {"at_step": 1, "do": "kill", "node": "gone"},
            {"at_step": 1, "do": "kill", "node": "there"},
            {"after_s": 0.01, "do": "kill", "node": "later"},
            {"at_step": 99, "do": "kill", "node": "never"},
        ]
        conductor = Conductor(
            parse_scenario({"fault": faults}, "s.toml"), inject=inject, on_failure=on_failure
        )
        conductor.begin()
        assert [f.nodes for f in conductor.on_event(event("StepCommitted", step=1))] == [
            ("gone",),
            ("there",),
        ]
        async with asyncio.timeout(10):
            while "later" not in injected:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        await conductor.finish()
        assert [fault.nodes for fault in conductor.waiting] == [("never",)]
        await conductor.cancel()

    asyncio.run(main())
    assert sorted(injected) == ["gone", "later", "there"]
    assert failed == ["at step 1: kill gone: nobody answers"]
