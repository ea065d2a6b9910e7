"""Writing repaired bytes back into a snapshot, and flipping a bit as an injected fault.

While a trainer lives, the thread that writes its snapshots is the only one that changes its arena. It is
asked to write the bytes (``RepairWrite``), so that no slot is released and reused in between. Where there
is no trainer, and for copies, this daemon writes them on its event loop. The memory itself shows whether
the bytes were written.
"""

import asyncio
import random
import time

import structlog

from ftd.snapshots.ports import TrainerControl
from ftd.snapshots.repair import RepairError
from ftd.snapshots.shards.arenas import ArenaSnapshot, NodeArenas
from ftd.snapshots.shards.copies import CopyStore
from statemachine.messages.trainer import RepairWrite
from statemachine.messages.values import Restore
from storage.manifest import SnapshotPart

log = structlog.get_logger("ftd.node")

REPAIR_WRITE_TIMEOUT_S = 60.0
"""Limit of one write. The trainer's thread may have to finish a snapshot first."""
_REPEAT_S = 5.0
_POLL_S = 0.02


class RepairWriter:
    """A writer of one block at a time."""

    def __init__(self, arenas: NodeArenas, copies: CopyStore, trainers: TrainerControl) -> None:
        self._arenas, self._copies, self._trainers = arenas, copies, trainers

    async def write_block(self, held: ArenaSnapshot, part: SnapshotPart, number: int, data: bytes) -> None:
        """Return when the block's bytes are ``data``.

        :raises RepairError: the snapshot was released, or the bytes were not written in time.
        """
        manifest, (first, end) = held.manifest, part.block(number)
        until, asked_at = time.monotonic() + REPAIR_WRITE_TIMEOUT_S, float("-inf")
        while True:
            if held not in self._arenas.find(manifest.job_id, manifest.step):
                raise RepairError(f"the snapshot of step {manifest.step} was released")
            if part.is_block_intact(number, self._arenas.view(held, part)[first:end]):
                return
            now = time.monotonic()
            if now > until:
                raise RepairError(f"{part.name} was not repaired within {REPAIR_WRITE_TIMEOUT_S:g} s")
            if held.owner:
                await self._copies.rewrite(held, part, first, data)
            elif not self._trainers.pids(held.device):
                self._arenas.write(held, part, first, data)
            elif now - asked_at >= _REPEAT_S:
                asked_at = now
                frame = RepairWrite(
                    step=manifest.step,
                    generation=manifest.generation,
                    part=part.name,
                    offset=first,
                    data=data,
                )
                self._trainers.send(held.device, frame)
            await asyncio.sleep(_POLL_S)

    def find_own_parts(
        self, snapshot: Restore | None, device: int | None
    ) -> list[tuple[ArenaSnapshot, SnapshotPart]]:
        """Return the parts with bytes that this node holds of its own, of one device or of all."""
        found = self._arenas.find(snapshot.job_id, snapshot.step) if snapshot is not None else ()
        return [
            (held, part)
            for held in found
            if not held.owner and device in (None, held.device)
            for part in held.manifest.parts
            if part.size_bytes
        ]

    def flip_bit(self, stored: list[tuple[ArenaSnapshot, SnapshotPart]]) -> None:
        """Flip one bit anywhere in these parts, as an injected fault."""
        held, part = random.choices(stored, [part.size_bytes for _, part in stored])[0]
        at, bit = random.randrange(part.size_bytes), random.randrange(8)
        byte = self._arenas.view(held, part)[at] ^ 1 << bit
        self._arenas.write(held, part, at, bytes([byte]))
        log.warning("bit_flipped", part=part.name, step=held.manifest.step, byte=at, bit=bit)
