"""Bamboo's and Oobleck's traces, in the two formats that their public repositories have.

*Events* (Bamboo's ``traces/*.csv`` and, in the artifact of Oobleck, ``tools/simulator/traces/*.csv``): lines
``time in milliseconds,add or remove,node`` without a header. *Logs* (Bamboo's ``traces/gcloud/*.txt``): lines
``YYYY-MM-DD, HH:MM:SS, number of instances`` of a monitor, at irregular times.
"""

import re
from datetime import datetime

from ftd.replay.traces.importers.node_counts import CountSample, nodes_of_counts
from ftd.replay.traces.importers.trace_file import ImportOptions, Record, TraceFile
from ftd.replay.traces.trace import Trace, TraceEvent

_EVENT = re.compile(r"\d+\s*,\s*(add|remove)\s*,")
_SAMPLE = re.compile(r"(?P<time>\d{4}-\d\d-\d\d, \d\d:\d\d:\d\d), (?P<count>\d+)", re.ASCII)
_TIME = "%Y-%m-%d, %H:%M:%S"


def is_bamboo(file: TraceFile) -> bool:
    """Return whether the first line is an event with a time in milliseconds, or a sample of a monitor."""
    return _EVENT.match(file.lines[0]) is not None or _is_log(file)


def read_bamboo(file: TraceFile, options: ImportOptions) -> Trace:
    """Return the trace of a file of events or of a monitor's log.

    :raises TraceError: names the line.
    """
    return _read_log(file, options) if _is_log(file) else _read_events(file, options, "bamboo")


def read_oobleck(file: TraceFile, options: ImportOptions) -> Trace:
    """Return the trace of a file of events.

    :raises TraceError: names the line.
    """
    return _read_events(file, options, "oobleck")


def _is_log(file: TraceFile) -> bool:
    return _SAMPLE.fullmatch(file.lines[0].strip()) is not None


def _read_events(file: TraceFile, options: ImportOptions, description: str) -> Trace:
    records = []
    for number, line in enumerate(file.lines, start=1):
        place = f"line {number}"
        fields = [field.strip() for field in line.split(",")]
        if len(fields) != 3:
            raise file.error(
                f"the line has {len(fields)} fields and not the 3 of time in milliseconds, event and node",
                place=place,
                remedy="correct or remove the line",
            )
        time_ms, kind, node = fields
        at_s = file.number(time_ms, "time in milliseconds", place) / 1000
        event = TraceEvent(at_s=at_s, kind=file.event_kind(kind, place), node=node)
        records.append(Record(place=place, event=event))
    gaps = file.gap_notes(((record.place, record.event.at_s) for record in records), options.max_gap_s)
    return file.trace(records, description=description, notes=gaps)


def _read_log(file: TraceFile, options: ImportOptions) -> Trace:
    samples: list[CountSample] = []
    begin: datetime | None = None
    for number, line in enumerate(file.lines, start=1):
        place = f"line {number}"
        found = _SAMPLE.fullmatch(line.strip())
        try:
            at = datetime.strptime(found["time"], _TIME) if found else None
        except ValueError:
            at = None
        if found is None or at is None:
            raise file.error(
                f"{line!r} is not a sample", place=place, remedy="write YYYY-MM-DD, HH:MM:SS, number of nodes"
            )
        begin = begin or at
        at_s = (at - begin).total_seconds()
        if samples and at_s < samples[-1].at_s:
            raise file.error(
                f"the times are not sorted: {found['time']} is before the previous one",
                place=place,
                remedy="sort the samples by time; where two monitors overlap, leave one of them out",
            )
        samples.append(CountSample(place=place, at_s=at_s, count=int(found["count"])))
    records, notes = nodes_of_counts(file, samples)
    times = ((sample.place, sample.at_s) for sample in samples)
    gaps = file.gap_notes(times, options.max_gap_s, start_s=records[0].event.at_s)
    return file.trace(records, description="bamboo", end_s=samples[-1].at_s, notes=notes + gaps)
