"""Reads a job's steps from a coordinator's journal while the coordinator writes it."""

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from ftd.observe.tracking.rows import Kind, LoggedRow

_TABLES: dict[Kind, str] = {"step": "steps", "evaluation": "evaluations"}


class JournalReader:
    """Read-only access to a journal. All reads are short: a long one would prevent SQLite from checkpointing
    its write-ahead log.
    """

    def __init__(self, path: Path, job: str) -> None:
        """:raises OSError: the journal cannot be opened."""
        self._job = job
        self._seen: dict[Kind, int] = dict.fromkeys(_TABLES, 0)
        with _readable():
            self._db = sqlite3.connect(f"file:{path}?mode=ro", uri=True, isolation_level=None)

    def read_new(self, limit: int) -> list[LoggedRow]:
        """Return the rows written since the last call, in the order of writing; at most ``limit`` of each
        kind.

        :raises OSError: the journal cannot be read.
        """
        found: list[LoggedRow] = []
        for kind, table in _TABLES.items():
            query = f"SELECT id, step, at, generation, details FROM {table} WHERE id > ? AND job = ?"
            with _readable():
                rows = self._db.execute(
                    f"{query} ORDER BY id LIMIT ?", (self._seen[kind], self._job, limit)
                ).fetchall()
            found += [_row(kind, *row[1:]) for row in rows]
            if rows:
                self._seen[kind] = rows[-1][0]
        return found

    def read_range(self, kind: Kind, after: int, limit: int, *, last: int = 2**62) -> list[LoggedRow]:
        """Return the rows of the steps after ``after`` up to ``last``, oldest first.

        :raises OSError: the journal cannot be read.
        """
        query = f"SELECT step, at, generation, details FROM {_TABLES[kind]} WHERE job = ? AND step > ?"
        with _readable():
            rows = self._db.execute(
                f"{query} AND step <= ? ORDER BY step LIMIT ?", (self._job, after, last, limit)
            ).fetchall()
        return [_row(kind, *row) for row in rows]

    def close(self) -> None:
        self._db.close()


@contextmanager
def _readable() -> Iterator[None]:
    try:
        yield
    except sqlite3.Error as error:
        raise OSError(f"the coordinator's journal cannot be read: {error}") from None


def _row(kind: Kind, step: int, at: str, generation: int | None, details: str) -> LoggedRow:
    return LoggedRow(kind=kind, step=step, at=at, generation=generation, details=msgspec.json.decode(details))
