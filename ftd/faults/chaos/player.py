"""Plays a scenario on a running cluster: injects, watches, and says when there is nothing left to see."""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from ftd.errors import FtdError
from ftd.faults.chaos.end_condition import EndCondition
from ftd.faults.chaos.record import ScenarioRecord
from ftd.faults.chaos.scheduler import FaultScheduler
from ftd.faults.chaos.values import Fault, Scenario
from ftd.faults.chaos.verdicts import Verdict, judge

_LOOK_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationDetails:
    """It was played in the simulator."""

    seed: int
    skipped: tuple[tuple[str, str], ...] = ()
    """Ids of faults that the simulator does not have and that were left out, with the reason."""
    problems: tuple[str, ...] = ()
    """An invariant of the simulator that does not hold, whatever the scenario expects."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScenarioResult:
    """How a scenario went."""

    scenario: Scenario
    verdicts: tuple[Verdict, ...]
    record: ScenarioRecord
    took_s: float
    ended_by: str
    """Why it was looked at no longer."""
    simulated: SimulationDetails | None = None
    """``None``: it was real."""

    @property
    def met(self) -> bool:
        """Every fault has happened, and every expectation is met."""
        sound = self.simulated is None or not self.simulated.problems
        return sound and all(verdict.met for verdict in self.verdicts)


class ScenarioPlayer:
    """``find_initial``, feed it with ``on_event``, ``on_state`` and ``on_node``, and await ``wait_for_result``.

    :param inject: carries a fault out, and answers the nodes that it struck.
    :param tell: a line for whoever watches.
    """

    def __init__(
        self,
        scenario: Scenario,
        *,
        inject: Callable[[Fault], Awaitable[tuple[str, ...]]],
        report: Callable[[str], None],
        baseline: dict[int, float] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._scenario = scenario
        self._inject = inject
        self._tell = report
        self._clock = clock
        self._began_at = 0.0
        self.record = ScenarioRecord(baseline=baseline or {})
        self.conductor = FaultScheduler(scenario, inject=self._strike, on_failure=self._failed)
        self._news = asyncio.Event()
        self._ending = EndCondition(scenario, self.record)

    def start(self) -> None:
        """The scenario's time runs from here; events before do not count."""
        self._began_at = self._clock()
        self.conductor.start()

    def on_event(self, event: dict[str, Any]) -> None:
        self.record.on_event(event, self._now_s())
        self.conductor.on_event(event)
        self._news.set()

    def on_missed(self, event: dict[str, Any]) -> None:
        """Out of the journal of a coordinator on this host: told while the broker was away."""
        at_s = float(event.get("monotonic") or 0.0) - self._began_at
        if at_s >= 0:
            self.record.on_event(event, at_s)
            self.conductor.on_event(event)
            self._news.set()

    def on_state(self, state: dict[str, Any]) -> None:
        self.record.on_state(state)
        self._news.set()

    def on_node(self, node: str, state: str) -> None:
        self.conductor.on_node(node, state)

    async def wait_for_result(self) -> ScenarioResult:
        """Return when it is over: all as expected, or nothing can make it good, or the time is up."""
        try:
            while not (why := self._over()):
                self._news.clear()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._news.wait(), _LOOK_S)
        finally:
            await self.conductor.cancel()
        return ScenarioResult(
            scenario=self._scenario,
            verdicts=judge(self._scenario, self.record),
            record=self.record,
            took_s=self._now_s(),
            ended_by=why,
        )

    def _over(self) -> str:
        """Why nothing more is to be seen; empty while there is."""
        conductor = self.conductor
        return self._ending.why(self._now_s(), under_way=conductor.busy, to_come=bool(conductor.waiting))

    async def _strike(self, fault: Fault) -> None:
        struck = self.record.on_struck(fault, self._now_s())
        self._tell(f"{struck.at_s:7.2f} s  ↯ {fault}")
        struck.nodes = await self._inject(fault)
        # What a node does for a while is over later than it was asked for.
        struck.over_at_s = struck.at_s + fault.lasts_s

    def _failed(self, fault: Fault, error: FtdError) -> None:
        struck = self.record.struck.get(fault.id) or self.record.on_struck(fault, self._now_s())
        struck.problem = str(error)
        self._tell(f"{self._now_s():7.2f} s  ✗ {fault}: {error}")

    def _now_s(self) -> float:
        return self._clock() - self._began_at
