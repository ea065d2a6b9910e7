"""Layers of a group whose owners had only parts of them (ZeRO-1), put together from all parts.

Each part is with its owner, and with ``arc:1`` also with the owner before it, which kept a replica. Nothing
is decoded: a part that cannot be read where it was looked for is read where else it is. What a layer shares
with an earlier one (tied weights) comes from the parts of that one.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from ftd.errors import PeerError
from storage.errors import DamagedError
from storage.manifest import Part
from storage.partimage import Bytes, PartImage, PartOfLayer, ShardedImage, WholeLayer, assemble, lent

Read = Callable[[int, int], Awaitable[Bytes]]
"""Bytes of what was kept, from an offset, so many.

:raises PeerError: they are not to be had (any more).
"""
Lose = Callable[[str, str, str], None]
"""Takes a node, a part and what is wrong with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """A part of a group's layers in a node's memory: its own, or the next owner's."""

    node: str
    name: str
    image: PartImage
    read: Read


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptParts:
    """What one node has of a group: the small part, and for each kind of bytes the reader."""

    node: str
    small: Part
    image: ShardedImage
    shard: tuple[Part, Read] | None
    replica: tuple[Part, Read] | None

    def copies(self, lose: Lose) -> list[Copy]:
        """What of it is sound and of the right length."""
        found: list[Copy] = []
        for image, kept in zip(self.image.held, (self.shard, self.replica), strict=False):
            if kept is None:
                continue
            part, read = kept
            if part.size_bytes < image.size_bytes:
                lose(self.node, part.name, f"{part.size_bytes} bytes, and {image.size_bytes} are told of")
            else:
                found.append(Copy(node=self.node, name=part.name, image=image, read=read))
        return found


class LostPartsError(PeerError):
    """Parts of ``layer`` are nowhere."""

    def __init__(self, layer: int, parts: Iterable[int]) -> None:
        self.layer, self.parts = layer, tuple(parts)
        super().__init__(f"nobody who is here has parts {list(self.parts)} of layer {layer}")


def homes_of(kept: Sequence[KeptParts], layer: int) -> list[int]:
    """The layers whose parts have what ``layer`` shares with them, ascending."""
    return sorted(set(_told_of(kept, layer).homes.values()))


async def put_together(
    kept: Sequence[KeptParts],
    layer: int,
    homes: Mapping[int, Sequence[KeptParts]],
    lose: Lose,
    gone: set[tuple[str, str]],
) -> tuple[bytes, Bytes]:
    """Header and payload of a layer.

    :param homes: who has parts of each of its ``homes_of``.
    :param gone: node and name of copies that could not be read; those found on the way are added.
    :raises LostPartsError: a part is nowhere.
    :raises DamagedError: what is kept does not make up the layer.
    """
    whole = _told_of(kept, layer)
    pieces = await _all_parts(kept, layer, lose, gone)
    for home, some in homes.items():
        pieces += [(lent(whole, part), data) for part, data in await _all_parts(some, home, lose, gone)]
    return await asyncio.to_thread(assemble, whole, pieces)


def _told_of(kept: Sequence[KeptParts], layer: int) -> WholeLayer:
    return next(one for one in kept[0].image.layers if one.layer == layer)


async def _all_parts(
    kept: Sequence[KeptParts], layer: int, lose: Lose, gone: set[tuple[str, str]]
) -> list[tuple[PartOfLayer, Bytes]]:
    image = kept[0].image
    copies = [copy for one in kept for copy in one.copies(lose) if one.image.parts == image.parts]
    pieces = await asyncio.gather(
        *(
            _read([copy for copy in copies if copy.image.part == part], layer, lose, gone)
            for part in range(image.parts)
        )
    )
    lost = [part for part, piece in enumerate(pieces) if piece is None]
    if lost:
        raise LostPartsError(layer, lost)
    return [piece for piece in pieces if piece is not None]


async def _read(
    copies: list[Copy], layer: int, lose: Lose, gone: set[tuple[str, str]]
) -> tuple[PartOfLayer, Bytes] | None:
    """One part of the layer, from the first who has it."""
    for copy in copies:
        if (copy.node, copy.name) in gone:
            continue
        of = next((one for one in copy.image.layers if one.layer == layer), None)
        try:
            if of is None:
                raise DamagedError(f"it has nothing of layer {layer}")
            return of, await copy.read(of.offset, of.size_bytes)
        except (PeerError, DamagedError) as error:
            gone.add((copy.node, copy.name))
            lose(copy.node, copy.name, str(error))
    return None
