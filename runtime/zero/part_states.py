"""Parts of layers on one rank: what is kept of each, ranges of them as bytes, and new parts out of those.

A rank keeps its own part of each layer and, with AOR, a replica of the next one's. What it kept stays as it
is until the first commit under a new plan; new parts are put together from what is kept and what was
received, range by range. A part that did not change is the same objects, not a copy.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import msgspec
import torch
import xxhash
from torch import Tensor

from runtime.layers.model import Model
from runtime.layers.optimizer import ParameterState, Scalar
from runtime.layers.state import DTYPES, StateError
from runtime.wire.protocol import StatePartData
from runtime.zero.parts import Move, Shape, Slice
from runtime.zero.sharded_optimizer import ShardedOptimization, SliceState
from storage.layerstate import ALIGNMENT_BYTES
from storage.partstate import PART_FORMAT, PartEntry, PartHeader

_NUMBERS = frozenset({"step", "eta", "mu", "mu_product"})
"""What torch's optimizers keep once for a whole parameter; all else has its shape, be that ``()``."""


@dataclass(slots=True, kw_only=True, eq=False)
class PartState:
    """Part ``part`` of ``parts`` of a layer."""

    layer: int
    part: int
    parts: int
    replica: bool
    slices: list[SliceState]

    def said(self) -> StatePartData:
        return StatePartData(layer=self.layer, part=self.part, parts=self.parts, replica=self.replica)


class PartStates:
    """The parts of one rank, and what has arrived for new ones."""

    def __init__(self, model: Model, optimization: ShardedOptimization, shape: Shape) -> None:
        self._model = model
        self._optimization = optimization
        self._shape = shape
        self._decoder = msgspec.msgpack.Decoder(PartHeader)
        self.kept: list[PartState] = []
        """At the committed step; some of it more than once while a new layout has no commit."""
        self._arrived: dict[str, list[SliceState]] = {}

    # --- what is kept ----------------------------------------------------------------------------

    def keep_whole(self, layers: Iterable[int]) -> None:
        """These layers were made or restored whole, with the optimizer's state of all of their elements."""
        self.kept = [
            PartState(
                layer=layer,
                part=0,
                parts=1,
                replica=False,
                slices=[
                    SliceState(slice=one, state=_flattened(self._optimization.whole.get(one.name, {})))
                    for vector in self._shape.of_layer(layer)
                    for one in vector.slices(0, vector.numel)
                ],
            )
            for layer in layers
        ]
        self._optimization.whole = {}

    def cut(self, layer: int, part: int, parts: int, *, replica: bool) -> PartState:
        """The part, put together from what is kept and what has arrived.

        :raises StateError: some of it is nowhere, or its pieces contradict each other.
        """
        slices = []
        for vector in self._shape.of_layer(layer):
            for one in vector.slices(*vector.part(part, parts)):
                state = self._state_of(one, host=replica)
                value = self._optimization.value_of(one).to("cpu", copy=True) if replica else None
                slices.append(SliceState(slice=one, state=state, value=value))
        return PartState(layer=layer, part=part, parts=parts, replica=replica, slices=slices)

    def forget_arrived(self) -> None:
        self._arrived = {}

    def fill_from_replicas(self, complete: Collection[int]) -> None:
        """Parameters that are not whole here get what the replicas know of them."""
        for part in self.kept:
            if part.replica and part.layer not in complete:
                for one in part.slices:
                    assert one.value is not None
                    self._optimization.value_of(one.slice).copy_(one.value)

    def digest(self, part: PartState) -> bytes:
        """16 bytes of values and optimizer state: the same with the owner and with its replica."""
        digest = xxhash.xxh3_128()
        for one in part.slices:
            value = self._optimization.value_of(one.slice) if one.value is None else one.value
            tensors: dict[str, Tensor | Scalar] = {"": value, **one.state}
            for key in sorted(tensors):
                found = tensors[key]
                digest.update(f"{one.slice.name}:{one.slice.start}:{key};".encode())
                if isinstance(found, Tensor):
                    digest.update(_flat_bytes(found.detach().cpu()).numpy().data)
                else:
                    digest.update(repr(found).encode())
        return digest.digest()

    # --- as bytes --------------------------------------------------------------------------------

    def state_bytes(self, move: Move) -> int:
        """Of the payload, without making it."""
        header, _ = self._describe(move)
        return header.size_bytes

    def pack(self, move: Move) -> tuple[bytes, Tensor]:
        """Header and payload, a copy in host memory.

        :raises StateError: it is not here.
        """
        header, tensors = self._describe(move)
        payload = torch.zeros(header.size_bytes, dtype=torch.uint8)
        for entry, tensor in zip(header.entries, tensors, strict=True):
            _view(payload, entry).copy_(tensor.reshape(-1))
        return msgspec.msgpack.encode(header), payload

    def unpack(self, move: Move, header: bytes, payload: Tensor) -> None:
        """Parameters and buffers into the model, the optimizer's state to what has arrived.

        :raises StateError: it is not what ``move`` says, or does not fit this model; nothing was changed.
        """
        try:
            decoded = self._decoder.decode(header)
        except msgspec.DecodeError as error:
            raise StateError(f"malformed header: {error}") from error
        self._check(move, decoded, payload)
        if move.what == "rest":
            self._take_rest(move.layer, decoded, payload)
            return
        views: dict[str, dict[str, Tensor | Scalar]] = {}
        for entry in decoded.entries:
            view = _view(payload, entry)
            views.setdefault(entry.name, {})[entry.key] = view.view(()) if entry.count is None else view
        for one in self._slices_of(move):
            if move.what == "parameters":
                value = views[one.name][""]
                assert isinstance(value, Tensor)
                self._optimization.value_of(one).copy_(value)
            else:
                state: ParameterState = dict(views.get(one.name, {}))
                state |= decoded.scalars.get(one.name, {})
                self._arrived.setdefault(one.name, []).append(SliceState(slice=one, state=state))

    # --- inside ----------------------------------------------------------------------------------

    def _slices_of(self, move: Move) -> tuple[Slice, ...]:
        return self._shape.vectors[move.vector].slices(move.start, move.end)

    def _describe(self, move: Move) -> tuple[PartHeader, list[Tensor]]:
        found: list[tuple[PartEntry, Tensor]] = []
        scalars: dict[str, dict[str, Scalar]] = {}
        end = 0

        def add(one: Slice, role: str, key: str, tensor: Tensor) -> None:
            nonlocal end
            entry = PartEntry(
                name=one.name,
                role=role,  # type: ignore[arg-type]
                key=key,
                dtype=str(tensor.dtype).removeprefix("torch."),
                start=one.start,
                count=None if key and tensor.dim() == 0 else tensor.numel(),
                offset=end,
                size_bytes=tensor.numel() * tensor.element_size(),
            )
            found.append((entry, tensor))
            end += entry.size_bytes + -entry.size_bytes % ALIGNMENT_BYTES

        if move.what == "rest":
            for shared in self._model.tensors_of(move.layer):
                if not shared.trainable:
                    whole = Slice(name=shared.name, start=0, end=shared.value.numel())
                    add(whole, shared.kind, "", shared.value.detach())
        else:
            for one in self._slices_of(move):
                if move.what == "parameters":
                    add(one, "parameter", "", self._optimization.value_of(one))
                    continue
                for key, value in _narrowed(self._covering(one), one).items():
                    if isinstance(value, Tensor):
                        add(one, "optimizer", key, value)
                    else:
                        scalars.setdefault(one.name, {})[key] = value
        header = PartHeader(
            layer=move.layer,
            entries=tuple(entry for entry, _ in found),
            scalars=scalars,
            schedule=self._optimization.schedule() if move.what == "rest" else None,
            size_bytes=end,
        )
        return header, [tensor for _, tensor in found]

    def _covering(self, one: Slice) -> SliceState:
        for part in self.kept:
            for mine in part.slices:
                if (
                    mine.slice.name == one.name
                    and mine.slice.start <= one.start
                    and one.end <= mine.slice.end
                ):
                    return mine
        raise StateError(f"elements {one.start}–{one.end} of {one.name} are not kept here")

    def _state_of(self, one: Slice, *, host: bool) -> ParameterState:
        kept = [mine for part in self.kept for mine in part.slices if mine.slice.name == one.name]
        pieces: list[SliceState] = [*kept, *self._arrived.get(one.name, ())]
        if not host:
            here = self._model.device.type == "cpu"
            for piece in pieces:
                if piece.slice == one and (here or (piece in kept and piece.value is None)):
                    return piece.state
        return self._joined(one, pieces, host=host)

    def _joined(self, one: Slice, pieces: Sequence[SliceState], *, host: bool) -> ParameterState:
        """A state of its own, from pieces that cover the slice, some of it perhaps more than once."""
        device = torch.device("cpu") if host else self._model.device
        beside = device if not host and self._optimization.on_device(one.name) else torch.device("cpu")
        joined: ParameterState = {}
        done = one.start
        while done < one.end:
            piece = next((p for p in pieces if p.slice.start <= done < p.slice.end), None)
            if piece is None:
                raise StateError(f"nobody sent the optimizer's state of element {done} of {one.name}")
            part = Slice(name=one.name, start=done, end=min(one.end, piece.slice.end))
            state = _narrowed(piece, part)
            if done > one.start and set(state) != set(joined):
                raise StateError(f"the optimizer keeps different things for parts of {one.name}")
            for key, value in state.items():
                if not isinstance(value, Tensor):
                    known = joined.setdefault(key, value)
                    same = known == value
                elif value.dim() == 0:
                    found = joined.setdefault(key, value.to(beside, copy=True))
                    same = isinstance(found, Tensor) and bool(found.cpu() == value.cpu())
                else:
                    if key not in joined:
                        joined[key] = torch.empty(one.end - one.start, dtype=value.dtype, device=device)
                    target, same = joined[key], True
                    assert isinstance(target, Tensor)
                    target[done - one.start : part.end - one.start].copy_(value)
                if not same:
                    raise StateError(f"{key} of parts of {one.name} differs: they are not of one step")
            done = part.end
        return joined

    def _take_rest(self, layer: int, header: PartHeader, payload: Tensor) -> None:
        if header.schedule is None:
            raise StateError(f"layer {layer} came without its schedule")
        try:
            self._optimization.set_schedule(header.schedule)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise StateError(f"layer {layer}: {error}") from error
        values = {tensor.name: tensor.value for tensor in self._model.tensors_of(layer)}
        with torch.no_grad():
            for entry in header.entries:
                target = values[entry.name]
                target.copy_(_view(payload, entry).view(target.shape))

    def _check(self, move: Move, header: PartHeader, payload: Tensor) -> None:
        place = f"layer {move.layer}, {move.what} of elements {move.start}–{move.end}"
        if (header.format, header.layer) != (PART_FORMAT, move.layer):
            raise StateError(f"{place}: format {header.format} of layer {header.layer} came")
        if payload.dtype != torch.uint8 or payload.dim() != 1 or payload.numel() != header.size_bytes:
            raise StateError(
                f"{place}: a payload of {payload.numel()} bytes, {header.size_bytes} in the header"
            )
        end = 0
        for entry in header.entries:
            _check_entry(place, entry, end)
            end = entry.offset + entry.size_bytes
        slices = () if move.what == "rest" else self._slices_of(move)
        if end > header.size_bytes or not self._is_expected(move, header, slices):
            raise StateError(f"{place}: it is not what this model has there")
        if not set(header.scalars) <= {one.name for one in slices}:
            raise StateError(f"{place}: optimizer state for {', '.join(sorted(header.scalars))}")

    def _is_expected(self, move: Move, header: PartHeader, slices: Sequence[Slice]) -> bool:
        came = [(e.name, e.role, e.key, e.start, e.count, e.dtype) for e in header.entries]
        if move.what == "optimizer":
            ranges = {one.name: (one.start, one.end - one.start) for one in slices}
            fitting = (
                role == "optimizer"
                and key
                and name in ranges
                and (start, ranges[name][1] if count is None else count) == ranges[name]
                for name, role, key, start, count, _ in came
            )
            return all(fitting) and len({one[:3] for one in came}) == len(came)
        if move.what == "parameters":
            dtype = self._shape.vectors[move.vector].dtype
            return came == [(s.name, "parameter", "", s.start, s.end - s.start, dtype) for s in slices]
        return came == [
            (t.name, t.kind, "", 0, t.value.numel(), str(t.value.dtype).removeprefix("torch."))
            for t in self._model.tensors_of(move.layer)
            if not t.trainable
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
    """As the optimizer keeps it for a slice, which has one dimension."""
    return {
        key: value.reshape(-1)
        if isinstance(value, Tensor) and (value.dim() or key not in _NUMBERS)
        else value
        for key, value in state.items()
    }


def _narrowed(piece: SliceState, one: Slice) -> ParameterState:
    """What the piece, which covers the slice, has for it: views.

    :raises StateError: a tensor has not an element for each of the parameter's.
    """
    start, end = one.start - piece.slice.start, one.end - piece.slice.start
    found: ParameterState = {}
    for key, value in piece.state.items():
        if isinstance(value, Tensor) and value.dim() > 0:
            if value.numel() != piece.slice.end - piece.slice.start:
                raise StateError(f"{key} of {one.name} has {tuple(value.shape)} elements: it cannot be cut")
            found[key] = value.detach().view(-1)[start:end]
        else:
            found[key] = value.detach() if isinstance(value, Tensor) else value
    return found


def _view(payload: Tensor, entry: PartEntry) -> Tensor:
    return payload[entry.offset : entry.offset + entry.size_bytes].view(DTYPES[entry.dtype])


def _flat_bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)
