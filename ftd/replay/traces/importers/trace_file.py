"""The text of a trace file, and the assembly of a trace from the records that an importer found in it."""

import csv
import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar, get_args

import msgspec

from ftd.replay.traces.trace import MOST_NODES, EventKind, Trace, TraceError, TraceEvent

T = TypeVar("T")

LONG_GAP = 10.0
"""The longest span without records is noted from this multiple of the mean of the others on. With a constant rate of
events the longest of n spans is about ln n times the mean, so that few traces of 5 to 22,000 spans have such a one.
"""
MAX_FILE_BYTES = 256 * 1024 * 1024
"""Largest trace file that is read. The largest public one, LANL's, has 3 MB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One event as the file has it; its time counts from whatever the file counts from."""

    place: str
    """Place in the file, such as ``line 12``."""
    event: TraceEvent


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportOptions:
    """Choices of the user for the import of a file. An importer rejects those that mean nothing to it."""

    nodes: int | None = None
    """Number of all nodes, for formats that name only the nodes which failed."""
    system: str | None = None
    """System whose failures to read, for files with several."""
    max_gap_s: float | None = None
    """Longest span in seconds without records that is accepted. By default any span is, and one of ``LONG_GAP``
    times the mean of the others is noted; samples that the file marks as missing are not accepted at all.
    """


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

    def csv_rows(self, rows: Iterable[T]) -> Iterator[T]:
        """Yield the rows after the header that a reader of the module ``csv`` finds.

        :raises TraceError: they are no CSV.
        """
        number = 2
        try:
            for row in rows:
                yield row
                number += 1
        except csv.Error as error:
            raise self.error(
                f"no CSV from here on: {error}",
                place=f"line {number}",
                remedy="is a quotation mark not closed?",
            ) from None

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

    def node_count(self, count: float, place: str) -> int:
        """Return a number of nodes that the file has.

        :raises TraceError: it is too large.
        """
        if count > MOST_NODES:
            raise self.error(
                f"{count:.10g} nodes are more than {MOST_NODES}", place=place, remedy="correct the number"
            )
        return int(count)

    def event_kind(self, text: str, place: str) -> EventKind:
        """Return the kind of an event.

        :raises TraceError: it is unknown.
        """
        for kind in get_args(EventKind):
            if text == kind:
                return kind  # type: ignore[no-any-return]
        raise self.error(f"{text!r} is not an event", place=place, remedy="write add or remove")

    def decode_json(self, kind: type[T]) -> T:
        """Return the content of a JSON file.

        :raises TraceError: it is no JSON, or not of this kind.
        """
        try:
            return msgspec.json.decode(self.text.encode(), type=kind)
        except msgspec.DecodeError as error:
            raise self.error(str(error), remedy="correct the file") from None

    def gap_notes(
        self, times: Iterable[tuple[str, float]], max_gap_s: float | None, *, start_s: float | None = None
    ) -> tuple[str, ...]:
        """Return a note about the longest span without records, if it is long compared with the others.

        :param times: places and times of all records, in the order of the file.
        :param start_s: time of the trace's start as the file counts; the time of the first record by default.
        :raises TraceError: a span is longer than ``max_gap_s``.
        """
        instants: dict[float, str] = {}
        for place, at_s in times:
            instants.setdefault(at_s, place)
        spans = [(later - earlier, earlier, later) for earlier, later in itertools.pairwise(instants)]
        if not spans:
            return ()
        longest_s, _, end_s = max(spans)
        if max_gap_s is not None and longest_s > max_gap_s:
            raise self.error(
                f"there is no record for the {longest_s:.10g} s before this one, and {max_gap_s:.10g} s are accepted",
                place=instants[end_s],
                remedy="accept a longer gap with --max-gap, or use the part of the file before or after it",
            )
        start_s = next(iter(instants)) if start_s is None else start_s
        of_trace = sorted(span for span in spans if span[1] >= start_s)
        others_s = [span for span, _, _ in of_trace[:-1]]
        if not others_s:
            return ()
        longest_s, begin_s, _ = of_trace[-1]
        if longest_s < LONG_GAP * (mean_s := sum(others_s) / len(others_s)):
            return ()
        begin_h = (begin_s - start_s) / 3600
        return (
            f"There is no record for {longest_s / 3600:,.1f} h from hour {begin_h:,.1f} on, "
            f"{longest_s / mean_s:.0f} times the mean of the others; the replay takes it that no node came or went.",
        )

    def trace(
        self,
        records: Iterable[Record],
        *,
        description: str,
        end_s: float | None = None,
        notes: Iterable[str] = (),
    ) -> Trace:
        """Return the trace of these records, with times that count from the first one.

        :param description: the format, for ``Trace.source``.
        :param end_s: time of the end as the file counts; the time of the last record by default.
        :raises TraceError: names the place in the file.
        """
        records = list(records)
        if not records:
            raise self.error("the file has no records", remedy="is it the right file?")
        first_s = records[0].event.at_s
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
