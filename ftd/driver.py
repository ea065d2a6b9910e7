"""Runs a pure machine in the real world: the coordinator's and the node's main loop.

Events go in through ``feed``; the machine answers with effects; ``perform`` carries them out, in order,
each finished before the next begins. Timers live here, so that the machines own no clock. A bug in a step
is logged with its event and the daemon goes on: a training run outlives our mistakes where it can.
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
from statemachine.cluster.durable.outbox import REPEATABLE
from statemachine.effects import CancelTimer, Effect, EmitEvent, SetTimer
from statemachine.events import Event, TimerFired

_log = structlog.get_logger("ftd.driver")

_EVENTS_BEFORE_YIELD = 64
"""A flood of messages must not keep timers and sockets from being served."""

_MOST_TOGETHER = 1024
"""Events that a machine takes together, where it can: as many as a thousand nodes say at once."""

StepBatch = Callable[[Sequence[Any], Callable[[Any], None]], list[Effect]]
"""A machine's ``steps``: several events, and whom to tell of one in which it has a bug."""


class Clock(Protocol):
    """The clocks of a process."""

    def monotonic_s(self) -> float:
        """Return seconds on the monotonic clock that all processes of this host share."""
        ...

    def wall_s(self) -> float:
        """Return seconds since 1970."""
        ...

    def cpu_s(self) -> float:
        """Return the time for which this thread has computed."""
        ...


class SystemClock:
    """The clocks of the operating system."""

    monotonic_s = staticmethod(time.monotonic)
    wall_s = staticmethod(time.time)
    cpu_s = staticmethod(time.thread_time)


class Machine(Protocol):
    """What ``statemachine``'s machines have in common."""

    def step(self, event: Any) -> list[Effect]:
        """Each machine takes a union of its own events; the driver only ever adds ``TimerFired``."""
        ...


@dataclass(frozen=True, slots=True)
class _Due:
    """A timer rang. Void when it was cancelled or set anew before its turn in the queue came."""

    name: str
    ticket: int


class Driver:
    """See the module. One per machine; everything happens on one event loop."""

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
        """``perform`` handles every effect but timers. What it returns is awaited when it is awaitable.
        ``observe`` sees every event before it is fed, and every effect before it is carried out. ``step_batch``
        takes events that wait in the queue in one go, up to the next timer. ``on_effects_done`` is called when a
        step's effects are. ``clock`` is the system's where it is not given. ``suffix`` makes the
        causes of this process unique in the cluster; it is drawn where it is not given.

        A ``JournalError`` from either ends ``run``: what follows a ``PersistState`` must not happen without
        it. Anything else is logged as a bug.
        """
        self.machine = machine
        self.bugs = 0
        """Exceptions in steps and effects so far; a healthy daemon has none."""
        self._perform = perform
        self._watch = observe
        self._together, self._carried_out = step_batch, on_effects_done
        self.clock: Clock = clock or SystemClock()
        self._queue: deque[Event | _Due] = deque()
        self._fed = asyncio.Event()
        self._timers: dict[str, tuple[int, asyncio.TimerHandle]] = {}
        self._tickets = itertools.count(1)
        self._causes = itertools.count(1)
        self._suffix = suffix or secrets.token_hex(2)

    def now(self) -> float:
        """Seconds on the monotonic clock that all processes of this host share."""
        return self.clock.monotonic_s()

    def new_cause(self) -> str:
        """A fresh cause id: unique in the cluster, short enough to read aloud (``c-00042-a1b2``)."""
        return f"c-{next(self._causes):05d}-{self._suffix}"

    def feed(self, event: Event) -> None:
        """Queue an event; never blocks. Build it with ``at=driver.now(), cause=driver.cause()``."""
        self._put(event)

    def _put(self, item: Event | _Due) -> None:
        self._queue.append(item)
        self._fed.set()

    async def run(self) -> None:
        """Process events until cancelled.

        :raises JournalError: durable state cannot be kept.
        """
        handled = 0
        while True:
            while not self._queue:
                self._fed.clear()
                await self._fed.wait()
            item = self._queue.popleft()
            events: list[Event] = []
            while not isinstance(item, _Due):
                events.append(item)
                if self._together is None or not self._queue or len(events) >= _MOST_TOGETHER:
                    break
                item = self._queue.popleft()
            if events:
                await self.process(*events)
            # After what came before it was carried out, which may have made it void.
            if isinstance(item, _Due) and (rung := self._ring(item)) is not None:
                await self.process(rung)
            handled += 1
            if len(events) > 1 or handled % _EVENTS_BEFORE_YIELD == 0:
                await asyncio.sleep(0)

    async def process(self, *events: Event) -> None:
        """A step for each, and what they want."""
        for event in events:
            self._show(event)
        await self.perform_effects(self._steps(events))

    def _steps(self, events: Sequence[Event]) -> list[Effect]:
        if self._together is not None:
            return self._together(events, self._note_bug)
        wanted: list[Effect] = []
        for event in events:
            try:
                wanted += self.machine.step(event)
            except Exception:
                self._note_bug(event)
        return wanted

    def _note_bug(self, event: Event) -> None:
        """Called where the exception is handled."""
        self.bugs += 1
        _log.exception("step", event_kind=type(event).__name__, fed=repr(event)[:2000], cause=event.cause)

    async def perform_effects(self, effects: list[Effect]) -> None:
        """Effects in order; also those that a restored machine begins with."""
        for effect in effects:
            self._show(effect)
            try:
                if isinstance(effect, SetTimer):
                    self._set_timer(effect.name, effect.delay_s)
                elif isinstance(effect, CancelTimer):
                    self._cancel_timer(effect.name)
                elif (pending := self._perform(effect)) is not None:
                    await pending
            except JournalError:
                raise
            except Exception:
                self.bugs += 1
                _log.exception("carry_out", effect=repr(effect)[:2000], cause=effect.cause)
        self._carried_out()

    def _show(self, it: Event | Effect) -> None:
        if self._watch is not None:
            try:
                self._watch(it)
            except Exception:
                self.bugs += 1
                _log.exception("watch", watched=repr(it)[:2000], cause=it.cause)

    def replace_machine(self, machine: Machine) -> None:
        """Go on with another machine: what was under way for the present one does not count for it."""
        self.stop_timers()
        self._queue.clear()
        self.machine = machine

    def stop_timers(self) -> None:
        """Cancel all timers, at the end of the daemon's life."""
        for name in list(self._timers):
            self._cancel_timer(name)

    def _set_timer(self, name: str, delay_s: float) -> None:
        self._cancel_timer(name)
        due = _Due(name, next(self._tickets))
        handle = asyncio.get_running_loop().call_later(delay_s, self._put, due)
        self._timers[name] = (due.ticket, handle)

    def _cancel_timer(self, name: str) -> None:
        if (entry := self._timers.pop(name, None)) is not None:
            entry[1].cancel()

    def _ring(self, due: _Due) -> TimerFired | None:
        entry = self._timers.get(due.name)
        if entry is None or entry[0] != due.ticket:
            return None
        del self._timers[due.name]
        return TimerFired(at=self.now(), cause=self.new_cause(), name=due.name)


class EventRateLimiter:
    """Lets an event of each kind through once a second: a peer that repeats itself cannot flood the stream.

    Kinds are told apart by name, node and reason; of ``MessageRejected`` by the topic, as its reason quotes
    what a stranger wrote. The next one let through says how many were held back. Beyond ``MAX_PER_SECOND`` a second,
    of all kinds together, all are held back.
    """

    PERIOD_S = 1.0
    MAX_KINDS = 1024
    MAX_PER_SECOND = 20

    def __init__(self) -> None:
        self._kinds: dict[tuple[str, str | None, str], tuple[float, int]] = {}
        self._second, self._let = 0, 0

    def admit(self, event: EmitEvent, now: float) -> int | None:
        """How many like it were held back before this one; None holds this one back, too."""
        if event.name not in REPEATABLE:
            return 0
        apart = event.details.get("topic", "") if event.name == "MessageRejected" else event.reason
        key = (event.name, event.node, str(apart))
        if key not in self._kinds and len(self._kinds) >= self.MAX_KINDS:
            self._kinds.clear()
        since, held = self._kinds.get(key, (-self.PERIOD_S, 0))
        if int(now) != self._second:
            self._second, self._let = int(now), 0
        if now - since < self.PERIOD_S or self._let >= self.MAX_PER_SECOND:
            self._kinds[key] = (since, held + 1)
            return None
        self._let += 1
        self._kinds[key] = (now, 0)
        return held
