"""Bytes of a stored part written again, by those who alone may write there; and a wrong bit, for chaos.

While a trainer lives, the thread that writes its snapshots is the only one that changes its arena: it is
asked (``Mend``), so that no slot is released and written anew in between. Where no trainer is, and for
copies, it is this daemon, on its event loop. Whether the bytes came is looked for in memory itself.
"""

import asyncio
import random
import time
from typing import Protocol

import structlog

from ftd.snapshots.repair import RepairError
from ftd.snapshots.shards.arenas import ArenaSnapshot, NodeArenas
from ftd.snapshots.shards.copies import CopyStore
from statemachine.messages.trainer import Instruction, RepairWrite
from statemachine.messages.values import Restore
from storage.manifest import SnapshotPart

log = structlog.get_logger("ftd.node")

MEND_S = 60.0
"""A trainer's thread may be copying a snapshot; then this comes behind it."""
_AGAIN_S = 5.0
_POLL_S = 0.02


class TrainerControl(Protocol):
    """Who writes own arenas."""

    def trainer_pids(self, device: int | None) -> list[int]:
        """Running processes."""

    def send(self, device: int, frame: Instruction) -> bool:
        """``False``: nobody is there who takes it."""


class RepairWriter:
    """One block at a time."""

    def __init__(self, arenas: NodeArenas, copies: CopyStore, trainers: TrainerControl) -> None:
        self._arenas, self._copies, self._trainers = arenas, copies, trainers

    async def mend(self, held: ArenaSnapshot, part: SnapshotPart, number: int, data: bytes) -> None:
        """Return when the block's bytes are ``data``.

        :raises RepairError: the snapshot was released, or nobody wrote them.
        """
        manifest, (first, end) = held.manifest, part.block(number)
        until, asked_at = time.monotonic() + MEND_S, float("-inf")
        while True:
            if held not in self._arenas.find(manifest.job_id, manifest.step):
                raise RepairError(f"the snapshot of step {manifest.step} was released")
            if part.is_block_intact(number, self._arenas.view(held, part)[first:end]):
                return
            now = time.monotonic()
            if now > until:
                raise RepairError(f"{part.name} was not written again within {MEND_S:g} s")
            if held.owner:
                await self._copies.mend(held, part, first, data)
            elif not self._trainers.trainer_pids(_device(held)):
                self._arenas.write(held, part, first, data)
            elif now - asked_at >= _AGAIN_S:
                asked_at = now
                frame = RepairWrite(
                    step=manifest.step,
                    generation=manifest.generation,
                    part=part.name,
                    offset=first,
                    data=data,
                )
                self._trainers.send(_device(held), frame)
            await asyncio.sleep(_POLL_S)

    def stored(self, kept: Restore | None, device: int | None) -> list[tuple[ArenaSnapshot, SnapshotPart]]:
        """This node's own parts of the kept snapshot, of one device or of all, that have bytes."""
        found = self._arenas.find(kept.job_id, kept.step) if kept is not None else ()
        return [
            (held, part)
            for held in found
            if not held.owner and device in (None, _device(held))
            for part in held.manifest.parts
            if part.size_bytes
        ]

    def flip(self, stored: list[tuple[ArenaSnapshot, SnapshotPart]]) -> None:
        """Change one bit of them, anywhere: for chaos."""
        held, part = random.choices(stored, [part.size_bytes for _, part in stored])[0]
        at, bit = random.randrange(part.size_bytes), random.randrange(8)
        byte = self._arenas.view(held, part)[at] ^ 1 << bit
        self._arenas.write(held, part, at, bytes([byte]))
        log.warning("flip", part=part.name, step=held.manifest.step, byte=at, bit=bit)


def _device(held: ArenaSnapshot) -> int:
    return int(held.directory.name.split("-")[1])
