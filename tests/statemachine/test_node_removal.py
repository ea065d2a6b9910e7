"""Tests of the removal of nodes that never return: which are removed, which stay, and what happens if one
returns.
"""

import pytest
from msgspec.structs import replace

from statemachine.cluster import membership
from statemachine.effects import ComputePlan, EmitEvent, RemoveNode
from statemachine.events import (
    BrokerConnected,
    NodeVanished,
    PlanImpossible,
    PlanReady,
    SubmitRequested,
    TemplatesReady,
)
from statemachine.messages.cluster import Fence, Heartbeat, RequestHello, TrainerLost
from statemachine.messages.common import PeerSuspected, Prepared
from statemachine.messages.values import ClusterPhase
from tests.helpers.cluster_machine import events, running, sent
from tests.helpers.transcripts import PROFILE, Coordination, committed, job, report

DAY_S = 86_400.0


def look(s: Coordination, after_s: float = 0.0) -> list[str]:
    """Let time pass with heartbeats of every live node; return the nodes that are removed."""
    s.wait(after_s)
    for name, node in s.machine._c.nodes.items():
        if node.alive:
            s.say(name, Heartbeat(generation=s.machine.generation, committed=None))
    s.machine._c.due["tick"] = s.now
    s.fire("tick")
    removed = [event.node for event in s.all(EmitEvent) if event.name == "NodeRemoved"]
    assert [effect.node for effect in s.all(RemoveNode)] == removed
    assert not set(removed) & s.machine.public_state()["nodes"].keys()
    return [name for name in removed if name is not None]


def pods(count: int) -> Coordination:
    """Let this many nodes come, each under its own name and a second apart, and go again."""
    s = Coordination()
    s.feed(BrokerConnected)
    for number in range(count):
        s.hello(f"pod-{number}", number)
        s.feed(NodeVanished, node=f"pod-{number}", incarnation=number)
        s.wait(1.0)
    return s


def without_node_3() -> Coordination:
    """Let three nodes train after the fourth was lost, whose state is not needed."""
    s = running()
    s.feed(NodeVanished, node="node-3", incarnation=103)
    for name, held in (("node-0", (0, 1)), ("node-1", (2, 3)), ("node-2", (0, 1))):
        s.quiesced(name, 2, report(1, held=held))
    s.plan()
    for name in s.machine._c.planned:
        s.resumed(name, 2)
    return s


def test_a_node_that_is_offline_for_long_is_removed() -> None:
    s = pods(1)
    assert look(s, DAY_S - 2.0) == []
    assert look(s, 2.0) == ["pod-0"]
    assert look(s) == []


def test_of_many_offline_nodes_the_last_stay_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(membership, "MIN_LISTED_OFFLINE", 3)
    s = pods(5)
    assert look(s) == ["pod-0", "pod-1"]
    for number in range(5):
        s.hello(f"here-{number}", 50 + number)
    for number in range(7):
        s.hello(f"away-{number}", 70 + number)
        s.wait(0.01)
        s.feed(NodeVanished, node=f"away-{number}", incarnation=70 + number)
    assert look(s) == ["pod-2", "pod-3", "pod-4", "away-0", "away-1"]


def test_the_node_of_a_recovery_stays_listed_until_its_end() -> None:
    s = without_node_3()
    assert look(s, 2 * DAY_S) == []
    s.stepped("node-0", 2, 2)
    assert "RecoveryCompleted" in events(s)
    assert look(s) == ["node-3"]


def test_a_node_of_the_plan_stays_listed_while_the_job_is_paused() -> None:
    s = running(2)
    s.feed(NodeVanished, node="node-1", incarnation=101)
    s.quiesced("node-0", 2, report(1, held=(0, 1)))
    s.feed(PlanImpossible, generation=2, too_few=True, reason="1 of 2 nodes", needed=2)
    assert s.machine.phase is ClusterPhase.PAUSED
    assert look(s, 2 * DAY_S) == []
    s.hello("node-1", 101, job_id="job-1", prepared=True, generation=1, training=True)
    assert "NodeJoined" in events(s)


def without_a_plan_for_node_2() -> Coordination:
    """Let two nodes train while the third, which reported its state, is idle."""
    s = Coordination()
    s.feed(BrokerConnected)
    names = ("node-0", "node-1", "node-2")
    for number, name in enumerate(names):
        s.hello(name, 100 + number)
    s.feed(SubmitRequested, request="r", job=job())
    for name in names:
        s.say(name, Prepared(job_id="job-1", profile=PROFILE if name == "node-0" else None))
    s.feed(TemplatesReady, job_id="job-1")
    for name in names:
        s.quiesced(name, 1, report())
    plan_for_two(s)
    for name in names:
        s.resumed(name, 1)
    s.stepped("node-0", 1, 1)
    return s


def plan_for_two(s: Coordination) -> None:
    asked: ComputePlan = s.one(ComputePlan)
    two = replace(asked.situation, nodes=("node-0", "node-1"))
    s.feed(PlanReady, generation=asked.generation, plan=s.planner.plan(two))


def pause_without_node_1(s: Coordination) -> None:
    s.feed(NodeVanished, node="node-1", incarnation=101)
    generation = s.machine.generation
    for name in s.machine._c.required_nodes.copy():
        s.quiesced(name, generation, report(1, held=(0, 1)))
    s.feed(PlanImpossible, generation=generation, too_few=True, reason="1 of 2 nodes", needed=2)
    assert s.machine.phase is ClusterPhase.PAUSED


def test_an_idle_node_with_state_stays_listed_while_it_may_be_needed() -> None:
    """No plan, report or snapshot names it, but it holds what it reported."""
    s = without_a_plan_for_node_2()
    s.feed(NodeVanished, node="node-2", incarnation=102)
    pause_without_node_1(s)
    assert look(s, 2 * DAY_S) == []
    s.hello("node-2", 102, job_id="job-1", prepared=True, generation=1, training=False, quiesced=True)
    assert "NodeJoined" in events(s)
    assert not sent(s, Fence)


def test_an_idle_node_is_removed_while_the_job_trains() -> None:
    s = without_a_plan_for_node_2()
    s.feed(NodeVanished, node="node-2", incarnation=102)
    assert look(s, 2 * DAY_S) == ["node-2"]


@pytest.mark.parametrize("how", ["goodbye", "no trainers", "never counted", "resumed without it"])
def test_a_node_without_state_that_counts_is_removed_while_the_job_is_paused(how: str) -> None:
    s, gone = without_a_plan_for_node_2(), "node-2"
    if how == "no trainers":
        s.say("node-2", TrainerLost(generation=1, device=0, cause="exited", detail="signal 9"))
    if how == "never counted":
        gone = "node-3"
        s.hello(gone, 103)
        s.say(gone, Prepared(job_id="job-1", profile=None))
    s.feed(NodeVanished, node=gone, incarnation=s.incarnations[gone], graceful=how == "goodbye")
    if how == "resumed without it":
        s.say("node-0", PeerSuspected(generation=1, detail="connection reset"))
        s.wait(30.0)
        for name in ("node-0", "node-1"):
            s.say(name, Heartbeat(generation=1, committed=None))
        s.machine._c.due["suspicion"] = s.now
        s.fire("suspicion")
        for name in ("node-0", "node-1"):
            s.quiesced(name, 2, report(1))
        plan_for_two(s)
    pause_without_node_1(s)
    assert look(s, 2 * DAY_S) == [gone]


def test_a_removed_node_that_returns_with_state_is_fenced() -> None:
    s = without_node_3()
    s.stepped("node-0", 2, 2)
    assert look(s, 2 * DAY_S) == ["node-3"]
    s.say("node-3", Heartbeat(generation=1, committed=committed(9)))
    assert set(sent(s, RequestHello)) == {"node-3"}
    s.hello("node-3", 103, job_id="job-1", prepared=True, generation=1, training=True)
    assert set(sent(s, Fence)) == {"node-3"}
    assert s.machine.cluster.progress.known_step == 2
    s.hello("node-3", 104)
    assert "NodeJoined" in events(s)


def test_retained_messages_of_an_unknown_node_that_is_gone_are_deleted() -> None:
    s = running()
    s.feed(NodeVanished, node="pod-7", incarnation=7)
    assert s.one(RemoveNode).node == "pod-7"
    assert events(s) == []


def test_a_lost_trainer_of_an_idle_node_interrupts_nothing() -> None:
    """It was quiesced with the others and is not in the plan, so there is nothing to recover."""
    s = without_a_plan_for_node_2()
    s.wait(0.1)
    s.say("node-2", TrainerLost(generation=1, device=0, cause="exited", detail="signal 9"))
    assert s.machine.phase is ClusterPhase.RUNNING
    published = [event.name for event in s.all(EmitEvent)]
    s.wait(0.1)
    s.stepped("node-0", 1, 2)
    published += [event.name for event in s.all(EmitEvent)]
    assert "TrainerLost" in published and not {"GenerationStarted", "RecoveryCompleted"} & set(published)
