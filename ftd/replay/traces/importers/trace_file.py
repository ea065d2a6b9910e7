"""The text of a trace file, and the assembly of a trace from the records that an importer found in it."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import get_args

from ftd.replay.traces.trace import EventKind, Trace, TraceError, TraceEvent

MAX_FILE_BYTES = 256 * 1024 * 1024
"""Largest trace file that is read. The largest public one, LANL's, has 3 MB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One event as the file has it; its time counts from whatever the file counts from."""

    place: str
    """Place in the file, such as ``line 12``."""
    event: TraceEvent


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceFile:
    """Content of a trace file."""

    path: Path
    text: str

    @classmethod
    def read(cls, path: Path) -> "TraceFile":
        """Return the content of a file.

        :raises TraceError: the file is missing, unreadable, too large, no text, or empty.
        """
        try:
            if path.stat().st_size > MAX_FILE_BYTES:
                raise TraceError(
                    f"the file is larger than {MAX_FILE_BYTES} bytes",
                    field=str(path),
                    remedy="is it the right file?",
                )
            text = path.read_text(encoding="utf-8-sig")
        except FileNotFoundError:
            raise TraceError("the file does not exist", field=str(path), remedy="check the path") from None
        except IsADirectoryError:
            raise TraceError(
                "this is a directory", field=str(path), remedy="name the trace file in it"
            ) from None
        except (OSError, UnicodeDecodeError) as error:
            raise TraceError(
                f"the file cannot be read: {error}", field=str(path), remedy="give a text file"
            ) from None
        if not text.strip():
            raise TraceError("the file is empty", field=str(path), remedy="is it the right file?")
        return cls(path=path, text=text)

    @property
    def lines(self) -> list[str]:
        """Lines without their ends; empty lines at the end of the file are left out."""
        return self.text.rstrip().splitlines()

    def error(self, problem: str, *, place: str = "", remedy: str | None = None) -> TraceError:
        """Return an error about this file."""
        where = f"{self.path}, {place}" if place else str(self.path)
        return TraceError(problem, field=where, remedy=remedy)

    def number(self, text: str, what: str, place: str) -> float:
        """Return a number of at least 0 that the file has.

        :raises TraceError: it is no such number.
        """
        try:
            number = float(text)
        except ValueError:
            number = math.nan
        if not math.isfinite(number) or number < 0:
            raise self.error(f"{text!r} is not a {what}", place=place, remedy="write a number of at least 0")
        return number

    def event_kind(self, text: str, place: str) -> EventKind:
        """Return the kind of an event.

        :raises TraceError: it is unknown.
        """
        for kind in get_args(EventKind):
            if text == kind:
                return kind  # type: ignore[no-any-return]
        raise self.error(f"{text!r} is not an event", place=place, remedy="write add or remove")

    def trace(
        self,
        records: Iterable[Record],
        *,
        description: str,
        start_s: float | None = None,
        end_s: float | None = None,
        notes: Iterable[str] = (),
    ) -> Trace:
        """Return the trace of these records, with times that count from the start.

        :param description: the format, for ``Trace.source``.
        :param start_s: time of the start as the file counts; the time of the first record by default.
        :param end_s: time of the end as the file counts; the time of the last record by default.
        :raises TraceError: names the place in the file.
        """
        records = list(records)
        if not records:
            raise self.error("the file has no records", remedy="is it the right file?")
        first_s = records[0].event.at_s if start_s is None else start_s
        last_s = records[-1].event.at_s if end_s is None else end_s
        events = tuple(replace(record.event, at_s=record.event.at_s - first_s) for record in records)
        try:
            return Trace(
                name=self.path.stem,
                source=f"{self.path.name}, {description}",
                events=events,
                end_s=last_s - first_s,
                notes=tuple(notes),
            )
        except TraceError as error:
            place = "" if error.event is None else records[error.event].place
            raise self.error(error.problem, place=place, remedy=error.remedy) from None
