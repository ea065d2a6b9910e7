"""Tests of recovery details that kill mutants: what is ignored, what is counted, and what is reported."""

from typing import Any

import pytest
from msgspec import structs
from msgspec.structs import replace

from planner.planner import Planner
from planner.values import Device, StatePart
from statemachine.cluster.machine import ClusterMachine
from statemachine.effects import (
    CancelTimer,
    ComputePlan,
    EmitEvent,
    PersistState,
    PlanAhead,
    PublishCluster,
    SetTimer,
)
from statemachine.events import (
    BrokerConnected,
    BrokerDisconnected,
    DrainRequested,
    NodeVanished,
    PlanImpossible,
    PlanReady,
    SignalArrived,
    StopRequested,
    SubmitRequested,
    TemplatesReady,
    TimerFired,
)
from statemachine.messages.cluster import (
    Acknowledgement,
    Fence,
    FromNode,
    Heartbeat,
    Hello,
    Leaving,
    Prepare,
    Reject,
    Release,
    Resume,
    Stop,
    TrainerLost,
)
from statemachine.messages.common import Finished, PeerSuspected, Prepared, Quiesce, Resumed
from statemachine.messages.values import ClusterPhase, HeldSnapshot, NodeActivity
from statemachine.timing import Timing
from tests.helpers.transcripts import POLICY, PROFILE, Coordination, committed, facts, job, report

HELD = {"node-0": (0, 1), "node-1": (2, 3), "node-2": (0, 1), "node-3": (2, 3)}


class Recovering(Coordination):
    """Start a job that has committed its first step in generation 1."""

    def __init__(self, nodes: int = 4, steps: int = 10) -> None:
        super().__init__()
        self.running(nodes, steps)

    def reports(self, generation: int, *names: str, step: int = 1) -> None:
        for name in names:
            self.quiesced(name, generation, report(step, held=HELD[name]))

    def goes_on(self, generation: int, *names: str, step: int = 1) -> None:
        """Let these nodes report, resume and commit a step."""
        self.reports(generation, *names, step=step)
        self.plan()
        for name in names:
            self.resumed(name, generation)
        self.stepped(names[0], generation, step + 1)

    def events(self, name: str) -> list[EmitEvent]:
        return [event for event in self.all(EmitEvent) if event.name == name]

    @property
    def recovery(self) -> dict[str, Any]:
        """Return what the last effects report about a recovery."""
        [event] = self.events("RecoveryCompleted")
        published: dict[str, Any] = event.details["recovery"]
        return published

    def modes(self) -> dict[str, str]:
        return {one.node: one.command.mode for one in self.commands(Quiesce)}

    def timers(self) -> dict[str, float]:
        return {timer.name: timer.delay_s for timer in self.all(SetTimer)}

    def cancelled(self) -> set[str]:
        return {timer.name for timer in self.all(CancelTimer)}


class Sharing(Recovering):
    """Start a job whose owners share out the optimizer state, and that has committed its first step."""

    def running(self, nodes: int = 4, steps: int = 10, **_: Any) -> None:
        policy = replace(POLICY, zero1=True)
        self.planner = Planner(PROFILE, policy)
        self.feed(BrokerConnected)
        for number, name in enumerate(HELD):
            self.hello(name, 100 + number)
        self.feed(SubmitRequested, request="r", job=job(policy=policy))
        for number, name in enumerate(HELD):
            self.say(name, Prepared(job_id="job-1", profile=None if number else PROFILE))
        self.feed(TemplatesReady, job_id="job-1")
        whole = tuple(StatePart(layer=layer, start=0, end=1, of=1) for layer in range(4))
        for name in HELD:
            self.quiesced(name, 1, replace(report(), parts=whole))
        self.plan()
        for name in HELD:
            self.resumed(name, 1)
        self.stepped("node-0", 1, 1)


# --- losses --------------------------------------------------------------------------------------


def test_a_last_will_counts_once_and_for_its_incarnation_alone() -> None:
    s = Recovering()
    assert s.feed(NodeVanished, node="node-3", incarnation=102) == []
    s.feed(NodeVanished, node="node-3", incarnation=103)
    assert s.machine.generation == 2
    assert s.feed(NodeVanished, node="node-3", incarnation=103) == []


def test_a_loss_while_no_job_is_under_way_is_no_recovery_of_the_next_job() -> None:
    s = Recovering(2)
    s.feed(StopRequested, request="stop", job="tiny")
    s.feed(NodeVanished, node="node-1", incarnation=101)
    assert s.machine.phase is ClusterPhase.FINISHED and not s.commands()
    s.hello("node-1", 201)
    s.feed(SubmitRequested, request="next", job=job("job-2"))
    for name in ("node-0", "node-1"):
        s.say(name, Prepared(job_id="job-2", profile=PROFILE if name == "node-0" else None))
    s.feed(TemplatesReady, job_id="job-2")
    for name in ("node-0", "node-1"):
        s.quiesced(name, 2, report())
    s.plan()
    for name in ("node-0", "node-1"):
        s.resumed(name, 2)
    s.stepped("node-0", 2, 1)
    assert not s.events("RecoveryCompleted") or s.recovery["cause"] not in ("node_lost", "trainer_lost")


def test_a_loss_during_a_pause_is_no_recovery_of_its_own() -> None:
    s = Recovering(3)
    s.feed(NodeVanished, node="node-1", incarnation=101)
    s.reports(2, "node-0")
    s.quiesced("node-2", 2, report(1, held=(3,)))
    s.feed(PlanImpossible, generation=2, too_few=True, reason="too few", needed=3)
    assert s.machine.phase is ClusterPhase.PAUSED
    s.feed(NodeVanished, node="node-2", incarnation=102)
    assert s.machine.phase is ClusterPhase.PAUSED and not s.commands()
    for name, incarnation in (("node-1", 101), ("node-2", 102)):
        s.hello(name, incarnation, job_id="job-1", prepared=True, generation=1, training=True)
    s.fire("join", 0.1)
    s.reports(3, "node-0", "node-1")
    s.quiesced("node-2", 3, report(1, held=(3,)))
    s.plan()
    for name in ("node-0", "node-1", "node-2"):
        s.resumed(name, 3)
    s.stepped("node-0", 3, 2)
    assert (s.recovery["cause"], s.recovery["generations_tried"]) == ("resumed", 1)
    assert s.recovery["nodes"] == ["node-1", "node-2"]


def test_a_loss_outranks_the_join_that_it_interrupts() -> None:
    s = Recovering(3)
    s.hello("node-3", 103)
    s.say("node-3", Prepared(job_id="job-1", profile=None))
    s.fire("join", 0.1)
    assert set(s.modes().values()) == {"boundary"}
    s.wait(1.0)
    s.feed(NodeVanished, node="node-2", incarnation=102)
    assert set(s.modes().values()) == {"abort"}, (
        "who waits at the boundary would wait for the node that is gone"
    )
    s.wait(0.5)
    s.quiesced("node-3", 3, report())
    s.goes_on(3, "node-0", "node-1")
    s.resumed("node-3", 3)
    assert (s.recovery["cause"], s.recovery["nodes"]) == ("node_lost", ["node-2"])
    assert s.recovery["detected_how"] == "last_will"
    assert (s.recovery["generations_tried"], s.recovery["total_ms"]) == (2, 500.0)


def test_a_second_loss_extends_the_recovery_that_it_interrupts() -> None:
    s = Recovering()
    s.feed(NodeVanished, node="node-3", incarnation=103)
    s.reports(2, "node-0", "node-1", "node-2")
    s.wait(1.0)
    s.feed(NodeVanished, node="node-2", incarnation=102)
    s.goes_on(3, "node-0", "node-1")
    assert s.recovery["nodes"] == ["node-3", "node-2"]
    assert (s.recovery["generations_tried"], s.recovery["total_ms"]) == (2, 1000.0)
    assert s.recovery["recomputed_steps"] == 1


def test_a_newcomer_that_is_lost_during_a_pause_costs_nothing() -> None:
    s = Recovering()
    s.feed(NodeVanished, node="node-3", incarnation=103)
    s.reports(2, "node-0", "node-1", "node-2")
    s.feed(PlanImpossible, generation=2, too_few=True, reason="too few", needed=4)
    s.hello("node-4", 104)
    s.feed(NodeVanished, node="node-4", incarnation=104)
    assert not s.commands() and s.machine.generation == 2


def test_a_newcomer_that_is_lost_while_the_others_train_costs_nothing() -> None:
    s = Recovering(3)
    s.hello("node-3", 103)
    s.feed(NodeVanished, node="node-3", incarnation=103)
    assert not s.commands() and s.machine.generation == 1
    assert s.all(PublishCluster)


def test_a_newcomer_that_is_lost_while_the_others_report_costs_nothing() -> None:
    s = Recovering()
    s.feed(NodeVanished, node="node-3", incarnation=103)
    s.hello("node-4", 104)
    s.feed(NodeVanished, node="node-4", incarnation=104)
    assert s.machine.generation == 2
    s.say("node-2", TrainerLost(generation=1, device=0, cause="exited", detail=""))
    assert s.machine.generation == 3, "its trainers may hold others up"
    assert set(s.modes()) == {"node-0", "node-1"}


@pytest.mark.parametrize("planned", [False, True])
def test_a_newcomer_that_is_lost_while_a_plan_is_made_or_carried_out_costs_nothing(planned: bool) -> None:
    s = Recovering()
    s.feed(NodeVanished, node="node-3", incarnation=103)
    s.reports(2, "node-0", "node-1", "node-2")
    asked = s.one(ComputePlan)
    s.hello("node-4", 104)
    if planned:
        s.feed(PlanReady, generation=2, plan=s.planner.plan(asked.situation))
    s.feed(NodeVanished, node="node-4", incarnation=104)
    assert not s.commands() and s.machine.generation == 2


def test_trainers_that_are_gone_while_the_others_report_begin_a_new_generation() -> None:
    s = Recovering()
    s.feed(NodeVanished, node="node-3", incarnation=103)
    s.hello("node-2", 102, job_id="job-1", prepared=False, generation=1)
    assert s.machine.generation == 3 and set(s.modes()) == {"node-0", "node-1"}


def test_all_nodes_lost_pauses_the_job_until_one_is_ready() -> None:
    s = Recovering(2)
    s.say("node-0", TrainerLost(generation=1, device=0, cause="exited", detail=""))
    s.say("node-1", TrainerLost(generation=1, device=0, cause="exited", detail=""))
    assert s.machine.phase is ClusterPhase.PAUSED
    [paused] = s.events("ClusterPaused")
    assert (paused.details["needed"], paused.details["present"]) == (1, 0)
    assert "quiesce" not in s.due


def test_a_newcomer_that_is_lost_before_the_boundary_costs_nothing() -> None:
    s = Recovering()
    s.feed(DrainRequested, request="d", node="node-0")
    s.check_drain()
    s.fire("join", 0.1)
    assert set(s.modes().values()) == {"boundary"}
    s.hello("node-4", 104)
    s.feed(NodeVanished, node="node-4", incarnation=104)
    assert s.machine.generation == 2


# --- reports -------------------------------------------------------------------------------------


def test_reports_of_another_generation_or_of_unexpected_nodes_are_ignored() -> None:
    s = Recovering()
    s.feed(NodeVanished, node="node-3", incarnation=103)
    s.quiesced("node-0", 1, report(1, held=(0, 1)))
    assert [event.reason for event in s.events("MessageIgnored")] == ["unexpected reports"]
    assert "node-0" in s.machine.public_state()["waiting_for"]
    s.hello("node-4", 104)
    s.quiesced("node-4", 2, report())
    assert s.events("MessageIgnored")
    s.reports(2, "node-0", "node-1", "node-2")
    assert s.one(ComputePlan).situation.nodes == ("node-0", "node-1", "node-2")


def test_reports_before_the_first_generation_are_ignored() -> None:
    s = Coordination()
    s.hello("node-0", 100)
    s.quiesced("node-0", 1, report())
    assert [event.reason for event in s.all(EmitEvent) if event.name == "MessageIgnored"]


def test_a_node_with_an_incomplete_report_builds_the_job_and_joins_later() -> None:
    s = Recovering()
    s.feed(NodeVanished, node="node-3", incarnation=103)
    s.quiesced("node-2", 2)
    assert [one.node for one in s.commands(Prepare)] == ["node-2"]
    s.hello("node-4", 104)
    assert [one.node for one in s.commands(Prepare)] == ["node-4"], "node-2 has its order"
    s.goes_on(2, "node-0", "node-1")
    s.hello("node-2", 102, job_id="job-1", prepared=False, generation=2)
    assert [one.node for one in s.commands(Prepare)] == ["node-2"], "it is asked again until it is prepared"
    s.say("node-2", Prepared(job_id="job-1", profile=None))
    s.fire("join", 0.1)
    assert set(s.modes()) == {"node-0", "node-1", "node-2"}


def test_a_node_that_missed_a_decision_is_lost_and_the_others_abort() -> None:
    s = Recovering()
    s.say("node-3", TrainerLost(generation=1, device=0, cause="exited", detail=""))
    s.goes_on(2, "node-0", "node-1", "node-2")
    s.say("node-3", Prepared(job_id="job-1", profile=None))
    s.fire("join", 0.1)
    s.reports(3, "node-0", "node-1", "node-2", "node-3", step=2)
    assert s.modes() == dict.fromkeys(("node-0", "node-1", "node-2"), "abort")
    [lost] = s.events("NodeLost")
    assert (lost.node, lost.details["how"]) == ("node-3", "no_answer")
    assert not s.all(ComputePlan)
    s.goes_on(4, "node-0", "node-1", "node-2", step=2)
    assert (s.recovery["cause"], s.recovery["nodes"]) == ("node_lost", ["node-3"])


def test_a_join_recomputes_no_step_and_an_abort_does() -> None:
    s = Recovering(3)
    s.hello("node-3", 103)
    s.say("node-3", Prepared(job_id="job-1", profile=None))
    s.fire("join", 0.1)
    s.quiesced("node-3", 2, report())
    s.goes_on(2, "node-0", "node-1", "node-2", step=2)
    s.resumed("node-3", 2)
    assert s.events("RecoveryCompleted") and s.recovery["recomputed_steps"] == 0
    s = Recovering()
    s.feed(NodeVanished, node="node-3", incarnation=103)
    s.goes_on(2, "node-0", "node-1", "node-2")
    assert s.recovery["recomputed_steps"] == 1


def test_a_loss_after_the_last_step_recomputes_nothing() -> None:
    s = Recovering(4, steps=1)
    s.feed(NodeVanished, node="node-3", incarnation=103)
    s.reports(2, "node-0", "node-1", "node-2")
    s.plan()
    for name in ("node-0", "node-1", "node-2"):
        s.resumed(name, 2)
    s.say("node-0", Finished(generation=2, step=1, digests={}))
    assert s.recovery["recomputed_steps"] == 0


def test_a_roll_forward_recomputes_nothing() -> None:
    s = Recovering()
    s.feed(NodeVanished, node="node-3", incarnation=103)
    s.quiesced("node-0", 2, report(1, held=(0, 1), ready=True))
    s.quiesced("node-1", 2, report(2, held=(2, 3)))
    s.quiesced("node-2", 2, report(1, held=(0, 1), ready=True))
    s.plan()
    for name in ("node-0", "node-1", "node-2"):
        s.resumed(name, 2)
    s.stepped("node-0", 2, 3)
    assert s.recovery["recomputed_steps"] == 0


# --- timers --------------------------------------------------------------------------------------


def test_a_new_generation_cancels_the_timers_of_the_previous_one() -> None:
    s = Recovering()
    s.say("node-0", PeerSuspected(generation=1, detail="reset"))
    s.hello("node-4", 104)
    s.say("node-4", Prepared(job_id="job-1", profile=None))
    assert {"suspicion", "join"} <= s.due.keys()
    s.feed(NodeVanished, node="node-3", incarnation=103)
    assert s.cancelled() == {"suspicion", "join"}
    s.quiesced("node-4", 2, report())
    s.reports(2, "node-0", "node-1", "node-2")
    s.plan()
    assert s.timers() == {"resume": 60.0}
    s.feed(NodeVanished, node="node-2", incarnation=102)
    assert "resume" in s.cancelled()


def test_a_pause_that_ends_cancels_its_time_limit() -> None:
    s = Recovering(3)
    s.feed(NodeVanished, node="node-1", incarnation=101)
    s.feed(NodeVanished, node="node-2", incarnation=102)
    s.reports(2, "node-0")
    s.feed(PlanImpossible, generation=2, too_few=False, reason="lost", lost_layers=(2, 3))
    assert s.machine.public_state()["pause_limited"] and "pause_limit" in s.due
    s.hello("node-1", 101, job_id="job-1", prepared=True, generation=1, training=True)
    s.fire("join", 0.1)
    assert "pause_limit" not in s.due
    s.reports(3, "node-0", "node-1")
    generation = s.one(ComputePlan).generation
    s.feed(PlanImpossible, generation=generation, too_few=True, reason="too few", needed=3)
    assert s.machine.phase is ClusterPhase.PAUSED and not s.machine.public_state()["pause_limited"]


# --- planning ahead ------------------------------------------------------------------------------


def test_the_planner_plans_ahead_for_an_abort_and_not_for_a_boundary() -> None:
    s = Recovering()
    s.feed(DrainRequested, request="d", node="node-3")
    s.check_drain()
    s.fire("join", 0.1)
    assert not s.all(PlanAhead)
    s.feed(NodeVanished, node="node-2", incarnation=102)
    assert set(s.one(PlanAhead).devices) == {"node-0", "node-1"}, "node-3 is to leave"
    s.say("node-0", Heartbeat(generation=1, committed=committed(1)))
    assert not s.all(PlanAhead)


def test_nothing_is_planned_ahead_before_a_new_coordinator_has_templates() -> None:
    s = Recovering()
    s.feed(NodeVanished, node="node-3", incarnation=103)
    s.machine, _ = ClusterMachine.restore(Timing(), s.machine.durable_state(), s.now, "restart")
    s.feed(BrokerConnected)
    assert s.commands(Quiesce) and not s.all(PlanAhead)
    s.feed(TemplatesReady, job_id="job-1")
    assert set(s.one(PlanAhead).devices) == {"node-0", "node-1", "node-2"}


def test_nothing_is_planned_ahead_where_devices_hold_parts_of_layers() -> None:
    """The plan alone does not determine their parts, so only their reports say which they hold."""
    s = Sharing()
    s.feed(NodeVanished, node="node-3", incarnation=103)
    assert s.commands(Quiesce) and not s.all(PlanAhead)


# --- nodes' signals ------------------------------------------------------------------------------


def ignored(s: Recovering) -> list[str]:
    return [event.reason for event in s.events("MessageIgnored")]


def without_node_3() -> Recovering:
    """Let three of four nodes train in generation 2."""
    s = Recovering()
    s.feed(NodeVanished, node="node-3", incarnation=103)
    s.goes_on(2, "node-0", "node-1", "node-2")
    return s


def test_a_message_of_a_past_incarnation_is_ignored_and_reported() -> None:
    s = Recovering()
    s.feed(NodeVanished, node="node-3", incarnation=103)
    s.hello("node-3", 203)
    s.say("node-3", Prepared(job_id="job-1", profile=None), incarnation=103)
    assert ignored(s) == ["Prepared of an incarnation that is not current"] and not s.commands()


def test_a_fenced_node_that_is_heard_shows_that_the_silent_ones_are_gone() -> None:
    s = without_node_3()
    s.heartbeats_for(6.0, {"node-3": Heartbeat(generation=1, committed=committed(1))})
    states = {name: node["state"] for name, node in s.machine.public_state()["nodes"].items()}
    assert set(states.values()) == {"OFFLINE"}


def test_a_node_that_never_said_hello_to_this_coordinator_is_asked() -> None:
    s = Recovering()
    s.machine, _ = ClusterMachine.restore(Timing(), s.machine.durable_state(), s.now, "restart")
    s.due.clear()
    s.feed(BrokerConnected)
    s.lines.clear()
    s.heartbeats_for(2.0, {name: Heartbeat(generation=1, committed=committed(1)) for name in HELD})
    asked = [line for line in s.lines if "command=RequestHello()" in line]
    assert len(asked) == 4


def test_a_node_that_leaves_is_released_as_often_as_it_asks() -> None:
    s = without_node_3()
    s.say("node-2", Leaving(reason="SIGTERM"))
    said = Acknowledgement(activity=NodeActivity.TRAINING, job_id="job-1", leaving=True)
    s.lines.clear()
    heartbeats = {name: Heartbeat(generation=2, committed=committed(2)) for name in ("node-0", "node-1")}
    s.heartbeats_for(
        1.0, heartbeats | {"node-2": Heartbeat(generation=2, committed=committed(2), acknowledgement=said)}
    )
    assert not [line for line in s.lines if "RequestHello" in line], "its Leaving has arrived"
    idle = Coordination()
    idle.feed(BrokerConnected)
    idle.hello("node-0", 100)
    for _ in range(2):
        idle.say("node-0", Leaving(reason="SIGTERM"))
        assert [type(one.command) for one in idle.commands()][-1:] == [Release]
    other = Recovering()
    other.say("node-3", Leaving(reason="SIGTERM"))
    assert not other.commands(Release), "it is needed until others have its layers"


def test_a_node_that_was_heard_within_the_time_of_silence_keeps_its_name() -> None:
    s = Recovering()
    s.wait(1.4)
    assert s.now == 1.5, "node-3 was heard at 0"
    s.hello("node-3", 999)
    assert [type(one.command) for one in s.commands()] == [Reject]


def test_a_hello_that_is_older_than_the_last_one_is_ignored() -> None:
    s = Recovering()
    s.hello("node-3", 103, job_id="job-1", prepared=True, generation=7, training=True)
    s.hello("node-3", 103, job_id="job-1", prepared=True, generation=6, training=True)
    assert ignored(s) == ["a Hello that is older than this node's last report"]
    s.feed(NodeVanished, node="node-2", incarnation=102)
    assert s.machine.generation > 7, "a node that obeyed another coordinator never gets its generation again"


def test_a_hello_updates_the_address_of_the_node() -> None:
    s = Recovering()
    s.hello(
        "node-3",
        103,
        facts=facts(host="10.0.0.9"),
        job_id="job-1",
        prepared=True,
        generation=1,
        training=True,
    )
    assert s.machine.public_state()["nodes"]["node-3"]["host"] == "10.0.0.9"


def test_trainers_of_a_job_that_is_not_known_are_stopped() -> None:
    s = Coordination()
    s.feed(BrokerConnected)
    s.hello("node-0", 100, job_id="job-0", prepared=True)
    assert [(one.command.job_id, one.node) for one in s.commands(Stop)] == [("job-0", "node-0")]


@pytest.mark.parametrize("failed", [False, True])
def test_snapshots_of_a_finished_job_are_freed_and_of_a_failed_one_retained(failed: bool) -> None:
    s = Recovering(2)
    if failed:
        s.feed(NodeVanished, node="node-1", incarnation=101, graceful=True)
        s.reports(2, "node-0")
        s.feed(PlanImpossible, generation=2, too_few=False, reason="lost", lost_layers=(2, 3))
        assert s.machine.phase is ClusterPhase.FAILED
    else:
        s.feed(StopRequested, request="stop", job="tiny")
    s.hello(
        "node-0",
        100,
        generation=s.machine.generation,
        snapshots=(HeldSnapshot(job_id="job-1", step=1, generation=1),),
    )
    assert bool(s.commands(Stop)) is not failed


@pytest.mark.parametrize(
    "says", [{"job_id": "job-0", "prepared": True}, {"job_id": "job-1", "prepared": False}]
)
def test_trainers_that_are_gone_come_back_as_a_node_that_returns(says: dict[str, Any]) -> None:
    s = Recovering()
    s.hello("node-3", 103, generation=1, **says)
    assert s.machine.generation == 2
    assert [type(one.command) for one in s.commands() if one.node == "node-3"] in ([Stop, Prepare], [Prepare])
    s.goes_on(2, "node-0", "node-1", "node-2")
    assert (s.recovery["cause"], s.recovery["detected_how"]) == ("trainer_lost", "hello")
    s.say("node-3", Prepared(job_id="job-1", profile=None))
    s.fire("join", 0.1)
    s.quiesced("node-3", 3, report())
    s.goes_on(3, "node-0", "node-1", "node-2", step=2)
    s.resumed("node-3", 3)
    assert s.recovery["cause"] == "node_returned"


@pytest.mark.parametrize(
    "says", [{"generation": 2}, {"generation": 5, "training": True}, {"generation": 5, "quiesced": True}]
)
def test_a_planned_node_that_does_not_train_in_this_generation_has_lost_its_trainers(
    says: dict[str, Any],
) -> None:
    s = without_node_3()
    s.hello("node-2", 102, job_id="job-1", prepared=True, generation=2, training=True)
    assert not s.commands()
    s.hello("node-2", 102, job_id="job-1", prepared=True, **says)
    assert s.machine.generation == says["generation"] + 1 and set(s.modes().values()) == {"abort"}
    assert not s.commands(Resume)


def test_a_node_that_reported_is_not_asked_again_and_a_waiting_one_gets_its_resume_again() -> None:
    s = Recovering()
    s.feed(NodeVanished, node="node-3", incarnation=103)
    s.reports(2, "node-0")
    waits = {"job_id": "job-1", "prepared": True, "generation": 2, "quiesced": True}
    s.hello("node-0", 100, **waits)
    assert not s.commands()
    s.reports(2, "node-1", "node-2")
    s.plan()
    s.hello("node-0", 100, **waits)
    assert [type(one.command) for one in s.commands()] == [Resume]
    s.hello("node-4", 104)
    s.hello("node-4", 104, job_id="job-1", prepared=False, generation=0)
    assert not s.commands(Resume), "it has no part in this generation"
    s.hello("node-4", 104, job_id="job-1", prepared=False, generation=2, quiesced=True)
    assert not s.commands(Resume), "it stopped with the others and was not counted"


def test_a_hello_without_new_snapshots_does_not_end_a_pause() -> None:
    s = Recovering()
    s.feed(NodeVanished, node="node-1", incarnation=101)
    s.feed(NodeVanished, node="node-3", incarnation=103)
    s.reports(2, "node-0", "node-2")
    s.feed(PlanImpossible, generation=2, too_few=False, reason="lost", lost_layers=(2, 3))
    assert s.machine.phase is ClusterPhase.PAUSED
    s.hello("node-0", 100, job_id="job-1", prepared=True, generation=2, quiesced=True)
    assert s.machine.phase is ClusterPhase.PAUSED and not s.commands()


def test_a_generation_that_a_fenced_newcomer_has_obeyed_is_never_used_again() -> None:
    s = Recovering()
    for new in (True, False):
        s.hello("node-9", 900, job_id="job-1", prepared=True, generation=7, training=True)
        assert [type(one.command) for one in s.commands()] == [Fence]
        assert bool(s.all(PersistState)) is new, "it is stored before a crash can forget it, and once"
    s.feed(NodeVanished, node="node-3", incarnation=103)
    assert s.machine.generation == 8


def test_a_node_whose_trainers_failed_and_came_back_within_one_outage_returns() -> None:
    s = Recovering()
    s.hello("node-3", 103, job_id="job-1", prepared=True, generation=1)
    assert set(s.modes()) == set(HELD)
    s.quiesced("node-3", 2)
    s.goes_on(2, "node-0", "node-1", "node-2")
    s.say("node-3", Prepared(job_id="job-1", profile=None))
    s.fire("join", 0.1)
    s.quiesced("node-3", 3, report())
    s.goes_on(3, "node-0", "node-1", "node-2", step=2)
    s.resumed("node-3", 3)
    assert (s.recovery["cause"], s.recovery["nodes"]) == ("node_returned", ["node-3"])


def test_nodes_that_are_silent_together_are_given_time_although_one_that_left_was_heard_last() -> None:
    s = Recovering(3)
    beat = Heartbeat(generation=1, committed=committed(1))
    s.heartbeats_for(4.0, dict.fromkeys(("node-0", "node-1", "node-2"), beat))
    s.heartbeats_for(1.0, {"node-2": beat})
    s.feed(NodeVanished, node="node-2", incarnation=102, graceful=True)
    s.heartbeats_for(0.75, {})
    states = {name: node["state"] for name, node in s.machine.public_state()["nodes"].items()}
    assert states == {"node-0": "HEALTHY", "node-1": "HEALTHY", "node-2": "OFFLINE"}


# --- trainers ------------------------------------------------------------------------------------


def lost(
    s: Recovering, node: str = "node-3", cause: Any = "exited", generation: int = 1, detail: str = ""
) -> None:
    s.say(node, TrainerLost(generation=generation, device=0, cause=cause, detail=detail))


def test_a_loss_of_trainers_is_reported_once_and_again_if_they_cannot_return() -> None:
    s = Recovering()
    lost(s, detail="x" * 300)
    [published] = s.events("TrainerLost")
    assert published.reason == "trainer 0 of node-3: exited, " + "x" * 200
    assert published.details["fault_at"] is None, (
        "it was noticed at once, so nothing is known of an earlier time"
    )
    lost(s)
    assert not s.all(EmitEvent) and s.machine.generation == 2
    lost(s, cause="unprepared", detail="no device")
    assert [event.details["detail"] for event in s.events("TrainerLost")] == ["no device"]
    assert s.machine.generation == 2
    lost(s, cause="unprepared", detail="no device")
    assert not s.all(EmitEvent)


def test_a_loss_of_trainers_counts_again_in_the_next_job() -> None:
    s = Recovering()
    lost(s)
    s.feed(StopRequested, request="stop", job="tiny")
    s.feed(SubmitRequested, request="next", job=replace(job(), job_id="job-2"))
    lost(s, generation=2)
    assert [event.node for event in s.events("TrainerLost")] == ["node-3"]


def test_a_trainer_that_ends_without_a_word_is_named_at_the_end_of_the_job() -> None:
    s = Recovering(4, steps=2)
    lost(s)
    s.goes_on(2, "node-0", "node-1", "node-2")
    for name in ("node-0", "node-1", "node-2"):
        s.say(name, Finished(generation=2, step=2, digests={}))
    assert "trainer 0 of node-3: exited" in s.machine.public_state()["outcome"]


def test_a_stale_loss_of_trainers_or_one_without_a_job_is_ignored() -> None:
    s = without_node_3()
    lost(s, "node-2", generation=1)
    assert ignored(s) == ["a TrainerLost that is older than this node's last report"]
    assert not s.events("TrainerLost") and s.machine.generation == 2
    s.feed(StopRequested, request="stop", job="tiny")
    lost(s, "node-2", generation=2)
    assert ignored(s) == ["a TrainerLost while no job is under way: its node has another one"]
    assert not s.events("TrainerLost")


def test_a_node_whose_trainers_are_back_is_one_that_returns() -> None:
    s = Recovering()
    lost(s)
    s.goes_on(2, "node-0", "node-1", "node-2")
    s.say("node-3", Prepared(job_id="job-1", profile=None))
    s.fire("join", 0.1)
    s.quiesced("node-3", 3, report())
    s.goes_on(3, "node-0", "node-1", "node-2", step=2)
    s.resumed("node-3", 3)
    assert s.recovery["cause"] == "node_returned"


def test_the_same_error_in_another_step_begins_a_new_count() -> None:
    s = Recovering()
    lost(s, cause="raised", detail="ValueError: nan")
    s.goes_on(2, "node-0", "node-1", "node-2")
    s.stepped("node-0", 2, 3)
    lost(s, "node-2", "raised", 2, "ValueError: nan")
    assert s.machine.phase is ClusterPhase.QUIESCING, "step 2 was committed without node-3"
    other = Recovering()
    lost(other, cause="raised", detail="ValueError: nan")
    other.reports(2, "node-0", "node-1", "node-2")
    other.plan()
    lost(other, "node-2", "raised", 2, "KeyError: 3")
    assert other.machine.phase is ClusterPhase.QUIESCING, "another error on another node"


# --- boundaries ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("used", "words"),
    [
        (("node-4", "node-5"), "with node-4 and node-5"),
        (("node-4",), "with node-4 and with node-5 as spare"),
        ((), "with node-4 and node-5 as spare"),
    ],
)
def test_nodes_that_join_without_a_rank_are_spares(used: tuple[str, ...], words: str) -> None:
    s = Recovering()
    for number, name in enumerate(("node-4", "node-5")):
        s.hello(name, 104 + number)
        s.say(name, Prepared(job_id="job-1", profile=None))
    s.fire("join", 0.1)
    s.quiesced("node-4", 2, report())
    s.quiesced("node-5", 2, report())
    s.reports(2, *HELD)
    situation = structs.replace(s.one(ComputePlan).situation, nodes=(*HELD, *used))
    plan = s.planner.plan(situation)
    s.feed(PlanReady, generation=2, plan=plan)
    for name in plan.nodes:
        s.resumed(name, 2)
    s.stepped("node-0", 2, 2)
    assert s.events("RecoveryCompleted")[0].reason == f"training continues {words}"


def test_a_newcomer_waits_for_the_first_commit_of_a_recovery() -> None:
    s = Recovering()
    s.feed(NodeVanished, node="node-3", incarnation=103)
    s.hello("node-4", 104)
    s.reports(2, "node-0", "node-1", "node-2")
    s.plan()
    for name in ("node-0", "node-1", "node-2"):
        s.resumed(name, 2)
    s.say("node-4", Prepared(job_id="job-1", profile=None))
    s.fire("join", 0.1)
    assert not s.commands() and s.timers() == {"join": 0.1}
    s.stepped("node-0", 2, 2)
    s.fire("join", 0.1)
    assert set(s.modes().values()) == {"boundary"} and "node-4" in s.modes()


@pytest.mark.parametrize("name", ["join", "suspicion", "resume"])
def test_timers_that_were_cancelled_and_are_over_all_the_same_start_nothing(name: str) -> None:
    s = Recovering()
    s.feed(TimerFired, name="quiesce")
    assert s.machine.phase is ClusterPhase.RUNNING and not s.commands()
    s.hello("node-4", 104)
    s.say("node-4", Prepared(job_id="job-1", profile=None))
    s.feed(NodeVanished, node="node-3", incarnation=103)
    s.feed(TimerFired, name=name)
    assert not s.commands() and s.machine.generation == 2
    s.feed(StopRequested, request="stop", job="tiny")
    s.feed(TimerFired, name=name)
    assert not s.commands() and s.machine.phase is ClusterPhase.FINISHED


def test_a_node_that_has_taken_part_again_is_not_one_that_returns() -> None:
    s = Recovering()
    lost(s)
    s.goes_on(2, "node-0", "node-1", "node-2")
    s.say("node-3", Prepared(job_id="job-1", profile=None))
    s.fire("join", 0.1)
    s.quiesced("node-3", 3, report())
    s.goes_on(3, "node-0", "node-1", "node-2", step=2)
    s.resumed("node-3", 3)
    s.feed(NodeVanished, node="node-2", incarnation=102)
    s.quiesced("node-3", 4)
    s.goes_on(4, "node-0", "node-1", step=3)
    s.say("node-3", Prepared(job_id="job-1", profile=None))
    s.fire("join", 0.1)
    s.quiesced("node-3", 5, report())
    s.goes_on(5, "node-0", "node-1", step=4)
    s.resumed("node-3", 5)
    assert (s.recovery["cause"], s.recovery["nodes"]) == ("node_joined", ["node-3"])


def test_a_join_whose_node_is_gone_starts_nothing() -> None:
    s = Recovering(3)
    s.hello("node-3", 103)
    s.say("node-3", Prepared(job_id="job-1", profile=None))
    s.feed(NodeVanished, node="node-3", incarnation=103)
    s.fire("join", 0.1)
    assert not s.commands() and s.machine.generation == 1
    s.hello("node-4", 104)
    s.say("node-4", Prepared(job_id="job-1", profile=None))
    s.feed(DrainRequested, request="d", node="node-4")
    s.fire("join", 0.1)
    assert not s.modes() and s.machine.generation == 1, "it leaves before it took part"


def test_a_rejected_node_that_went_away_is_rejected_again() -> None:
    s = Recovering()
    for _ in range(2):
        s.hello("node-3", 999)
        assert s.events("NodeRejected")
        s.hello("node-3", 999)
        assert not s.events("NodeRejected"), "published once while it is there"
        s.feed(NodeVanished, node="node-3", incarnation=999)
        assert not s.commands()


def test_the_loss_of_a_newcomer_is_stored_and_published() -> None:
    s = Recovering(3)
    s.hello("node-3", 103)
    s.feed(NodeVanished, node="node-3", incarnation=103)
    assert s.all(PersistState) and s.all(PublishCluster)


def test_the_loss_of_all_nodes_while_reports_come_in_waits_for_one_node() -> None:
    s = Recovering(2)
    s.feed(NodeVanished, node="node-1", incarnation=101)
    s.feed(NodeVanished, node="node-0", incarnation=100)
    [paused] = s.events("ClusterPaused")
    assert (paused.reason, paused.details["needed"], paused.details["present"]) == ("no node is ready", 1, 0)


def test_a_node_that_returns_while_the_others_go_to_a_boundary_makes_them_abort() -> None:
    s = Recovering()
    s.hello("node-4", 104)
    s.say("node-4", Prepared(job_id="job-1", profile=None))
    s.feed(NodeVanished, node="node-4", incarnation=104)
    s.feed(DrainRequested, request="d", node="node-3")
    s.check_drain()
    s.fire("join", 0.1)
    assert set(s.modes().values()) == {"boundary"}
    s.hello("node-4", 104, job_id="job-1", prepared=True)
    assert set(s.modes()) == {*HELD, "node-4"} and set(s.modes().values()) == {"abort"}
    assert s.machine.generation == 3


def test_trainers_that_failed_and_returned_in_an_outage_are_lost_though_a_boundary_is_on_its_way() -> None:
    """Without them the others may not reach the boundary, and the recovery is from their loss."""
    s = Recovering()
    s.feed(DrainRequested, request="d", node="node-3")
    s.check_drain()
    s.fire("join", 0.1)
    assert set(s.modes().values()) == {"boundary"}
    s.hello("node-1", 101, job_id="job-1", prepared=True, generation=1, training=True)
    assert s.modes() == {"node-1": "boundary"}
    s.hello("node-0", 100, job_id="job-1", prepared=True, generation=1)
    assert set(s.modes()) == set(HELD) and set(s.modes().values()) == {"abort"}
    s.quiesced("node-0", 3, report())
    s.reports(3, "node-1", "node-2", "node-3")
    s.plan()
    for name in HELD:
        s.resumed(name, 3)
    s.stepped("node-1", 3, 2)
    assert (s.recovery["cause"], s.recovery["nodes"], s.recovery["detected_how"]) == (
        "trainer_lost",
        ["node-0", "node-3"],
        "hello",
    )


def test_a_node_that_does_not_train_is_asked_again_for_its_report_if_the_others_do_not_wait_for_it() -> None:
    s = Recovering()
    s.hello("node-4", 104)
    s.say("node-4", Prepared(job_id="job-1", profile=None))
    s.feed(DrainRequested, request="d", node="node-3")
    s.check_drain()
    s.fire("join", 0.1)
    assert set(s.modes()) == {*HELD, "node-4"} and set(s.modes().values()) == {"boundary"}
    s.hello("node-4", 104, job_id="job-1", prepared=True)  # It has no rank.
    assert s.modes() == {"node-4": "boundary"}
    s.hello("node-0", 100, job_id="job-1", prepared=True, generation=2)  # It has obeyed.
    assert s.modes() == {"node-0": "boundary"}
    s.feed(NodeVanished, node="node-2", incarnation=102)
    assert set(s.modes().values()) == {"abort"}
    s.hello("node-1", 101, job_id="job-1", prepared=True, generation=2)
    assert s.modes() == {"node-1": "abort"}
    assert s.machine.generation == 3


# --- records of recoveries -----------------------------------------------------------------------


def test_a_recovery_that_is_interrupted_before_any_step_loses_nothing_more() -> None:
    s = Recovering()
    s.feed(NodeVanished, node="node-3", incarnation=103)
    s.quiesced("node-0", 2, report(1, held=(0, 1), ready=True))
    s.quiesced("node-1", 2, report(2, held=(2, 3)))
    s.quiesced("node-2", 2, report(1, held=(0, 1), ready=True))
    s.plan()
    s.feed(NodeVanished, node="node-2", incarnation=102)
    s.goes_on(3, "node-0", "node-1", step=2)
    assert (s.recovery["recomputed_steps"], s.recovery["generations_tried"]) == (0, 2)


def test_a_step_in_flight_at_a_boundary_does_not_count_as_recomputed() -> None:
    s = Recovering(3)
    s.hello("node-3", 103)
    s.say("node-3", Prepared(job_id="job-1", profile=None))
    s.fire("join", 0.1)
    s.quiesced("node-3", 2, report())
    for name, held in (("node-0", (0, 1)), ("node-1", (2,)), ("node-2", (3,))):
        s.quiesced(name, 2, report(1, held=held, ready=True))
    [published] = s.events("Quiesced")
    assert published.details["in_flight"] and published.details["decision"] == "redo"
    s.plan()
    for name in ("node-0", "node-1", "node-2", "node-3"):
        s.resumed(name, 2)
    s.stepped("node-0", 2, 2)
    assert s.recovery["recomputed_steps"] == 0


def test_the_times_of_a_recovery_are_those_of_its_last_generation() -> None:
    s = Recovering()
    s.feed(NodeVanished, node="node-3", incarnation=103)
    s.reports(2, "node-0", "node-1", "node-2")
    s.plan()
    s.resumed("node-0", 2)
    s.resumed("node-1", 1)
    assert ignored(s) == ["an unexpected Resumed"]
    assert "node-1" in s.machine.public_state()["waiting_for"]
    s.stepped("node-0", 2, 2)
    assert s.events("TrainingResumed"), "a commit proves that all have resumed"
    assert not s.events("RecoveryCompleted"), "the others have yet to say that they resumed"
    s.feed(NodeVanished, node="node-2", incarnation=102)
    s.wait(1.0)
    s.reports(3, "node-0", "node-1", step=2)
    s.plan()
    for name in ("node-0", "node-1"):
        s.resumed(name, 3)
    s.wait(0.5)
    s.stepped("node-0", 3, 3)
    assert (s.recovery["quiesce_ms"], s.recovery["resume_ms"]) == (1000.0, 500.0)
    assert s.recovery["total_ms"] == 1500.0 and s.recovery["nodes"] == ["node-3", "node-2"]


def test_a_loss_while_a_paused_job_continues_is_reported_and_lasts_from_the_first_loss() -> None:
    s = Recovering(3)
    s.feed(NodeVanished, node="node-1", incarnation=101)
    s.reports(2, "node-0", "node-2")
    s.feed(PlanImpossible, generation=2, too_few=True, reason="too few", needed=3)
    s.wait(4.0)
    s.hello("node-3", 103)
    s.say("node-3", Prepared(job_id="job-1", profile=None))
    s.fire("join", 0.1)
    assert s.modes() == dict.fromkeys(("node-0", "node-2", "node-3"), "abort")
    s.quiesced("node-0", 3, report(1, held=(0, 1, 2, 3)))
    s.feed(NodeVanished, node="node-2", incarnation=102)
    s.quiesced("node-3", 3, report())
    s.plan()
    for name in ("node-0", "node-3"):
        s.resumed(name, 3)
    s.stepped("node-0", 3, 2)
    assert (s.recovery["cause"], s.recovery["nodes"]) == ("node_lost", ["node-2"])
    assert (s.recovery["total_ms"], s.recovery["waited_ms"]) == (4100.0, 4100.0)


def test_a_resumed_that_arrives_before_the_resume_is_ignored() -> None:
    s = Recovering()
    s.feed(NodeVanished, node="node-3", incarnation=103)
    s.resumed("node-0", 2)
    assert ignored(s) == ["an unexpected Resumed"]


def test_what_happened_in_the_same_moment_as_a_resumed_is_handled_too() -> None:
    s = Recovering()
    s.feed(NodeVanished, node="node-3", incarnation=103)
    s.reports(2, "node-0", "node-1", "node-2")
    s.plan()
    hello = Hello(facts=facts(), job_id=None, prepared=False, generation=0, training=False)
    resumed = Resumed(generation=2, bytes_moved=0, rendezvous_s=0.0, state_s=0.0)
    messages = (("node-4", 104, hello), ("node-0", 100, resumed))
    s.took(
        s.machine.steps(
            [
                SignalArrived(
                    at=s.now,
                    cause="test",
                    message=FromNode(node=node, incarnation=incarnation, signal=signal),
                )
                for node, incarnation, signal in messages
            ]
        )
    )
    assert [one.node for one in s.commands(Prepare)] == ["node-4"]


def test_a_recovery_is_complete_a_moment_after_the_first_commit_whichever_resumed_was_lost() -> None:
    s = Recovering()
    s.feed(NodeVanished, node="node-3", incarnation=103)
    s.reports(2, "node-0", "node-1", "node-2")
    s.plan()
    s.stepped("node-0", 2, 2)
    assert not s.events("RecoveryCompleted"), "the messages of this moment are yet to be read"
    s.wait(0.1)
    s.stepped("node-0", 2, 3)
    assert s.recovery["total_ms"] == 0.0


def test_a_group_whose_commit_is_heard_first_has_resumed_in_no_known_time() -> None:
    s = Recovering()
    s.feed(NodeVanished, node="node-3", incarnation=103)
    s.reports(2, "node-0", "node-1", "node-2")
    s.plan()
    s.stepped("node-0", 2, 2)
    [resumed] = s.events("TrainingResumed")
    assert (resumed.details["rendezvous_s"], resumed.details["state_s"]) == (0.0, 0.0)


def test_a_resumed_that_is_repeated_while_the_group_trains_changes_nothing() -> None:
    s = Recovering()
    s.resumed("node-0", 1)
    assert s.last == []


def test_only_at_the_start_is_every_node_that_joins_its_group_published() -> None:
    """After a loss among a thousand nodes that would be a thousand large messages."""
    s = Recovering()
    s.feed(NodeVanished, node="node-3", incarnation=103)
    s.reports(2, "node-0", "node-1", "node-2")
    s.plan()
    s.resumed("node-0", 2)
    assert not s.all(PublishCluster)


# --- plans ---------------------------------------------------------------------------------------


def test_a_plan_counts_once_and_only_for_its_generation() -> None:
    s = Recovering()
    s.feed(NodeVanished, node="node-3", incarnation=103)
    s.reports(2, "node-0", "node-1", "node-2")
    s.feed(NodeVanished, node="node-2", incarnation=102)
    s.reports(3, "node-0", "node-1")
    asked = s.one(ComputePlan)
    plan = s.planner.plan(asked.situation)
    for generation in (2, 3, 3):
        s.feed(PlanReady, generation=generation, plan=plan)
        assert bool(s.commands(Resume)) is (generation == 3 and not ignored(s))
        if generation == 2:
            assert ignored(s) == ["a plan of an older generation"]
    assert ignored(s) == ["a plan of an older generation"]
    for name in ("node-0", "node-1"):
        s.resumed(name, 3)
    s.stepped("node-0", 3, 2)
    for generation in (2, 3):
        s.feed(PlanReady, generation=generation, plan=plan)
        assert ignored(s) and not s.commands()


def test_a_recovery_says_whether_state_came_from_other_nodes() -> None:
    unmoved, moved, parts = Recovering(), Recovering(), Sharing()
    unmoved.say("node-0", PeerSuspected(generation=1, detail="reset"))
    unmoved.fire("suspicion", 3.0)
    unmoved.goes_on(2, *HELD)
    moved.feed(NodeVanished, node="node-3", incarnation=103)
    moved.goes_on(2, "node-0", "node-1", "node-2")
    parts.feed(NodeVanished, node="node-3", incarnation=103)
    for name, layers in HELD.items():
        if name != "node-3":
            whole = tuple(StatePart(layer=layer, start=0, end=1, of=1) for layer in layers)
            parts.quiesced(name, 2, replace(report(1, held=layers), parts=whole))
    parts.plan()
    for name in ("node-0", "node-1", "node-2"):
        parts.resumed(name, 2)
    parts.stepped("node-0", 2, 2)
    tiers = [s.recovery["tier"] for s in (unmoved, moved, parts)]
    assert tiers == ["none", "live_replica", "live_replica"]
    copied = [s.machine._c.replicas.copied for s in (unmoved, moved, parts)]
    assert copied == [False, True, True], "a majority of copies proves something only in the first group"


def test_parts_that_count_by_gradients_count_again_if_the_resume_did_not_arrive() -> None:
    """Each of the four nodes owns a quarter of all layers. node-1 committed step 2, the others hold gradients."""
    s = Sharing()
    s.feed(NodeVanished, node="node-3", incarnation=103)
    quarters = {
        f"node-{number}": tuple(StatePart(layer=n, start=number, end=number + 1, of=4) for n in range(4))
        for number in range(3)
    }
    for generation in (2, 3):
        for name, parts in quarters.items():
            at = report(2) if name == "node-1" else report(1, ready=True)
            s.quiesced(name, generation, replace(at, parts=parts))
        asked: ComputePlan = s.one(ComputePlan)
        assert asked.situation.parts == {
            Device(node=name, index=0): parts for name, parts in quarters.items()
        }
        s.feed(PlanReady, generation=generation, plan=s.machine._c.resumption.plan)
        s.say("node-1", PeerSuspected(generation=generation, detail="reset"))
        s.fire("suspicion", 3.0)


def test_a_recovery_whose_state_is_in_replicas_alone_says_so() -> None:
    s = Sharing()
    s.feed(NodeVanished, node="node-3", incarnation=103)
    for name, own, replica in (("node-0", 0, None), ("node-1", 0, 1), ("node-2", 1, None)):
        layers = HELD[name]
        parts = [StatePart(layer=layer, start=own, end=own + 1, of=2) for layer in layers]
        if replica is not None:  # Of node-3's part.
            parts += [StatePart(layer=layer, start=1, end=2, of=2, replica=True) for layer in layers]
        s.quiesced(name, 2, replace(report(1, held=layers), parts=tuple(parts)))
    s.plan()
    [chosen] = s.events("PlanChosen")
    assert chosen.details["from_replicas"] == [2, 3]
    for name in ("node-0", "node-1", "node-2"):
        s.resumed(name, 2)
    s.stepped("node-0", 2, 2)
    assert s.recovery["tier"] == "replica"


@pytest.mark.parametrize("zero1", [False, True])
@pytest.mark.parametrize("in_parts", [False, True])
def test_the_planner_receives_parts_if_trainers_have_layers_in_parts(zero1: bool, in_parts: bool) -> None:
    s = Coordination()
    s.feed(BrokerConnected)
    for number in range(2):
        s.hello(f"node-{number}", 100 + number)
    s.feed(SubmitRequested, request="r", job=job(policy=replace(POLICY, zero1=zero1)))
    for number in range(2):
        s.say(f"node-{number}", Prepared(job_id="job-1", profile=None if number else PROFILE))
    s.feed(TemplatesReady, job_id="job-1")
    parts = (StatePart(layer=3, start=0, end=1, of=2),) if in_parts else ()
    for number in range(2):
        s.quiesced(f"node-{number}", 1, replace(report(held=(0, 1, 2)), parts=parts))
    devices = [Device(node=f"node-{number}", index=0) for number in range(2)]
    expected = dict.fromkeys(devices, parts) if zero1 or in_parts else None
    assert s.one(ComputePlan).situation.parts == expected


# --- suspicions ----------------------------------------------------------------------------------


def test_a_suspicion_without_a_group_is_only_an_event() -> None:
    s = Recovering()
    s.feed(NodeVanished, node="node-3", incarnation=103)
    s.say("node-0", PeerSuspected(generation=2, detail="reset"))
    assert s.events("PeerSuspected") and not s.timers() and not s.commands()


def test_a_suspicion_waits_while_the_broker_is_away() -> None:
    s = Recovering()
    s.say("node-0", PeerSuspected(generation=1, detail="reset"))
    s.feed(BrokerDisconnected)
    s.fire("suspicion", 3.0)
    assert s.timers() == {"suspicion": 3.0} and not s.commands()
    s.feed(BrokerConnected)
    s.fire("suspicion", 3.0)
    assert set(s.modes().values()) == {"abort"}


def test_a_suspicion_is_explained_by_a_node_that_is_silent_since_the_broker_is_back() -> None:
    s = Recovering()
    s.feed(BrokerDisconnected)
    s.wait(2.0)
    s.feed(BrokerConnected)
    for name in ("node-0", "node-1", "node-2"):
        s.say(name, PeerSuspected(generation=1, detail="reset"))
    s.wait(2.9)
    for name in ("node-0", "node-1", "node-2"):
        s.say(name, Heartbeat(generation=1, committed=committed(1)))
    s.fire("suspicion", 0.1)
    assert [(event.node, event.details["how"]) for event in s.events("NodeLost")] == [("node-3", "silence")]
    s.goes_on(2, "node-0", "node-1", "node-2")
    assert (s.recovery["cause"], s.recovery["nodes"]) == ("node_lost", ["node-3"])


def test_a_suspicion_ends_when_the_group_was_seen_to_commit_twice() -> None:
    s = Recovering()
    s.say("node-0", PeerSuspected(generation=1, detail="reset"))
    s.stepped("node-0", 1, 2, 3)
    s.fire("suspicion", 3.0)
    assert s.timers() == {"suspicion": 3.0} and not s.commands()
    s.stepped("node-0", 1, 4, 5)
    s.fire("suspicion", 3.0)
    assert not s.timers() and not s.commands()
    s.say("node-0", PeerSuspected(generation=1, detail="reset"))
    s.stepped("node-0", 1, 6)
    s.fire("suspicion", 3.0)
    assert set(s.modes().values()) == {"abort"}, "one step more proves nothing"
