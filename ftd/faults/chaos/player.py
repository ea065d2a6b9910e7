"""The player of a scenario on a running cluster: it injects the faults, observes the cluster, and returns the
result.
"""

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

_POLL_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationDetails:
    """Facts about a result that comes from the simulator."""

    seed: int
    skipped: tuple[tuple[str, str], ...] = ()
    """Id and reason of each fault that the simulator does not support and that was left out."""
    problems: tuple[str, ...] = ()
    """Violations of the simulator's invariants, which fail the scenario whatever it expects."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScenarioResult:
    """The result of playing a scenario."""

    scenario: Scenario
    verdicts: tuple[Verdict, ...]
    record: ScenarioRecord
    took_s: float
    ended_by: str
    """Reason for which observing stopped."""
    simulated: SimulationDetails | None = None
    """``None`` if the scenario was played on the real service."""

    @property
    def met(self) -> bool:
        """Whether every fault happened, every expectation is met, and no invariant was violated."""
        sound = self.simulated is None or not self.simulated.problems
        return sound and all(verdict.met for verdict in self.verdicts)


class ScenarioPlayer:
    """The player of one scenario: call ``start``, feed it with ``on_event``, ``on_state`` and ``on_node``,
    and await ``wait_for_result``.

    :param inject: injects a fault and returns the nodes that it targeted.
    :param report: takes a line for the user.
    """

    def __init__(
        self,
        scenario: Scenario,
        *,
        inject: Callable[[Fault], Awaitable[tuple[str, ...]]],
        report: Callable[[str], None],
        baseline: dict[int, float] | None = None,
    ) -> None:
        self._scenario = scenario
        self._inject = inject
        self._report = report
        self._began_at = 0.0
        self.record = ScenarioRecord(baseline=baseline)
        self.scheduler = FaultScheduler(scenario, inject=self._inject_now, on_failure=self._on_failure)
        self._changed = asyncio.Event()
        self._ending = EndCondition(scenario, self.record)

    def start(self) -> None:
        """Start the scenario's clock. Earlier events do not count."""
        self._began_at = time.monotonic()
        self.scheduler.start()

    def on_event(self, event: dict[str, Any]) -> None:
        self.record.on_event(event, self._now_s())
        self.scheduler.on_event(event)
        self._changed.set()

    def on_missed_event(self, event: dict[str, Any]) -> None:
        """Take an event from the journal of a coordinator on this host, published while the broker was away."""
        at_s = float(event.get("monotonic") or 0.0) - self._began_at
        if at_s >= 0:
            self.record.on_event(event, at_s)
            self.scheduler.on_event(event)
            self._changed.set()

    def on_state(self, state: dict[str, Any]) -> None:
        self.record.on_state(state)
        self._changed.set()

    def on_node(self, node: str, state: str) -> None:
        self.scheduler.on_node(node, state)

    async def wait_for_result(self) -> ScenarioResult:
        """Return the result as soon as all expectations are met, one cannot be met any more, or the time is
        up.
        """
        try:
            while not (why := self._over()):
                self._changed.clear()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._changed.wait(), _POLL_S)
        finally:
            await self.scheduler.cancel()
        return ScenarioResult(
            scenario=self._scenario,
            verdicts=judge(self._scenario, self.record),
            record=self.record,
            took_s=self._now_s(),
            ended_by=why,
        )

    def _over(self) -> str:
        """Return why the scenario is over, or an empty string while it is not."""
        injecting, waiting = self.scheduler.busy, bool(self.scheduler.waiting)
        return self._ending.end_reason(self._now_s(), injecting=injecting, waiting=waiting)

    async def _inject_now(self, fault: Fault) -> None:
        injected = self.record.on_injected(fault, self._now_s())
        self._report(f"{injected.at_s:7.2f} s  ↯ {fault}")
        injected.nodes = await self._inject(fault)
        # A fault that lasts is over that much later than it was requested.
        injected.over_at_s = injected.at_s + fault.duration_s

    def _on_failure(self, fault: Fault, error: FtdError) -> None:
        injected = self.record.injected.get(fault.id) or self.record.on_injected(fault, self._now_s())
        injected.problem = str(error)
        self._report(f"{self._now_s():7.2f} s  ✗ {fault}: {error}")

    def _now_s(self) -> float:
        return time.monotonic() - self._began_at
