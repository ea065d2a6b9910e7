"""Drains: nothing is promised before the planner has answered, and what was promised is what happens."""

from typing import Any

import pytest

from ftd.coordinator.plan_answer import answer_question
from planner.planner import Planner
from statemachine.cluster.machine import ClusterMachine
from statemachine.effects import AnswerRequest, CheckDrain, ComputePlan, EmitEvent
from statemachine.events import (
    BrokerConnected,
    DrainChecked,
    DrainRequested,
    NodeVanished,
    StopRequested,
    TemplatesReady,
)
from statemachine.messages.cluster import Fence, Heartbeat, Leaving, Release
from statemachine.messages.common import Finished, Prepared, Quiesce
from statemachine.messages.values import ClusterPhase, DeviceReport
from tests.helpers.cluster_machine import events, restarted, sent
from tests.helpers.transcripts import Coordination, committed, report


class Drains(Coordination):
    """A job that trains, whose planner's questions are answered as soon as they are asked."""

    def __init__(self, nodes: int, machine: ClusterMachine | None = None) -> None:
        super().__init__(machine)
        self.said: dict[str, tuple[bool, str, str]] = {}
        """Answers by request: accepted, outcome, detail."""
        self.told: list[EmitEvent] = []
        if machine is None:
            self.running(nodes, steps=100)
            self.said.clear()

    def took(self, effects: Any) -> Any:
        super().took(effects)
        self.said |= {one.request: (one.accepted, one.outcome, one.detail) for one in self.all(AnswerRequest)}
        self.told += self.all(EmitEvent)
        return effects

    def drain(self, node: str, request: str = "d", *, check: bool = True, **how: bool) -> None:
        """Request a drain, and answer what the planner is asked."""
        self.feed(DrainRequested, request=request, node=node, **how)
        if check:
            self.check_all()

    def check_all(self) -> None:
        while (asked := self.machine._c.drains.checking) is not None and asked.generation == self.generation:
            self.last = [asked]
            self.check_drain()

    @property
    def generation(self) -> int:
        found: int = self.machine.generation
        return found

    def joins(self, *names: str) -> None:
        for name in names:
            self.hello(name, 100 + int(name.removeprefix("node-")))
            self.say(name, Prepared(job_id="job-1", profile=None))
            self.check_all()

    def reports(self) -> None:
        """Let all expected nodes report what the last plan gave them."""
        held: dict[str, DeviceReport] = {}
        for pipeline in self.machine._c.resumption.plan.pipelines:
            for stage in pipeline.stages:
                layers = tuple(range(stage.first_layer, stage.end_layer))
                held[stage.devices[0].node] = report(self.machine.cluster.progress.known_step, held=layers)
        generation = self.machine.generation
        for name in list(self.machine._c.state.expected):
            self.quiesced(name, generation, held.get(name, report()))

    def goes_on(self) -> None:
        """Let the generation under way reach its first commit, with the real planner's answers."""
        self.reports()
        while self.all(ComputePlan):
            asked = self.one(ComputePlan)
            found = answer_question(asked, self.planner, Planner.plan, lambda: self.now)
            fields = {name: getattr(found, name) for name in found.__slots__}
            self.feed(type(found), **fields)
        if self.machine.phase is ClusterPhase.PAUSED:
            return
        planned = self.machine._c.planned
        for name in planned:
            self.resumed(name, self.machine.generation)
        self.stepped(planned[0], self.machine.generation, self.machine.cluster.progress.known_step + 1)
        self.check_all()

    def restarted(self) -> "Drains":
        other = restarted(self)
        other.said, other.told = {}, []
        other.feed(BrokerConnected)
        other.feed(TemplatesReady, job_id="job-1")
        other.check_all()
        return other

    def node(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = self.machine.public_state()["nodes"][name]
        return found

    def reasons(self, event: str) -> list[str]:
        return [one.reason for one in self.told if one.name == event]


PROMISE = "node-3 leaves at the next step boundary: the other nodes have a plan without it"
TOO_FEW = "1 node is usable and 2 are needed"


# --- the answer ----------------------------------------------------------------------------------


def test_a_drain_is_refused_before_anything_changes() -> None:
    s = Drains(2)
    before = s.machine.durable_state(), s.machine.public_state()
    s.drain("node-1", check=False)
    assert not s.all(AnswerRequest), "nobody knows yet"
    s.check_all()
    accepted, outcome, detail = s.said["d"]
    assert (accepted, outcome) == (False, "")
    assert TOO_FEW in detail and "ftd drain --when-possible node-1" in detail
    assert s.reasons("NodeDrainRefused") == [detail]
    assert (s.machine.durable_state(), s.machine.public_state()) == before
    assert "join" not in s.due and "drain" not in s.due
    s.drain("node-1", "again", check=False)
    assert not s.all(CheckDrain), "the planner would give the same answer"
    assert s.said["again"] == (False, "", detail)


def test_a_drain_that_is_possible_is_promised_and_carried_out() -> None:
    s = Drains(4)
    s.drain("node-3")
    s.drain("node-3", "again")
    assert s.said == {"d": (True, "leaving", PROMISE), "again": (True, "leaving", PROMISE)}
    s.fire("join", 0.1)
    s.goes_on()
    assert set(sent(s, Release)) == {"node-3"}
    assert s.reasons("RecoveryCompleted")[-1] == "training continues without node-3, which was drained"
    s.drain("node-3", "late")
    assert s.said["late"] == (True, "released", "node-3 is released already")


@pytest.mark.parametrize("together", [False, True])
def test_of_two_drains_of_which_only_one_is_possible_one_is_refused(together: bool) -> None:
    """One node of the first stage must stay, of two pipelines of two nodes."""
    s = Drains(4)
    if together:
        s.feed(NodeVanished, node="node-3", incarnation=103)
    for name in ("node-0", "node-2"):
        s.drain(name, name, check=not together)
    if together:
        s.hello("node-3", 103, job_id="job-1", prepared=True, generation=1, training=True)
        s.goes_on()
    else:
        s.fire("join", 0.1)
        s.goes_on()
    assert s.said["node-0"][:2] == (True, "leaving")
    accepted, _, detail = s.said["node-2"]
    assert not accepted and "while node-0 leaves" in detail
    if together:
        s.fire("join", 0.1)
        s.goes_on()
    assert s.machine._c.nodes["node-0"].released and s.node("node-2")["in_plan"]


def test_nodes_whose_notices_arrive_together_leave_together() -> None:
    s = Drains(6)
    assert len(s.machine._c.planned) == 6
    s.say("node-4", Leaving(reason="spot notice"))
    s.say("node-5", Leaving(reason="spot notice"))
    s.check_all()
    s.fire("join", 0.1)
    s.goes_on()
    assert set(sent(s, Release)) == {"node-4", "node-5"}


def test_an_unknown_an_offline_and_an_idle_node_need_no_planner() -> None:
    s = Drains(4)
    s.drain("node-7", "unknown")
    assert "there is no node 'node-7'" in s.said["unknown"][2]
    s.joins("node-4")
    s.drain("node-4", "idle", check=False)
    assert s.said["idle"] == (True, "released", "node-4 is released: it holds nothing that the job needs")
    assert set(sent(s, Release)) == {"node-4"}
    s.feed(NodeVanished, node="node-4", incarnation=104)
    s.drain("node-4", "offline")
    assert not s.said["offline"][0] and "offline" in s.said["offline"][2]


def test_an_answer_of_the_planner_for_another_generation_promises_nothing() -> None:
    s = Drains(4)
    s.drain("node-3", check=False)
    s.feed(NodeVanished, node="node-1", incarnation=101)
    s.feed(DrainChecked, generation=1, nodes=("node-3",))
    assert not s.said
    s.goes_on()
    accepted, _, detail = s.said["d"]
    assert not accepted and "node-3" in detail
    assert "node-3" in s.machine._c.planned


def test_during_a_recovery_its_plan_is_the_answer() -> None:
    s = Drains(6)
    s.feed(NodeVanished, node="node-2", incarnation=102)
    s.drain("node-5")
    assert not s.said
    s.goes_on()
    assert s.said["d"][:2] == (True, "leaving")
    assert not s.node("node-5")["in_plan"] and set(sent(s, Release)) == {"node-5"}
    [*_, done] = s.reasons("RecoveryCompleted")
    assert done == "training continues after the loss of node-2 and without node-5, which was drained"


def test_a_recovery_that_takes_long_leaves_nobody_without_an_answer() -> None:
    s = Drains(6)
    s.feed(NodeVanished, node="node-2", incarnation=102)
    s.drain("node-5")
    s.drain("node-4", "wait", when_possible=True)
    s.fire("drain", 20.0)
    assert s.said["d"][:2] == (False, "") and "nothing has changed" in s.said["d"][2]
    assert s.said["wait"][:2] == (True, "waiting")
    s.goes_on()
    assert s.node("node-5")["in_plan"] and not s.node("node-4")["in_plan"]


# --- waiting -------------------------------------------------------------------------------------


def test_a_drain_is_refused_then_waits_and_is_carried_out_as_a_transcript_shows() -> None:
    s = Drains(2)
    s.failure("node leaves (SIGTERM, `ftd drain`)", "The plan cannot do without it at first.")
    s.drain("node-1", "at once")
    s.note("nothing has changed; the same request may wait")
    s.drain("node-1", "when possible", when_possible=True)
    s.note("two more nodes make a second pipeline, which copies the layers that node-1 alone holds")
    s.joins("node-2", "node-3")
    s.fire("join", 0.1)
    s.goes_on()
    s.note("now there is a plan without it")
    s.fire("join", 0.1)
    s.goes_on()
    s.compare("drain_that_waits")


def test_a_waiting_drain_is_carried_out_when_other_nodes_make_it_possible() -> None:
    s = Drains(2)
    s.drain("node-1", when_possible=True)
    accepted, outcome, detail = s.said["d"]
    assert (accepted, outcome) == (True, "waiting") and TOO_FEW in detail
    assert len(s.reasons("NodeDrainWaiting")) == 1
    s = s.restarted()
    assert TOO_FEW in s.node("node-1")["drain_waits"] and s.node("node-1")["draining"]
    assert not s.reasons("NodeDrainWaiting"), "that was reported before"
    s.joins("node-2", "node-3")
    assert not s.reasons("NodeDraining"), "node-1 alone holds its layers"
    assert not s.reasons("NodeDrainWaiting"), "it still waits"
    s.fire("join", 0.1)
    s.goes_on()
    assert s.reasons("RecoveryCompleted")[-1] == "training continues with node-2 and node-3"
    assert s.reasons("NodeDraining") == [PROMISE.replace("node-3", "node-1") + " (drain requested)"]
    s.fire("join", 0.1)
    s.goes_on()
    assert set(sent(s, Release)) == {"node-1"}
    assert s.node("node-1")["drain_waits"] == ""


def test_a_waiting_drain_can_be_cancelled_until_the_plan_does_without_the_node() -> None:
    s = Drains(2)
    s.drain("node-1", cancel=True)
    assert s.said["d"] == (False, "", "no drain of node-1 is under way")
    s.drain("node-1", "wait", when_possible=True)
    s.drain("node-1", "cancel", cancel=True)
    assert s.said["cancel"][:2] == (True, "cancelled")
    assert not s.node("node-1")["draining"] and len(s.reasons("NodeDrainCancelled")) == 1
    s = Drains(4)
    s.drain("node-3", "first")
    s.drain("node-3", "cancel", cancel=True)
    s.fire("join", 0.1)
    assert s.machine.generation == 1, "nobody leaves"
    s.drain("node-3", "second")
    s.fire("join", 0.1)
    s.reports()
    s.drain("node-3", "too late", cancel=True)
    assert not s.said["too late"][0] and "leaving already" in s.said["too late"][2]


def test_a_promise_that_a_failure_breaks_becomes_a_drain_that_waits() -> None:
    s = Drains(4)
    s.drain("node-3")
    s.feed(NodeVanished, node="node-1", incarnation=101)
    s.goes_on()
    [why] = s.reasons("NodeDrainWaiting")
    assert why.startswith("node-3 stays for now, and its drain waits: the plan cannot do without it: ")
    assert s.node("node-3")["in_plan"] and s.node("node-3")["drain_waits"]
    assert "drained" not in s.reasons("RecoveryCompleted")[-1]
    generation = s.machine.generation
    s.stepped("node-3", generation, s.machine.cluster.progress.known_step + 1)
    assert not s.all(CheckDrain) and "join" not in s.due, "the same plan would be asked for again and again"


def test_a_drain_during_a_pause_is_refused_or_waits_for_its_end() -> None:
    s = Drains(2)
    s.feed(NodeVanished, node="node-0", incarnation=100)
    s.goes_on()
    assert s.machine.phase is ClusterPhase.PAUSED
    s.drain("node-1")
    assert not s.said["d"][0] and "the job is paused" in s.said["d"][2]
    s.drain("node-1", "wait", when_possible=True)
    assert s.said["wait"][1] == "waiting"
    s.hello("node-0", 100, job_id="job-1", prepared=True, generation=1, training=True)
    s.fire("join", 0.1)
    assert set(sent(s, Quiesce)) == {"node-0", "node-1"}, "the job needs it to continue"


def test_a_paused_job_continues_with_a_node_that_is_to_leave() -> None:
    s = Drains(2)
    s.feed(NodeVanished, node="node-0", incarnation=100)
    s.goes_on()
    s.hello("node-0", 100, job_id="job-1", prepared=True, generation=1, training=True)
    s.say("node-0", Leaving(reason="SIGTERM"))
    assert not sent(s, Release) and s.node("node-0")["drain_waits"]
    s.fire("join", 0.1)
    assert set(sent(s, Quiesce)) == {"node-0", "node-1"}


def test_a_newcomer_that_is_to_leave_is_not_included_while_it_waits_for_its_release() -> None:
    s = Drains(4)
    s.say("node-0", Heartbeat(generation=1, committed=committed(5)))
    s.joins("node-4")
    s.fire("join", 0.1)
    s.goes_on()
    s.hello("node-5", 105)
    s.drain("node-5", check=False)
    s.say("node-5", Prepared(job_id="job-1", profile=None))
    assert not s.said and "join" not in s.due, "the votes of some steps are yet to be found"


def test_the_end_of_the_job_releases_a_node_whose_drain_waits() -> None:
    s = Drains(2)
    s.drain("node-1", when_possible=True)
    s.drain("node-0", "open", check=False)
    s.feed(StopRequested, request="stop", job="tiny")
    assert set(sent(s, Release)) == {"node-0", "node-1"}
    assert s.said["open"] == (True, "released", "node-0 is released: no job is under way")


def test_a_job_that_finishes_releases_a_node_whose_drain_waits() -> None:
    s = Coordination()
    s.running(2, steps=1)
    s.feed(DrainRequested, request="d", node="node-1", when_possible=True)
    s.check_drain()
    for name in ("node-0", "node-1"):
        s.say(name, Finished(generation=1, step=1, digests={}))
    assert s.machine.phase is ClusterPhase.FINISHED and set(sent(s, Release)) == {"node-1"}


def test_a_node_that_cannot_be_released_and_leaves_by_itself_is_said_to_be_needed() -> None:
    s = Drains(2)
    s.say("node-1", Leaving(reason="SIGTERM"))
    s.check_all()
    [why] = s.reasons("NodeDrainWaiting")
    assert "it leaves by itself when its time is over" in why and TOO_FEW in why
    assert s.node("node-1")["drain_waits"].endswith("; it leaves by itself when its time is over")
    s.drain("node-1", cancel=True)
    assert not s.said["d"][0] and "leaves by itself (SIGTERM)" in s.said["d"][2]


def test_a_job_that_waits_names_the_drained_nodes_that_could_take_part() -> None:
    s = Drains(4)
    s.drain("node-3")
    s.fire("join", 0.1)
    s.goes_on()
    assert set(sent(s, Release)) == {"node-3"}
    for number in range(3):
        s.feed(NodeVanished, node=f"node-{number}", incarnation=100 + number)
    said = "node-3 is drained; restart its daemon, and it takes part again"
    assert s.machine.phase is ClusterPhase.PAUSED
    assert s.reasons("ClusterPaused")[-1].endswith(f"; {said}")
    assert s.machine.public_state()["waiting_for"].endswith(f"; {said}")


# --- nodes that are lost meanwhile ----------------------------------------------------------------


def test_a_request_for_a_node_that_is_lost_first_is_refused() -> None:
    s = Drains(4)
    s.drain("node-3", check=False)
    s.feed(NodeVanished, node="node-3", incarnation=103)
    assert s.said["d"] == (False, "", "node-3 was lost before it could be released")


def test_a_restart_of_the_daemon_ends_a_drain_and_a_fence_does_not() -> None:
    s = Drains(4)
    s.drain("node-3")
    s.feed(NodeVanished, node="node-3", incarnation=103)
    s.goes_on()
    s.hello("node-3", 203)
    assert not s.node("node-3")["draining"]
    assert s.reasons("NodeDrainCancelled") == ["node-3 was restarted, which ends its drain"]
    s = Drains(4)
    s.drain("node-3")
    s.feed(NodeVanished, node="node-3", incarnation=103)
    s.goes_on()
    s.say("node-3", Heartbeat(generation=1, committed=committed(1)))
    assert set(sent(s, Fence)) == {"node-3"}
    s = s.restarted()
    s.hello("node-3", 203)
    assert s.node("node-3")["draining"] and set(sent(s, Release)) == {"node-3"}
    assert "NodeDrainCancelled" not in events(s)
