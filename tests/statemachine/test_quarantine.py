"""Tests of nodes that fail repeatedly: when they are set aside, and when they take part again."""

import json
from typing import Any

import pytest

from planner.planner import Planner
from planner.values import Policy
from statemachine.cluster.durable import durable
from statemachine.cluster.machine import ClusterMachine
from statemachine.cluster.quarantine import MAX_FAILURES, quarantine_node
from statemachine.effects import AnswerRequest, EmitEvent
from statemachine.error_text import count_error, describe_failing_nodes
from statemachine.events import (
    BrokerConnected,
    FaultAnnounced,
    NodeVanished,
    PlanImpossible,
    ReadmitRequested,
    StopRequested,
    SubmitRequested,
    TemplatesReady,
)
from statemachine.hardware import HardwareLimits, QuarantineLimits
from statemachine.messages.cluster import Fence, Heartbeat, TrainerLost
from statemachine.messages.common import Finished, Prepared, Quiesce
from statemachine.messages.values import ClusterPhase, FailureCause
from statemachine.timing import Timing
from tests.helpers.cluster_machine import restarted
from tests.helpers.transcripts import PROFILE, Coordination, job, report

NAMES = ("node-0", "node-1", "node-2", "node-3")
BAD = "OSError: [Errno 5] Input/output error"


class Bad(Coordination):
    """A cluster with a node whose trainers fail again and again, and whose script keeps all events."""

    def __init__(self, nodes: int = 4, limits: QuarantineLimits = QuarantineLimits()) -> None:  # noqa: B008
        super().__init__(ClusterMachine(Timing(), HardwareLimits(quarantine=limits)))
        self.names = [f"node-{number}" for number in range(nodes)]
        self.told: list[EmitEvent] = []
        self.running(nodes, steps=1000)
        self.step = 1
        self.out: set[str] = set()

    def took(self, effects: list[Any]) -> list[Any]:
        super().took(effects)
        self.told += self.all(EmitEvent)
        return effects

    def lose(self, node: str, detail: str = BAD, cause: FailureCause = "raised") -> None:
        obeyed = self.machine._c.nodes[node].obeyed
        self.say(node, TrainerLost(generation=obeyed, device=0, cause=cause, detail=f"Traceback\n{detail}"))

    def train_on(self, fresh: str = "") -> None:
        """Let the nodes that were sent the Quiesce report, meet and commit a step."""
        generation = self.machine.generation
        receivers = sorted(self.machine._c.state.expected)
        for name in receivers:
            self.quiesced(name, generation, report(0, held=()) if name == fresh else report(self.step))
        self.plan()
        for name in receivers:
            self.resumed(name, generation)
        self.step += 1
        self.stepped(self.machine._c.planned[0], generation, self.step)

    def fail(self, node: str, detail: str = BAD, cause: FailureCause = "raised") -> bool:
        """Let a node fail and build the job again; return whether it takes part again."""
        self.wait(10.0)
        self.lose(node, detail, cause)
        self.train_on()
        self.say(node, Prepared(job_id="job-1", profile=None))
        return self.joins(node)

    def joins(self, node: str) -> bool:
        if "join" not in self.due:
            return False
        self.fire("join", 1.0)
        self.train_on(fresh=node)
        return True

    def told_of(self, name: str) -> list[EmitEvent]:
        return [event for event in self.told if event.name == name]

    def events(self, name: str) -> list[EmitEvent]:
        """Return the last effects' events of this name."""
        return [event for event in self.all(EmitEvent) if event.name == name]

    def aside(self) -> dict[str, Any]:
        nodes = self.machine.public_state()["nodes"]
        return {name: node["quarantine"] for name, node in nodes.items() if node["quarantine"] is not None}


def test_a_node_that_raises_again_and_again_is_set_aside_with_the_evidence_until_it_is_readmitted() -> None:
    s = Bad()
    assert [s.fail("node-3") for _ in range(3)] == [True, True, False]
    (event,) = s.told_of("NodeQuarantined")
    assert (event.node, event.details["cause"], event.details["readmit"]) == (
        "node-3", "raised", "ftd readmit node-3",
    )  # fmt: skip
    assert [(one["step"], one["ago_s"], one["detail"]) for one in event.details["evidence"]] == [
        (2, 22.0, BAD), (4, 11.0, BAD), (6, 0.0, BAD),
    ]  # fmt: skip
    assert f"raised an error 3 times within 22 s, the last: {BAD}" in event.reason
    assert s.aside()["node-3"]["readmit"] == "ftd readmit node-3"
    s.lose("node-1", "another error")
    assert {one.node for one in s.commands(Quiesce)} == {"node-0", "node-2"}, "node-3 is ready, and left out"
    s.train_on()
    s.feed(ReadmitRequested, request="r", node="node-3")
    assert s.one(AnswerRequest).accepted and s.told_of("NodeReadmitted")[0].details["by"] == "user"
    assert s.joins("node-3") and not s.aside()
    assert [s.fail("node-3") for _ in range(3)] == [True, True, False], "its count began again"


def test_a_quarantine_and_the_failures_so_far_outlast_the_coordinator_and_the_clock_of_its_host() -> None:
    s = Bad()
    s.fail("node-3")
    s.fail("node-3")
    journal = json.loads(json.dumps(s.machine.durable_state()))
    shifted = durable.shift_clock(journal, 1000.0)
    machine, _ = ClusterMachine.restore(Timing(), shifted, s.now + 1000.0, "takeover")
    assert [one.at for one in machine._c.nodes["node-3"].failures] == [
        one.at + 1000.0 for one in s.machine._c.nodes["node-3"].failures
    ]
    s.fail("node-3")
    other = restarted(s)
    assert other.machine.public_state()["nodes"]["node-3"]["quarantine"]["cause"] == "raised"
    other.feed(BrokerConnected)
    other.hello("node-3", 203)  # Its daemon restarts, which does not readmit it.
    assert not other.machine._c.nodes["node-3"].ready
    assert other.machine.public_state()["nodes"]["node-3"]["quarantine"]["cause"] == "raised"


def test_as_many_failures_are_kept_as_set_a_node_aside() -> None:
    s = Bad(limits=QuarantineLimits(failures=MAX_FAILURES + 2))
    assert [s.fail("node-3") for _ in range(MAX_FAILURES + 2)] == [True] * (MAX_FAILURES + 1) + [False]
    (event,) = s.told_of("NodeQuarantined")
    assert len(event.details["evidence"]) == MAX_FAILURES + 2


def test_failures_count_for_a_window_and_by_their_cause() -> None:
    s = Bad(limits=QuarantineLimits(failures=3, window_s=100.0))
    causes: list[tuple[str, FailureCause]] = [
        (BAD, "raised"),
        ("no heartbeat for 0.6 s", "hung"),
        ("RuntimeError: CUDA error: an illegal memory access was encountered", "raised"),
        (BAD, "raised"),
        ("no heartbeat for 0.6 s", "hung"),
    ]
    assert all(s.fail("node-3", *one) for one in causes)
    for _ in range(5):
        s.wait(101.0)
        assert s.fail("node-3")
    assert not s.told_of("NodeQuarantined")


@pytest.mark.parametrize("detail", ["killed by SIGKILL", "exited with code 1"])
def test_a_trainer_that_somebody_ended_says_nothing_about_its_node(detail: str) -> None:
    s = Bad()
    for _ in range(4):
        s.lose("node-3", "", "exited")
        s.train_on()
        s.say("node-3", Prepared(job_id="job-1", profile=None))
        assert s.joins("node-3")


def test_a_trainer_that_crashes_counts() -> None:
    s = Bad()
    for again in (True, True, False):
        lost = TrainerLost(
            generation=s.machine.generation, device=0, cause="exited", detail="killed by SIGBUS\n"
        )
        s.say("node-3", lost)
        s.train_on()
        s.say("node-3", Prepared(job_id="job-1", profile=None))
        assert s.joins("node-3") is again
    assert s.aside()["node-3"]["cause"] == "crashed"


def test_an_error_that_another_node_raises_in_the_same_step_is_the_jobs() -> None:
    s = Bad()
    s.fail("node-3")
    s.fail("node-3")
    s.lose("node-3")
    assert "node-3" in s.aside()
    s.lose("node-1")
    assert not s.aside()
    (event,) = s.told_of("NodeReadmitted")
    assert (event.node, event.details["by"]) == ("node-3", "job")
    assert [one.step for one in s.machine._c.nodes["node-3"].failures] == [2, 4]
    assert not s.machine._c.nodes["node-1"].failures


def test_a_long_error_with_other_numbers_that_another_node_raises_is_the_jobs() -> None:
    """The part of an error that is kept may end in the middle of a number."""
    s = Bad(limits=QuarantineLimits(failures=1))
    words = "ValueError: " + "the sample is bad; " * 9
    s.lose("node-3", f"{words}{7:018d} rows")
    reason = s.aside()["node-3"]["reason"]
    assert reason.startswith(f"its trainers raised an error: {words[:20]}"), "one failure has no number"
    assert reason.endswith("; 00000000000000000"), "cut off within the number"
    s.lose("node-1", f"{words}{12:030d} rows")
    assert not s.aside() and not s.machine._c.nodes["node-3"].failures


def test_an_error_that_moves_with_the_work_is_the_jobs() -> None:
    s = Bad()
    s.fail("node-3")
    s.lose("node-3")
    generation = s.machine.generation
    for name in NAMES[:3]:
        s.quiesced(name, generation, report(s.step))
    s.plan()
    for name in NAMES[:3]:
        s.resumed(name, generation)
    s.lose("node-0")
    assert s.machine.phase is ClusterPhase.FAILED
    assert [one.step for one in s.machine._c.nodes["node-3"].failures] == [2]
    assert not s.machine._c.nodes["node-0"].failures


def test_an_error_that_all_nodes_have_now_and_then_makes_none_of_them_stand_out() -> None:
    s = Bad()
    for _ in range(3):
        for name in NAMES:
            assert s.fail(name, f"ConnectionError: file server {s.step}")
    assert not s.aside()


def test_nodes_with_the_same_error_are_named_together() -> None:
    def said(*errors: str) -> str:
        return describe_failing_nodes((f"node-{n}", count_error(None, one)) for n, one in enumerate(errors))

    assert said() == ""
    assert said("x", "x") == "node-0 and node-1 failed once: x"
    assert said("x", "y", "x") == "node-0 and node-2 failed once: x; node-1 failed once: y"
    assert said(*"xxxxx") == "node-0, node-1, node-2 and 2 more nodes failed once: x"
    assert said(*"xyzwxw") == ("node-0 and node-4 failed once: x; node-1 failed once: y; 3 more nodes failed")


def test_the_end_of_a_job_says_which_nodes_failed_how_often_and_why() -> None:
    """Not those in which somebody injected a fault; and the count outlasts the coordinator."""
    s = Bad()
    s.fail("node-3", "ValueError: sample 7 is bad")
    s.fail("node-3", "ValueError: sample 12 is bad")
    s.fail("node-2", "MemoryError")
    announced = {"announced_at": s.now, "fault_at": s.now}
    s.feed(FaultAnnounced, node="node-1", **announced)
    s.lose("node-1", "killed by SIGKILL", "exited")
    s.train_on()
    said = "node-3 failed 2 times: ValueError: sample 12 is bad; node-2 failed once: MemoryError"
    for one in (s, restarted(s)):
        assert describe_failing_nodes(one.machine._c.failing.items()) == said
    steps = s.machine.job.steps if s.machine.job is not None else 0
    generation = s.machine.generation
    s.stepped(s.machine._c.planned[0], generation, *range(s.step + 1, steps + 1))
    for name in s.machine._c.planned:
        s.say(name, Finished(generation=generation, step=steps, digests={}))
    (event,) = s.told_of("JobFinished")
    assert event.reason == f"finished after {steps} steps, but {said}"
    assert s.machine.public_state()["outcome"] == event.reason, "ftd status and ftd submit --wait print this"
    s.feed(SubmitRequested, request="next", job=job("job-2"))
    assert not s.machine._c.failing


def test_no_more_than_a_share_of_the_nodes_is_set_aside() -> None:
    s = Bad()
    for _ in range(3):
        s.fail("node-3")
    assert [s.fail("node-2") for _ in range(3)] == [True, True, True]
    (event,) = s.told_of("QuarantineSkipped")
    assert event.node == "node-2" and "1 of 4 nodes are set aside already" in event.reason
    assert list(s.aside()) == ["node-3"]


def small(limits: QuarantineLimits = QuarantineLimits()) -> Coordination:  # noqa: B008
    """Start a job that two nodes can train, and no fewer."""
    s, policy = Coordination(ClusterMachine(Timing(), HardwareLimits(quarantine=limits))), SMALL
    s.planner = Planner(PROFILE, policy)
    s.feed(BrokerConnected)
    for number, name in enumerate(NAMES[:2]):
        s.hello(name, 100 + number)
    s.feed(SubmitRequested, request="r", job=job(policy=policy, steps=40))
    for name in NAMES[:2]:
        s.say(name, Prepared(job_id="job-1", profile=PROFILE if name == "node-0" else None))
    s.feed(TemplatesReady, job_id="job-1")
    for name in NAMES[:2]:
        s.quiesced(name, 1, report())
    s.plan()
    for name in NAMES[:2]:
        s.resumed(name, 1)
    s.stepped("node-0", 1, 1)
    return s


SMALL = Policy(global_batch=24, microbatch_rows=2, tolerate=0, device_memory_bytes=30_000)


def test_a_node_without_which_there_is_no_plan_is_readmitted() -> None:
    s = small(QuarantineLimits(failures=1))
    s.say("node-1", TrainerLost(generation=1, device=0, cause="raised", detail=BAD))
    assert "NodeQuarantined" in [event.name for event in s.all(EmitEvent)]
    s.quiesced("node-0", 2, report(1))
    s.say("node-1", Prepared(job_id="job-1", profile=None))
    s.feed(PlanImpossible, generation=2, too_few=True, reason="too few nodes", needed=2)
    assert s.machine.phase is ClusterPhase.PAUSED
    readmitted = [event for event in s.all(EmitEvent) if event.name == "NodeReadmitted"]
    assert [(event.node, event.details["by"]) for event in readmitted] == [("node-1", "need")]
    s.fire("join", 1.0)
    assert {one.node for one in s.commands(Quiesce)} == {"node-0", "node-1"}
    assert len(s.machine._c.nodes["node-1"].failures) == 1, "it is on probation"


def test_a_node_that_the_others_need_is_not_set_aside_again_until_there_are_more() -> None:
    s = small(QuarantineLimits(failures=1))
    s.say("node-1", TrainerLost(generation=1, device=0, cause="raised", detail=BAD))
    s.quiesced("node-0", 2, report(1))
    s.say("node-1", Prepared(job_id="job-1", profile=None))
    s.feed(PlanImpossible, generation=2, too_few=True, reason="too few nodes", needed=2)

    s.fire("join", 1.0)
    for name, held in (("node-0", report(1)), ("node-1", report(0, held=()))):
        s.quiesced(name, 3, held)
    s.plan()
    for name in NAMES[:2]:
        s.resumed(name, 3)
    s.stepped("node-0", 3, 2)
    s.say("node-1", TrainerLost(generation=3, device=0, cause="raised", detail=BAD))
    [skipped] = [event for event in s.all(EmitEvent) if event.name.startswith("Quarantine")]
    assert skipped.reason.startswith("node-1 stays, since the other nodes cannot train without it: ")
    assert not s.commands(Fence)
    s.quiesced("node-0", 4, report(2))
    s.say("node-1", Prepared(job_id="job-1", profile=None))
    s.hello("node-2", 102)
    s.say("node-1", TrainerLost(generation=4, device=0, cause="raised", detail=BAD))
    assert "NodeQuarantined" in [event.name for event in s.all(EmitEvent)], "node-2 may take its place"


def test_a_node_that_does_not_answer_the_quiesce_again_and_again_is_set_aside() -> None:
    s = Bad(limits=QuarantineLimits(failures=1))
    s.feed(NodeVanished, node="node-0", incarnation=100)
    generation = s.machine.generation
    for name in ("node-1", "node-2"):
        s.quiesced(name, generation, report(s.step))
    s.wait(4.9)
    s.say("node-3", Heartbeat(generation=generation, committed=None))
    s.fire("quiesce", 0.1)
    assert [event.details["cause"] for event in s.told_of("NodeQuarantined") if event.node == "node-3"] == [
        "hung"
    ]


def test_a_pause_for_the_state_of_absent_nodes_names_the_command_that_readmits_one_that_is_set_aside() -> (
    None
):
    """A pause for more nodes does not, since it readmits the node itself."""
    for lost, named in (((), False), ((0, 1, 2, 3), True)):
        s = Bad()
        for _ in range(3):
            s.fail("node-3")
        s.feed(NodeVanished, node="node-1", incarnation=101)
        generation = s.machine.generation
        for name in ("node-0", "node-2"):
            s.quiesced(name, generation, report(s.step, held=()))
        s.feed(
            PlanImpossible, generation=generation, too_few=not lost, reason="no", needed=3, lost_layers=lost
        )
        (paused,) = s.events("ClusterPaused")
        assert ("ftd readmit node-3" in paused.reason) is named


def test_a_node_that_computes_wrong_values_is_fenced_and_stays_out_even_if_the_job_has_to_wait() -> None:
    s = small()
    c = s.machine._c
    c.at, c.cause = s.now, "test"
    assert quarantine_node(c, c.nodes["node-1"], "corruption", (), "layer 3 differs from its replicas")
    s.took(s.machine._take_out())
    assert [one.node for one in s.commands(Fence)] == ["node-1"]
    s.hello("node-1", 201)
    s.say("node-1", Prepared(job_id="job-1", profile=None))
    s.say("node-0", TrainerLost(generation=1, device=0, cause="exited", detail="killed by SIGKILL"))
    assert s.machine.phase is ClusterPhase.PAUSED
    seen = s.machine.public_state()
    assert seen["nodes"]["node-1"]["quarantine"]["cause"] == "corruption"
    why = (
        "node-1 is set aside, since its values differed from those of its replicas; to readmit it: "
        "ftd readmit node-1"
    )
    assert seen["waiting_for"] == f"no node is ready; {why}"
    (paused,) = [event for event in s.all(EmitEvent) if event.name == "ClusterPaused"]
    assert paused.reason == seen["waiting_for"]
    s.feed(ReadmitRequested, request="r", node="node-1")
    assert s.machine.public_state()["waiting_for"] == "no node is ready"


def test_a_job_that_cannot_begin_because_nodes_are_set_aside_waits_for_them_by_name() -> None:
    s = small()
    c = s.machine._c
    c.at, c.cause = s.now, "test"
    assert quarantine_node(c, c.nodes["node-1"], "corruption", (), "layer 3 differs from its replicas")
    s.took(s.machine._take_out())
    s.feed(StopRequested, request="stop", job="job-1")
    s.feed(NodeVanished, node="node-0", incarnation=100)
    s.feed(SubmitRequested, request="r2", job=job("job-2", policy=SMALL))
    for what in ("nodes", "a node that can build the model"):  # It is fenced, and then back.
        seen = s.machine.public_state()
        assert seen["waiting_for"].startswith(f"{what}; node-1 is set aside, since its values differed")
        assert seen["waiting_for"].endswith("; to readmit it: ftd readmit node-1")
        assert seen["startup"] is None, "views would show its progress instead"
        s.hello("node-1", 201)


def test_a_coordinator_counts_bytes_that_changed_and_were_repaired_once() -> None:
    """Heartbeats have the number so far: one that is lost, or arrives late or twice, changes nothing."""
    s = Bad()
    for repairs in (0, 1, 1, 0, 2):
        s.wait(60.0)
        s.say("node-3", Heartbeat(generation=1, committed=None, repairs=repairs))
    assert [one.cause for one in s.machine._c.nodes["node-3"].failures] == ["checksum", "checksum"]
    other = restarted(s)
    other.feed(BrokerConnected)
    other.say("node-3", Heartbeat(generation=1, committed=None, repairs=2))
    assert len(other.machine._c.nodes["node-3"].failures) == 2, "they were counted before the restart"
    s.say("node-3", Heartbeat(generation=1, committed=None, repairs=3))
    assert s.aside()["node-3"]["cause"] == "checksum"
    assert [one.node for one in s.commands(Fence)] == ["node-3"]
    assert {one.node for one in s.commands(Quiesce)} == {"node-0", "node-1", "node-2"}


def test_a_number_of_repairs_that_no_node_can_have_made_costs_no_memory() -> None:
    s = Bad()
    s.wait(60.0)
    s.say("node-3", Heartbeat(generation=1, committed=None, repairs=2**60))
    assert s.aside()["node-3"]["cause"] == "checksum"
