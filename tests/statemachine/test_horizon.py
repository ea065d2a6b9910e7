"""Tests of the expected time to the next failure, given or learned, and of a profile that comes with a job."""

import json
from typing import Any

import pytest
from msgspec.structs import replace

from planner.values import Situation
from statemachine.cluster.horizon import PRIOR_FAILURES, PRIOR_NODE_S
from statemachine.cluster.machine import ClusterMachine
from statemachine.effects import BuildTemplates, CancelTemplates, ComputePlan
from statemachine.events import (
    BrokerConnected,
    NodeVanished,
    StopRequested,
    SubmitRequested,
    TemplatesReady,
)
from statemachine.messages.cluster import Leaving, Prepare
from statemachine.messages.common import Prepared
from statemachine.timing import Timing
from tests.helpers.transcripts import PROFILE, Coordination, job, report


def started(nodes: int = 4, **submitted: Any) -> tuple[Coordination, Situation]:
    """Bring a job to its first plan; return the scenario and the situation that the planner was asked about."""
    s = Coordination()
    s.feed(BrokerConnected)
    for number in range(nodes):
        s.hello(f"node-{number}", 100 + number)
    s.feed(SubmitRequested, **{"request": "r", "job": job(), **submitted})
    for number in range(nodes):
        profile = PROFILE if number == 0 and "profile" not in submitted else None
        s.say(f"node-{number}", Prepared(job_id="job-1", profile=profile))
    s.feed(TemplatesReady, job_id="job-1")
    for number in range(nodes):
        s.quiesced(f"node-{number}", 1, report())
    return s, s.one(ComputePlan).situation


def run(s: Coordination, generation: int, nodes: list[str], *, for_s: float) -> None:
    """Answer the requested plan and train for a while."""
    s.plan()
    for name in nodes:
        s.resumed(name, generation)
    s.wait(0.1)
    s.stepped(nodes[0], generation, generation)
    s.wait(for_s - 0.1)


def lose(s: Coordination, generation: int, lost: str, left: list[str]) -> Situation:
    s.feed(NodeVanished, node=lost, incarnation=s.incarnations[lost])
    for name in left:
        s.quiesced(name, generation, report(step=generation - 1))
    situation: Situation = s.one(ComputePlan).situation
    return situation


def expected(failures: int, node_s: float, nodes: int) -> float:
    lived_s = PRIOR_FAILURES * PRIOR_NODE_S + node_s
    return pytest.approx(lived_s / (PRIOR_FAILURES + failures) / nodes, rel=0.05)


def test_before_anything_is_known_a_node_fails_once_a_day() -> None:
    _, situation = started(4)
    assert situation.horizon_s == expected(0, 0.0, 4) == pytest.approx(6 * 3600, rel=0.05)


def test_the_user_s_value_is_used() -> None:
    s, situation = started(4, job=replace(job(), horizon_s=77.5))
    assert situation.horizon_s == 77.5
    run(s, 1, [f"node-{n}" for n in range(4)], for_s=10)
    assert lose(s, 2, "node-3", ["node-0", "node-1", "node-2"]).horizon_s == 77.5


def test_failures_shorten_the_expected_time_and_quiet_time_lengthens_it() -> None:
    names = [f"node-{n}" for n in range(4)]
    s, _ = started(4)
    run(s, 1, names, for_s=1000)
    assert lose(s, 2, "node-3", names[:3]).horizon_s == expected(1, 4 * 1000, 3)
    run(s, 2, names[:3], for_s=50_000)
    second = lose(s, 3, "node-2", names[:2])
    assert second.horizon_s == expected(2, 4 * 1000 + 3 * 50_000, 2)


def test_a_node_that_leaves_is_no_failure() -> None:
    names = [f"node-{n}" for n in range(4)]
    s, _ = started(4)
    run(s, 1, names, for_s=100)
    s.say("node-3", Leaving(reason="SIGTERM"))
    s.check_drain()
    s.fire("join", 0.1)
    for name in names:
        s.quiesced(name, 2, report(step=1))
    assert s.one(ComputePlan).situation.horizon_s == expected(0, 400, 3)


def test_two_losses_in_one_recovery_are_one_failure() -> None:
    names = [f"node-{n}" for n in range(4)]
    s, _ = started(4)
    run(s, 1, names, for_s=100)
    s.feed(NodeVanished, node="node-3", incarnation=103)
    situation = lose(s, 2, "node-2", names[:2])
    assert situation.horizon_s == expected(1, 400, 2)


def test_the_expected_time_survives_a_restart_and_ends_with_the_job() -> None:
    names = [f"node-{n}" for n in range(4)]
    s, _ = started(4)
    run(s, 1, names, for_s=100)
    lose(s, 2, "node-3", names[:3])
    run(s, 2, names[:3], for_s=200)
    journal = json.loads(json.dumps(s.machine.durable_state()))
    machine, effects = ClusterMachine.restore(Timing(), journal, s.now, "restart")
    again = Coordination(machine)
    again.now, again.incarnations = s.now, s.incarnations
    built = [effect for effect in effects if isinstance(effect, BuildTemplates)]
    assert [(effect.max_nodes, effect.present) for effect in built] == [(6, 3)], "as many as before"
    again.feed(BrokerConnected)
    again.feed(TemplatesReady, job_id="job-1")
    assert lose(again, 3, "node-2", names[:2]).horizon_s == expected(2, 400 + 3 * 200, 2)
    again.feed(StopRequested, request="s", job="job-1")
    assert again.one(CancelTemplates).job_id == "job-1"
    again.feed(SubmitRequested, request="r2", job=replace(job(), job_id="job-2"))
    begun = {"failures": 0, "state_losses": 0, "node_s": 0.0, "nodes": 0, "since": 0.0}
    assert machine.durable_state()["exposure"] == begun


def test_a_journal_without_exposure_counts_no_failures() -> None:
    s, _ = started(2)
    journal = s.machine.durable_state()
    del journal["exposure"], journal["templates_for"]
    machine, _ = ClusterMachine.restore(Timing(), journal, 1.0, "restart")
    assert machine.durable_state()["exposure"]["failures"] == 0


def test_a_job_with_a_profile_is_not_measured() -> None:
    s = Coordination()
    s.feed(BrokerConnected)
    s.hello("node-0", 100)
    s.feed(SubmitRequested, request="r", job=job(), profile=PROFILE)
    commands = [one.command for one in s.commands(Prepare)]
    assert [command.profile for command in commands] == [False]
    assert s.one(BuildTemplates).profiled.profile == PROFILE
    _, situation = started(2, profile=PROFILE)
    assert len(situation.nodes) == 2
