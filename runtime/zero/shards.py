"""Shards of a stage on one of its devices: its range of each vector, gathered while a layer runs (FSDP,
ZeRO-3).

Each of the k devices of a stage that shards keeps a k-th of each vector (``runtime.zero.parts``) of its
layers: parameters, frozen ones included, summed gradients and the optimizer's state. Before a layer runs,
forward or backward, its vectors are gathered while the previous layer still runs; after it they are freed.
Instead of a gathered parameter, autograd saves a note of its position, and the backward pass gathers the vector
again. As soon as a vector's gradient of a microbatch is complete, it is reduced among the devices, and each adds
its range to its sum for the step. A frozen vector has no gradient that would end its use: it is freed when the
backward pass of other code begins.

The devices compute the same layers on different rows, so they reach the same operations in the same order.
If rows influence each other and cannot be split, all devices compute all rows. The gradients then need no
reduction, and one device represents the stage. All operations go through the communicator, so an abort
frees this rank wherever it waits. torch's ``fully_shard`` does the same for modules; here vectors are
ranges of elements as in the rest of the project, parameters may be tied, and a module's own ``forward`` can
run in windows.
"""

from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from runtime.groups.communicator import (
    CommunicationError,
    Communicator,
    Members,
    PendingOperation,
    member_range,
)
from runtime.layers.model import Model
from runtime.monitoring.progress import ProgressMonitor
from runtime.zero.parts import ParameterLayout, ParameterSlice

_UNDER_WAY = 1
"""Number of reductions that run in parallel with the backward pass of the next layer; each keeps a whole
vector's gradient.
"""


@dataclass(frozen=True, slots=True)
class _Note:
    """Placeholder that autograd saves for a gathered vector: the vector's number and the layout of the saved
    elements.
    """

    vector: int
    offset: int
    size: torch.Size
    stride: tuple[int, ...]


@dataclass(slots=True, eq=False)
class _Reduction:
    vector: int
    pending: PendingOperation
    reduced: Tensor
    whole: Tensor
    """Tensors that must stay alive until the reduction is done."""


class _Gather(torch.autograd.Function):
    """An autograd function that gathers the whole vector; in the backward pass, its gradient goes to the
    shards.
    """

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, shards: "StageShards", vector: int) -> Tensor:
        ctx.shards, ctx.vector = shards, vector
        return shards.gather(vector)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None, None]:
        ctx.shards.reduce(ctx.vector, gradients[0])
        return None, None, None


class ShardMemory:
    """The memory of one device's range of each vector that its stage computes with.

    :param layers: the stage's layers.
    :param index: position of the device among the ``count`` devices that divide the vectors.
    :param before: memory of the previous generation, or restored; ranges that did not change keep their memory
        and values.
    """

    def __init__(
        self,
        shape: ParameterLayout,
        layers: Collection[int],
        index: int,
        count: int,
        device: torch.device,
        before: "ShardMemory | None" = None,
    ) -> None:
        self._shape = shape
        self._device = device
        self.vectors = tuple(
            number for number, vector in enumerate(shape.vectors) if not set(layers).isdisjoint(vector.layers)
        )
        """Numbers of the vectors that the stage computes with, ascending."""
        self.ranges = {
            number: member_range(shape.vectors[number].numel, index, count) for number in self.vectors
        }
        """This device's elements of each vector."""
        self.values: dict[int, Tensor] = {
            number: before.values[number]
            if before is not None and before.ranges.get(number) == self.ranges[number]
            else self.new_range(number)
            for number in self.vectors
        }
        """This device's range of each vector's parameters."""
        self._vector_numbers = {
            name: number for number in self.vectors for name in shape.vectors[number].names
        }

    def new_range(self, number: int) -> Tensor:
        """Return uninitialised memory for this device's range of a vector."""
        start, end = self.ranges[number]
        dtype = getattr(torch, self._shape.vectors[number].dtype)
        return torch.empty(end - start, dtype=dtype, device=self._device)

    def release(self, layers: Collection[int]) -> None:
        """Release the values of these layers, after the generation has ended."""
        for number in self.vectors:
            if not set(layers).isdisjoint(self._shape.vectors[number].layers):
                self.values.pop(number, None)
                self.ranges.pop(number, None)

    def value_of(self, one: ParameterSlice) -> Tensor:
        """Return the memory of these elements, which must be this device's."""
        return self.slice_of(self.values, one)

    def slice_of(self, flats: Mapping[int, Tensor], one: ParameterSlice) -> Tensor:
        """Return these elements of tensors that have this device's range of each vector."""
        number = self._vector_numbers[one.name]
        begin = self._shape.vectors[number].parameter_range(one.name)[0] - self.ranges[number][0]
        if not 0 <= begin + one.start <= begin + one.end <= flats[number].numel():
            raise RuntimeError(f"elements {one.start}–{one.end} of {one.name} are not in this shard")
        return flats[number][begin + one.start : begin + one.end]

    def own_slice(self, one: ParameterSlice) -> ParameterSlice | None:
        """Return the intersection of the slice with this device's elements, or ``None`` if it is empty."""
        number = self._vector_numbers.get(one.name)
        if number is None:
            return None
        place = self._shape.vectors[number].parameter_range(one.name)[0]
        first, last = (bound - place for bound in self.ranges[number])
        start, end = max(one.start, first), min(one.end, last)
        return ParameterSlice(name=one.name, start=start, end=end) if start < end else None

    def contains(self, name: str) -> bool:
        """Return whether this device has a shard of the parameter's vector."""
        return name in self._vector_numbers


class StageShards:
    """The shards of one device in one generation; only the main thread calls it.

    :param memory: this device's shards of ``layers``, the stage's layers.
    :param members: the stage's ranks, which include ``communicator.rank``.
    :param same_rows: all devices compute the same rows, so each has the stage's whole gradients.
    :param ungathered: numbers of vectors that no layer gathers to run.
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
        same_rows: bool = False,
        ungathered: Collection[int] = (),
    ) -> None:
        self._shape = shape
        self._members = members
        self._communicator = communicator
        self._monitor = monitor
        self._same_rows = same_rows
        self.memory = memory
        self.vectors, self.ranges, self.values = memory.vectors, memory.ranges, memory.values
        self._frozen = frozenset(n for n in self.vectors if not shape.vectors[n].trained)
        self.gradients = {
            number: torch.zeros_like(value)
            for number, value in self.values.items()
            if number not in self._frozen
        }
        """Sums over the microbatches of the step, and over the devices of the stage as far as they have been
        reduced, of each trained vector.
        """
        tensors = {t.name: t for layer in layers for t in model.tensors_of(layer)}
        self._tensors = {
            number: [tensors[name] for name in shape.vectors[number].names] for number in self.vectors
        }
        around = tuple(range(model.layer_count))
        everywhere = [n for n in self.vectors if len(around) > 1 and shape.vectors[n].layers == around]
        self._everywhere = tuple(everywhere)
        """Vectors used by code that cannot be assigned to one layer: they are whole during all of a forward
        pass.
        """
        self._used: dict[tuple[int, bool], tuple[int, ...]] = {}
        for layer in layers:
            for block in (True, False):
                self._used[layer, block] = tuple(
                    number
                    for number in self.vectors
                    if layer in shape.vectors[number].layers
                    and number not in everywhere
                    and number not in ungathered
                    and any(block in tensor.in_blocks for tensor in self._tensors[number])
                )
        self._anchor = torch.zeros((), requires_grad=True)
        self._whole: dict[int, int] = {}
        """Vectors that are whole for a forward pass, by the address of their storage."""
        self._regathered: dict[int, Tensor] = {}
        """Vectors that are whole for a backward pass."""
        self._prefetched: dict[int, tuple[Tensor, PendingOperation]] = {}
        """Vectors that are being gathered because the next layer needs them."""
        order = [self._used[scope] for scope in model.code_scopes(layers) if self._used[scope]]
        self._after = dict(pairwise(order))
        self._before = dict(pairwise(reversed(order)))
        places = Counter(number for scope in self._used.values() for number in scope)
        self._scopes = {
            number: scope for scope in self._used.values() for number in scope if places[number] == 1
        }
        """All vectors of the code that uses a vector, for vectors that are used in one place only."""
        self._noted: set[int] = set()
        """Vectors that some backward pass needs."""
        self._reductions: deque[_Reduction] = deque()
        self._uses = dict.fromkeys(self.vectors, 0)
        """Number of uses of each vector in forward passes whose backward pass is still to come."""
        self._in_forward = False
        self.on_complete: Callable[[int], None] | None = None
        """Callback for a vector whose gradient of the step's last microbatch has been reduced, while
        ``armed``.
        """
        self.armed = False
        """Whether the next backward pass is the step's last."""
        self._failure: CommunicationError | None = None

    def begin_step(self) -> None:
        """Prepare for the first backward pass of a step."""
        self.armed = False
        self._uses = dict.fromkeys(self.vectors, 0)

    def mark_values_changed(self) -> None:
        """Record that an update has changed ``values``."""

    def end(self) -> None:
        """Release everything but ``memory``: the generation has ended."""
        self.gradients = {}
        self.on_complete = None

    def gradient_of(self, one: ParameterSlice) -> Tensor:
        """Return the memory of the gradients of these elements, which must be this rank's."""
        return self.memory.slice_of(self.gradients, one)

    # --- running layers ----------------------------------------------------------------------------

    @contextmanager
    def forward_pass(self) -> Iterator[None]:
        """Surround a forward pass of some of the stage's layers."""
        hooks = (
            torch.autograd.graph.saved_tensors_hooks(self._save, self._load)
            if torch.is_grad_enabled()
            else nullcontext()
        )
        self._in_forward = True
        try:
            with hooks, self._bound(self._everywhere):
                yield
        finally:
            self._in_forward = False
            self._prefetched.clear()

    @contextmanager
    def gathered(self, layer: int, *, block: bool) -> Iterator[None]:
        """Gather parameters of a layer within this context: those of its block, or those outside of it."""
        vectors = self._used[layer, block]
        if not vectors:
            yield
            return
        with self._bound(vectors):
            self._begin((self._after if self._in_forward else self._before).get(vectors, ()))
            yield

    @contextmanager
    def whole_layer(self, layer: int) -> Iterator[None]:
        """Gather all parameters of a layer within this context, which all devices of the stage must enter."""
        vectors = [
            number
            for number in self.vectors
            if layer in self._shape.vectors[number].layers and number not in self._everywhere
        ]
        with self.forward_pass(), self._bound(tuple(vectors)):
            yield

    @contextmanager
    def _bound(self, vectors: tuple[int, ...]) -> Iterator[None]:
        before: list[tuple[nn.Module, str, Any]] = []
        storages = []
        try:
            for number in vectors:
                whole = self._differentiable(number)
                storages.append(whole.untyped_storage()._cdata)
                self._whole[storages[-1]] = number
                self._bind(number, whole, before)
                del whole
            yield
        finally:
            for module, attribute, value in reversed(before):
                put_parameter(module, attribute, value)
            for storage in storages:
                self._whole.pop(storage, None)

    def _differentiable(self, number: int) -> Tensor:
        if not torch.is_grad_enabled() or number in self._frozen:
            return self.gather(number)
        if self._in_forward:
            self._uses[number] += 1
        whole: Tensor = _Gather.apply(self._anchor, self, number)  # type: ignore[no-untyped-call]
        return whole

    def _bind(self, number: int, whole: Tensor, before: list[tuple[nn.Module, str, Any]]) -> None:
        tensors = self._tensors[number]
        runs = whole.split_with_sizes([t.value.numel() for t in tensors]) if len(tensors) > 1 else (whole,)
        for tensor, run in zip(tensors, runs, strict=True):
            value = run.view(tensor.value.shape)
            for module, attribute in tensor.references:
                before.append((module, attribute, module._parameters[attribute]))
                put_parameter(module, attribute, value)

    def _save(self, tensor: Tensor) -> Any:
        """Return what autograd saves for ``tensor``: a note if it belongs to a gathered vector, else the
        tensor.
        """
        if type(tensor) not in (Tensor, nn.Parameter) or tensor.layout != torch.strided:
            return tensor
        number = self._whole.get(tensor.untyped_storage()._cdata)
        if number is None or tensor.dtype != self.values[number].dtype:
            return tensor
        self._noted.add(number)
        return _Note(number, int(tensor.storage_offset()), tensor.size(), tensor.stride())

    def _load(self, kept: Any) -> Tensor:
        """Return the tensor for a saved note, gathering its vector if necessary."""
        if not isinstance(kept, _Note):
            assert isinstance(kept, Tensor)
            return kept
        if kept.vector not in self._regathered:
            self._regather(kept.vector)
        return self._regathered[kept.vector].as_strided(kept.size, kept.stride, kept.offset)

    def _regather(self, vector: int) -> None:
        """Gather a vector for the backward pass together with those of the same code, in the same order on all
        devices, and free frozen vectors of other code.
        """
        scope = self._scopes.get(vector, (vector,))
        if vector not in self._everywhere:
            for number in self._frozen.intersection(self._regathered).difference(scope, self._everywhere):
                del self._regathered[number]
        for number in scope:
            if number in self._noted and number not in self._regathered:
                self._regathered[number] = self.gather(number)
        self._begin(tuple(number for number in self._before.get(scope, ()) if number in self._noted))

    # --- communication with the stage's other devices ------------------------------------------------

    def gather(self, number: int) -> Tensor:
        """Return the whole vector.

        :raises CommunicationError: the group was aborted, or a peer is lost.
        """
        ahead = self._prefetched.pop(number, None)
        whole, pending = self._post(number) if ahead is None else ahead
        self._wait(pending)
        return whole

    def _begin(self, vectors: tuple[int, ...]) -> None:
        """Begin to gather vectors in parallel with computation."""
        for number in vectors:
            if number not in self._prefetched and number not in self._regathered:
                self._prefetched[number] = self._post(number)

    def _post(self, number: int) -> tuple[Tensor, PendingOperation]:
        own = self.values[number]
        # Allocate new memory each time: after an abort a stuck thread may still write into the old one.
        whole = torch.empty(self._shape.vectors[number].numel, dtype=own.dtype, device=own.device)
        return whole, self._communicator.all_gather(whole, own, self._members)

    def reduce(self, number: int, gradient: Tensor) -> None:
        """Begin to reduce a vector's gradient of one microbatch, which is complete here."""
        self._regathered.pop(number, None)
        self._uses[number] -= 1
        if self._has_whole_gradient(number):
            start, end = self.ranges[number]
            self.gradients[number].add_(gradient.reshape(-1)[start:end])
            self._complete(number)
            return
        self._begin_reducing(number, gradient)

    def _has_whole_gradient(self, number: int) -> bool:
        """Return whether each device computes the whole gradient of a vector, so that no sum is needed."""
        return self._same_rows

    def _begin_reducing(self, number: int, gradient: Tensor) -> None:
        whole, reduced = gradient.contiguous(), self.memory.new_range(number)
        pending = self._communicator.reduce_scatter(reduced, whole, self._members)
        self._reductions.append(_Reduction(number, pending, reduced, whole))
        while len(self._reductions) > _UNDER_WAY:
            self._finish_oldest()

    def end_backward(self) -> None:
        """Finish the reductions of a microbatch's backward pass.

        :raises CommunicationError: the group was aborted, or a peer is lost.
        """
        while self._reductions:
            self._finish_oldest()
        self._regathered.clear()
        self._prefetched.clear()

    def check(self) -> None:
        """Raise the communication error of a forward or backward pass, which autograd may have wrapped.

        :raises CommunicationError: a pass was aborted, or lost a peer.
        """
        if self._failure is not None:
            raise self._failure

    def _finish_oldest(self) -> None:
        oldest = self._reductions.popleft()
        self._wait(oldest.pending)
        self.gradients[oldest.vector].add_(oldest.reduced)
        self._complete(oldest.vector)

    def _complete(self, number: int) -> None:
        """Record that a gradient of a vector was added, and report it if it was the last of the step."""
        reducing = any(one.vector == number for one in self._reductions)
        if self.armed and self.on_complete is not None and not self._uses[number] and not reducing:
            self.on_complete(number)

    def _wait(self, pending: PendingOperation) -> None:
        try:
            self._monitor.wait(self._communicator, pending, "gather")
        except CommunicationError as error:
            self._failure = error  # Autograd may wrap it.
            raise


def put_parameter(module: nn.Module, attribute: str, value: Any) -> None:
    """Set a parameter to any tensor; ``setattr`` accepts only parameters."""
    module._parameters[attribute] = value
    if isinstance(module, nn.RNNBase) and attribute in module._flat_weights_names:
        module._flat_weights[module._flat_weights_names.index(attribute)] = value
