"""Boxes of elements: which part of a whole tensor a rank holds, and what two such parts have in common.

A sharded tensor (FSDP2's and HSDP's ``DTensor``) is cut along its dimensions, so each rank holds a box of it.
Resharding copies the common boxes of what ranks held and of what ranks hold now.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from torch import Tensor

_SHARDING = "torch.distributed.tensor"
"""Module whose import takes half a second. A script that shards tensors has imported it."""


@dataclass(frozen=True, slots=True)
class Box:
    """The elements ``[offsets[d], offsets[d] + sizes[d])`` of each dimension d of a whole tensor."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> "Box":
        """Return the box of all elements of a tensor of this shape."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def elements(self) -> int:
        """Number of elements."""
        return prod(self.sizes)

    def common(self, other: "Box") -> "Box | None":
        """Return the box of the elements that are in both; ``None`` if there are none."""
        low = tuple(map(max, self.offsets, other.offsets))
        high = tuple(map(min, self.ends, other.ends))
        sizes = tuple(end - start for start, end in zip(low, high, strict=True))
        return Box(low, sizes) if all(size > 0 for size in sizes) else None

    @property
    def ends(self) -> tuple[int, ...]:
        """Element after the last one, in each dimension."""
        return tuple(start + size for start, size in zip(self.offsets, self.sizes, strict=True))

    def slices_of(self, part: "Box") -> tuple[slice, ...]:
        """Return the indices of ``part``, which is in this box, in a tensor that holds this box."""
        return tuple(
            slice(start - origin, start - origin + size)
            for start, size, origin in zip(part.offsets, part.sizes, self.offsets, strict=True)
        )


@dataclass(frozen=True, slots=True)
class Placement:
    """The part of a whole tensor that this rank holds."""

    box: Box
    replicas: int
    """Number of ranks that hold the same part."""


def placement_of(tensor: Tensor) -> Placement | None:
    """Return the part of a sharded tensor that this rank holds; ``None`` if that is no box of final values."""
    if _SHARDING not in sys.modules:
        return None
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    if not isinstance(tensor, DTensor):
        return None
    mesh, placements = tensor.device_mesh, tensor.placements
    if any(placement.is_partial() for placement in placements):
        return None
    shape, offsets = compute_local_shape_and_global_offset(tensor.shape, mesh, placements)
    if tuple(shape) != tuple(tensor.to_local().shape):
        return None
    # The offset of an empty part may lie beyond the tensor.
    box = Box(tuple(offsets) if prod(shape) else (0,) * len(shape), tuple(shape))
    return Placement(
        box, prod(mesh.size(dim) for dim, placement in enumerate(placements) if placement.is_replicate())
    )
