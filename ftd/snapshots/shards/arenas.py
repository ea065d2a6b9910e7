"""The arenas of a node: where they are, what they hold, who may use them, and when they are removed.

An arena is the directory ``<snapshot_dir>/<cluster>-<node>/<job>/device-<d>``. Trainers write arenas, and
the daemon owns them: it names the directories, reads what is complete, serves it to other nodes, and
removes the arenas of jobs that are over. Arenas outlive trainers and daemons. While trainers run, nothing
here changes an arena. Next to them, ``copy-<d>-<owner>`` holds the copy of another node's arena, written by
``ftd.snapshots.shards.copies``.
"""

import contextlib
import fcntl
import os
import re
import shutil
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import structlog
from msgspec.structs import astuple

from ftd.errors import ConfigurationError
from statemachine.messages.values import HeldSnapshot
from storage.arena import Arena, manifest_path, slot_path
from storage.errors import CorruptDataError
from storage.manifest import SnapshotManifest, SnapshotPart, check_parts, read_record, record_digest
from storage.pages import Bytes, map_file, prefault
from storage.staged import BorrowedSnapshot

log = structlog.get_logger("ftd.node")

_JOB = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}", re.ASCII)
_DEVICE = re.compile(r"device-(\d{1,4})()", re.ASCII)
_COPY = re.compile(r"copy-(\d{1,4})-([A-Za-z0-9][A-Za-z0-9._-]{0,63})", re.ASCII)
_RETIRED = ".gone-"
_STAGING = "staging-"
_REMOVALS = 5
_REMOVAL_PAUSE_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Corruption:
    """Bytes in memory that differ from what was written."""

    job_id: str
    step: int | None
    part: str
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ArenaSnapshot:
    """Part of a snapshot that one device's arena holds."""

    manifest: SnapshotManifest
    directory: Path
    owner: str = ""
    """For a copy, the node whose snapshot it is; empty for this node's own."""

    @property
    def device(self) -> int:
        """Number of the device whose arena it is, or of which it is a copy."""
        return int(self.directory.name.split("-")[1])

    @property
    def slot(self) -> Path:
        """File with its bytes."""
        return slot_path(self.directory, self.manifest.slot)

    def as_borrowed(self) -> BorrowedSnapshot:
        """Return the reference to this snapshot for a reader that borrows its bytes."""
        path = manifest_path(self.directory, self.manifest.step).absolute()
        return BorrowedSnapshot(manifest=str(path), digest=record_digest(self.manifest))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Mapped:
    identity: tuple[int, int]
    """Inode and size, which differ for a slot that was made again or has grown."""
    memory: Bytes


class NodeArenas:
    """All arenas of a node.

    :param limit_bytes: limit of all arenas of the node together; ``None`` leaves it to the file system.
    :param names: patterns of the names of a job's arenas, with groups for a number and an owner.
    """

    def __init__(
        self,
        root: Path,
        *,
        devices: int,
        limit_bytes: int | None = None,
        names: tuple[re.Pattern[str], ...] = (_DEVICE, _COPY),
    ) -> None:
        self.root = root
        self._names = names
        self._devices = devices
        self.total_limit_bytes = limit_bytes
        self._lock: IO[bytes] | None = None
        self._maps: dict[Path, _Mapped] = {}
        """Mappings of slots. Any thread may change it, so iterate over a copy only."""

    @property
    def limit_bytes(self) -> int | None:
        """Limit of one device's arena."""
        return None if self.total_limit_bytes is None else self.total_limit_bytes // self._devices

    @property
    def size_bytes(self) -> int:
        """Bytes that the arenas of the node may take together: the limit, or else the size of their file
        system.
        """
        if self.total_limit_bytes is not None:
            return self.total_limit_bytes
        self._make()
        return shutil.disk_usage(self.root).total

    def open(self) -> None:
        """Make the directory and check that there is room for the limit.

        :raises ConfigurationError: it cannot be used, or the memory is smaller than the configured limit.
        """
        try:
            self._make()
            found = self.root.stat()
            there = shutil.disk_usage(self.root).total
        except OSError as error:
            raise ConfigurationError(
                f"{self.root} cannot be used: {error.strerror}",
                field="node.snapshot_dir",
                remedy="choose a directory below /dev/shm that this user can write to",
            ) from None
        if found.st_uid != os.getuid():
            raise ConfigurationError(f"{self.root} belongs to another user", field="node.snapshot_dir")
        self.acquire()
        if self.total_limit_bytes is not None and there < self.total_limit_bytes:
            raise ConfigurationError(
                f"snapshots may take {self.total_limit_bytes >> 20} MiB, and {self.root} has {there >> 20} MiB",
                field="node.snapshot_limit_mib",
                remedy="a smaller limit, or a larger memory file system (mount -o remount,size=…)",
            )

    def acquire(self) -> bool:
        """Lock the arenas and return whether this daemon may use them; false while another daemon of its name
        runs on this host.
        """
        while self._lock is None:
            self._make()
            lock = (self.root / "lock").open("ab")
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                lock.close()
                return False
            if os.fstat(lock.fileno()).st_nlink:
                self._lock = lock
            else:  # The daemon that had it removed the directory in this moment.
                lock.close()
        return True

    def _make(self) -> None:
        """Make the directory, which a daemon of this name removes when it ends with no snapshots."""
        self.root.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.root.mkdir(mode=0o700, exist_ok=True)

    def close(self) -> None:
        """Unmap and unlock the arenas; what they hold stays."""
        self._maps.clear()
        if self._lock is not None:
            if [path.name for path in self._entries(self.root)] == ["lock"]:
                shutil.rmtree(self.root, ignore_errors=True)
                with contextlib.suppress(OSError):
                    self.root.parent.rmdir()
            self._lock.close()
            self._lock = None

    # --- directories -----------------------------------------------------------------------------

    def directory(self, job_id: str, device: int) -> Path:
        """Return the directory of a device's arena.

        :raises ValueError: the job's id cannot name a directory.
        """
        return self._job(job_id) / f"device-{device}"

    def make_staging(self, job_id: str, generation: int) -> Path:
        """Make an empty directory for layers on their way to the trainers, and remove an older one.

        :raises OSError: it cannot be made.
        :raises ValueError: see ``directory``.
        """
        self.remove_staging(job_id)
        path = self._job(job_id) / f"{_STAGING}{generation}"
        path.mkdir(mode=0o700, parents=True)
        return path

    def remove_staging(self, job_id: str) -> None:
        self._remove_from(self._job(job_id), _STAGING)

    def remove(self, job_id: str) -> None:
        """Release the memory of a job that is over."""
        if self.acquire():
            path = self._job(job_id)
            self._unmap(path)
            # Trainers that are being killed may still add a file.
            for _ in range(_REMOVALS):
                shutil.rmtree(path, ignore_errors=True)
                if not path.exists():
                    break
                time.sleep(_REMOVAL_PAUSE_S)

    def remove_others(self, job_id: str) -> None:
        """Remove what other jobs left, since a node has one job at a time."""
        if self.acquire():
            for path in self._entries(self.root):
                if path.is_dir() and path.name != job_id:
                    self.remove(path.name)

    def _job(self, job_id: str) -> Path:
        if not _JOB.fullmatch(job_id):
            raise ValueError(f"{job_id[:80]!r} cannot name a directory")
        return self.root / job_id

    # --- copies for other nodes --------------------------------------------------------------------

    def copy_directory(self, job_id: str, owner: str, device: int) -> Path:
        """Return the directory of the copy of a device of ``owner``.

        :raises ValueError: they cannot name a directory.
        """
        path = self._job(job_id) / f"copy-{device}-{owner}"
        if not _COPY.fullmatch(path.name):
            raise ValueError(f"{owner[:80]!r} and {device} cannot name a directory")
        return path

    def used_bytes(self, job_id: str) -> int:
        """Return the bytes of all slots of the job: own ones and copies."""
        total = 0
        for slot in self._job(job_id).glob("*/slot-*"):
            with contextlib.suppress(FileNotFoundError):  # It is renamed while it grows.
                total += slot.stat().st_size
        return total

    def limit(self, arena: Arena, job_ids: Iterable[str]) -> None:
        """Limit an arena to the memory that the arenas of these jobs leave of the node's limit, if it has one."""
        if self.total_limit_bytes is not None:
            taken = sum(map(self.used_bytes, job_ids)) - arena.allocated_bytes
            arena.limit_bytes = max(0, self.total_limit_bytes - taken)

    def copy_directories(self, job_id: str) -> dict[Path, str]:
        """Return the directories of copies with their owners."""
        return {path: owner for path, owner in self._arenas(self._job(job_id)) if owner}

    def retire_copies(self, directory: Path) -> Path:
        """Take a directory of copies out of use and return its new path, for the caller to remove."""
        self._unmap(directory)
        retired = directory.with_name(f"{_RETIRED}{time.monotonic_ns()}")
        directory.rename(retired)
        return retired

    # --- contents --------------------------------------------------------------------------------

    def scan(self) -> tuple[tuple[HeldSnapshot, ...], list[Corruption]]:
        """Return what is complete and what is corrupt, before any trainer runs.

        Everything is read. Drafts, corrupt manifests and corrupt copies are removed; the owners of the
        copies send them again. An own snapshot with corrupt bytes counts as complete: its other bytes are
        intact, and the corrupt ones are repaired.
        """
        held: list[HeldSnapshot] = []
        problems: list[Corruption] = []
        if not self.acquire():
            return (), problems
        for job in self._entries(self.root):
            if not job.is_dir() or not _JOB.fullmatch(job.name):
                continue
            self._remove_from(job, _STAGING)
            self._remove_from(job, _RETIRED)
            whole: dict[HeldSnapshot, bool] = {}
            for directory, owner in self._arenas(job):
                arena = Arena.open(directory)
                problems += [
                    Corruption(job_id=job.name, step=None, part="manifest", detail=p) for p in arena.problems
                ]
                for manifest in arena.snapshots:
                    key = HeldSnapshot(
                        job_id=job.name, step=manifest.step, generation=manifest.generation, owner=owner
                    )
                    corrupt = arena.find_corrupt(manifest)
                    problems += [
                        Corruption(
                            job_id=manifest.job_id,
                            step=manifest.step,
                            part=part,
                            detail=f"{directory.name}: its digest does not match",
                        )
                        for part in corrupt
                    ]
                    if corrupt and owner:
                        arena.release([manifest.step])
                    there = manifest.job_id == job.name and not (corrupt and owner)
                    whole[key] = whole.get(key, True) and there
                arena.close()
            held += sorted((key for key, there in whole.items() if there), key=astuple)
        return tuple(held), problems

    def find(self, job_id: str, step: int) -> tuple[ArenaSnapshot, ...]:
        """Return what is complete here of a job's snapshot: one for each device that wrote one, in order, then
        copies.

        Nothing of ``job_id`` is ever joined to a path.
        """
        job = next((path for path in self._entries(self.root) if path.name == job_id and path.is_dir()), None)
        if job is None or not _JOB.fullmatch(job_id):
            return ()
        held = []
        for directory, owner in self._arenas(job):
            try:
                manifest = read_record(manifest_path(directory, step), SnapshotManifest)
                if (manifest.job_id, manifest.step) != (job_id, step):
                    raise CorruptDataError(f"it is of step {manifest.step} of job {manifest.job_id[:80]!r}")
                one = ArenaSnapshot(manifest=manifest, directory=directory, owner=owner)
                check_parts(manifest, one.slot.stat().st_size)
            except FileNotFoundError:
                continue
            except (CorruptDataError, OSError) as error:
                log.warning(
                    "snapshot_unusable", job=job_id, step=step, directory=str(directory), reason=str(error)
                )
                continue
            held.append(one)
        return tuple(held)

    def view(self, held: ArenaSnapshot, part: SnapshotPart) -> memoryview:
        """Return the part's memory itself, read-only.

        After its snapshot is released, the bytes may change.

        :raises OSError: the slot is gone.
        """
        path = held.slot
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            identity = status.st_ino, status.st_size
            known = self._maps.get(path)
            if known is None or known.identity != identity:
                memory = map_file(file.fileno(), status.st_size, writable=False)
                prefault(memory)
                known = self._maps[path] = _Mapped(identity=identity, memory=memory)
        return known.memory[part.offset : part.offset + part.size_bytes].data

    def write(self, held: ArenaSnapshot, part: SnapshotPart, first: int, data: bytes) -> None:
        """Change bytes of a part in its slot. Call it only while nobody else writes there
        (``ftd.snapshots.repair_writer``).

        :raises OSError: the slot is gone.
        """
        descriptor = os.open(held.slot, os.O_WRONLY)
        try:
            os.pwrite(descriptor, data, part.offset + first)
        finally:
            os.close(descriptor)

    def find_corrupt(self, held: tuple[ArenaSnapshot, ...]) -> tuple[str, ...]:
        """Return the names of corrupt parts. Parts with digests of their blocks are not read: their readers
        verify the ranges that they read.
        """
        return tuple(
            part.name
            for one in held
            for part in one.manifest.parts
            if not part.blocks
            if not part.is_intact(self.view(one, part))
        )

    def _unmap(self, directory: Path) -> None:
        """Drop the mappings below a directory; views that are still in use keep theirs alive."""
        for slot in [slot for slot in tuple(self._maps) if directory in slot.parents]:
            self._maps.pop(slot, None)

    def _arenas(self, job: Path) -> list[tuple[Path, str]]:
        """Return own arenas in the order of devices, then copies, each with its owner."""
        found: list[tuple[str, int, Path]] = []
        for path in self._entries(job):
            match = next(filter(None, (names.fullmatch(path.name) for names in self._names)), None)
            if match is not None:
                found.append((match[2], int(match[1]), path))
        return [(path, owner) for owner, _, path in sorted(found)]

    def _remove_from(self, job: Path, prefix: str) -> None:
        for path in self._entries(job):
            if path.name.startswith(prefix):
                shutil.rmtree(path, ignore_errors=True)

    @staticmethod
    def _entries(directory: Path) -> Iterator[Path]:
        try:
            yield from sorted(directory.iterdir())
        except FileNotFoundError:
            return
