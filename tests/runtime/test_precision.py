"""Tests of precision policies and compiled layers: losses, gradients, and unsupported precisions."""

import warnings

import pytest
import torch
from torch import Tensor, nn

from runtime.errors import TrainingError
from runtime.layers.model import Model, first_batch
from runtime.layers.optimizer import LossScale
from statemachine.messages.trainer import TrainingData
from tests.helpers.reference import load, reference_run
from tests.helpers.runtime_support import data_for, gpt_data, training_of


def losses(data: TrainingData, steps: int = 8) -> list[float]:
    return reference_run(load(data), data, steps)[0]


def test_bfloat16_computes_in_bfloat16_and_keeps_parameters_in_float32() -> None:
    data = gpt_data(precision="bfloat16")
    model = Model(load(data), data)
    assert {p.dtype for _, p in model.named_parameters(range(model.layer_count))} == {torch.float32}
    batch = first_batch(model.training, 4, torch.float32)
    hidden = model.forward(0, 2, None, step=1, row=0, batch=batch)
    logits = model.forward(2, 4, hidden, step=1, row=0)
    assert logits.dtype == torch.bfloat16
    for low, full in zip(losses(data), losses(gpt_data(precision="float32")), strict=True):
        assert low == pytest.approx(full, rel=0.01)


def test_a_precision_that_the_device_lacks_is_rejected() -> None:
    data = gpt_data(precision="tf32")
    with pytest.raises(TrainingError, match='precision "tf32" needs a CUDA device; use "float32"'):
        Model(load(data), data)


def test_the_loss_scale_halves_at_an_overflow_and_doubles_after_many_good_steps() -> None:
    scale = LossScale()
    scale.advance(overflowed=True)
    assert (scale.value, scale.good_steps) == (32768.0, 0)
    for _ in range(2000):
        scale.advance(overflowed=False)
    assert (scale.value, scale.good_steps) == (65536.0, 0)


@pytest.mark.parametrize("checkpointing", ["none", "full", "selective"])
def test_compiled_layers_give_the_losses_of_plain_ones(checkpointing: str) -> None:
    """Selective recomputation computes compiled layers again as a whole."""
    data = gpt_data(compile=True, activation_checkpointing=checkpointing)
    training = load(data)
    model = Model(training, data)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*runs without torch.compile")
        model.warm_up(first_batch(training, 4, torch.float64), 4, lambda: None)
        assert losses(data, 3) == pytest.approx(losses(gpt_data(), 3), rel=1e-9)


class Stubborn(nn.Linear):
    """A layer that the compiler cannot compile."""

    def forward(self, x: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            torch._dynamo.graph_break()
            raise torch._dynamo.exc.TorchDynamoException("not this one")
        return super().forward(x)


def test_a_layer_that_cannot_be_compiled_runs_uncompiled_and_reports_why() -> None:
    data = data_for("unused.py:build", compile=True)
    training = training_of([nn.Linear(6, 6), Stubborn(6, 1)])
    model = Model(training, data)
    batch = first_batch(training, 4, torch.float64)
    with pytest.warns(UserWarning, match=r"layer 1 \(Stubborn\) runs without torch.compile"):
        output = model.forward(0, 2, None, step=1, row=0, batch=batch)
    assert torch.equal(output, model.forward(0, 2, None, step=1, row=0, batch=batch))
