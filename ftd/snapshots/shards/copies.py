"""The copies that this node holds of other nodes' snapshots: received, verified, committed and released.

There is one arena for each device of an owner, with the same three slots as the owner's own
(``storage.arena``). An owner offers a manifest. Its parts are received straight into a slot, each from its
beginning, and transfer resumes where it stopped when the owner offers the same manifest again. The manifest
is written last, after every digest was verified. Nothing of an offer is trusted: names, numbers and sizes
are checked and bounded.
"""

import asyncio
import contextlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec
import structlog

from ftd.snapshots.shards.arenas import ArenaSnapshot, NodeArenas
from statemachine.messages.values import HeldSnapshot
from storage.arena import Arena, Slot
from storage.errors import CorruptDataError, StorageError
from storage.manifest import SnapshotManifest, SnapshotPart, check_parts

log = structlog.get_logger("ftd.node")

MAX_COPIES = 64
"""Largest number of arenas of copies: devices of all owners together."""
MAX_PARTS = 4096
_PART = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,199}", re.ASCII)
_DIGEST = re.compile(r"[0-9a-f]{32}", re.ASCII)
_BLOCKS = re.compile(r"[0-9a-f]*", re.ASCII)

Key = tuple[str, int]
"""Owner and its device."""


class CopyRejectedError(Exception):
    """An offer is rejected; the message says why."""


class CopyNoSpaceError(CopyRejectedError):
    """There is no memory for the copy."""


@dataclass(slots=True, eq=False)
class CopyDraft:
    """A copy that is being received."""

    manifest: SnapshotManifest
    """Manifest as offered; its parts have the same offsets here."""
    slot: Slot
    received: dict[str, int]
    """Number of received bytes of each part, from its beginning."""
    turn: int = 0
    """Number of the latest transfer or verification of this draft. Earlier ones stop when it changes."""
    verification: asyncio.Task[tuple[str, ...]] | None = None
    """The verification that is under way."""

    def window(self, part: SnapshotPart) -> memoryview:
        return self.slot.view[part.offset : part.offset + part.size_bytes].data


class CopyStore:
    """The copies of one job at a time.

    :param changed: called when what is held has changed.
    """

    def __init__(self, arenas: NodeArenas, *, node: str, changed: Callable[[], None] = lambda: None) -> None:
        self._arenas, self._node, self.changed = arenas, node, changed
        self._job_id: str | None = None
        self._retained_step = 0
        self._open: dict[Key, Arena] = {}
        self._drafts: dict[Key, CopyDraft] = {}
        self._making = asyncio.Lock()

    # --- lifetime of a job -------------------------------------------------------------------------

    def begin(self, job_id: str) -> None:
        """Accept copies of this job's snapshots from now on, and load those that are here already."""
        if job_id == self._job_id:
            return
        self.end()
        self._job_id = job_id
        for path, owner in self._arenas.copy_directories(job_id).items():
            self._open[owner, int(path.name.split("-")[1])] = Arena.open(path)

    def end(self) -> None:
        """Accept no more copies, since the job is over. Their memory is released with the job's other arenas."""
        for key in list(self._drafts):
            self._drop(key)
        for arena in self._open.values():
            arena.close()
        self._open.clear()
        self._job_id, self._retained_step = None, 0

    def held(self) -> tuple[HeldSnapshot, ...]:
        """Return the copies that are complete here."""
        found = {
            HeldSnapshot(job_id=m.job_id, step=m.step, generation=m.generation, owner=owner)
            for (owner, _), arena in self._open.items()
            for m in arena.snapshots
        }
        return tuple(sorted(found, key=msgspec.structs.astuple))

    def release_older(self, job_id: str, step: int) -> list[Path]:
        """Release copies older than ``step``, whose snapshot is complete everywhere.

        :returns: directories that nobody uses any more, for the caller to remove.
        """
        if job_id != self._job_id:
            return []
        self._retained_step, before, retired = step, self.held(), []
        for key, draft in list(self._drafts.items()):
            if draft.manifest.step < step:
                self._drop(key)
        for key, arena in list(self._open.items()):
            arena.release([m.step for m in arena.snapshots if m.step < step])
            if not arena.snapshots and key not in self._drafts and not self._making.locked():
                arena.close()
                del self._open[key]
                with contextlib.suppress(OSError):
                    retired.append(self._arenas.retire_copies(arena.directory))
        if self.held() != before:
            self.changed()
        return retired

    # --- one copy ----------------------------------------------------------------------------------

    async def offer(self, key: Key, manifest: SnapshotManifest) -> dict[str, int]:
        """Begin or resume receiving a copy, and return how much of each part is here.

        :raises CopyRejectedError: this node does not hold such copies, or there is no room.
        """
        self._check(key, manifest)
        async with self._making:
            done = self._committed(key, manifest)
            if done:
                return {part.name: part.size_bytes for part in manifest.parts}
            draft = self._drafts.get(key)
            if draft is not None and draft.manifest == manifest:
                return dict(draft.received)
            if draft is not None and _order(draft.manifest) > _order(manifest):
                raise CopyRejectedError(f"a copy of step {draft.manifest.step} is being received")
            self._drop(key)
            slot = await asyncio.to_thread(self._make_room, self._arena_of(key), manifest)
            if manifest.job_id != self._job_id:
                raise CopyRejectedError("the job is over")
            received = dict.fromkeys((part.name for part in manifest.parts), 0)
            self._drafts[key] = CopyDraft(manifest, slot, received)
            return dict(received)

    def draft(self, key: Key, job_id: str, step: int) -> CopyDraft:
        """Return the draft of a copy that was offered.

        :raises CopyRejectedError: it was not offered.
        """
        draft = self._drafts.get(key)
        if draft is None or (draft.manifest.job_id, draft.manifest.step) != (job_id, step):
            raise CopyRejectedError("this copy was not offered, or a later one was")
        return draft

    async def commit(self, key: Key, job_id: str, step: int) -> tuple[str, ...]:
        """Verify what was received and commit it; return the names of parts whose bytes differ from the offer.

        A repeated request waits for the verification that is under way: its sender may wait for a shorter time than
        many gigabytes take.

        :raises CopyRejectedError: it was not offered, or is not complete.
        :raises OSError: its manifest cannot be written.
        """
        arena = self._open.get(key)
        if arena is not None and key not in self._drafts and any(m.step == step for m in arena.snapshots):
            return ()  # A repeated request, whose first answer was lost.
        draft = self.draft(key, job_id, step)
        parts = draft.manifest.parts
        if lacking := [part.name for part in parts if draft.received[part.name] < part.size_bytes]:
            raise CopyRejectedError(
                f"{', '.join(lacking[:3])} {'is' if len(lacking) == 1 else 'are'} not complete"
            )
        if draft.verification is None:
            draft.verification = asyncio.ensure_future(self._verify_and_commit(key, draft))
        return await asyncio.shield(draft.verification)

    async def _verify_and_commit(self, key: Key, draft: CopyDraft) -> tuple[str, ...]:
        parts, step = draft.manifest.parts, draft.manifest.step
        draft.turn += 1
        turn = draft.turn
        try:
            intact = await asyncio.to_thread(lambda: [part.is_intact(draft.window(part)) for part in parts])
        finally:
            draft.verification = None
        if draft.turn != turn or self._drafts.get(key) is not draft:
            raise CopyRejectedError("another copy was offered meanwhile")
        corrupt = tuple(part.name for part, fine in zip(parts, intact, strict=True) if not fine)
        for name in corrupt:
            draft.received[name] = 0
        if not corrupt:
            self._open[key].commit(msgspec.structs.replace(draft.manifest, slot=draft.slot.number))
            del self._drafts[key]
            log.info(
                "copy_committed", owner=key[0], device=key[1], step=step, size_bytes=draft.manifest.size_bytes
            )
            self.changed()
        return corrupt

    async def rewrite(self, held: ArenaSnapshot, part: SnapshotPart, first: int, data: bytes) -> None:
        """Write repaired bytes into a copy; do nothing if it is not held any more."""
        async with self._making:
            for arena in self._open.values():
                if arena.directory == held.directory:
                    arena.rewrite(held.manifest.step, held.manifest.generation, part.name, first, data)

    def _drop(self, key: Key) -> None:
        """Drop a draft. Its receiver stops before the next byte, since the slot may be reused."""
        draft = self._drafts.pop(key, None)
        if draft is not None:
            draft.turn += 1

    # --- checks of offers ----------------------------------------------------------------------------

    def _check(self, key: Key, manifest: SnapshotManifest) -> None:
        """:raises CopyRejectedError: the offer cannot be valid."""
        owner, _ = key
        if manifest.job_id != self._job_id:
            raise CopyRejectedError(f"{self._node} holds no copies of job {manifest.job_id[:80]!r} now")
        if owner == self._node:
            raise CopyRejectedError(f"{owner} is the node itself")
        if manifest.step < self._retained_step:
            raise CopyRejectedError(
                f"step {self._retained_step} is complete everywhere, and {manifest.step} is not needed any more"
            )
        if not 0 < len(manifest.parts) <= MAX_PARTS:
            raise CopyRejectedError(
                f"the offer has {len(manifest.parts)} parts; 1 to {MAX_PARTS} are allowed"
            )
        end = max(part.offset + part.size_bytes for part in manifest.parts)
        try:
            check_parts(manifest, end)
        except CorruptDataError as error:
            raise CopyRejectedError(str(error)) from None
        if min(part.offset for part in manifest.parts) < 0 or end > 2 * manifest.size_bytes + (1 << 20):
            raise CopyRejectedError("its parts have impossible offsets")
        for part in manifest.parts:
            digests = _DIGEST.fullmatch(part.digest) and _BLOCKS.fullmatch(part.blocks)
            if not _PART.fullmatch(part.name) or not digests:
                raise CopyRejectedError(f"{part.name[:80]!r} is not a valid part")
        if key not in self._open and len(self._open) >= MAX_COPIES:
            raise CopyNoSpaceError(f"{self._node} holds copies of {MAX_COPIES} devices already")

    def _committed(self, key: Key, manifest: SnapshotManifest) -> bool:
        """Return whether this very copy is complete here."""
        arena = self._open.get(key)
        if arena is None or key in self._drafts:
            return False
        return any(msgspec.structs.replace(m, slot=manifest.slot) == manifest for m in arena.snapshots)

    def _arena_of(self, key: Key) -> Arena:
        """Return the arena for copies of this owner and device.

        :raises CopyRejectedError: its directory cannot be made.
        """
        arena = self._open.get(key)
        if arena is None:
            assert self._job_id is not None, "offers for other jobs are rejected"
            try:
                arena = self._open[key] = Arena.open(self._arenas.copy_directory(self._job_id, *key))
            except (OSError, ValueError) as error:
                raise CopyNoSpaceError(f"{self._node} cannot hold it: {error}") from None
        return arena

    def _make_room(self, arena: Arena, manifest: SnapshotManifest) -> Slot:
        """Return a slot for the copy. It runs in a thread, since large slots take a while.

        :raises CopyRejectedError: there is no room.
        """
        try:
            self._arenas.limit(arena, [manifest.job_id])
            # As trainers do: retain the one that is complete everywhere, and the newest of the others.
            steps = sorted(m.step for m in arena.snapshots)
            retained = self._retained_step if self._retained_step in steps else steps[0] if steps else None
            arena.release([step for step in steps[:-1] if step != retained])
            return arena.begin(max(part.offset + part.size_bytes for part in manifest.parts))
        except (StorageError, OSError) as error:
            raise CopyNoSpaceError(f"{self._node} cannot hold it: {error}") from None


def _order(manifest: SnapshotManifest) -> tuple[int, int]:
    return manifest.generation, manifest.step
