"""Bytes of the kept snapshot that changed in this node's memory, made again from what is kept elsewhere.

A block at a time: from another run of the very same bytes (a small part's twin, the buddy's copy, or the
owner's of a copy), else, of a shard, from the other owners' shards: its segment by decoding, its parity by
computing it again. All that is read is verified on the way, and what comes out against the digest that the
owner's trainer wrote; only such bytes are written back, and who may write them is ``ftd.node.snapshots``'s.
"""

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from ftd.errors import PeerError
from ftd.node.restoring.bucket import Store
from ftd.node.restoring.group_layout import layout_of
from ftd.node.shards.arenas import Arenas, Held
from ftd.node.shards.client import ShardClient
from ftd.node.shards.sources import Located, Source, Wanted
from statemachine.values import Restore, SnapshotGroup
from storage.codes import make_code
from storage.errors import LostError
from storage.manifest import Manifest, Part
from storage.shards import Bytes, ShardLayout, needed_for, remake


class RepairError(PeerError):
    """Nobody has what would make the bytes again; says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Remade:
    """A block as it was written."""

    data: bytes
    sources: tuple[str, ...]
    """Nodes whose memory it was made from."""


@dataclass(frozen=True, slots=True)
class _Kept:
    """A part in some node's memory; ``held`` where it is this one's."""

    node: str
    part: Part
    held: Held | None


@dataclass(slots=True, kw_only=True)
class Repairer:
    """For one reading of one snapshot: whom it asked it does not ask again."""

    restore: Restore
    node: str
    arenas: Arenas
    client: ShardClient
    _theirs: dict[str, tuple[Manifest, ...]] = field(default_factory=dict)
    _reasons: dict[str, str] = field(default_factory=dict)
    """Why a node could not help."""

    async def remake(self, held: Held, part: Part, number: int) -> Remade:
        """:raises RepairError: it cannot be made. :raises OSError: this node's own memory is gone."""
        first, end = part.block(number)
        for twins in (self._twins_here, self._twins_there):
            for kept in await twins(held, part):
                try:
                    data = await self._read(kept, first, end)
                except PeerError as error:
                    self._reasons[kept.node] = str(error)
                    continue
                if part.sound(number, data):
                    return Remade(data=data, sources=(kept.node,))
                self._reasons[kept.node] = f"{kept.part.name} is damaged there, too"
        group = next((g for g in self.restore.groups if part.name == f"group-{g.first_layer}/shard"), None)
        if group is None or held.owner:
            raise self._lost(part, "there is no other run of the same bytes")
        target, sources = await self._decoded(group, held, part, first, end)
        data = target.tobytes()
        if not part.sound(number, data):
            raise self._lost(part, f"what {', '.join(sources)} keep makes other bytes than were written")
        return Remade(data=data, sources=sources)

    def _lost(self, part: Part, why: str) -> RepairError:
        reasons = "; ".join(f"{node}: {reason}" for node, reason in sorted(self._reasons.items()))
        return RepairError(f"{part.name}: {why}{f' ({reasons})' if reasons else ''}")

    # --- the same bytes elsewhere ------------------------------------------------------------------

    async def _twins_here(self, held: Held, part: Part) -> list[_Kept]:
        found = self.arenas.find(self.restore.job_id, self.restore.step)
        return [
            _Kept(self.node, other, one)
            for one in found
            if one.manifest.generation == self.restore.generation
            for other in one.manifest.parts
            if _same(other, part) and (one, other) != (held, part)
        ]

    async def _twins_there(self, _: Held, part: Part) -> list[_Kept]:
        there = [(node, await self._of(node)) for node in sorted(set(self.restore.sources) - {self.node})]
        return [
            _Kept(node, other, None)
            for node, manifests in there
            for manifest in manifests
            for other in manifest.parts
            if _same(other, part)
        ]

    async def _of(self, node: str) -> tuple[Manifest, ...]:
        if node not in self._theirs:
            source = Source(node=node, address=self.restore.sources[node])
            self._theirs[node] = ()
            try:
                answer = await self.client.manifest(source, self.restore.job_id, self.restore.step)
            except PeerError as error:
                self._reasons[node] = str(error)
            else:
                found = answer.manifests if answer is not None else ()
                self._theirs[node] = tuple(m for m in found if m.generation == self.restore.generation)
        return self._theirs[node]

    async def _read(self, kept: _Kept, first: int, end: int) -> bytes:
        if kept.held is not None:
            return bytes(self.arenas.view(kept.held, kept.part)[first:end])
        target = bytearray(end - first)
        await self.client.fetch([self._wanted(kept.node, kept.part, first, memoryview(target))])
        return bytes(target)

    def _wanted(self, node: str, part: Part, first: int, into: memoryview) -> Wanted:
        place = Located(
            source=Source(node=node, address=self.restore.sources[node]),
            job_id=self.restore.job_id,
            step=self.restore.step,
            part=part,
        )
        return Wanted(places=(place,), first=first, into=into)

    # --- out of other bytes ------------------------------------------------------------------------

    async def _decoded(
        self, group: SnapshotGroup, held: Held, part: Part, first: int, end: int
    ) -> tuple[Bytes, tuple[str, ...]]:
        owner = group.owners.index(self.node) if self.node in group.owners else -1
        mine = layout_of(held.manifest, group, owner) if owner >= 0 else None
        if mine is None or mine.parts:
            raise self._lost(part, "it is no shard of a code, and there is no other run of the same bytes")
        layout = ShardLayout(
            code=make_code(group.protection, len(group.owners)), bucket_bytes=mine.bucket_bytes
        )
        shards = await self._shards(group, layout, owner)
        while True:
            present = frozenset(shards)
            try:
                ranges = await asyncio.to_thread(needed_for, layout, owner, present, first, end)
            except LostError as error:
                raise self._lost(part, str(error)) from None
            stores = {other: Store(some) for other, some in ranges.items()}
            failed = await self._fill(group, shards, stores)
            if not failed:
                break
            for other in failed:
                del shards[other]
        target = np.empty(end - first, dtype=np.uint8)
        await asyncio.to_thread(
            remake,
            layout,
            owner,
            present,
            lambda other, at, size: stores[other].read(at, size),
            first,
            target,
        )
        return target, tuple(group.owners[other] for other in sorted(stores))

    async def _shards(self, group: SnapshotGroup, layout: ShardLayout, owner: int) -> dict[int, Part]:
        """By owner: what the others have of the very same group."""
        found: dict[int, Part] = {}
        for other, node in enumerate(group.owners):
            if other == owner or node not in self.restore.sources:
                continue
            for manifest in await self._of(node):
                theirs = layout_of(manifest, group, other)
                part = next((p for p in manifest.parts if p.name == f"group-{group.first_layer}/shard"), None)
                fits = theirs is not None and theirs.bucket_bytes == layout.bucket_bytes
                if fits and part is not None and part.size_bytes == layout.shard_bytes(other):
                    found[other] = part
        return found

    async def _fill(
        self, group: SnapshotGroup, shards: dict[int, Part], stores: dict[int, Store]
    ) -> Iterable[int]:
        """Fetch what the stores want, from all at once; whose bytes are not to be had."""

        async def fill(other: int, store: Store) -> None:
            await self.client.fetch(
                self._wanted(group.owners[other], shards[other], some.start, memory.data)
                for some, memory in store.pieces
            )

        results = await asyncio.gather(
            *(fill(other, store) for other, store in stores.items()), return_exceptions=True
        )
        failed = []
        for other, result in zip(stores, results, strict=True):
            if isinstance(result, PeerError):
                self._reasons[group.owners[other]] = str(result)
                failed.append(other)
            elif isinstance(result, BaseException):
                raise result
        return failed


def _same(one: Part, other: Part) -> bool:
    """Were these the same bytes when they were written?"""
    return (one.digest, one.size_bytes) == (other.digest, other.size_bytes)
