"""One layer's whole state as bytes, which are sent to a rank that becomes an owner of the layer.

``pack`` returns a header (msgpack: what the bytes are, and everything that is not a tensor) and a payload
(one contiguous uint8 tensor in host memory). ``unpack`` checks the header against the model before it
changes anything, then fills the layer. The state consists of parameters (trainable or not), persistent
buffers, the optimizer's state of each parameter, group options and the schedule. No pickle is used.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator
from typing import Literal

import msgspec
import torch
from torch import Tensor

from runtime.device import DeviceRuntime, flat_bytes
from runtime.layers.host_memory import allocate_host_memory
from runtime.layers.model import Model, ModelTensor
from runtime.layers.optimizer import Optimization, ParameterState, Scalar, state_tensors
from runtime.precision import dtype_name
from storage.errors import CorruptDataError
from storage.layerstate import (
    ALIGNMENT_BYTES,
    DTYPE_BYTES,
    HEADER_FORMAT,
    LayerHeader,
    PartEntry,
    PartHeader,
    TensorEntry,
    decode_header,
    padded_size,
)

DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in DTYPE_BYTES}


class StateError(ValueError):
    """State sent by a peer that does not belong to this layer of this model."""


Entry = TensorEntry | PartEntry
_States = dict[str, ParameterState]
PayloadTarget = tuple[int, Tensor]
"""The offset of a tensor's bytes in a payload, and the tensor."""
ReusedMemory = dict[int, tuple[str, str]]
"""Parameter and state key for which memory was reused, by its address."""


def host_entries(header: LayerHeader) -> set[tuple[str, str]]:
    """Return name and key of the optimizer state that belongs in host memory on any device.

    State with the parameter's shape that was there only because its parameter was, in training on CPUs, belongs
    with the parameter.
    """
    on_host = {entry.name for entry in header.entries if entry.role == "parameter" and entry.on_host}
    return {
        (entry.name, entry.key)
        for entry in header.entries
        if entry.role == "optimizer" and entry.on_host and not (entry.shape and entry.name in on_host)
    }


class LayerStates:
    """Packing and filling of the layers of one model and its optimizer."""

    def __init__(self, model: Model, optimization: Optimization) -> None:
        self._model = model
        self._optimization = optimization

    @property
    def runtime(self) -> DeviceRuntime:
        """Runtime of the device that the layers are on."""
        return self._model.runtime

    def describe(self, layer: int) -> tuple[LayerHeader, list[Tensor]]:
        """Return the header that ``pack`` would return, and the tensor of each entry, not copied."""
        self._check_held(layer)
        found: list[tuple[TensorEntry, Tensor]] = []
        scalars: dict[str, dict[str, Scalar]] = {}
        end = 0

        def add(
            name: str, role: Literal["parameter", "buffer", "optimizer"], key: str, value: Tensor
        ) -> None:
            nonlocal end
            tensor = value.detach()
            entry = TensorEntry(
                name=name,
                role=role,
                key=key,
                dtype=dtype_name(tensor.dtype),
                shape=tuple(tensor.shape),
                on_host=tensor.device.type == "cpu",
                offset=end,
                size_bytes=tensor.nbytes,
            )
            found.append((entry, tensor))
            end += padded_size(entry.size_bytes)

        for shared in self._model.tensors_of(layer):
            add(shared.name, shared.kind, "", shared.value)
            if not shared.trainable:
                continue
            for key, value in self._optimization.parameter_state(shared.name).items():
                if isinstance(value, Tensor):
                    add(shared.name, "optimizer", key, value)
                else:
                    scalars.setdefault(shared.name, {})[key] = value
        header = LayerHeader(
            format=HEADER_FORMAT,
            layer=layer,
            entries=tuple(entry for entry, _ in found),
            scalars=scalars,
            schedule=self._optimization.schedule(),
            size_bytes=end,
        )
        return header, [tensor for _, tensor in found]

    def frozen_parameters(self, layer: int) -> frozenset[str]:
        """Return the names of the layer's parameters that training does not change."""
        tensors = self._model.tensors_of(layer)
        return frozenset(t.name for t in tensors if t.kind == "parameter" and not t.trainable)

    def pack(self, layer: int) -> tuple[bytes, Tensor]:
        """Return the header and a copy of the payload in host memory."""
        reader = self.reader(layer)
        payload = allocate_host_memory(reader.size_bytes, self._model.device)
        reader.read_into(payload)
        return reader.header, payload

    def reader(self, layer: int) -> "PayloadReader":
        """Return a reader of what ``pack`` would return. The layer must not change while it is read."""
        return PayloadReader(*self.describe(layer))

    def writer(self, layer: int, header: bytes, payload_bytes: int, complete: set[int]) -> "PayloadWriter":
        """Hold ``layer`` and return a writer that fills it.

        :param complete: layers to which this one is added when all of it has arrived.
        :raises StateError: the header does not fit this model or the payload; nothing was changed.
        """
        targets, states = self._allocate(layer, header, payload_bytes, None)

        def take() -> None:
            self._take(states)
            complete.add(layer)

        return PayloadWriter(targets, take)

    def unpack(self, layer: int, header: bytes, payload: Tensor) -> None:
        """Hold ``layer`` with the state in ``payload``.

        :raises StateError: header or payload do not fit this model; nothing was changed.
        """
        if payload.dtype != torch.uint8 or payload.dim() != 1:
            raise StateError(f"layer {layer}: payload of {payload.dim()} dimensions of {payload.dtype}")
        with torch.no_grad():
            for start, tensor in self.allocate(layer, header, payload.numel()):
                tensor.copy_(_view(payload, start, tensor))

    def allocate(
        self, layer: int, header: bytes, payload_bytes: int, reused: ReusedMemory | None = None
    ) -> list[PayloadTarget]:
        """Hold ``layer`` with uninitialised tensors, and return them, ascending by the offset of their bytes.

        :param reused: if given, existing optimizer tensors that fit are filled again, because fresh memory
            is slow. They are recorded in it, so that no memory serves two tensors.
        :raises StateError: the header does not fit this model or the payload; nothing was changed.
        """
        targets, states = self._allocate(layer, header, payload_bytes, reused)
        self._take(states)
        return [(entry.offset, tensor) for entry, tensor in targets]

    def accept(self, layer: int, header: bytes, payload_bytes: int) -> LayerHeader:
        """Return the header of a layer that is about to be filled, and continue from its schedule.

        :raises StateError: the header does not fit this model or the payload; nothing was changed.
        """
        try:
            decoded = decode_header(header, layer, payload_bytes)
        except CorruptDataError as error:
            raise StateError(str(error)) from error
        self._check(layer, decoded)
        try:
            self._optimization.set_schedule(decoded.schedule)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise StateError(f"layer {layer}: {error}") from error
        return decoded

    def _take(self, states: "_States") -> None:
        for name, state in states.items():
            self._optimization.set_parameter_state(name, state)

    def _allocate(
        self, layer: int, header: bytes, payload_bytes: int, reused: ReusedMemory | None
    ) -> tuple[list[tuple[TensorEntry, Tensor]], "_States"]:
        """Hold the layer; return the tensor of each entry, and the optimizer's state that is still to be set."""
        decoded = self.accept(layer, header, payload_bytes)
        self._model.materialise(layer)
        values = {tensor.name: tensor.value.detach() for tensor in self._model.tensors_of(layer)}
        states: _States = {
            tensor.name: dict(decoded.scalars.get(tensor.name, {}))
            for tensor in self._model.tensors_of(layer)
            if tensor.trainable
        }
        targets: list[tuple[TensorEntry, Tensor]] = []
        on_host = host_entries(decoded)
        for entry in decoded.entries:
            tensor = values[entry.name]
            if entry.role == "optimizer":
                device = torch.device("cpu") if (entry.name, entry.key) in on_host else self._model.device
                old = None if reused is None else self._there(entry, device, reused)
                tensor = (
                    torch.empty(entry.shape, dtype=DTYPES[entry.dtype], device=device) if old is None else old
                )
                states[entry.name][entry.key] = tensor
            targets.append((entry, tensor))
        return targets, states

    def _there(self, entry: TensorEntry, device: torch.device, reused: ReusedMemory) -> Tensor | None:
        """Return the optimizer's tensor that this entry replaces, if it owns suitable memory on the host."""
        old = self._optimization.parameter_state(entry.name).get(entry.key)
        if not isinstance(old, Tensor) or not entry.size_bytes or old.requires_grad:
            return None
        whole = old.is_contiguous() and old.untyped_storage().nbytes() == entry.size_bytes
        like = old.device.type == device.type == "cpu" and old.dtype == DTYPES[entry.dtype]
        if not whole or not like or tuple(old.shape) != entry.shape:
            return None
        which = entry.name, entry.key
        return old if reused.setdefault(old.data_ptr(), which) == which else None

    def digest(self, layer: int) -> str:
        """Return a SHA-256 over the layer's parameters (names, shapes, bytes), which all owners share at the
        same step.

        Buffers are excluded because running statistics depend on which microbatches a replica saw.
        """
        self._check_held(layer)
        digest = hashlib.sha256()
        for tensor in self._model.tensors_of(layer):
            if tensor.kind == "parameter":
                value = tensor.value.detach()
                digest.update(f"{tensor.name}:{value.dtype}:{tuple(value.shape)};".encode())
                digest.update(flat_bytes(self.runtime.to_host(value)).numpy().data)
        return digest.hexdigest()

    def changing_tensors(self, layer: int) -> Iterator[Tensor]:
        """Yield the memory of the layer's parameters and of the optimizer's state, which owners share bit for bit.

        Buffers are left out, as in ``digest``.
        """
        self._check_held(layer)
        for tensor in self._model.tensors_of(layer):
            if tensor.kind == "parameter":
                yield tensor.value.detach()
                if tensor.trainable:
                    yield from state_tensors(self._optimization.parameter_state(tensor.name))

    def _check_held(self, layer: int) -> None:
        if layer not in self._model.held_layers | self._model.sharded_layers:
            raise RuntimeError(f"layer {layer} is not held here")

    def _check(self, layer: int, header: LayerHeader) -> None:
        expected = {tensor.name: tensor for tensor in self._model.tensors_of(layer)}
        end = 0
        seen: set[tuple[str, str]] = set()
        for entry in header.entries:
            if entry.name not in expected:
                raise StateError(f"layer {layer} has no parameter or buffer {entry.name!r}")
            _check_entry(layer, entry, expected[entry.name])
            if entry.offset < end or (entry.name, entry.key) in seen:
                raise StateError(f"layer {layer}: {entry.name} {entry.key} overlaps or is repeated")
            end = entry.offset + entry.size_bytes
            seen.add((entry.name, entry.key))
        missing = [name for name in expected if (name, "") not in seen]
        if missing:
            raise StateError(f"layer {layer}: {', '.join(missing)} is missing")
        strange = [name for name in header.scalars if name not in expected or not expected[name].trainable]
        if strange:
            raise StateError(f"layer {layer}: optimizer state for {', '.join(strange)}")


class PayloadReader:
    """A reader of the bytes of a payload from the tensors of its entries, which must not change meanwhile."""

    def __init__(self, header: LayerHeader | PartHeader, tensors: list[Tensor]) -> None:
        self.header = msgspec.msgpack.encode(header)
        self.size_bytes = header.size_bytes
        entries: tuple[Entry, ...] = header.entries
        self._tensors = list(zip(entries, tensors, strict=True))

    def read(self, start: int, end: int) -> Tensor:
        """Return a copy of bytes [start, end) on the device that most of them are on."""
        devices = [t.device for e, t in self._tensors if e.offset < end and start < e.offset + e.size_bytes]
        device = max(devices, key=devices.count, default=torch.device("cpu"))
        chunk = torch.zeros(end - start, dtype=torch.uint8, device=device)
        for entry, tensor in self._tensors:
            low, high = max(start, entry.offset), min(end, entry.offset + entry.size_bytes)
            if low < high:
                source = flat_bytes(tensor)[low - entry.offset : high - entry.offset]
                chunk[low - start : high - start].copy_(source)
        return chunk

    def read_into(self, payload: Tensor) -> None:
        """Copy all bytes to ``payload``."""
        for entry, tensor in self._tensors:
            _view(payload, entry.offset, tensor).copy_(tensor)


class PayloadWriter:
    """A writer of the bytes of a payload into the tensors of its entries.

    :param take: takes the optimizer's state, called when all bytes have arrived. Until then, the state that
        the optimizer may have for a parameter shared by several layers stays intact.
    """

    def __init__(self, targets: Iterable[tuple[Entry, Tensor]], take: Callable[[], None]) -> None:
        self._tensors = [(entry, tensor) for entry, tensor in targets if entry.size_bytes]
        self._take = take
        self._staging: dict[int, Tensor] = {}
        """Staging buffers for tensors that are not row-major, by offset in the payload."""

    def write(self, start: int, chunk: Tensor) -> None:
        """Write ``chunk`` to the payload's bytes from ``start`` on. Chunks arrive in order."""
        end = start + chunk.numel()
        for entry, tensor in self._tensors:
            low, high = max(start, entry.offset), min(end, entry.offset + entry.size_bytes)
            if low < high:
                target = self._bytes(entry, tensor)[low - entry.offset : high - entry.offset]
                target.copy_(chunk[low - start : high - start])
                if high == entry.offset + entry.size_bytes and entry.offset in self._staging:
                    whole = self._staging.pop(entry.offset)
                    with torch.no_grad():
                        tensor.copy_(whole.view(tensor.dtype).view(tensor.shape))

    def finish(self) -> None:
        """Take the optimizer's state after all bytes have been written.

        :raises StateError: the bytes belong to something else.
        """
        self._take()

    def _bytes(self, entry: Entry, tensor: Tensor) -> Tensor:
        if tensor.is_contiguous():
            return tensor.reshape(-1).view(torch.uint8)
        if entry.offset not in self._staging:
            self._staging[entry.offset] = torch.empty(
                entry.size_bytes, dtype=torch.uint8, device=tensor.device
            )
        return self._staging[entry.offset]


def _check_entry(layer: int, entry: TensorEntry, shared: ModelTensor) -> None:
    where = f"layer {layer}, {entry.name} {entry.key}".rstrip()
    if entry.offset % ALIGNMENT_BYTES:
        raise StateError(f"{where}: offset {entry.offset} is not a multiple of {ALIGNMENT_BYTES}")
    if entry.role == "optimizer":
        if not shared.trainable or not entry.key:
            raise StateError(f"{where}: optimizer state for a tensor that is not trained")
        return
    value = shared.value
    here = shared.kind, "", tuple(value.shape), value.dtype
    if (entry.role, entry.key, entry.shape, DTYPES[entry.dtype]) != here:
        raise StateError(
            f"{where}: received a {entry.role} of {entry.shape} {entry.dtype}, but "
            f"this model has a {shared.kind} of {tuple(value.shape)} {dtype_name(value.dtype)}"
        )


def _view(payload: Tensor, start: int, like: Tensor) -> Tensor:
    """Return the payload's bytes from ``start`` on as a view with the dtype and shape of ``like``."""
    return payload[start : start + like.nbytes].view(like.dtype).view(like.shape)
