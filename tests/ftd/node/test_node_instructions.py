"""Instructions to trainers: a plan of named devices becomes ranks."""

import msgspec
from msgspec.structs import replace

from ftd.node.instructions import make_prepare_instruction, make_resume_instruction, make_world_data, rank_of
from ftd.snapshots.trainer_staging import layers_of
from planner.values import (
    Device,
    PipelinePlacement,
    Plan,
    Policy,
    StagePlacement,
    Transfer,
)
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


def test_ranks_follow_the_order_of_the_plans_devices() -> None:
    first, *others = PLAN.pipelines
    stages = (replace(first.stages[0], recompute="full", within="shard"), *first.stages[1:])
    world = make_world_data(replace(PLAN, pipelines=(replace(first, stages=stages), *others)), HOSTS)
    assert world.step_s == PLAN.estimated_iteration_s
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
    assert make_resume_instruction(resume, device("c"), "secret", "/staged").restore == "/staged"
    frame = make_resume_instruction(resume, device("a"), "secret")
    assert (frame.generation, frame.step, frame.rank, frame.token) == (7, 12, 2, "secret")
    assert (frame.rendezvous_host, frame.rendezvous_port) == ("fe80::1", 4711)
    assert frame.vote == VOTE
    assert frame.evaluated == 10
    assert (frame.nodes, frame.protection) == (("b", "b", "a", "c"), "aec")
    assert (frame.restore, frame.lineage) == ("", 3)
    assert [layers_of(PLAN, name) for name in "abcd"] == [(2, 3, 4), (0, 1), (0, 1, 2, 3, 4), ()]


def test_a_trainer_receives_the_number_of_devices_of_a_node() -> None:
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
    frame = make_prepare_instruction(job, True)
    assert not frame.describe and make_prepare_instruction(job, True, describe=True).describe
    assert (frame.job_id, frame.profile, frame.devices_per_node) == ("x-1", True, 3)
    assert msgspec.to_builtins(frame.training).items() >= training.items()
    assert (frame.planned_memory_bytes, frame.memory_limit_bytes) == (None, None)
    limited = msgspec.structs.replace(job, policy=msgspec.structs.replace(policy, device_memory_bytes=9))
    frame = make_prepare_instruction(limited, False, memory_limit_bytes=8)
    assert (frame.planned_memory_bytes, frame.memory_limit_bytes) == (9, 8)


def test_held_parts_name_ranks_and_layers() -> None:
    held = (
        HeldPart(
            device=device("a"), first_layer=2, end_layer=4, start=1, end=2, of=2, replica=False, whole=True
        ),
        HeldPart(
            device=device("c"), first_layer=4, end_layer=5, start=0, end=1, of=2, replica=True, whole=False
        ),
    )
    sent = [
        (part.rank, part.layer, part.start, part.end, part.of, part.replica, part.whole)
        for part in make_world_data(PLAN, HOSTS, held).held_parts
    ]
    assert sent == [(2, 2, 1, 2, 2, False, True), (2, 3, 1, 2, 2, False, True), (3, 4, 0, 1, 2, True, False)]
