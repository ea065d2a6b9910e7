"""Tests of slow nodes: when they are reported, and when that leads to another plan."""

import json
from typing import Any

import pytest

from statemachine.cluster.machine import ClusterMachine
from statemachine.effects import ComparePlan, ComputePlan, EmitEvent
from statemachine.events import NodeVanished, PlanCompared, PlanReady
from statemachine.messages.cluster import Heartbeat
from statemachine.messages.common import Quiesce
from statemachine.messages.values import ClusterPhase
from statemachine.timing import Timing
from tests.helpers.transcripts import Coordination, committed, report

LAYER_MS = 37.5
"""Time of a layer on an ordinary node here, in milliseconds; it is 30 ms by the profile, which is wrong."""
NAMES = ("node-0", "node-1", "node-2", "node-3")


class Watched(Coordination):
    """Four nodes in two pipelines that report how long they compute."""

    def __init__(self, steps: int = 1000) -> None:
        super().__init__()
        self.running(4, steps)
        self.published: list[EmitEvent] = []
        self.asked: list[ComparePlan] = []
        self.generation = 1
        self.names = NAMES

    def layers(self, node: str) -> tuple[int, ...]:
        """Return the layers that a node computes under the current plan."""
        stages = [s for p in self.machine._c.resumption.plan.pipelines for s in p.stages]
        return next(tuple(range(s.first_layer, s.end_layer)) for s in stages if s.devices[0].node == node)

    def heartbeats(self, for_s: float, **slowness: float) -> None:
        """Let some seconds pass with heartbeats and ticks. Nodes that are not named compute as usual, those
        with 0 not at all.
        """
        for _ in range(round(for_s / 0.25)):
            self.wait(0.25)
            for name in self.names:
                factor = slowness.get(name.replace("-", "_"), 1.0)
                times = (LAYER_MS * len(self.layers(name)) * factor,) if factor else None
                heartbeat = Heartbeat(generation=self.generation, committed=committed(1), microbatch_ms=times)
                self.say(name, heartbeat)
            self.fire("tick")
            self.published += self.all(EmitEvent)
            self.asked += self.all(ComparePlan)

    def events(self) -> list[tuple[str, str | None]]:
        return [(event.name, event.node) for event in self.published]

    def weighed(self) -> None:
        """Answer the last request with the real planner."""
        asked = self.asked[-1]
        present_s, possible_s = self.planner.compare_iteration_s(asked.situation)
        self.feed(PlanCompared, generation=asked.generation, current_s=present_s, best_s=possible_s)
        self.published += self.all(EmitEvent)

    def replanned(self, step: int) -> Any:
        """Go from the boundary to the next group; return the plan."""
        modes = {one.node: one.command.mode for one in self.commands(Quiesce)}
        assert modes == dict.fromkeys(NAMES, "boundary")
        self.generation += 1
        for name in NAMES:
            self.quiesced(name, self.generation, report(step, held=self.layers(name)))
        situation = self.one(ComputePlan).situation
        chosen = self.planner.plan(situation)
        self.feed(PlanReady, generation=self.generation, plan=chosen)
        for name in NAMES:
            self.resumed(name, self.generation)
        self.stepped("node-0", self.generation, step + 1)
        assert self.machine.phase is ClusterPhase.RUNNING
        return situation, chosen


def share_of(plan: Any, node: str) -> int:
    return next(p.microbatches for p in plan.pipelines if node in p.nodes)


def test_a_slow_node_is_reported_and_gets_less_work_until_it_recovers() -> None:
    s = Watched()
    s.heartbeats(2.0)
    assert not s.published
    s.heartbeats(4.5, node_3=4.0)
    assert not s.published, "not for long enough"
    s.heartbeats(1.0, node_3=4.0)
    assert s.events() == [("StragglerDetected", "node-3")]
    assert s.published[0].details["speed"] == 0.25
    assert [asked.situation.speeds for asked in s.asked] == [{"node-3": 0.25}]
    assert s.machine.public_state()["nodes"]["node-3"]["speed"] == 0.25
    s.weighed()
    situation, plan = s.replanned(1)
    assert (situation.speeds, plan.method) == ({"node-3": 0.25}, "rebalance")
    assert share_of(plan, "node-3") < 6
    s.published.clear()
    s.asked.clear()
    s.heartbeats(20.0, node_3=4.0)
    assert not s.published and not s.asked, "the plan is made for it"
    s.heartbeats(6.0)
    assert s.events() == [("StragglerRecovered", "node-3")]
    assert [asked.situation.speeds for asked in s.asked] == [{}]
    s.weighed()
    _, plan = s.replanned(2)
    assert [p.microbatches for p in plan.pipelines] == [6, 6]


def test_a_profile_that_is_wrong_for_all_makes_nobody_a_straggler() -> None:
    s = Watched()
    s.heartbeats(10.0, node_0=9.0, node_1=10.0, node_2=9.5, node_3=10.5)
    assert not s.published


@pytest.mark.parametrize("hiccups", [1, 3])
def test_hiccups_are_no_slowness(hiccups: int) -> None:
    s = Watched()
    for _ in range(hiccups):
        s.heartbeats(4.0, node_1=5.0)
        s.heartbeats(0.5)
    assert not s.published


def test_nothing_is_reported_while_the_time_of_some_node_is_unknown() -> None:
    s = Watched()
    s.heartbeats(10.0, node_0=0.0, node_3=9.0)
    assert not s.published


def test_a_plan_that_saves_too_little_is_not_worth_a_stop() -> None:
    s = Watched()
    s.heartbeats(6.0, node_3=2.0)
    s.feed(PlanCompared, generation=1, current_s=0.5, best_s=0.499)
    assert [e.name for e in s.all(EmitEvent)] == ["ReplanSkipped"]
    assert s.machine.phase is ClusterPhase.RUNNING
    s.asked.clear()
    s.heartbeats(60.0, node_3=2.0)
    assert not s.asked, "asked again only when speeds change"


def test_a_saving_and_a_step_of_seconds_are_named_in_whole_milliseconds() -> None:
    s = Watched()
    s.heartbeats(6.0, node_3=2.0)
    s.feed(PlanCompared, generation=1, current_s=40.0, best_s=39.0)
    [skipped] = s.all(EmitEvent)
    assert "would save 1250 ms of a step of 50000 ms" in skipped.reason


def test_shortly_before_the_end_nothing_changes() -> None:
    s = Watched(steps=2)
    s.heartbeats(6.0, node_3=2.0)
    s.weighed()
    assert [e.name for e in s.published] == ["StragglerDetected", "ReplanSkipped"]
    assert s.published[-1].reason.endswith(", with 1 step left")


def test_comparisons_of_plans_keep_their_distance() -> None:
    s = Watched()
    s.heartbeats(6.0, node_3=2.0)
    s.feed(PlanCompared, generation=1, current_s=0.5, best_s=0.5)
    s.asked.clear()
    s.heartbeats(10.0, node_3=8.0)
    assert s.events() == [("StragglerDetected", "node-3")] * 2, "it became slower"
    assert not s.asked
    s.heartbeats(6.0, node_3=8.0)
    assert [asked.situation.speeds for asked in s.asked] == [{"node-3": 0.12}]


def test_a_recovery_plans_with_the_speeds_and_ignores_an_older_comparison() -> None:
    s = Watched()
    s.heartbeats(6.0, node_2=3.0)
    s.feed(NodeVanished, node="node-1", incarnation=101)
    s.feed(PlanCompared, generation=1, current_s=1.0, best_s=0.5)
    assert [e.name for e in s.all(EmitEvent)] == ["MessageIgnored"]
    for name, held in (("node-0", (0, 1)), ("node-2", (0, 1)), ("node-3", (2, 3))):
        s.quiesced(name, 2, report(1, held=held))
    assert s.one(ComputePlan).situation.speeds == {"node-2": 0.33}
    s.plan()
    s.names, s.generation = ("node-0", "node-2", "node-3"), 2
    for name in s.names:
        s.resumed(name, 2)
    s.stepped("node-0", 2, 2)
    s.asked.clear()
    s.heartbeats(20.0, node_2=3.0)
    assert not s.asked, "the plan is made for them"


def test_a_restarted_coordinator_still_knows_who_is_slow() -> None:
    s = Watched()
    s.heartbeats(6.0, node_2=3.0)
    journal = json.loads(json.dumps(s.machine.durable_state()))
    machine, _ = ClusterMachine.restore(Timing(), journal, s.now, "restart")
    assert machine.public_state()["nodes"]["node-2"]["speed"] == 0.33
