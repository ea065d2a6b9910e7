"""A range of a group's bucket out of the memory of several nodes, with as few copies as there can be.

What other nodes have as it is, is received straight to its place; what nobody has is decoded there. What
this node's own arena has as it is, is *lent* where that is wanted: told of, and read by nobody here.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from ftd.errors import PeerError
from ftd.node.keepers import Keeper
from storage.shards import Bytes, Recipe, ShardLayout, merged, needed, recipes, restore

_LEAST_LENT_BYTES = 256 * 1024
"""Who reads it verifies whole blocks: for less it is not worth it."""
_ALIGNMENT_BYTES = 64

Read = Callable[[Keeper, Sequence[tuple[int, Bytes]]], Awaitable[None]]
"""Fetch bytes of another node's shard, each from an offset on as many as there is room for.

:raises PeerError: they are not to be had.
"""


class Store:
    """Ranges of another node's shard, fetched."""

    def __init__(self, ranges: Sequence[range]) -> None:
        self.pieces = [(some, np.empty(len(some), dtype=np.uint8)) for some in ranges]

    def add(self, offset: int, memory: Bytes) -> None:
        """Bytes that come to a place of their own."""
        self.pieces.append((range(offset, offset + len(memory)), memory))

    def read(self, offset: int, size: int) -> Bytes:
        for some, memory in self.pieces:
            if some.start <= offset and offset + size <= some.stop:
                return memory[offset - some.start : offset - some.start + size]
        raise LookupError(f"bytes {offset} to {offset + size} were not asked for")


class FailedError(Exception):
    """Owners' shards that cannot be used, and why."""

    def __init__(self, owners: Sequence[tuple[int, Exception]]) -> None:
        self.owners = tuple(owners)
        super().__init__(f"owners {[owner for owner, _ in owners]}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """Bytes [first, end) of the bucket.

    ``lender``: they are its shard's bytes from ``offset`` on; ``None``: they are in memory, from there on.
    """

    first: int
    end: int
    offset: int
    lender: Keeper | None

    def clipped(self, first: int, end: int) -> "Stretch":
        """What of it is in [first, end), which it must overlap."""
        low = max(first, self.first)
        return Stretch(
            first=low, end=min(end, self.end), offset=self.offset + low - self.first, lender=self.lender
        )


@dataclass(slots=True, kw_only=True)
class Plan:
    """Where each byte of [first, end) comes from. Made by ``planned``."""

    layout: ShardLayout
    usable: Mapping[int, Keeper]
    stretches: list[Stretch] = field(default_factory=list)
    """All of it, ascending."""
    plain: list[tuple[Stretch, int, int]] = field(default_factory=list)
    """What is copied into memory: a stretch, whose shard, and from which byte of it."""
    made: list[Stretch] = field(default_factory=list)
    """What is decoded there."""
    size_bytes: int = 0
    """Of memory."""

    @property
    def own_bytes(self) -> int:
        """Read in this node's memory, or lent."""
        own = {owner for owner, keeper in self.usable.items() if keeper.held is not None}
        lent = sum(s.end - s.first for s in self.stretches if s.lender is not None)
        return lent + sum(
            len(some) for owner, ranges in self.read().items() if owner in own for some in ranges
        )

    def read(self) -> dict[int, list[range]]:
        """Which bytes of whose shard are read here."""
        found = self.asked()
        for stretch, owner, offset in self.plain:
            found.setdefault(owner, []).append(range(offset, offset + stretch.end - stretch.first))
        return found

    def asked(self) -> dict[int, list[range]]:
        """Which bytes of whose shard are decoded from, and are not copied into memory anyway."""
        found: dict[int, list[range]] = {}
        for stretch in self.made:
            wanted = needed(self.layout, frozenset(self.usable), stretch.first, stretch.end)
            for owner, ranges in wanted.items():
                there = self.copied(owner)
                found.setdefault(owner, []).extend(
                    some for some in ranges if not any(_within(some, copy) for copy, _ in there)
                )
        return {owner: merged(ranges) for owner, ranges in found.items() if ranges}

    def copied(self, owner: int) -> list[tuple[range, int]]:
        """What of the owner's shard is copied into memory, and where."""
        return [
            (range(offset, offset + stretch.end - stretch.first), stretch.offset)
            for stretch, other, offset in self.plain
            if other == owner
        ]


def planned(layout: ShardLayout, usable: Mapping[int, Keeper], first: int, end: int, *, lend: bool) -> Plan:
    """:raises LostError: what is left does not say what the lost owners kept."""
    plan = Plan(layout=layout, usable=usable)
    for low, high, sources in _joined(recipes(layout, frozenset(usable), first, end)):
        owner, offset = sources[0]
        if lend and len(sources) == 1 and high - low >= _LEAST_LENT_BYTES and _lendable(usable[owner]):
            plan.stretches.append(Stretch(first=low, end=high, offset=offset, lender=usable[owner]))
            continue
        if plan.stretches and plan.stretches[-1].lender is not None:
            plan.size_bytes += -plan.size_bytes % _ALIGNMENT_BYTES
        stretch = Stretch(first=low, end=high, offset=plan.size_bytes, lender=None)
        plan.size_bytes += high - low
        plan.stretches.append(stretch)
        if len(sources) == 1:
            plan.plain.append((stretch, owner, offset))
        else:
            plan.made.append(stretch)
    return plan


def _lendable(keeper: Keeper) -> bool:
    return keeper.held is not None and keeper.shard is not None and keeper.shard.in_blocks


def _joined(runs: Iterable[Recipe]) -> Iterator[Recipe]:
    """Runs that follow each other as one, where they come from the same shard, or are all decoded."""
    last: Recipe | None = None
    for low, high, sources in runs:
        if last is not None and last[1] == low:
            size, (owner, offset) = low - last[0], last[2][0]
            decoded = len(sources) > 1 and len(last[2]) > 1
            if decoded or (len(last[2]) == 1 and sources == [(owner, offset + size)]):
                last = last[0], high, last[2]
                continue
        if last is not None:
            yield last
        last = low, high, sources
    if last is not None:
        yield last


def _within(one: range, other: range) -> bool:
    return other.start <= one.start and one.stop <= other.stop


async def carry_out(plan: Plan, memory: Bytes, own: Mapping[int, Bytes], read: Read) -> int:
    """Fill ``memory``, of ``plan.size_bytes``. Bytes that were fetched.

    :param own: shards in this node's memory that are read. They are verified behind that.
    :raises FailedError: some are not usable; what is in the memory is anything.
    """
    asked = plan.asked()
    stores = {owner: Store(asked.get(owner, [])) for owner in plan.read() if owner not in own}
    for stretch, owner, offset in plan.plain:
        if owner in stores:
            stores[owner].add(offset, memory[stretch.offset : stretch.offset + stretch.end - stretch.first])
    await _fetched(plan, stores, read)

    def shard(owner: int, offset: int, size: int) -> Bytes:
        if owner in own:
            return own[owner][offset : offset + size]
        return stores[owner].read(offset, size)

    def make() -> None:
        for stretch, owner, offset in plan.plain:
            if owner in own:
                size = stretch.end - stretch.first
                memory[stretch.offset : stretch.offset + size] = own[owner][offset : offset + size]
        for stretch in plan.made:
            target = memory[stretch.offset : stretch.offset + stretch.end - stretch.first]
            restore(plan.layout, frozenset(plan.usable), shard, target, stretch.first)

    await asyncio.to_thread(make)
    # Now that they are copied: were they as they were written?
    for owner, ranges in plan.read().items():
        kept = plan.usable[owner].shard
        if owner not in own or kept is None:
            continue
        if not await asyncio.to_thread(kept.sound_in, own[owner], ranges):
            raise FailedError([(owner, PeerError("its digest does not match"))])
    return sum(len(some) for store in stores.values() for some, _ in store.pieces)


async def _fetched(plan: Plan, stores: Mapping[int, Store], read: Read) -> None:
    """From all nodes at once. :raises FailedError: some are not to be had."""
    wanted = {owner: [(some.start, target) for some, target in s.pieces] for owner, s in stores.items()}
    owners = [owner for owner, pieces in wanted.items() if pieces]
    results = await asyncio.gather(
        *(read(plan.usable[owner], wanted[owner]) for owner in owners), return_exceptions=True
    )
    failed: list[tuple[int, Exception]] = []
    for owner, result in zip(owners, results, strict=True):
        if isinstance(result, PeerError):
            failed.append((owner, result))
        elif isinstance(result, BaseException):
            raise result
    if failed:
        raise FailedError(failed)
