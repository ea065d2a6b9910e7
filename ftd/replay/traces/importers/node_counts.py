"""Nodes for traces that hold only how many instances there were.

The nodes' names are synthetic: ``n0``, ``n1``, … in the order in which they come; no name is used twice. When the
number falls, the nodes that go are drawn at random from those that are there, because the file does not say which
went and a rule such as "the newest" would always hit the same pipelines. The drawing is seeded, so that each
reading of a file gives the same trace.
"""

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass

from ftd.replay.traces.importers.trace_file import Record, TraceFile
from ftd.replay.traces.trace import EventKind, TraceEvent

SEED = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CountSample:
    """Number of instances that a monitor saw at one time."""

    place: str
    at_s: float
    count: int


def nodes_of_counts(file: TraceFile, samples: Sequence[CountSample]) -> tuple[list[Record], tuple[str, ...]]:
    """Return the events of nodes that give these counts, and notes about what was assumed.

    The events begin with the first sample that has an instance.

    :raises TraceError: no sample has one, or one has too many.
    """
    used = list(itertools.dropwhile(lambda sample: sample.count == 0, samples))
    if not used:
        raise file.error("no sample has a node", remedy="use a file in which nodes come")
    drawing = random.Random(SEED)
    names = (f"n{number}" for number in itertools.count())
    present: list[str] = []
    records: list[Record] = []
    for sample in used:
        count = file.node_count(sample.count, sample.place)
        gone = drawing.sample(present, max(len(present) - count, 0))
        come = list(itertools.islice(names, max(count - len(present), 0)))
        present = [node for node in present if node not in gone] + come
        changes: list[tuple[str, EventKind]] = [(node, "remove") for node in gone] + [
            (node, "add") for node in come
        ]
        records += [
            Record(place=sample.place, event=TraceEvent(at_s=sample.at_s, kind=kind, node=node))
            for node, kind in changes
        ]
    notes = [
        "The file has only numbers of nodes: which nodes go is drawn at random, and their names are made up."
    ]
    if used[0] is not samples[0]:
        left_out_s = used[0].at_s - samples[0].at_s
        notes.append(f"The first {left_out_s:,.0f} s without a node are left out.")
    return records, tuple(notes)
