"""Runs a pure state machine in the real world: the main loop of the coordinator and of the node.

Events go in through ``feed``. The machine answers with effects, which ``perform`` carries out in order; each
one finishes before the next begins. The driver owns the timers, so that the machines need no clock. A bug in
a step is logged with its event, and the daemon continues: a training run should outlive our errors where it
can.
"""

import asyncio
import itertools
import secrets
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import structlog

from ftd.errors import JournalError
from statemachine.effects import REPEATABLE, CancelTimer, Effect, EmitEvent, SetTimer
from statemachine.events import Event, TimerFired

_log = structlog.get_logger("ftd.driver")

_EVENTS_BEFORE_YIELD = 64
"""Events after which the driver yields to the event loop, so that a flood of messages does not starve timers and
sockets.
"""

_MAX_BATCH = 1024
"""Largest number of events in one batch: about as many as a thousand nodes send at once."""

StepBatch = Callable[[Sequence[Any], Callable[[Any], None]], list[Effect]]
"""Type of a machine's ``steps``: it takes several events and a function to call for an event that raises."""


class Clock(Protocol):
    """Clocks of a process."""

    def monotonic_s(self) -> float:
        """Return seconds on the monotonic clock that all processes of this host share."""
        ...

    def wall_s(self) -> float:
        """Return seconds since 1970."""
        ...

    def cpu_s(self) -> float:
        """Return the CPU time of this thread in seconds."""
        ...


class SystemClock:
    """Clocks of the operating system."""

    monotonic_s = staticmethod(time.monotonic)
    wall_s = staticmethod(time.time)
    cpu_s = staticmethod(time.thread_time)


class Machine(Protocol):
    """Interface that the machines of ``statemachine`` share."""

    def step(self, event: Any) -> list[Effect]:
        """Process an event and return its effects.

        Each machine takes a union of its own event types; the driver itself adds only ``TimerFired``.
        """
        ...


@dataclass(frozen=True, slots=True, eq=False)
class _ExpiredTimer:
    """Expired timer in the queue. It is void if the timer was cancelled or set again before its turn came."""

    name: str


class Driver:
    """Main loop of one machine; everything runs on one event loop. See the module's docstring."""

    def __init__(
        self,
        machine: Machine,
        perform: Callable[[Effect], Awaitable[None] | None],
        observe: Callable[[Event | Effect], None] | None = None,
        step_batch: StepBatch | None = None,
        on_effects_done: Callable[[], None] = lambda: None,
        clock: Clock | None = None,
        suffix: str = "",
    ) -> None:
        """Create the driver; ``run`` starts it.

        :param perform: carries out every effect except timers. If it returns an awaitable, the driver awaits
            it.
        :param observe: called with every event before it is processed and with every effect before it is
            carried out.
        :param step_batch: processes all queued events up to the next timer in one call.
        :param on_effects_done: called when all effects of a step have been carried out.
        :param clock: clock of the driver; the default is that of the operating system.
        :param suffix: makes the causes of this process unique in the cluster; random by default.

        A ``JournalError`` from ``perform`` ends ``run``, because what follows a ``PersistState`` must not
        happen without it. Any other exception is logged as a bug.
        """
        self.machine = machine
        self.bugs = 0
        """Number of exceptions in steps and effects so far; 0 in a healthy daemon."""
        self._perform = perform
        self._observe = observe
        self._step_batch, self._on_effects_done = step_batch, on_effects_done
        self.clock: Clock = clock or SystemClock()
        self._queue: deque[Event | _ExpiredTimer] = deque()
        self._idle: asyncio.Future[None] | None = None
        """Future that ``run`` waits for while the queue is empty."""
        self._timers: dict[str, tuple[_ExpiredTimer, asyncio.TimerHandle]] = {}
        self._causes = itertools.count(1)
        self._suffix = suffix or secrets.token_hex(2)

    def now(self) -> float:
        """Return seconds on the monotonic clock that all processes of this host share."""
        return self.clock.monotonic_s()

    def new_cause(self) -> str:
        """Return a new cause id: unique in the cluster and short enough to read aloud (``c-00042-a1b2``)."""
        return f"c-{next(self._causes):05d}-{self._suffix}"

    def stamp(self) -> dict[str, Any]:
        """Return the fields ``at`` and ``cause`` of an event that happens now and that nothing else caused."""
        return {"at": self.now(), "cause": self.new_cause()}

    def feed(self, event: Event | _ExpiredTimer) -> None:
        """Queue an event without blocking. Create it with ``**driver.stamp()``."""
        self._queue.append(event)
        if self._idle is not None and not self._idle.done():
            self._idle.set_result(None)

    async def run(self) -> None:
        """Process events until cancelled.

        :raises JournalError: durable state cannot be stored.
        """
        handled = 0
        while True:
            while not self._queue:
                self._idle = asyncio.get_running_loop().create_future()
                await self._idle
            item = self._queue.popleft()
            events: list[Event] = []
            while not isinstance(item, _ExpiredTimer):
                events.append(item)
                if self._step_batch is None or not self._queue or len(events) >= _MAX_BATCH:
                    break
                item = self._queue.popleft()
            if events:
                await self.process(*events)
            # The events before the timer come first: their effects may cancel it.
            if isinstance(item, _ExpiredTimer) and (expired := self._expire(item)) is not None:
                await self.process(expired)
            handled += 1
            if len(events) > 1 or handled % _EVENTS_BEFORE_YIELD == 0:
                await asyncio.sleep(0)

    async def process(self, *events: Event) -> None:
        """Process the events and carry out their effects."""
        for event in events:
            self._notify_observer(event)
        effects: list[Effect] = []
        if self._step_batch is not None:
            effects = self._step_batch(events, self._note_bug)
        else:
            for event in events:
                try:
                    effects += self.machine.step(event)
                except Exception:
                    self._note_bug(event)
        await self.perform_effects(effects)

    def _note_bug(self, event: Event) -> None:
        """Log the exception that is being handled."""
        self.bugs += 1
        _log.exception("step_failed", kind=type(event).__name__, input=repr(event)[:2000], cause=event.cause)

    async def perform_effects(self, effects: list[Effect]) -> None:
        """Carry out effects in order, including those that a restored machine starts with."""
        for effect in effects:
            self._notify_observer(effect)
            try:
                if isinstance(effect, (SetTimer, CancelTimer)):
                    if (former := self._timers.pop(effect.name, None)) is not None:
                        former[1].cancel()
                    if isinstance(effect, SetTimer):
                        timer = _ExpiredTimer(effect.name)
                        handle = asyncio.get_running_loop().call_later(effect.delay_s, self.feed, timer)
                        self._timers[effect.name] = timer, handle
                elif (pending := self._perform(effect)) is not None:
                    await pending
            except JournalError:
                raise
            except Exception:
                self.bugs += 1
                _log.exception("effect_failed", effect=repr(effect)[:2000], cause=effect.cause)
        self._on_effects_done()

    def _notify_observer(self, item: Event | Effect) -> None:
        if self._observe is not None:
            try:
                self._observe(item)
            except Exception:
                self.bugs += 1
                _log.exception("observer_failed", observed=repr(item)[:2000], cause=item.cause)

    def replace_machine(self, machine: Machine) -> None:
        """Continue with another machine and drop the queued events and timers of the present one."""
        self.stop_timers()
        self._queue.clear()
        self.machine = machine

    def stop_timers(self) -> None:
        """Cancel all timers. Call it when the daemon ends."""
        for _, handle in self._timers.values():
            handle.cancel()
        self._timers.clear()

    def _expire(self, timer: _ExpiredTimer) -> TimerFired | None:
        entry = self._timers.get(timer.name)
        if entry is None or entry[0] is not timer:
            return None
        del self._timers[timer.name]
        return TimerFired(**self.stamp(), name=timer.name)


class EventRateLimiter:
    """Filter that passes one event of each kind per second, so that a repetitive peer cannot flood the event
    stream.

    The kind of an event is its name, node and reason; for ``MessageRejected`` it is the topic, because the
    reason quotes text from outside the cluster. The next event that passes carries the number of events
    withheld before it. If all kinds together exceed ``MAX_PER_SECOND``, the rest is withheld.
    """

    PERIOD_S = 1.0
    MAX_KINDS = 1024
    MAX_PER_SECOND = 20

    def __init__(self) -> None:
        self._kinds: dict[tuple[str, str | None, str], tuple[float, int]] = {}
        self._second, self._passed = 0, 0

    def admit(self, event: EmitEvent, now: float) -> int | None:
        """Return how many similar events were withheld before this one, or None to withhold this one as well."""
        if event.name not in REPEATABLE:
            return 0
        distinction = event.details.get("topic", "") if event.name == "MessageRejected" else event.reason
        key = (event.name, event.node, str(distinction))
        if key not in self._kinds and len(self._kinds) >= self.MAX_KINDS:
            self._kinds.clear()
        since, withheld = self._kinds.get(key, (-self.PERIOD_S, 0))
        if int(now) != self._second:
            self._second, self._passed = int(now), 0
        if now - since < self.PERIOD_S or self._passed >= self.MAX_PER_SECOND:
            self._kinds[key] = (since, withheld + 1)
            return None
        self._passed += 1
        self._kinds[key] = (now, 0)
        return withheld
