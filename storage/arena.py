"""The arena, which holds snapshots in host memory outside of the processes that train (REFT §4).

An arena is a directory of a memory file system with up to three *slots*, each one mapped file, and a
manifest for each complete snapshot. A snapshot is written into a slot that no manifest names. Then its
manifest is written, which commits it, and after that older snapshots may be released. So the last complete
snapshot survives the death of any process at any moment: one slot holds it, one is being written, and the
third is used only while a snapshot waits to be complete everywhere. Slots stay allocated and mapped, so
that their pages are touched only once.
"""

import contextlib
import errno
import fcntl
import mmap
import os
import shutil
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from storage.errors import ArenaFullError, CorruptDataError
from storage.free_memory import free_bytes
from storage.manifest import (
    FORMAT,
    NewerManifest,
    SnapshotManifest,
    SnapshotPart,
    check_parts,
    read_newer,
    read_record,
    write_record,
)
from storage.pages import allocate, map_file, prefault

Bytes = NDArray[np.uint8]

SLOTS = 3
"""REFT's bound: the memory for at most three snapshots."""
_PAGE_BYTES = mmap.PAGESIZE
_DRAFT = "slot-{}.draft"
"""Name of a slot while it grows. If the process is killed then, the file has its full size and holes."""


@dataclass(slots=True)
class Slot:
    """A buffer that is being written; ``view`` is its memory."""

    number: int
    view: Bytes


@dataclass(slots=True, kw_only=True)
class Arena:
    """One arena.

    :param limit_bytes: limit of all slots together; ``None`` leaves it to the file system.
    """

    directory: Path
    limit_bytes: int | None = None
    problems: list[str] = field(default_factory=list)
    """Descriptions of what was corrupt when the arena was opened, and was removed."""
    newer: dict[int, str] = field(default_factory=dict)
    """Descriptions of the snapshots of a newer version of ftd, by their step. They and their slots stay."""
    _newer_slots: set[int] = field(default_factory=set)
    _manifests: dict[int, SnapshotManifest] = field(default_factory=dict)
    _maps: dict[int, Bytes] = field(default_factory=dict)

    @classmethod
    def open(cls, directory: Path, *, limit_bytes: int | None = None) -> "Arena":
        """Make the directory, or load what is in it.

        :raises OSError: the directory cannot be made or read.
        """
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        arena = cls(directory=directory, limit_bytes=limit_bytes)
        arena._load()
        return arena

    # --- reading ---------------------------------------------------------------------------------

    @property
    def snapshots(self) -> tuple[SnapshotManifest, ...]:
        """Complete snapshots, the newest first."""
        return tuple(self._manifests[step] for step in sorted(self._manifests, reverse=True))

    @property
    def allocated_bytes(self) -> int:
        return sum(self._slot_bytes(number) for number in range(SLOTS))

    def view(self, manifest: SnapshotManifest, part: SnapshotPart) -> Bytes:
        """Return the part's memory itself; valid until its snapshot is released."""
        return self._view(manifest.slot)[part.offset : part.offset + part.size_bytes]

    def find_corrupt(self, manifest: SnapshotManifest) -> tuple[str, ...]:
        """Return the names of the parts whose bytes differ from what was written."""
        return tuple(p.name for p in manifest.parts if not p.is_intact(self.view(manifest, p)))

    # --- writing ---------------------------------------------------------------------------------

    def begin(self, size_bytes: int) -> Slot:
        """Return a free slot for a snapshot of ``size_bytes``.

        :raises ArenaFullError: no slot can be made large enough; complete snapshots stay.
        """
        used = self._used_slots()
        free = [number for number in range(SLOTS) if number not in used]
        if not free:
            raise ArenaFullError(
                "; ".join((f"all {SLOTS} slots hold snapshots that are not released", *self.newer.values())),
                needed_bytes=size_bytes,
                free_bytes=0,
            )
        # The largest existing slot: growing costs fresh pages.
        return self._slot(max(free, key=lambda n: (self._slot_bytes(n), -n)), size_bytes)

    def reserve(self, size_bytes: int, slots: int) -> list[Slot]:
        """Allocate and map this number of slots now, so that the first snapshots need not, and return those that
        hold no snapshot. Slots that hold a snapshot are not changed.

        :raises ArenaFullError: they do not fit; what was there stays.
        """
        used = self._used_slots()
        numbers = sorted(set(range(SLOTS)) - used, key=lambda n: (-self._slot_bytes(n), n))
        return [self._slot(number, size_bytes) for number in numbers[: max(0, slots - len(used))]]

    def commit(self, manifest: SnapshotManifest) -> None:
        """Mark a snapshot as complete by writing its manifest.

        :raises OSError: the manifest cannot be written, or one of a newer version is there; the snapshot is not
            complete.
        """
        if manifest.step in self.newer:
            raise FileExistsError(self.newer[manifest.step])
        write_record(manifest_path(self.directory, manifest.step), manifest)
        self._manifests[manifest.step] = manifest

    def release(self, steps: Iterable[int]) -> None:
        """Release the snapshots of these steps; their slots may be written again."""
        for step in steps:
            manifest_path(self.directory, step).unlink(missing_ok=True)
            self._manifests.pop(step, None)

    def remove_newer(self) -> None:
        """Remove the snapshots of a newer version of ftd, and release their slots."""
        for step in self.newer:
            manifest_path(self.directory, step).unlink(missing_ok=True)
        self.newer.clear()
        self._newer_slots.clear()

    def rewrite(self, step: int, generation: int, name: str, offset: int, data: bytes) -> bool:
        """Write repaired bytes into a part of a complete snapshot; return false if the snapshot is not here
        any more.

        :raises KeyError: it has no such part.
        :raises CorruptDataError: the bytes are not within the part.
        """
        manifest = self._manifests.get(step)
        if manifest is None or manifest.generation != generation:
            return False
        part = manifest.part(name)
        if not 0 <= offset <= part.size_bytes - len(data):
            raise CorruptDataError(f"{name} has {part.size_bytes} bytes, not {offset} and {len(data)} more")
        self.view(manifest, part)[offset : offset + len(data)] = np.frombuffer(data, dtype=np.uint8)
        return True

    def close(self) -> None:
        """Drop the mappings; what is stored stays. Views that are still in use keep theirs alive."""
        self._maps.clear()

    def remove(self) -> None:
        """Remove the arena and release its memory."""
        self.close()
        self._manifests.clear()
        shutil.rmtree(self.directory, ignore_errors=True)

    # --- slots -----------------------------------------------------------------------------------

    def _used_slots(self) -> set[int]:
        return {manifest.slot for manifest in self._manifests.values()} | self._newer_slots

    def _slot(self, number: int, size_bytes: int) -> Slot:
        """Return a slot, made larger if it is too small."""
        if self._slot_bytes(number) < size_bytes:
            self._grow(number, size_bytes)
        return Slot(number, self._view(number)[:size_bytes])

    def _slot_bytes(self, number: int) -> int:
        try:
            return slot_path(self.directory, number).stat().st_size
        except FileNotFoundError:
            return 0

    def _view(self, number: int) -> Bytes:
        mapping = self._maps.get(number)
        size = self._slot_bytes(number)
        if mapping is None or len(mapping) != size:
            with slot_path(self.directory, number).open("r+b") as file:
                mapping = self._maps[number] = map_file(file.fileno(), size)
            prefault(mapping)
        return mapping

    def _grow(self, number: int, size_bytes: int) -> None:
        """Allocate and touch the pages now, so that no snapshot meets a page fault or a full memory."""
        here = self._slot_bytes(number)
        wanted = -(-max(1, size_bytes) // _PAGE_BYTES) * _PAGE_BYTES
        if self.limit_bytes is not None:
            free = self.limit_bytes - self.allocated_bytes + here
            if wanted > free:
                raise ArenaFullError(
                    f"a snapshot of {wanted} bytes needs a slot, and the arena's limit of {self.limit_bytes} "
                    f"bytes leaves {free}",
                    needed_bytes=wanted,
                    free_bytes=free,
                )
        if wanted - here > (free := free_bytes(self.directory)):
            raise self._full_error(wanted, free)
        self._maps.pop(number, None)
        path, draft = slot_path(self.directory, number), self.directory / _DRAFT.format(number)
        if here:
            path.rename(draft)
        descriptor = os.open(draft, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            self._maps[number] = self._map_grown(descriptor, here, wanted)
        finally:
            os.close(descriptor)
            draft.rename(path)

    def _map_grown(self, descriptor: int, here: int, wanted: int) -> Bytes:
        """Map the file at its new size ``wanted``, or restore its old size if there is no memory."""
        try:
            os.ftruncate(descriptor, wanted)
            mapping = map_file(descriptor, wanted)
            allocate(descriptor, mapping, here)
        except OSError as error:
            os.ftruncate(descriptor, here)
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM):
                raise
            raise self._full_error(wanted, free_bytes(self.directory)) from None
        return mapping

    def _full_error(self, wanted: int, free: int) -> ArenaFullError:
        return ArenaFullError(
            f"a snapshot needs a slot of {wanted} bytes, and {self.directory} has {free} free",
            needed_bytes=wanted,
            free_bytes=free,
        )

    def _load(self) -> None:
        """Load intact manifests whose slots are there, and leave those of a newer version; remove others and record
        the problems.
        """
        for path in sorted(self.directory.glob("step-*.json")):
            try:
                manifest = read_record(path, SnapshotManifest)
                if not 0 <= manifest.slot < SLOTS or path != manifest_path(self.directory, manifest.step):
                    raise CorruptDataError(f"{path} names slot {manifest.slot} and step {manifest.step}")
                check_parts(manifest, self._slot_bytes(manifest.slot))
            except (CorruptDataError, OSError) as error:
                if (newer := read_newer(path)) is not None and path.stem[5:].isdecimal():
                    self._leave_newer(path, newer)
                    continue
                self.problems.append(str(error))
                with contextlib.suppress(OSError):
                    path.unlink()
                continue
            self._manifests[manifest.step] = manifest
        for draft in (*self.directory.glob(".step-*"), *self.directory.glob(_DRAFT.format("*"))):
            with contextlib.suppress(OSError):
                draft.unlink()

    def _leave_newer(self, path: Path, newer: NewerManifest) -> None:
        self.newer[int(path.stem[5:])] = (
            f"{path} is of a newer version of ftd (format {newer.format}; this version reads {FORMAT}) and stays: use "
            "that version, or remove the file"
        )
        # If the slot is not known, it may be any of them.
        self._newer_slots |= {newer.slot} if newer.slot in range(SLOTS) else set(range(SLOTS))


def manifest_path(directory: Path, step: int) -> Path:
    """Return the path of a step's manifest in an arena."""
    return directory / f"step-{step:012d}.json"


def slot_path(directory: Path, number: int) -> Path:
    """Return the path of a slot of an arena."""
    return directory / f"slot-{number}"


def manifests_in(directory: Path) -> list[SnapshotManifest]:
    """Return the complete snapshots in an arena that another process may have open."""
    found = []
    for path in directory.glob("step-*.json"):
        with contextlib.suppress(CorruptDataError, OSError):
            found.append(read_record(path, SnapshotManifest))
    return found


def is_locked(directory: Path) -> bool:
    """Return whether another process has the arena open, by the lock that the scripts of ``Snapshotter`` hold."""
    try:
        with (directory / "lock").open("r+b") as file:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return False
