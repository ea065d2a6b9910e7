"""Real trainers, driven frame by frame: numerics of heterogeneous pipelines and of every kind of recovery."""

import time
from collections.abc import Iterator, Sequence

import pytest

from runtime import protocol as p
from tests.runtime.harness import Cluster, TrainerHandle, pipeline
from tests.runtime.reference import load, reference_run
from tests.runtime.support import gpt_data

LAYERS = 4
"""Of the tiny GPT: embedding, two blocks, head; embedding and head share their weight."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster() as cluster:
        yield cluster


def data(steps: int = 5, **changes: object) -> p.TrainingData:
    return gpt_data(steps=steps, global_batch=16, microbatch_rows=4, clip_gradient_norm=1.0, **changes)


def start(cluster: Cluster, count: int, job: p.TrainingData) -> list[TrainerHandle]:
    trainers = cluster.fork(count)
    cluster.prepare(trainers, job)
    for report in cluster.quiesce(trainers):
        assert (report.committed_step, report.ready_step, report.vote) == (0, None, None)
        assert report.held == tuple(range(LAYERS))
    return trainers


def losses_of(trainer: TrainerHandle, first: int, last: int) -> list[float]:
    return [trainer.take(p.Stepped, step=step).vote.loss for step in range(first, last + 1)]


def finish(trainers: Sequence[TrainerHandle]) -> None:
    for trainer in trainers:
        trainer.close()


def replicas_agree(trainers: Sequence[TrainerHandle]) -> dict[int, str]:
    """Wait for Done; owners of a layer must hold the same bytes."""
    digests: dict[int, str] = {}
    for trainer in trainers:
        for layer, digest in trainer.take(p.Done).digests.items():
            assert digests.setdefault(layer, digest) == digest, f"owners of layer {layer} differ"
    assert sorted(digests) == list(range(LAYERS))
    return digests


THREE_AND_ONE = (
    pipeline((0, 1, [0]), (1, 3, [1]), (3, 4, [2]), first_microbatch=0, microbatches=3),
    pipeline((0, 4, [3]), first_microbatch=3, microbatches=1),
)
TWO_AND_TWO = (
    pipeline((0, 2, [0]), (2, 4, [1]), first_microbatch=0, microbatches=2),
    pipeline((0, 1, [2]), (1, 4, [3]), first_microbatch=2, microbatches=2),
)
SPLIT_ROWS = (pipeline((0, 2, [0, 1, 2]), (2, 4, [3, 4]), first_microbatch=0, microbatches=4),)
ALONE = (pipeline((0, 4, [0]), first_microbatch=0, microbatches=4),)


@pytest.mark.parametrize(
    ("pipelines", "ranks"), [(THREE_AND_ONE, 4), (TWO_AND_TWO, 4), (SPLIT_ROWS, 5), (ALONE, 1)]
)
def test_losses_do_not_depend_on_the_layout(
    cluster: Cluster, pipelines: tuple[p.PipelineData, ...], ranks: int
) -> None:
    job = data(steps=4, arguments={"dropout": 0.1})
    expected, model = reference_run(load(job), job, 4)
    trainers = start(cluster, ranks, job)
    cluster.resume(trainers, pipelines, step=0)
    assert all(r.bytes_moved == 0 for r in cluster.resumed(trainers))
    for trainer in trainers:
        assert losses_of(trainer, 1, 4) == pytest.approx(expected, rel=1e-9)
    replicas_agree(trainers)
    finish(trainers)
