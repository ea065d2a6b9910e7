"""What the dashboard knows: the newest state, the last events, the trend, the recoveries; all of it bounded.

It is fed with what the coordinator publishes and tells nothing else. ``document`` is all of it, for a
page that was just opened; ``take_delta`` is what is other since it was last asked, for all pages at once:
whoever has the document and every delta behind it has the same as whoever asks for the document now.
"""

from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from ftd.observe.dashboard.buckets import buckets
from ftd.observe.dashboard.entries import MOST_REASON, entry_of, seconds
from ftd.observe.dashboard.recovery import DoneRecoveries, course_json
from ftd.observe.dashboard.trend import Trend
from ftd.observe.run_model import (
    Evaluated,
    Fact,
    JobSubmitted,
    PhaseEnded,
    RecoveryCompleted,
    RolledBack,
    RunModel,
    StepCommitted,
    mark_unreachable,
)
from ftd.observe.view.story import ChapterIndex
from ftd.observe.view.text import QUIET_EVENTS
from ftd.transport.wire.public import EventMessage

Json = dict[str, Any]

MOST_EVENTS = 10_000
FIRST_EVENTS = 300
"""Of these, in the document; older ones are asked for page by page."""
MOST_IN_DELTA = 300
"""Who misses more between two deltas is better off with the document."""
PAGE = 500
MOST_MARKS = 300
MOST_EVALUATIONS = 100
MOST_LAYOUTS = 4
MOST_KEPT = 1000
"""Of what the model of the run keeps."""
_NODE_FIELDS = ("state", "devices", "host", "in_plan", "draining", "speed")
"""Without what changes with every step of every node."""
_UNSHOWN = frozenset({"at", "nodes", "schema"})
_MARKS = {
    "NodeLost": "failure",
    "TrainerLost": "failure",
    "RolledBack": "rollback",
    "ClusterPaused": "pause",
    "JobFailed": "failure",
    "NodeJoined": "join",
    "NodeRecovered": "join",
}


class DashboardModel:
    """See the module. Not for several threads."""

    def __init__(self) -> None:
        self.trend = Trend()
        self.recoveries = DoneRecoveries()
        self._run = RunModel(most=MOST_KEPT)
        self._state: Json = {}
        self._nodes: dict[str, Json] = {}
        self._events: deque[Json] = deque(maxlen=MOST_EVENTS)
        self._marks: deque[Json] = deque(maxlen=MOST_MARKS)
        self._evaluations: list[Json] = []
        self._index = ChapterIndex()
        self._number = 0
        self._mark_number = 0
        self._layouts: dict[int, list[Json]] = {}
        self._buddies: dict[str, str] = {}
        self._where: Json | None = None
        self._where_of: Json | None = None
        self._told = _Told()

    # --- what is published ---------------------------------------------------------------------------

    def on_state(self, state: Mapping[str, Any]) -> None:
        """The cluster's public state, whole. It belongs to this model from now on.

        That nobody leads says nothing of the rest, which stays as it was told last.
        """
        if state.get("phase") == "UNREACHABLE":
            self._state = mark_unreachable(self._state, state["reason"])
            return
        before, snapshot = self._state.get("snapshot"), state["snapshot"]
        if before and snapshot and {**snapshot, "at": before["at"]} == before:
            snapshot = before  # The moment is reckoned anew each time, to the millisecond.
        self._nodes = state["nodes"]
        self._state = {key: value for key, value in state.items() if key not in _UNSHOWN}
        self._state["snapshot"] = snapshot
        if state["pipelines"]:
            self._keep_layout(state["generation"], state["pipelines"])
        if snapshot is None or snapshot is not self._where_of:
            self._where_of = snapshot
            self._where = self._placed(snapshot)

    def on_event(self, message: EventMessage, *, own: bool) -> None:
        """:param own: the coordinator's; what a node says is listed, and believed of chaos alone."""
        if own or message.event == "ChaosInjected":
            fact = self._run.on_event(msgspec.structs.asdict(message), seconds(message.at))
            if fact is not None and own:
                self._follow(fact, message)
        if message.event in QUIET_EVENTS:
            return
        self._number += 1
        self._events.append(entry_of(message, self._number, self._index))

    def restore(self, events: Iterable[EventMessage], steps: Iterable[Json], stride: int) -> None:
        """What the journal remembers, before anything else is told.

        :param steps: rows of ``Journal.sampled_steps``, each for ``stride`` steps.
        """
        for message in events:
            self.on_event(message, own=message.source == "coordinator")
        self._run.current_recovery = None  # Whatever was under way: the coordinator begins anew.
        for row in steps:
            details = row["details"]
            self.trend.commit(
                row["step"],
                seconds(row["at"]),
                details.get("loss"),
                details.get("step_s") or 0.0,
                details.get("samples_per_s"),
                stride,
                tokens_per_s=details.get("tokens_per_s"),
                learning_rate=details.get("learning_rate"),
            )

    def _follow(self, fact: Fact, message: EventMessage) -> None:
        match fact:
            case StepCommitted():
                self.trend.commit(
                    fact.step,
                    fact.at,
                    fact.loss,
                    fact.step_s or 0.0,
                    fact.samples_per_s,
                    tokens_per_s=fact.tokens_per_s,
                    learning_rate=fact.learning_rate,
                )
            case Evaluated():
                self._keep_evaluation(fact)
            case RolledBack():
                self.trend.roll_back(fact.to_step)
                self._evaluations = [one for one in self._evaluations if one["step"] <= fact.to_step]
            case JobSubmitted():
                self.trend.clear()
                self._evaluations = []
            case PhaseEnded(event="PlanChosen", generation=int(generation)):
                self._keep_layout(generation, fact.pipelines)
            case RecoveryCompleted():
                self.recoveries.add(fact, message.details["recovery"])
            case Fact(event="SnapshotCompleted"):
                self._buddies, self._where_of = message.details["replica_peers"], None
        if (kind := _MARKS.get(message.event)) is not None:
            self._mark_number += 1
            self._marks.append(
                {
                    "n": self._mark_number,
                    "at": fact.at,
                    "kind": kind,
                    "event": message.event,
                    "node": message.node,
                    "said": message.reason[:MOST_REASON],
                }
            )

    def _keep_evaluation(self, fact: Evaluated) -> None:
        """A step's evaluation, in a new list, so that a change is noticed; when full, every other one goes."""
        kept = [one for one in self._evaluations if one["step"] < fact.step]
        if len(kept) >= MOST_EVALUATIONS:
            kept = kept[1::2]
        shown = {"step": fact.step, "at": fact.at, "loss": fact.loss, "metrics": fact.metrics}
        self._evaluations = [*kept, shown]

    def _keep_layout(self, generation: int, pipelines: list[Json]) -> None:
        self._layouts[generation] = pipelines
        kept = self._state.get("snapshot")
        for old in sorted(self._layouts)[:-MOST_LAYOUTS]:
            if kept is None or old != kept["generation"]:
                del self._layouts[old]

    def _placed(self, snapshot: Json | None) -> Json | None:
        """Where the parts of the newest snapshot are; no buckets where its layout is not known any more."""
        if snapshot is None:
            return None
        layout = self._layouts.get(snapshot["generation"])
        return {
            "step": snapshot["step"],
            "missing": snapshot["missing"],
            "buckets": buckets(layout, snapshot["protection"], self._buddies) if layout else None,
        }

    @property
    def running(self) -> Json | None:
        """The recovery that is under way, as the page shows it."""
        return course_json(self._run.current_recovery)

    # --- what pages are told ---------------------------------------------------------------------------

    def document(self) -> Json:
        """All of it; the list of events is the end of what there is."""
        return {
            "state": self._state,
            "nodes": {name: _node(node) for name, node in self._nodes.items()},
            "where": self._where,
            "events": list(self._events)[-FIRST_EVENTS:],
            "oldest": self._events[0]["n"] if self._events else self._number + 1,
            "trend": [0, self.trend.points],
            "marks": list(self._marks),
            "evaluations": self._evaluations,
            "recovery": self.running,
            "recoveries": list(self.recoveries.done),
        }

    def events_before(self, number: int) -> list[Json]:
        """A page of older events, oldest first."""
        newest = self._number
        skipped = max(0, newest - number + 1)
        end = max(0, len(self._events) - skipped)
        return [self._events[index] for index in range(max(0, end - PAGE), end)]

    def take_delta(self) -> Json | None:
        """What is new or other since the last call, and nothing else; ``None``: nothing."""
        told = self._told
        delta: Json = {}
        changed = {k: v for k, v in self._state.items() if k not in told.state or told.state[k] != v}
        if changed:
            delta["state"] = changed
        if nodes := self._nodes_since(told.nodes):
            delta["nodes"] = nodes
        if self._where != told.where:
            delta["where"] = self._where
        if self._evaluations is not told.evaluations:
            delta["evaluations"] = self._evaluations
        if (count := self._number - told.events) > 0:
            delta["events"] = [
                self._events[i] for i in range(-min(count, MOST_IN_DELTA, len(self._events)), 0)
            ]
        if (fresh := self.trend.take()) is not None:
            delta["trend"] = fresh
        if (count := self._mark_number - told.marks) > 0:
            delta["marks"] = list(self._marks)[-min(count, MOST_MARKS) :]
        running = self.running
        if running != told.recovery:
            delta["recovery"] = running
        if (count := self.recoveries.count - told.recoveries) > 0:
            delta["recoveries"] = list(self.recoveries.done)[-min(count, len(self.recoveries.done)) :]
        self._told = _Told(
            state=self._state,
            nodes=self._nodes,
            where=self._where,
            evaluations=self._evaluations,
            events=self._number,
            marks=self._mark_number,
            recovery=running,
            recoveries=self.recoveries.count,
        )
        return delta or None

    def _nodes_since(self, before: Mapping[str, Json]) -> Json:
        """Node → what is shown of it, or ``None`` where it is gone."""
        if before is self._nodes:
            return {}
        other: Json = {}
        for name, node in self._nodes.items():
            old = before.get(name)
            if old is None or any(old[field] != node[field] for field in _NODE_FIELDS):
                other[name] = _node(node)
        return other | dict.fromkeys(before.keys() - self._nodes.keys())


class _Told:
    """What the last delta went up to."""

    def __init__(self, **told: Any) -> None:
        self.state: Json = told.get("state", {})
        self.nodes: dict[str, Json] = told.get("nodes", {})
        self.where: Json | None = told.get("where")
        self.evaluations: list[Json] | None = told.get("evaluations")
        self.events: int = told.get("events", 0)
        self.marks: int = told.get("marks", 0)
        self.recovery: Json | None = told.get("recovery")
        self.recoveries: int = told.get("recoveries", 0)


def _node(node: Mapping[str, Any]) -> Json:
    return {field: node[field] for field in _NODE_FIELDS}
