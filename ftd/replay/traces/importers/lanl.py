"""LANL's failure records of 22 systems, 1996 to 2005 (LA-UR-05-7318; also in USENIX's Computer Failure Data
Repository; Schroeder and Gibson, "A Large-Scale Study of Failures in High-Performance Computing Systems", DSN 2006).

A file is a CSV with a header and one failure a line, in no order of time. Of its 26 columns the importer reads
``System``, ``nodes`` (number of the system's nodes), ``nodenumz`` (number of the node from 0 on), ``Prob Started`` and
``Prob Fixed`` (``month/day/year hour:minute``, local time).
"""

import csv
from collections import Counter
from datetime import datetime

from ftd.replay.traces.importers.outages import nodes_of_faults
from ftd.replay.traces.importers.trace_file import ImportOptions, Record, TraceFile
from ftd.replay.traces.trace import Trace, TraceEvent

_SYSTEM, _NODES, _NODE, _STARTED, _FIXED = "System", "nodes", "nodenumz", "Prob Started", "Prob Fixed"
_TIME = "%m/%d/%Y %H:%M"


def is_lanl(file: TraceFile) -> bool:
    """Return whether the first line is a header with LANL's columns of failure and repair."""
    columns = [column.strip() for column in file.lines[0].split(",")]
    return _STARTED in columns and _FIXED in columns


def read_lanl(file: TraceFile, options: ImportOptions) -> Trace:
    """Return the trace of one system, from the midnight before its first failure to its last record.

    :raises TraceError: names the line.
    """
    rows = _rows_of_system(file, options.system)
    system = rows[0][1][_SYSTEM]
    failures = []
    for place, row in rows:
        if not row[_NODE].isdecimal():
            raise file.error(
                f"system {system} does not say which node failed ({_NODE} is {row[_NODE]!r})",
                place=place,
                remedy="choose another system",
            )
        started, fixed = _time(file, row[_STARTED], place), _time(file, row[_FIXED], place)
        if fixed < started:
            raise file.error(
                f"the failure was fixed at {row[_FIXED]}, before it started at {row[_STARTED]}",
                place=place,
                remedy="correct or remove the line",
            )
        failures.append((place, int(row[_NODE]), started, fixed))
    begin = min(started for _, _, started, _ in failures).replace(hour=0, minute=0)
    faults = [
        Record(
            place=place,
            event=TraceEvent(
                at_s=(at - begin).total_seconds(),
                kind="remove" if begins else "add",
                node=f"system{system}-node{node}",
            ),
        )
        for place, node, started, fixed in failures
        for at, begins in ((started, True), (fixed, False))
    ]
    faults.sort(key=lambda fault: (fault.event.at_s, fault.event.kind == "add"))
    numbers = _node_numbers(file, rows, {node for _, node, _, _ in failures}, options.nodes)
    gaps = file.gap_notes(
        ((fault.place, fault.event.at_s) for fault in faults), options.max_gap_s, start_s=0.0
    )
    nodes = [f"system{system}-node{number}" for number in numbers]
    return file.trace(
        nodes_of_faults(file, nodes, faults),
        description=f"lanl, system {system}",
        notes=(
            "All nodes are taken to be there from the first failure to the last record, "
            "though some were installed later or taken out before.",
            *gaps,
        ),
    )


def _rows_of_system(file: TraceFile, system: str | None) -> list[tuple[str, dict[str, str]]]:
    """Return the rows of the chosen system, or of the only one, with their places."""
    reader = csv.DictReader(file.lines, restval="")
    reader.fieldnames = [column.strip() for column in reader.fieldnames or ()]
    missing = [
        column for column in (_SYSTEM, _NODES, _NODE, _STARTED, _FIXED) if column not in reader.fieldnames
    ]
    if missing:
        raise file.error(
            f"the columns {', '.join(missing)} are missing", place="line 1", remedy="keep LANL's columns"
        )
    rows = []
    for row in file.csv_rows(reader):
        if None in row:
            raise file.error(
                "the line has more fields than the header",
                place=f"line {reader.line_num}",
                remedy="correct it",
            )
        rows.append((f"line {reader.line_num}", {key: value.strip() for key, value in row.items()}))
    systems = Counter(row[_SYSTEM] for _, row in rows)
    if not systems:
        raise file.error("the file has no records", remedy="is it the right file?")
    if system is None and len(systems) > 1:
        raise file.error(
            f"the file has the systems {_listed(systems)}", remedy="choose one of them with --system"
        )
    if system is not None and system not in systems:
        raise file.error(
            f"the file has no system {system}", remedy=f"choose one with --system: {_listed(systems)}"
        )
    chosen = next(iter(systems)) if system is None else system
    return [(place, row) for place, row in rows if row[_SYSTEM] == chosen]


def _listed(systems: Counter[str]) -> str:
    return ", ".join(f"{name} ({count} failures)" for name, count in systems.most_common())


def _node_numbers(
    file: TraceFile, rows: list[tuple[str, dict[str, str]]], failed: set[int], nodes: int | None
) -> list[int]:
    """Return the numbers of all nodes: those that failed, and the lowest others.

    Systems 11 and 14 have nodes with numbers above their number of nodes.
    """
    place, row = rows[0]
    count = (
        file.node_count(file.number(row[_NODES], "number of nodes", place), place) if nodes is None else nodes
    )
    if count < len(failed):
        raise file.error(
            f"{len(failed)} nodes failed, more than {count}",
            place=place,
            remedy="give the number of all nodes with --nodes",
        )
    others = (number for number in range(count) if number not in failed)
    return sorted([*failed, *(number for number, _ in zip(others, range(count - len(failed)), strict=False))])


def _time(file: TraceFile, text: str, place: str) -> datetime:
    try:
        return datetime.strptime(text, _TIME)
    except ValueError:
        raise file.error(
            f"{text!r} is not a time", place=place, remedy="write month/day/year hour:minute"
        ) from None
