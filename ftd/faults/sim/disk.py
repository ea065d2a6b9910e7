"""The disk of a simulated coordinator's host: a real SQLite database in memory, which may be full or lose
power.
"""

import sqlite3
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

from ftd.faults.sim.world import World

_WRITES = ("INSERT", "BEGIN", "DELETE", "COMMIT")

_KEPT = "INSERT OR REPLACE"
"""Beginning of the statements that write the state, or the metadata stored with it; the rest need not survive."""

Content = tuple[bytes | None, dict[str, str]]
"""The state and the metadata."""
Write = tuple[str, Any]
"""A statement and its values."""


class SimDisk:
    """A disk and the boots of its host (``ftd.coordinator.ports.Disk``)."""

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.full_until = 0.0
        """Time before which nothing can be written."""
        self.writer: Callable[[], bool] = lambda: True
        """Function that returns whether the process that opens the disk next is alive."""
        self.boots = 0
        self._name = name
        self._database: sqlite3.Connection | None = None
        self._forced: Content | None = None
        """Content that is found after a power loss at least; ``None``: nothing was written yet."""
        self._unforced: list[list[Write]] = []
        """Writes of each commit since then, the last of which a power loss may undo."""
        self.knew = (0, 0)
        """The position of the newest journal that was on the disk before power failed."""

    @property
    def boot_id(self) -> str:
        return f"{self._name}-{self.boots}"

    def open(self, directory: Path) -> sqlite3.Connection:
        """Open the database, whatever state the last process left it in."""
        if self._database is None:
            self._database = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
        elif self._database.in_transaction:
            raise AssertionError("a process is killed between its callbacks alone")
        return _Connection(self._database, self)  # type: ignore[return-value]

    def close(self) -> None:
        return

    def read(self) -> Content:
        """Return what is written."""
        if self._database is None:
            return None, {}
        row = self._database.execute("SELECT value FROM state").fetchone()
        known = dict(self._database.execute("SELECT name, value FROM meta").fetchall())
        return row[0] if row is not None else None, known

    @property
    def position(self) -> tuple[int, int]:
        """The position of the journal on the disk."""
        term, serial = self.read()[1].get("position", "0 0").split()
        return int(term), int(serial)

    def committed(self, writes: list[Write], *, forced: bool) -> None:
        """Note the end of a transaction. With ``forced`` it survives a power loss, together with everything
        before it.
        """
        if forced or self._forced is None:
            self._forced, self._unforced = self.read(), []
        else:
            self._unforced.append(writes)

    def lose_power(self, chance: Random) -> None:
        """Lose some of the commits that were not forced, from the end, and boot the host again."""
        self.knew = max(self.knew, self.position)
        self.boots += 1
        if self._forced is not None and self._database is not None:
            kept = chance.choice(range(1 + len(self._unforced)))
            state, known = self._forced
            database = self._database
            if database.in_transaction:
                database.rollback()
            database.execute("DELETE FROM state")
            database.execute("DELETE FROM meta")
            if state is not None:
                database.execute("INSERT INTO state VALUES (1, ?)", (state,))
            database.executemany("INSERT INTO meta VALUES (?, ?)", list(known.items()))
            for write in (write for commit in self._unforced[:kept] for write in commit):
                database.execute(*write)
            self._forced, self._unforced = self.read(), []


class _Connection:
    """A connection to the database that fails while the disk is full, and notes what is forced."""

    def __init__(self, database: sqlite3.Connection, disk: SimDisk) -> None:
        self._database, self._disk = database, disk
        self._forced = True
        self._writes: list[Write] = []
        """Writes of the transaction so far."""
        self._alive = disk.writer

    def execute(self, statement: str, values: Any = ()) -> sqlite3.Cursor:
        writes = statement.startswith(_WRITES)
        if not self._alive():
            raise sqlite3.OperationalError("this process was killed")
        if writes and self._disk.world.now < self._disk.full_until:
            raise sqlite3.OperationalError("database or disk is full")
        if statement.startswith("PRAGMA synchronous"):
            self._forced = statement.endswith("FULL")
            return self._database.cursor()  # The database is in memory, so there is nothing to set.
        done = self._database.execute(statement, values)
        if statement.startswith(_KEPT):
            self._writes.append((statement, values))
        if not self._database.in_transaction:
            if writes:
                self._disk.committed(self._writes, forced=self._forced)
            self._writes = []
        return done

    def executemany(self, statement: str, values: Any) -> sqlite3.Cursor:
        if self._disk.world.now < self._disk.full_until:
            raise sqlite3.OperationalError("database or disk is full")
        if not self._alive():
            raise sqlite3.OperationalError("this process was killed")
        done = self._database.executemany(statement, values)
        self._disk.committed([(statement, one) for one in values], forced=self._forced)
        return done

    def executescript(self, script: str) -> sqlite3.Cursor:
        return self._database.executescript(script)

    def close(self) -> None:
        return
