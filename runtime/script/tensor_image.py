"""Tensors one after the other in flat images: which bytes lie where, and in which pieces they are copied.

There are two: of tensors that are the same on all ranks (*shared*), and of this rank's *own*.
A tensor that fills its memory without gaps, in whatever order of dimensions, is copied as it lies there
(its bytes are viewed, not gathered); any other one is gathered when the snapshot is taken. A sharded tensor
(FSDP2's) is its local shard.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.parameter import is_lazy

from runtime.precision import dtype_name
from runtime.script.plain_state import SnapshotError
from storage.shards import XorRange as Kept

Bytes = NDArray[np.uint8]
Source = Bytes | Tensor
"""Bytes in host memory, or a flat uint8 tensor on a device."""

UNIT_BYTES = 8 * 1024 * 1024
"""Copied, and given a digest, at a time."""
ALIGNMENT_BYTES = 64


class ImageEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One tensor: ``size_bytes`` bytes of the image from ``offset``, row-major in the order of ``order``."""

    dtype: str
    shape: tuple[int, ...]
    order: tuple[int, ...]
    """Dimensions from the slowest to the quickest in memory."""
    on_host: bool
    sharded: bool
    """The shard of this rank; ``shape`` is the shard's."""
    offset: int
    """In its image."""
    size_bytes: int
    shared: bool = False
    """It is in the image that is the same on all ranks."""


@dataclass(frozen=True, slots=True)
class CopyRange:
    """Bytes ``[start, start + size_bytes)`` of source ``entry`` go to ``[offset, …)`` of what is kept."""

    entry: int
    start: int
    offset: int
    size_bytes: int
    is_xor: bool = False
    """XORed with what is there, instead of copied."""


@dataclass(frozen=True, slots=True)
class CopyUnit:
    """A run of what is kept that is copied by one thread, its pieces in their order."""

    offset: int
    size_bytes: int
    ranges: tuple[CopyRange, ...]
    gaps: tuple[tuple[int, int], ...] = ()
    """(offset, bytes) that become zero first: no piece covers them, and a parity must not see rests."""


def local_tensor(tensor: Tensor) -> Tensor:
    """The memory that this rank holds of it."""
    inner: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return inner.detach()


def dimension_order(tensor: Tensor) -> tuple[int, ...]:
    strides = tensor.stride()
    return tuple(sorted(range(tensor.dim()), key=lambda d: (-strides[d], d)))


def memory_bytes(tensor: Tensor, order: tuple[int, ...]) -> Tensor | None:
    """Its memory as a flat uint8 tensor; ``None`` where it has gaps, overlaps itself, or says less."""
    permuted = tensor.permute(order)
    if not permuted.is_contiguous() or permuted.is_conj() or permuted.is_neg():
        return None
    return permuted.reshape(-1).view(torch.uint8)


@dataclass(slots=True)
class KnownTensor:
    """What was found out about a tensor at an earlier snapshot."""

    tensor: Tensor
    address: int
    dtype: torch.dtype
    device: torch.device
    shape: torch.Size
    strides: tuple[int, ...]
    entry: ImageEntry
    view: Source | None

    def matches(self, tensor: Tensor) -> bool:
        if self.tensor is not tensor or self.dtype.is_complex:
            return False  # It may have been conjugated where it lies.
        return (
            (local_tensor(tensor) if self.entry.sharded else tensor).data_ptr() == self.address
            and self.dtype is tensor.dtype
            and self.device == tensor.device
            and self.shape == tensor.shape
            and self.strides == tensor.stride()
        )


@dataclass(slots=True)
class Image:
    """The layout of one snapshot and where its bytes come from.

    Views of tensors are taken over from the snapshot before (``known``): making them costs more than the
    look whether they still are what they were. ``seen`` is this one's, for the next.
    """

    known: dict[int, KnownTensor]
    seen: dict[int, KnownTensor] = field(default_factory=dict)
    entries: list[ImageEntry] = field(default_factory=list)
    views: list[Source | None] = field(default_factory=list)
    """``None``: it must be gathered from ``tensors``."""
    tensors: list[Tensor] = field(default_factory=list)
    immediate: list[int] = field(default_factory=list)
    """Numbers of those whose bytes must be taken before training goes on."""
    devices: set[torch.device] = field(default_factory=set)
    """Where there are any, but for the host."""
    own_bytes: int = 0
    shared_bytes: int = 0
    _taken: dict[tuple[int, int], int] = field(default_factory=dict)

    def add(self, tensor: Tensor, where: str, *, immediate: bool, shared: bool = False) -> int:
        """The tensor's number; the same for one that was added before (tied weights).

        :raises SnapshotError: a tensor whose memory is no plain row of values.
        """
        found = self.known.get(id(tensor))
        if found is None or not found.matches(tensor):
            found = _look_at(tensor, _address(tensor, where))
        address = found.address
        self.seen[id(tensor)] = found
        key = (address or id(tensor), found.entry.size_bytes)
        number = self._taken.get(key)
        if number is not None and _alike(self.entries[number], found.entry):
            return number
        number = self._taken[key] = len(self.entries)
        offset = align(self.shared_bytes if shared else self.own_bytes)
        if (found.entry.offset, found.entry.shared) != (offset, shared):
            found.entry = msgspec.structs.replace(found.entry, offset=offset, shared=shared)
        self.entries.append(found.entry)
        self.views.append(found.view)
        self.tensors.append(tensor)
        if immediate or found.view is None:
            self.immediate.append(number)
        if not found.entry.on_host:
            self.devices.add(local_tensor(tensor).device)
        if shared:
            self.shared_bytes = offset + found.entry.size_bytes
        else:
            self.own_bytes = offset + found.entry.size_bytes
        return number

    def copy(self, known: dict[int, KnownTensor]) -> "Image":
        """One that begins with all of this one's; this one stays as it is."""
        return replace(
            self,
            known=known,
            seen=self.seen.copy(),
            entries=self.entries.copy(),
            views=self.views.copy(),
            tensors=self.tensors.copy(),
            immediate=self.immediate.copy(),
            devices=self.devices.copy(),
            _taken=self._taken.copy(),
        )


Range = tuple[int, int, int]
"""Number of a source, its offset in the image, its bytes."""


def align(size_bytes: int) -> int:
    return -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def cut_units(ranges: Sequence[Range], kept: Sequence[Kept], base: int = 0) -> list[CopyUnit]:
    """The units of what is kept of an image: pieces of its bytes, or XORs of such.

    :param ranges: the image's, ascending.
    :param base: where the first of what is kept lies in the slot.
    """
    offsets = [offset for _, offset, _ in ranges]
    units = []
    for one in kept:
        for first in range(0, one.size_bytes, UNIT_BYTES):
            size, at = min(UNIT_BYTES, one.size_bytes - first), base + one.offset + first
            rows = [_within(ranges, offsets, source + first, size, at) for source in one.sources]
            pieces = [
                CopyRange(number, start, offset, length, added)
                for added, row in zip((False, *[True] * (len(rows) - 1)), rows, strict=True)
                for number, start, offset, length in row
            ]
            units.append(CopyUnit(at, size, tuple(pieces), tuple(_gaps(rows[0], at, at + size))))
    return units


def whole_image(size_bytes: int) -> list[Kept]:
    """All of an image, as it is."""
    return [Kept(offset=0, size_bytes=size_bytes, sources=(0,))] if size_bytes else []


_Row = list[tuple[int, int, int, int]]
"""Source, first byte of it, offset in the slot, bytes."""


def _within(ranges: Sequence[Range], offsets: list[int], first: int, size: int, at: int) -> _Row:
    """The image's bytes [first, first + size), which come to lie at ``at``."""
    row: _Row = []
    for number, offset, length in ranges[max(0, bisect_right(offsets, first) - 1) :]:
        if offset >= first + size:
            break
        low, high = max(first, offset), min(first + size, offset + length)
        if low < high:
            row.append((number, low - offset, at + low - first, high - low))
    return row


def _gaps(row: _Row, end: int, last: int) -> Iterator[tuple[int, int]]:
    """(offset, bytes) from ``end`` to ``last`` that nothing in the row covers."""
    for _, _, offset, length in row:
        if offset > end:
            yield end, offset - end
        end = offset + length
    if last > end:
        yield end, last - end


def _address(tensor: Tensor, where: str) -> int:
    if is_lazy(tensor):
        raise SnapshotError(f"{where} has no shape yet: call the lazy module once, then register it")
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.device.type == "meta":
        raise SnapshotError(
            f"{where} is a {tensor.layout} tensor on {tensor.device}: only dense tensors that have memory "
            "can be kept"
        )
    return local_tensor(tensor).data_ptr() if hasattr(tensor, "to_local") else tensor.data_ptr()


def _look_at(tensor: Tensor, address: int) -> KnownTensor:
    inner = local_tensor(tensor)
    order = dimension_order(inner)
    flat = memory_bytes(inner, order)
    if flat is None:
        order = tuple(range(inner.dim()))
    view: Source | None = flat.numpy() if flat is not None and flat.device.type == "cpu" else flat
    entry = ImageEntry(
        dtype=dtype_name(inner.dtype),
        shape=tuple(inner.shape),
        order=order,
        on_host=inner.device.type == "cpu",
        sharded=hasattr(tensor, "to_local"),
        offset=0,
        size_bytes=inner.numel() * inner.element_size(),
    )
    return KnownTensor(
        tensor, address, tensor.dtype, tensor.device, tensor.shape, tensor.stride(), entry, view
    )


def _alike(one: ImageEntry, other: ImageEntry) -> bool:
    return (one.dtype, one.shape, one.order) == (other.dtype, other.shape, other.order)


def row_major_bytes(tensor: Tensor) -> Tensor:
    """A row-major copy's bytes."""
    return (
        local_tensor(tensor).resolve_conj().resolve_neg().contiguous().clone().reshape(-1).view(torch.uint8)
    )


def _fits(entry: ImageEntry, tensor: Tensor) -> bool:
    inner = local_tensor(tensor)
    return tuple(inner.shape) == entry.shape and str(inner.dtype) == f"torch.{entry.dtype}"


def choose_target(entry: ImageEntry, old: Tensor | None, beside: Tensor | None) -> Tensor:
    """What is to hold the saved tensor: ``old`` where it fits, else a new one that lies as ``beside``."""
    if old is not None and _fits(entry, old):
        return old
    dtype = getattr(torch, entry.dtype)
    if beside is not None and _fits(msgspec.structs.replace(entry, dtype=str(beside.dtype)[6:]), beside):
        return torch.empty_like(beside, dtype=dtype, requires_grad=False)
    device = beside.device if beside is not None and not entry.on_host else torch.device("cpu")
    return _turned(entry, torch.empty(entry.size_bytes // dtype.itemsize, dtype=dtype, device=device))


def copy_into(entry: ImageEntry, data: Bytes, tensor: Tensor) -> None:
    """The image's bytes into a tensor that was ``choose_target``."""
    if entry.size_bytes:
        flat = torch.from_numpy(data[entry.offset : entry.offset + entry.size_bytes])
        local_tensor(tensor).copy_(_turned(entry, flat.view(getattr(torch, entry.dtype))))


def _turned(entry: ImageEntry, flat: Tensor) -> Tensor:
    """Its values in the saved shape, one after the other in the saved order of dimensions."""
    lying = flat.reshape([entry.shape[d] for d in entry.order])
    return lying.permute([entry.order.index(d) for d in range(len(entry.order))])
