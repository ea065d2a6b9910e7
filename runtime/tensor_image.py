"""Tensors one after the other in a flat image: which bytes lie where, and in which pieces they are copied.

A tensor that fills its memory without gaps, in whatever order of dimensions, is copied as it lies there
(its bytes are viewed, not gathered); any other one is gathered when the snapshot is taken. A sharded tensor
(FSDP2's) is its local shard.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from runtime.plain_state import SnapshotError

Bytes = NDArray[np.uint8]
Source = Bytes | Tensor
"""Bytes in host memory, or a flat uint8 tensor on a device."""

UNIT_BYTES = 8 * 1024 * 1024
"""Copied, and given a digest, at a time."""
ALIGNMENT_BYTES = 64


class Entry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One tensor: ``size_bytes`` bytes of the image from ``offset``, row-major in the order of ``order``."""

    dtype: str
    shape: tuple[int, ...]
    order: tuple[int, ...]
    """Dimensions from the slowest to the quickest in memory."""
    on_host: bool
    sharded: bool
    """The shard of this rank; ``shape`` is the shard's."""
    offset: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes ``[start, start + size_bytes)`` of source ``entry`` go to ``[offset, …)`` of the image."""

    entry: int
    start: int
    offset: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Unit:
    """A run of the image that is copied by one thread."""

    offset: int
    size_bytes: int
    pieces: tuple[Piece, ...]


def local(tensor: Tensor) -> Tensor:
    """The memory that this rank holds of it."""
    inner: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return inner.detach()


def order_of(tensor: Tensor) -> tuple[int, ...]:
    strides = tensor.stride()
    return tuple(sorted(range(tensor.dim()), key=lambda d: (-strides[d], d)))


def bytes_of(tensor: Tensor, order: tuple[int, ...]) -> Tensor | None:
    """Its memory as a flat uint8 tensor; ``None`` where it has gaps or overlaps itself."""
    permuted = tensor.permute(order)
    return permuted.reshape(-1).view(torch.uint8) if permuted.is_contiguous() else None


@dataclass(slots=True)
class Known:
    """What was found out about a tensor at an earlier snapshot."""

    tensor: Tensor
    address: int
    shape: torch.Size
    strides: tuple[int, ...]
    entry: Entry
    view: Source | None

    def holds(self, tensor: Tensor) -> bool:
        if self.tensor is not tensor:
            return False
        return (
            (local(tensor) if self.entry.sharded else tensor).data_ptr() == self.address
            and self.shape == tensor.shape
            and self.strides == tensor.stride()
        )


@dataclass(slots=True)
class Image:
    """The layout of one snapshot and where its bytes come from.

    Views of tensors are taken over from the snapshot before (``known``): making them costs more than the
    look whether they still are what they were. ``seen`` is this one's, for the next.
    """

    known: dict[int, Known]
    seen: dict[int, Known] = field(default_factory=dict)
    entries: list[Entry] = field(default_factory=list)
    views: list[Source | None] = field(default_factory=list)
    """``None``: it must be gathered from ``tensors``."""
    tensors: list[Tensor] = field(default_factory=list)
    at_once: list[bool] = field(default_factory=list)
    size_bytes: int = 0
    _taken: dict[tuple[int, int], int] = field(default_factory=dict)

    def add(self, tensor: Tensor, where: str, *, at_once: bool) -> int:
        """The tensor's number; the same for one that was added before (tied weights).

        :raises SnapshotError: a tensor whose memory is no plain row of values.
        """
        found = self.known.get(id(tensor))
        if found is None or not found.holds(tensor):
            found = _look_at(tensor, _address(tensor, where))
        address = found.address
        self.seen[id(tensor)] = found
        key = (address or id(tensor), found.entry.size_bytes)
        number = self._taken.get(key)
        if number is not None and _alike(self.entries[number], found.entry):
            return number
        number = self._taken[key] = len(self.entries)
        offset = -(-self.size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        if found.entry.offset != offset:
            found.entry = msgspec.structs.replace(found.entry, offset=offset)
        self.entries.append(found.entry)
        self.views.append(found.view)
        self.tensors.append(tensor)
        self.at_once.append(at_once or found.view is None)
        self.size_bytes = offset + found.entry.size_bytes
        return number

    def units(self) -> list[Unit]:
        """Together they are the image's bytes, each once; gaps of alignment belong to the one before."""
        return cut([(entry.offset, entry.size_bytes) for entry in self.entries], self.size_bytes)


def cut(ranges: Sequence[tuple[int, int]], size_bytes: int) -> list[Unit]:
    """:param ranges: (offset, bytes) of each source in the image, ascending."""
    pieces: list[list[Piece]] = [[] for _ in range(-(-size_bytes // UNIT_BYTES))]
    for number, (offset, size) in enumerate(ranges):
        done = 0
        while done < size:
            unit = (offset + done) // UNIT_BYTES
            step = min(size - done, (unit + 1) * UNIT_BYTES - offset - done)
            pieces[unit].append(Piece(number, done, offset + done, step))
            done += step
    return [
        Unit(index * UNIT_BYTES, min(UNIT_BYTES, size_bytes - index * UNIT_BYTES), tuple(row))
        for index, row in enumerate(pieces)
    ]


def _address(tensor: Tensor, where: str) -> int:
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.device.type == "meta":
        raise SnapshotError(
            f"{where} is a {tensor.layout} tensor on {tensor.device}: only dense tensors that have memory "
            "can be kept"
        )
    return local(tensor).data_ptr() if hasattr(tensor, "to_local") else tensor.data_ptr()


def _look_at(tensor: Tensor, address: int) -> Known:
    inner = local(tensor)
    order = order_of(inner)
    flat = bytes_of(inner, order)
    if flat is None:
        order = tuple(range(inner.dim()))
    view: Source | None = flat.numpy() if flat is not None and flat.device.type == "cpu" else flat
    entry = Entry(
        dtype=str(inner.dtype).removeprefix("torch."),
        shape=tuple(inner.shape),
        order=order,
        on_host=inner.device.type == "cpu",
        sharded=hasattr(tensor, "to_local"),
        offset=0,
        size_bytes=inner.numel() * inner.element_size(),
    )
    return Known(tensor, address, tensor.shape, tensor.stride(), entry, view)


def _alike(one: Entry, other: Entry) -> bool:
    return (one.dtype, one.shape, one.order) == (other.dtype, other.shape, other.order)


def gathered(tensor: Tensor) -> Tensor:
    """A row-major copy's bytes."""
    return local(tensor).contiguous().clone().reshape(-1).view(torch.uint8)


def _fits(entry: Entry, tensor: Tensor) -> bool:
    inner = local(tensor)
    return tuple(inner.shape) == entry.shape and str(inner.dtype) == f"torch.{entry.dtype}"


def _fill(entry: Entry, data: Bytes, tensor: Tensor) -> None:
    """Copy the image's bytes into a tensor that ``fits``."""
    inner = local(tensor)
    if entry.size_bytes:
        inner.copy_(_read(entry, data))


def _fresh(entry: Entry, data: Bytes, device: torch.device) -> Tensor:
    """A new tensor with the image's bytes."""
    if not entry.size_bytes:
        return torch.empty(entry.shape, dtype=getattr(torch, entry.dtype), device=device)
    return _read(entry, data).to(device, copy=True)


def placed(entry: Entry, data: Bytes, old: Tensor | None, beside: Tensor | None) -> Tensor:
    """The saved tensor: in ``old`` where it fits, else a new one that lies as ``beside`` does."""
    if old is not None and _fits(entry, old):
        _fill(entry, data, old)
        return old
    if beside is not None and _fits(msgspec.structs.replace(entry, dtype=str(beside.dtype)[6:]), beside):
        made = torch.empty_like(beside, dtype=getattr(torch, entry.dtype), requires_grad=False)
        _fill(entry, data, made)
        return made
    device = beside.device if beside is not None and not entry.on_host else torch.device("cpu")
    return _fresh(entry, data, device)


def _read(entry: Entry, data: Bytes) -> Tensor:
    flat = torch.from_numpy(data[entry.offset : entry.offset + entry.size_bytes])
    lying = flat.view(getattr(torch, entry.dtype)).reshape([entry.shape[d] for d in entry.order])
    return lying.permute([entry.order.index(d) for d in range(len(entry.order))])
