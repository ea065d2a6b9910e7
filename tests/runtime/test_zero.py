"""ZeRO-1 and AOR with real trainers: the losses of a plain loop, whatever dies at any time."""

from collections.abc import Iterator

import pytest

from statemachine.messages import trainer as p
from statemachine.messages.common import ReplicaDigests
from tests.helpers.harness import Cluster, TrainerHandle, pipeline
from tests.helpers.pipelines import LAYERS, TWO_AND_TWO, finish, losses_of, replicas_agree
from tests.helpers.reference import load, reference_run
from tests.helpers.runtime_support import gpt_data
from tests.helpers.zero import Sharded


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
    [(THREE_AND_TWO, 5, "aor"), (SPLIT_ROWS, 6, "aor"), (ALONE, 2, "none")],
)
def test_losses_do_not_depend_on_the_layout(
    cluster: Cluster, pipelines: tuple[p.WorldPipeline, ...], ranks: int, protection: str
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


def test_parameters_are_compared_and_a_flipped_bit_is_found(cluster: Cluster) -> None:
    """It is found in one step: then its owner's part is sent to all, or the copy is overwritten."""
    steps = 30
    sharded = Sharded(cluster=cluster, job=data(steps=steps, compare_replicas_every=1), protection="aor")
    trainers = sharded.join(4)
    sharded.start(trainers, TWO_AND_TWO)
    differing = []
    for step in range(1, steps):
        found: dict[int, set[int]] = {}
        for trainer in trainers:
            for layer, digest in trainer.take(ReplicaDigests, step=step).digests.items():
                found.setdefault(layer, set()).add(digest)
        assert sorted(found) == list(range(LAYERS))
        differing += [(step, layer) for layer, digests in found.items() if len(digests) > 1]
        if step == 2:
            assert not differing
            trainers[3].send(p.FlipBit())
    assert len(differing) == 1
    finish(trainers)


LEFT = (
    pipeline((0, 2, [0]), (2, 4, [1]), first_microbatch=1, microbatches=3),
    pipeline((0, 4, [2]), first_microbatch=0, microbatches=1),
)
THREE_OWNERS = (
    pipeline((0, 2, [0]), (2, 4, [1]), first_microbatch=0, microbatches=2),
    pipeline((0, 4, [2]), first_microbatch=2, microbatches=1),
    pipeline((0, 4, [3]), first_microbatch=3, microbatches=1),
)


def test_kills_and_joins_with_replicas(cluster: Cluster) -> None:
    """Kills anywhere in a step roll nothing back; a join turns two owners into three."""
    steps = 18
    job = data(steps=steps)
    expected, _ = reference_run(load(job), job, steps)
    sharded = Sharded(cluster=cluster, job=job, protection="aor")
    trainers = sharded.join(4)
    sharded.start(trainers, TWO_AND_TWO)
    seen: dict[int, float] = {}

    def watch(trainer: TrainerHandle, last: int) -> None:
        while min(last, steps) not in seen:
            stepped = trainer.take(p.TrainerStepped)
            seen[stepped.step] = stepped.vote.loss

    watch(trainers[0], 3)
    for plan in (TWO_AND_TWO, THREE_OWNERS):
        trainers[3].kill()
        survivors = trainers[:3]
        committed = max(seen)
        step, vote = sharded.quiesce(survivors)
        assert step >= committed
        if vote is not None:
            seen[step] = vote.loss
        joiner = sharded.join(1)  # Its start takes as long as many steps.
        sharded.resume(survivors, LEFT, step, vote)
        assert max(report.bytes_moved for report in cluster.resumed(survivors)) > 0
        watch(survivors[0], step + 2)
        step, vote = sharded.quiesce([*survivors, *joiner], mode="boundary")
        assert vote is not None
        seen[step] = vote.loss
        trainers = [*survivors, *joiner]
        sharded.resume(trainers, plan, step, vote)
        assert cluster.resumed(trainers)[3].bytes_moved > 0
        watch(trainers[0], min(step + 2, steps))
    watch(trainers[0], steps)
    replicas_agree(trainers)
    assert [seen[step] for step in sorted(seen)] == pytest.approx(
        [expected[step - 1] for step in sorted(seen)], rel=1e-9
    )
    finish(trainers)
