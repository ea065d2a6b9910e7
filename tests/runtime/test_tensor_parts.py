"""Stages whose devices compute parts of their layers: losses equal those of one process, wherever a rank dies."""

import gc
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from planner.values import Recompute, Within
from runtime.device import CPU
from runtime.engine.engine import Engine
from runtime.errors import TrainingError
from runtime.monitoring.progress import ProgressMonitor
from runtime.zero.tensor_parts import StageTensorParts
from statemachine.messages import trainer as p
from tests.helpers.fleet import Fleet
from tests.helpers.reference import load, reference_run
from tests.helpers.runtime_support import data_for
from tests.helpers.snapshots import stage as stage_layers
from tests.helpers.split_gpt import PLAN
from tests.helpers.step_phases import after_vote, in_compute, in_vote

STEPS = 6
HELPERS = Path(__file__).parents[1] / "helpers"


def stage(
    first: int, end: int, ranks: tuple[int, ...], within: Within = "tensor", **more: object
) -> p.WorldStage:
    return msgspec.structs.replace(
        p.WorldStage(first_layer=first, end_layer=end, ranks=ranks, within=within), **more
    )


def pipeline(*stages: p.WorldStage, first: int = 0, microbatches: int = 4) -> p.WorldPipeline:
    return p.WorldPipeline(stages=stages, first_microbatch=first, microbatches=microbatches)


ONE_OF_TWO = (pipeline(stage(0, 5, (0, 1))),)
ONE_OF_FOUR = (pipeline(stage(0, 5, (0, 1, 2, 3))),)
STAGES_OF_TWO = (pipeline(stage(0, 2, (0, 1)), stage(2, 5, (2, 3))),)
MIXED = (
    pipeline(stage(0, 1, (0, 1), "shard"), stage(1, 5, (2, 3)), microbatches=2),
    pipeline(stage(0, 3, (4, 5, 6, 7)), stage(3, 5, (8, 9), "replicate"), first=2, microbatches=1),
    pipeline(stage(0, 5, (10,)), first=3, microbatches=1),
)
TWO_BY_TWO = (pipeline(stage(0, 5, (0, 1, 2, 3), replicas=2)),)
MIXED_BY_TWO = (
    pipeline(stage(0, 2, (0, 1, 2, 3), replicas=2), stage(2, 5, (4, 5)), microbatches=2),
    pipeline(stage(0, 3, (6, 7), "shard"), stage(3, 5, (8, 9), "replicate"), first=2, microbatches=1),
    pipeline(stage(0, 1, (10,)), stage(1, 5, (11, 12, 13, 14), replicas=2), first=3, microbatches=1),
)


def job(**changes: object) -> p.TrainingData:
    data = data_for("split_gpt.py:build", HELPERS, steps=STEPS, clip_gradient_norm=1.0, within_node="tensor")
    return msgspec.structs.replace(data, **changes)


@pytest.fixture(scope="module")
def expected() -> list[float]:
    return reference_run(load(job()), job(), STEPS)[0]


@pytest.mark.parametrize("zero1", [False, True], ids=["plain", "zero1"])
@pytest.mark.parametrize(
    ("pipelines", "ranks"),
    [
        (ONE_OF_TWO, 2),
        (ONE_OF_FOUR, 4),
        (STAGES_OF_TWO, 4),
        (MIXED, 11),
        (TWO_BY_TWO, 4),
        (MIXED_BY_TWO, 15),
    ],
    ids=["one of two", "one of four", "stages of two", "mixed", "two by two", "mixed with two by two"],
)
def test_losses_equal_those_of_one_process(
    expected: list[float], pipelines: tuple[p.WorldPipeline, ...], ranks: int, zero1: bool
) -> None:
    with Fleet(job(zero1=zero1), ranks) as fleet:
        fleet.enter(fleet.engines, pipelines)
        fleet.steps(3)
        assert [fleet.losses[step] for step in range(1, 4)] == pytest.approx(expected[:3], rel=1e-9)


def test_frozen_parameters_that_are_not_split_are_gathered() -> None:
    data = job(arguments={"frozen": True})
    expected = reference_run(load(data), data, 4)[0]
    with Fleet(data, 11) as fleet:
        fleet.enter(fleet.engines, MIXED)
        fleet.steps(2)
        fleet.enter(fleet.engines[:4], STAGES_OF_TWO)
        fleet.steps(2)
        assert [fleet.losses[step] for step in range(1, 5)] == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_layers_may_recompute(expected: list[float], mode: Recompute) -> None:
    stages = (stage(0, 3, (0, 1), recompute=mode), stage(3, 5, (2, 3), recompute=mode))
    with Fleet(job(), 4) as fleet:
        fleet.enter(fleet.engines, (pipeline(*stages),))
        fleet.steps(2)
        assert [fleet.losses[step] for step in (1, 2)] == pytest.approx(expected[:2], rel=1e-9)


PAIRS = (
    pipeline(stage(0, 5, (0, 1)), microbatches=2),
    pipeline(stage(0, 2, (2, 3)), stage(2, 5, (4,)), first=2, microbatches=2),
)
LEFT = (
    pipeline(stage(0, 5, (0, 1), "shard"), microbatches=3),
    pipeline(stage(0, 5, (2,)), first=3, microbatches=1),
)


@pytest.mark.parametrize("zero1", [False, True], ids=["plain", "zero1"])
@pytest.mark.parametrize("phase", [in_compute, in_vote, after_vote])
def test_a_death_rolls_nothing_back(
    expected: list[float], phase: Callable[[Fleet, Engine], None], zero1: bool
) -> None:
    """Parts become shards and whole layers, and parts again when two ranks join; then ranks swap their
    positions.
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


BY_TWO = (
    pipeline(stage(0, 5, (0, 1, 2, 3), replicas=2), microbatches=2),
    pipeline(stage(0, 2, (4, 5)), stage(2, 5, (6,)), first=2, microbatches=2),
)


@pytest.mark.parametrize(
    ("phase", "dead", "zero1"),
    [(in_compute, 2, False), (in_vote, 6, False), (in_vote, 1, True), (after_vote, 6, True)],
)
def test_a_death_among_replicas_of_parts_rolls_nothing_back(
    expected: list[float], phase: Callable[[Fleet, Engine], None], dead: int, zero1: bool
) -> None:
    """A node of four devices that are two replicas, and its successors on other numbers of devices."""
    with Fleet(job(zero1=zero1), 7) as fleet:
        fleet.enter(fleet.engines, BY_TWO)
        fleet.steps(1)
        phase(fleet, fleet.engines[dead])
        fleet.broken_step()
        for engine in fleet.engines:
            engine.__dict__.pop("_hold_vote", None)
        left = fleet.engines[4:] if dead < 4 else fleet.engines[:3]
        fleet.enter(left, LEFT)
        fleet.steps(1)
        fleet.enter([*left, *fleet.join(4)], BY_TWO)
        fleet.steps(STEPS - fleet.engines[0].committed_step)
        digests = fleet.each(lambda _, engine: engine.compute_digests())
        assert digests[0] == digests[1] == digests[2] == digests[3] == digests[4] | digests[6]
        assert [fleet.losses[step] for step in range(1, STEPS + 1)] == pytest.approx(expected, rel=1e-9)


def test_each_device_has_its_part_and_columns_and_no_more() -> None:
    with Fleet(job(), 4) as fleet:
        fleet.enter(fleet.engines, ONE_OF_FOUR)
        fleet.steps(1)
        gc.collect()
        for engine in fleet.engines:
            model, sharding = engine.model, engine.sharding
            assert sharding is not None and not model.held_layers
            assert all(parameter.is_meta for _, parameter in model.named_parameters(range(5)))
            whole = sum(vector.numel for vector in sharding.shape.vectors)
            kept = {one.slice.name: one for part in sharding.states.held for one in part.slices}
            own = sum(one.slice.end - one.slice.start for one in kept.values())
            assert own == pytest.approx(whole / 4, abs=len(sharding.shape.vectors))
            parts = sharding.optimization.shards
            assert isinstance(parts, StageTensorParts)
            columns = sum(part.numel() for part in parts._columns.values())
            assert columns == 3 * (16 * 16 + 16 * 48) / 4
            up = parts._parts["1.up.weight"]
            value = kept["1.up.weight"].value
            assert value is not None and up.shape == (12, 16)
            assert up.untyped_storage().data_ptr() == value.untyped_storage().data_ptr(), "no copy of it"


def test_training_and_evaluation_continue_from_a_replica(tmp_path: Path, expected: list[float]) -> None:
    with Fleet(job(within_node="replicate"), 1) as fleet:
        fleet.enter(fleet.engines, (pipeline(stage(0, 5, (0,))),))
        fleet.steps(2)
        stage_layers(fleet.packed(), tmp_path)
    with Fleet(job(), 7) as fleet:
        fleet.restore, fleet.restore_step = str(tmp_path), 2
        assert fleet.enter(fleet.engines, BY_TWO) == 2
        fleet.steps(2)
        assert [fleet.losses[step] for step in (3, 4)] == pytest.approx(expected[2:4], rel=1e-9)


def test_an_evaluation_after_an_update_has_the_new_columns() -> None:
    """Columns are copied once for each update, whatever runs first."""
    data = job(evaluation_every_steps=1, arguments={"held_out": True})
    evaluations = []
    for pipelines, ranks in (((pipeline(stage(0, 5, (0,))),), 1), (ONE_OF_TWO, 2)):
        with Fleet(data, ranks) as fleet:
            fleet.enter(fleet.engines, pipelines)
            fleet.steps(3)
            evaluations.append([fleet.evaluations[step].loss for step in (1, 2)])
    assert evaluations[1] == pytest.approx(evaluations[0], rel=1e-9)


def test_dropout_outside_of_split_regions_is_the_same() -> None:
    data = job(arguments={"dropout": 0.3})
    wanted = reference_run(load(data), data, 2)[0]
    with Fleet(data, 2) as fleet:
        fleet.enter(fleet.engines, ONE_OF_TWO)
        fleet.steps(2)
        assert [fleet.losses[step] for step in (1, 2)] == pytest.approx(wanted, rel=1e-9)


def test_low_precision_is_summed_in_float32() -> None:
    data = job(precision="bfloat16")
    wanted = reference_run(load(data), data, 2)[0]
    with Fleet(data, 2) as fleet:
        fleet.enter(fleet.engines, ONE_OF_TWO)
        fleet.steps(2)
        assert [fleet.losses[step] for step in (1, 2)] == pytest.approx(wanted, rel=1e-2)


# --- plans that are rejected -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"plan": {"*.up": "colwise", "*.dwn": "rowwise"}},
            "names *.dwn, and the model has no such module",
        ),
        ({"plan": {"*.up": "sideways"}}, "1.up is sideways, which ftd does not know; it knows colwise, "),
        ({"plan": {"*.norm_1": "colwise"}}, "1.norm_1 is a LayerNorm, not an nn.Linear"),
        (
            {"plan": {"*.down": "colwise"}},
            "what 1.down (colwise) computes is not put together again by a rowwise module",
        ),
        (
            {"plan": {"*.down": "rowwise"}},
            "1.down is rowwise, and no colwise module comes before it in its layer",
        ),
        ({"inner_dropout": 0.1}, "dropout after 1.up, where each device has other features"),
        (
            {"plan": {name: style for name, style in PLAN.items() if "norm" not in name}},
            "1.query_norm runs after 1.value, where each device has other features, and has parameters",
        ),
        ({"tied": True}, "1.up.weight is frozen, or shared with another module"),
        ({"plan": {}}, "its plan names no module"),
        (
            {"shape": (4, -1)},
            "after 1.query (colwise), a device with 1/2 of the features computes something else than that part",
        ),
        ({"shape": (4, 4)}, "computes something else than that part of the whole; split whole heads"),
    ],
)
def test_an_impossible_plan_is_rejected(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(TrainingError, match=re.escape(words)):
        Engine(job(arguments=changes), CPU, ProgressMonitor())


def test_layers_that_are_compiled_are_not_split() -> None:
    with pytest.raises(TrainingError, match=r"training\.compile is on, and compiled layers cannot be split"):
        Engine(job(compile=True), CPU, ProgressMonitor())
    model = Engine(job(compile=True, within_node="auto"), CPU, ProgressMonitor()).model
    assert model.tensor_plan is None and model.tensor_problem is not None


def test_devices_that_do_not_divide_heads_are_rejected() -> None:
    """The coordinator uses the profile, which may have been measured with another model."""
    three = (pipeline(stage(0, 5, (0, 1, 2))),)
    with (
        Fleet(job(arguments={"width": 48, "heads": 4}), 3) as fleet,
        pytest.raises(
            TrainingError, match=r"attention heads of \* is 4, which 3 devices do not divide; measure"
        ),
    ):
        fleet.enter(fleet.engines, three)
