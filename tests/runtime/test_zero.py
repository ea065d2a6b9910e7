"""ZeRO-1 and AOR with real trainers: the losses of the plain loop, whatever dies whenever."""

from collections.abc import Iterator

import pytest

from runtime import protocol as p
from tests.runtime.harness import Cluster, pipeline
from tests.runtime.reference import load, reference_run
from tests.runtime.support import gpt_data
from tests.runtime.test_engine import finish, losses_of, replicas_agree
from tests.runtime.zero import Sharded


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster() as cluster:
        yield cluster


def data(steps: int, **changes: object) -> p.TrainingData:
    return gpt_data(
        steps=steps, global_batch=16, microbatch_rows=4, clip_gradient_norm=1.0, zero1=True, **changes
    )


THREE_AND_TWO = (
    pipeline((0, 1, [0]), (1, 3, [1]), (3, 4, [2]), first_microbatch=0, microbatches=2),
    pipeline((0, 2, [3]), (2, 4, [4]), first_microbatch=2, microbatches=2),
)
SPLIT_ROWS = (
    pipeline((0, 2, [0, 1, 2]), (2, 4, [3]), first_microbatch=0, microbatches=2),
    pipeline((0, 4, [4, 5]), first_microbatch=2, microbatches=2),
)
ALONE = (pipeline((0, 2, [0]), (2, 4, [1]), first_microbatch=0, microbatches=4),)


@pytest.mark.parametrize(
    ("pipelines", "ranks", "protection"),
    [(THREE_AND_TWO, 5, "aor"), (SPLIT_ROWS, 6, "none"), (ALONE, 2, "aor")],
)
def test_losses_do_not_depend_on_the_layout(
    cluster: Cluster, pipelines: tuple[p.PipelineData, ...], ranks: int, protection: str
) -> None:
    job = data(steps=5, arguments={"dropout": 0.1})
    expected, _ = reference_run(load(job), job, 5)
    sharded = Sharded(cluster=cluster, job=job, protection=protection)
    trainers = sharded.join(ranks)
    sharded.start(trainers, pipelines)
    for trainer in trainers:
        assert losses_of(trainer, 1, 5) == pytest.approx(expected, rel=1e-9)
    replicas_agree(trainers)
    finish(trainers)
