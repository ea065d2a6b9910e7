"""The scheduler of a scenario's faults: it follows the events and injects each fault when it is due."""

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import structlog

from ftd.errors import FtdError, PeerError
from ftd.faults.chaos.values import (
    PHASE_EVENTS,
    AfterFault,
    AfterTime,
    AtStep,
    Fault,
    InPhase,
    OnEvent,
    Scenario,
    Trigger,
)
from ftd.tasks import cancel_all, start_task

log = structlog.get_logger()

_PHASE_OF = {event: phase for phase, event in PHASE_EVENTS.items()}


class FaultTriggers:
    """The triggers of a scenario's faults. You feed it with events, node states and the time; it returns each
    fault exactly once, when it is due.

    MQTT may deliver an event twice, so events are distinguished by cause, name and time.
    """

    def __init__(self, scenario: Scenario) -> None:
        self._waiting = list(scenario.faults)
        self._occurrences: Counter[str] = Counter()
        self._phases: Counter[str] = Counter()
        self._seen: set[tuple[str, str, float]] = set()
        self._snapping: set[str] = set()

    @property
    def waiting(self) -> tuple[Fault, ...]:
        """The faults that are not due yet."""
        return tuple(self._waiting)

    @property
    def next_delay_s(self) -> float | None:
        """The time in seconds, counted from the scenario's start, at which the next timed fault is due."""
        delays = [f.trigger.delay_s for f in self._waiting if isinstance(f.trigger, AfterTime)]
        return min(delays, default=None)

    def on_event(self, event: Mapping[str, Any]) -> list[Fault]:
        """Return the faults that this event triggers, in the scenario's order."""
        name = str(event.get("event"))
        step = event.get("step")
        if name == "StepCommitted":  # Steps are compared by number, so a second delivery triggers nothing.
            return self._take(lambda t: isinstance(t, AtStep) and step is not None and t.step <= step)
        identity = (name, str(event.get("cause")), float(event.get("monotonic") or 0.0))
        if identity in self._seen:
            return []
        self._seen.add(identity)
        self._occurrences[name] += 1
        due = self._take(
            lambda t: isinstance(t, OnEvent) and t.event == name and t.occurrence == self._occurrences[name]
        )
        return due + (self._begin_phase(_PHASE_OF[name]) if name in _PHASE_OF else [])

    def on_node(self, node: str, state: str) -> list[Fault]:
        """Return the faults that a node's new state triggers.

        The phase ``snapshotting`` begins when the first node reports SNAP while no other node is in SNAP.
        """
        if state != "SNAP":
            self._snapping.discard(node)
            return []
        begins = not self._snapping
        self._snapping.add(node)
        return self._begin_phase("snapshotting") if begins else []

    def on_time(self, elapsed_s: float) -> list[Fault]:
        """Return the faults that are due ``elapsed_s`` after the scenario's start."""
        return self._take(lambda t: isinstance(t, AfterTime) and t.delay_s <= elapsed_s)

    def on_injected(self, fault: Fault) -> list[Fault]:
        """Return the faults that wait for this one."""
        return self._take(lambda t: isinstance(t, AfterFault) and t.fault == fault.id)

    def _begin_phase(self, phase: str) -> list[Fault]:
        self._phases[phase] += 1
        return self._take(
            lambda t: isinstance(t, InPhase) and t.phase == phase and t.occurrence == self._phases[phase]
        )

    def _take(self, due: Callable[[Trigger], bool]) -> list[Fault]:
        taken = [fault for fault in self._waiting if due(fault.trigger)]
        self._waiting = [fault for fault in self._waiting if fault not in taken]
        return taken


class FaultScheduler(FaultTriggers):
    """The triggers of a scenario's faults with their injection: feed it with every event, and it awaits
    ``inject`` for every due fault.

    Faults that are due together are injected together. If one fails (its node is gone, the node rejects the
    request, or any other error occurs), ``on_failure`` is called and the other faults are injected all the
    same.
    """

    def __init__(
        self,
        scenario: Scenario,
        *,
        inject: Callable[[Fault], Awaitable[object]],
        on_failure: Callable[[Fault, FtdError], None],
    ) -> None:
        super().__init__(scenario)
        self._inject = inject
        self._on_failure = on_failure
        self._running: set[asyncio.Task[None]] = set()
        self._clock: asyncio.Task[None] | None = None

    @property
    def busy(self) -> bool:
        """Whether a fault is due or being injected, that is, its ``inject`` has not returned."""
        return bool(self._running)

    def start(self) -> None:
        """Start the clock of the timed faults."""
        self._clock = asyncio.get_running_loop().create_task(self._keep_time(time.monotonic()))

    def on_event(self, event: Mapping[str, Any]) -> list[Fault]:
        """Inject the faults that an event triggers, and return them so that the caller can report them."""
        return self._inject_all(super().on_event(event))

    def on_node(self, node: str, state: str) -> list[Fault]:
        """Inject the faults that a node's new state triggers, and return them."""
        return self._inject_all(super().on_node(node, state))

    async def cancel(self) -> None:
        """Stop injecting."""
        await cancel_all([*self._running, *([self._clock] if self._clock else [])])

    async def _keep_time(self, began_at: float) -> None:
        while (delay_s := self.next_delay_s) is not None:
            await asyncio.sleep(max(0.0, began_at + delay_s - time.monotonic()))
            self._inject_all(self.on_time(time.monotonic() - began_at))

    def _inject_all(self, faults: list[Fault]) -> list[Fault]:
        for fault in faults:
            start_task(self._inject_one(fault), self._running)
        return faults

    async def _inject_one(self, fault: Fault) -> None:
        await asyncio.sleep(fault.delay_s)
        log.info("injecting_fault", fault=str(fault))
        try:
            await self._inject(fault)
        except FtdError as error:
            self._on_failure(fault, error)
        except Exception as error:
            # Nobody awaits this task. An error that is not reported here would be lost, and the fault would
            # seem to go on.
            log.exception("fault_injection_failed", fault=str(fault))
            self._on_failure(fault, PeerError(f"{type(error).__name__}: {error}"))
        else:
            self._inject_all(self.on_injected(fault))
