"""The simulated world: virtual time, the seed's random numbers, and the trace."""

import heapq
import logging
import sys
from collections.abc import Callable
from itertools import count
from random import Random
from typing import Any

import structlog

from statemachine.timing import Timing

Action = Callable[..., None]

TIMING = Timing(
    heartbeat_s=1.0,
    silence_s=3.0,
    hello_grace_s=4.0,
    remove_offline_s=6.0,
    quiesce_s=5.0,
    boundary_s=3.0,
    resume_s=8.0,
    lost_state_s=30.0,
    restore_s=10.0,
    snapshot_s=3.0,
    scrub_s=4.0,
    persist_s=6.0,
    checkpoint_location_s=3.0,
    finish_s=20.0,
    steps_request_s=1.0,
    straggler_s=1.0,
    straggler_replan_s=2.0,
    straggler_cost_s=0.1,
    raise_limit=1000,
    stepped_s=0.3,
    leave_s=15.0,
    kill_grace_s=0.5,
    hang_check_s=1.0,
    hang_floor_s=3.0,
    idle_heartbeat_s=6.0,
    idle_progress_s=12.0,
)
"""Timing with slower heartbeats than in production and similar ratios, so that minutes of virtual time take
milliseconds.
"""


class InvariantViolation(AssertionError):
    """An invariant that does not hold: a bug in the protocol or in the simulator."""


class World:
    """The clock and its queue: ``call_later`` schedules, ``run`` lets time pass."""

    def __init__(self, seed: int, *, tracing: bool = False, timing: Timing = TIMING) -> None:
        self.seed, self.timing = seed, timing
        self.rng = Random(seed)
        self.now = 0.0
        self.events = 0
        self.done = False
        self.failure: Exception | None = None
        """The first violation or bug that occurred where other code handles exceptions."""
        self.checks_health = Random(f"{seed} health checks").random() < 0.3
        """Whether nodes check their health."""
        self.tracing = tracing
        self.lines: list[str] = []
        self._queue: list[tuple[float, int, Action, tuple[Any, ...]]] = []
        self._order = count()
        self._serial = 1000

    def call_later(self, delay_s: float, action: Action, *arguments: Any) -> None:
        """Call ``action(*arguments)`` after ``delay_s``. Actions that are due at the same time keep their
        order.
        """
        heapq.heappush(self._queue, (self.now + delay_s, next(self._order), action, arguments))

    def run(self, until_s: float) -> None:
        """Let time pass until ``until_s``, or until ``done``.

        :raises Exception: the first violation, or the first bug that a daemon logged.
        """
        before = structlog.get_config()
        structlog.configure(
            wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR),
            processors=[self._note_bug],
            cache_logger_on_first_use=False,
        )
        try:
            self._run(until_s)
        finally:
            structlog.configure(**before)

    def _note_bug(
        self, _logger: object, method: str, line: structlog.typing.EventDict
    ) -> structlog.typing.EventDict:
        """Treat an exception that a daemon logs and survives as a bug."""
        error = sys.exc_info()[1]
        if line.get("exc_info") and isinstance(error, Exception):
            self.fail(error)
        raise structlog.DropEvent

    def _run(self, until_s: float) -> None:
        queue, pop = self._queue, heapq.heappop
        while queue and not self.done:
            if queue[0][0] > until_s:
                self.now = until_s
                return
            self.now, _, action, arguments = pop(queue)
            self.events += 1
            action(*arguments)
            if self.failure is not None:
                raise self.failure

    def fail(self, error: Exception) -> None:
        """End the run with ``error``, whatever code handles exceptions here."""
        if self.failure is None:
            self.failure = error

    def next_serial(self) -> int:
        """Return a number that was never used before in this world, for incarnations and process ids."""
        self._serial += 1
        return self._serial

    def note(self, who: str, what: object) -> None:
        """Add a line to the trace. Callers check ``tracing`` first, since formatting costs time."""
        self.lines.append(f"{self.now:9.4f} {who:<8} {what}")

    def between(self, low: float, high: float) -> float:
        return low + (high - low) * self.rng.random()

    def up_to(self, most: float) -> float:
        """Return a random number up to ``most``; nothing is drawn if that is 0."""
        return self.between(0.0, most) if most else 0.0

    def chance(self, probability: float) -> bool:
        return self.rng.random() < probability
