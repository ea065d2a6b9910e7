"""Tests of the examples: they learn, their files are short, and one process trains them reproducibly."""

import tomllib
from typing import Any

import pytest

from runtime.layers.model import Model
from runtime.layers.optimizer import Optimization
from runtime.training import load_training
from statemachine.messages.trainer import TrainingData
from tests.helpers.reference import load, reference_losses, reference_run
from tests.helpers.runtime_support import EXAMPLES, gpt_data


def job(name: str, **changes: Any) -> TrainingData:
    """Return the example's job file as a trainer receives it."""
    table = tomllib.loads((EXAMPLES / f"{name}.toml").read_text())
    training = dict(table["training"])
    arguments = training.pop("arguments") | changes.pop("arguments", {})
    rows = training.pop("microbatch")
    fields = training | {"arguments": arguments, "microbatch_rows": rows, "steps": table["steps"]} | changes
    return TrainingData(path=str(EXAMPLES), **fields)


@pytest.mark.parametrize("name", ["gpt", "mlp"])
def test_an_example_is_short(name: str) -> None:
    assert len((EXAMPLES / f"{name}.py").read_text().splitlines()) < 150


def test_the_mlp_learns_the_spirals() -> None:
    data = job("mlp")
    losses = reference_losses(load(data), data, 120)
    assert losses[0] > 1.0
    assert sum(losses[-10:]) / 10 < 0.3


def test_a_small_gpt_learns_to_spell() -> None:
    data = job("gpt", arguments={"blocks": 2, "width": 32, "length": 32, "megabytes": 1, "warm_up_steps": 5})
    losses = reference_losses(load(data), data, 40)
    assert losses[0] > 5.0
    assert losses[-1] < 3.6


def test_the_gpt_of_the_job_file_has_eight_layers_with_the_ends_tied() -> None:
    data = job("gpt")
    model = Model(load_training(data), data)
    assert model.layer_count == 8
    assert model.parameter_layers["0.token.weight"] == (0, 7)
    Optimization(model)


def test_losses_are_reproducible_and_depend_on_the_seed() -> None:
    one, again, other = (
        reference_losses(load(data), data, 4)
        for data in (
            gpt_data(arguments={"dropout": 0.1}),
            gpt_data(arguments={"dropout": 0.1}),
            gpt_data(arguments={"dropout": 0.1}, seed=4),
        )
    )
    assert one == again
    assert one[0] != other[0]


def test_clipping_limits_the_gradient() -> None:
    free, clipped = (
        reference_run(load(data), data, 1)[0] + reference_losses(load(data), data, 3)
        for data in (gpt_data(), gpt_data(clip_gradient_norm=1e-6))
    )
    assert free[0] == clipped[0]
    assert free[-1] != clipped[-1]


def test_microbatches_of_any_size_give_the_same_losses() -> None:
    one, other = (gpt_data(microbatch_rows=rows) for rows in (4, 8))
    for left, right in zip(
        reference_losses(load(one), one, 4), reference_losses(load(other), other, 4), strict=True
    ):
        assert abs(left - right) < 1e-12
