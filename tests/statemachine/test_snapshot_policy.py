"""Tests of the snapshot interval and protection: chosen from costs or requested, and kept over a restart."""

import json

import pytest
from msgspec.structs import replace

from ftd.coordinator.protection_choice import choose_protection
from statemachine.cluster.machine import ClusterMachine
from statemachine.cluster.snapshots.protections import protection_request
from statemachine.effects import AnswerRequest, ComputePlan, Effect, EmitEvent
from statemachine.events import BrokerConnected, NodeVanished, PlanImpossible, PlanReady, SnapshotRequested
from statemachine.messages.cluster import Heartbeat, Resume, SnapshotCompleted, Stepped, TakeSnapshot
from statemachine.messages.common import Prepared, Quiesce, SnapshotFailed, SnapshotStarted
from statemachine.messages.values import Vote
from statemachine.timing import Timing
from tests.helpers.snapshot_machine import HELD, Snapshots
from tests.helpers.transcripts import PROFILE, committed, report


class Policies(Snapshots):
    """Four nodes that train step by step; their snapshots begin and complete as soon as they are ordered."""

    def __init__(self) -> None:
        super().__init__()
        self.step, self.snapped = 1, 0
        self.wanted = False
        """Whether a snapshot was ordered."""
        self.seen: list[EmitEvent] = []
        """Intervals that were chosen by measurement."""
        self.said: dict[str, tuple[bool, str, str]] = {}
        """Whether each request was accepted, with its outcome and the sentence."""

    def train(
        self, steps: int, *, step_s: float = 0.1, slower_s: float = 0.0, stall_s: float = 0.0
    ) -> list[int]:
        """Train, and return the steps of which snapshots were taken."""
        taken = []
        for _ in range(steps):
            self.step += 1
            took_s = 0.1 + slower_s if self.step == self.snapped + 1 else 0.1
            self.wait(took_s)
            self.say("node-0", Stepped(generation=1, steps=(committed(self.step),), step_s=took_s))
            if self.wanted:
                taken.append(self.snap(stall_s))
        return taken

    def took(self, effects: list[Effect]) -> list[Effect]:
        super().took(effects)
        self.wanted = self.wanted or bool(self.commands(TakeSnapshot))
        self.said |= {
            answer.request: (answer.accepted, answer.outcome, answer.detail)
            for answer in self.all(AnswerRequest)
        }
        self.seen += [
            published
            for published in self.events("SnapshotIntervalChosen")
            if published.details["by"] != "user"
        ]
        return effects

    def snap(self, stall_s: float) -> int:
        self.wanted = False
        step = self.snapped = self.step + 1
        for name in HELD:
            self.say(name, SnapshotStarted(generation=1, step=step))
        for name in HELD:
            vote = Vote(loss=1 / step, gradient_norm=1.0)
            said = SnapshotCompleted(
                generation=1, step=step, vote=vote, size_bytes=1000, copy_s=stall_s, stall_s=stall_s
            )
            self.say(name, said)
        for name in HELD:
            self.say(name, Heartbeat(generation=1, committed=committed(self.step), retained_step=step))
        return step

    def ask_now(self, request: str) -> None:
        self.feed(SnapshotRequested, request=request, now=True)

    def ask(self, **wants: object) -> AnswerRequest:
        self.feed(SnapshotRequested, request="q", **wants)
        answer: AnswerRequest = self.one(AnswerRequest)
        return answer

    def fails(self, detail: str) -> None:
        """Let the ordered snapshot begin, and one node fail to take its part."""
        self.wanted, step = False, self.step + 1
        self.say("node-0", SnapshotStarted(generation=1, step=step))
        self.say("node-0", SnapshotFailed(generation=1, step=step, detail=detail))

    @property
    def every(self) -> int:
        every: int = self.machine.public_state()["snapshot_policy"]["every_steps"]
        return every


def begun(**policy: object) -> Policies:
    s = Policies()
    s.begin(**policy)  # type: ignore[arg-type]
    for name in HELD:
        s.heartbeat(name)
    s.said.clear()
    return s


def test_snapshots_that_cost_next_to_nothing_are_taken_after_every_step() -> None:
    s = begun(every_steps=5, auto_interval=True)
    assert s.train(12, stall_s=0.0005) == [6, 11, 12, 13, 14]
    (published,) = s.seen
    assert (published.details["before"], published.details["every_steps"], published.details["by"]) == (
        5,
        1,
        "measurement",
    )
    assert (
        published.reason == "a snapshot costs 0.5 ms of a step of 100 ms (0.50%): cheap enough for every step"
    )
    assert s.every == 1


@pytest.mark.parametrize("cost", [{"stall_s": 0.02}, {"slower_s": 0.02}, {"stall_s": 0.02, "slower_s": 0.02}])
def test_snapshots_that_cost_time_are_taken_at_the_best_interval(cost: dict[str, float]) -> None:
    s = begun(every_steps=5, auto_interval=True)
    s.train(12, **cost)
    (published,) = s.seen
    # One failure per day and node is expected until one happens: √(2 · 0.02 · 86,400 / 4) / 0.1 steps is
    # the best interval, which is reached in several choices.
    assert published.details["cost_s"] == pytest.approx(0.02)
    assert published.details["horizon_s"] == 22_000.0
    assert s.every == 20
    s.train(22, **cost)
    assert s.every == 40, "the job has no more"


def test_an_interval_given_by_the_job_stays() -> None:
    s = begun(every_steps=3)
    assert s.train(14, stall_s=0.05) == [4, 7, 10, 13, 16]
    assert s.every == 3 and not s.seen


def test_a_user_s_interval_holds_until_the_next_and_over_a_restart() -> None:
    s = begun(every_steps=5, auto_interval=True)
    assert s.ask(every_steps=2).detail == "snapshots: every 2 steps"
    (published,) = s.events("SnapshotIntervalChosen")
    assert (published.details["by"], published.details["before"], published.details["every_steps"]) == (
        "user",
        5,
        2,
    )
    assert s.train(5) == [3, 5, 7]
    machine, _ = ClusterMachine.restore(
        Timing(), json.loads(json.dumps(s.machine.durable_state())), s.now, "restart"
    )
    s.machine = machine
    s.feed(BrokerConnected)
    assert s.every == 2


def test_while_paused_only_the_requested_snapshot_is_taken() -> None:
    s = begun(every_steps=2)
    assert s.ask(every_steps=0).detail == "snapshots: none from now on; the newest stays"
    assert s.every == 0
    assert s.train(6) == []
    s.ask_now("now")
    assert s.wanted and s.snap(0.0) == 8
    said = (True, "complete", "the snapshot of step 8 is complete in the memory of 4 nodes")
    assert s.said["now"] == said
    assert s.train(4) == []
    assert (
        s.ask(every_steps="auto").detail
        == "snapshots: at an interval chosen from measurements, now every 2 steps"
    )
    assert s.train(4) != []


def test_a_snapshot_now_is_answered_once_when_it_is_complete() -> None:
    s = begun(every_steps=20)
    s.ask_now("first")
    assert s.wanted and "first" not in s.said
    s.fails("its memory is full")
    assert "first" not in s.said, "the next one answers it"
    s.train(3)
    assert s.said["first"][:2] == (True, "complete") and "snapshot_answer" not in s.due
    s.said.clear()
    s.train(4)
    assert not s.said


def test_a_snapshot_now_that_cannot_be_taken_is_refused_with_the_reason_and_promises_nothing() -> None:
    s = begun(every_steps=20)
    s.train(38)  # Step 40, the last one, is computed.
    s.ask_now("late")
    assert s.said["late"][0] is False and "computes its last step" in s.said["late"][2]
    s = begun(every_steps=20)
    s.feed(NodeVanished, node="node-3", incarnation=103)
    s.ask_now("in time")
    s.ask_now("during a recovery")
    assert not s.said
    for name in ("node-0", "node-1", "node-2"):
        s.quiesced(name, 2, report(1, held=HELD[name]))
    s.feed(PlanImpossible, generation=2, too_few=True, reason="too few nodes", needed=4)
    for request in ("in time", "during a recovery"):
        assert s.said[request] == (False, "", "no snapshot is taken: the job is paused: too few nodes")
    s.ask_now("paused")
    assert s.said["paused"][0] is False and "nothing has changed: the job is paused" in s.said["paused"][2]
    assert not s.machine._c.snapshots.user_requested and "snapshot_answer" not in s.due


@pytest.mark.parametrize("ordered", [True, False])
def test_a_snapshot_now_that_takes_long_is_answered_with_what_is_known(ordered: bool) -> None:
    s = begun(every_steps=20)
    if not ordered:
        s.feed(NodeVanished, node="node-3", incarnation=103)
    s.ask_now("slow")
    s.fire("snapshot_answer", 20.0)
    accepted, outcome, detail = s.said["slow"]
    assert (accepted, outcome) == ((True, "under way") if ordered else (False, ""))
    assert ("is under way, and not complete after 20 s" if ordered else "a recovery is under way") in detail
    assert s.machine._c.snapshots.user_requested is False


def test_a_request_to_a_job_without_snapshots_is_answered_with_the_remedy() -> None:
    s = begun(every_steps=0)
    answer = s.ask(every_steps=5)
    assert not answer.accepted and '[snapshot] every_steps = "auto"' in answer.detail
    s = Policies()
    s.feed(BrokerConnected)
    assert s.ask(now=True).detail == "no job is under way"


# --- the protection ------------------------------------------------------------------------------


class Protections(Policies):
    """The planner's answer includes the protection of the plan's snapshots."""

    def plan(self) -> list[Effect]:
        asked: ComputePlan = self.one(ComputePlan)
        assert asked.protection is not None
        plan = self.planner.plan(asked.situation)
        choice = choose_protection(plan, PROFILE.layers, asked.protection)
        return self.feed(PlanReady, generation=asked.generation, plan=plan, protection=choice)

    def stop_and_go_on(self, generation: int) -> list[Resume]:
        """Stop after the step in flight and resume."""
        self.step += 1
        for name in HELD:
            self.quiesced(name, generation, report(self.step, held=HELD[name]))
        self.plan()
        return [sent.command for sent in self.commands(Resume)]

    @property
    def protection(self) -> str:
        scheme: str = self.machine.public_state()["snapshot_policy"]["protection"]
        return scheme


def protected(**policy: object) -> Protections:
    s = Protections()
    s.begin(**policy)  # type: ignore[arg-type]
    for name in HELD:
        s.heartbeat(name)
    return s


def test_a_new_protection_takes_a_boundary_and_the_same_plan() -> None:
    s = protected(every_steps=30)
    s.train(3)
    answer = s.ask(protection="arc:1")
    assert answer.detail == "protection: arc:1, from the next step boundary on"
    assert {sent.command.mode for sent in s.commands(Quiesce)} == {"boundary"}
    assert s.protection == "aec"
    resumes = s.stop_and_go_on(2)
    assert {resume.protection for resume in resumes} == {"arc:1"}
    assert all(not resume.plan.transfers and resume.plan.method == "unchanged" for resume in resumes)
    (published,) = s.events("ProtectionChanged")
    assert (published.details["before"], published.details["protection"], published.details["by"]) == (
        "aec",
        "arc:1",
        "user",
    )
    for name in HELD:
        s.resumed(name, 2)
    s.say("node-0", Stepped(generation=2, steps=(committed(s.step + 1),), step_s=0.1))
    (done,) = s.events("RecoveryCompleted")
    recovery = done.details["recovery"]
    assert (recovery["cause"], recovery["recomputed_steps"], recovery["bytes_moved"]) == (
        "protection_changed",
        0,
        0,
    )
    assert s.commands(TakeSnapshot), "the newest snapshot is still protected as before"


def test_a_new_protection_waits_for_a_join_that_is_about_to_begin() -> None:
    s = protected(every_steps=30)
    s.hello("node-4", 104)
    s.say("node-4", Prepared(job_id="job-1", profile=None))
    s.ask(protection="arc:1")
    assert not s.commands(Quiesce)
    s.fire("join", 0.1)
    assert "node-4" in {sent.node for sent in s.commands(Quiesce)}, "one generation does for both"


def test_a_protection_requested_during_a_recovery_takes_effect_after_it() -> None:
    s = protected(every_steps=30)
    s.train(2)
    s.feed(NodeVanished, node="node-3", incarnation=103)
    s.step += 1
    for name in ("node-0", "node-1", "node-2"):
        s.quiesced(name, 2, report(s.step, held=HELD[name]))
    asked: ComputePlan = s.one(ComputePlan)
    s.ask(protection="arc:1")
    s.ask(protection="none")
    assert not s.commands(Quiesce)
    s.took([asked])
    s.plan()
    assert {sent.command.protection for sent in s.commands(Resume)} == {"aec"}
    for name in s.machine.public_state()["nodes"]:
        if name != "node-3":
            s.resumed(name, 2)
    s.say("node-0", Stepped(generation=2, steps=(committed(s.step + 1),), step_s=0.1))
    assert {sent.command.generation for sent in s.commands(Quiesce)} == {3}


def test_with_auto_every_plan_has_its_own_protection() -> None:
    s = protected(every_steps=30, protection="none", auto_protection=True)
    assert s.protection == "arc:1"  # The plan has two owners.
    assert s.ask(protection="auto").detail == "protection: it is auto already"
    assert not s.commands(Quiesce)


def test_a_protection_survives_a_restart_also_one_that_is_not_in_effect_yet() -> None:
    s = protected(every_steps=30)
    s.train(2)
    s.ask(protection="arc:1")
    journal = json.loads(json.dumps(s.machine.durable_state()))
    s.machine, _ = ClusterMachine.restore(Timing(), journal, s.now, "restart")
    s.feed(BrokerConnected)
    assert [sent.command.mode for sent in s.commands(Quiesce)] or s.machine.generation >= 2
    assert s.machine.job is not None and s.machine.job.snapshot.protection == "arc:1"
    journal = json.loads(json.dumps(s.machine.durable_state()))
    assert journal["resumed_protection"] == "aec"


@pytest.mark.parametrize(
    ("protection", "auto", "reserved"),
    [("none", True, True), ("aec+buddy", False, True), ("aec", False, False)],
)
def test_half_of_a_configured_limit_is_for_copies_where_there_may_be_any(
    protection: str, auto: bool, reserved: bool
) -> None:
    s = protected(every_steps=30, protection=protection, auto_protection=auto)
    nodes = s.machine._c.nodes
    for name, limited in (("node-0", True), ("node-1", False)):
        nodes[name].facts = replace(nodes[name].facts, snapshot_bytes=1000, snapshot_limited=limited)
    wish = protection_request(s.machine._c, ["node-0", "node-1", "node-2"])
    assert wish is not None and wish.limits == {"node-0": 1000, "node-1": 1000}
    assert wish.own_limits == ({"node-0": 500} if reserved else {})
