"""Flat images of tensors, one after the other: which bytes are where, and in which units they are copied.

There are two images: of the tensors that are the same on all ranks (*shared*), and of this rank's *own*. A
tensor that fills its memory without gaps, in whatever order of dimensions, is copied in that order: its
bytes are viewed, not gathered. Any other tensor is gathered when the snapshot is taken. A sharded tensor
(FSDP2's) is represented by its local shard.
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

from runtime.device import flat_bytes
from runtime.precision import dtype_name
from runtime.script.plain_state import SnapshotError
from runtime.script.tensor_box import placement_of
from storage.shards import XorRange

Bytes = NDArray[np.uint8]
Source = Bytes | Tensor
"""Bytes in host memory, or a flat uint8 tensor on a device."""

UNIT_BYTES = 8 * 1024 * 1024
"""Bytes that are copied and hashed at a time."""
ALIGNMENT_BYTES = 64


class ImageEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A tensor in an image: ``size_bytes`` bytes from ``offset``, with its dimensions in the order ``order``."""

    dtype: str
    shape: tuple[int, ...]
    order: tuple[int, ...]
    """Dimensions, from the slowest to the fastest varying one in memory."""
    on_host: bool
    sharded: bool
    """Whether the tensor is this rank's shard of a larger one; ``shape`` is then the shard's."""
    offset: int
    """Offset in its image."""
    size_bytes: int
    shared: bool = False
    """Whether the tensor is in the image that is the same on all ranks."""
    global_shape: tuple[int, ...] | None = None
    """Shape of the whole tensor of which this is a shard; ``None`` if the shard is no box of it."""
    offsets: tuple[int, ...] | None = None
    """First element of the shard in each dimension of the whole tensor."""
    replicas: int = 1
    """Number of ranks that hold the same shard (HSDP)."""


@dataclass(frozen=True, slots=True)
class CopyRange:
    """Bytes ``[start, start + size_bytes)`` of source ``entry``, which go to ``offset`` in the slot."""

    entry: int
    start: int
    offset: int
    size_bytes: int
    is_xor: bool = False
    """Whether the bytes are XORed with those in the slot instead of copied."""


@dataclass(frozen=True, slots=True)
class CopyUnit:
    """Bytes of a slot that one thread copies, with the ranges that they consist of, in order."""

    offset: int
    size_bytes: int
    ranges: tuple[CopyRange, ...]
    gaps: tuple[tuple[int, int], ...] = ()
    """(offset, bytes) that are zeroed first, because no range covers them and parity must not include old
    bytes.
    """


def local_tensor(tensor: Tensor) -> Tensor:
    """Return the memory that this rank holds of the tensor."""
    inner: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return inner.detach()


def dimension_order(tensor: Tensor) -> tuple[int, ...]:
    """Return the dimensions of a tensor from the slowest to the fastest varying one."""
    strides = tensor.stride()
    return tuple(sorted(range(tensor.dim()), key=lambda d: (-strides[d], d)))


def is_expanded(tensor: Tensor) -> bool:
    """Return whether several elements are one place in memory, so that nothing can be copied into the tensor."""
    return any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))


def memory_bytes(tensor: Tensor, order: tuple[int, ...]) -> Tensor | None:
    """Return the tensor's memory as a flat uint8 tensor; ``None`` if it has gaps, overlaps itself, or is a
    lazy conjugate or negative.
    """
    permuted = tensor.permute(order)
    if not permuted.is_contiguous() or permuted.is_conj() or permuted.is_neg():
        return None
    return permuted.reshape(-1).view(torch.uint8)


@dataclass(slots=True)
class KnownTensor:
    """Facts that an earlier snapshot found out about a tensor."""

    tensor: Tensor
    address: int
    dtype: torch.dtype
    device: torch.device
    shape: torch.Size
    strides: tuple[int, ...]
    entry: ImageEntry
    view: Source | None

    def matches(self, tensor: Tensor) -> bool:
        """Return whether the tensor is the same one, with the same memory and layout."""
        if self.tensor is not tensor or self.dtype.is_complex:
            return False  # It may have been conjugated in place.
        return (
            (local_tensor(tensor) if self.entry.sharded else tensor).data_ptr() == self.address
            and self.dtype is tensor.dtype
            and self.device == tensor.device
            and self.shape == tensor.shape
            and self.strides == tensor.stride()
        )


@dataclass(slots=True)
class TensorImage:
    """The layout of one snapshot and the sources of its bytes.

    Views of tensors are reused from the previous snapshot (``known``), since making them costs more than
    checking that they still apply. ``seen`` holds those of this snapshot, for the next one.
    """

    known: dict[int, KnownTensor]
    guarded: set[int] = field(default_factory=set)
    """Ids of the tensors that nobody changes before they are copied."""
    shared: set[int] = field(default_factory=set)
    """Ids of the tensors that are the same on all ranks."""
    seen: dict[int, KnownTensor] = field(default_factory=dict)
    entries: list[ImageEntry] = field(default_factory=list)
    views: list[Source | None] = field(default_factory=list)
    """View of each tensor's memory; ``None`` if it must be gathered from ``tensors``."""
    tensors: list[Tensor] = field(default_factory=list)
    immediate: list[int] = field(default_factory=list)
    """Numbers of the tensors whose bytes must be copied before training goes on."""
    devices: set[torch.device] = field(default_factory=set)
    """Devices of the tensors, except the host."""
    own_bytes: int = 0
    shared_bytes: int = 0
    _taken: dict[tuple[int, int], int] = field(default_factory=dict)

    def add(self, tensor: Tensor, where: str) -> int:
        """Add a tensor and return its number; one that was added before (tied weights) has the same number.

        :raises SnapshotError: the tensor's memory is not a plain array of values.
        """
        found = self.known.get(id(tensor))
        if found is None or not found.matches(tensor):
            found = _examine(tensor, _address(tensor, where))
        address = found.address
        self.seen[id(tensor)] = found
        key = (address or id(tensor), found.entry.size_bytes)
        number = self._taken.get(key)
        if (
            number is not None
            and _have_equal_layout(self.entries[number], found.entry)
            and _have_equal_values(self.tensors[number], tensor)
        ):
            return number
        number = self._taken[key] = len(self.entries)
        shared = id(tensor) in self.shared
        offset = align(self.shared_bytes if shared else self.own_bytes)
        if (found.entry.offset, found.entry.shared) != (offset, shared):
            found.entry = msgspec.structs.replace(found.entry, offset=offset, shared=shared)
        self.entries.append(found.entry)
        self.views.append(found.view)
        self.tensors.append(tensor)
        if found.view is None or id(tensor) not in self.guarded:
            self.immediate.append(number)
        if not found.entry.on_host:
            self.devices.add(local_tensor(tensor).device)
        if shared:
            self.shared_bytes = offset + found.entry.size_bytes
        else:
            self.own_bytes = offset + found.entry.size_bytes
        return number

    def copy(self, known: dict[int, KnownTensor]) -> "TensorImage":
        """Return a copy to which more tensors can be added."""
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
"""Number of a source, its offset in the image, and its size in bytes."""


def align(size_bytes: int) -> int:
    """Return the size rounded up to a multiple of ``ALIGNMENT_BYTES``."""
    return -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def cut_units(ranges: Sequence[Range], saved: Sequence[XorRange], base: int = 0) -> list[CopyUnit]:
    """Return the units of the saved bytes of an image, each a copy or an XOR of ranges of it.

    :param ranges: sources of the image, in ascending order.
    :param base: offset in the slot of the first saved byte.
    """
    offsets = [offset for _, offset, _ in ranges]
    units = []
    for one in saved:
        for first in range(0, one.size_bytes, UNIT_BYTES):
            size, at = min(UNIT_BYTES, one.size_bytes - first), base + one.offset + first
            rows = [_within(ranges, offsets, source + first, size, at) for source in one.sources]
            parts = [
                CopyRange(number, start, offset, length, added)
                for added, row in zip((False, *[True] * (len(rows) - 1)), rows, strict=True)
                for number, start, offset, length in row
            ]
            units.append(CopyUnit(at, size, tuple(parts), tuple(_gaps(rows[0], at, at + size))))
    return units


def whole_image(size_bytes: int) -> list[XorRange]:
    """Return the single range that saves an image as it is."""
    return [XorRange(offset=0, size_bytes=size_bytes, sources=(0,))] if size_bytes else []


_Row = list[tuple[int, int, int, int]]
"""Number of a source, first byte of it, offset in the slot, and size in bytes."""


def _within(ranges: Sequence[Range], offsets: list[int], first: int, size: int, at: int) -> _Row:
    """Return where the image's bytes [first, first + size) come from, for the offset ``at`` in the slot."""
    row: _Row = []
    for number, offset, length in ranges[max(0, bisect_right(offsets, first) - 1) :]:
        if offset >= first + size:
            break
        low, high = max(first, offset), min(first + size, offset + length)
        if low < high:
            row.append((number, low - offset, at + low - first, high - low))
    return row


def _gaps(row: _Row, end: int, last: int) -> Iterator[tuple[int, int]]:
    """Yield (offset, bytes) of the gaps between ``end`` and ``last`` that no range of the row covers."""
    for _, _, offset, length in row:
        if offset > end:
            yield end, offset - end
        end = offset + length
    if last > end:
        yield end, last - end


def _address(tensor: Tensor, where: str) -> int:
    if is_lazy(tensor):
        raise SnapshotError(f"{where} has no shape yet: call the lazy module once, then register it")
    special = "nested " * tensor.is_nested + "quantized " * tensor.is_quantized
    if special or tensor.layout is not torch.strided or tensor.device.type == "meta":
        raise SnapshotError(
            f"{where} is a {special}{tensor.layout} tensor on {tensor.device}: only dense tensors with memory "
            "can be saved"
        )
    return local_tensor(tensor).data_ptr() if hasattr(tensor, "to_local") else tensor.data_ptr()


def _examine(tensor: Tensor, address: int) -> KnownTensor:
    inner = local_tensor(tensor)
    order = dimension_order(inner)
    flat = memory_bytes(inner, order)
    if flat is None:
        order = tuple(range(inner.dim()))
    view: Source | None = flat.numpy() if flat is not None and flat.device.type == "cpu" else flat
    placement = placement_of(tensor)
    entry = ImageEntry(
        dtype=dtype_name(inner.dtype),
        shape=tuple(inner.shape),
        order=order,
        on_host=inner.device.type == "cpu",
        sharded=hasattr(tensor, "to_local"),
        offset=0,
        size_bytes=inner.nbytes,
        global_shape=tuple(tensor.shape) if placement is not None else None,
        offsets=placement.box.offsets if placement is not None else None,
        replicas=placement.replicas if placement is not None else 1,
    )
    return KnownTensor(
        tensor, address, tensor.dtype, tensor.device, tensor.shape, tensor.stride(), entry, view
    )


def _have_equal_layout(one: ImageEntry, other: ImageEntry) -> bool:
    return (one.dtype, one.shape, one.order) == (other.dtype, other.shape, other.order)


def _have_equal_values(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors of the same address, shape and type have the same values: they are not, for example,
    a row and a diagonal.
    """
    if one is other:
        return True
    one, other = local_tensor(one), local_tensor(other)
    return (one.stride(), one.is_conj(), one.is_neg()) == (other.stride(), other.is_conj(), other.is_neg())


def row_major_bytes(tensor: Tensor) -> Tensor:
    """Return the bytes of a row-major copy."""
    return flat_bytes(local_tensor(tensor).resolve_conj().resolve_neg()).clone()


def _fits(entry: ImageEntry, tensor: Tensor) -> bool:
    inner = local_tensor(tensor)
    return tuple(inner.shape) == entry.shape and str(inner.dtype) == f"torch.{entry.dtype}"


def choose_target(entry: ImageEntry, old: Tensor | None, like: Tensor | None) -> Tensor:
    """Return the tensor that will hold the saved one: ``old`` where it fits, else a new one with the layout of
    ``like``.
    """
    if old is not None and _fits(entry, old):
        return old
    dtype = getattr(torch, entry.dtype)
    if like is not None and _fits(msgspec.structs.replace(entry, dtype=str(like.dtype)[6:]), like):
        return torch.empty_like(like, dtype=dtype, requires_grad=False)
    device = like.device if like is not None and not entry.on_host else torch.device("cpu")
    return in_shape(entry, torch.empty(entry.size_bytes // dtype.itemsize, dtype=dtype, device=device))


def copy_into(entry: ImageEntry, data: Bytes, tensor: Tensor) -> None:
    """Copy a tensor from the image into ``tensor``, which ``choose_target`` returned."""
    if entry.size_bytes:
        local_tensor(tensor).copy_(tensor_in(entry, data))


def tensor_in(entry: ImageEntry, image: Bytes) -> Tensor:
    """Return a tensor that shares the memory of its image."""
    flat = torch.from_numpy(image[entry.offset : entry.offset + entry.size_bytes])
    return in_shape(entry, flat.view(getattr(torch, entry.dtype)))


def in_shape(entry: ImageEntry, flat: Tensor) -> Tensor:
    """Return a view of an entry's values, which are in its order of dimensions, with its shape."""
    lying = flat.reshape([entry.shape[d] for d in entry.order])
    return lying.permute([entry.order.index(d) for d in range(len(entry.order))])
