"""The format of a layer's bytes: the header that describes its payload. This module does not import torch.

``runtime.layers.state`` packs a layer into a header, msgpack of ``LayerHeader``, and a payload, the tensors
back to back. Code that stores or exports layers reads the header with this module and does not need torch.

Under ZeRO-1 an owner has only a part of a layer's optimizer state (``runtime.zero.parts``). It sends this
part as a header, msgpack of ``PartHeader``, and a payload, as for whole layers.
"""

import math
from collections.abc import Iterable
from typing import Any, Literal, Protocol, TypeVar

import msgspec
import xxhash

from storage.decoding import decodable
from storage.errors import CorruptDataError

HEADER_FORMAT = 1
PART_FORMAT = 1
ALIGNMENT_BYTES = 16
"""Alignment of each tensor in a payload."""

DTYPE_BYTES = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
    "complex64": 8,
    "complex128": 16,
}
"""Size of one element of every supported type, by torch's name without its prefix."""


class _Versioned(Protocol):
    @property
    def format(self) -> int: ...


Decoded = TypeVar("Decoded", bound=_Versioned)
Scalars = dict[str, dict[str, int | float | bool | str | None]]
"""The optimizer state of each parameter that is not a tensor."""


class TensorEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One tensor: ``size_bytes`` bytes of the payload from ``offset``, row-major."""

    name: str
    """Canonical name of the parameter or buffer."""
    role: Literal["parameter", "buffer", "optimizer"]
    key: str
    """Key of the optimizer's state (``exp_avg``); empty for the other roles."""
    dtype: str
    shape: tuple[int, ...]
    on_host: bool
    """Whether the optimizer holds it in host memory whatever the parameter's device (``step`` of Adam)."""
    offset: int
    size_bytes: int


class LayerHeader(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    format: int
    layer: int
    entries: tuple[TensorEntry, ...]
    scalars: Scalars
    schedule: dict[str, Any]
    size_bytes: int
    """Size of the payload."""


class PartEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``size_bytes`` bytes of the payload from ``offset``: elements of one flattened tensor, in order."""

    name: str
    """Canonical name of the parameter or buffer."""
    role: Literal["parameter", "buffer", "optimizer"]
    key: str
    """Key of the optimizer's state (``exp_avg``); empty for the other roles."""
    dtype: str
    start: int
    """First element."""
    count: int | None
    """Number of elements; ``None`` for one number for the whole parameter (``step`` of Adam)."""
    offset: int
    size_bytes: int


class PartHeader(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    format: int = PART_FORMAT
    layer: int
    entries: tuple[PartEntry, ...]
    scalars: Scalars
    schedule: dict[str, Any] | None
    """Options of the parameter groups and the learning-rate schedule, for receivers that have nothing yet."""
    size_bytes: int
    """Size of the payload."""


def padded_size(size_bytes: int) -> int:
    """Return the size including the padding before the next tensor."""
    return size_bytes + -size_bytes % ALIGNMENT_BYTES


def decode_versioned(data: bytes | memoryview, kind: type[Decoded], what: str, version: int) -> Decoded:
    """Return the struct, which has a field ``format``, from its msgpack.

    :param what: names the data in the error.
    :raises CorruptDataError: it is malformed, or of another format than ``version``.
    """
    try:
        found = msgspec.msgpack.decode(data, type=decodable(kind))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CorruptDataError(f"{what} is malformed: {error}") from None
    if found.format != version:
        raise CorruptDataError(f"{what} is of format {found.format}; this version reads {version}")
    return found


def decode_header(data: bytes, layer: int, payload_bytes: int) -> LayerHeader:
    """Return the header of ``layer``, whose payload has ``payload_bytes``; every entry lies within the
    payload.

    :raises CorruptDataError: it is not such a header.
    """
    header = decode_versioned(data, LayerHeader, f"the header of layer {layer}", HEADER_FORMAT)
    if (header.layer, header.size_bytes) != (layer, payload_bytes):
        raise CorruptDataError(
            f"a header of layer {header.layer} with {header.size_bytes} bytes was found instead of layer {layer} "
            f"with {payload_bytes} bytes"
        )
    for entry in header.entries:
        wanted = math.prod(entry.shape) * DTYPE_BYTES.get(entry.dtype, -1)
        inside = 0 <= entry.offset <= entry.offset + entry.size_bytes <= payload_bytes
        if any(length < 0 for length in entry.shape) or entry.size_bytes != wanted or not inside:
            raise CorruptDataError(
                f"layer {layer}, {entry.name} {entry.key}: {entry.size_bytes} bytes from {entry.offset} of "
                f"{payload_bytes} cannot be {entry.shape} of {entry.dtype}"
            )
    return header


def fingerprint_of(headers: Iterable[LayerHeader]) -> str:
    """Return a digest of a model: its layers in order, with the names, types and shapes of what they hold.

    It does not depend on the step, the pipelines, the optimizer or the values.
    """
    digest = xxhash.xxh3_128()
    for header in headers:
        lasting = [(e.name, e.role, e.dtype, e.shape) for e in header.entries if e.role != "optimizer"]
        digest.update(msgspec.json.encode((header.layer, lasting)))
    return digest.hexdigest()
