"""What was seen while a scenario was played: events and states with the moments at which they came."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ftd.chaos.values import Fault

Json = dict[str, Any]
ENDS = ("JobFinished", "JobFailed", "JobStopped")


@dataclass(slots=True, kw_only=True)
class Struck:
    """A fault that was carried out, or could not be."""

    fault: Fault
    at_s: float
    open_generation: int
    """A recovery of this generation or a later one can be this fault's."""
    nodes: tuple[str, ...] = ()
    over_at_s: float = 0.0
    problem: str = ""
    """Why it could not be done."""


@dataclass(slots=True, kw_only=True)
class Record:
    """Fed with ``on_event``, ``on_state``, ``on_struck``; times are seconds since the scenario began."""

    events: list[tuple[float, Json]] = field(default_factory=list)
    """Without ``StepCommitted``; each once."""
    losses: dict[int, float] = field(default_factory=dict)
    """Of each committed step, as it was computed last."""
    state: Mapping[str, Any] = field(default_factory=dict)
    struck: dict[str, Struck] = field(default_factory=dict)
    baseline: dict[int, float] = field(default_factory=dict)
    """Losses of a run without faults, where one was made."""
    steps: int = 0
    """How many commits were seen."""
    _seen: set[tuple[Any, ...]] = field(default_factory=set)
    _started: int = 0
    _completed: int = 0

    def on_event(self, event: Json, at_s: float) -> None:
        """QoS 1 may bring one twice, and the journal again."""
        name, details = event.get("event"), event.get("details") or {}
        identity = name, event.get("cause"), event.get("monotonic"), event.get("step")
        if identity in self._seen:
            return
        self._seen.add(identity)
        if name == "StepCommitted":
            self.steps += 1
            if (loss := details.get("loss")) is not None:
                self.losses[event["step"]] = loss
            return
        self.events.append((at_s, event))
        if name == "GenerationStarted":
            self._started = max(self._started, event.get("generation") or 0)
        elif name == "RecoveryCompleted":
            self._completed = max(self._completed, details["recovery"]["generation"])

    def on_struck(self, fault: Fault, at_s: float, nodes: tuple[str, ...] = ()) -> Struck:
        """It is about to happen."""
        generation = max(self._started, int(self.state.get("generation") or 0))
        found = Struck(
            fault=fault,
            at_s=at_s,
            nodes=nodes,
            open_generation=generation if self._started > self._completed else generation + 1,
        )
        self.struck[fault.id] = found
        return found

    @property
    def ended(self) -> str:
        """The event that ended the job; empty while it goes on."""
        return next((e["event"] for _, e in self.events if e["event"] in ENDS), "")

    def since(self, at_s: float, name: str) -> list[tuple[float, Json]]:
        return [(at, e) for at, e in self.events if at >= at_s and e["event"] == name]

    def recoveries(self, struck: Iterable[Struck]) -> list[tuple[float, Json]]:
        """Those that may come of any of these faults: moment and ``recovery``."""
        since = min(((one.at_s, one.open_generation) for one in struck), default=(0.0, 0))
        return [
            (at, e["details"]["recovery"])
            for at, e in self.since(since[0], "RecoveryCompleted")
            if e["details"]["recovery"]["generation"] >= since[1]
        ]
