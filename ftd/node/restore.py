"""Layers out of a snapshot in the memory of several nodes: REFT-load (design §5, §7).

From a ``Restore`` and the layers that this node's devices need: own memory first, other nodes' over the
snapshot servers, several at a time and only the bytes that are needed; what lost or damaged shards kept is
decoded from the others where the code allows. Each layer comes out as ``runtime.state`` packs it, for a
trainer's files or a persistent checkpoint. Work on many bytes is done in threads: heartbeats go on.
"""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import structlog

from ftd.errors import PeerError
from ftd.node.arenas import Arenas
from ftd.node.keepers import Keeper, Keepers
from ftd.node.restore_parts import KeptParts, LostPartsError, homes_of, put_together
from ftd.node.shard_client import Located, ShardClient, Source, Wanted
from ftd.node.staging import Put, Store, runs_of
from statemachine.values import Restore, SnapshotGroup
from storage.codes import make_code
from storage.errors import DamagedError, LostError
from storage.image import GroupImage, assemble
from storage.manifest import Part
from storage.partimage import ShardedImage
from storage.shards import Bytes, ShardLayout, needed
from storage.shards import restore as decode

log = structlog.get_logger("ftd.node")

DamageTold = Callable[[str, str, str], None]
"""Called with a node, a part and what is wrong with it."""


class RestoreError(PeerError):
    """The layers cannot be put together.

    ``bad``: whose shards cannot be had, or are damaged; ``damaged``: the persistent checkpoint is to blame.
    """

    def __init__(self, detail: str, bad: Iterable[str] = (), *, damaged: bool = False) -> None:
        self.bad = tuple(sorted(bad))
        self.damaged = damaged
        super().__init__(detail)


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """What a restore took."""

    own_bytes: int
    fetched_bytes: int
    decoded_groups: int
    """Groups of which at least one owner's shard was not to be had."""


@dataclass(slots=True, kw_only=True)
class Restorer:
    """``await Restorer(…).run(layers, put)``."""

    restore: Restore
    node: str
    arenas: Arenas
    client: ShardClient
    tell: DamageTold
    _bad: set[str] = field(default_factory=set)
    _own_bytes: int = 0
    _fetched_bytes: int = 0
    _decoded: int = 0
    _memories: list[Bytes] = field(default_factory=lambda: [np.empty(0, dtype=np.uint8)] * 2)
    """Of one run, used for later ones: fresh pages cost more than what is copied into them."""

    async def run(self, layers: Sequence[int], put: Put, *, one_by_one: bool = False) -> Restored:
        """Put each of ``layers``, in ascending order.

        :param one_by_one: takes the memory of two layers; else that of neighbours, which are fetched at once.
            What is put stays as it is until the next one's ``put`` has returned.
        :raises RestoreError: they cannot be put together; says why, and whose fault it is.
        Whatever ``put`` raises ends it, too.
        """
        groups = [g for g in self.restore.groups if any(g.first_layer <= n < g.end_layer for n in layers)]
        covered = {n for g in groups for n in range(g.first_layer, g.end_layer)}
        if missing := sorted(set(layers) - covered):
            raise RestoreError(f"the snapshot of step {self.restore.step} has no layers {missing}")
        keepers = Keepers(
            restore=self.restore,
            node=self.node,
            arenas=self.arenas,
            client=self.client,
            lose=self._lose,
        )
        await keepers.ask(groups)
        for group in groups:
            wanted = [n for n in layers if group.first_layer <= n < group.end_layer]
            runs = [[number] for number in sorted(wanted)] if one_by_one else runs_of(wanted)
            await self._restore_group(group, keepers, runs, put)
        return Restored(
            own_bytes=self._own_bytes, fetched_bytes=self._fetched_bytes, decoded_groups=self._decoded
        )

    # --- who has what ----------------------------------------------------------------------------

    def _lose(self, node: str, part: str, detail: str) -> None:
        self._bad.add(node)
        self.tell(node, part, detail)

    def _source(self, node: str) -> Source:
        return Source(node=node, address=self.restore.sources[node])

    def _located(self, keeper: Keeper, part: Part) -> Located:
        return Located(
            source=self._source(keeper.node), job_id=self.restore.job_id, step=self.restore.step, part=part
        )

    # --- one group -------------------------------------------------------------------------------

    async def _restore_group(
        self, group: SnapshotGroup, known: Keepers, runs: list[list[int]], put: Put
    ) -> None:
        keepers = known.of(group)
        if any(keeper.parts for keeper in keepers):
            await self._restore_parts(group, known, [layer for run in runs for layer in run], put)
            return
        image = await self._image(group, keepers)
        layout = ShardLayout(
            code=make_code(group.protection, len(group.owners)), bucket_bytes=image.bucket_bytes
        )
        usable: dict[int, Keeper] = {}
        spare: list[Keeper] = []
        for keeper in keepers:
            if (
                keeper.shard is None
                or keeper.shard.size_bytes != layout.shard_bytes(keeper.owner)
                or keeper.bucket_bytes != image.bucket_bytes
            ):
                continue
            if usable.setdefault(keeper.owner, keeper) is not keeper:
                spare.append(keeper)
        if len(usable) < len(group.owners):
            self._decoded += 1
        for run in runs:
            if len(run) == 1:
                self._memories.reverse()
            first, last = image.layer(run[0]), image.layer(run[-1])
            end = last.offset + last.size_bytes
            bucket = await self._bucket(group, layout, usable, spare, first.offset, end)
            for layer in map(image.layer, run):
                begin = layer.offset - first.offset
                shared = bucket[begin : begin + layer.size_bytes]
                await put(layer.layer, layer.header, await asyncio.to_thread(assemble, layer, shared))

    async def _restore_parts(
        self, group: SnapshotGroup, known: Keepers, layers: Sequence[int], put: Put
    ) -> None:
        """Under ZeRO-1: each owner has a part."""
        kept = await self._kept_parts(group, known)
        if len({one.node for one in kept} & set(group.owners)) < len(group.owners):
            self._decoded += 1
        by_group = {group.first_layer: kept}
        gone: set[tuple[str, str]] = set()
        for layer in layers:
            homes: dict[int, list[KeptParts]] = {}
            for home in homes_of(kept, layer):
                other = self._group_of(home)
                if other.first_layer not in by_group:
                    await known.ask([other])
                    by_group[other.first_layer] = await self._kept_parts(other, known)
                homes[home] = by_group[other.first_layer]
            try:
                header, payload = await put_together(kept, layer, homes, self._lose, gone)
            except LostPartsError as error:
                owners = self._group_of(error.layer).owners
                names = ", ".join(owners[part] for part in error.parts)
                raise RestoreError(f"{_where(group)}: {error} ({names})", self._bad) from None
            except DamagedError as error:
                blamed = {one.node for some in (kept, *homes.values()) for one in some}
                raise RestoreError(f"{_where(group)}: {error}", blamed) from None
            await put(layer, header, payload)

    def _group_of(self, layer: int) -> SnapshotGroup:
        for group in self.restore.groups:
            if group.first_layer <= layer < group.end_layer:
                return group
        raise RestoreError(f"the snapshot of step {self.restore.step} has no layer {layer}")

    async def _kept_parts(self, group: SnapshotGroup, known: Keepers) -> list[KeptParts]:
        kept: list[KeptParts] = []
        for keeper in known.of(group):
            if keeper.small is None:
                continue
            try:
                image = ShardedImage.from_bytes(await self._whole(keeper, keeper.small))
                if [one.layer for one in image.layers] != list(range(group.first_layer, group.end_layer)):
                    raise DamagedError("it is of other layers")
            except (PeerError, DamagedError) as error:
                self._lose(keeper.node, keeper.small.name, str(error))
                continue
            shard, replica = (
                None if part is None else (part, partial(self._range, keeper, part))
                for part in (keeper.shard, keeper.replica)
            )
            kept.append(
                KeptParts(node=keeper.node, small=keeper.small, image=image, shard=shard, replica=replica)
            )
        if not kept:
            raise RestoreError(f"nobody who is here has the headers of {_where(group)}", self._bad)
        return kept

    async def _range(self, keeper: Keeper, part: Part, first: int, size: int) -> Bytes:
        """:raises PeerError: they are not to be had (any more)."""
        target = np.empty(size, dtype=np.uint8)
        if keeper.held is None:
            place = self._located(keeper, part)
            await self.client.fetch([Wanted(places=(place,), first=first, into=target.data)])
            self._fetched_bytes += size
            return target
        try:
            view = self.arenas.view(keeper.held, part)
        except OSError as error:
            raise PeerError(str(error)) from None
        memory = np.frombuffer(view, dtype=np.uint8)
        target[:] = memory[first : first + size]
        if not await asyncio.to_thread(part.sound_in, memory, [range(first, first + size)]):
            raise PeerError("its digest does not match")
        if keeper.held not in self.arenas.find(self.restore.job_id, self.restore.step):
            raise PeerError("the snapshot was released")
        self._own_bytes += size
        return target

    async def _image(self, group: SnapshotGroup, keepers: list[Keeper]) -> GroupImage:
        """The small part, from the first that has a sound one."""
        for keeper in keepers:
            if keeper.small is None:
                continue
            try:
                image = GroupImage.from_bytes(await self._whole(keeper, keeper.small))
                if image.bucket_bytes != keeper.bucket_bytes or [one.layer for one in image.layers] != list(
                    range(group.first_layer, group.end_layer)
                ):
                    raise DamagedError("it is of other layers")
            except (PeerError, DamagedError) as error:
                self._lose(keeper.node, keeper.small.name, str(error))
            else:
                return image
        raise RestoreError(
            f"nobody who is here has the headers of layers {group.first_layer} to {group.end_layer - 1}",
            self._bad,
        )

    async def _whole(self, keeper: Keeper, part: Part) -> bytes:
        if keeper.held is not None:
            return bytes(self.arenas.view(keeper.held, part))
        target = bytearray(part.size_bytes)
        place = self._located(keeper, part)
        await self.client.fetch([Wanted(places=(place,), first=0, into=memoryview(target))])
        return bytes(target)

    async def _bucket(
        self,
        group: SnapshotGroup,
        layout: ShardLayout,
        usable: dict[int, Keeper],
        spare: list[Keeper],
        first: int,
        end: int,
    ) -> Bytes:
        """The bucket's bytes [first, end). Who fails on the way is left out of ``usable`` from then on; the
        copy in ``spare`` takes its place.

        :raises RestoreError: too few are left.
        """
        while True:
            try:
                ranges = await asyncio.to_thread(needed, layout, frozenset(usable), first, end)
            except LostError as error:
                names = [group.owners[owner] for owner in range(len(group.owners)) if owner not in usable]
                raise RestoreError(
                    f"layers {group.first_layer} to {group.end_layer - 1}: {error} ({', '.join(names)})",
                    self._bad,
                ) from None
            stores = {owner: Store(ranges[owner]) for owner in ranges if usable[owner].held is None}
            failed = await self._fill(usable, stores)
            if not failed:
                if len(self._memories[0]) < end - first:
                    self._memories[0] = np.empty(end - first, dtype=np.uint8)
                bucket = self._memories[0][: end - first]
                failed = await self._decode(layout, usable, stores, bucket, first)
            if not failed:
                break
            for owner, problem in failed:
                keeper = usable.pop(owner)
                self._lose(keeper.node, f"group-{group.first_layer}/shard", str(problem))
                if spare:
                    other = spare.pop(0)
                    usable[other.owner] = other
        own = {owner for owner, keeper in usable.items() if keeper.held is not None}
        self._own_bytes += sum(len(r) for owner in own for r in ranges.get(owner, ()))
        self._fetched_bytes += sum(store.size_bytes for store in stores.values())
        return bucket

    async def _decode(
        self,
        layout: ShardLayout,
        usable: dict[int, Keeper],
        stores: dict[int, Store],
        bucket: Bytes,
        first: int,
    ) -> list[tuple[int, BaseException]]:
        """Fill the bucket. Returns owners whose memory is not the snapshot's any more."""
        try:
            own = {
                owner: np.frombuffer(self.arenas.view(keeper.held, keeper.shard), dtype=np.uint8)
                for owner, keeper in usable.items()
                if keeper.held is not None and keeper.shard is not None
            }
        except OSError as error:
            return [(owner, error) for owner, keeper in usable.items() if keeper.held is not None]

        def fetch(owner: int, offset: int, size: int) -> Bytes:
            if owner in own:
                return own[owner][offset : offset + size]
            return stores[owner].read(offset, size)

        await asyncio.to_thread(decode, layout, frozenset(usable), fetch, bucket, first)
        # Now that they are copied: were they as they were written?
        read = await asyncio.to_thread(needed, layout, frozenset(usable), first, first + len(bucket))
        for owner, memory in own.items():
            kept, ranges = usable[owner].shard, read.get(owner, [])
            if kept is not None and not await asyncio.to_thread(kept.sound_in, memory, ranges):
                return [(owner, PeerError("its digest does not match"))]
        there = self.arenas.find(self.restore.job_id, self.restore.step) if own else ()
        gone = PeerError("the snapshot was released")
        return [(owner, gone) for owner in own if usable[owner].held not in there]

    async def _fill(
        self, usable: dict[int, Keeper], stores: dict[int, Store]
    ) -> list[tuple[int, BaseException]]:
        """Fetch what the stores want, from all nodes at once; who failed, and how."""

        async def fill(owner: int, store: Store) -> None:
            keeper = usable[owner]
            assert keeper.shard is not None, "without it, it is not usable"
            places = (self._located(keeper, keeper.shard),)
            await self.client.fetch(
                Wanted(places=places, first=some.start, into=memory.data) for some, memory in store.pieces
            )

        results = await asyncio.gather(
            *(fill(owner, store) for owner, store in stores.items()), return_exceptions=True
        )
        failed = [
            (owner, result)
            for owner, result in zip(stores, results, strict=True)
            if isinstance(result, BaseException)
        ]
        for _, error in failed:
            if not isinstance(error, PeerError):
                raise error
        return failed


def _where(group: SnapshotGroup) -> str:
    return f"layers {group.first_layer} to {group.end_layer - 1}"
