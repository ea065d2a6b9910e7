"""The memory of one rank's snapshots, and the rule by which snapshots are released.

``<directory>/<name>/rank-<r>`` holds an arena and a lock. A snapshot is released only when all ranks of
this host hold a newer one in common. So a rank that is killed between two snapshots of its neighbours
leaves a step that all of them have. A rank reads this from its neighbours' manifests and asks nobody. Where
a snapshot agent protects the snapshots among hosts, it writes to a file which ones all hosts still need.
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
from storage.arena import SLOTS, Arena, Slot, is_locked, manifest_path, manifests_in
from storage.errors import ArenaFullError, CorruptDataError
from storage.manifest import SnapshotManifest, SnapshotPart, read_record

SHARED_MEMORY = Path("/dev/shm")
RETAINED_SLOTS = 2
STARTED_FILE = "started"
"""Name of a file that is in a rank's directory once a run of the rank has begun there."""
PROBLEMS_FILE = "problems.txt"
"""Name of a file with what was corrupt and had to be removed; it stays until a run replaces the snapshots."""
_COUNTS = {2: "two", 3: "three"}
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_LOCK_S = 20.0
_NEIGHBOURS_S = 0.5
_POLL_S = 0.001

_open_arenas: set[Path] = set()


def snapshot_key(manifest: SnapshotManifest) -> SnapshotKey:
    return manifest.generation, manifest.step


def default_root() -> Path:
    """Return the directory of all that this user has in shared memory; it may not exist yet."""
    return SHARED_MEMORY / f"ftd-{os.getuid()}"


def default_directory() -> Path:
    """Return the directory for snapshots in shared memory, which only this user can read.

    :raises SnapshotError: there is no shared memory, or another user owns the directory.
    """
    if not SHARED_MEMORY.is_dir():
        raise SnapshotError(f"there is no {SHARED_MEMORY}: pass directory= in a memory file system")
    mine = default_root()
    mine.mkdir(mode=0o700, exist_ok=True)
    found = mine.lstat()
    if mine.is_symlink() or found.st_uid != os.getuid():
        raise SnapshotError(f"{mine} belongs to user {found.st_uid}: pass directory=")
    return mine / "snapshots"


@dataclass(slots=True)
class RankArena:
    """The arena of one rank's snapshots, made by ``open``. All methods except ``close`` and ``remove`` are for
    one thread at a time.
    """

    name: str
    job: Path
    arena: Arena
    _lock: IO[str]
    neighbours: list[Path] = field(default_factory=list)
    """Directories of the other ranks' arenas on this host."""
    protected: bool = False
    """Whether a snapshot agent decides what is retained. ``restored`` is then retained until all hosts have a
    newer snapshot.
    """
    restored: SnapshotKey | None = None
    ranks: int | None = None
    """Number of ranks if this is the first one of its host, which removes what former ranks left."""
    closed: bool = False

    @classmethod
    def open(cls, name: str, rank: int, directory: Path | None, limit_bytes: int | None) -> "RankArena":
        """Open the arena of a rank and lock it.

        :raises SnapshotError: the name or the limit is invalid, another process uses the arena, or it cannot be
            written.
        """
        if limit_bytes is not None and not (isinstance(limit_bytes, int | float) and limit_bytes > 0):
            raise SnapshotError(f"limit_bytes must be a number of bytes above 0, not {limit_bytes!r}")
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise SnapshotError(
                f"{name!r} cannot be the name of a job: use letters, digits, '.', '_' and '-', at most 100, with "
                "a letter or digit first"
            )
        job = (directory or default_directory()) / name
        path = job / f"rank-{rank}"
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            lock = _locked(path.resolve())
        except OSError as error:
            raise SnapshotError(
                f"snapshots cannot be written to {path}: {error.strerror}: pass directory= in a memory file "
                "system that this user may write to"
            ) from None
        try:
            arena = Arena.open(path, limit_bytes=limit_bytes)
            if arena.problems:
                with (path / PROBLEMS_FILE).open("a") as file:
                    file.writelines(f"{problem}\n" for problem in arena.problems)
            return cls(name, job, arena, lock)
        except BaseException:
            _unlock(path.resolve(), lock)
            raise

    def reserve(self, size_bytes: int) -> None:
        """Reserve and touch the memory of two snapshots, or of three where one may be on its way to other
        hosts.

        :raises ArenaFullError: there is too little memory; it carries the bytes that are needed and those
            that are free.
        """
        slots = SLOTS if self.protected else RETAINED_SLOTS
        there = sum(f.stat().st_size for f in self.arena.directory.glob("slot-*"))
        needed, free = slots * size_bytes, shutil.disk_usage(self.arena.directory).free
        if needed - there > free:
            raise ArenaFullError(
                f"{_COUNTS[slots]} snapshots of {size_bytes} bytes need {needed} bytes in "
                f"{self.arena.directory}, and {there + free} are free: make the file system larger "
                "(mount -o remount,size=…), or pass directory= in another one",
                needed_bytes=needed,
                free_bytes=there + free,
            )
        self.arena.reserve(size_bytes, slots)

    def acquire_slot(self, size_bytes: int) -> Slot:
        """Return a free slot. Wait briefly for neighbours that are about to complete a snapshot before taking
        a third slot.

        :raises ArenaFullError: no slot is free.
        """
        self._release_old()
        if self.protected:
            self._make_room()
            return self.arena.begin(size_bytes)
        deadline = time.monotonic() + _NEIGHBOURS_S
        while len(self.arena.snapshots) >= RETAINED_SLOTS and time.monotonic() < deadline:
            time.sleep(_POLL_S)
            self._release_old()
        return self.arena.begin(size_bytes)

    def complete(
        self, key: SnapshotKey, slot: Slot, parts: tuple[SnapshotPart, ...], layout: dict[str, Any]
    ) -> None:
        """Write the manifest of a snapshot, which makes it complete, and release older ones.

        :raises OSError: the manifest cannot be written.
        """
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
        self._release_old()

    @property
    def problems(self) -> list[str]:
        """Descriptions of what was corrupt when this process or an earlier one opened the arena."""
        path = self.arena.directory / PROBLEMS_FILE
        return path.read_text().splitlines() if path.exists() else []

    @property
    def started(self) -> bool:
        """Whether a run of this rank has begun on this host, so that its snapshots would be here."""
        return (self.arena.directory / STARTED_FILE).exists()

    def mark_started(self) -> None:
        """Record that a run of this rank begins on this host."""
        (self.arena.directory / STARTED_FILE).touch(mode=0o600)

    def former_snapshots(self, ranks: int) -> list[SnapshotManifest]:
        """Return the snapshots on this host of former ranks that do not exist now.

        :param ranks: present number of ranks.
        """
        return [manifest for path in former_ranks(self.job, ranks) for manifest in manifests_in(path)]

    def remove_former(self, ranks: int, *, empty: bool = False) -> None:
        """Remove what former ranks left on this host and no process uses.

        :param ranks: present number of ranks.
        :param empty: only what a failed attempt left without any snapshot.
        """
        for path in former_ranks(self.job, ranks):
            if not (empty and any(path.glob("step-*.json"))) and not is_locked(path):
                shutil.rmtree(path, ignore_errors=True)

    def retain_only(self, keys: set[SnapshotKey]) -> None:
        """Release all other snapshots, those of a newer version too, and forget what was corrupt."""
        (self.arena.directory / PROBLEMS_FILE).unlink(missing_ok=True)
        self.arena.remove_newer()
        self.arena.release([m.step for m in self.arena.snapshots if snapshot_key(m) not in keys])

    def close(self) -> None:
        """Close the arena and release the lock; the snapshots stay."""
        if not self.closed:
            self.closed = True
            self.arena.close()
            _unlock(self.arena.directory.resolve(), self._lock)

    def remove(self) -> None:
        """Free the memory, and close the arena: nothing of this rank can be restored any more.

        The lock is released last, so that the next process finds no files that are about to disappear.
        """
        directory = self.arena.directory.resolve()
        self.arena.remove()
        with contextlib.suppress(OSError):
            self.job.rmdir()
        if not self.closed:
            self.closed = True
            _unlock(directory, self._lock)

    def remove_if_empty(self) -> None:
        """Remove the directory if it holds no snapshot, so that a failed start leaves no trace; an earlier
        run's snapshots stay.
        """
        if not self.arena.snapshots and not self.arena.newer and not self.problems:
            self.remove()

    def _release_old(self) -> None:
        """Release snapshots that are older than the newest one which all ranks here hold."""
        held = sorted(self.arena.snapshots, key=snapshot_key, reverse=True)
        if self.protected:
            common = read_retained(self.job).common
            if common is not None and common > (self.restored or (0, 0)):
                self.arena.release([m.step for m in held if snapshot_key(m) < common])
            return
        for manifest in held:
            if all(_has_snapshot(neighbour, snapshot_key(manifest)) for neighbour in self.neighbours):
                self.arena.release([m.step for m in held if snapshot_key(m) < snapshot_key(manifest)])
                if self.ranks is not None and snapshot_key(manifest) > (self.restored or (0, 0)):
                    self.remove_former(self.ranks)
                return

    def _make_room(self) -> None:
        """Release a snapshot that nobody needs: neither the newest that all hosts have, nor one on its way to
        them.
        """
        retained = read_retained(self.job)
        held = sorted(self.arena.snapshots, key=snapshot_key)
        spare = [
            m.step for m in held if snapshot_key(m) not in (retained.common, retained.pinned, self.restored)
        ]
        if len(held) == SLOTS:
            self.arena.release(spare[:1])


def former_ranks(job: Path, ranks: int) -> list[Path]:
    """Return the directories of ranks of a job that do not exist if there are ``ranks`` ranks."""
    return [
        path
        for path in sorted(job.glob("rank-*"))
        if path.name[5:].isdecimal() and int(path.name[5:]) >= ranks
    ]


def _has_snapshot(directory: Path, key: SnapshotKey) -> bool:
    try:
        return snapshot_key(read_record(manifest_path(directory, key[1]), SnapshotManifest)) == key
    except (CorruptDataError, OSError):
        return False


def _locked(directory: Path) -> IO[str]:
    """Take a record lock, which belongs to this process alone (forked children do not inherit it) and ends
    with it.
    """
    if directory in _open_arenas:
        raise SnapshotError(f"{directory} is in use by another Snapshotter of this process: close() it first")
    lock = (directory / "lock").open("w")
    deadline = time.monotonic() + _LOCK_S
    while True:
        try:
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            # A killed predecessor may still exist: the kernel needs a while to free much memory.
            if time.monotonic() > deadline:
                lock.close()
                raise SnapshotError(
                    f"{directory} is in use by another process: end it, or choose another name"
                ) from None
            time.sleep(0.05)
        else:
            if _is_at(lock, directory / "lock"):
                _open_arenas.add(directory)
                return lock
            # The process that had the lock removed its arena.
            lock.close()
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            lock = (directory / "lock").open("w")


def _is_at(file: IO[str], path: Path) -> bool:
    """Return whether this open file is the one at ``path``."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _unlock(directory: Path, lock: IO[str]) -> None:
    _open_arenas.discard(directory)
    lock.close()


assert RETAINED_SLOTS < SLOTS
