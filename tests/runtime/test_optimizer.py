"""The user's optimizer and schedule over changing layers: training continues exactly as if nothing had
changed.
"""

from collections.abc import Callable, Collection
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler as lr
from torch.optim.optimizer import Optimizer

from runtime.engine.engine import make_optimization
from runtime.errors import TrainingError
from runtime.layers.model import Model
from runtime.layers.optimizer import Optimization
from tests.helpers.runtime_support import data_for, training_of

Named = list[tuple[str, nn.Parameter]]


def parameters(named: Named) -> list[nn.Parameter]:
    return [p for _, p in named]


def two_groups(named: Named) -> Optimizer:
    return torch.optim.AdamW(
        [
            {"params": [p for _, p in named if p.dim() > 1], "weight_decay": 0.3},
            {"params": [p for _, p in named if p.dim() == 1], "weight_decay": 0.0, "lr": 3e-3},
        ],
        lr=1e-2,
    )


OPTIMIZERS: dict[str, Callable[[Named], Optimizer]] = {
    "sgd": lambda named: torch.optim.SGD(parameters(named), lr=0.05, momentum=0.9, nesterov=True),
    "adam": lambda named: torch.optim.Adam(parameters(named), lr=0.01, amsgrad=True),
    "adamw in two groups": two_groups,
    "adamw by name": lambda named: torch.optim.AdamW(named, lr=0.01),
    "adamw one by one": lambda named: torch.optim.AdamW(parameters(named), lr=0.01, foreach=False),
    "a group for each parameter": lambda named: torch.optim.Adam(
        [{"params": [p], "lr": 0.01 / (index + 1)} for index, (_, p) in enumerate(named)]
    ),
    "adagrad": lambda named: torch.optim.Adagrad(parameters(named), lr=0.05),
    "nadam": lambda named: torch.optim.NAdam(parameters(named), lr=0.01),
    "rmsprop": lambda named: torch.optim.RMSprop(parameters(named), lr=0.01, centered=True),
    "adafactor": lambda named: torch.optim.Adafactor(parameters(named), lr=0.01),
    "learning rate in a tensor": lambda named: torch.optim.Adam(
        parameters(named), lr=torch.tensor(0.01), foreach=False
    ),
}

SCHEDULERS: dict[str, Callable[[Any], lr.LRScheduler]] = {
    "lambda": lambda o: lr.LambdaLR(o, lambda step: 1.0 / (step + 1)),
    "numpy": lambda o: lr.LambdaLR(o, lambda step: 0.5 + 0.5 * np.cos(step / 12)),
    "numpy in float32": lambda o: lr.LambdaLR(o, lambda step: np.float32(0.5) ** step),
    "multiplicative": lambda o: lr.MultiplicativeLR(o, lambda step: 0.9),
    "steps": lambda o: lr.MultiStepLR(o, [2, 3, 5], gamma=0.5),
    "cosine": lambda o: lr.CosineAnnealingLR(o, T_max=9),
    "warm restarts": lambda o: lr.CosineAnnealingWarmRestarts(o, T_0=3, T_mult=2),
    "one cycle": lambda o: lr.OneCycleLR(o, max_lr=0.02, total_steps=12),
    "cyclic": lambda o: lr.CyclicLR(o, 0.001, 0.02, step_size_up=3, cycle_momentum=False),
    "sequence": lambda o: lr.SequentialLR(
        o, [lr.LinearLR(o, 0.1, total_iters=3), lr.ExponentialLR(o, 0.9)], milestones=[4]
    ),
    "chain": lambda o: lr.ChainedScheduler([lr.ConstantLR(o, 0.5, total_iters=3), lr.ExponentialLR(o, 0.9)]),
}


def make(optimizer: Any, scheduler: Any = None) -> tuple[Model, Optimization]:
    torch.manual_seed(11)
    layers: list[nn.Module] = [nn.Linear(6, 5), nn.Linear(5, 5), nn.Linear(5, 1)]
    training = training_of(layers, optimizer=optimizer, scheduler=scheduler)
    model = Model(training, data_for("unused.py:build"))
    return model, Optimization(model)


def give_gradients(model: Model, step: int, layers: Collection[int] = range(3)) -> None:
    """Set gradients that depend only on step and name."""
    for index, (_, parameter) in enumerate(model.named_parameters(range(3))):
        generator = torch.Generator().manual_seed(1000 * step + index)
        value = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
        parameter.grad = None if parameter.is_meta else value


def advance(
    model: Model, optimization: Optimization, steps: range, owned: Collection[int] = range(3)
) -> None:
    for step in steps:
        give_gradients(model, step)
        optimization.step(owned)


def copy_layer(source: tuple[Model, Optimization], target: tuple[Model, Optimization], layer: int) -> None:
    """Move a layer as a transfer does, with the schedule as bytes."""
    (from_model, from_optimization), (to_model, to_optimization) = source, target
    to_model.materialise(layer)
    with torch.no_grad():
        for (name, ours), (_, theirs) in zip(
            to_model.named_parameters([layer]), from_model.named_parameters([layer]), strict=True
        ):
            ours.copy_(theirs)
            state = from_optimization.parameter_state(name)
            to_optimization.set_parameter_state(
                name, {k: v.clone() if isinstance(v, Tensor) else v for k, v in state.items()}
            )
    plain = msgspec.msgpack.decode(msgspec.msgpack.encode(from_optimization.schedule()), strict=False)
    to_optimization.set_schedule(plain)


def same(left: Model, right: Model) -> bool:
    pairs = zip(left.named_parameters(range(3)), right.named_parameters(range(3)), strict=True)
    return all(torch.equal(a, b) for (_, a), (_, b) in pairs)


@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_training_continues_exactly_with_layers_from_another_rank(optimizer: Any) -> None:
    undisturbed = make(optimizer, SCHEDULERS["cosine"])
    advance(*undisturbed, range(1, 5))
    joiner = make(optimizer, SCHEDULERS["cosine"])
    joiner[0].drop([0, 1])
    for layer in range(3):
        copy_layer(undisturbed, joiner, layer)
    assert same(undisturbed[0], joiner[0])
    for pair in (undisturbed, joiner):
        advance(*pair, range(5, 8))
    assert same(undisturbed[0], joiner[0])


def rates_of(optimization: Optimization) -> list[float]:
    return [group["lr"] for group in optimization.schedule()["groups"]]


@pytest.mark.parametrize("scheduler", SCHEDULERS.values(), ids=SCHEDULERS)
@pytest.mark.parametrize("optimizer", ["sgd", "adamw in two groups"])
def test_a_joiner_continues_the_schedule_exactly(optimizer: str, scheduler: Any) -> None:
    undisturbed = make(OPTIMIZERS[optimizer], scheduler)
    advance(*undisturbed, range(1, 5))
    joiner = make(OPTIMIZERS[optimizer], scheduler)
    joiner[1].set_schedule(msgspec.msgpack.decode(msgspec.msgpack.encode(undisturbed[1].schedule())))
    for step in range(5, 11):
        assert rates_of(joiner[1]) == rates_of(undisturbed[1])
        assert joiner[1].learning_rate() == pytest.approx(rates_of(undisturbed[1])[0])
        for pair in (undisturbed, joiner):
            advance(*pair, range(step, step + 1))
    assert joiner[1].schedule() == undisturbed[1].schedule()


def test_the_schedule_advances_where_no_layer_is_owned() -> None:
    busy, idle = (make(OPTIMIZERS["adam"], SCHEDULERS["cosine"]) for _ in range(2))
    idle[0].drop([0, 1, 2])
    advance(*busy, range(1, 4))
    advance(*idle, range(1, 4), owned=[])
    assert rates_of(busy[1]) == rates_of(idle[1]) != [0.01]


def test_held_layers_that_are_not_owned_stay_as_they_are() -> None:
    model, optimization = make(OPTIMIZERS["adamw in two groups"])
    advance(model, optimization, range(1, 3))
    before = {name: p.detach().clone() for name, p in model.named_parameters(range(3))}
    steps = {name: optimization.parameter_state(name)["step"] for name in before}
    advance(model, optimization, range(3, 4), owned=[1])
    for name, parameter in model.named_parameters(range(3)):
        assert torch.equal(parameter, before[name]) == (not name.startswith("1."))
        assert (optimization.parameter_state(name)["step"] == 3) == name.startswith("1.")
        assert (steps[name] == 3) == name.startswith("1.")


def test_a_missing_gradient_counts_as_zero() -> None:
    """Weight decay and moments must not depend on which microbatches a rank computed."""
    model, optimization = make(OPTIMIZERS["adamw in two groups"])
    before = [p.detach().clone() for _, p in model.named_parameters([0])]
    optimization.step(range(3))
    weight = model.named_parameters([0])[0][1]
    assert torch.equal(weight, before[0] * (1 - 1e-2 * 0.3))


def test_a_skipped_step_changes_the_schedule_alone() -> None:
    model, optimization = make(OPTIMIZERS["adamw in two groups"], SCHEDULERS["cosine"])
    advance(model, optimization, range(1, 2))
    before = [p.detach().clone() for _, p in model.named_parameters(range(3))]
    rates = rates_of(optimization)
    give_gradients(model, 2)
    optimization.step(range(3), skipped=True)
    assert all(torch.equal(p, b) for (_, p), b in zip(model.named_parameters(range(3)), before, strict=True))
    assert rates_of(optimization) != rates


def test_the_state_of_a_dropped_layer_is_released() -> None:
    model, optimization = make(OPTIMIZERS["adam"])
    advance(model, optimization, range(1, 3))
    assert optimization.parameter_state("1.weight")
    model.drop([1])
    assert optimization.parameter_state("1.weight") == {}
    model.materialise(1)
    assert optimization.parameter_state("1.weight") == {}
    assert optimization.parameter_state("0.weight")


def test_a_model_without_trainable_parameters() -> None:
    def frozen_loss(output: Tensor, target: Tensor) -> Tensor:
        return output.mean()

    model = Model(training_of([nn.Identity()], loss=frozen_loss), data_for("unused.py:build"))
    optimization = Optimization(model)
    optimization.step([0])
    assert optimization.schedule() == {"groups": [], "scheduler": None, "loss_scale": None}
    assert optimization.learning_rate() == 0.0
    optimization.set_schedule({"groups": [], "scheduler": None, "loss_scale": None})


def test_a_schedule_that_is_shorter_than_the_job_is_rejected_before_the_first_step() -> None:
    _, cycle = make(OPTIMIZERS["adam"], SCHEDULERS["one cycle"])
    cycle.check_length(12)
    with pytest.raises(TrainingError, match=r"OneCycleLR ends after 12 steps, and the job has 13"):
        cycle.check_length(13)
    _, cosine = make(OPTIMIZERS["adam"], SCHEDULERS["cosine"])
    cosine.check_length(1000)
    one_cycle = training_of(
        [nn.Linear(6, 1)], optimizer=OPTIMIZERS["adam"], scheduler=SCHEDULERS["one cycle"]
    )
    data = data_for("unused.py:build", steps=13)
    with pytest.raises(TrainingError, match="ends after 12 steps"):
        make_optimization(Model(one_cycle, data), data)


def test_the_schedule_of_another_optimizer_is_rejected() -> None:
    _, adam = make(OPTIMIZERS["adam"], SCHEDULERS["cosine"])
    for other in (
        make(OPTIMIZERS["sgd"], SCHEDULERS["cosine"]),
        make(OPTIMIZERS["adamw in two groups"], SCHEDULERS["cosine"]),
        make(OPTIMIZERS["adam"], SCHEDULERS["one cycle"]),
        make(OPTIMIZERS["adam"]),
    ):
        with pytest.raises(ValueError, match="belongs to a different optimizer or learning-rate scheduler"):
            adam.set_schedule(other[1].schedule())


class Hoarder(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["history"] = [1.0]
        return super().step(closure)


STRANGER = nn.Parameter(torch.zeros(3, 2))


def raising(_: Any) -> Any:
    raise KeyError("lr")


@pytest.mark.parametrize(
    ("optimizer", "scheduler", "message"),
    [
        (raising, None, "Training.optimizer raised KeyError: 'lr'"),
        (lambda named: "adam", None, "Training.optimizer must return an Optimizer, not str"),
        (lambda named: torch.optim.LBFGS(parameters(named)), None, "LBFGS.step needs a closure"),
        (lambda named: torch.optim.SGD([STRANGER], lr=1), None, r"a parameter of shape \(3, 2\).*not given"),
        (
            lambda named: torch.optim.SGD(parameters(named)[:-1], lr=1),
            None,
            r"parameter 2\.bias into no parameter group.*or freeze it in the model with requires_grad_\(False\)",
        ),
        (
            lambda named: torch.optim.AdamW(
                [{"params": [p for _, p in named if p.dim() > 1]}, {"params": [], "weight_decay": 0.0}]
            ),
            None,
            r"parameter 0\.bias and 2 more into no parameter group",
        ),
        (OPTIMIZERS["sgd"], raising, "Training.scheduler raised KeyError"),
        (OPTIMIZERS["sgd"], lambda o: 3, "Training.scheduler must return an LRScheduler, not int"),
        (OPTIMIZERS["sgd"], lr.ReduceLROnPlateau, "needs a validation metric"),
        (
            lambda named: torch.optim.SGD([{"params": parameters(named), "tag": object()}], lr=1),
            None,
            "optimizer option 'tag' holds a object, which cannot be moved",
        ),
    ],
)
def test_optimizers_that_cannot_be_used(optimizer: Any, scheduler: Any, message: str) -> None:
    with pytest.raises(TrainingError, match=message):
        make(optimizer, scheduler)


def test_a_frozen_parameter_needs_no_parameter_group() -> None:
    def last_layer_alone(named: Named) -> Optimizer:
        assert [name for name, _ in named] == ["1.weight", "1.bias"], "frozen parameters are not given"
        return torch.optim.SGD(parameters(named), lr=0.1)

    frozen = nn.Linear(6, 5).requires_grad_(False)
    training = training_of([frozen, nn.Linear(5, 1)], optimizer=last_layer_alone)
    model = Model(training, data_for("unused.py:build"))
    optimization = Optimization(model)
    before = {t.name: t.value.clone() for layer in range(2) for t in model.tensors_of(layer)}
    for _, parameter in model.named_parameters(range(2)):
        parameter.grad = torch.ones_like(parameter)
    optimization.step(range(2))
    changed = {
        t.name for layer in range(2) for t in model.tensors_of(layer) if not t.value.equal(before[t.name])
    }
    assert changed == {"1.weight", "1.bias"}


def test_an_optimizer_whose_state_cannot_move_is_rejected_at_its_first_step() -> None:
    model, optimization = make(lambda named: Hoarder(parameters(named), lr=0.1))
    give_gradients(model, 1)
    with pytest.raises(TrainingError, match="keeps a list \\('history'\\) for each parameter"):
        optimization.step(range(3))
