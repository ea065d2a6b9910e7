"""Chaos scenarios: what their files may contain, and when their faults are due."""

import asyncio
import math
from pathlib import Path
from typing import Any

import pytest

from ftd.errors import ConfigurationError, FtdError, PeerError, UnreachableError
from ftd.faults.chaos.expectations import RELATIVE
from ftd.faults.chaos.inject import require_known_nodes, require_remote
from ftd.faults.chaos.scenario import load_scenario, parse_scenario
from ftd.faults.chaos.scheduler import FaultScheduler, FaultTriggers
from ftd.faults.chaos.targets import ClusterLayout, StageNodes, read_layout, resolve_targets
from ftd.faults.chaos.values import (
    AfterFault,
    AfterTime,
    AtStep,
    CentralService,
    ClusterPhaseReached,
    ClusterSetup,
    EventNotSeen,
    EventSeen,
    Fault,
    InPhase,
    JobFinishes,
    NamedNodes,
    NodeStates,
    OnEvent,
    PlanRole,
    RandomNodes,
    RecoveryCount,
    RecoveryFrom,
    ResumedWithin,
    SameLosses,
    StepsAtMost,
    Target,
)

EXAMPLES = Path(__file__).parents[3] / "examples"


def one(**fields: Any) -> Fault:
    [fault] = parse_scenario({"fault": [fields]}, "s.toml").faults
    return fault


def names(fault: Fault) -> tuple[str, ...]:
    assert isinstance(fault.target, NamedNodes)
    return fault.target.names


def event(name: str, monotonic: float = 0.0, **fields: Any) -> dict[str, Any]:
    return {"event": name, "monotonic": monotonic, "cause": "c", **fields}


def test_every_field_is_understood() -> None:
    assert one(at_step=20, do="kill", node="node-2") == Fault(
        id="fault 1", trigger=AtStep(step=20), do="kill", target=NamedNodes(names=("node-2",)), process="node"
    )
    assert one(id="x", after_s=1.5, do="stop", nodes=["a", "b"], device=1, for_s=2.0) == Fault(
        id="x",
        trigger=AfterTime(delay_s=1.5),
        do="stop",
        target=NamedNodes(names=("a", "b")),
        process="trainer",
        device=1,
        for_s=2.0,
    )
    assert one(
        on_event="PlanChosen", occurrence=2, delay_s=0.1, do="kill", role="broker", restart_after_s=0.5
    ) == Fault(
        id="fault 1",
        trigger=OnEvent(event="PlanChosen", occurrence=2),
        do="kill",
        target=CentralService(service="broker"),
        delay_s=0.1,
        restart_after_s=0.5,
    )
    assert one(in_phase="quiescing", do="lossy", random=2, drop=0.1, duplicate=0.2, late_s=0.3) == Fault(
        id="fault 1",
        trigger=InPhase(phase="quiescing"),
        do="lossy",
        target=RandomNodes(count=2),
        drop=0.1,
        duplicate=0.2,
        late_s=0.3,
    )
    assert one(at_step=1, do="hang", node="a").process == "trainer"
    assert one(at_step=1, do="raise", node="a").process == "trainer"
    assert one(at_step=1, do="stop", node="a", target="node").device is None
    assert one(at_step=1, do="fill_disk", node="a", size_mib=64).size_mib == 64
    assert one(at_step=1, do="slow", node="a", factor=4).factor == 4
    chain = [
        {"id": "a", "at_step": 1, "do": "term", "node": "n"},
        {"after_fault": "a", "do": "kill", "node": "m"},
    ]
    assert parse_scenario({"fault": chain}, "s").faults[1].trigger == AfterFault(fault="a")


@pytest.mark.parametrize(
    ("role", "target"),
    [
        ("coordinator", CentralService(service="coordinator")),
        ("rank 0", PlanRole(position="rank 0")),
        ("spare", PlanRole(position="spare")),
        ("first stage", PlanRole(position="first stage")),
        ("last stage of pipeline 1", PlanRole(position="last stage", pipeline=1)),
        ("pipeline 2", PlanRole(position="pipeline", pipeline=2)),
        ("owner of layer 3", PlanRole(position="owner", layer=3)),
        ("owner of layer 3 in pipeline 1", PlanRole(position="owner", layer=3, pipeline=1)),
        ("owners of layer 0", PlanRole(position="owners", layer=0)),
    ],
)
def test_roles_are_understood(role: str, target: Target) -> None:
    fault = one(at_step=1, do="kill", role=role)
    assert fault.target == target
    assert str(target).removeprefix("the ") == role


def test_expectations_are_understood() -> None:
    fault = one(
        at_step=1,
        do="kill",
        node="a",
        expect={
            "resumed_within_s": 5,
            "lost_steps_max": 0,
            "recomputed_steps_max": 1,
            "tier": "live_replica",
            "cause": ["node_lost", "trainer_lost"],
            "recoveries_max": 2,
            "events": ["NodeLost"],
            "no_events": ["JobFailed"],
        },
    )
    assert fault.expect == (
        ResumedWithin(limit_s=5),
        StepsAtMost(field="rolled_back_steps", maximum=0),
        StepsAtMost(field="recomputed_steps", maximum=1),
        RecoveryCount(maximum=2),
        RecoveryFrom(field="tier", allowed=("live_replica",)),
        RecoveryFrom(field="cause", allowed=("node_lost", "trainer_lost")),
        EventSeen(event="NodeLost"),
        EventNotSeen(event="JobFailed"),
    )
    data = {
        "fault": [],
        "name": "n",
        "seed": 4,
        "expect": {"nodes": {"a": "OFFLINE"}, "phase": "RUNNING", "finishes": True, "same_losses": 1e-9},
        "cluster": {"job": "j.toml", "nodes": 3, "timing": {"silence_s": 1}, "override": {"steps": 5}},
    }
    scenario = parse_scenario(data, "s.toml", directory=Path("/there"))
    assert scenario.expect == (
        NodeStates(states=(("a", "OFFLINE"),)),
        ClusterPhaseReached(phase="RUNNING"),
        JobFinishes(),
        SameLosses(relative=1e-9),
    )
    assert (scenario.name, scenario.seed) == ("n", 4)
    assert scenario.cluster == ClusterSetup(
        job="/there/j.toml", nodes=3, timing={"silence_s": 1.0}, override={"steps": 5}
    )


@pytest.mark.parametrize(
    ("table", "expected_words"),
    [
        ({"expect": {"resumed_within": 5}}, "did you mean 'resumed_within_s'"),
        ({"expect": {"lost_steps_max": -1}}, "expect.lost_steps_max: -1 is negative"),
        ({"expect": {"resumed_within_s": math.nan}}, "expect.resumed_within_s: nan is not a number"),
        ({"expect": {"same_losses": -1e-6}}, "expect.same_losses: -1e-06 is negative"),
        ({"expect": {"same_losses": math.nan}}, "expect.same_losses: nan is not a number"),
        ({"expect": {"tier": "replika"}}, "did you mean 'replica'"),
        ({"expect": {"cause": "node_los"}}, "did you mean 'node_lost'"),
        ({"expect": {"events": ["NodeLosst"]}}, "did you mean 'NodeLost'"),
        ({"expect": {"nodes": {"a": "DOWN"}}}, "expect.nodes.a: 'DOWN' is not known"),
        ({"expect": {"phase": "RUNING"}}, "did you mean 'RUNNING'"),
        ({"expekt": {}}, "did you mean 'expect'"),
        ({"limit_s": -1}, "limit_s: -1 is negative"),
        ({"cluster": {"nodes": 3}}, "cluster.job: required"),
        ({"cluster": {"job": "j", "nodes": 0}}, "cluster.nodes: 0 is below 1"),
        ({"cluster": {"job": "j", "nodes": 1, "timing": {"silence": 1}}}, "did you mean 'silence_s'"),
    ],
)
def test_a_wrong_scenario_table_is_rejected(table: dict[str, Any], expected_words: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        parse_scenario({"fault": [], **table}, "s.toml")
    assert expected_words in str(caught.value)
    assert str(caught.value).startswith("s.toml: ")


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (True, (SameLosses(relative=RELATIVE),)),
        (0, (SameLosses(relative=0.0),)),
        (0.0, (SameLosses(relative=0.0),)),
        (False, ()),
    ],
)
def test_losses_may_have_to_be_equal(given: float, expected: tuple[SameLosses, ...]) -> None:
    assert parse_scenario({"fault": [], "expect": {"same_losses": given}}, "s.toml").expect == expected


def test_roles_become_nodes() -> None:
    stages = [
        [
            {"first_layer": 0, "end_layer": 3, "devices": ["b/0", "b/1"]},
            {"first_layer": 3, "end_layer": 6, "devices": ["c/0"]},
        ],
        [{"first_layer": 0, "end_layer": 6, "devices": ["a/0"]}],
    ]
    state = {
        "pipelines": [{"stages": some, "microbatches": 2} for some in stages],
        "nodes": {n: {"state": "OFFLINE" if n == "e" else "HEALTHY"} for n in "abcde"},
    }
    layout = read_layout(state)
    assert layout.pipelines[1] == (StageNodes(first_layer=0, end_layer=6, nodes=("a",)),)

    def resolve(seed: int = 0, **target: Any) -> tuple[str, ...]:
        return resolve_targets(one(at_step=1, do="kill", **target), layout, seed)

    assert resolve(role="rank 0") == ("b",)
    assert resolve(role="last stage") == ("c",)
    assert resolve(role="first stage of pipeline 1") == ("a",)
    assert resolve(role="pipeline 0") == ("b", "c")
    assert resolve(role="owner of layer 3") == ("c",)
    assert resolve(role="owners of layer 3") == ("c", "a")
    assert resolve(role="spare") == ("d",)
    assert resolve(role="coordinator") == ()
    assert resolve(nodes=["x", "y"]) == ("x", "y")
    drawn = {resolve(seed, random=2) for seed in range(20)}
    assert len(drawn) > 3
    assert all(set(two) < set("abcd") for two in drawn)
    assert resolve(3, random=2) == resolve(3, random=2)
    with pytest.raises(PeerError, match="no node is pipeline 4 now"):
        resolve(role="pipeline 4")
    with pytest.raises(PeerError, match="4 are up"):
        resolve(random=5)
    with pytest.raises(PeerError, match="no node is rank 0 now"):
        resolve_targets(one(at_step=1, do="kill", role="rank 0"), ClusterLayout(pipelines=(), alive=()), 0)


@pytest.mark.parametrize(
    ("fields", "expected_words"),
    [
        ({"do": "kill", "node": "a"}, "exactly one of at_step, after_s, on_event, in_phase, after_fault"),
        ({"at_step": 1, "after_s": 1, "do": "kill", "node": "a"}, "at_step and after_s"),
        ({"at_step": 0, "do": "kill", "node": "a"}, "the first committed step is 1"),
        ({"after_s": -1, "do": "kill", "node": "a"}, "must not be negative"),
        ({"at_step": 1, "do": "explode", "node": "a"}, "do"),
        ({"at_step": 1, "do": "kill"}, 'node = "node-1"'),
        ({"at_step": 1, "do": "kill", "node": "a", "nodes": ["b"]}, "not both"),
        ({"at_step": 1, "do": "kill", "nodes": ["a", "a"]}, "twice"),
        ({"at_step": 1, "do": "kill", "node": "a/b"}, "not a valid name"),
        ({"at_step": 1, "do": "kill", "node": "a", "nodde": "b"}, "did you mean 'node'"),
        ({"at_step": "x", "do": "kill", "node": "a"}, "at_step"),
        ({"at_step": 1, "do": "kil", "node": "a"}, "did you mean 'kill'"),
        ({"at_step": 1, "do": "kill", "role": "boss"}, "such as coordinator, broker, rank 0"),
        (
            {"at_step": 1, "do": "kill", "role": "owners of layer 1 in pipeline 0"},
            "owners are in all pipelines",
        ),
        ({"at_step": 1, "do": "hang", "role": "broker"}, "hang cannot be done to the broker"),
        ({"at_step": 1, "do": "stop", "role": "coordinator"}, "needs for_s"),
        ({"at_step": 1, "do": "start", "role": "rank 0"}, "start needs names"),
        ({"at_step": 1, "do": "start", "random": 1}, "start needs names"),
        ({"at_step": 1, "do": "kill", "random": 0}, "how many nodes to draw"),
        ({"at_step": 1, "do": "kill", "nodes": []}, "nodes is empty"),
        ({"at_step": 1, "do": "lossy", "node": "a"}, "needs drop, duplicate or late_s"),
        ({"at_step": 1, "do": "lossy", "node": "a", "drop": 1.5}, "a probability is 0 to 1"),
        ({"at_step": 1, "do": "fill_disk", "node": "a", "size_mib": 0}, "0 is below 1"),
        ({"after_s": 1, "delay_s": 1, "do": "kill", "node": "a"}, "make after_s larger"),
        ({"after_fault": "b", "do": "kill", "node": "a"}, "after_fault: 'b' is not known"),
        ({"in_phase": "quiesing", "do": "kill", "node": "a"}, "did you mean 'quiescing'"),
        ({"on_event": "PlanChose", "do": "kill", "node": "a"}, "did you mean 'PlanChosen'"),
        ({"id": "fault 1", "at_step": 1, "do": "kill", "node": "a"}, "two faults have the id"),
        (
            {"at_step": 1, "do": "kill", "role": "broker", "target": "node"},
            "target has no effect on kill of the broker",
        ),
        (
            {"at_step": 1, "occurrence": 2, "do": "kill", "node": "a"},
            "occurrence belongs to on_event and in_phase",
        ),
        ({"on_event": "NodeLost", "occurrence": 0, "do": "kill", "node": "a"}, "the first one is number 1"),
        ({"at_step": 1, "do": "kill", "node": "a", "for_s": 1}, "for_s has no effect on kill"),
        (
            {"at_step": 1, "do": "kill", "node": "a", "device": 0},
            "device has no effect on kill of a whole node",
        ),
        ({"at_step": 1, "do": "hang", "node": "a", "for_s": -2}, "for_s: -2 is not a duration"),
        ({"at_step": 1, "do": "cut", "node": "a", "for_s": 0}, "for_s: 0 is not a duration"),
        ({"at_step": 1, "do": "stop", "role": "coordinator", "for_s": 0}, "write seconds above 0"),
        ({"at_step": 1, "do": "stop", "node": "a", "for_s": math.inf}, "for_s: inf is not a duration"),
        ({"at_step": 1, "do": "hang", "node": "a", "device": -2}, "numbered from 0"),
        ({"at_step": 1, "do": "slow", "node": "a", "factor": 0.5}, "1 is normal speed"),
        ({"at_step": 1, "do": "hang", "node": "a", "factor": 2.0}, "it belongs to slow"),
        ({"at_step": 1, "do": "term", "node": "a", "target": "trainer"}, "target has no effect on term"),
        ({"at_step": 1, "do": "start", "node": "a", "restart_after_s": 1}, "restart_after_s has no effect"),
    ],
)
def test_a_wrong_fault_is_named_with_the_remedy(fields: dict[str, Any], expected_words: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        parse_scenario({"fault": [{"at_step": 5, "do": "term", "node": "a"}, fields]}, "s.toml")
    assert expected_words in str(caught.value)
    assert "s.toml: fault 2" in str(caught.value)


def test_files_that_are_not_scenarios_are_rejected(tmp_path: Path) -> None:
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


def test_faults_on_unknown_nodes_are_rejected() -> None:
    scenario = parse_scenario({"fault": [{"at_step": 1, "do": "kill", "node": "node-9"}]}, "s.toml")
    with pytest.raises(ConfigurationError, match=r"there is no node-9.*node-0"):
        require_known_nodes(scenario, ["node-0"], "s.toml")
    remote = parse_scenario({"fault": [{"at_step": 1, "do": "start", "node": "node-9"}]}, "s.toml")
    require_known_nodes(remote, ["node-0"], "s.toml")
    with pytest.raises(ConfigurationError, match="ftd local"):
        require_remote(remote, "s.toml")
    require_remote(scenario, "s.toml")


def test_each_fault_is_triggered_once() -> None:
    faults = [
        {"at_step": 10, "do": "kill", "node": "a"},
        {"at_step": 10, "do": "kill", "node": "b"},
        {"on_event": "NodeLost", "do": "kill", "node": "c"},
        {"on_event": "NodeLost", "occurrence": 2, "do": "kill", "node": "d"},
        {"after_s": 3, "do": "kill", "node": "e"},
        {"in_phase": "planning", "occurrence": 2, "do": "kill", "node": "f"},
        {"in_phase": "snapshotting", "id": "mid", "do": "kill", "node": "g"},
        {"after_fault": "mid", "do": "kill", "node": "h"},
    ]
    triggers = FaultTriggers(parse_scenario({"fault": faults}, "s.toml"))

    def nodes(due: list[Fault]) -> list[str]:
        return [node for fault in due for node in names(fault)]

    assert nodes(triggers.on_event(event("StepCommitted", step=9))) == []
    assert nodes(triggers.on_event(event("StepCommitted", step=12))) == ["a", "b"]
    assert nodes(triggers.on_event(event("StepCommitted", step=13))) == []
    assert nodes(triggers.on_event(event("NodeLost", 1.0))) == ["c"]
    assert nodes(triggers.on_event(event("NodeLost", 1.0))) == []  # MQTT delivered it twice.
    assert nodes(triggers.on_event(event("NodeLost", 2.0))) == ["d"]
    assert triggers.next_delay_s == 3
    assert nodes(triggers.on_time(2.9)) == []
    assert nodes(triggers.on_time(3.0)) == ["e"]
    assert triggers.next_delay_s is None
    assert nodes(triggers.on_event(event("Quiesced", 3.0))) == []
    assert nodes(triggers.on_event(event("Quiesced", 4.0))) == ["f"]
    assert nodes(triggers.on_node("a", "HEALTHY")) == []
    mid = triggers.on_node("a", "SNAP")
    assert nodes(mid) == ["g"]
    assert nodes(triggers.on_injected(mid[0])) == ["h"]
    assert triggers.waiting == ()


def test_the_scheduler_injects_due_faults_and_survives_failures() -> None:
    injected: list[str] = []
    failed: list[str] = []

    async def inject(fault: Fault) -> None:
        injected.append(names(fault)[0])
        if names(fault)[0] == "gone":
            raise UnreachableError("nobody answers")
        if names(fault)[0] == "odd":
            raise LookupError("no such thing")

    def on_failure(fault: Fault, error: FtdError) -> None:
        failed.append(f"{fault}: {error}")

    async def main() -> None:
        faults = [
            {"at_step": 1, "do": "kill", "node": "gone"},
            {"at_step": 1, "do": "kill", "node": "odd"},
            {"at_step": 1, "do": "kill", "node": "there"},
            {"after_s": 0.01, "do": "kill", "node": "later"},
            {"at_step": 99, "do": "kill", "node": "never"},
        ]
        scheduler = FaultScheduler(
            parse_scenario({"fault": faults}, "s.toml"), inject=inject, on_failure=on_failure
        )
        scheduler.start()
        assert [names(f) for f in scheduler.on_event(event("StepCommitted", step=1))] == [
            ("gone",),
            ("odd",),
            ("there",),
        ]
        async with asyncio.timeout(60):
            while "later" not in injected:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        assert [names(fault) for fault in scheduler.waiting] == [("never",)]
        await scheduler.cancel()

    asyncio.run(main())
    assert sorted(injected) == ["gone", "later", "odd", "there"]
    assert failed == [
        "at step 1: kill gone: nobody answers",
        "at step 1: kill odd: LookupError: no such thing",
    ]
