"""What was seen while a scenario was played: events and states with the moments at which they came."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ftd.faults.chaos.values import Fault
from ftd.observe.run_model import RecoveryDetails, RunModel, StepCommittedFact

Json = dict[str, Any]


@dataclass(slots=True, kw_only=True)
class InjectedFault:
    """A fault that was carried out, or could not be."""

    fault: Fault
    at_s: float
    open_generation: int
    """A recovery of this generation or a later one can be this fault's."""
    nodes: tuple[str, ...] = ()
    over_at_s: float = 0.0
    problem: str = ""
    """Why it could not be done."""


class ScenarioRecord:
    """Fed with ``on_event``, ``on_state`` and ``on_struck``; times are seconds since the scenario began."""

    def __init__(self, *, state: Json | None = None, baseline: dict[int, float] | None = None) -> None:
        """:param baseline: the losses of a run without faults, where one was made."""
        self._run = RunModel()
        self.on_state(state or {})
        self.baseline = baseline or {}
        self.events: list[tuple[float, Json]] = []
        """Without ``StepCommitted``; each once."""
        self.struck: dict[str, InjectedFault] = {}

    @property
    def state(self) -> Mapping[str, Any]:
        """The cluster's newest state."""
        return self._run.state

    @property
    def losses(self) -> dict[int, float]:
        """Loss of each committed step, as it was computed last."""
        return {step: one.loss for step, one in self._run.steps.items() if one.loss is not None}

    @property
    def steps(self) -> int:
        """How many commits were seen."""
        return self._run.commits

    @property
    def ended(self) -> str:
        """The event that ended the job; empty while it goes on."""
        return self._run.ended.event if self._run.ended is not None else ""

    def on_state(self, state: Mapping[str, Any]) -> None:
        """Take the cluster's state."""
        self._run.on_state(state)

    def on_event(self, event: Json, at_s: float) -> None:
        """Take an event, which may come twice: QoS 1 repeats it, and so does the journal."""
        fact = self._run.on_event(event, at_s)
        if fact is not None and not isinstance(fact, StepCommittedFact):
            self.events.append((at_s, event))

    def on_struck(self, fault: Fault, at_s: float, nodes: tuple[str, ...] = ()) -> InjectedFault:
        """It is about to happen."""
        run = self._run
        generation = max(run.started_generation, int(run.state.get("generation") or 0))
        under_way = run.started_generation > run.completed_generation
        found = InjectedFault(
            fault=fault, at_s=at_s, nodes=nodes, open_generation=generation if under_way else generation + 1
        )
        self.struck[fault.id] = found
        return found

    def since(self, at_s: float, name: str) -> list[tuple[float, Json]]:
        """Return the events of this name from a moment on."""
        return [(at, e) for at, e in self.events if at >= at_s and e["event"] == name]

    def recoveries(self, struck: Iterable[InjectedFault]) -> list[tuple[float, RecoveryDetails]]:
        """Return those that may come of any of these faults, with the moment of their completion."""
        since_s, generation = min(((one.at_s, one.open_generation) for one in struck), default=(0.0, 0))
        return [
            (one.at, one.recovery)
            for one in self._run.recoveries.values()
            if one.at >= since_s and one.recovery.generation >= generation
        ]
