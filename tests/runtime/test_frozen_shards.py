"""Frozen parameters of stages whose devices have shards: each device has its share, and losses are those of a plain
loop, whatever the layout.
"""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from planner.values import Recompute
from runtime.zero.shards import StageShards
from statemachine.messages.trainer import TrainingData
from tests.helpers.architecture_runs import alone, check, job_of
from tests.helpers.architectures import build, take_out_casts
from tests.helpers.fleet import Fleet
from tests.helpers.harness import pipeline
from tests.helpers.plain_loop import PlainStep, plain_loop
from tests.helpers.snapshots import stage as stage_layers
from tests.helpers.step_phases import in_vote
from tests.helpers.zero import Pipelines

ADAPTERS = {"adapters": True, "options": {"tie_word_embeddings": True}}
"""Adapters, next to a base whose input and output share their weight."""
STEPS = 6


def job(**changes: Any) -> TrainingData:
    fields: dict[str, Any] = {"global_batch": 16, "microbatch_rows": 4, "within_node": "shard"}
    return job_of("llama", steps=STEPS, arguments=ADAPTERS, **(fields | changes))


@pytest.fixture(scope="module", autouse=True)
def wholly_float64() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        take_out_casts(patch.setattr)
        yield


@pytest.fixture(scope="module")
def expected(wholly_float64: None) -> list[PlainStep]:
    return plain_loop(lambda: build("llama", **ADAPTERS), job(), STEPS)


def check_losses(fleet: Fleet, expected: list[PlainStep]) -> None:
    check([fleet.votes[step] for step in range(1, len(fleet.votes) + 1)], expected[: len(fleet.votes)])


def pairs(layers: int) -> Pipelines:
    return (
        pipeline((0, layers, [0, 1]), first_microbatch=0, microbatches=2, sharded=True),
        pipeline((0, 2, [2, 3]), (2, layers, [4]), first_microbatch=2, microbatches=2, sharded=True),
    )


def left(layers: int) -> Pipelines:
    return (
        pipeline((0, layers, [0, 1]), first_microbatch=0, microbatches=3, sharded=True),
        pipeline((0, layers, [2]), first_microbatch=3, microbatches=1),
    )


def spread(layers: int, ranks: int, recompute: Recompute = "none") -> Pipelines:
    """Return one pipeline of one stage on all ranks."""
    one = pipeline((0, layers, list(range(ranks))), first_microbatch=0, microbatches=4, sharded=True)
    stages = tuple(msgspec.structs.replace(stage, recompute=recompute) for stage in one.stages)
    return (msgspec.structs.replace(one, stages=stages),)


@pytest.mark.parametrize("zero1", [False, True], ids=["plain", "zero1"])
def test_a_death_rolls_nothing_back(expected: list[PlainStep], zero1: bool) -> None:
    """A stage of one rank dies, then two ranks join, so the shards change; then a device of a sharded stage
    dies. With ZeRO-1 only replicas have some of the ranges then.
    """
    with Fleet(job(zero1=zero1), 5) as fleet:
        layers = fleet.engines[0].model.layer_count
        fleet.enter(fleet.engines, pairs(layers))
        fleet.steps(1)
        in_vote(fleet, fleet.engines[4])
        fleet.broken_step()
        fleet.enter(fleet.engines[:3], left(layers))
        fleet.steps(1)
        fleet.enter([*fleet.engines, *fleet.join(2)], pairs(layers))
        fleet.steps(1)
        fleet.enter([fleet.engines[number] for number in (4, 3, 2, 0, 1)], pairs(layers))
        fleet.steps(1)
        digests = fleet.each(lambda _, engine: engine.compute_digests())
        assert digests[0] == digests[1] == digests[2] | digests[4]
        check_losses(fleet, expected)


def test_each_device_has_its_share_and_no_more(expected: list[PlainStep]) -> None:
    with Fleet(job(), 4) as fleet:
        layers = fleet.engines[0].model.layer_count
        fleet.enter(fleet.engines, spread(layers, 4))
        fleet.steps(2)
        for engine in fleet.engines:
            sharding = engine.sharding
            assert sharding is not None
            names = [name for name, _ in engine.model.named_parameters(range(layers), frozen=True)]
            vectors = sharding.shape.vectors
            assert {name for vector in vectors for name in vector.names} == set(names)
            assert all(
                value.is_meta for _, value in engine.model.named_parameters(range(layers), frozen=True)
            )
            shards = sharding.optimization.shards
            assert isinstance(shards, StageShards)
            for number, vector in enumerate(vectors):
                assert shards.values[number].numel() == pytest.approx(vector.numel / 4, abs=1)
                assert (number in shards.gradients) is vector.trained
            assert not shards._regathered
        frozen = sum(vector.numel for vector in vectors if not vector.trained)
        assert frozen > 2 * sum(vector.numel for vector in vectors if vector.trained)
        check_losses(fleet, expected)


@pytest.mark.parametrize("mode", ["none", "full", "selective"])
def test_frozen_vectors_are_gathered_for_the_backward_pass_only_where_it_needs_them(
    expected: list[PlainStep], mode: Recompute, monkeypatch: pytest.MonkeyPatch
) -> None:
    gathered: Counter[int] = Counter()
    post = StageShards._post

    def counting(self: StageShards, number: int) -> Any:
        if self._communicator.rank == 0:
            gathered[number] += 1
        return post(self, number)

    monkeypatch.setattr(StageShards, "_post", counting)
    with Fleet(job(), 2) as fleet:
        layers = fleet.engines[0].model.layer_count
        (one,) = pipelines = spread(layers, 2, mode)
        fleet.enter(fleet.engines, pipelines)
        gathered.clear()
        fleet.steps(1)
        assert fleet.engines[0].sharding is not None
        vectors = fleet.engines[0].sharding.shape.vectors
        check_losses(fleet, expected)
    for number, vector in enumerate(vectors):
        most = 2 if len(vector.layers) == 1 else 4
        assert one.microbatches <= gathered[number] <= most * one.microbatches, vector


@pytest.mark.parametrize("zero1", [False, True], ids=["plain", "zero1"])
def test_training_continues_from_whole_layers_in_files(
    tmp_path: Path, expected: list[PlainStep], zero1: bool
) -> None:
    with Fleet(job(within_node="replicate"), 1) as fleet:
        layers = fleet.engines[0].model.layer_count
        fleet.enter(fleet.engines, alone(layers))
        fleet.steps(2)
        stage_layers(fleet.packed(), tmp_path)
        votes = dict(fleet.votes)
    with Fleet(job(zero1=zero1), 5) as fleet:
        fleet.restore, fleet.restore_step = str(tmp_path), 2
        assert fleet.enter(fleet.engines, pairs(layers)) == 2
        fleet.restore = ""
        fleet.steps(1)
        fleet.enter(fleet.engines[:3], left(layers))
        fleet.steps(1)
        fleet.votes = votes | {step: fleet.votes[step] for step in (3, 4)}
        check_losses(fleet, expected)


def doubled(layers: int) -> Pipelines:
    """Return two pipelines of one stage: its devices have shards in one and whole layers in the other."""
    return (
        pipeline((0, layers, [0, 1]), first_microbatch=0, microbatches=2, sharded=True),
        pipeline((0, layers, [2, 3]), first_microbatch=2, microbatches=2),
    )


def turned(layers: int) -> Pipelines:
    """Return the same with whole layers where shards were."""
    return (
        pipeline((0, layers, [3, 2]), first_microbatch=0, microbatches=2, sharded=True),
        pipeline((0, 2, [1]), (2, layers, [0]), first_microbatch=2, microbatches=2),
    )


def test_replicas_have_no_copies_of_frozen_values_and_survive_being_parked(expected: list[PlainStep]) -> None:
    with Fleet(job(zero1=True), 4) as fleet:
        layers = fleet.engines[0].model.layer_count
        fleet.enter(fleet.engines, doubled(layers))
        fleet.steps(1)
        kinds: set[str] = set()
        for engine in fleet.engines:
            assert engine.sharding is not None
            parts = [part for part in engine.sharding.states.held if part.replica]
            for one in [one for part in parts for one in part.slices if not one.trained]:
                here = engine.sharding.optimization.value_of(one.slice)
                assert one.value is None or one.value.data_ptr() == here.data_ptr()
                kinds.add("whole" if one.value is None else "shard")
        assert kinds == {"whole", "shard"}
        fleet.parked = {rank: tuple(range(layers)) for rank in range(4)}
        fleet.enter(fleet.engines, turned(layers))
        fleet.enter(fleet.engines[:2], spread(layers, 2))
        fleet.parked = {}
        fleet.steps(1)
        fleet.enter([*fleet.engines, *fleet.join(2)], turned(layers))
        fleet.steps(1)
        check_losses(fleet, expected)
