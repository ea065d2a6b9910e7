"""Tensor parallelism in a stage on one of its devices: parts of its linear modules, computed on all rows.

Each device keeps what it would keep in a stage with shards (``runtime.zero.shards``): its range of each
vector. A parameter that is split (``runtime.layers.tensor_plan``) is a vector of its own, so the range of a
weight is an equal number of its rows, which are output features.

A ``colwise`` module computes with that range directly, and its gradient is added to the range's gradient in
place. A ``rowwise`` module needs columns, which are input features. They are copied from the weight once
for each update, when the module first runs, and their gradients are added to the rows once for each step,
after its last backward pass. Both operations move the weight over the links of the node once for each step,
and nothing of it for each microbatch.

Activations: the input of a ``colwise`` module is the same on all devices, and its gradient is summed over
them. The output of a ``rowwise`` module is summed, and its gradient is the same on all devices. All other
parameters are gathered while a layer runs, as in shards; their gradients are equal on all devices, and each
device keeps its range. Sums of low-precision activations are computed in float32. All operations go through
the communicator, so an abort frees this rank wherever it waits.
"""

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from runtime.groups.communicator import CommunicationError, Communicator, Members, member_range
from runtime.layers.model import Model
from runtime.layers.tensor_plan import SplitLinear, TensorPlan
from runtime.monitoring.progress import ProgressMonitor
from runtime.zero.parts import ParameterLayout
from runtime.zero.shards import ShardMemory, StageShards, put_parameter

Change = Callable[[Tensor], Tensor]


class _Exchange(torch.autograd.Function):
    """An autograd function that applies ``forth`` to a tensor and, in the backward pass, ``back`` to its
    gradient.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, forth: Change, back: Change) -> Tensor:
        ctx.back = back
        return forth(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return ctx.back(gradients[0]), None, None


def _exchanged(x: Tensor, forth: Change, back: Change) -> Tensor:
    found: Tensor = _Exchange.apply(x, forth, back)  # type: ignore[no-untyped-call]
    return found


class StageTensorParts(StageShards):
    """Tensor-parallel parts of one device in one generation; only the main thread calls it. Parameters as for
    ``StageShards``.

    :param members: the ranks of this replica of the stage.
    :param plan: a plan that ``len(members)`` devices can use.
    """

    def __init__(
        self,
        model: Model,
        shape: ParameterLayout,
        layers: Sequence[int],
        memory: ShardMemory,
        members: Members,
        communicator: Communicator,
        monitor: ProgressMonitor,
        *,
        plan: TensorPlan,
    ) -> None:
        numbers = {name: number for number, vector in enumerate(shape.vectors) for name in vector.names}
        super().__init__(
            model,
            shape,
            layers,
            memory,
            members,
            communicator,
            monitor,
            same_rows=True,
            ungathered={numbers[name] for name in plan.split_parameters},
        )
        self._index = members.index(communicator.rank)
        self._partial = {numbers[name] for name in plan.summed_parameters}
        """Vectors of which each device computes a part of the gradient."""
        self._linears: dict[int, list[SplitLinear]] = {}
        self._parts: dict[str, nn.Parameter] = {}
        """Tensors that modules compute with, by the name of the parameter."""
        self._columns: dict[int, nn.Parameter] = {}
        """Columns of the weights of rowwise modules by the number of their vector; they are separate from
        ``values``.
        """
        self._outdated: set[int] = set()
        """Numbers in ``_columns`` that must be copied from the weight before they are used."""
        self._unreduced: set[int] = set()
        """Numbers in ``_columns`` whose gradients of this step must still be added to those of the rows."""
        self._inputs: dict[int, tuple[Tensor, Tensor]] = {}
        """Inputs of modules of the current block, by identity, with the tensors that the modules get instead."""
        this = weakref.ref(self)
        for linear in plan.linears:
            if linear.layer not in layers:
                continue
            self._linears.setdefault(linear.layer, []).append(linear)
            for name in (linear.weight, linear.bias):
                if name is None or name not in plan.split_parameters:
                    continue
                number = numbers[name]
                if linear.is_rowwise:
                    columns = linear.module.in_features // len(members)
                    part = nn.Parameter(self.values[number].new_empty(linear.module.out_features, columns))
                    part.grad = torch.zeros_like(part)
                    self._columns[number] = part
                else:
                    size = (-1, linear.module.in_features) if name == linear.weight else (-1,)
                    part = nn.Parameter(self.values[number].view(size))
                    part.grad = self.gradients[number].view(size)
                self._parts[name] = part
                part.register_post_accumulate_grad_hook(_hook(this, number))  # type: ignore[no-untyped-call]
        self._numbers = {name: numbers[name] for name in self._parts}
        self._outdated |= set(self._columns)

    def begin_step(self) -> None:
        super().begin_step()
        for part in self._columns.values():
            assert part.grad is not None
            part.grad.zero_()
        self._unreduced = set(self._columns)

    def mark_values_changed(self) -> None:
        self._outdated = set(self._columns)

    def end(self) -> None:
        super().end()
        self._parts, self._columns = {}, {}

    # --- running layers ----------------------------------------------------------------------------

    @contextmanager
    def gathered(self, layer: int, *, block: bool) -> Iterator[None]:
        linears = self._linears.get(layer, []) if block else []
        with super().gathered(layer, block=block), self._split(linears) if linears else nullcontext():
            yield

    @contextmanager
    def _split(self, linears: Sequence[SplitLinear]) -> Iterator[None]:
        """Make these modules compute their parts within this context."""
        self._copy_columns(linears)
        handles = []
        before: list[tuple[nn.Module, str, Any]] = []
        counted = torch.is_grad_enabled() and self._in_forward
        try:
            for linear in linears:
                module = linear.module
                for key, name in (("weight", linear.weight), ("bias", linear.bias)):
                    if name not in self._parts:
                        continue
                    before.append((module, key, module._parameters[key]))
                    put_parameter(module, key, self._parts[name])
                    self._uses[self._numbers[name]] += counted
                if linear.is_rowwise:
                    if linear.style == "rowwise_split_input":
                        handles.append(module.register_forward_pre_hook(self._take_part))
                    handles.append(module.register_forward_hook(self._add_up))
                    if linear.bias is not None:
                        bias = module._parameters["bias"]
                        handles.append(module.register_forward_hook(partial(_with_bias, bias)))
                        before.append((module, "bias", bias))
                        put_parameter(module, "bias", None)
                else:
                    handles.append(module.register_forward_pre_hook(self._take))
                    if linear.style == "colwise_gather_output":
                        handles.append(module.register_forward_hook(self._put_together))
            yield
        finally:
            self._inputs.clear()
            for handle in handles:
                handle.remove()
            for module, key, value in reversed(before):
                put_parameter(module, key, value)

    def _take(self, module: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        """Replace a module's input; modules with the same input share one sum of its gradients."""
        x = arguments[0]
        known = self._inputs.get(id(x))
        if known is None:
            known = self._inputs[id(x)] = x, _exchanged(x, _same, self.all_reduce_sum)
        return known[1], *arguments[1:]

    def _take_part(self, module: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        return _exchanged(arguments[0], self.slice_features, self.gather_features), *arguments[1:]

    def _add_up(self, module: nn.Module, arguments: Any, output: Tensor) -> Tensor:
        return _exchanged(output, self.all_reduce_sum, _same)

    def _put_together(self, module: nn.Module, arguments: Any, output: Tensor) -> Tensor:
        return _exchanged(output, self.gather_features, self.slice_features)

    # --- communication with the stage's other devices ------------------------------------------------

    def all_reduce_sum(self, x: Tensor) -> Tensor:
        """Return the sum over the devices.

        The sum consists of a reduce-scatter and a gather, which wait for devices of this stage alone. An
        all-reduce would queue in the same lane as those of gradients that other stages take part in. Those
        may in turn wait for this stage, so a sum that the backward pass needs would never complete.

        :raises CommunicationError: the group was aborted, or a peer is lost.
        """
        with _disable_current_modes():
            # Allocate new memory each time: after an abort a stuck thread may still write into the old one.
            terms = torch.empty(x.numel(), dtype=_sum_dtype(x.dtype), device=x.device)
            terms.view(x.shape).copy_(x)
            start, end = member_range(x.numel(), self._index, len(self._members))
            run, total = terms.new_empty(end - start), torch.empty_like(terms)
            self._wait(self._communicator.reduce_scatter(run, terms, self._members))
            self._wait(self._communicator.all_gather(total, run, self._members))
            return total.view(x.shape).to(x.dtype)

    def gather_features(self, x: Tensor) -> Tensor:
        """Return the devices' tensors concatenated in the last dimension."""
        with _disable_current_modes():
            count = len(self._members)
            flat = x.new_empty(count * x.numel())
            self._wait(self._communicator.all_gather(flat, x.reshape(-1), self._members))
            return flat.view(count, *x.shape).movedim(0, -2).reshape(*x.shape[:-1], count * x.shape[-1])

    def slice_features(self, x: Tensor) -> Tensor:
        """Return this device's part of the last dimension."""
        return x.chunk(len(self._members), dim=-1)[self._index].contiguous()

    def _copy_columns(self, linears: Sequence[SplitLinear]) -> None:
        for linear in linears:
            number = self._numbers[linear.weight]
            if number in self._outdated:
                with torch.no_grad(), _disable_current_modes():
                    whole = self.gather(number).view(linear.module.out_features, -1)
                    self._columns[number].copy_(self.slice_features(whole))
                self._outdated.discard(number)

    def _has_whole_gradient(self, number: int) -> bool:
        return number not in self._partial

    def note_gradient(self, number: int) -> None:
        """Record that the gradient of a part, of one microbatch, was added."""
        self._uses[number] -= 1
        if number not in self._columns:
            self._complete(number)
        elif self.armed and not self._uses[number]:
            self._reduce_columns(number)

    def end_backward(self) -> None:
        if self.armed:
            # These are parameters that the last microbatch did not use.
            for number in sorted(self._unreduced):
                self._reduce_columns(number)
        super().end_backward()

    def _reduce_columns(self, number: int) -> None:
        """Add the gradients of columns to those of the rows that each device keeps."""
        self._unreduced.discard(number)
        gradient = self._columns[number].grad
        assert gradient is not None
        columns = gradient.shape[1]
        whole = gradient.new_zeros(gradient.shape[0], columns * len(self._members))
        whole[:, self._index * columns : (self._index + 1) * columns] = gradient
        try:
            self._begin_reducing(number, whole.view(-1))
        except CommunicationError as error:
            self._failure = error
            raise


def _hook(this: "weakref.ref[StageTensorParts]", number: int) -> Callable[[Tensor], None]:
    """Return a hook that reports a gradient to the stage without keeping the stage's memory alive."""

    def arrived(_: Tensor) -> None:
        if (parts := this()) is not None:
            parts.note_gradient(number)

    return arrived


def _with_bias(bias: Any, module: nn.Module, arguments: Any, output: Tensor) -> Tensor:
    total: Tensor = output + bias.to(output.dtype)
    return total


def _same(x: Tensor) -> Tensor:
    return x.view_as(x)


def _sum_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype
