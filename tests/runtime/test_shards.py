"""Stages whose devices have shards of their layers: losses equal those of one process, wherever a rank dies."""

import gc
import weakref
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from planner.values import Recompute
from runtime.engine.engine import Engine
from runtime.errors import TrainingError
from runtime.zero.shards import StageShards
from statemachine.messages import trainer as p
from tests.helpers.fleet import Fleet
from tests.helpers.harness import pipeline
from tests.helpers.reference import load, reference_run
from tests.helpers.runtime_support import gpt_data
from tests.helpers.snapshots import stage as stage_layers
from tests.helpers.step_phases import after_vote, in_compute, in_vote

STEPS = 6
ONE_OF_TWO = (pipeline((0, 4, [0, 1]), first_microbatch=0, microbatches=4, sharded=True),)
ONE_OF_FOUR = (pipeline((0, 4, [0, 1, 2, 3]), first_microbatch=0, microbatches=4, sharded=True),)
STAGES_OF_TWO = (pipeline((0, 2, [0, 1]), (2, 4, [2, 3]), first_microbatch=0, microbatches=4, sharded=True),)
STAGES_OF_ONE = (
    pipeline((0, 2, [0]), (2, 4, [1]), first_microbatch=0, microbatches=3),
    pipeline((0, 4, [2]), first_microbatch=3, microbatches=1),
)
MIXED = (
    pipeline((0, 1, [0, 1]), (1, 4, [2]), first_microbatch=0, microbatches=2, sharded=True),
    pipeline((0, 3, [3]), (3, 4, [4, 5, 6, 7]), first_microbatch=2, microbatches=1, sharded=True),
    pipeline((0, 4, [8, 9]), first_microbatch=3, microbatches=1),
)
PAIRS = (
    pipeline((0, 4, [0, 1]), first_microbatch=0, microbatches=2, sharded=True),
    pipeline((0, 2, [2, 3]), (2, 4, [4]), first_microbatch=2, microbatches=2, sharded=True),
)
LEFT = (
    pipeline((0, 4, [0, 1]), first_microbatch=0, microbatches=3, sharded=True),
    pipeline((0, 4, [2]), first_microbatch=3, microbatches=1),
)


def job(**changes: object) -> p.TrainingData:
    data = gpt_data(
        steps=STEPS, global_batch=16, microbatch_rows=4, clip_gradient_norm=1.0, within_node="shard"
    )
    return msgspec.structs.replace(data, **changes)


@pytest.fixture(scope="module")
def expected() -> list[float]:
    return reference_run(load(job()), job(), STEPS)[0]


@pytest.mark.parametrize("zero1", [False, True], ids=["plain", "zero1"])
@pytest.mark.parametrize(
    ("pipelines", "ranks"),
    [(ONE_OF_TWO, 2), (ONE_OF_FOUR, 4), (STAGES_OF_TWO, 4), (MIXED, 10)],
    ids=["one of two", "one of four", "stages of two", "mixed"],
)
def test_losses_equal_those_of_one_process(
    expected: list[float], pipelines: tuple[p.WorldPipeline, ...], ranks: int, zero1: bool
) -> None:
    with Fleet(job(zero1=zero1), ranks) as fleet:
        fleet.enter(fleet.engines, pipelines)
        fleet.steps(3)
        assert [fleet.losses[step] for step in range(1, 4)] == pytest.approx(expected[:3], rel=1e-9)


def test_a_plan_that_shards_a_model_that_cannot_be_sharded_is_rejected() -> None:
    """The coordinator uses the profile, which may have been measured with another optimizer."""
    with (
        Fleet(job(within_node="replicate"), 2) as fleet,
        pytest.raises(TrainingError, match=r"this model cannot be sharded: .* measure the profile again"),
    ):
        fleet.enter(fleet.engines, ONE_OF_TWO)


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_layers_may_recompute(expected: list[float], mode: Recompute) -> None:
    pipelines = tuple(
        msgspec.structs.replace(
            one, stages=tuple(msgspec.structs.replace(s, recompute=mode) for s in one.stages)
        )
        for one in STAGES_OF_TWO
    )
    with Fleet(job(), 4) as fleet:
        fleet.enter(fleet.engines, pipelines)
        fleet.steps(2)
        assert [fleet.losses[step] for step in (1, 2)] == pytest.approx(expected[:2], rel=1e-9)


@pytest.mark.parametrize("mode", ["none", "full", "selective"])
def test_a_layer_is_gathered_twice_for_a_microbatch_also_if_it_recomputes(
    mode: Recompute, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The planner counts two gatherings (``planner.stages.layers.shard_ms``): what recomputation gathers is what
    the backward pass needs.
    """
    gathered: Counter[tuple[int, ...]] = Counter()
    post = StageShards._post

    def counting(self: StageShards, number: int) -> Any:
        if self._communicator.rank == 0:
            gathered[self._shape.vectors[number].layers] += 1
        return post(self, number)

    monkeypatch.setattr(StageShards, "_post", counting)
    (one,) = ONE_OF_TWO
    stages = tuple(msgspec.structs.replace(stage, recompute=mode) for stage in one.stages)
    with Fleet(job(), 2) as fleet:
        fleet.enter(fleet.engines, (msgspec.structs.replace(one, stages=stages),))
        gathered.clear()
        fleet.steps(1)
    # The backward pass of an embedding does not need its weight, except where it recomputes.
    times = {(0,): 1 if mode == "none" else 2, (1,): 2, (2,): 2, (3,): 2, (0, 3): 4}
    assert gathered == {layers: count * one.microbatches for layers, count in times.items()}


@pytest.mark.parametrize("zero1", [False, True], ids=["plain", "zero1"])
@pytest.mark.parametrize("phase", [in_compute, in_vote, after_vote])
def test_a_death_rolls_nothing_back(
    expected: list[float], phase: Callable[[Fleet, Engine], None], zero1: bool
) -> None:
    """A stage of one rank dies, then two ranks join, so the shards change; then a device of a sharded stage
    dies.
    """
    if phase is after_vote and not zero1:
        phase = in_vote  # Nothing is gathered after the commit.
    with Fleet(job(zero1=zero1), 5) as fleet:
        fleet.enter(fleet.engines, PAIRS)
        fleet.steps(1)
        phase(fleet, fleet.engines[4])
        fleet.broken_step()
        fleet.engines[0].__dict__.pop("_hold_vote", None)
        fleet.enter(fleet.engines[:3], LEFT)
        fleet.steps(1)
        fleet.enter([*fleet.engines, *fleet.join(2)], PAIRS)
        fleet.steps(1)
        fleet.enter([fleet.engines[number] for number in (4, 3, 2, 0, 1)], PAIRS)
        fleet.steps(STEPS - fleet.engines[0].committed_step)
        digests = fleet.each(lambda _, engine: engine.compute_digests())
        assert digests[0] == digests[1] == digests[2] | digests[4]
        assert [fleet.losses[step] for step in range(1, STEPS + 1)] == pytest.approx(expected, rel=1e-9)


def test_each_device_has_its_share_and_no_more() -> None:
    with Fleet(job(), 4) as fleet:
        layers = range(fleet.engines[0].model.layer_count)
        whole = [weakref.ref(p) for e in fleet.engines for _, p in e.model.named_parameters(layers)]
        fleet.enter(fleet.engines, ONE_OF_FOUR)
        fleet.steps(1)
        gc.collect()
        assert not any(parameter() is not None for parameter in whole), "the layers that were built are freed"
        for engine in fleet.engines:
            model = engine.model
            assert not model.held_layers
            assert all(parameter.is_meta for _, parameter in model.named_parameters(range(4)))
            sharding = engine.sharding
            assert sharding is not None
            whole = sum(vector.numel for vector in sharding.shape.vectors)
            own = sum(one.slice.end - one.slice.start for part in sharding.states.held for one in part.slices)
            assert own == pytest.approx(whole / 4, abs=len(sharding.shape.vectors))
            for part in sharding.states.held:
                for one in part.slices:
                    for value in (one.value, one.state["exp_avg"], one.state["exp_avg_sq"]):
                        assert isinstance(value, torch.Tensor)
                        assert value.numel() == one.slice.end - one.slice.start


@pytest.mark.parametrize(
    ("pipelines", "ranks"), [(STAGES_OF_ONE, 3), (STAGES_OF_TWO, 4)], ids=["stages of one", "stages of two"]
)
def test_training_continues_from_whole_layers_in_files(
    tmp_path: Path, expected: list[float], pipelines: tuple[p.WorldPipeline, ...], ranks: int
) -> None:
    """Snapshots and checkpoints contain whole layers. The last layer shares a weight with the first, in
    another stage.
    """
    with Fleet(job(within_node="replicate"), 1) as fleet:
        fleet.enter(fleet.engines, (pipeline((0, 4, [0]), first_microbatch=0, microbatches=4),))
        fleet.steps(2)
        stage_layers(fleet.packed(), tmp_path)
    with Fleet(job(), ranks) as fleet:
        fleet.restore, fleet.restore_step = str(tmp_path), 2
        assert fleet.enter(fleet.engines, pipelines) == 2
        fleet.steps(2)
        assert [fleet.losses[step] for step in (3, 4)] == pytest.approx(expected[2:4], rel=1e-9)
