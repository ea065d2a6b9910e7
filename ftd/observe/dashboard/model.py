"""The dashboard's data: newest state, last events, trend and recoveries, all bounded.

It contains only what the coordinator publishes. ``document`` returns all of it, for a page that was just
opened. ``take_delta`` returns what changed since its previous call, for all pages at once. A document plus
every later delta equals the document at that time.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from ftd.observe.dashboard.buckets import list_buckets
from ftd.observe.dashboard.entries import MAX_REASON, Json, NumberedEntries, build_entry, seconds
from ftd.observe.dashboard.recovery import encode_completed, encode_recovery
from ftd.observe.dashboard.trend import Trend
from ftd.observe.run_model import (
    EvaluatedFact,
    Fact,
    JobSubmittedFact,
    PhaseEndedFact,
    RecoveryCompletedFact,
    RolledBackFact,
    RunModel,
    StepCommittedFact,
    mark_unreachable,
)
from ftd.observe.view.story import ChapterIndex
from ftd.observe.view.text import QUIET_EVENTS
from ftd.transport.wire.public import EventMessage

MAX_EVENTS = 10_000
FIRST_EVENTS = 300
"""Number of the newest events in the document; pages fetch older ones page by page."""
MAX_IN_DELTA = 300
"""Largest number of events in a delta; a page that misses more fetches the document."""
PAGE = 500
MAX_MARKS = 300
MAX_RECOVERIES = 50
MAX_EVALUATIONS = 100
MAX_LAYOUTS = 4
MAX_ENTRIES = 1000
"""Number of entries that the run model keeps."""
_NODE_FIELDS = ("state", "devices", "host", "in_plan", "draining", "drain_waits", "speed", "quarantine")
"""Fields of a node that are shown; fields that change with every step are left out."""
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
    """Data of one dashboard. Its methods must be called on one thread."""

    def __init__(self) -> None:
        self.trend = Trend()
        self.recoveries = NumberedEntries(MAX_RECOVERIES)
        self._run = RunModel(most=MAX_ENTRIES)
        self._state: Json = {}
        self._nodes: dict[str, Json] = {}
        self._events = NumberedEntries(MAX_EVENTS)
        self._marks = NumberedEntries(MAX_MARKS)
        self._evaluations: list[Json] = []
        self._index = ChapterIndex()
        self._layouts: dict[int, list[Json]] = {}
        self._replica_peers: dict[str, str] = {}
        self._snapshot_layout: Json | None = None
        self._snapshot_layout_source: Json | None = None
        self._sent_state: Json = {}
        self._sent_nodes: dict[str, Json] = {}
        self._sent: Json = {"snapshot_layout": None, "evaluations": None, "recovery": None}
        """The parts that deltas replace as a whole, as of the last delta."""

    # --- input ---------------------------------------------------------------------------------------

    def on_state(self, state: Mapping[str, Any]) -> None:
        """Replace the cluster's public state, which this model takes over from the caller.

        A state without a coordinator changes only phase, reason and leader; the rest stays as last
        published.
        """
        if state.get("phase") == "UNREACHABLE":
            self._state = mark_unreachable(self._state, state["reason"])
            return
        before, snapshot = self._state.get("snapshot"), state["snapshot"]
        if before and snapshot and {**snapshot, "at": before["at"]} == before:
            snapshot = before  # The timestamp is recomputed each time and varies by milliseconds.
        self._nodes = state["nodes"]
        self._state = {key: value for key, value in state.items() if key not in _UNSHOWN}
        self._state["snapshot"] = snapshot
        if state["pipelines"]:
            self._keep_layout(state["generation"], state["pipelines"])
        if snapshot is None or snapshot is not self._snapshot_layout_source:
            self._snapshot_layout_source = snapshot
            self._snapshot_layout = self._locate(snapshot)

    def on_event(self, message: EventMessage, *, own: bool) -> None:
        """Add an event. Events of nodes are listed, but only ``ChaosInjected`` also updates the model.

        :param own: whether the coordinator published it.
        """
        if own or message.event == "ChaosInjected":
            fact = self._run.on_event(msgspec.structs.asdict(message), seconds(message.at))
            if fact is not None and own:
                self._apply(fact, message)
        if message.event in QUIET_EVENTS:
            return
        self._events.add(build_entry(message, self._index))

    def restore(self, events: Iterable[EventMessage], steps: Iterable[Json], stride: int) -> None:
        """Load the journal's events and steps before anything else arrives.

        :param steps: rows of ``Journal.sampled_steps``, each of which stands for ``stride`` steps.
        """
        for message in events:
            self.on_event(message, own=message.source == "coordinator")
        self._run.current_recovery = None  # No recovery continues: the coordinator has just started.
        for row in steps:
            self._add_step(row["step"], seconds(row["at"]), row["details"], stride)

    def _apply(self, fact: Fact, message: EventMessage) -> None:
        match fact:
            case StepCommittedFact():
                self._add_step(fact.step, fact.at, message.details)
            case EvaluatedFact():
                self._keep_evaluation(fact)
            case RolledBackFact():
                self.trend.roll_back(fact.to_step)
                self._evaluations = [one for one in self._evaluations if one["step"] <= fact.to_step]
            case JobSubmittedFact():
                self.trend.clear()
                self._evaluations = []
            case PhaseEndedFact(event="PlanChosen", generation=int(generation)):
                self._keep_layout(generation, fact.pipelines)
            case RecoveryCompletedFact() if not fact.recovery.is_start:
                self.recoveries.add(encode_completed(fact, message.details["recovery"]))
            case Fact(event="SnapshotCompleted"):
                self._replica_peers, self._snapshot_layout_source = message.details["replica_peers"], None
        if (kind := _MARKS.get(message.event)) is not None:
            self._marks.add(
                {
                    "at": fact.at,
                    "kind": kind,
                    "event": message.event,
                    "node": message.node,
                    "text": message.reason[:MAX_REASON],
                }
            )

    def _add_step(self, step: int, at_s: float, details: Json, stride: int = 1) -> None:
        self.trend.commit(
            step,
            at_s,
            details.get("loss"),
            details.get("step_s") or 0.0,
            details.get("samples_per_s"),
            stride,
            tokens_per_s=details.get("tokens_per_s"),
            learning_rate=details.get("learning_rate"),
        )

    def _keep_evaluation(self, fact: EvaluatedFact) -> None:
        """Add an evaluation to a new list, so that the change is noticed; a full list is thinned by half."""
        retained = [one for one in self._evaluations if one["step"] < fact.step]
        if len(retained) >= MAX_EVALUATIONS:
            retained = retained[1::2]
        shown = {"step": fact.step, "at": fact.at, "loss": fact.loss, "metrics": fact.metrics}
        self._evaluations = [*retained, shown]

    def _keep_layout(self, generation: int, pipelines: list[Json]) -> None:
        self._layouts[generation] = pipelines
        retained = self._state.get("snapshot")
        for old in sorted(self._layouts)[:-MAX_LAYOUTS]:
            if retained is None or old != retained["generation"]:
                del self._layouts[old]

    def _locate(self, snapshot: Json | None) -> Json | None:
        """Return where the parts of the newest snapshot are; without buckets if its pipelines are no longer
        known.
        """
        if snapshot is None:
            return None
        layout = self._layouts.get(snapshot["generation"])
        return {
            "step": snapshot["step"],
            "missing": snapshot["missing"],
            "buckets": list_buckets(layout, snapshot["protection"], self._replica_peers) if layout else None,
        }

    @property
    def current_recovery(self) -> Json | None:
        """The recovery in progress in the page's format."""
        return encode_recovery(self._run.current_recovery)

    # --- output --------------------------------------------------------------------------------------

    def document(self) -> Json:
        """Return all data; of the events, only the newest ones."""
        return {
            "state": self._state,
            "nodes": {name: _node(node) for name, node in self._nodes.items()},
            "snapshot_layout": self._snapshot_layout,
            "events": self._events.last(FIRST_EVENTS),
            "oldest": self._events.count - len(self._events.newest) + 1,
            "trend": [0, self.trend.points],
            "marks": list(self._marks.newest),
            "evaluations": self._evaluations,
            "recovery": self.current_recovery,
            "recoveries": list(self.recoveries.newest),
        }

    def events_before(self, number: int) -> list[Json]:
        """Return a page of events before ``number``, oldest first."""
        events = self._events.newest
        skipped = max(0, self._events.count - number + 1)
        end = max(0, len(events) - skipped)
        return [events[index] for index in range(max(0, end - PAGE), end)]

    def take_delta(self) -> Json | None:
        """Return what changed since the last call, or ``None`` if nothing did."""
        before = self._sent_state
        delta: Json = {
            "state": {k: v for k, v in self._state.items() if k not in before or before[k] != v},
            "nodes": self._nodes_since(self._sent_nodes),
            "events": self._events.take()[-MAX_IN_DELTA:],
            "trend": self.trend.take(),
            "marks": self._marks.take(),
            "recoveries": self.recoveries.take(),
        }
        delta = {part: changes for part, changes in delta.items() if changes}
        whole = {
            "snapshot_layout": self._snapshot_layout,
            "evaluations": self._evaluations,
            "recovery": self.current_recovery,
        }
        delta |= {part: content for part, content in whole.items() if content != self._sent[part]}
        self._sent_state, self._sent_nodes, self._sent = self._state, self._nodes, whole
        return delta or None

    def _nodes_since(self, before: Mapping[str, Json]) -> Json:
        """Return the shown fields of each changed node by name; ``None`` for a node that was removed."""
        if before is self._nodes:
            return {}
        changed_nodes: Json = {}
        for name, node in self._nodes.items():
            old = before.get(name)
            if old is None or any(old[field] != node[field] for field in _NODE_FIELDS):
                changed_nodes[name] = _node(node)
        return changed_nodes | dict.fromkeys(before.keys() - self._nodes.keys())


def _node(node: Mapping[str, Any]) -> Json:
    return {field: node[field] for field in _NODE_FIELDS}
