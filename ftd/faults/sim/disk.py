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

Content = tuple[bytes | None, dict[str, str]]
"""The tables that matter: the state, and the metadata stored with it."""


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
        self._unforced: list[Content] = []
        """The contents that may be found after a power loss: what was forced last, and every commit since."""
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

    def committed(self, *, forced: bool) -> None:
        """Note the end of a transaction. With ``forced`` it survives a power loss, together with everything
        before it.
        """
        if forced:
            self._unforced.clear()
        self._unforced.append(self.read())

    def lose_power(self, chance: Random) -> None:
        """Lose some of the commits that were not forced, from the end, and boot the host again."""
        self.knew = max(self.knew, self.position)
        self.boots += 1
        if self._unforced and self._database is not None:
            state, known = chance.choice(self._unforced)
            database = self._database
            if database.in_transaction:
                database.rollback()
            database.execute("DELETE FROM state")
            database.execute("DELETE FROM meta")
            if state is not None:
                database.execute("INSERT INTO state VALUES (1, ?)", (state,))
            database.executemany("INSERT INTO meta VALUES (?, ?)", list(known.items()))
            self._unforced = [(state, known)]


class _Connection:
    """A connection to the database that fails while the disk is full, and notes what is forced."""

    def __init__(self, database: sqlite3.Connection, disk: SimDisk) -> None:
        self._database, self._disk = database, disk
        self._forced = True
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
        if writes and not self._database.in_transaction:
            self._disk.committed(forced=self._forced)
        return done

    def executemany(self, statement: str, values: Any) -> sqlite3.Cursor:
        if self._disk.world.now < self._disk.full_until:
            raise sqlite3.OperationalError("database or disk is full")
        if not self._alive():
            raise sqlite3.OperationalError("this process was killed")
        done = self._database.executemany(statement, values)
        self._disk.committed(forced=self._forced)
        return done

    def executescript(self, script: str) -> sqlite3.Cursor:
        return self._database.executescript(script)

    def close(self) -> None:
        return
