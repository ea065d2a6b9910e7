"""The user's optimizer over a part of each layer (ZeRO-1): its parameters are views of the model's.

The factory is called with whole parameters, as without ZeRO-1, which gives the groups and the schedule. Then
each group gets, instead of a parameter, the slice of it that lies in this rank's part: a view of the
parameter's own memory, updated in place. That is the same arithmetic, element by element, for optimizers that
never look across elements; others are refused.
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

from runtime.layers.model import Model
from runtime.layers.optimizer import Optimization, ParameterState, Scalar
from runtime.training import TrainingError
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
"""Each element's update depends on this element's gradient, value and state alone."""


@dataclass(slots=True, kw_only=True, eq=False)
class SliceState:
    """A slice of a parameter, with what the optimizer keeps for it."""

    slice: ParameterSlice
    state: ParameterState = field(default_factory=dict)
    """The optimizer's own, not a copy; it changes in place. Empty before the first step."""
    value: Tensor | None = None
    """Of a replica, in host memory. The values of an owner's part are the model's."""


class ShardedOptimization(Optimization):
    """:raises TrainingError: as ``Optimization``; or the optimizer looks across elements."""

    def __init__(self, model: Model) -> None:
        super().__init__(model)
        self._groups_of = {name: i for i, names in enumerate(self._names) for name in names}
        self._slices: list[tuple[ParameterSlice, nn.Parameter]] = []
        self._whole_of: dict[str, nn.Parameter] = {}
        """What the optimizer has for parameters of which this rank updates all elements."""
        self.shards: StageShards | None = None
        """Of the newest generation, where this rank's stage shards."""
        self.whole_states: dict[str, ParameterState] = {}
        """State of whole parameters, made by the factory or restored, until parts are taken of it."""
        if self._optimizer is not None:
            _check_elementwise(self._optimizer)
            states = self._optimizer.state
            self.whole_states = {name: states[p] for name, p in self._objects.items() if states.get(p)}
            states.clear()

    def set_slices(self, slices: Iterable[SliceState]) -> None:
        """From here on the optimizer is over these slices of the present parameters, with these states."""
        self._objects = dict(self._model.named_parameters(range(self._model.layer_count)))
        self._slices, self._whole_of = [], {}
        if self._optimizer is None:
            return
        for group in self._optimizer.param_groups:
            group["params"] = []
        self._optimizer.state.clear()
        for one in slices:
            parameter = nn.Parameter(self.value_of(one.slice))
            self._slices.append((one.slice, parameter))
            if one.slice == self.whole_slice(one.slice.name):
                self._whole_of[one.slice.name] = parameter
            self._place(self._optimizer, one.slice.name, parameter, one.state)

    def step(self, owned: Collection[int], *, skipped: bool = False) -> None:
        """As ``Optimization.step``, of the slices alone; ``owned`` are the layers that these are of."""
        if self._optimizer is None:
            return
        for one, parameter in self._slices:
            parameter.grad = None if skipped else self.gradient_of(one)
        self._optimizer.step()
        for _, parameter in self._slices:
            parameter.grad = None
        if self._scheduler is not None:
            self._scheduler.step()

    def make_replica_optimizer(
        self, slices: Sequence[SliceState]
    ) -> tuple[Optimizer | None, list[nn.Parameter]]:
        """An optimizer like this one over the values of ``slices``, in host memory, and its parameters."""
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
        """Of each group, as they are now, for an optimizer in host memory."""
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
        """The slice of what this rank computes with, the parameter or its shard of it: memory, not a copy."""
        if self.shards is not None and self.shards.contains(one.name):
            return self.shards.value_of(one)
        return self.parameter_slice(one)

    def parameter_slice(self, one: ParameterSlice) -> Tensor:
        """The slice of the present whole parameter: its memory, not a copy."""
        return self._objects[one.name].detach().view(-1)[one.start : one.end]

    def has_memory(self, name: str) -> bool:
        """Whether the whole parameter is here."""
        return not self._objects[name].is_meta

    def whole_slice(self, name: str) -> ParameterSlice:
        """All of a parameter."""
        return ParameterSlice(name=name, start=0, end=self._objects[name].numel())

    def in_shards(self, name: str) -> bool:
        """Whether this rank computes with a parameter of which it has a shard."""
        return self.shards is not None and self.shards.contains(name)

    def own_slice(self, one: ParameterSlice) -> ParameterSlice | None:
        """What this rank has, under the present plan, of elements that it computes with."""
        return self.shards.own_slice(one) if self.shards is not None else one

    def gradient_of(self, one: ParameterSlice) -> Tensor:
        """The slice of the gradient; zeros where there is none."""
        if self.shards is not None and self.shards.contains(one.name):
            return self.shards.gradient_of(one)
        parameter = self._objects[one.name]
        if parameter.grad is None:
            return torch.zeros(one.end - one.start, dtype=parameter.dtype, device=parameter.device)
        return parameter.grad.view(-1)[one.start : one.end]

    def refresh_parameters(self) -> None:
        """The model has other parameter objects now."""
        self._objects = dict(self._model.named_parameters(range(self._model.layer_count)))

    def release_dropped(self) -> None:
        # The states of parts are kept and let go of with the parts.
        self.refresh_parameters()

    def keeps_scalars_on_device(self, name: str) -> bool:
        """Whether the optimizer keeps also single numbers beside the parameter on its device."""
        assert self._optimizer is not None
        group = self._optimizer.param_groups[self._groups_of[name]]
        return bool(group.get("capturable") or group.get("fused"))

    def parameter_state(self, name: str) -> ParameterState:
        """As ``Optimization.parameter_state``, of a parameter that this rank updates all of.

        :raises RuntimeError: it is shared out.
        """
        if not self._slices or self._optimizer is None:
            return dict(self.whole_states.get(name, {}))
        if (parameter := self._whole_of.get(name)) is None:
            raise RuntimeError(f"the optimizer's state of {name} is shared out: it is in the parts")
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
    """Return whether the optimizer is known to update each element without a look at others."""
    kind = type(optimizer)
    base = next((one for one in kind.__mro__ if one in ELEMENTWISE), None)
    return base is not None and inspect.unwrap(kind.step) is inspect.unwrap(base.step)


class NotElementwiseError(TrainingError):
    """The optimizer is not known to update each element by itself."""


def _check_elementwise(optimizer: Optimizer) -> None:
    if is_elementwise(optimizer):
        return
    kind = type(optimizer)
    raise NotElementwiseError(
        f"zero1 shares the optimizer's state out element by element, and {kind.__name__} is not known to "
        f"allow that; take one of {', '.join(one.__name__ for one in ELEMENTWISE)} (or a subclass that "
        "leaves its step as it is), or set zero1 = false"
    )
