"""Fetching a script's snapshot from other hosts into memory files of this host, for its ranks.

A rank's own image is copied from its former host or from a holder of its copy, or decoded from other hosts' images
and parity. What all ranks have in
common is assembled from the hosts' shards: from this host's shard alone if its parity suffices, otherwise
from all. Lost or corrupt shards are decoded. Every fetched byte is checked against its digest.
"""

import asyncio
import mmap
import os
import shutil
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import structlog

from ftd.errors import PeerError
from ftd.snapshots.restoring.read_plan import ShardsUnusableError, execute_read, plan_read
from ftd.snapshots.shards.arenas import ArenaSnapshot, NodeArenas
from ftd.snapshots.shards.sources import PartLocation, RangeRequest, SnapshotSource
from ftd.snapshots.snapshot_agent.client import PeerAgentClient
from ftd.snapshots.snapshot_agent.parity import own_parts, read_group
from runtime.wire.snapshot_agent_protocol import (
    DecodeSources,
    FetchRequest,
    FetchResult,
    RankSnapshotLayout,
)
from storage.codes import make_code, solve_lost_cells
from storage.manifest import SnapshotManifest, SnapshotPart
from storage.shards import Bytes, ShardLayout

log = structlog.get_logger("ftd.node")


class SnapshotFetcher:
    """A fetcher of snapshots into ``<root>/<job>/fetched-<generation>-<step>``, which is removed once a newer
    step is protected.
    """

    def __init__(self, arenas: NodeArenas, client: PeerAgentClient, *, address: str) -> None:
        self._arenas, self._client, self._address = arenas, client, address
        self._busy: dict[Path, asyncio.Lock] = {}

    async def fetch(self, wanted: FetchRequest) -> FetchResult:
        """Fetch what is requested and return the files.

        :raises PeerError: something is missing; the message says what.
        """
        job = self._arenas.root / wanted.job
        directory = job / f"fetched-{wanted.generation}-{wanted.step}"
        try:
            job.mkdir(mode=0o700, parents=True, exist_ok=True)
            for older in job.glob("fetched-*"):
                if older != directory:
                    shutil.rmtree(older, ignore_errors=True)
            directory.mkdir(mode=0o700, exist_ok=True)
            own = directory / f"own-{wanted.rank}" if wanted.own or wanted.decode else None
            shared = directory / "shared" if wanted.shards else None
            if own is not None:
                await self._once(own, lambda draft: self._fetch_own(wanted, draft))
            if shared is not None:
                await self._once(shared, lambda draft: self._fetch_shared(wanted, draft))
        except OSError as error:
            raise PeerError(f"{directory} cannot be filled: {error.strerror or error}") from None
        return FetchResult(own=str(own or ""), shared=str(shared or ""))

    async def _once(self, path: Path, make: Callable[[Path], Awaitable[None]]) -> None:
        """Call ``make`` unless ``path`` is there: the ranks of one host share what was fetched."""
        async with self._busy.setdefault(path, asyncio.Lock()):
            if not path.exists():
                draft = path.with_name(f".{path.name}")
                await make(draft)
                draft.replace(path)

    # --- a rank's own image ----------------------------------------------------------------------

    async def _fetch_own(self, wanted: FetchRequest, draft: Path) -> None:
        problem = PeerError("no source has it")
        # Own memory first, although it holds this rank's image only where the ranks changed their hosts.
        for address in sorted(wanted.own, key=lambda a: a != self._address):
            source = SnapshotSource(node=address, address=address)
            try:
                key = wanted.generation, wanted.step
                found = await self._client.rank_manifest(source, wanted.job, wanted.rank, key)
                if found is None:
                    raise PeerError(f"{source} does not have step {wanted.step} any more")
                parts = own_parts(found)
                first = parts[0].offset
                memory = _map_draft(draft, parts[-1].offset + parts[-1].size_bytes - first).data
                await self._client.fetch(
                    RangeRequest(
                        location=_location(source, wanted, part),
                        first=0,
                        into=memory[part.offset - first : part.offset - first + part.size_bytes],
                    )
                    for part in parts
                )
                return
            except PeerError as error:
                problem = error
                log.warning("fetch_failed", job=wanted.job, step=wanted.step, reason=str(error))
        if wanted.decode is None:
            raise problem
        await self._decode_own(wanted, wanted.decode, draft)

    async def _decode_own(self, wanted: FetchRequest, sources: DecodeSources, draft: Path) -> None:
        """Decode the rank's image from other hosts' images and parity.

        :raises PeerError: too many of them are lost or corrupt.
        """
        code, lost = make_code(sources.scheme, len(sources.ranks)), frozenset[int]()
        while True:
            present = sources.present - lost
            if solve_lost_cells(code, frozenset(range(code.owners)) - present) is None:
                raise PeerError(
                    f"rank {wanted.rank} of step {wanted.step} cannot be decoded: {code.owners - len(present)} of "
                    f"{code.owners} hosts are lost or corrupt, too many for {sources.scheme}"
                )
            try:
                key = wanted.generation, wanted.step
                group = await read_group(self._client, wanted.job, key, sources, lost)
                await group.decode(wanted.rank, present, _map_draft(draft, group.size_of(wanted.rank)))
                return
            except ShardsUnusableError as error:
                lost |= self._log_failed(wanted, error)

    # --- shared state ----------------------------------------------------------------------------

    async def _fetch_shared(self, wanted: FetchRequest, draft: Path) -> None:
        layout = _shards(wanted.layout)
        code = layout.code
        everybody = frozenset(range(code.owners))
        here = frozenset(owner for owner, address in wanted.shards.items() if address == self._address)
        lost: set[int] = set(everybody - set(wanted.shards))
        if here and solve_lost_cells(code, everybody - here) is not None:
            lost = set(everybody - here)
        while True:
            present = everybody - lost
            if solve_lost_cells(code, frozenset(lost)) is None:
                raise PeerError(
                    f"shards of {len(lost)} of {code.owners} hosts are lost or corrupt: too many for "
                    f"{wanted.layout.scheme}"
                )
            try:
                shards = {owner: await self._shard(wanted, owner) for owner in present}
                plan = await asyncio.to_thread(plan_read, layout, present, 0, layout.bucket_bytes)
                image = _map_draft(draft, layout.bucket_bytes)
                await execute_read(plan, image, {}, partial(self._read, wanted, shards))
                return
            except ShardsUnusableError as error:
                if lost == everybody - here:
                    lost = set(everybody - set(wanted.shards))  # This host's memory was not enough.
                lost |= self._log_failed(wanted, error)

    def _log_failed(self, wanted: FetchRequest, error: ShardsUnusableError) -> set[int]:
        """Log why owners cannot be used, and return them."""
        for _, problem in error.owners:
            log.warning("fetch_failed", job=wanted.job, step=wanted.step, reason=str(problem))
        return {owner for owner, _ in error.owners}

    async def _shard(self, wanted: FetchRequest, owner: int) -> "_Shard":
        """Return the owner's shard.

        :raises ShardsUnusableError: the shard is missing or corrupt.
        """
        source = SnapshotSource(node=f"host {owner}", address=wanted.shards[owner])
        try:
            if source.address == self._address:
                held = self._arenas.find(wanted.job, wanted.step)
                manifests: tuple[SnapshotManifest, ...] = tuple(one.manifest for one in held)
                corrupt: tuple[str, ...] = ()
            else:
                found = await self._client.manifest(source, wanted.job, wanted.step)
                held, manifests, corrupt = (), found.manifests, found.corrupt
            for number, manifest in enumerate(manifests):
                layout = manifest.layout
                if (manifest.generation, layout.get("owner")) == (wanted.generation, owner):
                    parts = sorted(
                        (p for p in manifest.parts if "/shared-" in p.name), key=lambda p: p.offset
                    )
                    bad = [part.name for part in parts if part.name in corrupt]
                    if bad:
                        raise PeerError(f"{source} has a corrupt {bad[0]}")
                    return _Shard(source, parts, held[number] if held else None)
            raise PeerError(f"{source} does not have its shard of step {wanted.step} any more")
        except PeerError as error:
            raise ShardsUnusableError([(owner, error)]) from None

    async def _read(
        self,
        wanted: FetchRequest,
        shards: Mapping[int, "_Shard"],
        owner: int,
        pieces: Sequence[tuple[int, Bytes]],
    ) -> None:
        """Read bytes of an owner's shard.

        :raises PeerError: they are corrupt, or could not be fetched.
        """
        shard, fetches = shards[owner], []
        for first, into in pieces:
            end = first + len(into)
            for part in shard.parts:
                low, high = max(first, part.offset), min(end, part.offset + part.size_bytes)
                if low >= high:
                    continue
                target = into[low - first : high - first]
                if shard.held is not None:
                    await asyncio.to_thread(self._read_here, shard.held, part, low - part.offset, target)
                else:
                    location = _location(shard.source, wanted, part)
                    fetches.append(RangeRequest(location=location, first=low - part.offset, into=target.data))
        await self._client.fetch(fetches)

    def _read_here(self, held: ArenaSnapshot, part: SnapshotPart, first: int, target: Bytes) -> None:
        try:
            memory = np.frombuffer(self._arenas.view(held, part), dtype=np.uint8)
        except OSError as error:
            raise PeerError(f"{part.name} in this host's memory cannot be read: {error}") from error
        target[:] = memory[first : first + len(target)]
        whole = target if len(target) == part.size_bytes else memory
        if not part.is_intact(whole):
            raise PeerError(f"{part.name} in this host's memory changed since it was written")


@dataclass(frozen=True, slots=True)
class _Shard:
    """An owner's shard and the source that has it; ``held`` if it is in this host's memory."""

    source: SnapshotSource
    parts: list[SnapshotPart]
    held: ArenaSnapshot | None


def _map_draft(path: Path, size_bytes: int) -> Bytes:
    """Return the memory of a draft, whose pages are allocated at once, so that a full memory is an error. It is
    unmapped with its last view.

    The draft of a failed attempt is written again in place, or replaced if it is too long, but never shortened: a
    thread of that attempt may still compute a digest of it, and a page that disappears would kill the process.
    """
    if path.exists() and path.stat().st_size > max(1, size_bytes):
        path.unlink()
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, max(1, size_bytes))
        memory = mmap.mmap(descriptor, max(1, size_bytes), flags=mmap.MAP_SHARED)
    finally:
        os.close(descriptor)
    return np.frombuffer(memory, dtype=np.uint8)[:size_bytes]


def _shards(layout: RankSnapshotLayout) -> ShardLayout:
    """Return the layout of the shared image, extended by zeros to whole cells: digests cover them as well."""
    code = make_code(layout.scheme, layout.owners)
    cell_bytes = ShardLayout(code=code, bucket_bytes=layout.shared_bytes).cell_bytes
    return ShardLayout(code=code, bucket_bytes=code.owners * code.cells * cell_bytes)


def _location(source: SnapshotSource, wanted: FetchRequest, part: SnapshotPart) -> PartLocation:
    return PartLocation(source=source, job_id=wanted.job, step=wanted.step, part=part)
