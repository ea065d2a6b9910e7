"""The layered model: ties, held layers, shapes, and randomness that does not depend on the layout."""

import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from runtime.errors import TrainingError
from runtime.layers.activations import Activation, flatten
from runtime.layers.model import Model
from statemachine.messages.trainer import TrainingData
from tests.helpers.reference import load
from tests.helpers.runtime_support import Regression, data_for, gpt_data, training_of


def gpt(**changes: object) -> Model:
    data = gpt_data(**changes)
    return Model(load(data), data)


def model_of(*layers: nn.Module, **changes: object) -> Model:
    checkpointing = changes.pop("activation_checkpointing", "none")
    data = data_for("unused.py:build", activation_checkpointing=checkpointing)
    return Model(training_of(list(layers), **changes), data)


def rows(count: int = 4, first: int = 0) -> Tensor:
    return torch.stack([torch.arange(6.0, dtype=torch.float64) + row for row in range(first, first + count)])


# --- names and ties --------------------------------------------------------------------------------


def test_a_tied_parameter_has_one_name_and_all_its_layers() -> None:
    model = gpt()
    assert model.layer_count == 4
    assert model.parameter_layers["0.token.weight"] == (0, 3)
    names = [name for name, _ in model.named_parameters(range(4))]
    assert len(names) == len(set(names)) == len(model.parameter_layers)
    assert names == list(model.parameter_layers)
    of_head = dict(model.named_parameters([3]))
    assert list(of_head) == ["0.token.weight", "3.norm.weight", "3.norm.bias"]
    assert of_head["0.token.weight"] is dict(model.named_parameters([0]))["0.token.weight"]
    assert model.parameter_sizes["0.token.weight"].numel == 256 * 8
    assert model.parameter_sizes["0.token.weight"].dtype == "float64"


def test_frozen_parameters_are_state_but_are_not_trained() -> None:
    frozen = nn.Linear(6, 6)
    frozen.weight.requires_grad_(False)
    model = model_of(frozen, nn.Linear(6, 1))
    assert list(model.parameter_layers) == ["0.bias", "1.weight", "1.bias"]
    assert [t.name for t in model.tensors_of(0)] == ["0.weight", "0.bias"]
    model.drop([0])
    model.materialise(0)
    assert not model.tensors_of(0)[0].value.requires_grad


class Holder(nn.Module):
    """A layer that shares a weight by holding the other layer's whole submodule."""

    def __init__(self, inner: nn.Linear) -> None:
        super().__init__()
        self.inner = inner
        self.out = nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(self.inner(x))
        return out


def test_a_shared_submodule_is_a_tie_too() -> None:
    inner = nn.Linear(6, 6)
    model = model_of(nn.Sequential(inner), Holder(inner))
    assert model.parameter_layers["0.0.weight"] == (0, 1)
    model.drop([0])
    assert not inner.weight.is_meta
    model.drop([1])
    assert inner.weight.is_meta
    model.materialise(1)
    assert not inner.weight.is_meta


def test_a_first_sample_that_cannot_be_read_is_named() -> None:
    class Missing(Regression):
        def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
            return super().__getitem__({0: 0}[index])

    message = r"^Training.dataset raised for index 1 \(to build the model\): KeyError: 1 \(test_model.py"
    with pytest.raises(TrainingError, match=message) as caught:
        model_of(nn.Linear(6, 1), dataset=Missing())
    assert "; make dataset[1] work, or leave this sample out" in str(caught.value)


def test_a_collate_function_that_fails_for_the_first_samples_is_named_with_the_users_line() -> None:
    def collate(samples: list[Any]) -> Any:
        raise KeyError("label")

    message = r"^the collate function raised for the first \d+ samples: KeyError: 'label' \(test_model.py"
    with pytest.raises(TrainingError, match=message):
        model_of(nn.Linear(6, 1), collate=collate)


# --- what is held ----------------------------------------------------------------------------------


def test_dropped_layers_have_no_memory_and_get_it_back_empty() -> None:
    model = gpt()
    before = {name: parameter.shape for name, parameter in model.named_parameters(range(4))}
    model.drop([1, 2])
    assert model.held_layers == {0, 3}
    assert all(p.is_meta for _, p in model.named_parameters([1, 2]))
    assert not any(p.is_meta for _, p in model.named_parameters([0, 3]))
    version = model.parameter_version
    model.materialise(1)
    assert model.held_layers == {0, 1, 3}
    assert model.parameter_version != version
    assert not any(p.is_meta for _, p in model.named_parameters([1]))
    assert {name: parameter.shape for name, parameter in model.named_parameters(range(4))} == before
    assert all(isinstance(p, nn.Parameter) and p.requires_grad for _, p in model.named_parameters(range(4)))


def test_a_tied_tensor_stays_while_one_of_its_layers_is_held() -> None:
    model = gpt()
    tied = dict(model.named_parameters([0]))["0.token.weight"]
    value = tied.detach().clone()
    model.drop([0])
    kept = dict(model.named_parameters([3]))["0.token.weight"]
    assert torch.equal(kept, value)
    model.materialise(0)
    assert dict(model.named_parameters([0]))["0.token.weight"] is kept
    assert torch.equal(kept, value)
    model.drop([0, 3])
    assert dict(model.named_parameters([0]))["0.token.weight"].is_meta
    model.materialise(0)
    module, head = model.training.layers[0], model.training.layers[3]
    assert module.token.weight is head.weight
    assert not head.weight.is_meta
    assert head.norm.weight.is_meta


def test_non_persistent_buffers_are_kept() -> None:
    layer = nn.Linear(6, 6)
    layer.register_buffer("table", torch.ones(6, dtype=torch.float64), persistent=False)
    layer.register_buffer("count", torch.ones(6, dtype=torch.float64))
    model = model_of(layer, nn.Linear(6, 1))
    model.drop([0])
    assert layer.count.is_meta
    assert torch.equal(layer.table, torch.ones(6, dtype=torch.float64))
    assert [t.name for t in model.tensors_of(0)] == ["0.weight", "0.bias", "0.count"]


def test_a_recurrent_layer_survives_being_dropped() -> None:
    """``nn.LSTM`` keeps a second list of its parameters."""

    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(1, 4, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.lstm(x.unsqueeze(2))[0][:, -1]
            return out

    model = model_of(Recurrent(), nn.Linear(4, 1))
    x = rows()
    expected = model.forward(0, 2, x, step=1, row=0)
    saved = {name: p.detach().clone() for name, p in model.named_parameters([0])}
    model.drop([0])
    model.materialise(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters([0]):
            parameter.copy_(saved[name])
    assert torch.equal(tensor(model.forward(0, 2, x, step=1, row=0)), tensor(expected))


def test_running_a_layer_that_is_not_held_is_rejected() -> None:
    model = gpt()
    model.drop([2])
    with pytest.raises(RuntimeError, match=r"layers \[2\] are not held"):
        model.forward(1, 4, torch.zeros(4, 8, 8, dtype=torch.float64), step=1, row=0)


# --- running ---------------------------------------------------------------------------------------


def tensor(activation: Activation) -> Tensor:
    assert isinstance(activation, Tensor)
    return activation


def test_layers_run_separately_as_in_one_pass() -> None:
    model = gpt()
    x, _ = model.training.dataset[0]
    x = x.unsqueeze(0).repeat(4, 1)
    middle = model.forward(0, 2, x, step=1, row=0)
    assert torch.equal(
        tensor(model.forward(2, 4, middle, step=1, row=0)), tensor(model.forward(0, 4, x, step=1, row=0))
    )


class Pair(nn.Module):
    """A layer whose input and output are (x, mask)."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor | tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        values, mask = x if isinstance(x, tuple) else (x, (x > 0).to(torch.int32))
        return self.linear(values) * mask, mask


class Join(nn.Module):
    def forward(self, x: tuple[Tensor, Tensor]) -> Tensor:
        return (x[0] * x[1]).mean(1, keepdim=True)


@pytest.mark.parametrize("mode", ["none", "full", "selective"])
def test_activations_may_be_tuples(mode: str) -> None:
    model = model_of(Pair(), Pair(), Join(), activation_checkpointing=mode)
    first, second, last = (model.output_shape(layer) for layer in range(3))
    assert first is not None and second is not None and last is not None
    assert first == second
    assert [(t.row_shape, t.dtype) for t in first.tensors] == [((6,), torch.float64), ((6,), torch.int32)]
    assert first.is_tuple
    assert not last.is_tuple
    assert last.tensors[0].row_shape == (1,)
    output = model.forward(0, 1, rows(), step=1, row=0)
    buffers = first.allocate(4, torch.device("cpu"))
    for buffer, sent in zip(buffers, flatten(output), strict=True):
        buffer.copy_(sent.detach())
    result = model.forward(1, 3, first.assemble(buffers), step=1, row=0)
    whole = model.forward(0, 3, rows(), step=1, row=0)
    assert torch.equal(tensor(result), tensor(whole))
    tensor(whole).sum().backward()
    assert all(p.grad is not None for _, p in model.named_parameters([0, 1]))


def test_evaluation_saves_no_activations_and_uses_no_dropout() -> None:
    model = model_of(nn.Dropout(0.5), nn.Linear(6, 1))
    x = rows()
    output = tensor(model.forward(0, 1, x, step=1, row=0, train=False))
    assert torch.equal(output, x)
    assert not tensor(model.forward(0, 2, x, step=1, row=0, train=False)).requires_grad
    assert not torch.equal(tensor(model.forward(0, 1, x, step=1, row=0)), x)


def test_building_does_not_change_running_statistics() -> None:
    layer = nn.BatchNorm1d(6)
    model = model_of(layer, nn.Linear(6, 1))
    assert layer.num_batches_tracked == 0
    assert torch.equal(layer.running_mean, torch.zeros(6, dtype=torch.float64))
    model.forward(0, 1, rows(), step=1, row=0)
    assert layer.num_batches_tracked == 1


# --- training and evaluation mode --------------------------------------------------------------------


def test_layers_that_the_user_put_into_evaluation_mode_stay_there() -> None:
    frozen, dropout = nn.BatchNorm1d(6).eval(), nn.Dropout(0.5)
    kept = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6).eval(), nn.Sequential(nn.Dropout(0.5)).eval())
    kept[2][0].train()
    model = model_of(frozen, kept, dropout, nn.Linear(6, 1))
    modes = [True, True, False, False, True]
    for train in (True, False, True):
        x = rows()
        for layer in range(4):
            x = tensor(model.forward(layer, layer + 1, x, step=1, row=0, train=train))
        assert [m.training for m in kept.modules()] == [mode and train for mode in modes]
        assert (frozen.training, dropout.training) == (False, train)
    assert torch.equal(frozen.running_mean, torch.zeros(6, dtype=torch.float64))
    assert torch.equal(kept[1].running_mean, torch.zeros(6, dtype=torch.float64))
    assert not model.couples_rows, "statistics that are fixed do not join the rows"


def test_layers_that_are_all_in_evaluation_mode_train() -> None:
    layers = nn.Linear(6, 6).eval(), nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 1)).eval()
    model = model_of(*layers)
    assert all(layer.training for layer in layers) and layers[1][0].training and model.couples_rows


class Freezing(nn.BatchNorm1d):
    """Batch normalisation that stays in evaluation mode by itself."""

    def train(self, mode: bool = True) -> "Freezing":
        super().train(False)
        return self


def test_a_module_may_choose_its_mode_itself() -> None:
    layer = Freezing(6)
    model = model_of(nn.Sequential(nn.Linear(6, 6), layer), nn.Linear(6, 1))
    model.forward(0, 1, rows(), step=1, row=0)
    assert layer.num_batches_tracked == 0


# --- randomness ------------------------------------------------------------------------------------


class Functional(nn.Module):
    """Dropout by function, twice: on rows, and on rows folded with another dimension."""

    def forward(self, x: Tensor) -> Tensor:
        x = functional.dropout(x, 0.3, training=self.training)
        return functional.dropout(x.view(-1, 3), p=0.3, training=self.training).view(-1, 6)


class Channels(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return functional.dropout1d(x.view(-1, 3, 2), 0.5, training=self.training).view(-1, 6)


class InPlace(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        x = x + 0.0
        functional.dropout(x, 0.5, training=self.training, inplace=True)
        return x


RANDOM_LAYERS: list[Callable[[], nn.Module]] = [lambda: nn.Dropout(0.4), Functional, Channels, InPlace]


@pytest.mark.parametrize("layer", RANDOM_LAYERS)
def test_dropout_is_a_function_of_the_sample_however_rows_are_cut(layer: Callable[[], nn.Module]) -> None:
    model = model_of(layer(), nn.Linear(6, 1))
    x = torch.ones(8, 6, dtype=torch.float64)

    def run(first: int, end: int, step: int = 5) -> Tensor:
        return tensor(model.forward(0, 1, x[first:end], step=step, row=16 + first))

    whole = run(0, 8)
    assert torch.equal(whole, torch.cat([run(0, 3), run(3, 4), run(4, 8)]))
    assert torch.equal(whole, run(0, 8))
    assert not torch.equal(whole, run(0, 8, step=6))
    assert len({tuple(row.tolist()) for row in whole}) > 1


def test_channel_dropout_drops_whole_channels() -> None:
    model = model_of(Channels(), nn.Linear(6, 1))
    x = torch.ones(64, 6, dtype=torch.float64)
    pairs = tensor(model.forward(0, 1, x, step=1, row=0)).view(-1, 2)
    assert torch.equal(pairs[:, 0], pairs[:, 1])
    assert set(pairs.unique().tolist()) == {0.0, 2.0}


def test_two_layers_and_two_calls_draw_different_numbers() -> None:
    model = model_of(nn.Dropout(0.5), nn.Dropout(0.5), nn.Linear(6, 1))
    x = torch.ones(32, 6, dtype=torch.float64)
    one = tensor(model.forward(0, 1, x, step=1, row=0))
    other = tensor(model.forward(1, 2, x, step=1, row=0))
    assert not torch.equal(one, other)
    assert 0.3 < float((one == 0).double().mean()) < 0.7
    assert set(one.unique().tolist()) == {0.0, 2.0}


class Noise(nn.Module):
    """Noise from ``draw``, which returns a number."""

    def __init__(self, draw: Callable[[], float]) -> None:
        super().__init__()
        self.draw = draw

    def forward(self, x: Tensor) -> Tensor:
        return x + self.draw()


DRAWS: dict[str, Callable[[], float]] = {
    "torch": lambda: float(torch.rand(())),
    "random": random.random,
    "normal": lambda: random.gauss(0, 1),
    "numpy": np.random.random,
    "numpy normal": np.random.standard_normal,
}


@pytest.mark.parametrize("source", DRAWS)
def test_other_random_numbers_are_a_function_of_step_row_and_layer(source: str) -> None:
    draw = DRAWS[source]
    model = model_of(Noise(draw), Noise(draw), nn.Linear(6, 1))
    x = rows()

    def run(layer: int, step: int, row: int) -> Tensor:
        return tensor(model.forward(layer, layer + 1, x, step=step, row=row))

    one = run(0, 1, 0)
    draw()
    assert torch.equal(one, run(0, 1, 0))
    for other in (run(1, 1, 0), run(0, 2, 0), run(0, 1, 4)):
        assert not torch.equal(one, other)


@pytest.mark.parametrize("layer", [*RANDOM_LAYERS, *(partial(Noise, draw) for draw in DRAWS.values())])
@pytest.mark.parametrize("mode", ["full", "selective"])
def test_checkpointing_recomputes_with_the_same_random_numbers(
    layer: Callable[[], nn.Module], mode: str
) -> None:
    def gradients(mode: str) -> list[Tensor]:
        torch.manual_seed(0)
        model = model_of(
            nn.Linear(6, 6), layer(), nn.Linear(6, 6), nn.Linear(6, 1), activation_checkpointing=mode
        )
        outputs = [tensor(model.forward(0, 4, rows(), step=2, row=row)).square().mean() for row in (0, 4)]
        for output in outputs:
            output.backward()
        return [p.grad.clone() for _, p in model.named_parameters(range(4)) if p.grad is not None]

    plain, recomputed = gradients("none"), gradients(mode)
    assert len(plain) == 6
    for left, right in zip(plain, recomputed, strict=True):
        assert torch.equal(left, right)


def test_checkpointing_keeps_only_what_crosses_layers() -> None:
    def saved(mode: str) -> int:
        model = gpt(activation_checkpointing=mode)
        x = torch.stack([model.training.dataset[i][0] for i in range(4)])
        sizes: dict[int, int] = {}

        def pack(value: Tensor) -> Tensor:
            sizes[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
            return value

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value):
            output = model.forward(0, 4, x, step=1, row=0)
        assert tensor(output).requires_grad
        return sum(sizes.values())

    assert saved("full") < saved("none") / 4


def test_a_job_with_dropout_trains_alike_however_it_recomputes() -> None:
    """Results are equal to the last bit. ``auto`` keeps everything until a plan says otherwise."""
    from tests.helpers.reference import reference_losses

    def losses(mode: str) -> list[float]:
        data: TrainingData = gpt_data(activation_checkpointing=mode, arguments={"dropout": 0.2})
        return reference_losses(load(data), data, 3)

    assert losses("full") == losses("selective") == losses("auto") == losses("none")


def test_a_plan_sets_how_layers_recompute() -> None:
    model = gpt(activation_checkpointing="auto", arguments={"dropout": 0.2})
    x = torch.stack([model.training.dataset[i][0] for i in range(4)])

    def gradients() -> list[Tensor]:
        tensor(model.forward(0, 4, x, step=1, row=0)).square().mean().backward()
        found = [p.grad.clone() for _, p in model.named_parameters(range(4)) if p.grad is not None]
        for _, parameter in model.named_parameters(range(4)):
            parameter.grad = None
        return found

    kept: list[Tensor] = []
    plain = gradients()
    for mode in ("full", "selective"):
        model.set_recompute(mode)
        for left, right in zip(plain, gradients(), strict=True):
            assert torch.equal(left, right)
    with model.override_recompute("selective", kept.append):
        gradients()
    assert kept and all(value.dtype == torch.float64 for value in kept)
    count = len(kept)
    gradients()
    assert len(kept) == count


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_running_statistics_count_a_microbatch_once(mode: str) -> None:
    def statistics(mode: str) -> list[Tensor]:
        torch.manual_seed(0)
        model = model_of(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 1), activation_checkpointing=mode)
        # Two microbatches are in flight, as in a pipeline.
        outputs = [tensor(model.forward(0, 3, rows(4, first), step=1, row=first)) for first in (0, 4)]
        for output in outputs:
            output.square().mean().backward()
        return [t.value for t in model.tensors_of(1)] + [
            p.grad for _, p in model.named_parameters(range(3)) if p.grad is not None
        ]

    plain, recomputed = statistics("none"), statistics(mode)
    assert len(plain) == 5 + 6 and int(plain[4]) == 2
    for left, right in zip(plain, recomputed, strict=True):
        assert torch.equal(left, right)


class Shared(nn.Module):
    """Layers that share a weight, which autocast would cast only in the first one."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        return functional.gelu(functional.linear(x, self.weight)).float()


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_recomputing_in_low_precision_gives_the_same_bits(mode: str) -> None:
    def gradients(mode: str) -> list[Tensor]:
        torch.manual_seed(0)
        weight = nn.Parameter(torch.randn(6, 6, dtype=torch.float32))
        layers = [Shared(weight), Shared(weight), nn.Linear(6, 1, dtype=torch.float32)]
        training = replace(training_of([nn.Linear(6, 1)]), layers=layers)
        data = data_for("unused.py:build", activation_checkpointing=mode, precision="bfloat16")
        model = Model(training, data)
        output = tensor(model.forward(0, 3, rows().float(), step=1, row=0))
        output.float().square().mean().backward()
        return [p.grad for _, p in model.named_parameters(range(3)) if p.grad is not None]

    plain, recomputed = gradients("none"), gradients(mode)
    assert len(plain) == 3 and {gradient.dtype for gradient in plain} == {torch.float32}
    for left, right in zip(plain, recomputed, strict=True):
        assert torch.equal(left, right)


# --- errors ----------------------------------------------------------------------------------------


class Transposed(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.t()


class Listed(nn.Module):
    def forward(self, x: Tensor) -> list[Tensor]:
        return [x]


@pytest.mark.parametrize(
    ("layers", "changes", "message"),
    [
        ([nn.Linear(5, 1)], {}, r"layer 0 \(Linear\) raised RuntimeError on \(4, 6\) torch.float64"),
        ([Transposed()], {}, r"layer 0 \(Transposed\) returned a tensor of shape \(6, 4\) for 4 samples"),
        ([Listed()], {}, r"layer 0 \(Listed\) must return a tensor or a tuple of tensors, not list"),
        (
            [nn.Linear(6, 1)],
            {"loss": lambda output, target: functional.mse_loss(output, target, reduction="sum")},
            r"the loss sums over samples; take the mean .*, or return the pair",
        ),
        (
            [nn.Linear(6, 1)],
            {"loss": lambda output, target: (output - target) ** 2},
            "the loss must return one number",
        ),
        ([nn.Linear(6, 2)], {"loss": functional.nll_loss}, "the loss raised"),
        (
            [nn.Linear(6, 6), nn.ReLU(inplace=True), nn.Linear(6, 1)],
            {},
            r"layer 1 \(ReLU\) changes its input in place, .*; write x = f\(x\), or inplace=False",
        ),
    ],
)
def test_layers_that_do_not_fit_are_named(
    layers: list[nn.Module], changes: dict[str, object], message: str
) -> None:
    with pytest.raises(TrainingError, match=message):
        model_of(*layers, **changes)


@pytest.mark.parametrize(
    ("metrics", "says"),
    [
        ({f"m{number}": 1.0 for number in range(33)}, "returned 33 numbers; return at most 32"),
        ({"m" * 65: 1.0}, "a name of 65 characters .*; write 1 to 64"),
        ({"": 1.0}, "a name of 0 characters"),
    ],
)
def test_more_metrics_than_a_step_can_carry_are_rejected(metrics: dict[str, float], says: str) -> None:
    with pytest.raises(TrainingError, match=says):
        model_of(nn.Linear(6, 1), metrics=lambda output, batch: metrics)


@pytest.mark.parametrize("pair", [(3, 4), (torch.tensor(3), torch.tensor(4)), [3.0, 4.0]])
def test_a_metric_may_be_a_pair_of_numbers_or_tensors(pair: Any) -> None:
    model = model_of(nn.Linear(6, 1), metrics=lambda output, batch: {"right": pair})
    total, weight = model.loss.compute_metrics(rows(), None, 4)["right"]
    assert (total.item(), weight.item()) == (3.0, 4.0)


@pytest.mark.parametrize("value", [None, "much", 1j, (1.0, None), (1.0,), [1.0, 2.0, 3.0], torch.ones(2)])
def test_a_metric_that_is_no_number_is_named(value: Any) -> None:
    with pytest.raises(TrainingError, match=r"the metric 'right' must be a number or a pair \(sum, weight\)"):
        model_of(nn.Linear(6, 1), metrics=lambda output, batch: {"right": value})


def test_a_metric_that_comes_too_late_to_be_reported_is_warned_of_once() -> None:
    found = {"right": (3, 4)}
    model = model_of(nn.Linear(6, 1), metrics=lambda output, batch: dict(found))
    found |= {"rare": (1, 1)}
    with pytest.warns(
        UserWarning, match=r"returned rare, which .* return the same names .* with \(0, 0\)"
    ) as said:
        model.loss.compute_metrics(rows(), None, 4)
        model.loss.compute_metrics(rows(), None, 4)
    assert len(said) == 1 and model.loss.metric_names == ("right",)
