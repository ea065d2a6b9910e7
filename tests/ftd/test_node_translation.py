"""A plan becomes ranks, frames become events."""

from dataclasses import replace
from typing import Literal

import msgspec

from ftd.node.translation import event_of, layers_of, prepare_frame, rank_of, resume_frame, world_data
from planner.values import (
    Device,
    LayerProfile,
    ModelProfile,
    PipelinePlacement,
    Plan,
    Policy,
    StagePlacement,
    StatePart,
    Transfer,
)
from statemachine.agent.events import (
    TrainerDone,
    TrainerFailed,
    TrainerQuiesced,
    TrainerReplicaDiverged,
    TrainerSnapped,
    TrainerSnapping,
    TrainerSnapshotFailed,
    TrainerStepped,
)
from statemachine.messages import trainer as protocol
from statemachine.messages.cluster import Resume
from statemachine.messages.values import Evaluation, HeldPart, Job, Vote


def device(node: str, index: int = 0) -> Device:
    return Device(node=node, index=index)


PLAN = Plan(
    pipelines=(
        PipelinePlacement(
            stages=(
                StagePlacement(first_layer=0, end_layer=2, devices=(device("b", 1), device("b", 0))),
                StagePlacement(first_layer=2, end_layer=5, devices=(device("a"),)),
            ),
            first_microbatch=0,
            microbatches=3,
            estimated_s=0.1,
        ),
        PipelinePlacement(
            stages=(StagePlacement(first_layer=0, end_layer=5, devices=(device("c"),)),),
            first_microbatch=3,
            microbatches=1,
            estimated_s=0.1,
        ),
    ),
    transfers=(Transfer(layer=4, source=device("c"), target=device("a"), size_bytes=10),),
    method="simple",
    reason="",
    estimated_iteration_s=0.1,
)
HOSTS = {"a": "10.0.0.1", "b": "10.0.0.2", "c": "10.0.0.3"}


def test_ranks_are_the_plans_devices_in_order() -> None:
    first, *others = PLAN.pipelines
    stages = (replace(first.stages[0], recompute="full", within="shard"), *first.stages[1:])
    world = world_data(replace(PLAN, pipelines=(replace(first, stages=stages), *others)), HOSTS)
    assert [(stage.recompute, stage.within) for stage in world.pipelines[0].stages] == [
        ("full", "shard"),
        ("none", "replicate"),
    ]
    assert [[stage.ranks for stage in p.stages] for p in world.pipelines] == [[(0, 1), (2,)], [(3,)]]
    assert [(p.first_microbatch, p.microbatches) for p in world.pipelines] == [(0, 3), (3, 1)]
    assert world.hosts == ("10.0.0.2", "10.0.0.2", "10.0.0.1", "10.0.0.3")
    assert [(t.layer, t.source, t.target) for t in world.transfers] == [(4, 3, 2)]
    assert [rank_of(PLAN, d) for d in (device("b", 1), device("c"), device("idle"))] == [0, 3, -1]


VOTE = Vote(
    loss=0.5,
    gradient_norm=2.0,
    weight=4096.0,
    loss_scale=1024.0,
    learning_rate=0.01,
    metrics={"accuracy": 0.25},
    evaluation=Evaluation(loss=0.75, weight=37.0, metrics={"accuracy": 0.125}, took_s=2.0),
)


def test_a_resume_for_one_device() -> None:
    resume = Resume(
        generation=7,
        job_id="job",
        step=12,
        vote=VOTE,
        plan=PLAN,
        hosts=HOSTS,
        rendezvous="fe80::1:4711",
        lineage=3,
        protection="aec",
        evaluated=10,
    )
    assert resume_frame(resume, device("c"), "secret", "/staged").restore == "/staged"
    frame = resume_frame(resume, device("a"), "secret")
    assert (frame.generation, frame.step, frame.rank, frame.token) == (7, 12, 2, "secret")
    assert (frame.rendezvous_host, frame.rendezvous_port) == ("fe80::1", 4711)
    assert frame.vote == VOTE
    assert frame.evaluated == 10
    assert (frame.nodes, frame.protection) == (("b", "b", "a", "c"), "aec")
    assert (frame.restore, frame.lineage) == ("", 3)
    assert [layers_of(PLAN, name) for name in "abcd"] == [(2, 3, 4), (0, 1), (0, 1, 2, 3, 4), ()]


def test_a_trainer_is_told_what_stages_its_node_can_have() -> None:
    training = {
        "function": "a.py:b",
        "path": "/here",
        "seed": 1,
        "steps": 2,
        "global_batch": 8,
        "microbatch_rows": 4,
    }
    policy = Policy(devices_per_node=3, global_batch=8, microbatch_rows=4)
    job = Job(job_id="x-1", name="x", steps=2, policy=policy, training=training)
    frame = prepare_frame(job, True)
    assert not frame.describe and prepare_frame(job, True, describe=True).describe
    assert (frame.job_id, frame.profile, frame.devices_per_node) == ("x-1", True, 3)
    assert msgspec.to_builtins(frame.training).items() >= training.items()


def test_reports_keep_all_they_say() -> None:
    vote = msgspec.structs.replace(VOTE, skipped=True)
    quiesced = event_of(
        protocol.Quiesced(generation=3, committed_step=8, ready_step=9, vote=vote, held=(0, 2)),
        device=1,
        pid=99,
        at=5.0,
        cause="c",
    )
    assert isinstance(quiesced, TrainerQuiesced)
    assert quiesced.report.device == 1
    assert (quiesced.report.committed_step, quiesced.report.ready_step) == (8, 9)
    assert quiesced.report.vote == vote
    assert quiesced.report.held == (0, 2)
    stepped = event_of(
        protocol.Stepped(generation=3, step=9, vote=vote, step_s=0.2, bubble_s=0.1),
        device=1,
        pid=99,
        at=5.0,
        cause="c",
    )
    assert isinstance(stepped, TrainerStepped)
    assert (stepped.step, stepped.step_s, stepped.vote) == (9, 0.2, quiesced.report.vote)


def test_what_trainers_say_of_snapshots() -> None:
    where = {"generation": 3, "step": 9}
    snapped = protocol.Snapped(**where, size_bytes=70, copy_s=0.2, stall_s=0.1, idle_bytes=30)
    said = [
        event_of(frame, device=1, pid=99, at=5.0, cause="c")
        for frame in (
            protocol.Snapping(**where),
            snapped,
            protocol.SnapshotFailed(**where, detail="no room"),
        )
    ]
    base = {"at": 5.0, "cause": "c", "device": 1, **where}
    assert said == [
        TrainerSnapping(**base),
        TrainerSnapped(**base, size_bytes=70, copy_s=0.2, stall_s=0.1, idle_bytes=30),
        TrainerSnapshotFailed(**base, detail="no room"),
    ]


def test_what_was_raised_where() -> None:
    causes: dict[Literal["prepare", "restore", "training"], str]
    causes = {"prepare": "unprepared", "restore": "foreign", "training": "raised"}
    for where, cause in causes.items():
        failed = event_of(
            protocol.Raised(where=where, detail="Traceback"), device=0, pid=99, at=1.0, cause="c"
        )
        assert isinstance(failed, TrainerFailed)
        assert (failed.cause_of_failure, failed.pid, failed.detail) == (cause, 99, "Traceback")


def test_parts_of_layers_go_both_ways() -> None:
    held = (
        HeldPart(
            device=device("a"), first_layer=2, end_layer=4, start=1, end=2, of=2, replica=False, whole=True
        ),
        HeldPart(
            device=device("c"), first_layer=4, end_layer=5, start=0, end=1, of=2, replica=True, whole=False
        ),
    )
    told = [
        (part.rank, part.layer, part.start, part.end, part.of, part.replica, part.whole)
        for part in world_data(PLAN, HOSTS, held).held_parts
    ]
    assert told == [(2, 2, 1, 2, 2, False, True), (2, 3, 1, 2, 2, False, True), (3, 4, 0, 1, 2, True, False)]
    part = StatePart(layer=2, start=2, end=4, of=4, replica=True)
    quiesced = protocol.Quiesced(
        generation=1, committed_step=3, ready_step=None, vote=None, held=(), parts=(part,)
    )
    event = event_of(quiesced, device=0, pid=1, at=0.0, cause="c")
    assert isinstance(event, TrainerQuiesced)
    assert event.report.parts == (StatePart(layer=2, start=1, end=2, of=2, replica=True),)


def test_a_replica_that_differed_becomes_an_event() -> None:
    frame = protocol.ReplicaDiverged(generation=2, step=50, layer=3, detail="momentum")
    assert event_of(frame, device=1, pid=1, at=0.0, cause="c") == TrainerReplicaDiverged(
        at=0.0, cause="c", device=1, generation=2, step=50, layer=3, detail="momentum"
    )


def test_a_profile_that_cannot_be_is_a_trainer_that_is_not_prepared() -> None:
    layer = LayerProfile(
        forward_ms=float("nan"), backward_ms=1.0, parameter_bytes=1, gradient_bytes=1, optimizer_bytes=1,
        activation_bytes=1, output_bytes=1,
    )  # fmt: skip
    profile = ModelProfile(layers=(layer,), microbatch_rows=1, device_memory_bytes=None)
    event = event_of(protocol.Prepared(job_id="j", profile=profile), device=0, pid=7, at=1.0, cause="c")
    assert isinstance(event, TrainerFailed) and event.cause_of_failure == "unprepared"
    assert "layers[0].forward_ms is nan" in event.detail


def test_an_evaluation_comes_with_a_report_and_with_the_end() -> None:
    base = {"device": 1, "pid": 9, "at": 1.0, "cause": "c"}
    found = VOTE.evaluation
    done = event_of(protocol.Done(generation=3, step=8, digests={0: "aa"}, evaluation=found), **base)
    assert isinstance(done, TrainerDone) and done.evaluation == VOTE.evaluation
    quiesced = protocol.Quiesced(
        generation=3, committed_step=8, ready_step=None, vote=None, held=(), evaluation=found
    )
    event = event_of(quiesced, **base)
    assert isinstance(event, TrainerQuiesced) and event.report.evaluation == VOTE.evaluation
