"""A range of a group's bucket out of the memory of several nodes, with as few copies as there can be.

What other nodes have as it is, is received straight to its place; what nobody has is decoded there: one of
the shards that it is the XOR of is received to its place, too, and the others are added to it. What this
node's own arena has as it is, is *lent* where that is wanted: told of, and read by nobody here.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from ftd.errors import PeerError
from ftd.snapshots.restoring.holders import ShardHolder
from storage.shards import Bytes, Recipe, ShardLayout, decode_bucket, merged, recipes

_LEAST_LENT_BYTES = 256 * 1024
"""Who reads it verifies whole blocks: for less it is not worth it."""
_ALIGNMENT_BYTES = 64

Read = Callable[[ShardHolder, Sequence[tuple[int, Bytes]]], Awaitable[None]]
"""Fetch bytes of another node's shard, each from an offset on as many as there is room for.

:raises PeerError: they are not to be had.
"""


class FetchedRanges:
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


class ShardsUnusableError(Exception):
    """Owners' shards that cannot be used, and why."""

    def __init__(self, owners: Sequence[tuple[int, Exception]]) -> None:
        self.owners = tuple(owners)
        super().__init__(f"owners {[owner for owner, _ in owners]}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ByteRange:
    """Bytes [first, end) of the bucket.

    ``lender``: they are its shard's bytes from ``offset`` on; ``None``: they are in memory, from there on.
    """

    first: int
    end: int
    offset: int
    lender: ShardHolder | None

    def clipped(self, first: int, end: int) -> "ByteRange":
        """What of it is in [first, end), which it must overlap."""
        low = max(first, self.first)
        return ByteRange(
            first=low, end=min(end, self.end), offset=self.offset + low - self.first, lender=self.lender
        )


@dataclass(frozen=True, slots=True)
class Placed:
    """Another node's bytes that are received to where what is made of them is wanted."""

    owner: int
    bytes: range
    """Of its shard."""
    offset: int
    """In memory."""


@dataclass(slots=True, kw_only=True)
class ReadPlan:
    """Where each byte of [first, end) comes from. Made by ``planned``."""

    layout: ShardLayout
    usable: Mapping[int, ShardHolder]
    stretches: list[ByteRange] = field(default_factory=list)
    """All of it, ascending."""
    plain: list[tuple[ByteRange, int, int]] = field(default_factory=list)
    """What is copied into memory: a stretch, whose shard, and from which byte of it."""
    made: list[ByteRange] = field(default_factory=list)
    """What is decoded there."""
    placed: dict[int, "Placed"] = field(default_factory=dict)
    """By the first byte of a recipe of what is decoded."""
    size_bytes: int = 0
    """Of memory."""

    @property
    def own_bytes(self) -> int:
        """Read in this node's memory, or lent."""
        found = self.read()
        for one in self.stretches:
            if one.lender is not None:
                lent = range(one.offset, one.offset + one.end - one.first)
                found.setdefault(one.lender.owner, []).append(lent)
        own = [owner for owner, keeper in self.usable.items() if keeper.held is not None]
        return sum(len(some) for owner in own for some in merged(found.get(owner, ())))

    def read(self) -> dict[int, list[range]]:
        """Which bytes of whose shard are read here."""
        found = self.asked()
        for stretch, owner, offset in self.plain:
            found.setdefault(owner, []).append(range(offset, offset + stretch.end - stretch.first))
        for one in self.placed.values():
            found.setdefault(one.owner, []).append(one.bytes)
        return found

    def asked(self) -> dict[int, list[range]]:
        """Which bytes of whose shard are decoded from, and do not come into memory anyway."""
        found: dict[int, list[range]] = {}
        for low, owner, some, _ in self.sources():
            placed = self.placed.get(low)
            if placed is None or (placed.owner, placed.bytes) != (owner, some):
                found.setdefault(owner, []).append(some)
        return {owner: merged(ranges) for owner, ranges in found.items()}

    def sources(self) -> Iterator[tuple[int, int, range, int]]:
        """Of what is decoded, what is not copied into memory as it is: the first byte of a recipe, whose
        bytes are wanted for it, which of its shard, and where in memory the recipe's begin."""
        copied: dict[int, list[range]] = {}
        for stretch, owner, offset in self.plain:
            copied.setdefault(owner, []).append(range(offset, offset + stretch.end - stretch.first))
        for stretch in self.made:
            for low, high, sources in recipes(
                self.layout, frozenset(self.usable), stretch.first, stretch.end
            ):
                for owner, offset in sources:
                    some = range(offset, offset + high - low)
                    if not any(_within(some, copy) for copy in copied.get(owner, ())):
                        yield low, owner, some, stretch.offset + low - stretch.first


def planned(
    layout: ShardLayout, usable: Mapping[int, ShardHolder], first: int, end: int, *, lend: bool
) -> ReadPlan:
    """:raises TooManyLossesError: what is left does not say what the lost owners kept."""
    plan = ReadPlan(layout=layout, usable=usable)
    for low, high, sources in _joined(recipes(layout, frozenset(usable), first, end)):
        owner, offset = sources[0]
        if lend and len(sources) == 1 and high - low >= _LEAST_LENT_BYTES and _lendable(usable[owner]):
            plan.stretches.append(ByteRange(first=low, end=high, offset=offset, lender=usable[owner]))
            continue
        if plan.stretches and plan.stretches[-1].lender is not None:
            plan.size_bytes += -plan.size_bytes % _ALIGNMENT_BYTES
        stretch = ByteRange(first=low, end=high, offset=plan.size_bytes, lender=None)
        plan.size_bytes += high - low
        plan.stretches.append(stretch)
        if len(sources) == 1:
            plan.plain.append((stretch, owner, offset))
        else:
            plan.made.append(stretch)
    plan.placed = _placed(plan)
    return plan


def _placed(plan: ReadPlan) -> dict[int, Placed]:
    """For each recipe another node's bytes that nothing else is made of."""
    sources = sorted(plan.sources(), key=lambda source: (source[1], source[2].start))
    ends = [0] + [0] * len(sources)
    """Before each source: how far those before it of the same owner reach."""
    for number, (_, owner, some, _) in enumerate(sources):
        before = ends[number] if number and sources[number - 1][1] == owner else 0
        ends[number + 1] = max(before, some.stop)
    found: dict[int, Placed] = {}
    for number, (low, owner, some, place) in enumerate(sources):
        before = number and sources[number - 1][1] == owner and ends[number] > some.start
        behind = number + 1 < len(sources) and sources[number + 1]
        if plan.usable[owner].held is not None or before:
            continue
        if not behind or behind[1] != owner or behind[2].start >= some.stop:
            found.setdefault(low, Placed(owner, some, place))
    return found


def _lendable(keeper: ShardHolder) -> bool:
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


async def carry_out(plan: ReadPlan, memory: Bytes, own: Mapping[int, Bytes], read: Read) -> int:
    """Fill ``memory``, of ``plan.size_bytes``. Bytes that were fetched.

    :param own: shards in this node's memory that are read, and verified. Who calls looks behind that whether
        the snapshot is still there.
    :raises ShardsUnusableError: some are not usable; what is in the memory is anything.
    """
    asked = plan.asked()
    stores = {owner: FetchedRanges(asked.get(owner, [])) for owner in plan.read() if owner not in own}
    for stretch, owner, offset in plan.plain:
        if owner in stores:
            stores[owner].add(offset, memory[stretch.offset : stretch.offset + stretch.end - stretch.first])
    for one in plan.placed.values():
        stores[one.owner].add(one.bytes.start, memory[one.offset : one.offset + len(one.bytes)])

    def shard(owner: int, offset: int, size: int) -> Bytes:
        if owner in own:
            return own[owner][offset : offset + size]
        return stores[owner].read(offset, size)

    def copy_own() -> list[int]:
        """Whose bytes are not as they were written."""
        for stretch, owner, offset in plan.plain:
            if owner in own:
                size = stretch.end - stretch.first
                memory[stretch.offset : stretch.offset + size] = own[owner][offset : offset + size]
        kept = ((owner, plan.usable[owner].shard, ranges) for owner, ranges in plan.read().items())
        return [
            owner
            for owner, part, r in kept
            if owner in own and part and not part.are_ranges_intact(own[owner], r)
        ]

    def make() -> None:
        placed = {low: (one.owner, one.bytes.start) for low, one in plan.placed.items()}
        for stretch in plan.made:
            target = memory[stretch.offset : stretch.offset + stretch.end - stretch.first]
            decode_bucket(plan.layout, frozenset(plan.usable), shard, target, stretch.first, placed)

    copying = asyncio.ensure_future(asyncio.to_thread(copy_own))
    try:
        await _fetched(plan, stores, read)
    finally:
        bad = await copying
    if bad:
        raise ShardsUnusableError([(owner, PeerError("its digest does not match")) for owner in bad])
    await asyncio.to_thread(make)
    return sum(len(some) for store in stores.values() for some, _ in store.pieces)


async def _fetched(plan: ReadPlan, stores: Mapping[int, FetchedRanges], read: Read) -> None:
    """From all nodes at once. :raises ShardsUnusableError: some are not to be had."""
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
        raise ShardsUnusableError(failed)
