"""The scrubber: it reads the retained snapshot regularly, and finds and repairs bits that changed in memory.

It reads a snapshot once when it is complete everywhere, once after a rollback to it, and then every
``Timing.scrub_s``; both this node's own parts and the copies that it holds for others. One thread of low
priority reads block by block at ``node.scrub_rate_mib_s``. Changed blocks are reported
(``ShardCorrupted``), repaired by ``ftd.snapshots.repair`` and written back (``ShardRepaired``). If they
cannot be repaired, the coordinator is informed and requests another snapshot at once.
"""

import asyncio
import ssl
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import structlog

from ftd.errors import PeerError
from ftd.snapshots.persist import run_in_thread
from ftd.snapshots.ports import CorruptBlocks, ScrubOperations
from ftd.snapshots.repair import Repairer, RepairError
from ftd.snapshots.shards.arenas import ArenaSnapshot, NodeArenas
from ftd.snapshots.shards.client import ShardClient
from statemachine.messages.values import Restore
from storage.manifest import SnapshotPart
from storage.rate_limit import RateLimiter

log = structlog.get_logger("ftd.node")

_NICENESS = 19
"""Niceness of the thread that reads: everything else goes first."""

WriteBlock = Callable[[ArenaSnapshot, SnapshotPart, int, bytes], Awaitable[None]]
"""Function that writes a block of a part; it raises ``RepairError`` if the bytes are not there afterwards."""
PublishEvent = Callable[[str, str, dict[str, Any]], None]
"""Function that publishes an event with this name, reason and details."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _ArenaBlocks(CorruptBlocks):
    """Corrupt blocks with their location in an arena."""

    held: ArenaSnapshot
    stored: SnapshotPart


class ArenaScrubbing:
    """Verifying and repairing the arenas of a node (``ftd.snapshots.ports.ScrubOperations``)."""

    def __init__(
        self,
        *,
        node: str,
        arenas: NodeArenas,
        token: str,
        tls: ssl.SSLContext | None,
        write_block: WriteBlock,
    ) -> None:
        self._node, self._arenas, self._token, self._tls = node, arenas, token, tls
        self._write_block = write_block

    async def find_corrupt(self, snapshot: Restore, flow: RateLimiter) -> Sequence[CorruptBlocks]:
        held = self._held(snapshot)
        return await run_in_thread(lambda: self._read(held, flow), _NICENESS)

    def is_held(self, snapshot: Restore, corrupt: CorruptBlocks) -> bool:
        return isinstance(corrupt, _ArenaBlocks) and corrupt.held in self._held(snapshot)

    async def repair(self, snapshot: Restore, corrupt: CorruptBlocks) -> Sequence[str]:
        assert isinstance(corrupt, _ArenaBlocks), "it was found here"
        sources: set[str] = set()
        async with ShardClient(self._token, tls=self._tls) as client:
            repairer = Repairer(restore=snapshot, node=self._node, arenas=self._arenas, client=client)
            for number in corrupt.blocks:
                repaired = await repairer.repair_block(corrupt.held, corrupt.stored, number)
                await self._write_block(corrupt.held, corrupt.stored, number, repaired.data)
                sources |= set(repaired.sources)
        return sorted(sources)

    def _held(self, snapshot: Restore) -> list[ArenaSnapshot]:
        found = self._arenas.find(snapshot.job_id, snapshot.step)
        return [one for one in found if one.manifest.generation == snapshot.generation]

    def _read(self, held: list[ArenaSnapshot], flow: RateLimiter) -> list[CorruptBlocks]:
        """Return the corrupt blocks. It runs in a thread; the result is empty if it was cancelled."""
        found: list[CorruptBlocks] = []
        for one in held:
            for part in one.manifest.parts:
                blocks = []
                for number in part.blocks_covering(0, part.size_bytes):
                    first, end = part.block(number)
                    if not flow.acquire(end - first):
                        return []
                    if not part.is_block_intact(number, self._arenas.view(one, part)[first:end]):
                        blocks.append(number)
                if blocks:
                    size_bytes = sum(end - first for first, end in map(part.block, blocks))
                    found.append(
                        _ArenaBlocks(
                            owner=one.owner,
                            part=part.name,
                            blocks=tuple(blocks),
                            size_bytes=size_bytes,
                            held=one,
                            stored=part,
                        )
                    )
        return found


class Scrubber:
    """A reader that verifies one snapshot regularly.

    :param on_repaired: called with the step of a snapshot of which bytes had changed, and all were repaired.
    :param on_unrepairable: called with the step of a snapshot that cannot be repaired here.
    """

    def __init__(
        self,
        *,
        node: str,
        operations: ScrubOperations,
        rate_bytes_s: float,
        period_s: float,
        publish_event: PublishEvent,
        on_repaired: Callable[[int], None],
        on_unrepairable: Callable[[int], None],
    ) -> None:
        self._node, self._operations = node, operations
        self._rate_bytes_s, self._period_s = rate_bytes_s, period_s
        self._publish_event = publish_event
        self._on_repaired, self._on_unrepairable = on_repaired, on_unrepairable
        self._snapshot: Restore | None = None
        self._flow = RateLimiter()
        self._task: asyncio.Task[None] | None = None

    @property
    def snapshot(self) -> Restore | None:
        """The snapshot that is being read."""
        return self._snapshot

    def start(self, snapshot: Restore, *, at_once: bool = False) -> None:
        """Read this snapshot, which is complete everywhere, from now on, and no other.

        :param at_once: read it even if it was read a moment ago.
        """
        before, self._snapshot = self._snapshot, snapshot
        if at_once or before is None or _key(before) != _key(snapshot):
            self.stop()
            self._snapshot, self._flow = snapshot, RateLimiter(self._rate_bytes_s)
            self._task = asyncio.ensure_future(self._work(self._flow))

    def stop(self) -> None:
        """Stop reading, because the job is over or another snapshot replaces this one."""
        self._snapshot = None
        self._flow.cancel()
        if self._task is not None:
            self._task.cancel()
            self._task = None

    async def close(self) -> None:
        task = self._task
        self.stop()
        if task is not None:
            await asyncio.gather(task, return_exceptions=True)

    async def _work(self, flow: RateLimiter) -> None:
        while (snapshot := self._snapshot) is not None:
            try:
                changed = await self._operations.find_corrupt(snapshot, flow)
                # A snapshot that was released meanwhile may have other bytes.
                if changed := [one for one in changed if self._operations.is_held(snapshot, one)]:
                    await self._repair(snapshot, changed)
            except (OSError, ValueError, PeerError) as error:  # The memory was removed with its job.
                log.warning("scrub_failed", step=snapshot.step, reason=str(error))
            await asyncio.sleep(self._period_s)

    async def _repair(self, snapshot: Restore, changed: list[CorruptBlocks]) -> None:
        for one in changed:
            self._report_corrupt(snapshot, one, "it is being repaired from other nodes")
        unrepairable = False
        for one in changed:
            try:
                sources = await self._operations.repair(snapshot, one)
            except RepairError as error:
                if not self._operations.is_held(snapshot, one):
                    return  # It was released: nobody needs it any more.
                unrepairable = True
                self._report_corrupt(
                    snapshot, one, f"it cannot be repaired, and a new snapshot is requested: {error}"
                )
            else:
                self._report_repaired(snapshot, one, list(sources))
        (self._on_unrepairable if unrepairable else self._on_repaired)(snapshot.step)

    def _details(self, snapshot: Restore, one: CorruptBlocks) -> dict[str, Any]:
        owner = one.owner or self._node
        return {"owner": owner, "job": snapshot.job_id, "step": snapshot.step, "part": one.part}

    def _report_corrupt(self, snapshot: Restore, one: CorruptBlocks, remedy: str) -> None:
        self._publish_event(
            "ShardCorrupted",
            f"{self._node}: {_blocks(one)} of {_label(one)} of the snapshot of step {snapshot.step} changed in "
            f"memory; {remedy}",
            self._details(snapshot, one),
        )

    def _report_repaired(self, snapshot: Restore, one: CorruptBlocks, sources: list[str]) -> None:
        self._publish_event(
            "ShardRepaired",
            f"{self._node}: {_blocks(one)} of {_label(one)} of the snapshot of step {snapshot.step} repaired "
            f"from {', '.join(sources)}",
            {**self._details(snapshot, one), "sources": sources, "size_bytes": one.size_bytes},
        )


def _key(snapshot: Restore) -> tuple[str, int, int]:
    return snapshot.job_id, snapshot.step, snapshot.generation


def _blocks(one: CorruptBlocks) -> str:
    return "1 block" if len(one.blocks) == 1 else f"{len(one.blocks)} blocks"


def _label(one: CorruptBlocks) -> str:
    return f"{one.part} (a copy for {one.owner})" if one.owner else one.part
