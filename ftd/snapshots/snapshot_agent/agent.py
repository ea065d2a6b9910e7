"""The snapshot agent: it protects the snapshots of scripts among hosts and holds copies for other hosts.

Ranks write into ``<root>/<job>/rank-<r>`` themselves; ``copy-<r>`` holds the copy of a rank of another
host, and ``parity-<h>`` this host's parity of other hosts' ranks (``ftd.snapshots.snapshot_agent.parity``).
The agent of rank 0 leads. It follows the snapshots that rank 0 completes. For the newest one it has every
host of the run retain it (``pin``), then has every host copy or encode its part (``copy``), and when all
have done so, it has every host release older snapshots (``release``). So one and the same step is protected
everywhere, however quickly snapshots follow each other. docs/tutorials/snapshotter.md has the states and
messages.
"""

import asyncio
import contextlib
import re
import shutil
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Literal

import msgspec
import structlog

from ftd.errors import PeerError
from ftd.snapshots.shards.arenas import NodeArenas
from ftd.snapshots.shards.protocol import AsyncRateLimiter
from ftd.snapshots.shards.sources import PartLocation, RangeRequest, SnapshotSource
from ftd.snapshots.snapshot_agent.client import PeerAgentClient
from ftd.snapshots.snapshot_agent.parity import PARITY_PART, ParityGroup, own_parts, rank_images
from ftd.tasks import cancel_all, gather_all
from runtime.wire.snapshot_agent_protocol import (
    HeldParity,
    HeldRankSnapshot,
    HeldSnapshots,
    ParityLayout,
    ProtectedRun,
    ProtectRequest,
    RankImage,
    RankSnapshotLayout,
    SnapshotKey,
    read_retained,
    write_retained,
)
from storage.arena import SLOTS, Arena, is_locked, manifests_in
from storage.errors import ArenaFullError, CorruptDataError
from storage.manifest import SnapshotManifest, SnapshotPart, read_record, write_record

log = structlog.get_logger("ftd.node")

ARENA_NAMES = re.compile(r"(?:rank|copy|parity)-(\d{1,6})()", re.ASCII)
JOB_NAMES = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", re.ASCII)
RUN_FILE = "run.json"
ProtectionPhase = Literal["pin", "copy", "release"]
PIN_TIMEOUT_S = 60.0
"""Limit for a host until all its ranks have a step that rank 0 has."""
COPY_TIMEOUT_S = 1800.0
"""Limit for copying, in addition to :data:`PIN_TIMEOUT_S`: many gigabytes at a bounded rate."""
_POLL_S = 0.02
_RESTED_POLL_S = 0.5
_PAUSE_S = 0.5
"""Pause after a failed attempt to protect a step."""


class SnapshotAgent:
    """The agent that protects the snapshots of all jobs of this host.

    :param address: address of this agent.
    :param rate_bytes_s: rate limit of the copies that it receives; ``None`` for no limit.
    """

    def __init__(
        self,
        arenas: NodeArenas,
        client: PeerAgentClient,
        *,
        address: str,
        peers: tuple[str, ...],
        rate_bytes_s: float | None,
    ) -> None:
        self.root, self.address = arenas.root, address
        self._arenas, self._client, self._peers = arenas, client, peers
        self._rate_bytes_s = rate_bytes_s
        self.phases: dict[ProtectionPhase, Callable[[ProtectRequest], Awaitable[None]]] = {
            "pin": self.pin,
            "copy": self.copy,
            "release": self.release,
        }
        """Methods for the phases of a step, in their order; each begins when all hosts have ended the one before."""
        self._leading: dict[str, asyncio.Task[None]] = {}
        self._copies: dict[tuple[str, str], Arena] = {}
        """Arenas that this agent writes, by job and name of the directory."""
        self._copying: dict[str, asyncio.Lock] = {}
        self._newest: dict[str, int] = {}
        """The newest known generation of each job."""
        self._removed: dict[str, int] = {}
        """Last generation of each removed job: requests of such a run that are still under way are rejected."""

    def resume(self) -> None:
        """Lead the runs again that this agent led when it ended."""
        for path in self.root.glob(f"*/{RUN_FILE}"):
            with contextlib.suppress(CorruptDataError, OSError):
                self._lead(read_record(path, ProtectedRun))

    async def close(self) -> None:
        """Stop leading. The snapshots stay."""
        await cancel_all(self._leading.values())
        for arena in self._copies.values():
            arena.close()

    # --- held snapshots --------------------------------------------------------------------------

    def held(self, job: str) -> HeldSnapshots:
        """Return what is complete here, by the manifests; bytes are verified when they are read."""
        ranks: list[HeldRankSnapshot] = []
        parity: list[HeldParity] = []
        for directory in sorted(self._job(job).glob("*-*")):
            if not ARENA_NAMES.fullmatch(directory.name):
                continue
            for manifest in manifests_in(directory):
                with contextlib.suppress(msgspec.ValidationError):
                    if manifest.job_id != job:
                        continue
                    if directory.name.startswith("parity-"):
                        parity.append(self._held_parity(manifest))
                    else:
                        layout = msgspec.convert(manifest.layout, RankSnapshotLayout)
                        ranks.append(
                            HeldRankSnapshot(
                                address=self.address,
                                generation=manifest.generation,
                                step=manifest.step,
                                layout=layout,
                                is_copy=directory.name.startswith("copy-"),
                            )
                        )
        return HeldSnapshots(ranks=tuple(ranks), parity=tuple(parity))

    def _held_parity(self, manifest: SnapshotManifest) -> HeldParity:
        """:raises msgspec.ValidationError: the manifest is not one of parity."""
        layout = msgspec.convert(manifest.layout, ParityLayout)
        return HeldParity(
            address=self.address,
            generation=manifest.generation,
            step=manifest.step,
            scheme=layout.scheme,
            position=layout.position,
            ranks=tuple(tuple(image.rank for image in member) for member in layout.members),
            own_bytes=tuple(tuple(image.own_bytes for image in member) for member in layout.members),
        )

    async def held_by_all(self, job: str) -> HeldSnapshots:
        """Return what is held here and at the configured peers that answer."""

        async def ask(peer: str) -> HeldSnapshots:
            try:
                return await self._client.held(peer, job)
            except PeerError as error:
                log.warning("held_request_failed", job=job, reason=str(error))
                return HeldSnapshots()

        return sum(await asyncio.gather(*map(ask, self._peers)), start=self.held(job))

    # --- protection ------------------------------------------------------------------------------

    def begin(self, run: ProtectedRun) -> None:
        """Protect the snapshots of a run from now on.

        :raises OSError: its record cannot be written.
        """
        self._job(run.job).mkdir(mode=0o700, parents=True, exist_ok=True)
        write_record(self._job(run.job) / RUN_FILE, run)
        self._lead(run)

    def _lead(self, run: ProtectedRun) -> None:
        self._newest[run.job] = run.generation
        if (old := self._leading.pop(run.job, None)) is not None:
            old.cancel()
        if 0 in run.ranks_of(self.address):
            self._leading[run.job] = asyncio.ensure_future(self._follow(run))

    async def _follow(self, run: ProtectedRun) -> None:
        """Protect the newest of rank 0's snapshots, one after the other, until the job is removed."""
        directory = self._job(run.job) / "rank-0"
        done, last_error, rest_s = -1, "", _POLL_S
        while directory.exists():
            steps = [key[1] for key in _keys(directory) if key[0] == run.generation]
            newest = max(steps, default=done)
            if newest <= done:
                await asyncio.sleep(rest_s)
                rest_s = min(_RESTED_POLL_S, 1.2 * rest_s)
                continue
            message = ProtectRequest(run=run, step=newest)
            try:
                for phase in self.phases:
                    await gather_all(self._on_all_hosts(message, phase))
            except (PeerError, OSError) as error:
                if str(error) != last_error:
                    last_error = str(error)
                    log.warning("snapshot_not_protected", job=run.job, step=newest, reason=last_error)
                await asyncio.sleep(_PAUSE_S)
            else:
                done, last_error, rest_s = newest, "", _POLL_S

    def _on_all_hosts(self, message: ProtectRequest, phase: ProtectionPhase) -> list[Awaitable[None]]:
        hosts = dict.fromkeys(message.run.hosts + message.run.spare_hosts)
        return [
            self.phases[phase](message)
            if host == self.address
            else self._client.send(host, phase, message, PIN_TIMEOUT_S + COPY_TIMEOUT_S)
            for host in hosts
        ]

    async def pin(self, message: ProtectRequest) -> None:
        """Return when each rank of this host has completed the step and knows that it must retain it.

        :raises PeerError: a rank went on without the step, or has not completed it in time.
        """
        run, job = message.run, self._job(message.run.job)
        self._check_not_over(run)
        self._newest[run.job] = max(self._newest.get(run.job, 0), run.generation)
        try:
            job.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_retained(job, msgspec.structs.replace(read_retained(job), pinned=message.key))
            async with asyncio.timeout(PIN_TIMEOUT_S):
                for rank in run.ranks_of(self.address):
                    await self._completed(run, job / f"rank-{rank}", message.key)
        except TimeoutError:
            raise PeerError(
                f"{self.address} has not completed step {message.step} after {PIN_TIMEOUT_S:g} s"
            ) from None
        except OSError as error:
            raise PeerError(f"{self.address} cannot retain step {message.step}: {error}") from None

    async def copy(self, message: ProtectRequest) -> None:
        """Return when this host holds its copies of other hosts' ranks, or its parity of them.

        :raises PeerError: other hosts' bytes cannot be fetched, or there is no memory for them.
        """
        run = message.run
        self._check_not_over(run)
        async with self._copying.setdefault(run.job, asyncio.Lock()):
            try:
                for host in run.hosts_copied_by(self.address):
                    for rank in run.ranks_of(run.hosts[host]):
                        await self._copy(run, rank, run.hosts[host], message.key)
                if group := run.parity_group(self.address):
                    await self._encode(run, group, message.key)
            except (OSError, ArenaFullError) as error:
                raise PeerError(f"{self.address} cannot protect step {message.step}: {error}") from None

    def _check_not_over(self, run: ProtectedRun) -> None:
        if run.generation <= self._removed.get(run.job, 0):
            raise PeerError("the job is over")

    async def _completed(self, run: ProtectedRun, directory: Path, key: SnapshotKey) -> None:
        while key not in (keys := _keys(directory)):
            if self._newest[run.job] > run.generation:
                raise PeerError("a newer run has begun")
            if max(keys, default=key) > key:
                raise PeerError(f"{self.address}: {directory.name} has released step {key[1]}")
            await asyncio.sleep(_POLL_S)

    async def _copy(self, run: ProtectedRun, rank: int, host: str, key: SnapshotKey) -> None:
        """Copy what is the rank's own from its host, as soon as it is complete there."""
        arena = await self._arena(run.job, f"copy-{rank}")
        if any((m.generation, m.step) == key for m in arena.snapshots):
            return
        source = SnapshotSource(node=host, address=host)
        found = await self._client.rank_manifest(source, run.job, rank, key)
        if found is None:
            raise PeerError(f"{source} has released step {key[1]} of rank {rank}")
        own = own_parts(found)
        self._make_room(run, arena)
        slot = await asyncio.to_thread(arena.begin, sum(part.size_bytes for part in own))
        memory = slot.view.data
        parts, end, began = [], 0, time.monotonic()
        for part in own:
            location = PartLocation(source=source, job_id=run.job, step=key[1], part=part)
            into = memory[end : end + part.size_bytes]
            await self._client.fetch([RangeRequest(location=location, first=0, into=into)])
            parts.append(msgspec.structs.replace(part, offset=end))
            end += part.size_bytes
            if self._rate_bytes_s is not None:
                await asyncio.sleep(began + end / self._rate_bytes_s - time.monotonic())
        layout = msgspec.structs.replace(msgspec.convert(found.layout, RankSnapshotLayout), owner=-1)
        arena.commit(
            msgspec.structs.replace(
                found, slot=slot.number, parts=tuple(parts), layout=msgspec.to_builtins(layout)
            )
        )

    async def _arena(self, job: str, name: str) -> Arena:
        arena = self._copies.get((job, name))
        if arena is None:
            arena = self._copies[job, name] = await asyncio.to_thread(Arena.open, self._job(job) / name)
        return arena

    async def _encode(self, run: ProtectedRun, group: tuple[int, ...], key: SnapshotKey) -> None:
        """Compute this host's parity of the other hosts of its group.

        :raises PeerError: a host's images cannot be read.
        """
        host = run.hosts.index(self.address)
        arena = await self._arena(run.job, f"parity-{host}")
        if any((m.generation, m.step) == key for m in arena.snapshots):
            return
        members = await asyncio.gather(*(self._images(run, run.hosts[other], key) for other in group))
        layout = ParityLayout(scheme=run.parity, position=group.index(host), members=tuple(members))
        addresses = {rank: run.hosts[other] for other in group for rank in run.ranks_of(run.hosts[other])}
        encoder = ParityGroup(self._client, run.job, key[1], layout, addresses, {})
        self._make_room(run, arena)
        slot = await asyncio.to_thread(arena.begin, encoder.parity_bytes)
        await encoder.compute(AsyncRateLimiter(self._rate_bytes_s), slot.view)
        part = await asyncio.to_thread(SnapshotPart.from_bytes, PARITY_PART, 0, slot.view)
        arena.commit(
            SnapshotManifest(
                job_id=run.job,
                step=key[1],
                generation=key[0],
                slot=slot.number,
                parts=(part,),
                layout=msgspec.to_builtins(layout),
            )
        )

    async def _images(self, run: ProtectedRun, host: str, key: SnapshotKey) -> tuple[RankImage, ...]:
        """Return the images of a host's ranks.

        :raises PeerError: it has released them, or they are corrupt.
        """
        source, ranks = SnapshotSource(node=host, address=host), run.ranks_of(host)
        if host == self.address:
            found = [one.manifest for one in self._arenas.find(run.job, key[1])]
        else:
            answer = await self._client.manifest(source, run.job, key[1])
            found = list(answer.manifests)
            if bad := [p.name for m in found for p in own_parts(m) if p.name in answer.corrupt]:
                raise PeerError(f"{source} has a corrupt {bad[0]} of step {key[1]}")
        images = rank_images(found, ranks, key[0])
        if images is None:
            raise PeerError(f"{source} has released step {key[1]}")
        return images

    def _make_room(self, run: ProtectedRun, arena: Arena) -> None:
        retained = (read_retained(self._job(run.job)).common, run.restored)
        spare = sorted((m.generation, m.step) for m in arena.snapshots)
        if len(spare) == SLOTS:
            arena.release([key[1] for key in spare if key not in retained][:1])
        self._arenas.limit(arena, [path.name for path in self.root.iterdir() if path.is_dir()])

    async def release(self, message: ProtectRequest) -> None:
        """Release what is older than the step, which is protected on all hosts now, and what is not this
        run's.
        """
        run, job = message.run, self._job(message.run.job)
        write_retained(job, msgspec.structs.replace(read_retained(job), common=message.key, pinned=None))
        wanted = {f"rank-{rank}" for rank in run.ranks_of(self.address)}
        for host in run.hosts_copied_by(self.address):
            wanted |= {f"copy-{rank}" for rank in run.ranks_of(run.hosts[host])}
        if run.parity_group(self.address):
            wanted.add(f"parity-{run.hosts.index(self.address)}")
        for directory in job.iterdir():
            if directory.name.startswith("fetched-"):
                shutil.rmtree(directory, ignore_errors=True)
            elif (
                ARENA_NAMES.fullmatch(directory.name)
                and directory.name not in wanted
                and not is_locked(directory)
            ):
                self._close_copies(run.job, directory.name)
                shutil.rmtree(directory, ignore_errors=True)
        for (name, _), arena in self._copies.items():
            if name == run.job:
                older = [m.step for m in arena.snapshots if (m.generation, m.step) < message.key]
                arena.release(older)

    # --- removal ---------------------------------------------------------------------------------

    async def remove(self, job: str, *, everywhere: bool) -> None:
        """Remove the snapshots of a job that is over, unless a rank has them open; with ``everywhere`` on
        other hosts as well.
        """
        path, others = self._job(job), dict.fromkeys(self._peers)
        with contextlib.suppress(CorruptDataError, OSError):
            run = read_record(path / RUN_FILE, ProtectedRun)
            others |= dict.fromkeys(run.hosts + run.spare_hosts)
        if not any(is_locked(directory) for directory in path.glob("rank-*")):
            if (task := self._leading.pop(job, None)) is not None:
                task.cancel()
            self._removed[job] = self._newest.get(job, 0)
            for directory in path.glob("*-*"):
                self._close_copies(job, directory.name)
            shutil.rmtree(path, ignore_errors=True)
        if everywhere:
            for other in others:
                if other != self.address:
                    with contextlib.suppress(PeerError):
                        await self._client.remove(other, job)

    def _close_copies(self, job: str, name: str) -> None:
        if (arena := self._copies.pop((job, name), None)) is not None:
            arena.close()

    def _job(self, job: str) -> Path:
        """Return the directory of a job.

        :raises PeerError: the name is not valid.
        """
        if not JOB_NAMES.fullmatch(job):
            raise PeerError(f"{job[:80]!r} cannot be the name of a job")
        return self.root / job


def _keys(directory: Path) -> list[SnapshotKey]:
    return [(manifest.generation, manifest.step) for manifest in manifests_in(directory)]
