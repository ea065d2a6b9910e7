"""The CSV of ftd: a header ``time_s,event,node``, optionally with ``notice_s``, and one event a line."""

import csv

from ftd.replay.traces.importers.trace_file import ImportOptions, Record, TraceFile
from ftd.replay.traces.trace import Trace, TraceEvent

COLUMNS = ["time_s", "event", "node"]
OPTIONAL_COLUMN = "notice_s"


def is_plain_csv(file: TraceFile) -> bool:
    """Return whether the file seems to have this format: its first line is a header with a column ``time_s``."""
    return "time_s" in [column.strip() for column in file.lines[0].split(",")]


def read_plain_csv(file: TraceFile, options: ImportOptions) -> Trace:
    """Return the trace of a CSV file.

    :raises TraceError: names the line.
    """
    lines = file.lines
    columns = [column.strip() for column in lines[0].split(",")]
    if columns not in (COLUMNS, [*COLUMNS, OPTIONAL_COLUMN]):
        unknown = [column for column in columns if column not in (*COLUMNS, OPTIONAL_COLUMN)]
        problem = (
            f"unknown columns {', '.join(unknown)}" if unknown else f"the columns are {','.join(columns)}"
        )
        raise file.error(
            problem,
            place="line 1",
            remedy=f"write {','.join(COLUMNS)}, and {OPTIONAL_COLUMN} as a fourth column if you need it",
        )
    records = []
    for number, row in enumerate(file.csv_rows(csv.reader(lines[1:])), start=2):
        place = f"line {number}"
        if len(row) != len(columns):
            raise file.error(
                f"the line has {len(row)} fields and the header {len(columns)}",
                place=place,
                remedy="complete the line, or remove it",
            )
        time_s, kind, node, *notice = (field.strip() for field in row)
        records.append(
            Record(
                place=place,
                event=TraceEvent(
                    at_s=file.number(time_s, "time in seconds", place),
                    kind=file.event_kind(kind, place),
                    node=node,
                    notice_s=file.number(notice[0], "notice in seconds", place) if any(notice) else 0.0,
                ),
            )
        )
    gaps = file.gap_notes(((record.place, record.event.at_s) for record in records), options.max_gap_s)
    return file.trace(records, description="csv", notes=gaps)
