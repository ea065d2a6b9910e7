"""Restoring layers from a snapshot in the memory of several nodes: REFT-load.

Given a ``Restore`` and the layers that this node's devices need, it reads own memory first and other nodes'
memory through their snapshot servers, several at a time and only the bytes that are needed. Lost or corrupt
shards are decoded from the others where the code allows it. Each layer is packed as
``runtime.layers.state`` does, for a trainer's files or a persistent checkpoint. Work on many bytes runs in
threads, so that heartbeats go on.
"""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import numpy as np

from ftd.errors import PeerError
from ftd.snapshots.restoring.holders import (
    ReportCorruption,
    ShardHolder,
    SnapshotReader,
    find_layouts,
    holder_nodes,
)
from ftd.snapshots.restoring.part_assembly import HeldParts, LostPartsError, PartAssembler, homes_of
from ftd.snapshots.restoring.read_plan import (
    ByteRange,
    ReadPlan,
    ShardsUnusableError,
    execute_read,
    plan_read,
)
from ftd.snapshots.restoring.staging import LocatedLayer, PutLayer, RestoreTarget
from ftd.snapshots.shards.arenas import ArenaSnapshot
from statemachine.messages.values import SnapshotGroup
from storage.codes import make_code
from storage.errors import CorruptDataError, TooManyLossesError
from storage.image import GroupImage, LayerImage
from storage.manifest import SnapshotManifest, SnapshotPart
from storage.partimage import ShardedImage
from storage.shards import Bytes, ShardLayout

Image = TypeVar("Image", GroupImage, ShardedImage)


class LayerRestoreError(PeerError):
    """The layers cannot be put together.

    ``bad`` names the nodes whose shards are missing or corrupt. ``corrupt`` is set if the persistent
    checkpoint is the cause.
    """

    def __init__(self, detail: str, bad: Iterable[str] = (), *, corrupt: bool = False) -> None:
        self.bad = tuple(sorted(bad))
        self.corrupt = corrupt
        super().__init__(detail)


@dataclass(slots=True, kw_only=True)
class RestoreStatistics:
    """Figures of one restore."""

    own_bytes: int = 0
    fetched_bytes: int = 0
    decoded_groups: int = 0
    """Number of groups with a shard that could not be used."""


@dataclass(slots=True, kw_only=True)
class Restorer(SnapshotReader):
    """A restorer of layers; ``await Restorer(…).run(layers, target)``. Each node is asked once."""

    report_corruption: ReportCorruption
    _known: dict[str, list[tuple[SnapshotManifest, ArenaSnapshot | None, set[str]]]] = field(
        default_factory=dict
    )
    """Manifests that each node has of this very snapshot, and the names of its corrupt parts."""
    _bad: set[str] = field(default_factory=set)
    _done: RestoreStatistics = field(default_factory=RestoreStatistics)

    async def run(self, layers: Sequence[int], target: RestoreTarget) -> RestoreStatistics:
        """Give ``target`` each of ``layers``, in ascending order within a group.

        What ``target`` raises ends the restore.

        :raises LayerRestoreError: they cannot be put together; the error says why and names the nodes at
            fault.
        """
        groups = [g for g in self.restore.groups if any(g.first_layer <= n < g.end_layer for n in layers)]
        covered = {n for g in groups for n in range(g.first_layer, g.end_layer)}
        if missing := sorted(set(layers) - covered):
            raise LayerRestoreError(f"the snapshot of step {self.restore.step} has no layers {missing}")
        await self._ask(groups)
        for group in groups:
            wanted = [n for n in layers if group.first_layer <= n < group.end_layer]
            await self._restore_group(group, wanted, target)
        return self._done

    # --- holders ---------------------------------------------------------------------------------

    def _report_corruption(self, node: str, part: str, detail: str) -> None:
        self._bad.add(node)
        self.report_corruption(node, part, detail)

    async def _ask(self, groups: Iterable[SnapshotGroup]) -> None:
        """Ask all nodes that hold something of these groups, at once."""
        names = {name for group in groups for name in holder_nodes(group)}
        asked = sorted((names & {*self.restore.sources, self.node}) - set(self._known))
        answers = await asyncio.gather(*(self._ask_node(node) for node in asked))
        self._known |= dict(zip(asked, answers, strict=True))

    async def _ask_node(self, node: str) -> list[tuple[SnapshotManifest, ArenaSnapshot | None, set[str]]]:
        found: list[tuple[SnapshotManifest, ArenaSnapshot | None]]
        if node == self.node:
            held = self.own_snapshots()
            try:
                corrupt = set(await asyncio.to_thread(self.arenas.find_corrupt, held))
            except OSError as error:
                self._report_corruption(node, "manifest", str(error))
                return []
            found = [(one.manifest, one) for one in held]
        else:
            try:
                answer = await self.manifests_of(node)
            except PeerError as error:
                self._report_corruption(node, "manifest", str(error))
                return []
            corrupt = set(answer.corrupt)
            found = [(manifest, None) for manifest in answer.manifests]
        for name in sorted(corrupt):
            self._report_corruption(node, name, "its digest does not match")
        return [(m, own, corrupt) for m, own in found if m.generation == self.restore.generation]

    def _holders_of(self, group: SnapshotGroup) -> list[ShardHolder]:
        """Return the holders of layers of the group among the nodes that were asked: this node first, then
        owners, then their replica peers. All arenas of a node count.
        """
        holders = []
        for place, node in enumerate(holder_nodes(group)):
            owner = min(place, len(group.owners) - 1)
            for manifest, held, corrupt in self._known.get(node, ()):
                parts = {part.name: part for part in manifest.parts if part.name not in corrupt}
                for layout in find_layouts(manifest, group, owner):
                    holders.append(
                        ShardHolder(
                            node=node,
                            owner=owner,
                            shard=parts.get(layout.name_of("shard")),
                            small=parts.get(layout.name_of("small")),
                            layout=layout,
                            held=held,
                            replica=parts.get(layout.name_of("replica")),
                        )
                    )
        return sorted(holders, key=lambda holder: holder.node != self.node)

    # --- one group -------------------------------------------------------------------------------

    async def _restore_group(self, group: SnapshotGroup, layers: list[int], target: RestoreTarget) -> None:
        holders = self._holders_of(group)
        if any(holder.layout.parted for holder in holders):
            await self._restore_parts(group, sorted(layers), target.put)
            return
        # The devices of a stage divide the layers among themselves, and each share is a group of its own.
        left = set(layers)
        shares = {share.first_layer: share for share in (one.layout.within(group) for one in holders)}
        for first, share in sorted(shares.items()):
            wanted = sorted(left.intersection(range(first, share.end_layer)))
            if wanted:
                same = [one for one in holders if one.layout.within(group) == share]
                await self._restore_share(share, same, wanted, target)
                left -= set(wanted)
        self._check_headers(sorted(left))

    def _check_headers(self, missing: Sequence[int]) -> None:
        """:raises LayerRestoreError: no node holds the headers of these layers."""
        if missing:
            layers = "layer" if len(missing) == 1 else "layers"
            where = ", ".join(map(str, missing))
            raise LayerRestoreError(f"no node that is present has the headers of {layers} {where}", self._bad)

    async def _restore_share(
        self, group: SnapshotGroup, holders: list[ShardHolder], layers: list[int], target: RestoreTarget
    ) -> None:
        image = await self._image(group, holders)
        layout = ShardLayout(
            code=make_code(group.protection, len(group.owners)), bucket_bytes=image.bucket_bytes
        )
        usable: dict[int, ShardHolder] = {}
        spare: list[ShardHolder] = []
        for holder in holders:
            if (
                holder.shard is None
                or holder.shard.size_bytes != layout.shard_bytes(holder.owner)
                or holder.layout.bucket_bytes != image.bucket_bytes
            ):
                continue
            if usable.setdefault(holder.owner, holder) is not holder:
                spare.append(holder)
        if len(usable) < len(group.owners):
            self._done.decoded_groups += 1
        for run in target.group_layers(layers):
            first, last = image.layer(run[0]), image.layer(run[-1])
            end = last.offset + last.size_bytes
            ranges, memory = await self._bucket(group, layout, usable, spare, first.offset, end, target)
            await target.put_located([_locate(layer, ranges) for layer in map(image.layer, run)], memory)

    async def _restore_parts(self, group: SnapshotGroup, layers: Sequence[int], put: PutLayer) -> None:
        """Restore layers of a group whose owners hold different parts."""
        held_parts = await self._held_parts(group)
        if len({one.node for one in held_parts} & set(group.owners)) < len(group.owners):
            self._done.decoded_groups += 1
        by_group = {group.first_layer: held_parts}
        assembler = PartAssembler(self._report_corruption)
        there = {layer.layer for one in held_parts for layer in one.image.layers}
        self._check_headers(sorted(set(layers) - there))
        for layer in layers:
            homes: dict[int, list[HeldParts]] = {}
            for home in homes_of(held_parts, layer):
                other = self._group_of(home)
                if other.first_layer not in by_group:
                    await self._ask([other])
                    by_group[other.first_layer] = await self._held_parts(other)
                homes[home] = by_group[other.first_layer]
            try:
                header, payload = await assembler.assemble(held_parts, layer, homes)
            except LostPartsError as error:
                other = self._group_of(error.layer)
                lost = {node for node, _ in assembler.unreadable}
                here = {one.node for one in by_group[other.first_layer]} - lost
                names = ", ".join(owner for owner in other.owners if owner not in here)
                raise LayerRestoreError(f"{_where(group)}: {error} (missing: {names})", self._bad) from None
            except CorruptDataError as error:
                blamed = {one.node for some in (held_parts, *homes.values()) for one in some}
                raise LayerRestoreError(f"{_where(group)}: {error}", blamed) from None
            await put(layer, header, payload)

    def _group_of(self, layer: int) -> SnapshotGroup:
        for group in self.restore.groups:
            if group.first_layer <= layer < group.end_layer:
                return group
        raise LayerRestoreError(f"the snapshot of step {self.restore.step} has no layer {layer}")

    async def _held_parts(self, group: SnapshotGroup) -> list[HeldParts]:
        held_parts: list[HeldParts] = []
        for holder in self._holders_of(group):
            image = await self._small_part(holder, ShardedImage)
            if image is None:
                continue
            shard, replica = (
                None if part is None else (part, partial(self._range, holder, part))
                for part in (holder.shard, holder.replica)
            )
            held_parts.append(HeldParts(node=holder.node, image=image, shard=shard, replica=replica))
        return held_parts

    async def _range(self, holder: ShardHolder, part: SnapshotPart, first: int, size: int) -> Bytes:
        """Read bytes of a part.

        :raises PeerError: they cannot be read (any more).
        """
        target = np.empty(size, dtype=np.uint8)
        if holder.held is None:
            await self.fetch(holder.node, part, [(first, target.data)])
            self._done.fetched_bytes += size
            return target
        try:
            view = self.arenas.view(holder.held, part)
        except OSError as error:
            raise PeerError(str(error)) from None
        memory = np.frombuffer(view, dtype=np.uint8)
        target[:] = memory[first : first + size]
        if not await asyncio.to_thread(part.are_ranges_intact, memory, [range(first, first + size)]):
            raise PeerError("its digest does not match")
        if holder.held not in self.own_snapshots():
            raise PeerError("the snapshot was released")
        self._done.own_bytes += size
        return target

    async def _image(self, group: SnapshotGroup, holders: list[ShardHolder]) -> GroupImage:
        """Read the small part from the first holder that has an intact one."""
        for holder in holders:
            image = await self._small_part(holder, GroupImage)
            if image is not None:
                return image
        raise LayerRestoreError(f"no node that is present has the headers of {_where(group)}", self._bad)

    async def _small_part(self, holder: ShardHolder, kind: type[Image]) -> Image | None:
        """Return a holder's small part, or ``None`` if it has none that can be used."""
        if holder.small is None:
            return None
        layout = holder.layout
        try:
            image = kind.from_bytes(await self._whole(holder, holder.small))
            other_bucket = isinstance(image, GroupImage) and image.bucket_bytes != layout.bucket_bytes
            if other_bucket or [one.layer for one in image.layers] != list(layout.layers):
                raise CorruptDataError("it belongs to other layers")
        except (PeerError, CorruptDataError) as error:
            self._report_corruption(holder.node, holder.small.name, str(error))
            return None
        return image

    async def _whole(self, holder: ShardHolder, part: SnapshotPart) -> bytes:
        """Read a whole part.

        :raises PeerError: it cannot be read (any more).
        :raises CorruptDataError: its bytes are not what was written.
        """
        if holder.held is not None:
            try:
                data = bytes(self.arenas.view(holder.held, part))
            except OSError as error:
                raise PeerError(str(error)) from None
            if not part.are_ranges_intact(data, [range(len(data))]):
                raise CorruptDataError("its digest does not match")
            return data
        target = bytearray(part.size_bytes)
        await self.fetch(holder.node, part, [(0, memoryview(target))])
        return bytes(target)

    async def _bucket(
        self,
        group: SnapshotGroup,
        layout: ShardLayout,
        usable: dict[int, ShardHolder],
        spare: list[ShardHolder],
        first: int,
        end: int,
        target: RestoreTarget,
    ) -> tuple[list[ByteRange], Bytes]:
        """Return where the bucket's bytes [first, end) are: in the returned memory, or borrowed.

        A holder that fails is removed from ``usable``, and a copy in ``spare`` replaces it.

        :raises LayerRestoreError: too few holders are left.
        """
        memory: Bytes | None = None
        while True:
            try:
                own = {owner: holder for owner, holder in usable.items() if holder.held is not None}
                plan = await asyncio.to_thread(
                    plan_read, layout, frozenset(usable), first, end, own=own, borrow=target.borrows
                )
            except TooManyLossesError as error:
                names = [group.owners[owner] for owner in range(len(group.owners)) if owner not in usable]
                raise LayerRestoreError(f"{_where(group)}: {error} ({', '.join(names)})", self._bad) from None
            if memory is None or len(memory) < plan.size_bytes:
                memory = None  # The mapping would keep the pages.
                memory = await asyncio.to_thread(target.allocate, plan.size_bytes)
            try:
                self._done.fetched_bytes += await self._carry_out(plan, memory, usable)
            except ShardsUnusableError as failed:
                for owner, problem in failed.owners:
                    holder = usable.pop(owner)
                    self._report_corruption(holder.node, holder.layout.name_of("shard"), str(problem))
                    if spare:
                        other = spare.pop(0)
                        usable[other.owner] = other
            else:
                self._done.own_bytes += plan.own_bytes
                return plan.ranges, memory

    async def _carry_out(self, plan: ReadPlan, memory: Bytes, usable: Mapping[int, ShardHolder]) -> int:
        """Execute a plan and return the number of fetched bytes.

        :raises ShardsUnusableError: a shard could not be read, or its memory was released meanwhile.
        """
        own: dict[int, Bytes] = {}
        for owner in plan.read().keys() & plan.own.keys():
            holder = plan.own[owner]
            if holder.held is not None and holder.shard is not None:
                try:
                    own[owner] = np.frombuffer(self.arenas.view(holder.held, holder.shard), dtype=np.uint8)
                except OSError as error:
                    raise ShardsUnusableError([(owner, error)]) from None

        async def fetch(owner: int, pieces: Sequence[tuple[int, Bytes]]) -> None:
            holder = usable[owner]
            assert holder.shard is not None, "a usable holder has a shard"
            await self.fetch(holder.node, holder.shard, ((first, some.data) for first, some in pieces))

        fetched = await execute_read(plan, memory, own, fetch)
        there = self.own_snapshots() if plan.own else ()
        if unreadable := [owner for owner, holder in plan.own.items() if holder.held not in there]:
            raise ShardsUnusableError(
                [(owner, PeerError("the snapshot was released")) for owner in unreadable]
            )
        return fetched


def _locate(layer: LayerImage, ranges: Iterable[ByteRange]) -> LocatedLayer:
    begin, end = layer.offset, layer.offset + layer.size_bytes
    return layer, [s.clipped(begin, end) for s in ranges if s.first < end and begin < s.end]


def _where(group: SnapshotGroup) -> str:
    return f"layers {group.first_layer} to {group.end_layer - 1}"
