"""Evaluation on the pipelines: the numbers of a plain loop in every layout, and no trace of it in training."""

from pathlib import Path
from typing import Any

import pytest

from runtime.wire import protocol as p
from tests.runtime.fleet import Fleet
from tests.runtime.harness import pipeline
from tests.runtime.reference import load, reference_evaluation, reference_run
from tests.runtime.support import EXAMPLES, data_for, script

GPT = """
    import dataclasses
    import sys
    from torch.utils.data import Subset
    sys.path.insert(0, {examples!r})
    import gpt

    def held_out(length=37):
        training = gpt.build(blocks=2, width=8, heads=2, length=8, megabytes=1, dropout=0.1)
        last = len(training.dataset)
        return dataclasses.replace(
            training, evaluation=Subset(training.dataset, range(last - length, last)), metrics=metrics
        )

    def metrics(output, batch):
        return {{"right": (output.argmax(-1) == batch[1]).double().mean()}}
"""
THREE_AND_ONE = (
    pipeline((0, 1, [0]), (1, 3, [1]), (3, 4, [2]), first_microbatch=0, microbatches=3),
    pipeline((0, 4, [3]), first_microbatch=3, microbatches=1),
)
SPLIT_ROWS = (pipeline((0, 2, [0, 1, 2]), (2, 4, [3, 4]), first_microbatch=0, microbatches=4),)
ALONE = (pipeline((0, 4, [0]), first_microbatch=0, microbatches=4),)
TWO_AND_TWO = (
    pipeline((0, 2, [0]), (2, 4, [1]), first_microbatch=0, microbatches=2),
    pipeline((0, 1, [2]), (1, 4, [3]), first_microbatch=2, microbatches=2),
)
TWO_AND_ONE = (
    pipeline((0, 2, [0]), (2, 4, [1]), first_microbatch=1, microbatches=3),
    pipeline((0, 4, [2]), first_microbatch=0, microbatches=1),
)


def gpt_job(directory: Path, **changes: Any) -> p.TrainingData:
    """Five steps; the state after 2, 4 and 5 is evaluated on 37 samples: two global batches and a bit."""
    script(directory, GPT.format(examples=str(EXAMPLES)))
    fields: dict[str, Any] = {"steps": 5, "evaluation_every_steps": 2, "clip_gradient_norm": 1.0}
    return data_for("mine.py:held_out", directory, **(fields | changes))


def ranks_of(pipelines: tuple[p.PipelineData, ...]) -> int:
    return sum(len(stage.ranks) for one in pipelines for stage in one.stages)


@pytest.mark.parametrize("pipelines", [THREE_AND_ONE, TWO_AND_TWO, SPLIT_ROWS, ALONE])
@pytest.mark.parametrize("batches", [0, 2])
def test_evaluations_do_not_depend_on_the_layout_and_leave_training_as_it_is(
    tmp_path: Path, pipelines: tuple[p.PipelineData, ...], batches: int
) -> None:
    job = gpt_job(tmp_path, evaluation_batches=batches)
    plain = gpt_job(tmp_path, evaluation_every_steps=0)
    expected = {}
    for step in (2, 4, 5):
        training = load(job)
        _, model = reference_run(training, job, step)
        expected[step] = reference_evaluation(model, training, job)
    with Fleet(job, ranks_of(pipelines)) as fleet, Fleet(plain, ranks_of(pipelines)) as without:
        fleet.enter(fleet.engines, pipelines)
        fleet.steps(5)
        assert fleet.engines[0].evaluation_due
        fleet.evaluate()
        without.enter(without.engines, pipelines)
        without.steps(5)
        assert fleet.losses == without.losses  # To the bit.
        assert [e.digests() for e in fleet.engines] == [e.digests() for e in without.engines]
    assert list(fleet.evaluations) == [2, 4, 5]
    for step, (loss, weight) in expected.items():
        found = fleet.evaluations[step]
        assert found.loss == pytest.approx(loss, rel=1e-9)
        assert found.weight == weight == (32 if batches else 37)
        assert 0 < found.metrics["right"] < 0.5
        assert found.took_s > 0
