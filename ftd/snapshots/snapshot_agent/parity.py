"""Parity of the ranks' own images among hosts: REFT's AEC where ranks differ, as under FSDP2.

The hosts of a group are the owners of a code (``storage.codes``). The images of a host's ranks, one after the
other, are its segment; segments are as long as the longest, by zeros that nobody sends. Under DDP each host
computes its parity from its own memory. Here it reads the other hosts' cells instead, and XORs them as they
arrive. So with ``aec`` each host sends its images once, and m hosts hold 1/(m − 1) of them as parity, where
copies would take all of them. A lost host's images are decoded slice by slice from the other hosts' images
and parity, and each of their parts is compared with its digest.
"""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby

import msgspec
import numpy as np

from ftd.errors import PeerError
from ftd.snapshots.restoring.read_plan import ShardsUnusableError, execute_read, plan_read
from ftd.snapshots.shards.protocol import AsyncRateLimiter
from ftd.snapshots.shards.sources import PartLocation, RangeRequest, SnapshotSource
from ftd.snapshots.snapshot_agent.client import PeerAgentClient
from ftd.tasks import gather_all
from runtime.wire.snapshot_agent_protocol import (
    DecodeSources,
    ParityLayout,
    RankImage,
    RankSnapshotLayout,
    SnapshotKey,
)
from storage.codes import make_code
from storage.manifest import SnapshotManifest, SnapshotPart
from storage.shards import ALIGNMENT_BYTES, Bytes, ShardLayout, xor_into

CHUNK_BYTES = 4 * 1024 * 1024
"""Bytes of one host that are read at a time; a host that computes its parity needs one chunk for each other host."""
PARITY_PART = "parity"


def own_parts(manifest: SnapshotManifest) -> list[SnapshotPart]:
    """Return the parts that are the rank's own, in order: its image and the header after it."""
    own = (part for part in manifest.parts if not part.name.partition("/")[2].startswith("shared-"))
    return sorted(own, key=lambda part: part.offset)


def rank_images(
    manifests: Iterable[SnapshotManifest], ranks: Sequence[int], generation: int
) -> tuple[RankImage, ...] | None:
    """Return the images of a host's ranks in their order; ``None`` if one is not there."""
    found: dict[int, RankImage] = {}
    for manifest in manifests:
        try:
            layout = msgspec.convert(manifest.layout, RankSnapshotLayout)
        except msgspec.ValidationError:
            continue
        if manifest.generation == generation:
            parts, end = [], 0
            for part in own_parts(manifest):
                parts.append(msgspec.structs.replace(part, offset=end))
                end += part.size_bytes
            found[layout.rank] = RankImage(rank=layout.rank, parts=tuple(parts), own_bytes=layout.own_bytes)
    return tuple(found[rank] for rank in ranks) if found.keys() >= set(ranks) else None


def parity_layout(manifest: SnapshotManifest) -> ParityLayout | None:
    """Return the layout of a host's parity; ``None`` if the manifest is that of a rank."""
    try:
        return msgspec.convert(manifest.layout, ParityLayout)
    except msgspec.ValidationError:
        return None


def shard_layout(layout: ParityLayout) -> ShardLayout:
    """Return the layout of the segments and of the parity: all segments have the size of the largest."""
    code = make_code(layout.scheme, len(layout.members))
    largest = max(1, *map(layout.member_bytes, range(len(layout.members))))
    cell_bytes = -(-largest // (code.cells * ALIGNMENT_BYTES)) * ALIGNMENT_BYTES
    return ShardLayout(code=code, bucket_bytes=code.owners * code.cells * cell_bytes)


class ParityGroup:
    """The images and the parity of a group of hosts, read from their agents.

    :param addresses: agent that has a rank's image, by rank.
    :param parity: each host's agent and part with its parity, by its position.
    """

    def __init__(
        self,
        client: PeerAgentClient,
        job: str,
        step: int,
        layout: ParityLayout,
        addresses: Mapping[int, str],
        parity: Mapping[int, PartLocation],
    ) -> None:
        self._client, self._job, self._step = client, job, step
        self._layout, self._shards = layout, shard_layout(layout)
        self._addresses, self._parity = addresses, parity
        self._segment_bytes = self._shards.code.cells * self._shards.cell_bytes

    async def read(self, position: int, pieces: Sequence[tuple[int, Bytes]]) -> None:
        """Read bytes of a host's shard: of its segment, or of its parity after it.

        :raises PeerError: they cannot be fetched.
        """
        wanted: list[RangeRequest] = []
        for first, into in pieces:
            into[:] = 0
            inside = min(max(self._segment_bytes - first, 0), len(into))
            wanted += self._image_ranges(position, first, into[:inside])
            if inside < len(into):
                location, at = self._parity[position], first + inside - self._segment_bytes
                wanted.append(RangeRequest(location=location, first=at, into=into[inside:].data))
        await self._client.fetch(wanted)

    def _image_ranges(self, position: int, first: int, into: Bytes) -> Iterable[RangeRequest]:
        begin, end = 0, first + len(into)
        for image in self._layout.members[position]:
            for part in image.parts:
                start = begin + part.offset
                low, high = max(first, start), min(end, start + part.size_bytes)
                if low < high:
                    source = SnapshotSource(
                        node=self._addresses[image.rank], address=self._addresses[image.rank]
                    )
                    location = PartLocation(source=source, job_id=self._job, step=self._step, part=part)
                    target = into[low - first : high - first]
                    yield RangeRequest(location=location, first=low - start, into=target.data)
            begin += image.size_bytes

    async def compute(self, limiter: AsyncRateLimiter, parity: Bytes) -> None:
        """Fill ``parity`` with the parity of this group's host ``layout.position``. Each cell of another host
        is read once.

        :raises PeerError: a host's images cannot be read.
        """
        code, cell_bytes = self._shards.code, self._shards.cell_bytes
        parity[:] = 0
        targets: dict[int, list[int]] = {}
        for index, cells in enumerate(code.extra[self._layout.position]):
            for cell in cells:
                targets.setdefault(cell, []).append(index)
        adding = asyncio.Lock()

        async def add(position: int, cells: Sequence[int]) -> None:
            buffer = np.empty(min(CHUNK_BYTES, cell_bytes), dtype=np.uint8)
            size = self._layout.member_bytes(position)
            for cell in cells:
                first = cell % code.cells * cell_bytes
                end = min(first + cell_bytes, size)
                for low in range(first, end, len(buffer)):
                    chunk = buffer[: min(len(buffer), end - low)]
                    await limiter.acquire(len(chunk))
                    await self.read(position, [(low, chunk)])
                    starts = [index * cell_bytes + low - first for index in targets[cell]]
                    async with adding:
                        await asyncio.to_thread(_xor_at, parity, starts, chunk)

        by_host = groupby(sorted(targets), key=lambda cell: cell // code.cells)
        await gather_all([add(position, list(cells)) for position, cells in by_host])

    async def decode(self, rank: int, present: frozenset[int], image: Bytes) -> None:
        """Fill ``image`` with the image of a lost rank and its header, decoded from the hosts ``present``.

        :raises ShardsUnusableError: present hosts' images or parity cannot be used.
        :raises PeerError: the decoded bytes are not those that were written.
        """
        first, found = self._place_of(rank)
        for begin in range(0, len(image), CHUNK_BYTES):
            end = min(begin + CHUNK_BYTES, len(image))
            plan = await asyncio.to_thread(plan_read, self._shards, present, first + begin, first + end)
            await execute_read(plan, image[begin:end], {}, self.read)
        for part in found.parts:
            data = image[part.offset : part.offset + part.size_bytes]
            if not await asyncio.to_thread(part.is_intact, data):
                raise PeerError(f"{part.name} of rank {rank} cannot be decoded: its digest does not match")

    @property
    def parity_bytes(self) -> int:
        """Size of this host's parity."""
        return self._shards.shard_bytes(self._layout.position) - self._segment_bytes

    def size_of(self, rank: int) -> int:
        """Return the size of a rank's image with its header, in bytes."""
        return self._place_of(rank)[1].size_bytes

    def _place_of(self, rank: int) -> tuple[int, RankImage]:
        """Return the offset of a rank's image in the code's bucket, and the image."""
        for position, member in enumerate(self._layout.members):
            offset = position * self._segment_bytes
            for image in member:
                if image.rank == rank:
                    return offset, image
                offset += image.size_bytes
        raise PeerError(f"the parity has no images of rank {rank}")


def _xor_at(parity: Bytes, starts: Sequence[int], chunk: Bytes) -> None:
    for start in starts:
        xor_into(parity[start : start + len(chunk)], chunk)


async def read_group(
    client: PeerAgentClient, job: str, key: SnapshotKey, sources: DecodeSources, lost: frozenset[int]
) -> ParityGroup:
    """Return the group that a lost image is decoded from, after asking the hosts that are not lost for their
    parity.

    :raises ShardsUnusableError: a host's parity or images are gone or corrupt.
    """
    layout: ParityLayout | None = None
    parity: dict[int, PartLocation] = {}
    for position in sorted(sources.present - lost):
        address = sources.parity[position]
        source = SnapshotSource(node=address, address=address)
        try:
            found = await client.manifest(source, job, key[1])
            corrupt = {name.partition("/")[0] for name in found.corrupt}
            if bad := corrupt & {PARITY_PART, *(f"rank-{rank}" for rank in sources.ranks[position])}:
                raise PeerError(f"{source} has corrupt bytes of {', '.join(sorted(bad))} of step {key[1]}")
            for manifest in found.manifests:
                there = parity_layout(manifest)
                if there is not None and there.position == position and manifest.generation == key[0]:
                    layout = there
                    part = manifest.part(PARITY_PART)
                    parity[position] = PartLocation(source=source, job_id=job, step=key[1], part=part)
            if position not in parity:
                raise PeerError(f"{source} does not have its parity of step {key[1]} any more")
        except PeerError as error:
            raise ShardsUnusableError([(position, error)]) from None
    if layout is None:
        raise PeerError(f"no host has parity of step {key[1]}")
    return ParityGroup(client, job, key[1], layout, sources.images, parity)
