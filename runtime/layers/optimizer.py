"""The user's optimizer and schedule over a model of which this process holds only some layers.

The factory is called once, with *all* trainable parameters by name. Parameter groups and the learning-rate
schedule therefore have the same structure on every rank and are never rebuilt. When a layer is dropped, its
parameters stay in their groups as meta tensors without a gradient, which every torch optimizer skips. When
a layer comes back, its parameters replace these meta tensors before anything else is done.

State per parameter (moments) moves with its layer. State per group (learning rate) and the schedule are the
same on every rank at the same step, and travel with every layer as plain data.
"""

import inspect
import math
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch._dynamo  # An optimizer's first use imports this (0.8 s); here it happens before trainers are forked.
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.optim.optimizer import Optimizer

from runtime.errors import TrainingError
from runtime.layers.model import Model

_GROWTH_STEPS = 2000

Scalar = int | float | bool | str | None
ParameterState = dict[str, Tensor | Scalar]
"""State that the optimizer keeps for one parameter: ``exp_avg``, ``step``, …"""
Schedule = dict[str, Any]
"""``{"groups": [options of each group], "scheduler": its state or None, "loss_scale": [value, good steps] or
None}``, plain data."""


@dataclass(slots=True)
class LossScale:
    """Factor that keeps float16 gradients from underflowing, adjusted as ``torch.amp.GradScaler`` does."""

    value: float = 65536.0
    good_steps: int = 0
    """Steps since the value last changed."""

    def advance(self, *, overflowed: bool) -> None:
        """Halve the scale after gradients that were not finite; double it after 2,000 consecutive finite ones."""
        if overflowed:
            self.value, self.good_steps = max(self.value / 2, 1.0), 0
            return
        self.good_steps += 1
        if self.good_steps == _GROWTH_STEPS:
            self.value, self.good_steps = min(self.value * 2, 2.0**24), 0


def state_tensors(state: ParameterState) -> list[Tensor]:
    """Return the tensors of a parameter's state, in the order of their keys."""
    return [value for _, value in sorted(state.items()) if isinstance(value, Tensor)]


class Optimization:
    """The user's optimizer, learning-rate schedule and loss scale.

    :raises TrainingError: the factory or the scheduler raised, or returned something whose state cannot
        move to another host.
    """

    def __init__(self, model: Model) -> None:
        self.loss_scale = LossScale() if model.scales_loss else None
        """Scale of the loss, ``None`` if the precision needs none. It is committed, and travels, like the
        schedule.
        """
        self._model = model
        training = model.training
        named = model.named_parameters(range(model.layer_count))
        self._optimizer = _make_optimizer(training.optimizer, named) if named else None
        self._names = _group_names(self._optimizer, named)
        self._objects = dict(named)
        self._version = model.parameter_version
        self._scheduler: LRScheduler | None = None
        if training.scheduler is not None and self._optimizer is not None:
            self._scheduler = _make_scheduler(training.scheduler, self._optimizer)
        self._checked = False
        self.schedule()

    def check_length(self, steps: int) -> None:
        """Check that the schedule is as long as the job. Most schedules have no end.

        :raises TrainingError: it is shorter, and would raise in the middle of the job.
        """
        length = getattr(self._scheduler, "total_steps", None)
        if isinstance(length, int) and length < steps:
            raise TrainingError(
                f"Training.scheduler: {type(self._scheduler).__name__} ends after {length} steps, and the job has "
                f"{steps}; give it the job's number of steps, for example by [training.arguments]"
            )

    def step(self, owned: Collection[int], *, skipped: bool = False) -> None:
        """Apply the gradients (``.grad``) of the parameters of the layers ``owned`` and advance the schedule.

        The state of held layers that are not owned does not change. A trainable parameter of an owned layer
        without a gradient is treated as if its gradient were zero, as on a rank where another microbatch
        used the parameter.

        :param skipped: the gradients are not finite, so only the schedule advances.
        """
        if self._optimizer is None:
            return
        self._refresh()
        if skipped:
            self._forget_gradients(set())
        else:
            owned_names = {name for name, _ in self._model.named_parameters(owned)}
            self._forget_gradients(owned_names)
            for name in owned_names:
                parameter = self._objects[name]
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
        self._optimizer.step()
        if self._scheduler is not None:
            self._scheduler.step()
        if not self._checked and not skipped:
            self._checked = True
            for name in self._objects:
                self.parameter_state(name)

    def parameter_state(self, name: str) -> ParameterState:
        """Return the optimizer's own tensors (not copies) and numbers for a parameter; empty before the first
        step.

        :raises TrainingError: the optimizer keeps something that is neither a tensor nor a number.
        """
        if self._optimizer is None:
            return {}
        self._refresh()
        state = self._optimizer.state.get(self._objects[name], {})
        for key, value in state.items():
            if not isinstance(key, str) or not isinstance(value, Tensor | Scalar):
                raise TrainingError(
                    f"optimizer {type(self._optimizer).__name__} keeps a {type(value).__name__} ({key!r}) "
                    "for each parameter; only optimizers that keep tensors and numbers can be moved"
                )
        return dict(state)

    def set_parameter_state(self, name: str, state: Mapping[str, Tensor | Scalar]) -> None:
        """Set the optimizer's state for a parameter to these tensors, without copying them.

        :param state: empty if no step has been made yet.
        """
        if self._optimizer is None:
            raise ValueError(f"state for {name}, but the model has no trainable parameters")
        self._refresh()
        parameter = self._objects[name]
        self._optimizer.state.pop(parameter, None)
        if state:
            self._optimizer.state[parameter] = dict(state)

    def release_dropped(self) -> None:
        """Release the parameters that the model has dropped, and their state."""
        if self._optimizer is not None:
            self._refresh()

    def learning_rate(self) -> float:
        """Return the first parameter group's learning rate for the next step; 0 if it is not a finite number."""
        rate = 0.0 if self._optimizer is None else float(self._optimizer.param_groups[0].get("lr", 0.0))
        return rate if math.isfinite(rate) else 0.0

    def schedule(self) -> Schedule:
        """Return the current options of all groups and the scheduler's state.

        :raises TrainingError: one of them is not plain data.
        """
        if self._optimizer is None:
            return {"groups": [], "scheduler": None, "loss_scale": None}
        groups = [
            {
                key: _plain(value, f"optimizer option {key!r}")
                for key, value in group.items()
                if key != "params"
            }
            for group in self._optimizer.param_groups
        ]
        scheduler = None
        if self._scheduler is not None:
            scheduler = _plain(self._scheduler.state_dict(), "the state of the learning-rate scheduler")
        scale = self.loss_scale
        return {
            "groups": groups,
            "scheduler": scheduler,
            "loss_scale": None if scale is None else [scale.value, scale.good_steps],
        }

    def set_schedule(self, schedule: Schedule) -> None:
        """Continue from the ``schedule()`` of another rank.

        :raises ValueError: the schedule belongs to a different optimizer or scheduler.
        """
        mine = self.schedule()
        if _structure(mine) != _structure(schedule):
            raise ValueError("the schedule belongs to a different optimizer or learning-rate scheduler")
        if self._optimizer is None:
            return
        for group, options in zip(self._optimizer.param_groups, schedule["groups"], strict=True):
            for key, value in options.items():
                group[key] = from_plain(group[key], value)
        if self._scheduler is not None:
            self._scheduler.load_state_dict(from_plain(self._scheduler.state_dict(), schedule["scheduler"]))
        if self.loss_scale is not None:
            self.loss_scale.value, self.loss_scale.good_steps = schedule["loss_scale"]

    def _refresh(self) -> None:
        """Replace dropped and outdated parameter objects in the optimizer by the model's current ones."""
        assert self._optimizer is not None
        if self._version == self._model.parameter_version:
            return
        self._version = self._model.parameter_version
        now = dict(self._model.named_parameters(range(self._model.layer_count)))
        for name, old in self._objects.items():
            if now[name] is not old:
                self._optimizer.state.pop(old, None)
        self._objects = now
        for group, names in zip(self._optimizer.param_groups, self._names, strict=True):
            group["params"] = [now[name] for name in names]

    def _forget_gradients(self, keep: set[str]) -> None:
        for name, parameter in self._objects.items():
            if name not in keep:
                parameter.grad = None


def _make_optimizer(factory: Any, named: list[tuple[str, nn.Parameter]]) -> Optimizer:
    try:
        optimizer = factory(named)
    except Exception as error:
        raise TrainingError(f"Training.optimizer raised {type(error).__name__}: {error}") from error
    if not isinstance(optimizer, Optimizer):
        raise TrainingError(f"Training.optimizer must return an Optimizer, not {type(optimizer).__name__}")
    if any(p.default is p.empty for p in inspect.signature(optimizer.step).parameters.values()):
        raise TrainingError(
            f"{type(optimizer).__name__}.step needs a closure; take an optimizer that needs gradients alone"
        )
    return optimizer


def _make_scheduler(factory: Any, optimizer: Optimizer) -> LRScheduler:
    try:
        scheduler = factory(optimizer)
    except Exception as error:
        raise TrainingError(f"Training.scheduler raised {type(error).__name__}: {error}") from error
    if isinstance(scheduler, ReduceLROnPlateau):
        raise TrainingError(
            "ReduceLROnPlateau needs a validation metric; take a schedule that depends on the step alone"
        )
    if not isinstance(scheduler, LRScheduler):
        raise TrainingError(f"Training.scheduler must return an LRScheduler, not {type(scheduler).__name__}")
    return scheduler


def _group_names(optimizer: Optimizer | None, named: list[tuple[str, nn.Parameter]]) -> list[list[str]]:
    """Return the names of the parameters in each parameter group.

    :raises TrainingError: a group has a parameter that the factory was not given, or no group has one that
        it was given. Such a parameter would keep its initial value although its gradient is computed.
    """
    if optimizer is None:
        return []
    names = {id(parameter): name for name, parameter in named}
    groups: list[list[str]] = []
    for group in optimizer.param_groups:
        unknown = [tuple(p.shape) for p in group["params"] if id(p) not in names]
        if unknown:
            raise TrainingError(
                f"Training.optimizer put a parameter of shape {unknown[0]} into the optimizer that it was "
                "not given; use the (name, parameter) pairs of its argument"
            )
        groups.append([names[id(p)] for p in group["params"]])
    grouped = {name for group_names in groups for name in group_names}
    left_out = [name for name, _ in named if name not in grouped]
    if left_out:
        more = f" and {len(left_out) - 1} more" if len(left_out) > 1 else ""
        raise TrainingError(
            f"Training.optimizer put parameter {left_out[0]}{more} into no parameter group, so training would not "
            "change it: add it to a group, or freeze it in the model with requires_grad_(False)"
        )
    return groups


# --- plain data ----------------------------------------------------------------------------------


def _plain(value: Any, what: str) -> Any:
    """Return ``value`` as msgpack can carry it. Dictionaries become lists of pairs, because their keys may be
    numbers.
    """
    match value:
        case np.generic() if isinstance(value.item(), Scalar):
            return value.item()  # A schedule that computes with numpy makes such learning rates.
        case None | bool() | int() | float() | str():
            return value
        case Tensor() if value.dim() == 0:
            return value.item()
        case list() | tuple():
            return [_plain(item, what) for item in value]
        case dict():
            return {"pairs": [[_plain(k, what), _plain(v, what)] for k, v in value.items()]}
        case _:
            raise TrainingError(
                f"{what} holds a {type(value).__name__}, which cannot be moved to another host"
            )


def from_plain(like: Any, plain: Any) -> Any:
    """Return the inverse of ``_plain``, with the types of ``like``, the value that it replaces."""
    match like:
        case Tensor():
            return torch.full_like(like, plain)
        case Counter():
            return Counter(dict(plain["pairs"]))
        case dict():
            return {k: from_plain(like.get(k), v) for k, v in plain["pairs"]}
        case list() | tuple() if isinstance(plain, list):
            items = [from_plain(like[i] if i < len(like) else None, item) for i, item in enumerate(plain)]
            return type(like)(items)
        case _ if isinstance(plain, dict):
            return {k: from_plain(None, v) for k, v in plain["pairs"]}
        case _:
            return plain


def _structure(schedule: Schedule) -> tuple[Any, ...]:
    """Return what must agree between two ranks: the option names of each group and the keys of the scheduler's
    state.
    """
    groups = tuple(tuple(sorted(group)) for group in schedule["groups"])
    scheduler = schedule["scheduler"]
    entries = None if scheduler is None else tuple(sorted(str(key) for key, _ in scheduler["pairs"]))
    return groups, entries, schedule["loss_scale"] is None
