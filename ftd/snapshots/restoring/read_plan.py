"""Reading a range of a group's bucket from the memory of several nodes, with as few copies as possible.

Bytes that another node holds unchanged are received straight into place. Bytes that no node holds are
decoded in place: one of the shards whose XOR they are is received into place, and the others are XORed into
it. Bytes that this node's own arena holds unchanged can be *borrowed*: the plan says where they are, and
nobody reads them here.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from ftd.errors import PeerError
from ftd.snapshots.restoring.holders import ShardHolder
from ftd.tasks import gather_all
from storage.shards import (
    Bytes,
    RangeSources,
    ShardLayout,
    decode_bucket,
    merge_ranges,
    range_sources,
    xor_into,
)

_MIN_BORROWED_BYTES = 256 * 1024
"""Smallest range that is borrowed. Its reader verifies whole blocks, which is not worthwhile for less."""
_ALIGNMENT_BYTES = 64

Read = Callable[[int, Sequence[tuple[int, Bytes]]], Awaitable[None]]
"""Function that fetches bytes of an owner's shard: for each offset, as many as its memory has room for.

:raises PeerError: the bytes cannot be fetched.
"""


class FetchedRanges:
    """Fetched ranges of another node's shard."""

    def __init__(self, ranges: Sequence[range]) -> None:
        self.pieces = [(some, np.empty(len(some), dtype=np.uint8)) for some in ranges]

    def add(self, offset: int, memory: Bytes) -> None:
        """Let bytes from ``offset`` on be fetched into this memory."""
        self.pieces.append((range(offset, offset + len(memory)), memory))

    def read(self, offset: int, size: int) -> Bytes:
        for some, memory in self.pieces:
            if some.start <= offset and offset + size <= some.stop:
                return memory[offset - some.start : offset - some.start + size]
        raise LookupError(f"bytes {offset} to {offset + size} were not fetched")


class ShardsUnusableError(Exception):
    """Shards of these owners cannot be used, each with the reason."""

    def __init__(self, owners: Sequence[tuple[int, Exception]]) -> None:
        self.owners = tuple(owners)
        super().__init__(f"owners {[owner for owner, _ in owners]}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ByteRange:
    """Bytes [first, end) of the bucket.

    If ``holder`` is set, they are the bytes of its shard from ``offset`` on; otherwise they are in memory
    from ``offset`` on.
    """

    first: int
    end: int
    offset: int
    holder: ShardHolder | None

    def clipped(self, first: int, end: int) -> "ByteRange":
        """Return the part of it in [first, end), which it must overlap."""
        low = max(first, self.first)
        return ByteRange(
            first=low, end=min(end, self.end), offset=self.offset + low - self.first, holder=self.holder
        )


@dataclass(frozen=True, slots=True)
class InPlaceReceive:
    """Bytes of another node's shard that are received where the decoded bytes will be."""

    owner: int
    bytes: range
    """Range of its shard."""
    offset: int
    """Offset in memory."""


@dataclass(slots=True, kw_only=True)
class ReadPlan:
    """The source of each byte of [first, end). ``plan_read`` makes it."""

    layout: ShardLayout
    usable: frozenset[int]
    """Owners whose shards can be read."""
    own: Mapping[int, ShardHolder]
    """Holders of those shards that are in this node's memory, by owner."""
    ranges: list[ByteRange] = field(default_factory=list)
    """All ranges, ascending."""
    copied: list[tuple[ByteRange, int, int]] = field(default_factory=list)
    """Bytes that are copied into memory: a range, the owner of the shard, and the first byte in that shard."""
    decoded: list[ByteRange] = field(default_factory=list)
    """Bytes that are decoded into memory."""
    placed: dict[int, "InPlaceReceive"] = field(default_factory=dict)
    """Bytes that are received in place, by the first byte of the decoded range."""
    size_bytes: int = 0
    """Size of the memory."""

    @property
    def own_bytes(self) -> int:
        """Bytes that are read in this node's memory, or borrowed from it."""
        found = self.read()
        for one in self.ranges:
            if one.holder is not None:
                borrowed = range(one.offset, one.offset + one.end - one.first)
                found.setdefault(one.holder.owner, []).append(borrowed)
        return sum(len(some) for owner in self.own for some in merge_ranges(found.get(owner, ())))

    def read(self) -> dict[int, list[range]]:
        """Return by owner the ranges of the shard that are read here."""
        found = self.asked()
        for byte_range, owner, offset in self.copied:
            found.setdefault(owner, []).append(range(offset, offset + byte_range.end - byte_range.first))
        for one in self.placed.values():
            found.setdefault(one.owner, []).append(one.bytes)
        return found

    def asked(self) -> dict[int, list[range]]:
        """Return by owner the ranges that are needed for decoding and not received into memory anyway."""
        found: dict[int, list[range]] = {}
        for low, owner, some, _ in self.sources():
            placed = self.placed.get(low)
            if placed is None or (placed.owner, placed.bytes) != (owner, some):
                found.setdefault(owner, []).append(some)
        return {owner: merge_ranges(ranges) for owner, ranges in found.items()}

    def sources(self) -> Iterator[tuple[int, int, range, int]]:
        """Yield the inputs of the decoding that are not copied into memory anyway: the first byte of the
        decoded range, the owner of the input, the range of its shard, and the offset of the decoded range
        in memory.
        """
        copied: dict[int, list[range]] = {}
        for byte_range, owner, offset in self.copied:
            copied.setdefault(owner, []).append(range(offset, offset + byte_range.end - byte_range.first))
        for byte_range in self.decoded:
            for low, high, sources in range_sources(
                self.layout, self.usable, byte_range.first, byte_range.end
            ):
                for owner, offset in sources:
                    some = range(offset, offset + high - low)
                    if not any(_within(some, copy) for copy in copied.get(owner, ())):
                        yield low, owner, some, byte_range.offset + low - byte_range.first


def plan_read(
    layout: ShardLayout,
    usable: frozenset[int],
    first: int,
    end: int,
    *,
    own: Mapping[int, ShardHolder] | None = None,
    borrow: bool = False,
) -> ReadPlan:
    """Plan how bytes [first, end) of the bucket are read.

    :param usable: owners whose shards can be read.
    :param own: holders of those shards that are in this node's memory.
    :param borrow: whether bytes of this node's own arena may be borrowed.
    :raises TooManyLossesError: the usable shards do not determine these bytes.
    """
    plan = ReadPlan(layout=layout, usable=usable, own=own or {})
    for low, high, sources in _join(range_sources(layout, usable, first, end)):
        owner, offset = sources[0]
        holder = plan.own.get(owner)
        if (
            borrow
            and len(sources) == 1
            and high - low >= _MIN_BORROWED_BYTES
            and holder is not None
            and holder.shard is not None
            and holder.shard.in_blocks
        ):
            plan.ranges.append(ByteRange(first=low, end=high, offset=offset, holder=holder))
            continue
        if plan.ranges and plan.ranges[-1].holder is not None:
            plan.size_bytes += -plan.size_bytes % _ALIGNMENT_BYTES
        byte_range = ByteRange(first=low, end=high, offset=plan.size_bytes, holder=None)
        plan.size_bytes += high - low
        plan.ranges.append(byte_range)
        if len(sources) == 1:
            plan.copied.append((byte_range, owner, offset))
        else:
            plan.decoded.append(byte_range)
    plan.placed = _choose_in_place(plan)
    return plan


def _choose_in_place(plan: ReadPlan) -> dict[int, InPlaceReceive]:
    """Choose for each decoded range one input that no other range needs, to be received in place."""
    sources = sorted(plan.sources(), key=lambda source: (source[1], source[2].start))
    ends = [0] + [0] * len(sources)
    """End of the preceding inputs of the same owner, for each input."""
    for number, (_, owner, some, _) in enumerate(sources):
        before = ends[number] if number and sources[number - 1][1] == owner else 0
        ends[number + 1] = max(before, some.stop)
    found: dict[int, InPlaceReceive] = {}
    for number, (low, owner, some, place) in enumerate(sources):
        before = number and sources[number - 1][1] == owner and ends[number] > some.start
        following = number + 1 < len(sources) and sources[number + 1]
        if owner in plan.own or before:
            continue
        if not following or following[1] != owner or following[2].start >= some.stop:
            found.setdefault(low, InPlaceReceive(owner, some, place))
    return found


def _join(runs: Iterable[RangeSources]) -> Iterator[RangeSources]:
    """Join consecutive ranges that come from the same shard, or that are all decoded."""
    last: RangeSources | None = None
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


async def execute_read(plan: ReadPlan, memory: Bytes, own: Mapping[int, Bytes], read: Read) -> int:
    """Fill ``memory``, which has ``plan.size_bytes``, and return the number of fetched bytes.

    :param own: shards in this node's memory that are read and verified. The caller checks afterwards that
        the snapshot is still there.
    :raises ShardsUnusableError: some shards cannot be used; the contents of the memory are undefined.
    """
    asked = plan.asked()
    stores = {owner: FetchedRanges(asked.get(owner, [])) for owner in plan.read() if owner not in own}
    for byte_range, owner, offset in plan.copied:
        if owner in stores:
            stores[owner].add(
                offset, memory[byte_range.offset : byte_range.offset + byte_range.end - byte_range.first]
            )
    for one in plan.placed.values():
        stores[one.owner].add(one.bytes.start, memory[one.offset : one.offset + len(one.bytes)])

    def shard(owner: int, offset: int, size: int) -> Bytes:
        if owner in own:
            return own[owner][offset : offset + size]
        return stores[owner].read(offset, size)

    def copy_own() -> list[int]:
        """Copy from this node's memory and return the owners whose bytes are corrupt."""
        for byte_range, owner, offset in plan.copied:
            if owner in own:
                size = byte_range.end - byte_range.first
                memory[byte_range.offset : byte_range.offset + size] = own[owner][offset : offset + size]
        kept = ((owner, plan.own[owner].shard, r) for owner, r in plan.read().items() if owner in own)
        return [owner for owner, part, r in kept if part and not part.are_ranges_intact(own[owner], r)]

    def make() -> None:
        placed = {low: (one.owner, one.bytes.start) for low, one in plan.placed.items()}
        for byte_range in plan.decoded:
            target = memory[byte_range.offset : byte_range.offset + byte_range.end - byte_range.first]
            decode_bucket(plan.layout, plan.usable, shard, target, byte_range.first, placed)

    copying = asyncio.ensure_future(asyncio.to_thread(copy_own))
    try:
        await _fetch_all(stores, read)
    finally:
        bad = await copying
    if bad:
        raise ShardsUnusableError([(owner, PeerError("its digest does not match")) for owner in bad])
    await asyncio.to_thread(make)
    return sum(len(some) for store in stores.values() for some, _ in store.pieces)


async def _fetch_all(stores: Mapping[int, FetchedRanges], read: Read) -> None:
    """Fetch from all nodes at once.

    :raises ShardsUnusableError: some shards could not be fetched.
    """
    wanted = {owner: [(some.start, target) for some, target in s.pieces] for owner, s in stores.items()}
    owners = [owner for owner, pieces in wanted.items() if pieces]
    results = await asyncio.gather(*(read(owner, wanted[owner]) for owner in owners), return_exceptions=True)
    failed: list[tuple[int, Exception]] = []
    for owner, result in zip(owners, results, strict=True):
        if isinstance(result, PeerError):
            failed.append((owner, result))
        elif isinstance(result, BaseException):
            raise result
    if failed:
        raise ShardsUnusableError(failed)


async def recompute_shard(
    layout: ShardLayout, owner: int, usable: frozenset[int], offset: int, target: Bytes, read: Read
) -> frozenset[int]:
    """Fill ``target`` with the bytes of the owner's shard from ``offset`` on, from the shards of ``usable``: its
    segment by decoding, its extra cells by computing them again. Return the owners whose shards were read.

    :raises TooManyLossesError: see ``plan_read``.
    :raises ShardsUnusableError: see ``execute_read``.
    """

    def make_plans() -> list[tuple[int, ReadPlan]]:
        origins = layout.origins(owner, offset, offset + len(target))
        return [
            (low - offset, plan_read(layout, usable, start, start + size)) for low, start, size in origins
        ]

    async def add(place: int, plan: ReadPlan) -> None:
        memory = np.empty(plan.size_bytes, dtype=np.uint8)
        await execute_read(plan, memory, {}, read)
        xor_into(target[place:], memory)

    plans = await asyncio.to_thread(make_plans)
    target[:] = 0
    await gather_all([add(place, plan) for place, plan in plans])
    return frozenset(other for _, plan in plans for other in plan.read())
