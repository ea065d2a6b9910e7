"""Nodes for traces that hold the failures and the repairs of nodes.

A node is removed when its first failure begins and added when the last one that overlaps with it has ended. A
failure of length 0 is a restart of the node: it is removed and added in one instant.
"""

from collections import Counter
from collections.abc import Iterable, Sequence

from ftd.replay.traces.importers.trace_file import Record, TraceFile
from ftd.replay.traces.trace import TraceEvent


def nodes_of_faults(file: TraceFile, nodes: Sequence[str], faults: Iterable[Record]) -> list[Record]:
    """Return the events of these nodes: all are there at the start, and go and return with their failures.

    :param faults: the begin of each failure as a removal, and its end as an addition, in the order of their times;
        the begin of a failure of length 0 comes before its end.
    :raises TraceError: a failure ends that did not begin.
    """
    records = [Record(place="the start", event=TraceEvent(at_s=0.0, kind="add", node=node)) for node in nodes]
    failures: Counter[str] = Counter()
    for fault in faults:
        node, begins = fault.event.node, fault.event.kind == "remove"
        if not begins and not failures[node]:
            raise file.error(
                f"a failure of {node} ends that did not begin",
                place=fault.place,
                remedy="add its begin, or leave its end out",
            )
        failures[node] += 1 if begins else -1
        if failures[node] == int(begins):
            records.append(fault)
    return records
