"""The coordinator's journal: its durable state, the events and the committed steps, in SQLite with a
write-ahead log.

The state is durable before anything that follows from it is published. Every write survives a SIGKILL of
the coordinator. A write is also forced to the disk (``forced``) if a loss of power must not take it back
(``statemachine.cluster.durable.durable``). A generation number must never be used twice, not even after
a power failure: numbers are reserved at quiet moments (``reserve``), and after a reboot the next ones
follow the reserved ones.
"""

import contextlib
import fcntl
import json
import os
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ftd.coordinator.ports import Disk
from ftd.driver import Clock, SystemClock
from ftd.errors import JournalError
from ftd.transport.wire.duplicates import DuplicateFilter
from ftd.transport.wire.public import EventMessage, encode_json
from statemachine.cluster.durable.durable import RESERVED
from statemachine.cluster.durable.outbox import MAX_EVENTS

_SCHEMA = """
CREATE TABLE IF NOT EXISTS state (id INTEGER PRIMARY KEY CHECK (id = 1), value BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS events (id INTEGER PRIMARY KEY AUTOINCREMENT, message TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS steps (
    id INTEGER PRIMARY KEY AUTOINCREMENT, job TEXT NOT NULL, step INTEGER NOT NULL, generation INTEGER,
    at TEXT NOT NULL, details TEXT NOT NULL, UNIQUE (job, step) ON CONFLICT REPLACE);
CREATE TABLE IF NOT EXISTS evaluations (
    id INTEGER PRIMARY KEY AUTOINCREMENT, job TEXT NOT NULL, step INTEGER NOT NULL, generation INTEGER,
    at TEXT NOT NULL, details TEXT NOT NULL, UNIQUE (job, step) ON CONFLICT REPLACE);
CREATE TABLE IF NOT EXISTS meta (name TEXT PRIMARY KEY, value TEXT NOT NULL);
"""
_PAGE_BYTES = 16 * 1024
"""Size of a database page. The state of a thousand nodes takes two; each costs a separate write, about 0.1 ms
of a recovery.
"""
_CHECKPOINT_COMMITS = 100
"""Commits after which SQLite's write-ahead log is moved into the file at a quiet moment."""
_MAX_LOG_PAGES = 2_000
"""Pages of the write-ahead log after which the next writer must move it into the file, however urgent its
write is.
"""
MAX_PEERS = 100
"""Limit of the number of stored names of other coordinators: any client with write access can send names."""
_VERSION = 1
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_TABLE_OF = {"StepCommitted": "steps", "Evaluated": "evaluations"}
"""Events with one row per step of a job, the last one reported; a rollback deletes later rows."""
ONE_PER_STEP = frozenset(_TABLE_OF)
"""Names of these events; each must have a step."""
_MAX_ROWS = {"events": 200_000, "steps": 1_000_000, "evaluations": 200_000}
"""Most rows of each table; the oldest are deleted first: steps of earlier jobs before those of the present
one.
"""
_PRUNE_EVERY = 5_000
_PRUNE_MAX_ROWS = 4 * _PRUNE_EVERY
"""Most rows that are deleted at once, while the coordinator waits: a journal that is far too long shrinks
gradually.
"""
MAX_PAGE = 1_000
_MAX_PAGE_BYTES = 700_000
"""Most bytes of a page, which is one MQTT message; see ``codec.MAX_PAYLOAD_BYTES``."""


Position = tuple[int, int]
"""The leader's term, and the number of states that it had written under it. The greater position is the newer
one.
"""


ForeignJournal = tuple[int, int, str]
"""A journal that cannot be read here: its schema, the protocol of its nodes, and the version that wrote it."""


SAME_CLOCK_S = 2.0
"""Clocks whose offsets differ by less count as one: two coordinators on one host, whose wall clock was set."""


class Journal:
    """The journal file. It has one writer, which holds a lock, and is used by one thread."""

    def __init__(self, directory: Path, *, disk: Disk | None = None, clock: Clock | None = None) -> None:
        """Open or create the journal in ``directory``, on this host's disk unless another one is given.

        :raises JournalError: the journal cannot be created, is corrupt or of a newer version, or another
            coordinator has it open.
        """
        self.path = directory / "journal.sqlite"
        self._disk, self._system_clock = disk or LocalDisk(), clock or SystemClock()
        self._buffer: list[tuple[EventMessage, bool]] = []
        self._repeats = DuplicateFilter()
        self._writes = self._commits = 0
        try:
            self._db = self._disk.open(directory)
        except (OSError, sqlite3.Error) as error:
            why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            raise JournalError(
                f"the journal {self.path} cannot be opened: {why} "
                "(let coordinator.state_dir be a directory that this user can write to)"
            ) from None
        with self._failing("opened"):
            self._db.execute(f"PRAGMA page_size = {_PAGE_BYTES}")  # This affects new files only.
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.execute(f"PRAGMA wal_autocheckpoint = {_MAX_LOG_PAGES}")
            version = self._db.execute("PRAGMA user_version").fetchone()[0]
            if version not in (0, _VERSION):
                raise JournalError(
                    f"the journal {self.path} has version {version}, this ftd reads {_VERSION}"
                )
            self._db.executescript(_SCHEMA)
            self._db.execute(f"PRAGMA user_version = {_VERSION}")
            known = dict(self._db.execute("SELECT name, value FROM meta").fetchall())
            self._boot = self._disk.boot_id
            self.reserved, self.floor = self._generations(known)
            newest = "SELECT json_extract(message, '$.id') FROM events ORDER BY id DESC LIMIT ?"
            for row in self._db.execute(newest, (MAX_EVENTS,)).fetchall()[::-1]:
                self._repeats.is_new(row[0] or "")
        self._job = known.get("job", "")
        term, serial = known.get("position", "0 0").split()
        self.position: Position = (int(term), int(serial))
        self.shared = "shared" in known
        """Whether there has ever been another coordinator, which may know more than this journal."""
        self.peers = frozenset[str](json.loads(known.get("peers", "[]")))
        """The names of the other coordinators that were ever met."""
        offset, _, boot = known.get("clock", f"0 {self._boot}").partition(" ")
        self._clock = boot, float(offset)
        self._foreign: tuple[Position, ForeignJournal] | None = (
            _foreign(known["foreign"]) if "foreign" in known else None
        )

    def _generations(self, known: dict[str, str]) -> tuple[int, int]:
        """Return how many generations are reserved, and how many may have been used without this journal's
        knowledge.
        """
        reserved, floor = int(known.get("reserved", 0)), int(known.get("floor", 0))
        if known.get("boot") != self._boot:
            floor = reserved
            self._db.executemany(
                "INSERT OR REPLACE INTO meta VALUES (?, ?)", [("floor", str(floor)), ("boot", self._boot)]
            )
        return reserved, floor

    def _set_clock(self, boot: str, offset_s: float) -> None:
        """Remember the clock of the saved state's times.

        :param boot: boot id of this host; empty for another host's clock.
        :param offset_s: wall clock minus monotonic clock.
        """
        if boot == self._clock[0] and abs(offset_s - self._clock[1]) <= SAME_CLOCK_S:
            return
        self._db.execute("INSERT OR REPLACE INTO meta VALUES ('clock', ?)", (f"{offset_s!r} {boot}",))
        self._clock = boot, offset_s

    @property
    def clock_ahead_s(self) -> float:
        """Seconds by which this host's monotonic clock is ahead of the one that the saved state's times refer
        to: the state may be from another host, or from before this host's last start.
        """
        boot, offset_s = self._clock
        ahead_s = 0.0 if boot == self._boot else offset_s - self._offset_s()
        return ahead_s if abs(ahead_s) > SAME_CLOCK_S else 0.0

    def _offset_s(self) -> float:
        """Return the wall clock minus the monotonic clock of this host."""
        return self._system_clock.wall_s() - self._system_clock.monotonic_s()

    def load(self) -> bytes | None:
        """Return the last saved state, or ``None`` if there is none yet."""
        with self._failing("read"):
            row = self._db.execute("SELECT value FROM state").fetchone()
        return row[0] if row else None

    def save(
        self,
        state: bytes,
        *,
        forced: bool,
        position: Position | None = None,
        writer_offset_s: float | None = None,
    ) -> None:
        """Replace the durable state, and write the events recorded so far, in one transaction.

        :param forced: force the write to the disk.
        :param position: position of this state among all that leaders wrote.
        :param writer_offset_s: if another host wrote it, that host's wall clock minus its monotonic clock.
        :raises JournalError: it could not be written; the caller must not act on it.
        """
        with self._transaction(forced=forced):
            self._db.execute("INSERT OR REPLACE INTO state (id, value) VALUES (1, ?)", (state,))
            if position is not None:
                text = "{} {}".format(*position)
                self._db.execute("INSERT OR REPLACE INTO meta VALUES ('position', ?)", (text,))
            if writer_offset_s is None:
                self._set_clock(self._boot, self._offset_s())
            else:
                self._set_clock("", writer_offset_s)
        self.position = position or self.position

    def reserve(self, generation: int) -> None:
        """Force to the disk that generations up to this one may be used without a forced write, with all that
        was written before.

        :raises JournalError: see ``save``.
        """
        with self._failing("written"):
            self._db.execute("PRAGMA synchronous = FULL")
            self._db.execute("INSERT OR REPLACE INTO meta VALUES ('reserved', ?)", (str(generation),))
        self.reserved = generation

    def save_copy(self, state: bytes, position: Position, writer_offset_s: float) -> None:
        """Save the leader's journal on a standby. Parameters and errors are those of ``save``."""
        self.save(state, forced=False, position=position, writer_offset_s=writer_offset_s)
        self.mark_shared()

    def mark_shared(self) -> None:
        """Remember that there is, or was, another coordinator."""
        if not self.shared:
            with self._failing("written"):
                self._db.execute("INSERT OR REPLACE INTO meta VALUES ('shared', '1')")
            self.shared = True

    def note_peer(self, name: str) -> None:
        """Remember another coordinator, and its name unless there are too many already."""
        self.mark_shared()
        if name not in self.peers and len(self.peers) < MAX_PEERS:
            peers = self.peers | {name}
            with self._failing("written"):
                names = json.dumps(sorted(peers))
                self._db.execute("INSERT OR REPLACE INTO meta VALUES ('peers', ?)", (names,))
            self.peers = peers

    @property
    def foreign_journal(self) -> ForeignJournal | None:
        """The newer journal of another version of ftd that was seen, or ``None`` if this journal is the
        newest known.
        """
        if self._foreign is None or self._foreign[0] <= self.position:
            return None
        return self._foreign[1]

    def remember_foreign_journal(self, position: Position, schema: int, protocol: int, version: str) -> None:
        """Remember that there is a newer journal that cannot be read here.

        :raises JournalError: see ``save``.
        """
        foreign = (schema, protocol, version)
        if self.foreign_journal == foreign:
            return  # Only its position is newer than the remembered one.
        text = f"{position[0]} {position[1]} {schema} {protocol} {version}"
        with self._failing("written"):
            self._db.execute("INSERT OR REPLACE INTO meta VALUES ('foreign', ?)", (text,))
        self._foreign = position, foreign

    def set_job(self, job: str) -> None:
        """Attribute what is recorded from now on to this job. Its ``JobSubmitted`` may have been recorded by
        another coordinator, or lost with the process that had just accepted it.

        :raises JournalError: see ``save``.
        """
        if job != self._job:
            with self._failing("written"):
                self._db.execute("INSERT OR REPLACE INTO meta VALUES ('job', ?)", (job,))
            self._job = job

    def record(self, message: EventMessage) -> bool:
        """Remember an event, to be written with the next ``save`` or ``flush``.

        :returns: whether it is new. What follows from it for the steps is written in any case.
        """
        is_new = self._repeats.is_new(message.id)
        self._buffer.append((message, is_new))
        return is_new

    @property
    def unwritten(self) -> int:
        """Number of events that were recorded and not written yet."""
        return len(self._buffer)

    def flush(self) -> None:
        """Write what was recorded.

        :raises JournalError: see ``save``.
        """
        if self._buffer:
            with self._transaction(forced=False):
                pass

    def flush_or_forget(self) -> None:
        """Write what was recorded, or forget it if it cannot be written, so that memory does not grow.

        :raises JournalError: it is forgotten.
        """
        try:
            self.flush()
        except JournalError as error:
            lost = len(self._buffer)
            self._buffer.clear()
            raise JournalError(f"{error}; {lost} events are missing in it from now on") from None

    def maintain(self, *, generation: int) -> None:
        """Do at a quiet moment what a recovery would otherwise wait for: reserve the generations after this
        one, and move the write-ahead log into the file if it is long. Both take about ten milliseconds.
        """
        with contextlib.suppress(JournalError):  # The next write reports the error.
            if self.reserved != generation + RESERVED:
                self.reserve(generation + RESERVED)
            if self._commits >= _CHECKPOINT_COMMITS:
                self._commits = 0
                with self._failing("written"):
                    self._db.execute("PRAGMA wal_checkpoint(PASSIVE)")

    def events(self, *, after: int, limit: int, newest: bool) -> tuple[list[dict[str, Any]], int]:
        """Return a page of events, oldest first, and the ``after`` of the next page."""
        return self._page("SELECT id, message FROM events", after, limit, newest)

    def steps(self, *, after: int, limit: int, newest: bool) -> tuple[list[dict[str, Any]], int]:
        """Return a page of committed steps of all jobs, and the ``after`` of the next page."""
        query = (
            "SELECT id, json_object('job', job, 'step', step, 'generation', generation, 'at', at,"
            " 'details', json(details)) FROM steps"
        )
        return self._page(query, after, limit, newest)

    def sampled_steps(self, most: int) -> tuple[list[dict[str, Any]], int]:
        """Return at most ``most`` steps of the newest job, oldest first, and how many steps each of them
        stands for.
        """
        self.flush()
        with self._failing("read"):
            row = self._db.execute("SELECT COUNT(*) FROM steps WHERE job = ?", (self._job,)).fetchone()
            stride = max(1, -(-row[0] // most))
            rows = self._db.execute(
                "SELECT step, at, details FROM steps WHERE job = ? AND step % ? = 0 ORDER BY step",
                (self._job, stride),
            ).fetchall()
        return [{"step": step, "at": at, "details": json.loads(text)} for step, at, text in rows], stride

    def close(self) -> None:
        """Write what was recorded, and let another coordinator open the journal."""
        try:
            self.flush()
        finally:
            self._db.close()
            self._disk.close()

    def _page(self, query: str, after: int, limit: int, newest: bool) -> tuple[list[dict[str, Any]], int]:
        self.flush()
        limit = max(1, min(limit, MAX_PAGE))
        order = "DESC" if newest else "ASC"
        with self._failing("read"):
            found = self._db.execute(f"{query} WHERE id > ? ORDER BY id {order} LIMIT ?", (after, limit))
            rows: list[tuple[int, str]] = []
            size = 0
            for row in found:
                size += len(row[1].encode())
                if rows and size > _MAX_PAGE_BYTES:
                    break
                rows.append(row)
        if newest:
            rows.reverse()
        return [json.loads(text) for _, text in rows], rows[-1][0] if rows else after

    @contextlib.contextmanager
    def _transaction(self, *, forced: bool) -> Iterator[None]:
        """Write what was recorded and what the body writes, all of it or nothing. If the commit fails, what
        this object believes to be written is restored, too.

        :raises JournalError: it could not be written.
        """
        job, clock = self._job, self._clock
        try:
            with self._failing("written"):
                # SQLite applies this setting at once only outside a transaction.
                self._db.execute(f"PRAGMA synchronous = {'FULL' if forced else 'NORMAL'}")
                self._db.execute("BEGIN IMMEDIATE")
                self._write_buffer()
                yield
                self._db.execute("COMMIT")
        except JournalError:
            self._job, self._clock = job, clock
            raise
        self._buffer.clear()
        self._commits += 1

    def _write_buffer(self) -> None:
        for message, is_new in self._buffer:
            if message.event == "JobSubmitted":
                self.set_job(str(message.details.get("job", "")))
            if (table := _TABLE_OF.get(message.event)) is not None:
                details = encode_json(message.details).decode()
                self._db.execute(
                    f"INSERT INTO {table} (job, step, generation, at, details) VALUES (?, ?, ?, ?, ?)",
                    (self._job, message.step, message.generation, message.at, details),
                )
            if message.event != "StepCommitted":
                if message.event == "RolledBack":
                    for table in _TABLE_OF.values():
                        self._db.execute(
                            f"DELETE FROM {table} WHERE job = ? AND step > ?", (self._job, message.step)
                        )
                if is_new:
                    text = encode_json(message).decode()
                    self._db.execute("INSERT INTO events (message) VALUES (?)", (text,))
        self._writes += len(self._buffer)
        if self._writes >= _PRUNE_EVERY:
            self._writes = 0
            for table, most in _MAX_ROWS.items():
                self._db.execute(
                    f"DELETE FROM {table} WHERE id <= (SELECT MAX(id) FROM {table}) - ?"
                    f" AND id < (SELECT MIN(id) FROM {table}) + ?",
                    (most, _PRUNE_MAX_ROWS),
                )

    @contextlib.contextmanager
    def _failing(self, how: str) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, ValueError, OverflowError) as error:  # The last two come from corrupt bytes.
            with contextlib.suppress(sqlite3.Error):
                self._db.execute("ROLLBACK")
            raise JournalError(
                f"the journal {self.path} cannot be {how}: {error} "
                "(is the disk full? to start with an empty journal, move the file away)"
            ) from None


def _foreign(text: str) -> tuple[Position, ForeignJournal]:
    term, serial, schema, protocol, version = text.split(" ", 4)
    return (int(term), int(serial)), (int(schema), int(protocol), version)


class LocalDisk:
    """This host's disk, with a lock file next to the database."""

    def __init__(self) -> None:
        self._lock: int | None = None

    @property
    def boot_id(self) -> str:
        """Identifier of this host's last start; a new one for each call if the system has none."""
        try:
            return _BOOT_ID.read_text().strip()
        except OSError:
            return str(time.time_ns())

    def open(self, directory: Path) -> sqlite3.Connection:
        """Open the database, and hold the lock as long as this process lives.

        :raises JournalError: another process holds it.
        """
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._lock = os.open(directory / "journal.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.close()
            raise JournalError(
                f"another coordinator uses {directory} (stop it, or set coordinator.state_dir to another directory)"
            ) from None
        return sqlite3.connect(directory / "journal.sqlite", isolation_level=None)

    def close(self) -> None:
        """Release the lock."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None
