"""Repair of corrupt bytes in this node's memory from the memory of other nodes.

Repair works block by block. It first looks for the very same bytes elsewhere: the twin of a small part, the
replica peer's copy, or the owner's part of a copy. Otherwise it makes a shard's bytes from the other
owners' shards, the segment by decoding and the parity by computing it again. Where owners hold different
parts, it takes the same elements from other owners. Everything is verified as it is read, and the result is
compared with the digest that the owner's trainer wrote. Only then are the bytes written back, by
``ftd.snapshots.repair_writer``.
"""

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from ftd.errors import PeerError
from ftd.snapshots.restoring.holders import GroupLayout, SnapshotReader, find_layouts
from ftd.snapshots.restoring.read_plan import ShardsUnusableError, recompute_shard
from ftd.snapshots.shards.arenas import ArenaSnapshot
from statemachine.messages.values import SnapshotGroup
from storage.codes import make_code
from storage.errors import CorruptDataError, TooManyLossesError
from storage.manifest import SnapshotManifest, SnapshotPart
from storage.partimage import ShardedImage, TensorByteRange, find_bytes, find_tensors
from storage.shards import Bytes, ShardLayout


class RepairError(PeerError):
    """Nobody holds what would be needed; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RepairedBlock:
    """A repaired block."""

    data: bytes
    sources: tuple[str, ...]
    """Nodes whose memory it was made from."""


@dataclass(frozen=True, slots=True)
class _PartSource:
    """A part in some node's memory; ``held`` if it is in this node's."""

    node: str
    part: SnapshotPart
    held: ArenaSnapshot | None


@dataclass(frozen=True, slots=True)
class _OwnerParts:
    """Another node's small part of some layers, with its shard and replica parts."""

    node: str
    image: ShardedImage
    shard: SnapshotPart | None
    replica: SnapshotPart | None


@dataclass(slots=True, kw_only=True)
class Repairer(SnapshotReader):
    """The repair of the corrupt blocks that one reading of one snapshot found. It asks each node for its
    manifests once.
    """

    _manifests: dict[str, tuple[SnapshotManifest, ...]] = field(default_factory=dict)
    _reasons: dict[str, str] = field(default_factory=dict)
    """Reason why each node could not help."""

    async def repair_block(self, held: ArenaSnapshot, part: SnapshotPart, number: int) -> RepairedBlock:
        """Return the block as it was written.

        :raises RepairError: it cannot be made.
        :raises OSError: this node's own memory is gone.
        """
        first, end = part.block(number)
        async for kept in self._twins(held, part):
            try:
                data = await self._read(kept, first, end)
            except PeerError as error:
                self._reasons[kept.node] = str(error)
                continue
            if part.is_block_intact(number, data):
                return RepairedBlock(data=data, sources=(kept.node,))
            self._reasons[kept.node] = f"{kept.part.name} is corrupt there as well"
        mine = None if held.owner else self._group_of(held, part)
        if mine is None:
            raise self._error(part, "no node holds the same bytes")
        group, layout = mine
        if layout.parted:
            target, sources = await self._make_from_parts(group, layout, held, part, first, end)
        else:
            target, sources = await self._decoded(layout.within(group), layout, part, first, end)
        data = target.tobytes()
        if not part.is_block_intact(number, data):
            raise self._error(part, f"the bytes made from {', '.join(sources)} differ from what was written")
        return RepairedBlock(data=data, sources=sources)

    def _error(self, part: SnapshotPart, why: str) -> RepairError:
        reasons = "; ".join(f"{node}: {reason}" for node, reason in sorted(self._reasons.items()))
        return RepairError(f"{part.name}: {why}{f' ({reasons})' if reasons else ''}")

    # --- equal bytes elsewhere ---------------------------------------------------------------------

    async def _twins(self, held: ArenaSnapshot, part: SnapshotPart) -> AsyncIterator[_PartSource]:
        """Yield the parts with the same bytes, first those in this node's memory."""
        for one in self.own_snapshots():
            for other in one.manifest.parts if one.manifest.generation == self.restore.generation else ():
                if _same(other, part) and (one, other) != (held, part):
                    yield _PartSource(self.node, other, one)
        for node in self._other_nodes:
            for manifest in await self._ask_node(node):
                for other in manifest.parts:
                    if _same(other, part):
                        yield _PartSource(node, other, None)

    @property
    def _other_nodes(self) -> list[str]:
        return sorted(set(self.restore.sources) - {self.node})

    async def _ask_node(self, node: str) -> tuple[SnapshotManifest, ...]:
        if node not in self._manifests:
            self._manifests[node] = ()
            try:
                found = (await self.manifests_of(node)).manifests
            except PeerError as error:
                self._reasons[node] = str(error)
            else:
                self._manifests[node] = tuple(m for m in found if m.generation == self.restore.generation)
        return self._manifests[node]

    async def _read(self, kept: _PartSource, first: int, end: int) -> bytes:
        if kept.held is not None:
            return bytes(self.arenas.view(kept.held, kept.part)[first:end])
        target = bytearray(end - first)
        await self.fetch(kept.node, kept.part, [(first, memoryview(target))])
        return bytes(target)

    # --- from other owners' parts --------------------------------------------------------------------

    async def _make_from_parts(
        self,
        group: SnapshotGroup,
        mine: GroupLayout,
        held: ArenaSnapshot,
        part: SnapshotPart,
        first: int,
        end: int,
    ) -> tuple[Bytes, tuple[str, ...]]:
        """Make the bytes from the same elements elsewhere, whatever ranges the other owners hold."""
        image = self._own_image(held, mine)
        if image is None:
            raise self._error(part, "the small part that describes its elements is corrupt as well")
        replica = part.name == mine.name_of("replica")
        others = await self._parts_of_others(group)
        target = np.zeros(end - first, dtype=np.uint8)
        sources: set[str] = set()
        for at, some in find_tensors(image.held, first, end, replica=replica):
            left = some
            while left.start < left.end:
                done = at + left.start - some.start
                size, node = await self._fetch_elements(others, left, target[done:])
                if not size:
                    raise self._error(part, "no node holds the same elements")
                sources.add(node)
                left = replace(left, start=left.start + size)
        return target, tuple(sorted(sources))

    def _own_image(self, held: ArenaSnapshot, mine: GroupLayout) -> ShardedImage | None:
        """Decode this node's small part, or its twin."""
        for kind in ("small", "small-twin"):
            for small in held.manifest.parts:
                if small.name == mine.name_of(kind):
                    image = _image(bytes(self.arenas.view(held, small)))
                    if image is not None and small.is_intact(self.arenas.view(held, small)):
                        return image
        return None

    async def _parts_of_others(self, group: SnapshotGroup) -> list[_OwnerParts]:
        """Return what other nodes hold of these layers."""
        found: list[_OwnerParts] = []
        for node in self._other_nodes:
            for manifest in await self._ask_node(node):
                parts = {part.name: part for part in manifest.parts}
                for owner in range(len(group.owners)):
                    for layout in find_layouts(manifest, group, owner):
                        small = parts.get(layout.name_of("small"))
                        shards = [parts.get(layout.name_of(kind)) for kind in ("shard", "replica")]
                        if small is not None and (image := await self._image_of(node, small)) is not None:
                            found.append(_OwnerParts(node, image, shards[0], shards[1]))
        return found

    async def _image_of(self, node: str, small: SnapshotPart) -> ShardedImage | None:
        try:
            return _image(await self._read(_PartSource(node, small, None), 0, small.size_bytes))
        except PeerError as error:
            self._reasons[node] = str(error)
            return None

    async def _fetch_elements(
        self, others: list[_OwnerParts], wanted: TensorByteRange, into: Bytes
    ) -> tuple[int, str]:
        """Fetch the first of these bytes; return how many were fetched, and from which node. A node that fails
        is not asked again.
        """
        for one in list(others):
            found = find_bytes(one.image.held, wanted)
            if found is None:
                continue
            replica, offset, size = found
            part = one.replica if replica else one.shard
            try:
                if part is None or offset + size > part.size_bytes:
                    raise PeerError("its parts are inconsistent")
                await self.fetch(one.node, part, [(offset, into[:size].data)])
            except PeerError as error:
                self._reasons[one.node] = str(error)
                others.remove(one)
            else:
                return size, one.node
        return 0, ""

    # --- from other shards -------------------------------------------------------------------------

    def _group_of(self, held: ArenaSnapshot, part: SnapshotPart) -> tuple[SnapshotGroup, GroupLayout] | None:
        """Return the group that a part is a shard or replica of, and this node's layout of it."""
        for group in self.restore.groups:
            if self.node in group.owners:
                for layout in find_layouts(held.manifest, group, group.owners.index(self.node)):
                    if part.name in (layout.name_of("shard"), layout.name_of("replica")):
                        return group, layout
        return None

    async def _decoded(
        self, group: SnapshotGroup, mine: GroupLayout, part: SnapshotPart, first: int, end: int
    ) -> tuple[Bytes, tuple[str, ...]]:
        layout = ShardLayout(
            code=make_code(group.protection, len(group.owners)), bucket_bytes=mine.bucket_bytes
        )
        shards = await self._shards(group, layout, mine.owner)

        async def read(other: int, pieces: Sequence[tuple[int, Bytes]]) -> None:
            wanted = ((offset, memory.data) for offset, memory in pieces)
            await self.fetch(group.owners[other], shards[other], wanted)

        target = np.empty(end - first, dtype=np.uint8)
        while True:
            try:
                used = await recompute_shard(layout, mine.owner, frozenset(shards), first, target, read)
            except TooManyLossesError as error:
                raise self._error(part, str(error)) from None
            except ShardsUnusableError as failed:
                for other, problem in failed.owners:
                    self._reasons[group.owners[other]] = str(problem)
                    del shards[other]
            else:
                return target, tuple(group.owners[other] for other in sorted(used))

    async def _shards(self, group: SnapshotGroup, layout: ShardLayout, owner: int) -> dict[int, SnapshotPart]:
        """Return by owner the shards that the other nodes hold of the very same group."""
        found: dict[int, SnapshotPart] = {}
        for other, node in enumerate(group.owners):
            if other == owner or node not in self.restore.sources:
                continue
            for manifest in await self._ask_node(node):
                for theirs in find_layouts(manifest, group, other):
                    part = next((p for p in manifest.parts if p.name == theirs.name_of("shard")), None)
                    fits = (
                        theirs.within(group) == group
                        and theirs.bucket_bytes == layout.bucket_bytes
                        and part is not None
                        and part.size_bytes == layout.shard_bytes(other)
                    )
                    if fits and part is not None:
                        found[other] = part
        return found


def _image(small: bytes) -> ShardedImage | None:
    try:
        return ShardedImage.from_bytes(small)
    except CorruptDataError:
        return None


def _same(one: SnapshotPart, other: SnapshotPart) -> bool:
    """Return whether both parts had the same bytes when they were written."""
    return (one.digest, one.size_bytes) == (other.digest, other.size_bytes)
