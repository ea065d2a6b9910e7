"""Assembly of layers whose owners hold only parts of them, from parts that cover them.

Owners may have cut a layer differently. Each part is held by its owner, and with ``arc:1`` also by the
preceding owner as a replica. Nothing is decoded: a part that cannot be read in one place is read in
another. What a layer shares with an earlier one (tied weights) comes from the parts of that earlier layer.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction

from ftd.errors import PeerError
from ftd.snapshots.restoring.holders import ReportCorruption
from storage.errors import CorruptDataError
from storage.manifest import SnapshotPart
from storage.partimage import (
    Bytes,
    LayerPart,
    PartImage,
    ShardedImage,
    WholeLayer,
    assemble_from_parts,
    select_tied,
)

Read = Callable[[int, int], Awaitable[Bytes]]
"""Function that reads as many bytes from an offset on as the second argument says.

:raises PeerError: the bytes cannot be read (any more).
"""

Span = tuple[Fraction, Fraction]
"""A range of fractions of a layer."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PartCopy:
    """A part of a group's layers in a node's memory: its own, or another owner's."""

    node: str
    part: SnapshotPart
    image: PartImage
    read: Read

    @property
    def span(self) -> Span:
        return Fraction(self.image.start, self.image.of), Fraction(self.image.end, self.image.of)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldParts:
    """Data that one device of a node holds of a group: the small part, and a reader for shard and replica."""

    node: str
    image: ShardedImage
    shard: tuple[SnapshotPart, Read] | None
    replica: tuple[SnapshotPart, Read] | None

    def copies(self, report_corruption: ReportCorruption) -> list[PartCopy]:
        """Return the parts that are intact and long enough."""
        found: list[PartCopy] = []
        for image in self.image.held:
            held = self.replica if image.replica else self.shard
            if held is None:
                continue
            part, read = held
            end = image.offset + image.size_bytes
            if part.size_bytes < end:
                report_corruption(
                    self.node, part.name, f"it has {part.size_bytes} bytes, and its layout needs {end}"
                )
            else:
                found.append(PartCopy(node=self.node, part=part, image=image, read=read))
        return found


class LostPartsError(PeerError):
    """No node holds these ranges of ``layer``."""

    def __init__(self, layer: int, spans: Iterable[Span]) -> None:
        self.layer = layer
        ranges = ", ".join(f"from {start} to {end}" for start, end in spans)
        super().__init__(f"no node that is present has the part {ranges} of layer {layer}")


def homes_of(held: Sequence[HeldParts], layer: int) -> list[int]:
    """Return the layers whose parts hold what ``layer`` shares with them, ascending."""
    return sorted(set(_description_of(held, layer).homes.values()))


@dataclass(slots=True)
class PartAssembler:
    """An assembler of layers, which does not read again what could not be read."""

    report_corruption: ReportCorruption
    unreadable: set[tuple[str, SnapshotPart]] = field(default_factory=set)
    """Node and part of copies that could not be read."""

    async def assemble(
        self, held: Sequence[HeldParts], layer: int, homes: Mapping[int, Sequence[HeldParts]]
    ) -> tuple[bytes, Bytes]:
        """Return header and payload of a layer.

        :param homes: the holders of parts of each of its ``homes_of``.
        :raises LostPartsError: no node holds some part.
        :raises CorruptDataError: the parts do not make up the layer.
        """
        whole = _description_of(held, layer)
        parts = await self._all_parts(held, layer)
        for home, some in homes.items():
            parts += [(select_tied(whole, part), data) for part, data in await self._all_parts(some, home)]
        return await asyncio.to_thread(assemble_from_parts, whole, parts)

    async def _all_parts(self, held: Sequence[HeldParts], layer: int) -> list[tuple[LayerPart, Bytes]]:
        """Return parts that cover the layer. If one cannot be read, others replace it."""
        here = [one for one in held if any(whole.layer == layer for whole in one.image.layers)]
        copies = [copy for one in here for copy in one.copies(self.report_corruption)]
        done: dict[PartCopy, tuple[LayerPart, Bytes]] = {}
        while True:
            there = [copy for copy in copies if copy in done or (copy.node, copy.part) not in self.unreadable]
            chosen, missing = choose_covering(there)
            if missing:
                raise LostPartsError(layer, missing)
            new = [copy for copy in chosen if copy not in done]
            if not new:
                return [done[copy] for copy in chosen]
            parts = await asyncio.gather(*(self._read(copy, layer) for copy in new))
            done |= {copy: piece for copy, piece in zip(new, parts, strict=True) if piece is not None}

    async def _read(self, copy: PartCopy, layer: int) -> tuple[LayerPart, Bytes] | None:
        """Return what the copy holds of the layer, or ``None`` if it cannot be read."""
        part = next(one for one in copy.image.layers if one.layer == layer)
        try:
            return part, await copy.read(copy.image.offset + part.offset, part.size_bytes)
        except (PeerError, CorruptDataError) as error:
            self.unreadable.add((copy.node, copy.part))
            self.report_corruption(copy.node, copy.part.name, str(error))
            return None


def _description_of(held: Sequence[HeldParts], layer: int) -> WholeLayer:
    return next(one for some in held for one in some.image.layers if one.layer == layer)


def choose_covering(copies: Sequence[PartCopy]) -> tuple[list[PartCopy], list[Span]]:
    """Return copies that cover as much of a layer as all of them do, and the ranges that none covers.

    Where several copies hold the next element, the first of them is chosen.
    """
    chosen: list[PartCopy] = []
    missing: list[Span] = []
    reached = Fraction(0)
    while reached < 1:
        copy = next((one for one in copies if one.span[0] <= reached < one.span[1]), None)
        if copy is not None:
            chosen.append(copy)
            reached = copy.span[1]
        else:
            begin = min((one.span[0] for one in copies if one.span[0] > reached), default=Fraction(1))
            missing.append((reached, begin))
            reached = begin
    return chosen, missing
