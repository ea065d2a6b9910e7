"""Tests of the cluster machine in particular situations; ``test_cluster_transcripts`` has the main ones."""

import json
from typing import Any

import msgspec
import pytest
from msgspec import structs

from ftd.coordinator.speculative_planning import expected_situation
from planner.values import Device
from statemachine.cluster.durable.durable import SCHEMA, InvalidJournalError
from statemachine.cluster.durable.outbox import is_journaled
from statemachine.cluster.machine import ClusterMachine
from statemachine.cluster.membership import device_mismatch
from statemachine.cluster.node import NodeMachine
from statemachine.cluster.rules import owned_layers
from statemachine.cluster.startup import Startup
from statemachine.cluster.state import Cluster
from statemachine.effects import (
    AnswerRequest,
    BroadcastCommand,
    BuildTemplates,
    CancelTemplates,
    CancelTimer,
    ComputePlan,
    EmitEvent,
    PersistState,
    PlanAhead,
    PublishCluster,
    RecordSteps,
    SendCommand,
    SetTimer,
)
from statemachine.events import (
    BrokerConnected,
    BrokerDisconnected,
    DrainRequested,
    NodeVanished,
    PlanImpossible,
    StepsMissed,
    StopRequested,
    SubmitRequested,
    TemplatesFailed,
    TemplatesReady,
)
from statemachine.messages.cluster import (
    Acknowledgement,
    Fence,
    Heartbeat,
    Leaving,
    Prepare,
    Reject,
    Release,
    RequestHello,
    RequestSteps,
    Resume,
    Signal,
    Stepped,
    Stop,
    TrainerLost,
)
from statemachine.messages.common import Finished, OptimizerReplicaDiverged, PeerSuspected, Prepared, Quiesce
from statemachine.messages.values import (
    BuildProgress,
    BuildStage,
    ClusterPhase,
    CommittedStep,
    Evaluation,
    FailureCause,
    NodeActivity,
    StartupStage,
    Vote,
)
from statemachine.timing import Timing
from tests.helpers.cluster_machine import events, restarted, running, sent
from tests.helpers.transcripts import PROFILE, Coordination, committed, facts, job, report, vote


def measuring() -> Coordination:
    """Let node-1 build the job, and let node-0 build and measure it."""
    s = Coordination()
    s.feed(BrokerConnected)
    s.hello("node-0", 100)
    s.hello("node-1", 101)
    s.feed(SubmitRequested, request="r", job=job())
    assert {name: p.profile for name, p in sent(s, Prepare).items()} == {"node-0": True, "node-1": False}
    s.say("node-1", Prepared(job_id="job-1", profile=None))
    return s


def paused() -> Coordination:
    """Start two nodes that hold one replica, and lose one of them."""
    s = running(2)
    s.feed(NodeVanished, node="node-1", incarnation=101)
    s.quiesced("node-0", 2, report(1, held=(0, 1)))
    generation = s.one(ComputePlan).generation
    s.feed(PlanImpossible, generation=generation, too_few=True, reason="1 of 2 nodes", needed=2)
    return s


# --- jobs ----------------------------------------------------------------------------------------


def test_a_second_job_has_to_wait_for_the_first() -> None:
    s = running()
    s.feed(SubmitRequested, request="again", job=job("job-2"))
    answer = s.one(AnswerRequest)
    assert not answer.accepted
    assert "ftd stop tiny" in answer.detail


def test_the_same_submission_twice_is_one() -> None:
    s = running()
    s.feed(SubmitRequested, request="again", job=job("job-1"))
    assert s.one(AnswerRequest).accepted
    assert s.machine.phase is ClusterPhase.RUNNING


def test_the_same_submission_after_the_end_of_the_job_is_no_new_job() -> None:
    s = running()
    s.feed(StopRequested, request="stop", job="tiny")
    s.feed(SubmitRequested, request="again", job=job("job-1"))
    assert s.one(AnswerRequest).accepted
    assert s.machine.phase is ClusterPhase.FINISHED and not sent(s, Prepare)


def test_a_job_after_a_stopped_one_starts_from_step_0() -> None:
    s = running()
    s.feed(StopRequested, request="stop", job="tiny")
    assert s.one(AnswerRequest).accepted
    assert set(sent(s, Stop)) == {"node-0", "node-1", "node-2", "node-3"}
    assert events(s) == ["JobStopped"]
    assert s.machine.phase is ClusterPhase.FINISHED
    s.feed(SubmitRequested, request="next", job=job("job-2"))
    assert s.machine.cluster.progress.known_step == 0
    assert set(sent(s, Prepare)) == {"node-0", "node-1", "node-2", "node-3"}
    for name in ("node-0", "node-1", "node-2", "node-3"):
        s.say(name, Prepared(job_id="job-2", profile=PROFILE if name == "node-0" else None))
    s.feed(TemplatesReady, job_id="job-2")
    assert {q.generation for q in sent(s, Quiesce).values()} == {2}


def test_a_job_that_ends_while_a_node_measures_it_ends_the_process_that_was_started_for_its_plans() -> None:
    s = Coordination()
    s.feed(BrokerConnected)
    s.hello("node-0", 100)
    s.feed(SubmitRequested, request="r", job=job())
    assert sent(s, Prepare)["node-0"].profile
    s.feed(StopRequested, request="stop", job="tiny")
    assert s.one(CancelTemplates).job_id == "job-1"


def test_a_stop_that_is_asked_for_again_is_one() -> None:
    s = running()
    s.feed(StopRequested, request="stop", job="tiny")
    assert s.one(AnswerRequest).accepted and events(s) == ["JobStopped"]
    for name in ("tiny", "job-1"):
        s.feed(StopRequested, request="stop", job=name)
        assert s.one(AnswerRequest).accepted and events(s) == []
    s.feed(StopRequested, request="stop", job="other")
    assert not s.one(AnswerRequest).accepted


def test_a_job_that_ended_by_itself_cannot_be_stopped() -> None:
    s = measuring()
    s.feed(TemplatesFailed, job_id="job-1", reason="no pipeline fits")
    s.feed(StopRequested, request="stop", job="tiny")
    assert s.one(AnswerRequest).detail == "no job is under way"


@pytest.mark.parametrize("name", ["other", "job-9"])
def test_only_the_job_under_way_can_be_stopped(name: str) -> None:
    s = running()
    s.feed(StopRequested, request="stop", job=name)
    assert not s.one(AnswerRequest).accepted
    assert s.machine.phase is ClusterPhase.RUNNING


def test_templates_that_cannot_be_made_fail_the_job_with_the_remedy() -> None:
    s = Coordination()
    s.feed(BrokerConnected)
    s.hello("node-0", 100)
    s.feed(SubmitRequested, request="r", job=job())
    s.say("node-0", Prepared(job_id="job-1", profile=PROFILE))
    assert s.one(BuildTemplates).max_nodes == 3
    s.feed(TemplatesFailed, job_id="job-1", reason="no pipeline fits: take 2 nodes")
    assert s.machine.phase is ClusterPhase.FAILED
    assert s.machine.public_state()["outcome"] == "no pipeline fits: take 2 nodes"


def test_before_the_start_the_state_shows_how_far_the_nodes_are() -> None:
    s = measuring()

    def startup() -> Startup:
        found = s.machine.public_state()["startup"]
        assert isinstance(found, Startup)
        return found

    assert s.machine.public_state()["waiting_for"] == "node-0 to build and measure the model"
    assert startup() == Startup(stage=StartupStage.BUILDING, node="node-0")
    for doing, stage in ((BuildStage.CHECKING, "building"), (BuildStage.MEASURING, "measuring")):
        progress = BuildProgress(stage=doing, done=2, total=10)
        s.say("node-0", Heartbeat(generation=0, committed=None, building=progress))
        assert s.all(PublishCluster), "people see it at once"
        assert startup() == Startup(stage=StartupStage(stage), done=2, total=10, node="node-0", doing=doing)
    s.say("node-0", Heartbeat(generation=0, committed=None, building=progress))
    assert not s.all(PublishCluster)
    s.say("node-0", Prepared(job_id="job-1", profile=PROFILE))
    assert startup() == Startup(stage=StartupStage.PLANNING)
    s.feed(TemplatesReady, job_id="job-1")
    assert startup().stage is StartupStage.FORMING


def test_before_a_job_the_state_counts_nodes_whose_trainers_run() -> None:
    s = Coordination()
    s.feed(BrokerConnected)
    assert s.machine.public_state()["startup"] == Startup(stage=StartupStage.NODES)
    s.hello("node-0", 100)
    s.hello("node-1", 101)
    for done in (0, 1):
        progress = BuildProgress(stage=BuildStage.STARTING, done=done, total=2)
        s.say("node-1", Heartbeat(generation=0, committed=None, building=progress))
        assert s.all(PublishCluster)
        assert s.machine.public_state()["startup"] == Startup(stage=StartupStage.NODES, done=1, total=2)
    s.say("node-1", Heartbeat(generation=0, committed=None))
    assert s.machine.public_state()["startup"] == Startup(stage=StartupStage.NODES, done=2, total=2)


def test_another_node_measures_when_the_first_cannot() -> None:
    s = measuring()
    s.feed(NodeVanished, node="node-0", incarnation=100)
    assert sent(s, Prepare)["node-1"].profile


def test_a_job_that_no_node_can_build_fails_with_the_last_error() -> None:
    s = Coordination()
    s.feed(BrokerConnected)
    s.hello("node-0", 100)
    s.hello("node-1", 101)
    s.feed(SubmitRequested, request="r", job=job())
    for name in ("node-0", "node-1"):
        assert s.machine.phase is ClusterPhase.WAITING
        s.say(name, TrainerLost(generation=0, device=0, cause="unprepared", detail="KeyError: 'width'"))
    assert s.machine.phase is ClusterPhase.FAILED
    assert "KeyError: 'width'" in s.machine.public_state()["outcome"]


def test_trainers_that_die_first_and_cannot_build_then_fail_the_job_too() -> None:
    s = Coordination()
    s.feed(BrokerConnected)
    s.hello("node-0", 100)
    s.feed(SubmitRequested, request="r", job=job())
    s.say("node-0", TrainerLost(generation=0, device=0, cause="exited", detail="killed by SIGKILL"))
    assert s.machine.phase is ClusterPhase.WAITING
    s.say("node-0", TrainerLost(generation=0, device=0, cause="unprepared", detail="trainers ended 3 times"))
    assert s.machine.phase is ClusterPhase.FAILED
    assert "trainers ended 3 times" in s.machine.public_state()["outcome"]


@pytest.mark.parametrize(
    ("cause", "detail", "said"),
    [
        ("exited", "killed by SIGKILL\nwhat it printed", "exited, killed by SIGKILL"),
        ("raised", "Traceback …\n  File …\nOSError: shard 7\n", "raised, OSError: shard 7"),
        ("hung", "", "hung"),
    ],
)
def test_the_reason_of_a_lost_trainer_is_one_line(cause: FailureCause, detail: str, said: str) -> None:
    s = running()
    s.say("node-3", TrainerLost(generation=1, device=0, cause=cause, detail=detail))
    [lost] = [e for e in s.all(EmitEvent) if e.name == "TrainerLost"]
    assert lost.reason == f"trainer 0 of node-3: {said}" and lost.details["detail"] == detail


def test_code_that_raises_again_and_again_fails_the_job() -> None:
    s = running(4)
    for attempt, name in enumerate(("node-3", "node-2", "node-1")):
        assert s.machine.phase is not ClusterPhase.FAILED
        s.say(name, TrainerLost(generation=1 + attempt, device=0, cause="raised", detail="ValueError: nan"))
    assert s.machine.phase is ClusterPhase.FAILED
    assert "ValueError: nan" in s.machine.public_state()["outcome"]


def test_the_start_waits_a_moment_for_nodes_that_are_building() -> None:
    s = Coordination()
    s.feed(BrokerConnected)
    for number in range(3):
        s.hello(f"node-{number}", 100 + number)
    s.feed(SubmitRequested, request="r", job=job())
    s.say("node-0", Prepared(job_id="job-1", profile=PROFILE))
    s.say("node-1", Prepared(job_id="job-1", profile=None))
    s.feed(TemplatesReady, job_id="job-1")
    assert not sent(s, Quiesce)
    s.fire("settle", 1.0)
    assert set(sent(s, Quiesce)) == {"node-0", "node-1"}


def test_replicas_that_diverged_are_reported() -> None:
    s = running(4, steps=1)
    for name, digest in (("node-0", "aa"), ("node-1", "bb"), ("node-2", "ab"), ("node-3", "bb")):
        layers = (0, 1) if digest.startswith("a") else (2, 3)
        s.say(name, Finished(generation=1, step=1, digests=dict.fromkeys(layers, digest)))
    diverged = [e for e in s.all(EmitEvent) if e.name == "ReplicasDiverged"]
    assert [e.details["layer"] for e in diverged] == [0, 1]
    assert s.machine.phase is ClusterPhase.FINISHED


# --- members -------------------------------------------------------------------------------------


def test_a_second_node_of_a_name_is_rejected_until_the_first_is_silent() -> None:
    s = running()
    s.hello("node-3", 999)
    assert "alive at 10.0.0.1" in sent(s, Reject)["node-3"].reason
    assert events(s) == ["NodeRejected"]
    s.wait(1.0)
    s.hello("node-3", 999)
    assert events(s) == [], "said once"
    s.wait(1.0)
    s.machine._c.due["tick"] = s.now
    s.hello("node-3", 999)
    assert "NodeLost" in events(s)
    assert "NodeJoined" in events(s)


def test_a_newcomer_takes_a_vanished_node_s_name_at_once_and_the_old_one_is_fenced() -> None:
    s = running()
    s.feed(NodeVanished, node="node-3", incarnation=103)
    s.hello("node-3", 999)
    assert "NodeJoined" in events(s)
    s.say("node-3", Heartbeat(generation=1, committed=committed(1)), incarnation=103)
    assert isinstance(s.one(SendCommand).command, Fence)
    assert s.one(SendCommand).incarnation == 103


def test_a_node_with_a_wrong_number_of_devices_is_rejected_with_the_right_one() -> None:
    s = running()
    s.hello("node-9", 900, facts=facts(devices=2))
    assert sent(s, Reject)["node-9"].reason == (
        "this node has 2 devices, but every node of the running job has 1: set node.devices = 1 and restart the "
        "node, or stop the job and submit it again for nodes of 2 devices"
    )


def test_the_rejection_of_a_returning_node_says_how_many_devices_it_had() -> None:
    s = running()
    s.feed(NodeVanished, node="node-3", incarnation=103)
    s.hello("node-3", 999, facts=facts(devices=2))
    assert sent(s, Reject)["node-3"].reason.startswith(
        "this node has 2 devices and had 1 before, but every node of the running job has 1: set node.devices = 1"
    )
    assert [event for event in events(s) if event.startswith("Node")] == ["NodeRejected"]
    s.hello("node-3", 1000, facts=facts(devices=1))
    assert "NodeJoined" in events(s)


def test_a_node_that_joins_learns_the_memory_that_plans_assume() -> None:
    """It is that of the measured device, unless the job names another one."""
    s = running()
    c = s.machine._c
    assert c.profiled is not None
    profile = structs.replace(c.profiled.profile, device_memory_bytes=1000)
    c.profiled = msgspec.structs.replace(c.profiled, profile=profile)
    unlimited = msgspec.structs.replace(c.current_job.policy, device_memory_bytes=None)
    c.job = msgspec.structs.replace(c.current_job, policy=unlimited)
    s.hello("node-9", 900)
    assert sent(s, Prepare)["node-9"].job.policy.device_memory_bytes == 1000


def test_the_rejection_of_a_node_with_fewer_devices_says_that_one_may_have_failed() -> None:
    policy = msgspec.structs.replace(job().policy, devices_per_node=2)
    published = device_mismatch(facts(devices=1), policy, before=2)
    assert published is not None and "has 1 device and had 2 before" in published
    assert "has 2: see whether a device has failed, set node.devices = 2 and restart the node" in published
    assert device_mismatch(facts(devices=2), policy, before=1) is None


def test_nodes_that_do_not_fit_a_new_job_are_rejected_and_may_ask_again() -> None:
    s = Coordination()
    s.feed(BrokerConnected)
    s.hello("node-0", 100, facts=facts(devices=2))
    s.feed(SubmitRequested, request="r", job=job())
    assert set(sent(s, Reject)) == {"node-0"}
    assert "node-0" not in s.machine.public_state()["nodes"]
    s.feed(StopRequested, request="stop", job="tiny")
    s.hello("node-0", 100, facts=facts(devices=2))
    assert events(s) == ["NodeJoined"]


def test_unknown_nodes_are_asked_for_a_hello_at_a_limited_rate() -> None:
    s = running()
    s.say("node-9", Heartbeat(generation=0, committed=None), incarnation=900)
    assert set(sent(s, RequestHello)) == {"node-9"}
    s.say("node-9", Heartbeat(generation=0, committed=None), incarnation=900)
    assert not sent(s, RequestHello)


def test_a_node_that_does_not_answer_prepare_is_asked_and_sent_it_again() -> None:
    """The order may be lost if a broker's queue is full. Nodes that answered are left alone."""
    s = running()
    s.feed(StopRequested, request="stop", job="tiny")
    s.feed(SubmitRequested, request="next", job=job("job-2"))
    for name in ("node-1", "node-2", "node-3"):
        s.say(name, Prepared(job_id="job-2", profile=None))
    nothing = Acknowledgement(activity=NodeActivity.NONE, job_id=None)
    built = Acknowledgement(activity=NodeActivity.PREPARED, job_id="job-2")
    orders: list[tuple[str, Prepare]] = []
    for _ in range(5):
        for name in ("node-0", "node-1", "node-2", "node-3"):
            said = nothing if name == "node-0" else built
            s.say(name, Heartbeat(generation=1, committed=None, acknowledgement=said))
            assert not sent(s, RequestHello)
        s.fire("tick", s.machine._c.timing.heartbeat_s)
        orders += sent(s, Prepare).items()
    assert {name for name, _ in orders} == {"node-0"}
    assert orders[0][1].profile


def test_a_node_with_state_that_no_journal_accounts_for_is_fenced() -> None:
    s = running()
    s.hello("node-9", 900, job_id="job-1", prepared=True, generation=1)
    assert set(sent(s, Fence)) == {"node-9"}


def test_a_silent_node_is_lost() -> None:
    s = running()
    s.wait(3.0)  # past the grace after the broker came
    for name in ("node-0", "node-1", "node-2"):
        s.say(name, Heartbeat(generation=1, committed=committed(1)))
    s.machine._c.due["tick"] = s.now
    s.fire("tick")
    lost = [e for e in s.all(EmitEvent) if e.name == "NodeLost"]
    assert [(e.node, e.details["how"]) for e in lost] == [("node-3", "silence")]
    assert lost[0].cause == "silence:node-3:103"
    assert set(sent(s, Quiesce)) == {"node-0", "node-1", "node-2"}


def test_no_node_is_lost_because_the_coordinator_itself_was_suspended() -> None:
    s = running()
    s.fire("tick", 60.0)
    assert "NodeLost" not in events(s)


def test_a_node_keeps_its_name_although_the_coordinator_was_suspended() -> None:
    """The Hello of the other daemon of this name is read before what the live one has sent meanwhile."""
    s = running()
    s.wait(60.0)
    s.hello("node-3", 999)
    assert set(sent(s, Reject)) == {"node-3"} and "NodeLost" not in events(s)
    s.fire("tick")
    s.hello("node-3", 999, facts=facts(host="10.0.0.9"))
    assert set(sent(s, Reject)) == {"node-3"}
    s.wait(Timing().silence_s + 0.1)
    s.machine._c.due["tick"] = s.now
    s.hello("node-3", 999)
    assert "NodeLost" in events(s), "it is silent"


def test_a_node_that_returns_after_a_resume_without_it_is_fenced() -> None:
    s = running()
    s.feed(NodeVanished, node="node-3", incarnation=103)
    for name, held in (("node-0", (0, 1)), ("node-1", (2, 3)), ("node-2", (0, 1))):
        s.quiesced(name, 2, report(1, held=held))
    s.plan()
    s.hello("node-3", 103, job_id="job-1", prepared=True, generation=1, training=True)
    assert set(sent(s, Fence)) == {"node-3"}


def test_a_node_that_returns_before_the_decision_is_included() -> None:
    s = running()
    s.feed(NodeVanished, node="node-3", incarnation=103)
    s.quiesced("node-0", 2, report(1, held=(0, 1)))
    s.hello("node-3", 103, job_id="job-1", prepared=True, generation=1, training=True)
    assert set(sent(s, Quiesce)) == {"node-3"} and s.machine.generation == 2  # in the same generation
    assert not sent(s, Fence)
    s.quiesced("node-1", 2, report(1, held=(2, 3)))
    s.quiesced("node-2", 2, report(1, held=(0, 1)))
    assert not s.all(ComputePlan)
    s.quiesced("node-3", 2, report(1, held=(2, 3)))
    assert "node-3" in s.one(ComputePlan).situation.nodes


def test_a_hint_about_a_peer_is_only_an_event() -> None:
    s = running()
    s.say("node-0", PeerSuspected(generation=1, detail="connection reset by node-3"))
    assert events(s) == ["PeerSuspected"]
    assert not s.commands()


def test_a_replica_that_differed_is_only_an_event() -> None:
    s = running()
    s.say("node-0", OptimizerReplicaDiverged(generation=1, step=50, layer=3, detail="the momentum differs"))
    assert events(s) == ["OptimizerReplicaDiverged"]
    assert not s.commands()


def test_a_command_to_several_nodes_is_one_effect_and_to_none_is_no_effect() -> None:
    c = Cluster(timing=Timing(), cause="c-1")
    nodes = [NodeMachine(name=f"node-{n}", incarnation=100 + n, facts=facts()) for n in range(3)]
    stop = Stop(job_id="job-1", reason="over")
    c.send_all([], stop)
    assert c.out == []
    c.send_all(nodes[1:2], stop)
    c.send_all(iter(nodes), stop)
    receivers = {"node-0": 100, "node-1": 101, "node-2": 102}
    assert c.out == [
        SendCommand(cause="c-1", node="node-1", incarnation=101, command=stop),
        BroadcastCommand(cause="c-1", receivers=receivers, command=stop),
    ]


# --- recovery ------------------------------------------------------------------------------------


def test_a_node_that_is_heard_but_does_not_answer_quiesce_is_fenced() -> None:
    s = running()
    s.feed(NodeVanished, node="node-3", incarnation=103)
    s.quiesced("node-0", 2, report(1, held=(0, 1)))
    s.quiesced("node-1", 2, report(1, held=(2, 3)))
    s.wait(4.9)
    s.say("node-2", Heartbeat(generation=2, committed=committed(1)))
    s.fire("quiesce", 0.1)
    assert set(sent(s, Fence)) == {"node-2"}
    assert {name: q.generation for name, q in sent(s, Quiesce).items()} == {"node-0": 3, "node-1": 3}


def lost_how(s: Coordination) -> list[str]:
    return [event.details["how"] for event in s.all(EmitEvent) if event.name == "NodeLost"]


def test_a_node_that_quiesce_does_not_reach_may_return_once_with_its_state() -> None:
    """The connection loses many messages: the node sends heartbeats under the old generation. It may be the
    only node with some layers.
    """
    s = running(3)
    s.feed(NodeVanished, node="node-2", incarnation=102)
    for generation in (2, 3):
        s.quiesced("node-0", generation, report(1, held=(0, 1)))
        s.wait(4.9)
        s.say("node-1", Heartbeat(generation=1, committed=committed(1)))
        s.fire("quiesce", 0.1)
        assert set(sent(s, Fence)) == ({"node-1"} if generation == 3 else set())
        assert lost_how(s) == ["no_answer"]
        if generation == 2:
            s.say("node-1", Heartbeat(generation=1, committed=committed(1)))
            assert "node-1" in sent(s, RequestHello)
            s.hello("node-1", 101, job_id="job-1", prepared=True, generation=1, training=True)
            assert "NodeJoined" in events(s) and not sent(s, Fence)
            assert sent(s, Quiesce)["node-1"].generation == 3


def test_what_a_node_failed_to_do_counts_until_a_group_trains() -> None:
    """A node that a Quiesce did not reach, and one that could not resume, start again after that."""
    s = running(4)
    held = {"node-0": (0, 1), "node-1": (2, 3), "node-2": (0, 1), "node-3": (2, 3)}
    for generation in (2, 5):
        s.say("node-0", PeerSuspected(generation=generation - 1, detail="reset"))
        s.fire("suspicion", 3.0)
        s.note("the Quiesce does not reach node-3")
        step = s.machine.cluster.progress.known_step
        for name in ("node-0", "node-1", "node-2"):
            s.quiesced(name, generation, report(step, held=held[name]))
        s.wait(4.9)
        s.say("node-3", Heartbeat(generation=generation - 1, committed=committed(step)))
        s.fire("quiesce", 0.1)
        assert lost_how(s) == ["no_answer"] and not sent(s, Fence)
        s.hello("node-3", 103, job_id="job-1", prepared=True, generation=generation - 1, training=True)
        s.note("node-2 does not resume")
        for name, layers in held.items():
            s.quiesced(name, generation + 1, report(step, held=layers))
        s.plan()
        for name in ("node-0", "node-1", "node-3"):
            s.resumed(name, generation + 1)
        s.wait(59.0)
        s.say("node-2", Heartbeat(generation=generation + 1, committed=None))
        s.fire("resume", 1.0)
        assert not sent(s, Fence) and set(sent(s, Quiesce)) == set(held)
        for name, layers in held.items():
            s.quiesced(name, generation + 2, report(step, held=layers))
        s.plan()
        for name in held:
            s.resumed(name, generation + 2)
        s.stepped("node-0", generation + 2, step + 1)
        assert s.machine.phase is ClusterPhase.RUNNING


def test_a_node_that_a_quiesce_did_not_reach_and_that_is_silent_the_next_time_is_not_fenced() -> None:
    s = running(3)
    s.feed(NodeVanished, node="node-2", incarnation=102)
    for generation, how in ((2, "no_answer"), (3, "silence")):
        s.quiesced("node-0", generation, report(1, held=(0, 1)))
        s.wait(4.9)
        if generation == 2:
            s.say("node-1", Heartbeat(generation=1, committed=committed(1)))
        s.fire("quiesce", 0.1)
        assert lost_how(s) == [how] and not sent(s, Fence)
        if generation == 2:
            s.hello("node-1", 101, job_id="job-1", prepared=True, generation=1, training=True)


def test_of_two_nodes_that_cannot_resume_the_one_that_holds_least_is_fenced() -> None:
    s = running(4)
    s.say("node-0", PeerSuspected(generation=1, detail="reset"))
    s.fire("suspicion", 3.0)
    for generation in (2, 3):
        for name, held in (("node-0", (0, 1)), ("node-1", (2, 3)), ("node-2", (0, 1)), ("node-3", ())):
            s.quiesced(name, generation, report(1, held=held))
        s.plan()
        s.resumed("node-0", generation)
        s.resumed("node-1", generation)
        s.wait(59.0)
        for name in ("node-2", "node-3"):
            s.say(name, Heartbeat(generation=generation, committed=None))
        s.fire("resume", 1.0)
        assert set(sent(s, Fence)) == ({"node-3"} if generation == 3 else set())


def test_a_node_that_is_not_heard_at_all_is_lost_but_not_fenced() -> None:
    s = running()
    s.say("node-2", Heartbeat(generation=1, committed=committed(1)))
    s.feed(NodeVanished, node="node-3", incarnation=103)
    s.quiesced("node-0", 2, report(1, held=(0, 1)))
    s.fire("quiesce", 5.0)
    assert not sent(s, Fence)
    assert lost_how(s) == ["silence", "silence"]


def test_a_boundary_that_is_not_reached_becomes_an_abort() -> None:
    s = running()
    s.feed(DrainRequested, request="d", node="node-3")
    s.check_drain()
    s.fire("join", 0.1)
    assert {q.mode for q in sent(s, Quiesce).values()} == {"boundary"}
    s.fire("quiesce", 11.0)
    assert {q.mode for q in sent(s, Quiesce).values()} == {"abort"}
    assert "NodeLost" not in events(s)


def test_a_group_that_does_not_form_is_tried_again_before_a_node_is_blamed() -> None:
    s = running()
    s.feed(NodeVanished, node="node-3", incarnation=103)
    for generation in (2, 3):
        for name, held in (("node-0", (0, 1)), ("node-1", (2, 3)), ("node-2", (0, 1))):
            s.quiesced(name, generation, report(1, held=held))
        s.plan()
        s.resumed("node-0", generation)
        s.resumed("node-1", generation)
        s.wait(59.0)
        s.say("node-2", Heartbeat(generation=generation, committed=None))
        s.fire("resume", 1.0)
        assert set(sent(s, Fence)) == ({"node-2"} if generation == 3 else set())
        assert set(sent(s, Quiesce)) >= {"node-0", "node-1"}


def test_a_node_without_prepared_trainers_does_not_delay_the_others() -> None:
    s = running()
    s.feed(NodeVanished, node="node-3", incarnation=103)
    s.quiesced("node-2", 2)
    assert set(sent(s, Prepare)) == {"node-2"}
    s.quiesced("node-0", 2, report(1, held=(0, 1)))
    s.quiesced("node-1", 2, report(1, held=(2, 3)))
    assert s.one(ComputePlan).situation.nodes == ("node-0", "node-1")


def test_state_from_outside_the_history_is_not_used() -> None:
    """A duplicate TrainerLost made the others continue without a node that was fine."""
    s = running()
    s.say("node-3", TrainerLost(generation=1, device=0, cause="exited", detail=""))
    for name, held in (("node-0", (0, 1)), ("node-1", (2, 3)), ("node-2", (0, 1))):
        s.quiesced(name, 2, report(1, held=held))
    s.plan()
    s.say("node-3", Prepared(job_id="job-1", profile=None))
    for name in ("node-0", "node-1", "node-2"):
        s.resumed(name, 2)
    s.stepped("node-0", 2, 2)
    s.fire("join", 0.1)
    s.quiesced("node-3", 3, report(2, held=(2, 3)))
    for name, held in (("node-0", (0, 1)), ("node-1", (2, 3)), ("node-2", (0, 1))):
        s.quiesced(name, 3, report(2, held=held))
    assert set(sent(s, Fence)) == {"node-3"}
    assert {q.generation for q in sent(s, Quiesce).values()} == {4}


def test_too_few_nodes_pause_the_job_until_a_new_one_joins() -> None:
    s = paused()
    assert s.machine.phase is ClusterPhase.PAUSED
    assert s.machine.public_state()["waiting_for"] == "1 of 2 nodes"
    [event] = [e for e in s.all(EmitEvent) if e.name == "ClusterPaused"]
    assert (event.details["needed"], event.details["present"]) == (2, 1)
    s.hello("node-1", 999)
    s.say("node-1", Prepared(job_id="job-1", profile=None))
    s.fire("join", 0.1)
    assert {q.mode for q in sent(s, Quiesce).values()} == {"abort"}
    s.quiesced("node-0", 3, report(1, held=(0, 1)))
    s.quiesced("node-1", 3, report())
    generation = s.one(ComputePlan).generation
    s.feed(PlanImpossible, generation=generation, too_few=False, reason="layers 2, 3 are lost")
    assert s.machine.phase is ClusterPhase.FAILED, "their holder came back empty"


def waiting_for_state() -> Coordination:
    """Return a cluster of three whose job waits for the layers that two absent nodes may hold."""
    s = running(3)
    s.feed(NodeVanished, node="node-1", incarnation=101)
    s.feed(NodeVanished, node="node-2", incarnation=102)
    s.quiesced("node-0", 2, report(1, held=(0, 1)))
    s.feed(PlanImpossible, generation=2, too_few=False, reason="layers 2, 3 are lost")
    return s


def join_without_state(s: Coordination) -> None:
    """Let a node join that holds nothing, so that there is no plan again."""
    s.hello("node-8", 108)
    s.say("node-8", Prepared(job_id="job-1", profile=None))
    s.fire("join", 0.1)
    s.quiesced("node-0", 3, report(1, held=(0, 1)))
    s.quiesced("node-8", 3, report())
    s.feed(PlanImpossible, generation=3, too_few=False, reason="layers 2, 3 are lost")


def test_state_that_absent_nodes_may_hold_is_waited_for() -> None:
    s = waiting_for_state()
    assert s.machine.phase is ClusterPhase.PAUSED
    assert "node-1 and node-2 may still hold it" in s.machine.public_state()["waiting_for"]
    assert [t.delay_s for t in s.all(SetTimer) if t.name == "pause_limit"] == [30.0]
    back = restarted(s)
    back.feed(BrokerConnected)
    assert [t.name for t in back.all(SetTimer) if t.cause != "clock"] == ["pause_limit"]
    s.fire("pause_limit", 30.0)
    assert s.machine.phase is ClusterPhase.FAILED


def test_nodes_that_join_without_the_state_do_not_make_the_wait_for_it_longer() -> None:
    s = waiting_for_state()
    s.wait(20.0)
    join_without_state(s)
    assert s.machine.phase is ClusterPhase.PAUSED
    [limit] = [t.delay_s for t in s.all(SetTimer) if t.name == "pause_limit"]
    assert limit == pytest.approx(9.9)
    s.fire("pause_limit", limit)
    assert s.machine.phase is ClusterPhase.FAILED


def test_an_outage_of_the_broker_does_not_count_as_time_in_which_absent_nodes_could_return() -> None:
    s = waiting_for_state()
    s.feed(BrokerDisconnected)
    s.wait(60.0)
    s.feed(BrokerConnected)
    join_without_state(s)
    assert s.machine.phase is ClusterPhase.PAUSED
    assert s.due["pause_limit"] == pytest.approx(s.now + 29.9)


def test_a_job_does_not_fail_because_its_coordinator_was_suspended_while_it_waited_for_state() -> None:
    """The Hello of the node that holds the state is yet to be read."""
    s = waiting_for_state()
    s.fire("pause_limit", 90.0)
    assert s.machine.phase is ClusterPhase.PAUSED
    s.hello("node-1", 101, job_id="job-1", prepared=True, generation=1, training=True)
    s.fire("join", 0.1)
    assert set(sent(s, Quiesce)) == {"node-0", "node-1"}


def test_a_pause_is_extended_while_a_node_that_may_hold_the_state_builds_the_job() -> None:
    s = waiting_for_state()
    s.wait(20.0)
    s.hello("node-2", 202)
    s.fire("pause_limit", 10.0)
    assert s.machine.phase is ClusterPhase.PAUSED
    assert [t.delay_s for t in s.all(SetTimer) if t.name == "pause_limit"] == [30.0]
    s.feed(NodeVanished, node="node-2", incarnation=202)
    s.fire("pause_limit", 30.0)
    assert s.machine.phase is ClusterPhase.FAILED


def test_a_node_whose_connection_breaks_before_the_first_plan_gets_its_command_again() -> None:
    s = Coordination()
    s.feed(BrokerConnected)
    names = [f"node-{number}" for number in range(4)]
    for number, name in enumerate(names):
        s.hello(name, 100 + number)
    s.feed(SubmitRequested, request="r", job=job())
    for name in names:
        s.say(name, Prepared(job_id="job-1", profile=PROFILE if name == "node-0" else None))
    s.feed(TemplatesReady, job_id="job-1")
    assert s.machine.phase is ClusterPhase.QUIESCING
    s.hello("node-1", 101, job_id="job-1", prepared=True)
    assert set(sent(s, Quiesce)) == {"node-1"}


def test_losses_while_reports_come_in_are_one_generation() -> None:
    s = running(4)
    s.feed(NodeVanished, node="node-1", incarnation=101)
    s.quiesced("node-2", 2, report(1, held=(2, 3)))
    s.feed(NodeVanished, node="node-2", incarnation=102)  # what it said goes with it
    assert s.machine.generation == 2
    s.quiesced("node-0", 2, report(1, held=(0, 1)))
    s.feed(NodeVanished, node="node-3", incarnation=103)  # the last one that was waited for
    situation = s.one(ComputePlan).situation
    assert situation.nodes == ("node-0",)
    assert set(situation.holdings) == {Device(node="node-0", index=0)}


def test_the_planner_plans_ahead_at_each_loss() -> None:
    s = running(4)
    plan = s.machine._c.resumption.plan  # type: ignore[union-attr]
    owned = {device.node: tuple(sorted(layers)) for device, layers in owned_layers(plan).items()}
    left = [f"node-{number}" for number in range(4)]
    for lost in ("node-1", "node-2"):
        left.remove(lost)
        s.feed(NodeVanished, node=lost, incarnation=s.incarnations[lost])
        assert list(s.one(PlanAhead).devices) == left
    foreseen = s.one(PlanAhead)
    for name in left:
        s.quiesced(name, 2, report(1, held=owned[name]))
    assert expected_situation(foreseen) == s.one(ComputePlan).situation


def test_when_all_are_lost_while_reports_come_in_the_job_waits() -> None:
    s = running(2)
    s.feed(NodeVanished, node="node-1", incarnation=101)
    s.feed(NodeVanished, node="node-0", incarnation=100)
    assert s.machine.phase is ClusterPhase.PAUSED
    assert "quiesce" in [timer.name for timer in s.all(CancelTimer)]


def test_events_handled_together_are_one_step() -> None:
    s = running(4)
    lost = [
        NodeVanished(at=s.now, cause=f"c{n}", node=f"node-{n}", incarnation=100 + n, graceful=False)
        for n in (1, 2)
    ]
    wrong = structs.replace(lost[0], node=[])  # type: ignore[arg-type]
    bugs: list[Any] = []
    effects = s.machine.steps([lost[0], wrong, lost[1]], bugs.append)
    assert bugs == [wrong]
    assert [type(effect).__name__ for effect in effects].count("PersistState") == 1
    assert isinstance(effects[0], PersistState)
    assert [(e.node, e.cause) for e in effects if isinstance(e, EmitEvent) and e.name == "NodeLost"] == [
        ("node-1", "c1"),
        ("node-2", "c2"),
    ]


def test_a_node_that_is_drained_while_it_measures_the_job_is_replaced() -> None:
    s = measuring()
    s.feed(DrainRequested, request="d", node="node-0")
    assert set(sent(s, Release)) == {"node-0"}
    assert sent(s, Prepare)["node-1"].profile
    s.say("node-0", Prepared(job_id="job-1", profile=PROFILE))
    assert set(sent(s, Release)) == {"node-0"} and not sent(s, Stop)  # The job is not over.
    s.hello("node-0", 100, job_id="job-1")
    assert set(sent(s, Release)) == {"node-0"} and not sent(s, Prepare)


def test_a_recovery_s_phases_add_up_though_the_coordinator_is_restarted_in_it() -> None:
    s = running(4)
    s.feed(NodeVanished, node="node-3", incarnation=103)
    s.wait(1.0)
    for name, held in (("node-0", (0, 1)), ("node-1", (2, 3)), ("node-2", (0, 1))):
        s.quiesced(name, 2, report(1, held=held))
    s.wait(0.5)
    s.plan()
    back = restarted(s)
    back.feed(BrokerConnected)
    back.wait(2.0)
    for name in ("node-0", "node-1", "node-2"):
        back.resumed(name, 2)
    back.wait(0.25)
    back.stepped("node-0", 2, 2)
    [published] = [e.details["recovery"] for e in back.all(EmitEvent) if e.name == "RecoveryCompleted"]
    phases = {name: published[name] for name in ("quiesce_ms", "plan_ms", "state_ms", "resume_ms")}
    assert phases == {"quiesce_ms": 1000.0, "plan_ms": 500.0, "state_ms": 2000.0, "resume_ms": 250.0}
    assert published["total_ms"] == sum(phases.values())


def test_drain_of_an_unknown_node_is_rejected_with_the_known_ones() -> None:
    s = running(2)
    s.feed(DrainRequested, request="d", node="node-7")
    assert s.one(AnswerRequest).detail == "there is no node 'node-7'; nodes: node-0, node-1"


def test_a_leaving_node_without_work_is_released_at_once() -> None:
    s = Coordination()
    s.feed(BrokerConnected)
    s.hello("node-0", 100)
    s.say("node-0", Leaving(reason="SIGTERM"))
    assert set(sent(s, Release)) == {"node-0"}


# --- late, duplicate and lost messages -------------------------------------------------------------


def test_stale_messages_are_counted_and_change_nothing() -> None:
    s = running()
    s.stepped("node-0", 1, 1)
    before = s.machine.durable_state()
    s.quiesced("node-0", 1, report())
    s.resumed("node-0", 0)
    s.say("node-0", Finished(generation=0, step=1, digests={}))
    s.stepped("node-0", 0, 9)
    s.hello("node-0", 100, generation=0)
    assert s.machine.durable_state() == before
    assert s.machine.cluster.progress.known_step == 1
    assert events(s) == ["MessageIgnored"]


def test_a_step_is_published_once_and_in_order() -> None:
    s = running()
    s.stepped("node-0", 1, 1, 2, 3)
    assert [e.step for e in s.all(EmitEvent)] == [2, 3]
    s.stepped("node-0", 1, 2, 3)
    assert not events(s)


def test_a_step_is_published_with_everything_in_its_vote() -> None:
    s = running()
    said = Vote(
        loss=2.0,
        gradient_norm=1.0,
        weight=480.0,
        loss_scale=1024.0,
        learning_rate=0.5,
        metrics={"accuracy": 0.25},
    )
    steps = (CommittedStep(step=2, vote=said), CommittedStep(step=3, vote=vote(3)))
    s.say("node-0", Stepped(generation=1, steps=steps, step_s=0.1))
    second, third = (e.details for e in s.all(EmitEvent))
    assert (second["weight"], second["tokens_per_s"], second["samples_per_s"]) == (480.0, 4800.0, 240.0)
    assert (second["loss_scale"], second["learning_rate"]) == (1024.0, 0.5)
    assert second["metrics"] == {"accuracy": 0.25}
    assert (third["weight"], third["tokens_per_s"], third["metrics"]) == (1.0, None, {}), "a plain mean"


def test_the_utilisation_of_the_devices_is_published_if_their_peak_is_known() -> None:
    s = Coordination()
    s.running(4, profile=structs.replace(PROFILE, flops=1e9, device_peak_flops=1e12))
    s.stepped("node-0", 1, 2)
    policy = job().policy
    flops = 1e9 * policy.global_batch / PROFILE.microbatch_rows
    peak = 1e12 * 4 * policy.devices_per_node
    assert s.one(EmitEvent).details["mfu"] == pytest.approx(flops / (0.1 * peak))
    s = running()
    s.stepped("node-0", 1, 2)
    assert s.one(EmitEvent).details["mfu"] is None


def test_steps_that_another_coordinator_published_are_recorded_and_not_published_again() -> None:
    s = running()
    s.stepped("node-0", 1, 2, 3, 4, 5)
    s.feed(StepsMissed, first=2, last=9)
    assert sent(s, RequestSteps) == {"node-0": RequestSteps(first=2, last=5)}, (
        "what was published, and no more"
    )
    held_out = Evaluation(loss=3.0, weight=8.0, took_s=0.5)
    known = (
        CommittedStep(step=2, vote=vote(2)),
        CommittedStep(step=3, vote=structs.replace(vote(3), evaluation=held_out)),
    )
    s.say("node-0", Stepped(generation=1, steps=known, step_s=0.1, requested_first=2))
    recalled = [("StepCommitted", 2), ("Evaluated", 2), ("StepCommitted", 3)]
    assert [(e.name, e.step) for e in s.one(RecordSteps).steps] == recalled
    assert s.one(RecordSteps).steps[1].details["loss"] == 3.0
    assert s.one(RecordSteps).steps[0].details["loss"] == vote(2).loss
    assert s.one(RecordSteps).steps[0].details["samples_per_s"] is None, "nobody knows how long it took"
    assert not events(s)
    assert sent(s, RequestSteps) == {"node-0": RequestSteps(first=4, last=5)}, "and the rest"
    s.say("node-0", Stepped(generation=1, steps=(), step_s=0.1, requested_first=4))
    assert sent(s, RequestSteps) == {"node-1": RequestSteps(first=4, last=5)}, "of another one"
    s.feed(StepsMissed, first=4, last=5)
    assert sent(s, RequestSteps) == {"node-2": RequestSteps(first=4, last=5)}, "it did not answer"
    last = tuple(CommittedStep(step=n, vote=vote(n)) for n in (4, 5))
    s.say("node-2", Stepped(generation=1, steps=last, step_s=0.1, requested_first=4))
    assert [e.step for e in s.one(RecordSteps).steps] == [4, 5]
    assert not sent(s, RequestSteps)


def test_steps_that_no_node_remembers_are_asked_of_each_once() -> None:
    s = running(2)
    s.stepped("node-0", 1, 2, 3)
    s.feed(StepsMissed, first=1, last=2)
    for name in ("node-0", "node-1"):
        assert set(sent(s, RequestSteps)) == {name}
        s.say(name, Stepped(generation=1, steps=(), step_s=0.1, requested_first=1))
    assert not sent(s, RequestSteps) and not s.all(RecordSteps)
    s.feed(StepsMissed, first=4, last=4)
    assert not sent(s, RequestSteps), "it was not published yet"


def test_missed_steps_are_requested() -> None:
    s = running()
    s.stepped("node-0", 1, 4)
    assert not events(s)
    assert sent(s, RequestSteps)["node-0"] == RequestSteps(first=2, last=3)
    s.stepped("node-0", 1, 2, 3)
    assert [e.step for e in s.all(EmitEvent)] == [2, 3, 4]


def test_votes_that_no_node_has_are_skipped() -> None:
    s = running(2)
    s.stepped("node-0", 1, 4)
    for name in ("node-0", "node-1"):
        assert set(sent(s, RequestSteps)) == {name}
        s.say(name, Stepped(generation=1, steps=(), step_s=0.1, requested_first=2))
    assert [e.step for e in s.all(EmitEvent) if e.name == "StepCommitted"] == [4]


def test_a_node_that_reconnects_receives_the_outstanding_command_again() -> None:
    s = running()
    s.feed(NodeVanished, node="node-3", incarnation=103)
    s.hello("node-0", 100, job_id="job-1", prepared=True, generation=1, training=True)
    assert set(sent(s, Quiesce)) == {"node-0"}
    for name, held in (("node-0", (0, 1)), ("node-1", (2, 3)), ("node-2", (0, 1))):
        s.quiesced(name, 2, report(1, held=held))
    s.plan()
    s.hello("node-0", 100, job_id="job-1", prepared=True, generation=2, quiesced=True)
    assert set(sent(s, Resume)) == {"node-0"}
    s.hello("node-0", 100, job_id="job-1", prepared=True, generation=2, training=True)
    assert not sent(s, Resume)


def test_trainers_lost_and_back_within_an_outage_are_noticed() -> None:
    s = running()
    s.hello("node-3", 103, job_id="job-1", prepared=True, generation=1)
    assert set(sent(s, Quiesce)) == {"node-0", "node-1", "node-2", "node-3"}


def test_a_node_with_an_old_job_is_ordered_to_stop_it() -> None:
    s = running()
    s.hello("node-9", 900, job_id="job-0", prepared=True, generation=0)
    assert sent(s, Stop)["node-9"].job_id == "job-0"
    assert sent(s, Prepare)["node-9"].job.job_id == "job-1"


# --- outages and restarts ----------------------------------------------------------------------------


def test_while_the_broker_is_away_nobody_is_declared_dead() -> None:
    s = running()
    s.feed(BrokerDisconnected)
    s.wait(600.0)
    s.feed(BrokerConnected)
    assert set(sent(s, RequestHello)) == {"node-0", "node-1", "node-2", "node-3"}
    s.fire("tick", 0.25)
    assert "NodeLost" not in events(s)
    for name in ("node-0", "node-1", "node-2"):
        s.hello(name, s.incarnations[name], job_id="job-1", prepared=True, generation=1, training=True)
    s.wait(2.9)
    for name in ("node-0", "node-1", "node-2"):
        s.say(name, Heartbeat(generation=1, committed=committed(1)))
    s.machine._c.due["tick"] = s.now
    s.fire("tick", 0.1)
    assert [e.node for e in s.all(EmitEvent) if e.name == "NodeLost"] == ["node-3"]


@pytest.mark.parametrize("planned", [True, False])
def test_an_order_that_is_due_while_the_broker_is_away_has_its_time_afterwards(planned: bool) -> None:
    """Neither a boundary nor a plan that is found meanwhile makes nodes count as lost."""
    s = running(4)
    s.feed(DrainRequested, request="d", node="node-3")
    s.check_drain()
    if planned:
        s.fire("join", 0.1)
        for name, held in (("node-0", (0, 1)), ("node-1", (2, 3)), ("node-2", (0, 1)), ("node-3", (2, 3))):
            s.quiesced(name, 2, report(2, held=held))
        asked = s.last
        s.feed(BrokerDisconnected)
        s.last = asked
        s.plan()
    else:
        s.feed(BrokerDisconnected)
        s.fire("join", 0.1)
    generation = s.machine.generation
    s.pass_time(600.0)
    assert {node["state"] for node in s.machine.public_state()["nodes"].values()} == {"HEALTHY"}
    assert s.machine.generation == generation
    s.feed(BrokerConnected)
    assert {"resume" if planned else "quiesce", "tick"} <= s.due.keys()


def test_a_boundary_that_an_outage_interrupts_has_its_whole_time_again() -> None:
    """Nothing is recomputed because the step in flight lasts longer than an aborting Quiesce may take."""
    s = running(4)
    s.feed(DrainRequested, request="d", node="node-3")
    s.check_drain()
    s.fire("join", 0.1)
    s.feed(BrokerDisconnected)
    s.feed(BrokerConnected)
    assert s.due["quiesce"] == pytest.approx(s.now + Timing().boundary_limit_s(0.1))


@pytest.mark.parametrize("heard", [True, False])
def test_a_last_will_after_an_outage_of_the_broker_is_no_proof(heard: bool) -> None:
    """A broker that stood still ends the sessions of nodes that are alive; a node that does not answer is lost
    for its silence.
    """
    s = running()
    s.feed(BrokerDisconnected)
    s.wait(9.0)
    s.feed(BrokerConnected)
    s.wait(0.5)
    s.feed(NodeVanished, node="node-3", incarnation=s.incarnations["node-3"])
    assert "NodeLost" not in events(s) and set(sent(s, RequestHello)) == {"node-3"}
    s.wait(2.4)
    for name in ("node-0", "node-1", "node-2", *(["node-3"] if heard else [])):
        s.say(name, Heartbeat(generation=1, committed=committed(1)))
    s.machine._c.due["tick"] = s.now
    s.fire("tick", 0.2)
    assert [(e.node, e.details["how"]) for e in s.all(EmitEvent) if e.name == "NodeLost"] == (
        [] if heard else [("node-3", "silence")]
    )
    s.wait(0.1)
    s.feed(NodeVanished, node="node-2", incarnation=s.incarnations["node-2"])
    assert "NodeLost" in events(s), "the doubt ends with the time that nodes have for coming back"


def test_a_coordinator_that_is_restarted_before_the_resume_of_a_join_waits_for_a_boundary_again() -> None:
    """The reports are lost with it. No node is dead, so nothing has to be recomputed."""
    s = running(4)
    s.feed(DrainRequested, request="d", node="node-3")
    s.check_drain()
    s.fire("join", 0.1)
    for name, held in (("node-0", (0, 1)), ("node-1", (2, 3)), ("node-2", (0, 1)), ("node-3", (2, 3))):
        s.quiesced(name, 2, report(2, held=held))
    assert s.machine.phase is ClusterPhase.RECOVERING
    other = restarted(s)
    other.feed(BrokerConnected)
    assert {order.mode for order in sent(other, Quiesce).values()} == {"boundary"}
    assert other.machine.generation == 3


def test_a_node_that_is_drained_after_the_job_is_released_at_once() -> None:
    """Nothing needs it, although the plan of the job that is over names it."""
    s = running(2, steps=1)
    for name in ("node-0", "node-1"):
        s.say(name, Finished(generation=1, step=1, digests={}))
    assert s.machine.phase is ClusterPhase.FINISHED
    s.feed(DrainRequested, request="d", node="node-1")
    assert set(sent(s, Release)) == {"node-1"}


def test_a_restarted_coordinator_leaves_a_running_job_alone() -> None:
    s = running()
    s.stepped("node-0", 1, 1)
    s = restarted(s)
    assert len(s.all(BuildTemplates)) == 1
    s.feed(BrokerConnected)
    assert events(s) == ["CoordinatorStarted"]
    assert set(sent(s, RequestHello)) == {"node-0", "node-1", "node-2", "node-3"}
    for name in ("node-0", "node-1", "node-2", "node-3"):
        s.hello(name, s.incarnations[name], job_id="job-1", prepared=True, generation=1, training=True)
        assert not s.commands()
    s.stepped("node-0", 1, 2)
    assert [e.step for e in s.all(EmitEvent)] == [2]


def test_events_are_journaled_with_the_state_and_not_decided_again_after_a_crash() -> None:
    s = running()
    s.stepped("node-0", 1, 3)
    assert events(s) == [], "step 2 is missing"
    s.stepped("node-0", 1, 2)  # Known already, but published now.
    assert events(s) == ["StepCommitted", "StepCommitted"]
    assert isinstance(s.last[0], PersistState)
    s = restarted(s)
    s.feed(BrokerConnected)
    s.wait(2.0)
    s.machine._c.due["tick"] = s.now
    s.fire("tick")
    s.machine._c.due["tick"] = s.now + 2
    s.fire("tick", 2.0)
    assert events(s) == []
    s.stepped("node-0", 1, 4)
    assert [e.step for e in s.all(EmitEvent) if e.name == "StepCommitted"] == [4]


@pytest.mark.parametrize(
    ("signal", "published", "journaled"),
    [
        (TrainerLost(generation=1, device=0, cause="exited", detail="signal 9"), "TrainerLost", True),
        (
            OptimizerReplicaDiverged(generation=1, step=1, layer=0, detail="differs"),
            "OptimizerReplicaDiverged",
            True,
        ),
        (PeerSuspected(generation=1, detail="reset"), "PeerSuspected", False),
        (Finished(generation=9, step=1, digests={}), "MessageIgnored", False),
    ],
)
def test_every_event_is_journaled_except_repeatable_ones(
    signal: Signal, published: str, journaled: bool
) -> None:
    s = running()
    s.say("node-0", signal)
    assert published in events(s)
    assert len(s.all(PersistState)) == journaled
    assert is_journaled(published) == journaled


def test_a_coordinator_killed_while_quiescing_uses_a_new_generation() -> None:
    s = running()
    s.feed(NodeVanished, node="node-3", incarnation=103)
    s = restarted(s)
    s.feed(BrokerConnected)
    assert {q.generation for q in sent(s, Quiesce).values()} == {3}


def test_a_coordinator_killed_after_the_resume_repeats_it_to_nodes_that_missed_it() -> None:
    s = running()
    s.feed(NodeVanished, node="node-3", incarnation=103)
    for name, held in (("node-0", (0, 1)), ("node-1", (2, 3)), ("node-2", (0, 1))):
        s.quiesced(name, 2, report(1, held=held))
    s.plan()
    s = restarted(s)
    s.feed(BrokerConnected)
    assert not sent(s, Quiesce)
    s.hello("node-0", 100, job_id="job-1", prepared=True, generation=2, quiesced=True)
    assert sent(s, Resume)["node-0"].generation == 2


def test_a_fresh_coordinator_never_goes_below_a_generation_that_a_node_obeyed() -> None:
    s = Coordination()
    s.feed(BrokerConnected)
    s.hello("node-0", 100, generation=41)
    assert s.machine.generation == 41


def test_a_journal_of_another_program_is_rejected() -> None:
    with pytest.raises(InvalidJournalError, match="cannot be read"):
        ClusterMachine.restore(Timing(), {"schema": SCHEMA}, 0.0, "test")
    journal = running().machine.durable_state() | {"schema": 99}
    with pytest.raises(InvalidJournalError, match="schema 99"):
        ClusterMachine.restore(Timing(), journal, 0.0, "test")


@pytest.mark.parametrize("missing", ["attempt", "recovery"])
def test_a_journal_without_the_parts_of_its_phase_is_rejected(missing: str) -> None:
    """A generation is under way, and the journal lacks its number or its purpose."""
    s = running()
    s.feed(NodeVanished, node="node-3", incarnation=103)
    journal = s.machine.durable_state()
    assert journal["phase"] == "QUIESCING"
    with pytest.raises(InvalidJournalError, match=r"cannot be read: it has no .* in phase QUIESCING"):
        ClusterMachine.restore(Timing(), journal | {missing: None}, 0.0, "test")


def test_the_public_state_is_json_and_names_the_running_job() -> None:
    state = json.loads(json.dumps(running().machine.public_state()))
    assert state["phase"] == "RUNNING"
    assert state["job"] == {"id": "job-1", "name": "tiny", "steps": 10, "global_batch": 24}
    assert [len(p["stages"]) for p in state["pipelines"]] == [2, 2]
    assert all(node["in_plan"] for node in state["nodes"].values())
    assert state["samples_per_s"] == pytest.approx(240)


def test_the_templates_grow_with_the_cluster() -> None:
    s = running(2)
    for number in (2, 3, 4):
        s.hello(f"node-{number}", 100 + number)
    assert s.one(BuildTemplates).max_nodes == 7
    s.feed(TemplatesReady, job_id="job-1")
    assert not s.all(ComputePlan)


# --- broken connections between trainers ----------------------------------------------------------------


def test_a_broken_connection_without_a_dead_node_makes_the_group_form_again() -> None:
    s = running()
    s.say("node-0", PeerSuspected(generation=1, detail="reset"))
    assert [t.name for t in s.all(SetTimer)] == ["suspicion"]
    s.say("node-1", PeerSuspected(generation=1, detail="reset"))
    assert not s.all(SetTimer)
    s.stepped("node-0", 1, 2)  # was past its VOTE
    s.fire("suspicion", 3.0)
    assert {q.mode for q in sent(s, Quiesce).values()} == {"abort"}


def test_late_messages_about_earlier_steps_are_no_sign_of_life() -> None:
    s = running()
    s.say("node-0", PeerSuspected(generation=1, detail="reset"))
    s.stepped("node-0", 1, 2, 3)
    s.fire("suspicion", 3.0)
    assert not s.commands()
    s.fire("suspicion", 3.0)
    assert set(sent(s, Quiesce)) == {"node-0", "node-1", "node-2", "node-3"}


def test_a_false_alarm_changes_nothing() -> None:
    s = running()
    s.say("node-0", PeerSuspected(generation=1, detail="reset"))
    s.stepped("node-0", 1, 2, 3)
    s.fire("suspicion", 3.0)
    s.stepped("node-0", 1, 4, 5)
    s.fire("suspicion", 3.0)
    assert not s.last
    s.say("node-0", PeerSuspected(generation=0, detail="of an older group"))
    assert not s.all(SetTimer)
