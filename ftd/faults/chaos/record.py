"""The record of what was observed while a scenario was played: events and states, with their times."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ftd.faults.chaos.values import Fault
from ftd.observe.run_model import RecoveryDetails, RunModel, StepCommittedFact

Json = dict[str, Any]


@dataclass(slots=True, kw_only=True)
class InjectedFault:
    """A fault that was injected, or that could not be."""

    fault: Fault
    at_s: float
    open_generation: int
    """A recovery of this generation or a later one may be caused by this fault."""
    nodes: tuple[str, ...] = ()
    over_at_s: float = 0.0
    problem: str = ""
    """Reason why the fault could not be injected; empty if it was."""


class ScenarioRecord:
    """The record of all observations in a scenario. Feed it with ``on_event``, ``on_state`` and
    ``on_injected``; times are seconds since the scenario's start.
    """

    def __init__(self, *, baseline: dict[int, float] | None = None) -> None:
        """:param baseline: the losses of a run without faults, if there was one."""
        self._run = RunModel()
        self.baseline = baseline or {}
        self.events: list[tuple[float, Json]] = []
        """All events but ``StepCommitted``, each once, with their times."""
        self.injected: dict[str, InjectedFault] = {}

    @property
    def state(self) -> Mapping[str, Any]:
        """The cluster's newest state."""
        return self._run.state

    @property
    def losses(self) -> dict[int, float]:
        """The loss of each committed step, as it was computed last."""
        return {step: one.loss for step, one in self._run.steps.items() if one.loss is not None}

    @property
    def commits(self) -> int:
        """The number of commits that were observed."""
        return self._run.commits

    @property
    def end_event(self) -> str:
        """The event that ended the job; empty while the job goes on."""
        return self._run.ended.event if self._run.ended is not None else ""

    def on_state(self, state: Mapping[str, Any]) -> None:
        """Take the cluster's state."""
        self._run.on_state(state)

    def on_event(self, event: Json, at_s: float) -> None:
        """Take an event. A second delivery has no effect: QoS 1 may repeat an event, and so may the journal."""
        fact = self._run.on_event(event, at_s)
        if fact is not None and not isinstance(fact, StepCommittedFact):
            self.events.append((at_s, event))

    def on_injected(self, fault: Fault, at_s: float, nodes: tuple[str, ...] = ()) -> InjectedFault:
        """Note that a fault is about to be injected."""
        run = self._run
        generation = max(run.started_generation, int(run.state.get("generation") or 0))
        under_way = run.started_generation > run.completed_generation
        found = InjectedFault(
            fault=fault, at_s=at_s, nodes=nodes, open_generation=generation if under_way else generation + 1
        )
        self.injected[fault.id] = found
        return found

    def since(self, at_s: float, name: str) -> list[tuple[float, Json]]:
        """Return the events of this name from ``at_s`` on."""
        return [(at, e) for at, e in self.events if at >= at_s and e["event"] == name]

    def recoveries(self, injected: Iterable[InjectedFault]) -> list[tuple[float, RecoveryDetails]]:
        """Return the recoveries that any of these faults may have caused, with the time at which each
        completed.
        """
        since_s, generation = min(((one.at_s, one.open_generation) for one in injected), default=(0.0, 0))
        return [
            (one.at, one.recovery)
            for one in self._run.recoveries.values()
            if one.at >= since_s and one.recovery.generation >= generation
        ]
