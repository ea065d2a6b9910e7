"""Parts of layers on one rank: the parts that it holds, ranges of them as bytes, and new parts made from
those.

A rank holds its own part of each layer and, with AOR, a replica of another owner's part. Held parts stay as
they are until the first commit under a new plan. New parts are put together from held parts and received
ranges. A part that did not change is the same object, not a copy.
"""

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec
import torch
import xxhash
from torch import Tensor

from planner.values import StatePart
from runtime.device import flat_bytes
from runtime.layers.host_memory import copy_to_host_memory
from runtime.layers.model import Model
from runtime.layers.optimizer import ParameterState, Scalar
from runtime.layers.state import DTYPES, PayloadReader, PayloadTarget, PayloadWriter, StateError
from runtime.precision import dtype_name
from runtime.zero.cells import Fractions
from runtime.zero.parts import ParameterLayout, ParameterSlice, ParameterVector, PartTransfer
from runtime.zero.sharded_optimizer import ShardedOptimization, SliceState
from runtime.zero.shards import ShardMemory
from storage.layerstate import (
    ALIGNMENT_BYTES,
    PART_FORMAT,
    LayerHeader,
    PartEntry,
    PartHeader,
    TensorEntry,
    padded_size,
)

_NUMBERS = frozenset({"step", "eta", "mu", "mu_product"})
"""State that torch's optimizers keep once for a whole parameter; everything else has the parameter's shape,
even if that is ``()``.
"""


@dataclass(slots=True, kw_only=True, eq=False)
class PartState:
    """The state of the part ``(start, end, of)`` of a layer (``runtime.zero.parts``)."""

    layer: int
    start: int
    end: int
    of: int
    replica: bool
    slices: list[SliceState]

    @property
    def fractions(self) -> Fractions:
        return self.start, self.end, self.of

    def to_state_part(self) -> StatePart:
        return StatePart(layer=self.layer, start=self.start, end=self.end, of=self.of, replica=self.replica)


class PartStates:
    """The parts of one rank, and the ranges received for new ones."""

    def __init__(self, model: Model, optimization: ShardedOptimization, shape: ParameterLayout) -> None:
        self._model = model
        self._optimization = optimization
        self._shape = shape
        self._decoder = msgspec.msgpack.Decoder(PartHeader)
        self._kept: list[PartState] = []
        self._index: dict[str, list[tuple[SliceState, bool]]] | None = None
        """Held slices by the parameter's name, with whether each is a replica's; built when needed."""
        self._layers_of = {name: vector.layers for vector in shape.vectors for name in vector.names}
        self.complete: set[int] = set()
        """Layers whose parameters are whole in the model."""
        self._received: dict[str, list[SliceState]] = {}

    # --- held parts ----------------------------------------------------------------------------------

    def hold_whole(self, layers: Iterable[int]) -> None:
        """Hold all of these layers, which were created whole, with the optimizer's state of all elements.

        Parameters shared with earlier layers belong to the first of those that are present.
        """
        here = sorted(layers)
        self.held = [
            PartState(
                layer=layer,
                start=0,
                end=1,
                of=1,
                replica=False,
                slices=[
                    SliceState(
                        slice=one,
                        state=_flattened(self._optimization.whole_states.get(one.name, {})),
                        trained=vector.trained,
                    )
                    for vector in self._shape.vectors_of_layer(layer, tied=True)
                    if layer == min(set(here).intersection(vector.layers))
                    for one in vector.slices(0, vector.numel)
                ],
            )
            for layer in here
        ]
        self._optimization.whole_states = {}

    def make_part(
        self, layer: int, vectors: Iterable[ParameterVector], part: Fractions, *, replica: bool = False
    ) -> PartState:
        """Return a part of ``vectors``, put together from held and received state.

        :raises StateError: some of it is missing, or its slices contradict each other.
        """
        start, end, of = part
        slices = []
        for vector in vectors:
            for one in vector.slices(*vector.part_range(start, end, of)):
                state = self._state_of(one, host=replica) if vector.trained else {}
                value = self._optimization.value_of(one)
                if replica and vector.trained:
                    kept: Tensor | None = value.to("cpu", copy=True)
                else:
                    kept = value if self._optimization.in_shards(one.name) else None
                slices.append(SliceState(slice=one, state=state, value=kept, trained=vector.trained))
        return PartState(layer=layer, start=start, end=end, of=of, replica=replica, slices=slices)

    def park(self, layers: Collection[int]) -> None:
        """Move the held parts of these layers to host memory; what replicas update is there already."""
        for part in self._kept:
            if part.layer not in layers:
                continue
            for one in part.slices:
                if one.parked or (part.replica and one.trained):
                    continue
                for key, value in one.state.items():
                    if isinstance(value, Tensor) and value.dim():
                        one.state[key] = copy_to_host_memory(value)
                if one.value is not None:
                    one.value = copy_to_host_memory(one.value)
                one.parked = True

    def drop(self, layers: Collection[int]) -> None:
        """Release the held parts of these layers, replicas included.

        Elements that a layer shares with one that stays are kept with the latter's part.
        """
        kept = [part for part in self._kept if part.layer not in layers]
        for part in self._kept:
            if part.layer not in layers:
                continue
            for other in kept:
                if (other.fractions, other.replica) == (part.fractions, part.replica):
                    known = {one.slice for one in other.slices}
                    other.slices += [
                        one
                        for one in part.slices
                        if other.layer in self._layers_of[one.slice.name] and one.slice not in known
                    ]
        self.held = kept

    def discard_received(self, vectors: Iterable[ParameterVector]) -> None:
        """Release the optimizer's state that was received for these vectors."""
        for vector in vectors:
            for name in vector.names:
                self._received.pop(name, None)

    def hold_restored(
        self,
        header: LayerHeader,
        values: Mapping[str, tuple[ParameterSlice, Tensor]],
        vectors: Collection[ParameterVector],
        parts: Iterable[Fractions],
        shards: ShardMemory | None,
    ) -> list[PayloadTarget]:
        """Hold parts of a layer whose values and optimizer state are about to be restored.

        :param header: header of the whole layer.
        :param values: the elements that this rank has of each parameter, with their memory.
        :param vectors: vectors of which it keeps optimizer state with the layer.
        :param shards: memory of the values if the stage shards.
        :returns: the tensors to fill, buffers included, ascending by the offset of their bytes in the layer's
            payload.
        :raises StateError: the optimizer's state cannot be divided.
        """
        layer = header.layer
        buffers = {t.name: t.value.detach() for t in self._model.tensors_of(layer) if t.kind == "buffer"}
        kept: dict[str, list[SliceState]] = {}
        for start, end, of in parts:
            slices = [
                SliceState(
                    slice=one,
                    state=dict(header.scalars.get(one.name, {})),
                    value=None if shards is None else shards.value_of(one),
                    trained=vector.trained,
                )
                for vector in vectors
                for one in vector.slices(*vector.part_range(start, end, of))
            ]
            for own in slices:
                kept.setdefault(own.slice.name, []).append(own)
            part = PartState(layer=layer, start=start, end=end, of=of, replica=False, slices=slices)
            self.held = [*self.held, part]
        targets: list[PayloadTarget] = []
        for entry in header.entries:
            if entry.name in buffers:
                targets.append((entry.offset, buffers[entry.name]))
            elif entry.role == "optimizer":
                targets += [self._restored_target(entry, own) for own in kept.get(entry.name, ())]
            elif entry.name in values:
                one, value = values[entry.name]
                targets.append((entry.offset + one.start * value.element_size(), value))
        return targets

    def _restored_target(self, entry: TensorEntry, own: SliceState) -> PayloadTarget:
        """Add uninitialised optimizer state to a slice that is restored; return it with the offset of its bytes."""
        dtype, start, count = DTYPES[entry.dtype], own.slice.start, own.slice.end - own.slice.start
        if not entry.shape and entry.key in _NUMBERS:
            device = self._optimization.device_of_state(entry.name, scalar=True)
            tensor = torch.empty((), dtype=dtype, device=device)
            start = 0
        elif math.prod(entry.shape) == self._optimization.whole_slice(entry.name).end:
            tensor = torch.empty(count, dtype=dtype, device=self._model.device)
        else:
            raise StateError(f"{entry.key} of {entry.name} has shape {entry.shape}: it cannot be cut")
        own.state[entry.key] = tensor
        return entry.offset + start * dtype.itemsize, tensor

    def copy_held_values(self, vectors: Iterable[ParameterVector], complete: Collection[int]) -> None:
        """Copy held values to the elements of ``vectors`` that this rank computes with."""
        for vector in vectors:
            for name in vector.names:
                whole = not set(complete).isdisjoint(vector.layers) and self._optimization.has_memory(name)
                for one, value in self._held_values(name, whole=whole):
                    own = self._optimization.own_slice(one)
                    if own is None:
                        continue
                    target = self._optimization.value_of(own)
                    source = value[own.start - one.start : own.end - one.start]
                    if target.data_ptr() != source.data_ptr():
                        target.copy_(source)

    def _held_values(self, name: str, *, whole: bool) -> Iterator[tuple[ParameterSlice, Tensor]]:
        """Yield the values of a parameter that are present; later ones take precedence."""
        if whole:
            parameter = self._optimization.whole_slice(name)
            yield parameter, self._optimization.parameter_slice(parameter)
            return
        for wanted in (True, False):
            for one, replica in self._held_slices(name):
                if replica is wanted:
                    yield one.slice, self._value_of(one)

    def _held_slices(self, name: str) -> list[tuple[SliceState, bool]]:
        """Return the held slices of a parameter, with whether each is a replica's."""
        if self._index is None:
            self._index = {}
            for part in self._kept:
                for one in part.slices:
                    self._index.setdefault(one.slice.name, []).append((one, part.replica))
        return self._index.get(name, [])

    @property
    def held(self) -> list[PartState]:
        """Parts at the committed step. While a new layout has no commit, some state is held more than once."""
        return self._kept

    @held.setter
    def held(self, parts: list[PartState]) -> None:
        self._kept, self._index = parts, None

    def _value_of(self, one: SliceState) -> Tensor:
        """Return the values of a held slice."""
        return self._optimization.parameter_slice(one.slice) if one.value is None else one.value

    def _source(self, one: ParameterSlice) -> Tensor:
        """Return the values of elements that are held.

        :raises StateError: the parts are not held here.
        """
        there = self.complete.intersection(self._layers_of[one.name])
        if there and self._model.held_layers.isdisjoint(there):
            self._model.provide([min(there)])
            self._optimization.refresh_parameters()
        whole = bool(there)
        covering = [
            value[one.start - there.start : one.end - there.start]
            for there, value in self._held_values(one.name, whole=whole)
            if there.start <= one.start and one.end <= there.end
        ]
        if not covering:
            raise StateError(f"elements {one.start}–{one.end} of {one.name} are not held here")
        return covering[-1]

    def digest(self, part: PartState) -> bytes:
        """Return a digest of 16 bytes over trained values and optimizer state, which an owner and its replica
        share.
        """
        digest = xxhash.xxh3_128()
        for one in part.slices:
            if not one.trained:
                continue
            value = self._value_of(one)
            tensors: dict[str, Tensor | Scalar] = {"": value, **one.state}
            for key in sorted(tensors):
                found = tensors[key]
                digest.update(f"{one.slice.name}:{one.slice.start}:{key};".encode())
                if isinstance(found, Tensor):
                    digest.update(flat_bytes(self._model.runtime.to_host(found)).numpy().data)
                else:
                    digest.update(repr(found).encode())
        return digest.digest()

    # --- as bytes --------------------------------------------------------------------------------

    def open_send(self, item: PartTransfer) -> PayloadReader:
        """Return a reader of the elements, which must not change while they are read.

        :raises StateError: the state is not held here.
        """
        return PayloadReader(*self._describe(item))

    def open_receive(self, item: PartTransfer, header: bytes, size_bytes: int) -> PayloadWriter:
        """Return a writer of parameters and buffers into the model, and of optimizer state into host memory, where
        it stays until ``discard_received``.

        :raises StateError: it is not what the transfer announced, or does not fit this model; nothing was
            changed.
        """
        try:
            decoded = self._decoder.decode(header)
        except msgspec.DecodeError as error:
            raise StateError(f"malformed header: {error}") from error
        self._check(item, decoded, size_bytes)
        if item.content == "rest":
            values = {tensor.name: tensor.value.detach() for tensor in self._model.tensors_of(item.layer)}
            tensors = [values[entry.name] for entry in decoded.entries]
            return PayloadWriter(
                zip(decoded.entries, tensors, strict=True), lambda: self._continue_from(decoded)
            )
        slices = self._slices_of(item)
        if item.content == "parameters":
            tensors = [self._optimization.value_of(one) for one in slices]
            return PayloadWriter(zip(decoded.entries, tensors, strict=True), lambda: None)
        states: dict[str, ParameterState] = {
            one.name: dict(decoded.scalars.get(one.name, {})) for one in slices
        }
        tensors = []
        for entry in decoded.entries:
            shape = () if entry.count is None else (entry.count,)
            tensors.append(torch.empty(shape, dtype=DTYPES[entry.dtype]))
            states[entry.name][entry.key] = tensors[-1]

        def take() -> None:
            for one in slices:
                self._received.setdefault(one.name, []).append(SliceState(slice=one, state=states[one.name]))

        return PayloadWriter(zip(decoded.entries, tensors, strict=True), take)

    # --- helpers -------------------------------------------------------------------------------------

    def _slices_of(self, transfer: PartTransfer) -> tuple[ParameterSlice, ...]:
        return self._shape.vectors[transfer.vector].slices(transfer.start, transfer.end)

    def _describe(self, transfer: PartTransfer) -> tuple[PartHeader, list[Tensor]]:
        found: list[tuple[PartEntry, Tensor]] = []
        scalars: dict[str, dict[str, Scalar]] = {}
        end = 0

        def add(one: ParameterSlice, role: str, key: str, tensor: Tensor) -> None:
            nonlocal end
            entry = PartEntry(
                name=one.name,
                role=role,  # type: ignore[arg-type]
                key=key,
                dtype=dtype_name(tensor.dtype),
                start=one.start,
                count=None if key and tensor.dim() == 0 else tensor.numel(),
                offset=end,
                size_bytes=tensor.nbytes,
            )
            found.append((entry, tensor))
            end += padded_size(entry.size_bytes)

        if transfer.content == "rest":
            for shared in self._model.tensors_of(transfer.layer):
                if shared.kind == "buffer":
                    whole = ParameterSlice(name=shared.name, start=0, end=shared.value.numel())
                    add(whole, shared.kind, "", shared.value.detach())
        else:
            for one in self._slices_of(transfer):
                if transfer.content == "parameters":
                    add(one, "parameter", "", self._source(one))
                    continue
                for key, value in _narrowed(self._covering(one), one).items():
                    if isinstance(value, Tensor):
                        add(one, "optimizer", key, value)
                    else:
                        scalars.setdefault(one.name, {})[key] = value
        header = PartHeader(
            layer=transfer.layer,
            entries=tuple(entry for entry, _ in found),
            scalars=scalars,
            schedule=self._optimization.schedule() if transfer.content == "rest" else None,
            size_bytes=end,
        )
        return header, [tensor for _, tensor in found]

    def _covering(self, one: ParameterSlice) -> SliceState:
        for mine, _ in self._held_slices(one.name):
            if mine.slice.start <= one.start and one.end <= mine.slice.end:
                return mine
        raise StateError(f"elements {one.start}–{one.end} of {one.name} are not held here")

    def _state_of(self, one: ParameterSlice, *, host: bool) -> ParameterState:
        kept = self._held_slices(one.name)
        sources: list[SliceState] = [*(source for source, _ in kept), *self._received.get(one.name, ())]
        own = [source for source, replica in kept if not replica]
        if not host:
            here = self._model.device.type == "cpu"
            for source in sources:
                if source.slice == one and not source.parked and (here or source in own):
                    return source.state
        return self._joined(one, sources, host=host)

    def _joined(self, one: ParameterSlice, sources: Sequence[SliceState], *, host: bool) -> ParameterState:
        """Return a new state, joined from slices that cover ``one``, some of it perhaps more than once."""
        device, scalar_device = (
            torch.device("cpu") if host else self._optimization.device_of_state(one.name, scalar=scalar)
            for scalar in (False, True)
        )
        joined: ParameterState = {}
        done = one.start
        while done < one.end:
            source = next((p for p in sources if p.slice.start <= done < p.slice.end), None)
            if source is None:
                raise StateError(f"no rank sent the optimizer's state of element {done} of {one.name}")
            part = ParameterSlice(name=one.name, start=done, end=min(one.end, source.slice.end))
            state = _narrowed(source, part)
            if done > one.start and set(state) != set(joined):
                raise StateError(f"the optimizer's state has different keys for parts of {one.name}")
            for key, value in state.items():
                if not isinstance(value, Tensor):
                    known = joined.setdefault(key, value)
                    same = known == value
                elif value.dim() == 0:
                    found = joined.setdefault(key, value.to(scalar_device, copy=True))
                    same = isinstance(found, Tensor) and bool(found.cpu() == value.cpu())
                else:
                    if key not in joined:
                        joined[key] = torch.empty(one.end - one.start, dtype=value.dtype, device=device)
                    target, same = joined[key], True
                    assert isinstance(target, Tensor)
                    target[done - one.start : part.end - one.start].copy_(value)
                if not same:
                    raise StateError(f"{key} of parts of {one.name} differs: they are from different steps")
            done = part.end
        return joined

    def _continue_from(self, header: PartHeader) -> None:
        """Continue from the schedule that came with the rest of a layer."""
        if header.schedule is None:
            raise StateError(f"layer {header.layer} was received without its schedule")
        try:
            self._optimization.set_schedule(header.schedule)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise StateError(f"layer {header.layer}: {error}") from error

    def _check(self, transfer: PartTransfer, header: PartHeader, size_bytes: int) -> None:
        place = f"layer {transfer.layer}, {transfer.content} of elements {transfer.start}–{transfer.end}"
        if (header.format, header.layer) != (PART_FORMAT, transfer.layer):
            raise StateError(f"{place}: received format {header.format} of layer {header.layer}")
        if size_bytes != header.size_bytes:
            raise StateError(f"{place}: a payload of {size_bytes} bytes, {header.size_bytes} in the header")
        end = 0
        for entry in header.entries:
            _check_entry(place, entry, end)
            end = entry.offset + entry.size_bytes
        slices = () if transfer.content == "rest" else self._slices_of(transfer)
        if end > header.size_bytes or not self._is_expected(transfer, header, slices):
            raise StateError(f"{place}: this model has something else there")
        if not set(header.scalars) <= {one.name for one in slices}:
            raise StateError(f"{place}: optimizer state for {', '.join(sorted(header.scalars))}")

    def _is_expected(
        self, transfer: PartTransfer, header: PartHeader, slices: Sequence[ParameterSlice]
    ) -> bool:
        came = [(e.name, e.role, e.key, e.start, e.count, e.dtype) for e in header.entries]
        if transfer.content == "optimizer":
            ranges = {one.name: (one.start, one.end - one.start) for one in slices}
            fitting = (
                role == "optimizer"
                and key
                and name in ranges
                and (start, ranges[name][1] if count is None else count) == ranges[name]
                for name, role, key, start, count, _ in came
            )
            return all(fitting) and len({one[:3] for one in came}) == len(came)
        if transfer.content == "parameters":
            dtype = self._shape.vectors[transfer.vector].dtype
            return came == [(s.name, "parameter", "", s.start, s.end - s.start, dtype) for s in slices]
        return came == [
            (t.name, t.kind, "", 0, t.value.numel(), dtype_name(t.value.dtype))
            for t in self._model.tensors_of(transfer.layer)
            if t.kind == "buffer"
        ]


def _check_entry(place: str, entry: PartEntry, end: int) -> None:
    dtype = DTYPES.get(entry.dtype)
    if dtype is None:
        raise StateError(f"{place}: unknown dtype {entry.dtype!r}")
    count = 1 if entry.count is None else entry.count
    if count < 0 or entry.size_bytes != count * dtype.itemsize:
        raise StateError(f"{place}: {entry.size_bytes} bytes cannot be {entry.count} of {entry.dtype}")
    if entry.offset < end or entry.offset % ALIGNMENT_BYTES:
        raise StateError(f"{place}: {entry.name} {entry.key} overlaps what comes before it")


def _flattened(state: ParameterState) -> ParameterState:
    """Return the state as the optimizer keeps it for a slice, which has one dimension."""
    return {
        key: value.reshape(-1)
        if isinstance(value, Tensor) and (value.dim() or key not in _NUMBERS)
        else value
        for key, value in state.items()
    }


def _narrowed(source: SliceState, one: ParameterSlice) -> ParameterState:
    """Return views of the state that ``source``, which covers the slice, has for it.

    :raises StateError: a tensor does not have one element for each of the parameter's.
    """
    start, end = one.start - source.slice.start, one.end - source.slice.start
    found: ParameterState = {}
    for key, value in source.state.items():
        if isinstance(value, Tensor) and value.dim() > 0:
            if value.numel() != source.slice.end - source.slice.start:
                raise StateError(f"{key} of {one.name} has {tuple(value.shape)} elements: it cannot be cut")
            found[key] = value.detach().view(-1)[start:end]
        else:
            found[key] = value.detach() if isinstance(value, Tensor) else value
    return found
