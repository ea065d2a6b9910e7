"""The availability trace: which nodes exist at which time.

A trace holds a cluster's additions and removals of nodes, with times in seconds from its start. All importers
and the generator produce it, and every policy of the replay reads it.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from ftd.errors import ConfigurationError

EventKind = Literal["add", "remove"]

MOST_NODES = 100_000
"""Largest number of nodes that is read from a file or generated; more are a mistake, and would fill the memory."""
YEAR_S = 365.25 * 86_400
MOST_YEARS = 100
"""Greatest length of a trace; a longer one is a mistake in a unit, and its replay would not end."""


class TraceError(ConfigurationError):
    """Trace that cannot be replayed as it is. It names the file, the place in the file, and a remedy.

    :param event: index among the trace's events of the one that is wrong, if the error is about one.
    """

    def __init__(
        self,
        problem: str,
        *,
        field: str | None = None,
        remedy: str | None = None,
        event: int | None = None,
    ) -> None:
        super().__init__(problem, field=field, remedy=remedy)
        self.event = event


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceEvent:
    """Addition or removal of one node."""

    at_s: float
    """Time in seconds from the trace's start."""
    kind: EventKind
    node: str
    notice_s: float = 0.0
    """Warning before a removal in seconds, as spot instances give it; 0 for a failure without warning."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceChange:
    """All events of one instant, which a policy answers together. The removals come before the additions.

    A node that is in both lists restarted: what it held is lost.
    """

    at_s: float
    removed: tuple[str, ...]
    added: tuple[str, ...]
    notice_s: float
    """Shortest warning before the removals in seconds; 0 without removals."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """Nodes of a cluster over time.

    :raises TraceError: times are not sorted, negative or no numbers; a node is removed that is not there, or
        added though it is there; a node has no name; there is no node at the start; the trace ends before its
        last event, or later than ``MOST_YEARS`` after its start.
    """

    name: str
    source: str
    """Origin: the file and its format, or the failure model with its seed."""
    events: tuple[TraceEvent, ...]
    """Events in the order of their times; those of one instant in the order in which they were recorded."""
    end_s: float
    """Time in seconds at which the replay ends."""
    notes: tuple[str, ...] = ()
    """Sentences about what the importer assumed or left out. Whoever shows results shows them too."""

    def __post_init__(self) -> None:
        _check_events(self.events)
        if not self.initial_nodes:
            raise TraceError("no node is there at the start", remedy="begin with the nodes that are there")
        if not math.isfinite(self.end_s) or self.end_s < self.events[-1].at_s:
            raise TraceError(
                f"the end, {self.end_s} s, is before the last event at {self.events[-1].at_s} s",
                remedy="cut the trace with Trace.until",
            )
        if self.end_s > MOST_YEARS * YEAR_S:
            raise TraceError(
                f"the trace has {self.end_s / YEAR_S:.3g} years, more than {MOST_YEARS}",
                remedy="check the unit of its times",
            )

    @property
    def initial_nodes(self) -> tuple[str, ...]:
        """Nodes that are there after the events of time 0, in the order of their addition."""
        present: dict[str, None] = {}
        for event in itertools.takewhile(lambda event: event.at_s == 0, self.events):
            _apply(present, event)
        return tuple(present)

    @property
    def changes(self) -> tuple[TraceChange, ...]:
        """Changes after time 0, one for each instant at which the set of nodes changes or a node restarts."""
        present: dict[str, None] = {}
        found = []
        for at_s, events in itertools.groupby(self.events, key=lambda event: event.at_s):
            was_there: dict[str, bool] = {}
            lost: dict[str, float] = {}
            came: dict[str, None] = {}
            for event in events:
                was_there.setdefault(event.node, event.node in present)
                _apply(present, event)
                _apply(came, event)
                if event.kind == "remove" and was_there[event.node]:
                    lost.setdefault(event.node, event.notice_s)
            if at_s > 0 and (lost or came):
                found.append(
                    TraceChange(
                        at_s=at_s,
                        removed=tuple(lost),
                        added=tuple(came),
                        notice_s=min(lost.values(), default=0.0),
                    )
                )
        return tuple(found)

    def node_counts(self) -> list[tuple[float, int]]:
        """Return the number of nodes over time: pairs of a time in seconds and the number from then on."""
        count = len(self.initial_nodes)
        counts = [(0.0, count)]
        for change in self.changes:
            count += len(change.added) - len(change.removed)
            counts.append((change.at_s, count))
        return counts

    @property
    def most_nodes(self) -> int:
        """Largest number of nodes that are there at the same time."""
        return max(count for _, count in self.node_counts())

    @property
    def fewest_nodes(self) -> int:
        """Smallest number of nodes that are there at the same time."""
        return min(count for _, count in self.node_counts())

    @property
    def mean_nodes(self) -> float:
        """Mean number of nodes over time."""
        counts = self.node_counts()
        if self.end_s == 0:
            return float(counts[0][1])
        ends = [at_s for at_s, _ in counts[1:]] + [self.end_s]
        pairs = zip(counts, ends, strict=True)
        return sum(count * (end_s - at_s) for (at_s, count), end_s in pairs) / self.end_s

    @property
    def removals(self) -> int:
        """Number of removals after time 0, also of nodes that had come in the same instant."""
        return sum(event.kind == "remove" and event.at_s > 0 for event in self.events)

    def until(self, end_s: float) -> "Trace":
        """Return the trace cut or extended to end at ``end_s``; after the last event the nodes stay.

        :raises TraceError: the end is not a time after the start.
        """
        if not math.isfinite(end_s) or end_s <= 0:
            raise TraceError(f"a trace cannot end at {end_s} s", remedy="give a duration above 0")
        return replace(
            self, events=tuple(event for event in self.events if event.at_s <= end_s), end_s=float(end_s)
        )


def _check_events(events: Sequence[TraceEvent]) -> None:
    """Check the events of a trace, in their order.

    :raises TraceError: names the index of the wrong event.
    """
    if not events:
        raise TraceError("the trace has no events", remedy="it needs at least the nodes at the start")
    present: dict[str, None] = {}
    previous_s = -math.inf
    for index, event in enumerate(events):
        if event.at_s < previous_s:
            raise TraceError(
                f"the times are not sorted: this one is {previous_s - event.at_s:.10g} s before the previous one",
                remedy="sort the records by time",
                event=index,
            )
        if not math.isfinite(event.at_s) or event.at_s < 0:
            raise TraceError(
                f"{event.at_s} is not a time", remedy="write seconds from the start, at least 0", event=index
            )
        if not math.isfinite(event.notice_s) or event.notice_s < 0:
            raise TraceError(
                f"{event.notice_s} is not a notice", remedy="write seconds, at least 0", event=index
            )
        if event.kind == "add" and event.notice_s:
            raise TraceError(
                "an addition has no notice", remedy="give the notice with the removal", event=index
            )
        if not event.node:
            raise TraceError("the node has no name", remedy="name the node", event=index)
        if event.kind == "remove" and event.node not in present:
            raise TraceError(
                f"{event.node} is removed but is not there",
                remedy="add it before, or leave the removal out",
                event=index,
            )
        if event.kind == "add" and event.node in present:
            raise TraceError(
                f"{event.node} is added but is there already",
                remedy="remove it before, or leave the addition out",
                event=index,
            )
        _apply(present, event)
        previous_s = event.at_s


def _apply(present: dict[str, None], event: TraceEvent) -> None:
    """Add the event's node to the nodes that are there, or remove it."""
    if event.kind == "add":
        present[event.node] = None
    else:
        present.pop(event.node, None)
