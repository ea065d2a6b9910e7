"""Models of the table of architectures, trained in pipelines and compared with a plain loop."""

from collections.abc import Callable
from typing import Any

import pytest

from statemachine.messages.trainer import TrainingData
from statemachine.messages.values import Vote
from tests.helpers.fleet import Fleet
from tests.helpers.harness import ROOT, pipeline
from tests.helpers.plain_loop import PlainStep
from tests.helpers.runtime_support import data_for
from tests.helpers.zero import Pipelines

STEPS = 8


Layout = Callable[[int], Pipelines]
"""Function that returns the pipelines for a model with this number of layers."""


def job_of(architecture: str, **changes: Any) -> TrainingData:
    arguments = {"architecture": architecture} | changes.pop("arguments", {})
    fields: dict[str, Any] = {
        "steps": STEPS,
        "global_batch": 8,
        "microbatch_rows": 2,
        "clip_gradient_norm": 0.5,
        "arguments": arguments,
    }
    return data_for("tests.helpers.architectures:build", ROOT, **(fields | changes))


def three_and_two(layers: int) -> Pipelines:
    """Return pipelines of five ranks; the first stage of the first one is the input alone."""
    middle = (layers + 1) // 2
    return (
        pipeline((0, 1, [0]), (1, middle, [1]), (middle, layers, [2]), first_microbatch=0, microbatches=3),
        pipeline((0, middle, [3]), (middle, layers, [4]), first_microbatch=3, microbatches=1),
    )


def three_and_one(layers: int) -> Pipelines:
    """Return pipelines of four ranks with other cuts; the last stage of the first one is the output alone."""
    middle = layers // 2
    return (
        pipeline(
            (0, middle, [0]),
            (middle, layers - 1, [1]),
            (layers - 1, layers, [2]),
            first_microbatch=3,
            microbatches=1,
        ),
        pipeline((0, layers, [3]), first_microbatch=0, microbatches=3),
    )


def train(job: TrainingData, first: Layout, second: Layout, leaves: int, steps: int = STEPS) -> list[Vote]:
    """Train under one layout. After half of the steps rank ``leaves`` leaves, and the others continue under
    the second.
    """
    with Fleet(job, _ranks(first)) as fleet:
        layers = fleet.engines[0].model.layer_count
        fleet.enter(fleet.engines, first(layers))
        fleet.steps(steps // 2)
        survivors = [engine for rank, engine in enumerate(fleet.engines) if rank != leaves]
        assert fleet.enter(survivors, second(layers)) == steps // 2
        fleet.steps(steps - steps // 2)
        return [fleet.votes[step] for step in range(1, steps + 1)]


def _ranks(layout: Layout) -> int:
    return sum(len(stage.ranks) for pipeline in layout(6) for stage in pipeline.stages)


def check(found: list[Vote], expected: list[PlainStep], relative: float = 1e-9) -> None:
    """Compare all results in the votes of steps with those of the plain loop."""
    assert [vote.skipped for vote in found] == [step.skipped for step in expected]
    for what in ("loss", "gradient_norm"):
        values = [getattr(vote, what) for vote in found]
        assert values == pytest.approx([getattr(step, what) for step in expected], rel=relative), what
    assert [vote.metrics for vote in found] == [pytest.approx(step.metrics) for step in expected]


def alone(layers: int) -> Pipelines:
    return (pipeline((0, layers, [0]), first_microbatch=0, microbatches=4),)
