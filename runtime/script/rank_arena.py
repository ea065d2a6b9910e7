"""Where the snapshots of one rank lie, and when one may be let go.

``<directory>/<name>/rank-<r>`` holds an arena and a lock. A snapshot is released only when all ranks that
can be seen here hold a newer one in common: a rank that is killed between two snapshots of its neighbours
leaves a step that every one of them has. That is read off the neighbours' manifests; nobody is asked. Where
a keeper protects the snapshots among hosts, it says in a file which ones all hosts need.
"""

import contextlib
import fcntl
import os
import re
import shutil
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from runtime.script.plain_state import SnapshotError
from runtime.wire.snapshot_agent_protocol import SnapshotKey, read_retained
from storage.arena import SLOTS, Arena, Slot
from storage.errors import ArenaFullError, CorruptDataError
from storage.manifest import SnapshotManifest, SnapshotPart, read_record

SHARED_MEMORY = Path("/dev/shm")
RETAINED_SLOTS = 2
_COUNTS = {2: "two", 3: "three"}
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_LOCK_S = 20.0
_NEIGHBOURS_S = 0.5
_POLL_S = 0.001

_open_here: set[Path] = set()


def snapshot_key(manifest: SnapshotManifest) -> SnapshotKey:
    return manifest.generation, manifest.step


def default_root() -> Path:
    """Of all that this user keeps in shared memory; need not be there."""
    return SHARED_MEMORY / f"ftd-{os.getuid()}"


def default_directory() -> Path:
    """In shared memory, of this user alone.

    :raises SnapshotError: there is no shared memory, or somebody else made the directory.
    """
    if not SHARED_MEMORY.is_dir():
        raise SnapshotError(f"there is no {SHARED_MEMORY}: give directory= in a memory file system")
    mine = default_root()
    mine.mkdir(mode=0o700, exist_ok=True)
    found = mine.lstat()
    if mine.is_symlink() or found.st_uid != os.getuid():
        raise SnapshotError(f"{mine} belongs to user {found.st_uid}: give directory=")
    return mine / "snapshots"


@dataclass(slots=True)
class RankArena:
    """Use ``open``. Methods but ``close`` and ``remove`` are for one thread at a time."""

    name: str
    job: Path
    arena: Arena
    _lock: IO[str]
    neighbours: list[Path] = field(default_factory=list)
    """Arenas of the other ranks on this host."""
    protected: bool = False
    """A keeper says what must stay; and ``restored`` stays until it has newer ones everywhere."""
    restored: SnapshotKey | None = None
    closed: bool = False

    @classmethod
    def open(cls, name: str, rank: int, directory: Path | None, limit_bytes: int | None) -> "RankArena":
        """:raises SnapshotError: the name cannot be one, another process uses it, or it cannot be written."""
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise SnapshotError(
                f"{name!r} cannot be the name of a job: letters, digits, '.', '_' and '-', at most 100, and "
                "a letter or digit first"
            )
        job = (directory or default_directory()) / name
        path = job / f"rank-{rank}"
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            lock = _locked(path.resolve())
        except OSError as error:
            raise SnapshotError(
                f"snapshots cannot be kept in {path}: {error.strerror}: give directory= in a memory file "
                "system that this user may write to"
            ) from None
        try:
            return cls(name, job, Arena.open(path, limit_bytes=limit_bytes), lock)
        except BaseException:
            _unlock(path.resolve(), lock)
            raise

    def reserve(self, size_bytes: int) -> None:
        """Room for two snapshots, or three where one may be on its way to other hosts; touched now.

        :raises ArenaFullError: carries the bytes that are needed and those that are there.
        """
        slots = SLOTS if self.protected else RETAINED_SLOTS
        there = sum(f.stat().st_size for f in self.arena.directory.glob("slot-*"))
        needed, free = slots * size_bytes, shutil.disk_usage(self.arena.directory).free
        if needed - there > free:
            raise ArenaFullError(
                f"{_COUNTS[slots]} snapshots of {size_bytes} bytes need {needed} bytes in "
                f"{self.arena.directory}, and {there + free} are there: make the file system larger "
                "(mount -o remount,size=…), or give directory= in another one",
                needed_bytes=needed,
                free_bytes=there + free,
            )
        self.arena.reserve(size_bytes, slots)

    def acquire_slot(self, size_bytes: int) -> Slot:
        """One that is free. Waits a little for neighbours who are about to complete, before it takes a third.

        :raises ArenaFullError: there is none.
        """
        self._let_go()
        if self.protected:
            self._make_room()
            return self.arena.begin(size_bytes)
        deadline = time.monotonic() + _NEIGHBOURS_S
        while len(self.arena.snapshots) >= RETAINED_SLOTS and time.monotonic() < deadline:
            time.sleep(_POLL_S)
            self._let_go()
        return self.arena.begin(size_bytes)

    def complete(
        self, key: SnapshotKey, slot: Slot, parts: tuple[SnapshotPart, ...], layout: dict[str, Any]
    ) -> None:
        """:raises OSError: its manifest cannot be written."""
        generation, step = key
        self.arena.commit(
            SnapshotManifest(
                job_id=self.name,
                step=step,
                generation=generation,
                slot=slot.number,
                parts=parts,
                layout=layout,
            )
        )
        self._let_go()

    def retain_only(self, keys: set[SnapshotKey]) -> None:
        self.arena.release([m.step for m in self.arena.snapshots if snapshot_key(m) not in keys])

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self.arena.close()
            _unlock(self.arena.directory.resolve(), self._lock)

    def remove(self) -> None:
        """Give the memory back: nothing of this rank can be restored any more."""
        self.close()
        self.arena.remove()
        with contextlib.suppress(OSError):
            self.job.rmdir()

    def remove_if_empty(self) -> None:
        """Closed before anything was kept: leave no empty directory, and touch nothing of a former run's."""
        if not self.arena.snapshots and not self.arena.problems:
            self.remove()

    def _let_go(self) -> None:
        """Of what is older than the newest that all ranks here hold."""
        held = sorted(self.arena.snapshots, key=snapshot_key, reverse=True)
        if self.protected:
            common = read_retained(self.job).common
            if common is not None and common > (self.restored or (0, 0)):
                self.arena.release([m.step for m in held if snapshot_key(m) < common])
            return
        for manifest in held:
            if all(_holds(neighbour, snapshot_key(manifest)) for neighbour in self.neighbours):
                self.arena.release([m.step for m in held if snapshot_key(m) < snapshot_key(manifest)])
                return

    def _make_room(self) -> None:
        """What nobody waits for makes way: not the newest that all hosts have, nor one on its way there."""
        kept = read_retained(self.job)
        held = sorted(self.arena.snapshots, key=snapshot_key)
        spare = [m.step for m in held if snapshot_key(m) not in (kept.common, kept.pinned, self.restored)]
        if len(held) == SLOTS:
            self.arena.release(spare[:1])


def _holds(directory: Path, key: SnapshotKey) -> bool:
    try:
        return snapshot_key(read_record(directory / f"step-{key[1]:012d}.json", SnapshotManifest)) == key
    except (CorruptDataError, OSError):
        return False


def _locked(directory: Path) -> IO[str]:
    """A record lock: of this process alone (children that it forks do not keep it), and gone when it dies."""
    if directory in _open_here:
        raise SnapshotError(f"{directory} is in use by another Snapshotter of this process: close() that one")
    lock = (directory / "lock").open("w")
    deadline = time.monotonic() + _LOCK_S
    while True:
        try:
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            # Its predecessor may have been killed and not be gone yet: much memory takes a while to free.
            if time.monotonic() > deadline:
                lock.close()
                raise SnapshotError(
                    f"{directory} is in use by another process: end it, or take another name"
                ) from None
            time.sleep(0.05)
        else:
            _open_here.add(directory)
            return lock


def _unlock(directory: Path, lock: IO[str]) -> None:
    _open_here.discard(directory)
    lock.close()


assert RETAINED_SLOTS < SLOTS
