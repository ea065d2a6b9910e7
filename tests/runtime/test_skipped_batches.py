"""Real engines leave out the batches that a Resume names, with and without processes that read ahead, also after the
number of ranks has changed.
"""

from pathlib import Path

import pytest

from ftd import sample_indices
from statemachine.messages.trainer import TrainingData, WorldPipeline, WorldStage
from tests.helpers.fleet import Fleet
from tests.helpers.runtime_support import data_for

SAMPLES, BATCH = 48, 8


def pipelines_of(ranks: int) -> tuple[WorldPipeline, ...]:
    """Return so many pipelines of one rank, which share out a batch of four microbatches."""
    each = 4 // ranks
    return tuple(
        WorldPipeline(
            stages=(WorldStage(first_layer=0, end_layer=5, ranks=(rank,)),),
            first_microbatch=each * rank,
            microbatches=each,
        )
        for rank in range(ranks)
    )


def job(tmp_path: Path, workers: int) -> TrainingData:
    arguments = {"samples": SAMPLES, "log": str(tmp_path / "read")}
    return data_for(
        "tests.helpers.sampled:build",
        Path(__file__).parents[2],
        global_batch=BATCH,
        microbatch_rows=2,
        data_workers=workers,
        arguments=arguments,
    )


@pytest.mark.parametrize("workers", [0, 1])
def test_steps_train_on_the_batches_that_are_not_left_out(tmp_path: Path, workers: int) -> None:
    with Fleet(job(tmp_path, workers), 2, protection="none") as fleet:
        fleet.enter(fleet.engines, pipelines_of(2))
        fleet.steps(2)
        fleet.skipped_batches = (3, 5)
        fleet.enter(fleet.engines, pipelines_of(2))
        fleet.steps(1)
        fleet.enter(fleet.engines[:1], pipelines_of(1))
        fleet.steps(1)
        votes = fleet.votes
    assert [votes[step].skipped_batches for step in range(1, 5)] == [(), (), (3, 5), (3, 5)]
    for step in range(1, 5):
        due = sample_indices(SAMPLES, BATCH, 3, step, skipped_batches=(3, 5))
        assert votes[step].metrics["number"] == pytest.approx(sum(due) / BATCH, rel=1e-12)
        assert votes[step].metrics["square"] == pytest.approx(sum(n * n for n in due) / BATCH, rel=1e-12)
    assert sample_indices(SAMPLES, BATCH, 3, 4, skipped_batches=(3, 5)) == sample_indices(
        SAMPLES, BATCH, 3, 6
    ), "step 4 uses batch 6"
