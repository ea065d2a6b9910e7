"""Expectations compared with what was observed: open, met or not met, with the measured value."""

import asyncio
import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

from ftd.cli.main import app
from ftd.errors import FtdError, RequestRejected
from ftd.faults.chaos.player import ScenarioPlayer, ScenarioResult
from ftd.faults.chaos.record import ScenarioRecord
from ftd.faults.chaos.report import encode_documents, render_junit, render_text
from ftd.faults.chaos.scenario import parse_scenario
from ftd.faults.chaos.values import Fault, Scenario
from ftd.faults.chaos.verdicts import find_statuses, judge

Json = dict[str, Any]


def scenario(*faults: Json, **tables: Any) -> Scenario:
    return parse_scenario({"fault": list(faults), **tables}, "s.toml")


KILL = {"id": "kill", "at_step": 3, "do": "kill", "node": "a"}
_numbers = iter(range(10**6))


def event(name: str, **fields: Any) -> Json:
    number = next(_numbers)
    base = {"event": name, "id": f"e-{number}", "monotonic": float(number), "cause": "c", "node": None}
    return {**base, "generation": 1, "step": 1, "reason": "why", "details": {}, **fields}


def step(number: int, loss: float = 1.0) -> Json:
    return event("StepCommitted", step=number, details={"loss": loss})


def recovery(generation: int, cause: str = "node_lost", **fields: Any) -> Json:
    document = {
        "generation": generation,
        "cause": cause,
        "tier": "live_replica",
        "rolled_back_steps": 0,
        "recomputed_steps": 0,
        **fields,
    }
    return event("RecoveryCompleted", details={"recovery": document})


def started(generation: int) -> Json:
    return event("GenerationStarted", generation=generation)


def record(*events: tuple[float, Json], of: Scenario, injected_at_s: float = 1.0) -> ScenarioRecord:
    """Return a record in which generation 1 trains and all faults are injected at one moment."""
    found = ScenarioRecord()
    found.on_state({"phase": "RUNNING", "generation": 1, "nodes": {"a": {"state": "OFFLINE"}}})
    for at_s, one in ((0.0, started(1)), (0.1, recovery(1, "start")), *events):
        if at_s >= injected_at_s and not found.injected:
            for fault in of.faults:
                found.on_injected(fault, injected_at_s)
        found.on_event(one, at_s)
    if not found.injected:
        for fault in of.faults:
            found.on_injected(fault, injected_at_s)
    return found


@pytest.mark.parametrize(
    ("expect", "events", "met", "measured"),
    [
        ({"resumed_within_s": 2}, [(2.5, started(2)), (2.7, recovery(2))], True, "1.70 s"),
        ({"resumed_within_s": 2}, [(2.5, started(2)), (4.0, recovery(2))], False, "3.00 s"),
        ({"resumed_within_s": 2}, [], None, "no recovery"),
        ({"lost_steps_max": 3}, [(2.0, recovery(2, rolled_back_steps=3))], True, "3"),
        ({"lost_steps_max": 2}, [(2.0, recovery(2, rolled_back_steps=3))], False, "3"),
        ({"recomputed_steps_max": 0}, [(2.0, recovery(2, recomputed_steps=1))], False, "1"),
        ({"recoveries_max": 0}, [], True, "0"),
        ({"recoveries_max": 0}, [(2.0, recovery(2))], False, "1"),
        ({"tier": "decoded"}, [(2.0, recovery(2))], None, "live_replica"),
        ({"tier": ["decoded", "memory"]}, [(2.0, recovery(2, tier="memory"))], True, "memory"),
        (
            {"cause": "node_joined"},
            [(2.0, recovery(2)), (3.0, recovery(3, "node_joined"))],
            True,
            "node_lost",
        ),
        ({"events": ["NodeLost"]}, [(0.5, event("NodeLost"))], None, "not seen"),
        ({"events": ["NodeLost"]}, [(1.25, event("NodeLost"))], True, "after 0.25 s"),
        ({"no_events": ["NodeLost"]}, [(0.5, event("NodeLost"))], True, "not seen"),
        ({"no_events": ["NodeLost"]}, [(1.5, event("NodeLost", node="b"))], False, "b why"),
        ({"nodes": {"a": "OFFLINE"}}, [], True, "a OFFLINE"),
        ({"nodes": {"a": "HEALTHY"}}, [], None, "a OFFLINE"),
        ({"nodes": {"z": "HEALTHY"}}, [], None, "z unknown"),
        ({"phase": "RUNNING"}, [], True, "RUNNING"),
        ({"phase": "PAUSED"}, [], None, "RUNNING"),
        ({"finishes": True}, [], None, "not yet"),
        ({"finishes": True}, [(2.0, event("JobFinished"))], True, "JobFinished"),
        ({"finishes": True}, [(2.0, event("JobFailed"))], False, "JobFailed"),
    ],
)
def test_expectations_are_assessed(
    expect: Json, events: list[tuple[float, Json]], met: bool | None, measured: str
) -> None:
    played = scenario({**KILL, "expect": expect})
    seen = record(*events, of=played)
    [of_fault] = judge(played, seen)[1:]
    assert of_fault.fault_id == "kill"
    assert of_fault.met is (met is True)
    assert measured in of_fault.measured
    [(_, _, status)] = find_statuses(played, seen)
    assert status.met is met


def test_a_fault_during_a_recovery_ends_with_that_recovery_or_the_next() -> None:
    played = scenario({**KILL, "expect": {"resumed_within_s": 9}})
    before = record((0.9, started(2)), (1.5, recovery(2)), of=played)
    assert judge(played, before)[1].measured == "0.50 s"
    behind = record((0.8, started(2)), (0.9, recovery(2)), (1.5, recovery(2)), (2.0, recovery(3)), of=played)
    assert judge(played, behind)[1].measured == "1.00 s"


def test_expectations_of_the_whole_scenario_count_all_faults() -> None:
    two = scenario(
        KILL, {**KILL, "id": "later", "at_step": 9}, expect={"lost_steps_max": 0, "resumed_within_s": 1}
    )
    seen = record((1.5, recovery(2, rolled_back_steps=4)), of=two)
    seen.injected["later"].at_s = 5.0
    seen.on_event(recovery(3), 5.5)
    resumed, lost = judge(two, seen)[2:]
    assert (resumed.met, resumed.measured) == (True, "0.50 s")
    assert (lost.met, lost.measured) == (False, "4")


def test_losses_are_compared_with_an_undisturbed_run() -> None:
    same = scenario(expect={"same_losses": 1e-3})
    seen = record((2.0, step(1, 2.0)), (3.0, step(2, 1.0)), of=same)
    assert "no run without faults" in judge(same, seen)[0].measured
    seen.baseline = {1: 2.001, 2: 1.0, 3: 0.5}
    assert judge(same, seen)[0].met
    seen.baseline = {1: 2.0, 2: 1.1}
    [verdict] = judge(same, seen)
    assert not verdict.met
    assert "2 steps, 9.1e-02 apart at step 2" in verdict.measured
    [(_, what, status)] = find_statuses(same, ScenarioRecord(baseline={1: 1.0}))
    assert (what, status.met) == ("losses as without faults (relative 0.001)", None)


def test_duplicated_events_count_once() -> None:
    seen = ScenarioRecord()
    one = event("StepCommitted", step=1, details={"loss": 1.0})
    for _ in range(2):
        seen.on_event({**one, "monotonic": 5.0}, 1.0)
    assert seen.commits == 1


def play(played: Scenario, events: list[Json], *, reject: str = "") -> ScenarioResult:
    """Play a scenario with a real clock, one event after another; the cluster's phase is RUNNING."""

    async def inject(fault: Fault) -> tuple[str, ...]:
        if fault.id == reject:
            raise RequestRejected("chaos is off on a")
        return ("a",)

    async def main() -> ScenarioResult:
        player = ScenarioPlayer(played, inject=inject, report=lambda line: None)
        player.on_state({"phase": "RUNNING", "generation": 1, "nodes": {}})
        player.start()
        found = asyncio.ensure_future(player.wait_for_result())
        for one in events:
            player.on_event(one)
            await asyncio.sleep(0.01)
        return await asyncio.wait_for(found, 60)

    return asyncio.run(main())


def test_a_scenario_ends_some_steps_after_all_expectations_are_met() -> None:
    expected = scenario({**KILL, "expect": {"resumed_within_s": 10}}, steps_after=2)
    events = [step(3), started(2), recovery(2), step(4), step(5), step(6), step(7)]
    played = play(expected, events)
    assert played.met
    assert played.ended_by == "all expectations met"
    assert played.record.injected["kill"].nodes == ("a",)
    lines = render_text(played)
    assert "✓ kill: at step 3: kill a: at" in lines
    assert "✓ kill: resumed within 10 s: " in lines
    assert "passed s: 2 of 2 met" in lines


def test_a_scenario_ends_as_soon_as_an_expectation_has_failed() -> None:
    hopeless = scenario({**KILL, "expect": {"no_events": ["NodeLost"], "events": ["JobFinished"]}})
    played = play(hopeless, [step(3), event("NodeLost", node="b")])
    assert not played.met
    assert played.ended_by == "an expectation that cannot be met any more"
    rejected = play(hopeless, [step(3)], reject="kill")
    assert rejected.ended_by == "a fault that could not be injected"
    assert "✗ kill: at step 3: kill a: chaos is off on a" in render_text(rejected)
    late = play(scenario(KILL, limit_s=0.2), [step(1)])
    assert late.ended_by == "the time limit of 0.2 s"
    assert "it was never due" in render_text(late)


def test_the_json_and_junit_reports_agree() -> None:
    bad = play(
        scenario({**KILL, "expect": {"no_events": ["TrainerLost"]}}, purpose="To see."),
        [step(3), event("TrainerLost", node="b", reason="died of \x1b[31m<&>\x00")],
    )
    suites = ElementTree.fromstring(render_junit([bad, bad]))
    assert [suite.get("failures") for suite in suites] == ["1", "1"]
    failure: Any = suites[0][1].find("failure")
    assert failure.get("message") == "b died of [31m<&>"
    assert "TrainerLost b died of" in str(suites[0].findtext("system-out"))
    [document] = json.loads(encode_documents([bad]))
    assert (document["scenario"], document["purpose"], document["met"]) == ("s", "To see.", False)
    assert [one["met"] for one in document["expectations"]] == [True, False]
    assert document["faults"][0]["nodes"] == ["a"]
    assert "TrainerLost" in [one["event"] for one in document["events"]]


CLUSTER = '[cluster]\njob = "job.toml"\nnodes = 3\n'


@pytest.mark.parametrize(
    ("text", "arguments", "expected_words"),
    [
        ("fault = []\n", ["--local"], "has no [cluster]"),
        (CLUSTER + '[[fault]]\nat_step=1\ndo="cut"\nnode="node-0"\n', ["--local"], "network = true"),
        (CLUSTER + '[[fault]]\nat_step=1\ndo="fill_disk"\nnode="node-0"\n', ["--local"], "disk_mib"),
        (CLUSTER + 'network = true\nbroker = "embedded"\n', ["--local"], 'write "mosquitto"'),
        ('[[fault]]\nat_step=1\ndo="kill"\nrole="broker"\n', ["--broker", "mqtt://127.0.0.1:9"], "--local"),
        ('[[fault]]\nat_step=1\ndo="cut"\nnode="a"\n', ["--broker", "mqtt://127.0.0.1:9"], "--local"),
        ("fault = []\n[expect]\nsame_losses = true\n", ["--broker", "mqtt://127.0.0.1:9"], "same_losses"),
        ("fault = []\n", ["--local", "--junit", "/nowhere/at/all.xml"], "--junit"),
    ],
)
def test_an_impossible_scenario_is_rejected_before_anything_happens(
    tmp_path: Path, text: str, arguments: list[str], expected_words: str
) -> None:
    path = tmp_path / "s.toml"
    path.write_text(text if "fault" in text else f"fault = []\n{text}")
    done = CliRunner().invoke(app, ["chaos", "run", str(path), *arguments])
    assert isinstance(done.exception, FtdError)
    assert done.exception.exit_code == 2
    assert expected_words in str(done.exception)
