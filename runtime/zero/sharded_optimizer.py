"""The user's optimizer over a part of each layer (ZeRO-1), with parameters that are views of the model's.

The factory is called with whole parameters, as without ZeRO-1, and so determines the groups and the
schedule. Each group then gets, instead of a parameter, the slice of it that lies in this rank's part: a
view of the parameter's memory, which is updated in place. For optimizers that never combine elements, the
results are the same, element by element; other optimizers are rejected.
"""

import copy
import inspect
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.optim.optimizer import Optimizer

from runtime.errors import TrainingError
from runtime.layers.model import Model
from runtime.layers.optimizer import Optimization, ParameterState, Scalar
from runtime.zero.parts import ParameterSlice
from runtime.zero.shards import StageShards

ELEMENTWISE: tuple[type[Optimizer], ...] = (
    optim.SGD,
    optim.Adam,
    optim.AdamW,
    optim.Adamax,
    optim.NAdam,
    optim.RAdam,
    optim.RMSprop,
    optim.Rprop,
    optim.Adagrad,
    optim.Adadelta,
    optim.ASGD,
)
"""Optimizers whose update of an element depends only on the gradient, value and state of this element."""


@dataclass(slots=True, kw_only=True, eq=False)
class SliceState:
    """A slice of a parameter, with the optimizer's state for it."""

    slice: ParameterSlice
    state: ParameterState = field(default_factory=dict)
    """The optimizer's own state, not a copy; it changes in place. It is empty before the first step."""
    value: Tensor | None = None
    """Trained values of a replica, in host memory, or those in a shard. Other values are in the model."""
    trained: bool = True
    """Whether the optimizer updates the values. Frozen values have no state."""
    parked: bool = False
    """Whether state and values are in host memory because the device has no room for them."""


class ShardedOptimization(Optimization):
    """The user's optimizer over slices of parameters.

    :raises TrainingError: see ``Optimization``; also if the optimizer combines elements.
    """

    def __init__(self, model: Model) -> None:
        super().__init__(model)
        self._groups_of = {name: i for i, names in enumerate(self._names) for name in names}
        self._slices: list[tuple[ParameterSlice, nn.Parameter]] = []
        self._whole_parameters: dict[str, nn.Parameter] = {}
        """The optimizer's objects for parameters of which this rank updates all elements."""
        self.shards: StageShards | None = None
        """Shards of the newest generation, if this rank's stage shards."""
        self.whole_states: dict[str, ParameterState] = {}
        """State of whole parameters, created by the factory or restored, until parts are made of it."""
        if self._optimizer is not None:
            _check_elementwise(self._optimizer)
            states = self._optimizer.state
            self.whole_states = {name: states[p] for name, p in self._objects.items() if states.get(p)}
            states.clear()
        self.refresh_parameters()

    def set_slices(self, slices: Iterable[SliceState]) -> None:
        """Run the optimizer over these slices of the current parameters, with these states, from now on."""
        self.refresh_parameters()
        self._slices, self._whole_parameters = [], {}
        if self._optimizer is None:
            return
        for group in self._optimizer.param_groups:
            group["params"] = []
        self._optimizer.state.clear()
        for one in slices:
            if not one.trained:
                continue
            parameter = nn.Parameter(self.value_of(one.slice))
            self._slices.append((one.slice, parameter))
            if one.slice == self.whole_slice(one.slice.name):
                self._whole_parameters[one.slice.name] = parameter
            self._place(self._optimizer, one.slice.name, parameter, one.state)

    def step(self, owned: Collection[int], *, skipped: bool = False) -> None:
        """Update the slices as ``Optimization.step`` does; ``owned`` are the layers that they belong to."""
        if self._optimizer is None:
            return
        for one, parameter in self._slices:
            parameter.grad = None if skipped else self.gradient_of(one)
        self._optimizer.step()
        for _, parameter in self._slices:
            parameter.grad = None
        if self._scheduler is not None:
            self._scheduler.step()

    def updated(self) -> list[tuple[Tensor, ParameterState]]:
        """Return the values that this rank updates, with the optimizer's own state for them; empty before
        ``set_slices``.
        """
        if self._optimizer is None:
            return []
        return [(value.detach(), self._optimizer.state.get(value, {})) for _, value in self._slices]

    def make_replica_optimizer(
        self, slices: Sequence[SliceState]
    ) -> tuple[Optimizer | None, list[nn.Parameter]]:
        """Return an optimizer with the same options over the values of ``slices``, which are trained and in host
        memory, and its parameters.
        """
        if self._optimizer is None:
            return None, []
        twin = copy.copy(self._optimizer)
        twin.state = defaultdict(dict)
        twin.param_groups = [{**options, "params": []} for options in self.options()]
        parameters = []
        for one in slices:
            assert one.value is not None
            parameter = nn.Parameter(one.value)
            parameters.append(parameter)
            self._place(twin, one.slice.name, parameter, one.state)
        return twin, parameters

    def options(self) -> list[dict[str, Any]]:
        """Return the current options of each group, for an optimizer in host memory."""
        groups = [] if self._optimizer is None else self._optimizer.param_groups
        options = [
            {
                k: v.detach().cpu().clone() if isinstance(v, Tensor) else v
                for k, v in group.items()
                if k != "params"
            }
            for group in groups
        ]
        if self._model.device.type != "cpu":
            for group in options:
                group |= {key: False for key in ("capturable",) if key in group}
        return options

    def value_of(self, one: ParameterSlice) -> Tensor:
        """Return the memory of the slice that this rank computes with, in the parameter or its shard."""
        if self.shards is not None and self.shards.memory.contains(one.name):
            return self.shards.memory.value_of(one)
        return self.parameter_slice(one)

    def parameter_slice(self, one: ParameterSlice) -> Tensor:
        """Return the memory of the slice in the current whole parameter."""
        return self._objects[one.name].detach().view(-1)[one.start : one.end]

    def has_memory(self, name: str) -> bool:
        """Return whether the whole parameter is held here."""
        return not self._objects[name].is_meta

    def whole_slice(self, name: str) -> ParameterSlice:
        """Return all of a parameter as a slice."""
        return ParameterSlice(name=name, start=0, end=self._objects[name].numel())

    def in_shards(self, name: str) -> bool:
        """Return whether this rank computes with a shard of the parameter."""
        return self.shards is not None and self.shards.memory.contains(name)

    def own_slice(self, one: ParameterSlice) -> ParameterSlice | None:
        """Return the intersection of a slice with the elements that this rank has under the current plan."""
        return self.shards.memory.own_slice(one) if self.shards is not None else one

    def gradient_of(self, one: ParameterSlice) -> Tensor:
        """Return the slice of the gradient; zeros if there is none."""
        if self.shards is not None and self.shards.memory.contains(one.name):
            return self.shards.gradient_of(one)
        parameter = self._objects[one.name]
        if parameter.grad is None:
            return torch.zeros(one.end - one.start, dtype=parameter.dtype, device=parameter.device)
        return parameter.grad.view(-1)[one.start : one.end]

    def refresh_parameters(self) -> None:
        """Take over the model's current parameter objects."""
        everything = range(self._model.layer_count)
        self._objects = dict(self._model.named_parameters(everything, frozen=True))

    def release_dropped(self) -> None:
        # The states of parts are held and released together with the parts.
        self.refresh_parameters()

    def device_of_state(self, name: str, *, scalar: bool) -> torch.device:
        """Return the device on which a parameter's owner keeps optimizer state; numbers that it has once for the
        whole parameter are in host memory unless the optimizer runs as one kernel.
        """
        assert self._optimizer is not None
        group = self._optimizer.param_groups[self._groups_of[name]]
        on_device = not scalar or group.get("capturable") or group.get("fused")
        return self._model.device if on_device else torch.device("cpu")

    def parameter_state(self, name: str) -> ParameterState:
        """Return the state as ``Optimization.parameter_state`` does, for a parameter of which this rank
        updates all elements.

        :raises RuntimeError: the parameter's state is divided among ranks.
        """
        if not self._slices or self._optimizer is None:
            return dict(self.whole_states.get(name, {}))
        if (parameter := self._whole_parameters.get(name)) is None:
            raise RuntimeError(f"the optimizer's state of {name} is divided among ranks, in parts")
        shape = self._objects[name].shape
        return {
            key: value.view(shape)
            if isinstance(value, Tensor) and value.numel() == shape.numel() and value.dim()
            else value
            for key, value in self._optimizer.state[parameter].items()
        }

    def set_parameter_state(self, name: str, state: Mapping[str, Tensor | Scalar]) -> None:
        self.whole_states[name] = dict(state)

    def _place(self, optimizer: Optimizer, name: str, parameter: nn.Parameter, state: ParameterState) -> None:
        optimizer.param_groups[self._groups_of[name]]["params"].append(parameter)
        optimizer.state[parameter] = state


def is_elementwise(optimizer: Optimizer) -> bool:
    """Return whether the optimizer is known to update each element independently of all others."""
    kind = type(optimizer)
    base = next((one for one in kind.__mro__ if one in ELEMENTWISE), None)
    return base is not None and inspect.unwrap(kind.step) is inspect.unwrap(base.step)


class NotElementwiseError(TrainingError):
    """An optimizer that is not known to update each element independently of all others."""


def _check_elementwise(optimizer: Optimizer) -> None:
    if is_elementwise(optimizer):
        return
    kind = type(optimizer)
    raise NotElementwiseError(
        f"zero1 divides the optimizer's state by elements, and {kind.__name__} is not known to "
        f"allow that; use one of {', '.join(one.__name__ for one in ELEMENTWISE)} (or a subclass that "
        "leaves its step as it is), or set zero1 = false"
    )
