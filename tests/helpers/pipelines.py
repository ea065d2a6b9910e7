"""Pipelines for tests of the engine, and a check that applies to all of their runs."""

from collections.abc import Sequence

from statemachine.messages import trainer as p
from statemachine.messages.common import Finished
from tests.helpers.harness import TrainerHandle, pipeline

LAYERS = 4
"""Layers of the tiny GPT: embedding, two blocks, head; embedding and head share their weight."""


def losses_of(trainer: TrainerHandle, first: int, last: int) -> list[float]:
    return [trainer.take(p.TrainerStepped, step=step).vote.loss for step in range(first, last + 1)]


def finish(trainers: Sequence[TrainerHandle]) -> None:
    for trainer in trainers:
        trainer.close()


def replicas_agree(trainers: Sequence[TrainerHandle]) -> dict[int, str]:
    """Wait for Finished, and check that owners of a layer hold the same bytes."""
    digests: dict[int, str] = {}
    for trainer in trainers:
        for layer, digest in trainer.take(Finished).digests.items():
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
