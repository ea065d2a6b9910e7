"""Details of a recovery that the mutation run asks for: what is ignored, what is counted, and what is told of it."""

from typing import Any

from transcripts import PROFILE, Coordination, committed, job, report

from statemachine.effects import CancelTimer, ComputePlan, EmitEvent, ForeseePlan, PublishCluster, SetTimer
from statemachine.events import (
    DrainRequested,
    JobSubmitted,
    NodeVanished,
    PlanImpossible,
    StopRequested,
    TemplatesReady,
)
from statemachine.messages.cluster import Heartbeat, Prepare, TrainerLost
from statemachine.messages.common import Finished, PeerSuspected, Prepared, Quiesce
from statemachine.messages.values import ClusterPhase

HELD = {"node-0": (0, 1), "node-1": (2, 3), "node-2": (0, 1), "node-3": (2, 3)}


class Recovering(Coordination):
    """A job that has committed its first step in generation 1."""

    def __init__(self, nodes: int = 4, steps: int = 10) -> None:
        super().__init__()
        self.running(nodes, steps)

    def reports(self, generation: int, *names: str, step: int = 1) -> None:
        for name in names:
            self.quiesced(name, generation, report(step, held=HELD[name]))

    def goes_on(self, generation: int, *names: str, step: int = 1) -> None:
        """From the reports of these nodes to the first commit."""
        self.reports(generation, *names, step=step)
        self.plan()
        for name in names:
            self.resumed(name, generation)
        self.stepped(names[0], generation, step + 1)

    def events(self, name: str) -> list[EmitEvent]:
        return [event for event in self.all(EmitEvent) if event.name == name]

    @property
    def recovery(self) -> dict[str, Any]:
        """What the last effects tell of a recovery."""
        [event] = self.events("RecoveryCompleted")
        told: dict[str, Any] = event.details["recovery"]
        return told

    def modes(self) -> dict[str, str]:
        return {one.node: one.command.mode for one in self.commands(Quiesce)}

    def timers(self) -> dict[str, float]:
        return {timer.name: timer.delay_s for timer in self.all(SetTimer)}

    def cancelled(self) -> set[str]:
        return {timer.name for timer in self.all(CancelTimer)}


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
    s.feed(JobSubmitted, request="next", job=job("job-2"))
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
    s.fire("join", 0.1)
    assert set(s.modes().values()) == {"boundary"}
    s.hello("node-4", 104)
    s.feed(NodeVanished, node="node-4", incarnation=104)
    assert s.machine.generation == 2


# --- reports -------------------------------------------------------------------------------------


def test_reports_of_another_generation_or_of_nobody_who_is_asked_are_ignored() -> None:
    s = Recovering()
    s.feed(NodeVanished, node="node-3", incarnation=103)
    s.quiesced("node-0", 1, report(1, held=(0, 1)))
    assert [event.reason for event in s.events("MessageIgnored")] == ["reports that nobody waits for"]
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


def test_a_node_whose_report_is_not_complete_builds_the_job_and_joins_then() -> None:
    s = Recovering()
    s.feed(NodeVanished, node="node-3", incarnation=103)
    s.quiesced("node-2", 2)
    assert [one.node for one in s.commands(Prepare)] == ["node-2"]
    s.goes_on(2, "node-0", "node-1")
    s.hello("node-2", 102, job_id="job-1", prepared=False, generation=2)
    assert [one.node for one in s.commands(Prepare)] == ["node-2"], "it is asked again until it is prepared"
    s.say("node-2", Prepared(job_id="job-1", profile=None))
    s.fire("join", 0.1)
    assert set(s.modes()) == {"node-0", "node-1", "node-2"}


def test_who_missed_a_decision_is_lost_and_the_others_abort() -> None:
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


def test_a_join_computes_no_step_again_and_an_abort_does() -> None:
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


def test_a_loss_after_the_last_step_computes_nothing_again() -> None:
    s = Recovering(4, steps=1)
    s.feed(NodeVanished, node="node-3", incarnation=103)
    s.reports(2, "node-0", "node-1", "node-2")
    s.plan()
    for name in ("node-0", "node-1", "node-2"):
        s.resumed(name, 2)
    s.say("node-0", Finished(generation=2, step=1, digests={}))
    assert s.recovery["recomputed_steps"] == 0


def test_a_roll_forward_computes_nothing_again() -> None:
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


def test_a_new_generation_ends_the_timers_of_the_one_before() -> None:
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


def test_a_pause_that_ends_gives_nothing_up() -> None:
    s = Recovering(3)
    s.feed(NodeVanished, node="node-1", incarnation=101)
    s.feed(NodeVanished, node="node-2", incarnation=102)
    s.reports(2, "node-0")
    s.feed(PlanImpossible, generation=2, too_few=False, reason="lost", lost_layers=(2, 3))
    assert s.machine.public_state()["gives_up"] and "give_up" in s.due
    s.hello("node-1", 101, job_id="job-1", prepared=True, generation=1, training=True)
    s.fire("join", 0.1)
    assert "give_up" not in s.due
    s.reports(3, "node-0", "node-1")
    generation = s.one(ComputePlan).generation
    s.feed(PlanImpossible, generation=generation, too_few=True, reason="too few", needed=3)
    assert s.machine.phase is ClusterPhase.PAUSED and not s.machine.public_state()["gives_up"]


# --- what is foreseen ----------------------------------------------------------------------------


def test_a_plan_is_foreseen_for_an_abort_and_not_for_a_boundary() -> None:
    s = Recovering()
    s.feed(DrainRequested, request="d", node="node-3")
    s.fire("join", 0.1)
    assert not s.all(ForeseePlan)
    s.feed(NodeVanished, node="node-2", incarnation=102)
    assert set(s.one(ForeseePlan).devices) == {"node-0", "node-1"}, "node-3 is to leave"
    s.say("node-0", Heartbeat(generation=1, committed=committed(1)))
    assert not s.all(ForeseePlan)


def test_a_drain_that_has_to_wait_is_told_with_the_reason() -> None:
    s = Recovering(2)
    s.feed(DrainRequested, request="d", node="node-1")
    s.fire("join", 0.1)
    s.reports(2, "node-0", "node-1")
    s.feed(PlanImpossible, generation=2, too_few=True, reason="1 of 2 nodes")
    [told] = s.events("NodeDraining")
    assert told.reason == "node-1 cannot be released yet: 1 of 2 nodes" and told.details["nodes"] == [
        "node-1"
    ]
    s.feed(PlanImpossible, generation=2, too_few=True, reason="1 of 2 nodes", needed=2)
    assert s.machine.phase is ClusterPhase.PAUSED, "not even with it"
