"""StepFun's fault trace of 400 GPU servers over 348 days (``stepfun-ai/InfiniteHBD-Trace``, SIGCOMM 2025).

A file is a JSON list of ``{"node_id", "event_time", "event_type", "fault_type"}``, sorted by ``event_time``, which
counts days from the start; ``event_type`` is ``fault_start`` or ``fault_end``. Only nodes that failed are named.
"""

from typing import Any, Literal

import msgspec

from ftd.replay.traces.importers.outages import nodes_of_faults
from ftd.replay.traces.importers.trace_file import ImportOptions, Record, TraceFile
from ftd.replay.traces.trace import Trace, TraceEvent

DAY_S = 86_400.0


class _FaultEvent(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    node_id: str
    event_time: float
    event_type: Literal["fault_start", "fault_end"]
    fault_type: Any = None


def is_infinitehbd(file: TraceFile) -> bool:
    """Return whether the file is a JSON list of faults."""
    return file.text.lstrip().startswith("[") and '"fault_start"' in file.text


def read_infinitehbd(file: TraceFile, options: ImportOptions) -> Trace:
    """Return the trace of a file of faults; ``options.nodes`` is the number of all nodes.

    :raises TraceError: names the entry.
    """
    faults = []
    for index, event in enumerate(file.decode_json(list[_FaultEvent])):
        place = f"entry {index}"
        days = file.number(str(event.event_time), "time in days", place)
        faults.append(
            Record(
                place=place,
                event=TraceEvent(
                    # The file has 4 decimals of a day, 8.64 s; milliseconds keep the binary rounding out of sight.
                    at_s=round(days * DAY_S, 3),
                    kind="remove" if event.event_type == "fault_start" else "add",
                    node=event.node_id,
                ),
            )
        )
    if not faults:
        raise file.error("the file has no faults", remedy="is it the right file?")
    named = list(dict.fromkeys(fault.event.node for fault in faults))
    count = len(named) if options.nodes is None else options.nodes
    if count < len(named):
        raise file.error(
            f"the file names {len(named)} nodes, more than {count}", remedy="give more with --nodes"
        )
    gaps = file.gap_notes(
        ((fault.place, fault.event.at_s) for fault in faults), options.max_gap_s, start_s=0.0
    )
    notes = gaps
    if options.nodes is None:
        notes += (
            f"Only the {len(named)} nodes that failed are in the trace; the number of all nodes was not given.",
        )
    nodes = named + [f"unfailing-{number}" for number in range(1, count - len(named) + 1)]
    records = nodes_of_faults(file, nodes, faults)
    return file.trace(records, description="infinitehbd", notes=notes)
