"""Resharding: a rank's image is assembled from the images of other ranks, which were cut in another way.

A snapshot names the whole shape of each sharded tensor and the box of it that its rank held. A rank that
holds another box now (another number of ranks, another mesh) copies what its box has in common with those of
the former ranks. Tensors are matched by their place in the registered state, since ranks may number them
differently. All else (random states, positions in the data, plain tensors) comes from one former rank.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from runtime.script.plain_state import SnapshotError, TensorRef
from runtime.script.registered import RegisteredObject
from runtime.script.saved import SavedSnapshot
from runtime.script.tensor_box import Box, placement_of
from runtime.script.tensor_image import Bytes, ImageEntry, align, local_tensor, tensor_in

TensorPath = tuple[Any, ...]
"""Name of the registered object, and the keys that lead to a tensor in its state."""


def box_in(entry: ImageEntry) -> Box | None:
    """Return the part of its whole tensor that an image holds; ``None`` if the snapshot does not name it."""
    if not entry.sharded:
        return Box.whole(entry.shape)
    return Box(entry.offsets, entry.shape) if entry.offsets is not None else None


def box_here(tensor: Tensor) -> Box | None:
    """Return the part of a registered tensor that this rank holds."""
    if not hasattr(tensor, "to_local"):
        return Box.whole(tensor.shape)
    placement = placement_of(tensor)
    return placement.box if placement is not None else None


def tensor_paths(content: Mapping[str, Any]) -> dict[TensorPath, int]:
    """Return the number of each tensor in a header's content, by its place."""
    return {
        path: number
        for name, saved in content["objects"].items()
        for path, number in _walk(saved["state"], (name,))
    }


def _walk(value: Any, path: TensorPath) -> Iterator[tuple[TensorPath, int]]:
    if isinstance(value, TensorRef):
        yield path, value.index
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _walk(item, (*path, key))
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _walk(item, (*path, index))


def changed_boxes(
    objects: Mapping[str, RegisteredObject], saved: SavedSnapshot, *, same_ranks: bool
) -> dict[int, Box]:
    """Return the box that this rank holds now of each tensor of which the snapshot holds another one, by the
    tensor's number.

    :param saved: a snapshot that fits the registered objects (``SavedSnapshot.mismatch``).
    :param same_ranks: whether this rank saved it, and there are as many ranks as then.
    :raises SnapshotError: a tensor's present part is not known.
    """
    changed: dict[int, Box] = {}
    for path, number in tensor_paths(saved.content).items():
        entry, registered = saved.entries[number], objects[path[0]]
        live = registered.tensor_like(path[1:])
        if live is None and entry.sharded and not same_ranks:
            raise SnapshotError(f"{_name(path)} is sharded, and belongs to no registered module or optimizer")
        if live is None or (not entry.sharded and not hasattr(live, "to_local")):
            continue
        before, now = box_in(entry), box_here(live)
        if before == now and before is not None:
            continue
        if before is None or now is None or entry.shared:
            if tuple(entry.shape) == tuple(local_tensor(live).shape) and not entry.shared:
                continue
            raise SnapshotError(f"{_name(path)} is sharded in a way that is not known")
        if tuple(entry.global_shape or entry.shape) != tuple(live.shape):
            if not entry.sharded:
                continue  # A number that an optimizer keeps for a sharded parameter.
            raise SnapshotError(
                f"{_name(path)} is sharded in another way than its parameter, and can be restored only on the "
                "same ranks"
            )
        changed[number] = now
    return changed


def _name(path: TensorPath) -> str:
    return ".".join(map(str, path))


@dataclass(slots=True)
class ShardAssembler:
    """The image of this rank while it is assembled.

    :param base: snapshot of the former rank that all else is taken from.
    :param boxes: this rank's boxes (``changed_boxes``).
    """

    base: SavedSnapshot
    boxes: dict[int, Box]
    entries: list[ImageEntry] = field(init=False)
    image: Bytes = field(init=False)
    _paths: dict[int, TensorPath] = field(init=False)
    _used: dict[int, list[Box]] = field(init=False)
    """Boxes that were copied, by the tensor's number; they do not overlap."""

    def __post_init__(self) -> None:
        self._paths = {number: path for path, number in tensor_paths(self.base.content).items()}
        self._used = {number: [] for number in self.boxes}
        self.entries, end = [], 0
        for number, entry in enumerate(self.base.entries):
            if entry.shared:
                self.entries.append(entry)
                continue
            offset = align(end)
            made = msgspec.structs.replace(entry, offset=offset)
            if (box := self.boxes.get(number)) is not None:
                made = msgspec.structs.replace(
                    made,
                    shape=box.sizes,
                    order=tuple(range(len(box.sizes))),
                    size_bytes=box.elements * getattr(torch, entry.dtype).itemsize,
                    offsets=box.offsets,
                    global_shape=entry.global_shape or entry.shape,
                    sharded=True,
                )
            self.entries.append(made)
            end = offset + self.entries[-1].size_bytes
        self.image = np.zeros(end, dtype=np.uint8)
        for number, (entry, made) in enumerate(zip(self.base.entries, self.entries, strict=True)):
            if not entry.shared and number not in self.boxes:
                end = made.offset + made.size_bytes
                self.image[made.offset : end] = self.base.own[entry.offset : entry.offset + entry.size_bytes]

    def add(self, saved: SavedSnapshot) -> None:
        """Copy what a former rank held of this rank's boxes. Its bytes must be verified.

        :raises SnapshotError: its boxes overlap with another rank's in part.
        """
        numbers = tensor_paths(saved.content)
        for number, box in self.boxes.items():
            other = numbers.get(self._paths[number])
            held = box_in(saved.entries[other]) if other is not None else None
            common = box.common(held) if held is not None else None
            if common is None or common in self._used[number]:
                continue  # A replica of what was copied.
            if any(common.common(used) for used in self._used[number]):
                raise SnapshotError(f"{_name(self._paths[number])}: the parts of two ranks overlap")
            assert other is not None and held is not None
            source = tensor_in(saved.entries[other], saved.own)
            target = tensor_in(self.entries[number], self.image)
            target[box.slices_of(common)] = source[held.slices_of(common)]
            self._used[number].append(common)

    @property
    def missing(self) -> list[str]:
        """Names of the tensors of which elements are missing."""
        return [
            _name(self._paths[number])
            for number, box in self.boxes.items()
            if sum(used.elements for used in self._used[number]) < box.elements
        ]

    def assembled(self) -> SavedSnapshot:
        """Return the snapshot as this rank would have written it."""
        return SavedSnapshot(
            content=self.base.content, entries=self.entries, own=self.image, shared=self.base.shared
        )
