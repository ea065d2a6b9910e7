"""Parts of layers for which a device has no room until a generation's first commit: in host memory, or dropped."""

import gc
from typing import Literal

import msgspec
import pytest
import torch

from runtime.engine.engine import Engine
from runtime.zero.shards import StageShards
from statemachine.messages import trainer as p
from tests.helpers.fleet import Fleet, report_of
from tests.helpers.harness import pipeline
from tests.helpers.reference import load, reference_losses
from tests.helpers.runtime_support import gpt_data

LAYERS = 4
Pipelines = tuple[p.WorldPipeline, ...]


def job(**changes: object) -> p.TrainingData:
    return msgspec.structs.replace(
        gpt_data(
            global_batch=16,
            microbatch_rows=4,
            within_node="shard",
            arguments={"blocks": 2, "width": 8, "heads": 2, "length": 8, "megabytes": 1},
        ),
        **changes,
    )


def stages(*of: tuple[int, int, list[int]]) -> Pipelines:
    return (pipeline(*of, first_microbatch=0, microbatches=4, sharded=True),)


FOUR = stages((0, 4, [0, 1, 2, 3]))
PAIRS = stages((0, 2, [0, 1]), (2, 4, [2, 3]))
TURNED = stages((0, 2, [2, 3]), (2, 4, [0, 1]))
ALONE = (
    pipeline((0, 2, [0]), (2, 4, [1]), first_microbatch=0, microbatches=2),
    pipeline((0, 2, [2]), (2, 4, [3]), first_microbatch=2, microbatches=2),
)
SWAPPED = (
    pipeline((0, 2, [1]), (2, 4, [0]), first_microbatch=0, microbatches=2),
    pipeline((0, 2, [3]), (2, 4, [2]), first_microbatch=2, microbatches=2),
)
EVERYTHING = {rank: tuple(range(LAYERS)) for rank in range(4)}


def expect_reference(fleet: Fleet) -> None:
    data = fleet.job
    expected = reference_losses(load(data), data, max(fleet.losses))
    assert [fleet.losses[step] for step in sorted(fleet.losses)] == pytest.approx(expected, rel=1e-9)


def device_bytes(engine: Engine) -> int:
    """Return the bytes of all tensors that hold state of this rank and are not in host memory."""
    sharding, model = engine.sharding, engine.model
    assert sharding is not None
    shards = sharding.optimization.shards
    everything = {t.name: t for layer in range(LAYERS) for t in model.tensors_of(layer)}
    tensors = [t.value for t in everything.values() if sharding._parked.isdisjoint(t.layers)]
    for part in sharding.states.held:
        for one in part.slices:
            if not (one.parked or part.replica):
                tensors += [
                    value for value in (one.value, *one.state.values()) if isinstance(value, torch.Tensor)
                ]
    if isinstance(shards, StageShards):
        tensors += [*shards.values.values(), *shards.gradients.values()]
    for _, parameter in sharding.optimization._slices:
        tensors.append(parameter.detach())
    return sum(
        {
            t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if not t.is_meta
        }.values()
    )


@pytest.mark.parametrize(
    ("kind", "before", "after"),
    [
        ("shards", FOUR, PAIRS),
        ("shards", PAIRS, TURNED),
        ("shards", ALONE, PAIRS),
        ("zero1", PAIRS, FOUR),
        ("zero1", ALONE, SWAPPED),
    ],
    ids=["fewer shards", "other layers", "from whole layers", "zero1 and more shards", "zero1, other layers"],
)
def test_parked_parts_are_sent_from_host_memory_and_freed_at_the_first_commit(
    kind: Literal["shards", "zero1"], before: Pipelines, after: Pipelines
) -> None:
    sizes = []
    for parked in ({}, EVERYTHING):
        with Fleet(job(zero1=kind == "zero1"), 4) as fleet:
            fleet.enter(fleet.engines, before)
            fleet.steps(2)
            fleet.parked = parked
            held = [report_of(engine).parts for engine in fleet.engines]
            fleet.enter(fleet.engines, after)
            for engine, parts in zip(fleet.engines, held, strict=True):
                assert set(parts) <= set(report_of(engine).parts), "parked parts count as held"
            gc.collect()
            sizes.append([device_bytes(engine) for engine in fleet.engines])
            fleet.steps(2)
            gc.collect()
            committed = [device_bytes(engine) for engine in fleet.engines]
            assert not any(engine.sharding._parked for engine in fleet.engines if engine.sharding)
            expect_reference(fleet)
    for kept, parked_, after_commit in zip(*sizes, committed, strict=True):
        assert parked_ < kept
        assert parked_ <= after_commit * 1.01, "nothing but the new stage is on the device"


@pytest.mark.parametrize("zero1", [False, True], ids=["plain", "zero1"])
def test_state_that_exists_only_in_parked_parts_is_sent_under_the_next_plan(zero1: bool) -> None:
    """No step is committed under the plan that parks. The next plan needs what was parked whole and in parts."""
    before, other = (ALONE, SWAPPED) if zero1 else (PAIRS, TURNED)
    with Fleet(job(zero1=zero1), 4) as fleet:
        fleet.enter(fleet.engines, before)
        fleet.steps(2)
        fleet.parked = EVERYTHING
        fleet.enter(fleet.engines, other)
        fleet.parked = {}
        fleet.enter(fleet.engines, ALONE)
        fleet.parked = EVERYTHING
        fleet.enter(fleet.engines, FOUR)
        fleet.parked = {}
        fleet.enter(fleet.engines, before)
        fleet.steps(2)
        expect_reference(fleet)


def test_dropped_parts_come_from_other_nodes() -> None:
    copies = (
        pipeline((0, 4, [0, 1]), first_microbatch=0, microbatches=2, sharded=True),
        pipeline((0, 2, [2]), (2, 4, [3]), first_microbatch=2, microbatches=2),
    )
    after = (
        pipeline((0, 2, [0]), (2, 4, [1]), first_microbatch=0, microbatches=2),
        pipeline((0, 4, [2, 3]), first_microbatch=2, microbatches=2, sharded=True),
    )
    with Fleet(job(), 4) as fleet:
        fleet.enter(fleet.engines, copies)
        fleet.steps(2)
        fleet.dropped = {0: (2, 3), 1: (0, 1)}
        fleet.enter(fleet.engines, after)
        first = fleet.engines[0].sharding
        assert first is not None and {part.layer for part in first.states.held} == {0, 1}
        fleet.steps(1)
        fleet.dropped = {}
        fleet.enter(fleet.engines, copies)
        fleet.steps(1)
        expect_reference(fleet)
