"""The bytes of layers' parts in a snapshot under ZeRO-1, and the assembly of whole layers from them. This
module does not import torch.

Each owner of a group has parts of each layer: ranges of the elements of its parameters, and the
optimizer's state for them. There is no code over them: an owner's shard is its own parts, and with
``arc:1`` it also holds a replica of the next owner's parts. The small part, a ``ShardedImage``, says which
elements of which tensors the bytes are and what a layer consists of; it also contains the buffers, which
may differ between replicas. A tied parameter is only in the parts of the first of its layers, and the
other layers refer to that one (``WholeLayer.homes``). Parts that cover the layer, however it was cut, make
its ordinary header and payload (``storage.layerstate``), which do not depend on the number of owners.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from storage.errors import CorruptDataError
from storage.layerstate import (
    DTYPE_BYTES,
    HEADER_FORMAT,
    LayerHeader,
    Scalars,
    TensorEntry,
    decode_versioned,
    padded_size,
)

FORMAT = 2
Bytes = NDArray[np.uint8]


class TensorInfo(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A parameter or buffer of a layer, as its header names it."""

    name: str
    role: Literal["parameter", "buffer"]
    dtype: str
    shape: tuple[int, ...]
    on_host: bool

    @property
    def count(self) -> int:
        return math.prod(self.shape)


class WholeLayer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Contents of a layer, regardless of the parts."""

    layer: int
    tensors: tuple[TensorInfo, ...]
    """Tensors in model order."""
    schedule: dict[str, Any]
    buffers: bytes
    """The persistent buffers, one after the other, padded."""
    homes: dict[str, int] = {}
    """Layer whose parts contain the elements of a tied parameter, for each tied parameter of another layer."""


class TensorRange(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``size_bytes`` bytes of a part from ``offset``: elements of one flattened tensor."""

    name: str
    role: Literal["parameter", "optimizer"]
    key: str
    """Name in the optimizer's state; empty for parameters."""
    dtype: str
    on_host: bool
    start: int
    """First element."""
    count: int | None
    """Number of elements; ``None`` for one number for the whole parameter (``step`` of Adam)."""
    offset: int
    size_bytes: int


class LayerPart(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    layer: int
    offset: int
    """Offset of its bytes in the part."""
    size_bytes: int
    ranges: tuple[TensorRange, ...]
    scalars: Scalars


class PartImage(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The range ``(start, end, of)`` of all layers of a group, in ascending order: elements [n·start // of,
    n·end // of) of n.
    """

    start: int
    end: int
    of: int
    replica: bool
    """Whether the range is another owner's and in the replica; otherwise it is in the shard."""
    offset: int
    """Offset of its bytes in the shard or replica."""
    size_bytes: int
    layers: tuple[LayerPart, ...]


class ShardedImage(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The small part of a group."""

    format: int = FORMAT
    layers: tuple[WholeLayer, ...]
    held: tuple[PartImage, ...]
    """The ranges in the shard and, if there is one, in the replica, each without gaps."""

    def to_bytes(self) -> bytes:
        return msgspec.msgpack.encode(self)

    @classmethod
    def from_bytes(cls, data: bytes | memoryview) -> "ShardedImage":
        """Return the decoded small part.

        :raises CorruptDataError: it is malformed or inconsistent.
        """
        image = decode_versioned(data, cls, "the small part of a group", FORMAT)
        numbers = [layer.layer for layer in image.layers]
        ends = {False: 0, True: 0}
        for held in image.held:
            if not 0 <= held.start < held.end <= held.of or [one.layer for one in held.layers] != numbers:
                raise CorruptDataError(
                    f"the part from {held.start}/{held.of} to {held.end}/{held.of} is not of layers {numbers}"
                )
            if held.offset != ends[held.replica]:
                raise CorruptDataError(f"a part begins at {held.offset}, and not at {ends[held.replica]}")
            ends[held.replica] += held.size_bytes
            end = 0
            for one in held.layers:
                _check_runs(one, end)
                end += one.size_bytes
            if end != held.size_bytes:
                raise CorruptDataError(f"layers of {end} bytes in a part of {held.size_bytes}")
        return image


def _check_runs(one: LayerPart, begin: int) -> None:
    end = 0
    for run in one.ranges:
        count = 1 if run.count is None else run.count
        wanted = count * DTYPE_BYTES.get(run.dtype, -1)
        if run.start < 0 or count < 0 or run.size_bytes != wanted or run.offset != end:
            raise CorruptDataError(
                f"layer {one.layer}, {run.name} {run.key}: {run.size_bytes} bytes at {run.offset}"
            )
        end += padded_size(run.size_bytes)
    if (one.offset, one.size_bytes) != (begin, end):
        raise CorruptDataError(
            f"layer {one.layer} is {one.size_bytes} bytes at {one.offset}, not {end} at {begin}"
        )


def select_tied(whole: WholeLayer, part: LayerPart) -> LayerPart:
    """Return what of another layer's part belongs to ``whole`` as well; its bytes are the same."""
    names = {name for name, home in whole.homes.items() if home == part.layer}
    return msgspec.structs.replace(
        part,
        layer=whole.layer,
        ranges=tuple(run for run in part.ranges if run.name in names),
        scalars={name: values for name, values in part.scalars.items() if name in names},
    )


@dataclass(frozen=True, slots=True)
class _State:
    """Description of one key of the optimizer state of a parameter, as parts give it."""

    dtype: str
    on_host: bool
    whole: bool
    """Whether the value is one number for the parameter."""


def assemble_from_parts(whole: WholeLayer, parts: Sequence[tuple[LayerPart, Bytes]]) -> tuple[bytes, Bytes]:
    """Return header and payload of a layer (``runtime.layers.state``).

    :param parts: parts that cover the layer, including those from ``select_tied``, each with its bytes from
        ``LayerPart.offset`` on. Elements in several parts are equal.
    :raises CorruptDataError: they do not make up the layer.
    """
    place = f"layer {whole.layer}"
    header = _header_of(whole, [part for part, _ in parts])
    payload = np.zeros(header.size_bytes, dtype=np.uint8)
    at = {(entry.name, entry.key): entry for entry in header.entries}
    filled: dict[tuple[str, str], list[range]] = {}
    begin = 0
    for entry in header.entries:
        if entry.role == "buffer":
            buffer = whole.buffers[begin : begin + entry.size_bytes]
            if len(buffer) != entry.size_bytes:
                raise CorruptDataError(f"{place}: {len(whole.buffers)} bytes of buffers are too few")
            payload[entry.offset : entry.offset + entry.size_bytes] = np.frombuffer(buffer, dtype=np.uint8)
            begin += padded_size(entry.size_bytes)
    for part, data in parts:
        if len(data) != part.size_bytes:
            raise CorruptDataError(f"{place}: {len(data)} bytes of a part of {part.size_bytes}")
        for run in part.ranges:
            entry = at[run.name, run.key]
            source = data[run.offset : run.offset + run.size_bytes]
            start = entry.offset + (0 if run.count is None else run.start * DTYPE_BYTES[run.dtype])
            target = payload[start : start + run.size_bytes]
            runs = filled.setdefault((run.name, run.key), [])
            if run.count is None:
                if runs and not np.array_equal(target, source):
                    raise CorruptDataError(f"{place}: {run.key} of parts of {run.name} differs")
                runs[:] = [range(1)]
            else:
                runs.append(range(run.start, run.start + run.count))
            target[:] = source
    for entry in header.entries:
        if entry.role != "buffer":
            _check_complete(place, entry, filled.get((entry.name, entry.key), []))
    return msgspec.msgpack.encode(header), payload


def _check_complete(place: str, entry: TensorEntry, runs: list[range]) -> None:
    """Raise ``CorruptDataError`` if an element is missing."""
    end = 0
    for run in sorted(runs, key=lambda one: one.start):
        if len(run) and run.start > end:
            raise CorruptDataError(f"{place}: elements of {entry.name} {entry.key} from {end} on: {runs}")
        end = max(end, run.stop)
    if end != math.prod(entry.shape):
        raise CorruptDataError(
            f"{place}: {end} elements of {entry.name} {entry.key}, which has {entry.shape}"
        )


def _header_of(whole: WholeLayer, parts: Sequence[LayerPart]) -> LayerHeader:
    """Return the layer's ordinary header, with the optimizer's keys as the parts name them."""
    place = f"layer {whole.layer}"
    known = {tensor.name: tensor for tensor in whole.tensors if tensor.role == "parameter"}
    states: dict[str, dict[str, _State]] = {}
    scalars: Scalars = {}
    for part in parts:
        if part.layer != whole.layer:
            raise CorruptDataError(f"a part of layer {part.layer} was given for {place}")
        for run in part.ranges:
            tensor = known.get(run.name)
            inside = tensor is not None and run.start + (run.count or 0) <= tensor.count
            if tensor is None or not inside or (run.role == "parameter" and run.dtype != tensor.dtype):
                raise CorruptDataError(f"{place} has no such elements of {run.name}")
            if run.role == "optimizer":
                state_of_run = _State(run.dtype, run.on_host, run.count is None)
                if states.setdefault(run.name, {}).setdefault(run.key, state_of_run) != state_of_run:
                    raise CorruptDataError(f"{place}: parts of {run.name} disagree on {run.key}")
        for name, values in part.scalars.items():
            if name not in known or scalars.setdefault(name, values) != values:
                raise CorruptDataError(f"{place}: parts of {name} differ in {values}")
    entries: list[TensorEntry] = []
    end = 0

    def add(
        tensor: TensorInfo, role: Literal["parameter", "buffer", "optimizer"], key: str, state: _State
    ) -> None:
        nonlocal end
        shape = () if state.whole else tensor.shape
        size = math.prod(shape) * DTYPE_BYTES[state.dtype]
        entries.append(
            TensorEntry(
                name=tensor.name,
                role=role,
                key=key,
                dtype=state.dtype,
                shape=shape,
                on_host=state.on_host,
                offset=end,
                size_bytes=size,
            )
        )
        end += padded_size(size)

    for tensor in whole.tensors:
        if tensor.dtype not in DTYPE_BYTES:
            raise CorruptDataError(f"{place}: {tensor.name} is of {tensor.dtype}")
        add(tensor, tensor.role, "", _State(tensor.dtype, tensor.on_host, False))
        for key, state in states.get(tensor.name, {}).items():
            add(tensor, "optimizer", key, state)
    return LayerHeader(
        format=HEADER_FORMAT,
        layer=whole.layer,
        entries=tuple(entries),
        scalars={name: scalars[name] for name in known if name in scalars},
        schedule=whole.schedule,
        size_bytes=end,
    )


# --- bytes of one part from other parts -------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorByteRange:
    """Bytes ``[start, end)`` of a flattened tensor of a layer: a parameter (no key) or optimizer state."""

    layer: int
    name: str
    key: str
    start: int
    end: int


def find_tensors(
    held: Sequence[PartImage], first: int, end: int, *, replica: bool
) -> list[tuple[int, TensorByteRange]]:
    """Return the tensors' bytes that bytes ``[first, end)`` of a shard or replica are, each with its distance
    from ``first``.

    The bytes in between are padding: zeros.
    """
    found: list[tuple[int, TensorByteRange]] = []
    for image in held:
        if image.replica != replica:
            continue
        for part in image.layers:
            for run in part.ranges:
                begin = image.offset + part.offset + run.offset
                low, high = max(first, begin), min(end, begin + run.size_bytes)
                if low < high:
                    at = _first_byte(run) - begin
                    some = TensorByteRange(
                        layer=part.layer, name=run.name, key=run.key, start=at + low, end=at + high
                    )
                    found.append((low - first, some))
    return found


def find_bytes(held: Sequence[PartImage], wanted: TensorByteRange) -> tuple[bool, int, int] | None:
    """Return where the first of the wanted bytes are, and how many of them are contiguous there.

    :returns: whether they are in the replica, their offset and their number; ``None`` if they are not
        there.
    """
    for image in held:
        for part in image.layers:
            for run in part.ranges if part.layer == wanted.layer else ():
                begin = _first_byte(run)
                if (run.name, run.key) == (wanted.name, wanted.key) and begin <= wanted.start:
                    size = min(wanted.end, begin + run.size_bytes) - wanted.start
                    if size > 0:
                        offset = image.offset + part.offset + run.offset + wanted.start - begin
                        return image.replica, offset, size
    return None


def _first_byte(run: TensorRange) -> int:
    """Return the offset of the range in its flattened tensor."""
    return 0 if run.count is None else run.start * DTYPE_BYTES[run.dtype]
