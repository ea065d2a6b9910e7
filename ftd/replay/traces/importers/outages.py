"""Nodes for traces that hold the failures and the repairs of nodes.

A node is removed when its first failure begins and added when the last one that overlaps with it has ended. A
failure of length 0 is a restart of the node: it is removed and added in one instant.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ftd.replay.traces.importers.trace_file import Record, TraceFile
from ftd.replay.traces.trace import TraceEvent


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """Begin or end of a failure, as the file has it."""

    place: str
    at_s: float
    node: str
    begins: bool


def nodes_of_faults(file: TraceFile, nodes: Sequence[str], faults: Iterable[Fault]) -> list[Record]:
    """Return the events of these nodes: all are there at the start, and go and return with their failures.

    :param faults: in the order of their times; the begin of a failure of length 0 comes before its end.
    :raises TraceError: a failure ends that did not begin.
    """
    records = [Record(place="the start", event=TraceEvent(at_s=0.0, kind="add", node=node)) for node in nodes]
    failures: Counter[str] = Counter()
    for fault in faults:
        if not fault.begins and not failures[fault.node]:
            raise file.error(
                f"a failure of {fault.node} ends that did not begin",
                place=fault.place,
                remedy="add its begin, or leave its end out",
            )
        failures[fault.node] += 1 if fault.begins else -1
        if failures[fault.node] == int(fault.begins):
            event = TraceEvent(at_s=fault.at_s, kind="remove" if fault.begins else "add", node=fault.node)
            records.append(Record(place=fault.place, event=event))
    return records
