"""Every architecture, cut into stages of unequal pipelines whose layout changes, has the losses of a plain loop."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from runtime.wire.protocol import TrainingData
from tests.runtime.architectures import ARCHITECTURES, build
from tests.runtime.fleet import Fleet
from tests.runtime.harness import ROOT, pipeline
from tests.runtime.plain_loop import plain_losses
from tests.runtime.support import data_for
from tests.runtime.zero import Pipelines

STEPS = 20


def job_of(architecture: str, **changes: Any) -> TrainingData:
    arguments = {"architecture": architecture} | changes.pop("arguments", {})
    fields: dict[str, Any] = {
        "steps": STEPS,
        "global_batch": 8,
        "microbatch_rows": 2,
        "clip_gradient_norm": 0.5,
        "arguments": arguments,
    }
    return data_for("tests.runtime.architectures:build", ROOT, **(fields | changes))


def three_and_two(layers: int) -> Pipelines:
    """Five ranks; the first stage of the first pipeline is the input alone."""
    middle = (layers + 1) // 2
    return (
        pipeline((0, 1, [0]), (1, middle, [1]), (middle, layers, [2]), first_microbatch=0, microbatches=3),
        pipeline((0, middle, [3]), (middle, layers, [4]), first_microbatch=3, microbatches=1),
    )


def three_and_one(layers: int) -> Pipelines:
    """Four ranks with other cuts; the last stage of the first pipeline is the output alone."""
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


def losses_of(job: TrainingData, steps: int = STEPS) -> list[float]:
    """Train as two pipelines; after half of the steps a rank leaves and all cuts change."""
    with Fleet(job, 5) as fleet:
        layers = fleet.engines[0].model.layer_count
        fleet.enter(fleet.engines, three_and_two(layers))
        fleet.steps(steps // 2)
        survivors = [engine for rank, engine in enumerate(fleet.engines) if rank != 1]
        assert fleet.enter(survivors, three_and_one(layers)) == steps // 2
        fleet.steps(steps - steps // 2)
        return [fleet.losses[step] for step in range(1, steps + 1)]


@pytest.fixture
def wholly_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take out the casts to float32 that models make in norms, softmax, routers and losses.

    With them a float64 model is one that rounds to float32 in the middle, so that two orders of the same
    sums differ by a last bit of float32 now and then.
    """
    plain = {name: getattr(Tensor, name) for name in ("float", "to", "type")}
    softmax = functional.softmax

    def kept(name: str) -> Any:
        def cast(tensor: Tensor, *arguments: Any, **named: Any) -> Any:
            down = name == "float" or torch.float32 in (*arguments, *named.values())
            if tensor.dtype is torch.float64 and down:
                return tensor
            return plain[name](tensor, *arguments, **named)

        return cast

    for name in plain:
        monkeypatch.setattr(Tensor, name, kept(name))

    def whole(
        tensor: Tensor, dim: int | None = None, *, dtype: torch.dtype | None = None, **named: Any
    ) -> Tensor:
        return softmax(tensor, dim, dtype=None if tensor.dtype is torch.float64 else dtype, **named)

    monkeypatch.setattr(functional, "softmax", whole)


@pytest.mark.usefixtures("wholly_float64")
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_losses_are_those_of_a_plain_loop(architecture: str) -> None:
    job = job_of(architecture)
    expected = plain_losses(lambda: build(architecture), job, STEPS)
    assert losses_of(job) == pytest.approx(expected, rel=ARCHITECTURES[architecture].relative)
