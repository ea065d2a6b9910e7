"""Stages whose devices compute parts of their layers: losses as those of one process, wherever somebody dies."""

from pathlib import Path

import msgspec
import pytest

from planner.values import Within
from statemachine.messages import trainer as p
from tests.runtime.fleet import Fleet
from tests.runtime.reference import load, reference_run
from tests.runtime.support import data_for

STEPS = 6
HERE = Path(__file__).parent


def stage(
    first: int, end: int, ranks: tuple[int, ...], within: Within = "tensor", **more: object
) -> p.StageData:
    return msgspec.structs.replace(
        p.StageData(first_layer=first, end_layer=end, ranks=ranks, within=within), **more
    )


def pipeline(*stages: p.StageData, first: int = 0, microbatches: int = 4) -> p.PipelineData:
    return p.PipelineData(stages=stages, first_microbatch=first, microbatches=microbatches)


ONE_OF_TWO = (pipeline(stage(0, 5, (0, 1))),)
ONE_OF_FOUR = (pipeline(stage(0, 5, (0, 1, 2, 3))),)
STAGES_OF_TWO = (pipeline(stage(0, 2, (0, 1)), stage(2, 5, (2, 3))),)
MIXED = (
    pipeline(stage(0, 1, (0, 1), "shard"), stage(1, 5, (2, 3)), microbatches=2),
    pipeline(stage(0, 3, (4, 5, 6, 7)), stage(3, 5, (8, 9), "replicate"), first=2, microbatches=1),
    pipeline(stage(0, 5, (10,)), first=3, microbatches=1),
)


def job(**changes: object) -> p.TrainingData:
    data = data_for("split_gpt.py:build", HERE, steps=STEPS, clip_gradient_norm=1.0, within_node="tensor")
    return msgspec.structs.replace(data, **changes)


@pytest.fixture(scope="module")
def expected() -> list[float]:
    return reference_run(load(job()), job(), STEPS)[0]


@pytest.mark.parametrize("zero1", [False, True], ids=["plain", "zero1"])
@pytest.mark.parametrize(
    ("pipelines", "ranks"),
    [(ONE_OF_TWO, 2), (ONE_OF_FOUR, 4), (STAGES_OF_TWO, 4), (MIXED, 11)],
    ids=["one of two", "one of four", "stages of two", "mixed"],
)
def test_losses_are_those_of_one_process(
    expected: list[float], pipelines: tuple[p.PipelineData, ...], ranks: int, zero1: bool
) -> None:
    with Fleet(job(zero1=zero1), ranks) as fleet:
        fleet.enter(fleet.engines, pipelines)
        fleet.steps(3)
        assert [fleet.losses[step] for step in range(1, 4)] == pytest.approx(expected[:3], rel=1e-9)
