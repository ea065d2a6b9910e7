"""Persistent checkpoints in the machines: when one is written, who writes what, and what becomes of it."""

from typing import Any

import pytest
from msgspec.structs import replace

from planner.values import Device, StatePart
from statemachine.agent.events import AgentStarted, CommandArrived, PersistEnded
from statemachine.agent.machine import AgentMachine
from statemachine.cluster.machine import ClusterMachine
from statemachine.cluster.snapshots.persisting import attempt_of, share_layers
from statemachine.effects import (
    AbandonCheckpoint,
    AnswerRequest,
    CommitCheckpoint,
    ComputePlan,
    FindCheckpoint,
    PersistLayers,
    SendSignal,
    StopPersisting,
)
from statemachine.events import (
    BrokerConnected,
    CheckpointCommitFailed,
    CheckpointCommitted,
    CheckpointFound,
    NodeVanished,
    PlanImpossible,
    RestoreChecked,
    SubmitRequested,
    TemplatesReady,
)
from statemachine.messages.cluster import (
    Acknowledgement,
    CancelPersist,
    Command,
    Heartbeat,
    Hello,
    LayersPersisted,
    Persist,
    PersistFailed,
    Prepare,
    RequestHello,
    RestoreFailed,
    Resume,
    RetainSnapshot,
    Stepped,
    TakeSnapshot,
    ToNode,
    TrainerLost,
)
from statemachine.messages.common import Prepared, Quiesce
from statemachine.messages.values import (
    CheckpointRecord,
    NodeActivity,
    Restore,
    SkippedCheckpoint,
    Snapshot,
)
from statemachine.timing import Timing
from tests.helpers.transcripts import LAYERS, PROFILE, Script, committed, facts, job, report, vote
from tests.helpers.writing import GROUPS, NODES, Writing, all_done, gone, on_disk, persist_order, writing_job

CHECKPOINT = CheckpointRecord(step=7, vote=vote(7), layers=LAYERS, size_bytes=100)


# --- writing -------------------------------------------------------------------------------------


def test_every_layer_is_written_once_by_an_owner_and_the_shares_are_balanced() -> None:
    record = Snapshot(step=4, generation=1, vote=vote(4), groups=GROUPS)
    assert share_layers(record, NODES, PROFILE) == {
        "node-0": (0,),
        "node-1": (2,),
        "node-2": (1,),
        "node-3": (3,),
    }
    assert share_layers(record, ("node-0", "node-1"), PROFILE) == {"node-0": (0, 1), "node-1": (2, 3)}
    assert share_layers(record, ("node-0",), PROFILE) == {"node-0": (0, 1)}


def test_attempts_have_distinct_names() -> None:
    records = [
        Snapshot(step=step, generation=generation, vote=vote(1), groups=GROUPS)
        for step in (4, 5)
        for generation in (1, 2)
    ]
    names = {attempt_of(job(job_id), record) for record in records for job_id in ("job-1", "job-2")}
    assert len(names) == 8
    assert all(name.replace("_", "").isalnum() for name in names)


def test_a_snapshot_far_enough_after_the_last_checkpoint_is_written_and_committed() -> None:
    s = Writing()
    s.train()
    s.snapshot(3)
    assert not s.orders()
    s.snapshot(5)
    orders = s.orders()
    assert {name: order.layers for name, order in orders.items()} == {
        "node-0": (0,),
        "node-1": (2,),
        "node-2": (1,),
        "node-3": (3,),
    }
    assert s.events("CheckpointStarted")[0].step == 5
    assert s.machine.public_state()["checkpoint"]["writing_step"] == 5
    for node in ("node-3", "node-0", "node-1"):
        s.wrote(orders[node], node)
        assert not s.all(CommitCheckpoint)
    s.wrote(orders["node-2"], "node-2")
    commit: CommitCheckpoint = s.one(CommitCheckpoint)
    assert sorted(file.layer for file in commit.layers) == [0, 1, 2, 3]
    assert not s.events("CheckpointCompleted")
    s.feed(CheckpointCommitted, attempt=commit.attempt, step=5, pruned=(1,))
    assert s.events("CheckpointCompleted")[0].details["pruned"] == [1]
    assert s.machine.cluster.checkpoints.newest == CheckpointRecord(
        step=5, vote=vote(5), layers=4, size_bytes=40
    )
    assert not s.snapshot(8) or not s.orders()
    s.snapshot(10)
    assert len(s.orders()) == 4


def test_the_snapshot_that_is_being_written_stays_pinned_until_the_end() -> None:
    s = Writing()
    s.train()
    s.snapshot(5)
    orders = s.orders()
    s.snapshot(8)
    assert {replace(sent.command, restore=None) for sent in s.commands(RetainSnapshot)} == {
        RetainSnapshot(job_id="job-1", step=8, pinned=5)
    }
    assert not s.orders()
    s.say("node-0", PersistFailed(job_id="job-1", attempt=orders["node-0"].attempt, step=5, detail="full"))
    assert {sent.command for sent in s.commands(RetainSnapshot)} == {RetainSnapshot(job_id="job-1", step=8)}


def test_a_failed_checkpoint_is_abandoned_and_the_next_snapshot_is_tried() -> None:
    s = Writing()
    s.train()
    s.snapshot(5)
    order = s.orders()["node-1"]
    s.say("node-1", PersistFailed(job_id="job-1", attempt=order.attempt, step=5, detail="no space left"))
    assert [(e.reason, e.details["last_complete_step"]) for e in s.events("CheckpointAbandoned")] == [
        ("node-1: no space left", None)
    ]
    assert len(s.commands(CancelPersist)) == 4
    assert s.one(AbandonCheckpoint).attempt == order.attempt
    s.wrote(order, "node-1")
    assert s.events("MessageIgnored")
    s.snapshot(7)
    assert {order.record.step for order in s.orders().values()} == {7}


def test_a_lost_node_abandons_the_checkpoint_unless_it_has_written_its_share() -> None:
    s = Writing()
    s.train()
    s.snapshot(5)
    orders = s.orders()
    s.wrote(orders["node-3"], "node-3")
    s.feed(NodeVanished, node="node-3", incarnation=103)
    assert not s.events("CheckpointAbandoned")
    s.feed(NodeVanished, node="node-2", incarnation=102)
    assert "node-2 held a part" in s.events("CheckpointAbandoned")[0].reason


def test_a_node_whose_order_was_lost_gets_it_again_with_its_hello() -> None:
    s = Writing()
    s.train()
    s.snapshot(5)
    order = s.orders()["node-1"]
    here = {"job_id": "job-1", "prepared": True, "generation": 1, "training": True}
    s.hello("node-1", 101, **here)
    assert s.orders() == {"node-1": order}
    s.wrote(order, "node-1")
    s.hello("node-1", 101, **here)
    assert not s.orders()


def test_a_failed_commit_or_a_hanging_disk_abandons_the_checkpoint() -> None:
    s = Writing()
    s.train()
    s.snapshot(5)
    for node, order in s.orders().items():
        s.wrote(order, node)
    commit = s.one(CommitCheckpoint)
    s.feed(CheckpointCommitFailed, attempt=commit.attempt, step=5, detail="read-only")
    assert s.events("CheckpointAbandoned")[0].reason == "read-only"
    s.feed(CheckpointCommitted, attempt=commit.attempt, step=5, pruned=())
    assert s.events("MessageIgnored")
    assert s.machine.cluster.checkpoints.newest is None
    s.snapshot(7)
    s.fire("persist", after_s=3600.0)
    assert "did not write" in s.events("CheckpointAbandoned")[0].reason


def test_a_coordinator_that_restarts_abandons_the_checkpoint_that_it_began() -> None:
    s = Writing()
    s.train()
    s.written(5)
    s.snapshot(9)
    order = s.orders()["node-0"]
    machine, effects = ClusterMachine.restore(Timing(), s.machine.durable_state(), s.now, "restart")
    s.machine = machine
    s.took(effects)
    s.feed(TemplatesReady, job_id="job-1")
    s.feed(BrokerConnected)
    assert s.events("CheckpointAbandoned")[0].details["last_complete_step"] == 5
    assert s.one(AbandonCheckpoint).attempt == order.attempt
    assert {sent.command for sent in s.commands(CancelPersist)} == {
        CancelPersist(job_id="job-1", attempt=order.attempt)
    }
    assert machine.cluster.checkpoints.newest is not None and machine.cluster.checkpoints.newest.step == 5


# --- the end -------------------------------------------------------------------------------------


def test_the_last_step_is_written_before_the_job_ends() -> None:
    s = Writing()
    s.train(steps=8)
    s.written(5)
    all_done(s, 8)
    assert {sent.node for sent in s.commands(TakeSnapshot)} == set(NODES)
    assert not s.events("JobFinished")
    for name in NODES:
        s.complete(name, 8)
    for node, order in s.orders().items():
        s.wrote(order, node)
    s.feed(CheckpointCommitted, attempt=s.one(CommitCheckpoint).attempt, step=8, pruned=())
    assert s.events("CheckpointCompleted")[0].step == 8
    assert s.events("JobFinished")


def test_a_job_ends_although_its_last_step_cannot_be_written() -> None:
    s = Writing()
    s.train(steps=8)
    s.written(5)
    all_done(s, 8)
    s.fire("snapshot", after_s=s.due["snapshot"] - s.now)
    assert "no snapshot of the last step" in s.events("CheckpointAbandoned")[0].reason
    assert s.events("JobFinished")


# --- rollback and continuation -------------------------------------------------------------------


def test_all_nodes_go_back_to_the_newest_sound_checkpoint() -> None:
    s = Writing()
    gone(s)
    generation = s.machine.generation
    for name in NODES:
        s.quiesced(name, generation, report())
    s.plan_or_not()
    s.feed(RestoreChecked, generation=generation, possible=False, reason="nobody has a part")
    asked: FindCheckpoint = s.one(FindCheckpoint)
    skipped = (SkippedCheckpoint(step=None, reason="step-000000000009 is skipped: a file is missing"),)
    found = CheckpointRecord(step=5, vote=vote(5), layers=LAYERS)
    s.feed(CheckpointFound, generation=asked.generation, checkpoint=found, skipped=skipped, reason="")
    assert "a file is missing" in s.events("CheckpointSkipped")[0].reason
    s.plan()
    published = s.events("RolledBack")[0]
    assert (published.step, published.details["tier"]) == (5, "persistent")
    restore = s.commands(Resume)[0].command.restore
    assert restore == Restore(
        job_id="job-1", step=5, generation=0, groups=(), sources={}, url="/checkpoints", job_name="tiny"
    )
    assert s.machine.cluster.snapshots.newest is None
    assert s.machine.durable_state()["exposure"]["state_losses"] == 1
    # A node finds a corrupt byte: the next older one.
    s.say("node-1", RestoreFailed(generation=generation, detail="layer 2 is damaged", corrupt=True))
    assert s.events("CheckpointSkipped")[0].step == 5
    for name in NODES:
        s.quiesced(name, generation + 1, report())
    s.plan_or_not()
    again: FindCheckpoint = s.one(FindCheckpoint)
    assert again.corrupt_steps == (5,)
    s.feed(CheckpointFound, generation=again.generation, checkpoint=None, skipped=(), reason="none is left")
    assert "none is left" in s.events("JobFailed")[0].reason


def test_a_job_begins_from_a_checkpoint() -> None:
    s = Writing()
    s.begin(begin=CHECKPOINT)
    s.plan_or_not()
    asked: FindCheckpoint = s.one(FindCheckpoint)
    s.feed(CheckpointFound, generation=asked.generation, checkpoint=CHECKPOINT, skipped=(), reason="")
    s.plan()
    assert s.events("JobResumed")[0].step == 7
    resume: Resume = s.commands(Resume)[0].command
    assert (resume.step, resume.vote, resume.lineage) == (7, vote(7), 1)
    assert s.machine.cluster.progress.known_step == 7
    assert s.machine.durable_state()["exposure"]["state_losses"] == 0, "no node of this cluster had the state"


def test_a_checkpoint_that_does_not_fit_the_job_is_rejected() -> None:
    s = Writing()
    s.feed(BrokerConnected)
    s.feed(SubmitRequested, request="r", job=writing_job(steps=5), start_checkpoint=CHECKPOINT)
    answer: AnswerRequest = s.one(AnswerRequest)
    assert not answer.accepted
    assert "more steps, or another url" in answer.detail
    s = Writing()
    s.begin(begin=CHECKPOINT)
    s.plan_or_not()
    other = CheckpointRecord(step=7, vote=vote(7), layers=9)
    s.feed(CheckpointFound, generation=1, checkpoint=other, skipped=(), reason="")
    assert "checkpoint.url: /checkpoints holds a model of 9 layers" in s.events("JobFailed")[0].reason
    assert not s.all(ComputePlan), "nothing is planned for a job that is over"


def test_the_first_trainer_that_cannot_take_the_state_ends_the_job_with_the_layer_s_name() -> None:
    s = Writing()
    s.begin(begin=CHECKPOINT)
    s.plan_or_not()
    s.feed(CheckpointFound, generation=1, checkpoint=CHECKPOINT, skipped=(), reason="")
    s.plan()
    s.say("node-1", TrainerLost(generation=1, device=0, cause="foreign", detail="layer 2, 2.weight: (3,)"))
    [published] = s.events("JobFailed")
    assert published.reason.startswith(
        "checkpoint.url: /checkpoints holds another model under the name 'tiny'"
    )
    assert "layer 2, 2.weight" in published.reason and "another url or name" in published.reason
    assert not s.all(AbandonCheckpoint), "what is there stays"
    s.say("node-0", TrainerLost(generation=1, device=0, cause="foreign", detail="layer 0, 0.weight: (3,)"))
    nodes = s.machine.public_state()["nodes"]
    assert {node["state"] for node in nodes.values()} == {"HEALTHY"}, "fresh trainers come without a word"


def looking(s: Writing) -> FindCheckpoint:
    """Lose all memory, so that the newest checkpoint is searched for."""
    gone(s)
    for name in NODES:
        s.quiesced(name, s.machine.generation, report())
    s.plan_or_not()
    s.feed(RestoreChecked, generation=s.machine.generation, possible=False, reason="nobody has a part")
    asked: FindCheckpoint = s.one(FindCheckpoint)
    return asked


def test_a_found_checkpoint_counts_once_and_only_for_its_generation() -> None:
    s = Writing()
    asked = looking(s)
    assert s.due["find"] == pytest.approx(s.now + Timing().checkpoint_location_s)
    found = {"checkpoint": CheckpointRecord(step=5, vote=vote(5), layers=LAYERS), "skipped": (), "reason": ""}
    s.feed(CheckpointFound, generation=asked.generation - 1, **found)
    assert s.events("MessageIgnored") and not s.all(ComputePlan) and "find" in s.due
    s.feed(CheckpointFound, generation=asked.generation, **found)
    plan: ComputePlan = s.one(ComputePlan)
    assert "find" not in s.due
    assert plan.situation.parts is None and not plan.situation.in_memory
    s.feed(CheckpointFound, generation=asked.generation, **found)
    assert s.events("MessageIgnored") and not s.all(ComputePlan)
    s.last = [plan]
    s.plan()
    s.feed(CheckpointFound, generation=asked.generation, **found)
    assert s.events("MessageIgnored") and not s.all(ComputePlan)


def test_an_unreadable_checkpoint_location_is_read_again_after_a_tenth_of_the_time() -> None:
    s = Writing()
    asked = looking(s)
    nothing = {"checkpoint": None, "skipped": (), "reason": "stale file handle", "unreadable": True}
    s.feed(CheckpointFound, generation=asked.generation, **nothing)
    state = s.machine.public_state()
    assert state["phase"] == "PAUSED" and state["pause_limited"]
    assert state["waiting_for"].endswith("cannot be read: stale file handle; /checkpoints is tried again")
    assert s.due["pause_limit"] == pytest.approx(s.now + 3.0)
    s.fire("pause_limit", 3.0)
    quiesces = s.commands(Quiesce)
    assert {one.command.mode for one in quiesces} == {"abort"} and len(quiesces) == 4
    for name in NODES:
        s.quiesced(name, s.machine.generation, report())
    s.plan_or_not()
    s.feed(RestoreChecked, generation=s.machine.generation, possible=False, reason="nobody has a part")
    asked = s.one(FindCheckpoint)
    found = CheckpointRecord(step=5, vote=vote(5), layers=LAYERS)
    s.feed(CheckpointFound, generation=asked.generation, checkpoint=found, skipped=(), reason="")
    s.plan()
    for name in NODES:
        s.resumed(name, s.machine.generation)
    steps = (committed(6),)
    s.say(
        "node-0",
        Stepped(generation=s.machine.generation, steps=steps, step_s=0.1, lineage=s.machine.cluster.lineage),
    )
    [published] = s.events("RecoveryCompleted")
    assert (published.details["recovery"]["cause"], published.details["recovery"]["tier"]) == (
        "resumed",
        "persistent",
    )


def test_under_zero1_a_checkpoint_gives_every_device_every_part() -> None:
    s = Writing()
    s.feed(BrokerConnected)
    for number, name in enumerate(NODES):
        s.hello(name, 100 + number)
    plain = writing_job()
    zero1 = replace(plain, policy=replace(plain.policy, zero1=True))
    s.feed(SubmitRequested, request="r", job=zero1, start_checkpoint=CHECKPOINT)
    for number, name in enumerate(NODES):
        s.say(name, Prepared(job_id="job-1", profile=PROFILE if number == 0 else None))
    s.feed(TemplatesReady, job_id="job-1")
    for name in NODES:
        s.quiesced(name, 1, report())
    s.feed(PlanImpossible, generation=1, too_few=False, reason="a checkpoint", lost_layers=(0, 1, 2, 3))
    asked: FindCheckpoint = s.one(FindCheckpoint)
    s.feed(CheckpointFound, generation=asked.generation, checkpoint=CHECKPOINT, skipped=(), reason="")
    whole = tuple(StatePart(layer=layer, start=0, end=1, of=1) for layer in range(LAYERS))
    assert s.one(ComputePlan).situation.parts == {Device(node=name, index=0): whole for name in NODES}


def test_a_trainer_that_cannot_take_a_state_is_at_fault_where_no_checkpoint_was_restored() -> None:
    s = Writing()
    s.train()
    s.say("node-1", TrainerLost(generation=1, device=0, cause="foreign", detail="layer 2"))
    assert s.machine.phase == "QUIESCING"
    s = Writing()
    s.begin(begin=CHECKPOINT)
    s.plan_or_not()
    s.feed(CheckpointFound, generation=1, checkpoint=CHECKPOINT, skipped=(), reason="")
    s.plan()
    s.say("node-1", TrainerLost(generation=2, device=0, cause="foreign", detail="layer 2"))
    assert s.machine.phase == "QUIESCING", "of a generation that did not restore it"
    s = Writing()
    s.begin(begin=CHECKPOINT)
    s.plan_or_not()
    s.feed(CheckpointFound, generation=1, checkpoint=CHECKPOINT, skipped=(), reason="")
    s.plan()
    s.say("node-1", TrainerLost(generation=1, device=0, cause="exited", detail="killed by SIGKILL"))
    assert s.machine.phase == "QUIESCING", "whatever ended it, the state was not"


# --- a node --------------------------------------------------------------------------------------


def test_a_lost_order_to_write_is_sent_again_and_a_lost_answer_requested() -> None:
    s = Writing()
    s.train()
    s.snapshot(4)
    attempt = s.machine.cluster.checkpoints.writing.attempt
    shares = {one.node for one in s.commands(Persist)}
    assert attempt
    assert shares
    name = min(shares)
    assert {type(command) for command in s.acknowledge(name)} >= {Persist}
    assert Persist not in {type(command) for command in s.acknowledge(name, persist_attempt=attempt)}
    assert RequestHello in {
        type(command) for command in s.acknowledge(name, persist_attempt=attempt, persist_reported=True)
    }


@pytest.mark.parametrize("then", ["nothing", "it was written", "the write was abandoned"])
def test_a_lost_order_to_write_is_sent_again_only_while_it_stands(then: str) -> None:
    s = Writing()
    s.train()
    s.snapshot(5)
    orders = s.orders()
    s.fire("tick")
    for _ in range(3):
        beat = Acknowledgement(activity=NodeActivity.TRAINING, job_id="job-1")
        s.say(
            "node-1", Heartbeat(generation=1, committed=committed(4), retained_step=5, acknowledgement=beat)
        )
        s.wait(0.25)
    if then == "it was written":
        s.wrote(orders["node-1"], "node-1")
    elif then == "the write was abandoned":
        attempt = orders["node-0"].attempt
        s.say("node-0", PersistFailed(job_id="job-1", attempt=attempt, step=5, detail="full"))
    s.fire("tick")
    assert {one.node for one in s.commands(Persist)} == ({"node-1"} if then == "nothing" else set())


def test_a_node_that_has_written_its_share_or_has_none_lacks_no_order() -> None:
    s = Writing()
    s.train()
    s.snapshot(5)
    s.wrote(s.orders()["node-1"], "node-1")
    s.hello("node-9", 109)
    assert Persist not in {type(command) for command in s.acknowledge("node-1")}
    said = s.acknowledge("node-9", generation=0, activity=NodeActivity.BUILDING)
    assert Persist not in {type(command) for command in said}


def test_a_lost_cancellation_is_sent_again() -> None:
    s = Writing()
    s.train()
    assert CancelPersist in {type(command) for command in s.acknowledge("node-1", persist_attempt="another")}
    done = s.acknowledge("node-1", persist_attempt="another", persist_reported=True)
    assert CancelPersist not in {type(command) for command in done}


class Node(Script):
    def __init__(self) -> None:
        super().__init__(AgentMachine("node-0", Timing()))
        self.feed(AgentStarted, incarnation=100, facts=facts())
        self.feed(BrokerConnected)
        self.command(Prepare(job=writing_job(), profile=False))

    def command(self, command: Command) -> None:
        message = ToNode(node="node-0", incarnation=100, command=command, cause="test")
        self.feed(CommandArrived, message=message)

    def said(self, kind: type[Any]) -> list[Any]:
        return [effect.signal for effect in self.all(SendSignal) if isinstance(effect.signal, kind)]


def test_a_node_obeys_an_order_once_and_answers_until_the_next_one() -> None:
    s = Node()
    s.command(persist_order())
    assert s.one(PersistLayers).order == persist_order()
    s.command(persist_order())
    assert s.last == []
    written = LayersPersisted(
        job_id="job-1", attempt=persist_order().attempt, step=5, layers=on_disk((0, 1)), took_s=2.0
    )
    s.feed(PersistEnded, answer=written)
    assert s.said(LayersPersisted) == [written]
    s.command(persist_order())
    assert s.said(LayersPersisted) == [written]
    s.feed(BrokerConnected)
    assert s.said(Hello)
    assert s.said(LayersPersisted) == [written]


def test_a_new_order_or_a_cancellation_ends_what_is_being_written() -> None:
    s = Node()
    s.command(persist_order(5))
    s.command(persist_order(9))
    assert s.one(StopPersisting).attempt == persist_order(5).attempt
    assert s.one(PersistLayers).order == persist_order(9)
    late = PersistFailed(job_id="job-1", attempt=persist_order(5).attempt, step=5, detail="late")
    s.feed(PersistEnded, answer=late)
    assert s.last == []
    s.command(CancelPersist(job_id="job-1", attempt=persist_order(9).attempt))
    assert s.one(StopPersisting).attempt == persist_order(9).attempt
    s.command(persist_order(9))
    assert not s.all(PersistLayers)


def test_an_order_that_arrives_after_its_cancellation_is_not_carried_out() -> None:
    """They arrive on two topics, which have no common order."""
    s = Node()
    s.command(CancelPersist(job_id="job-1", attempt=persist_order(5).attempt))
    s.command(persist_order(5))
    assert not s.all(PersistLayers)
    assert "cancelled" in s.said(PersistFailed)[0].detail
    s.command(persist_order(9))
    assert s.one(PersistLayers).order == persist_order(9)
    s.command(persist_order(5))
    assert not s.all(StopPersisting) and not s.all(PersistLayers)
