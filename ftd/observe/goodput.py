"""Measures how much of a job's time went into steps that count.

A step counts until a rollback undoes it. Everything else is lost time: detection, recovery, waiting for
nodes, undone steps, and steps in flight that were computed twice.
"""

from collections import deque

MAX_STEPS = 100_000
"""Number of steps remembered for rollbacks; a rollback that goes back further subtracts only these."""


class GoodputMeter:
    """Time spent on committed steps, in seconds on one clock."""

    def __init__(self) -> None:
        self._steps: deque[tuple[int, float]] = deque(maxlen=MAX_STEPS)
        self._productive_s = 0.0
        self._began_at: float | None = None
        self._ended_at: float | None = None

    def end(self, at: float) -> None:
        """Record the end of the job."""
        if self._began_at is not None and self._ended_at is None:
            self._ended_at = at

    def commit(self, step: int, step_s: float, at: float) -> None:
        """Record a committed step and its duration."""
        if self._began_at is None:
            self._began_at = at - step_s
        self._ended_at = None
        self._steps.append((step, step_s))
        self._productive_s += step_s

    def roll_back(self, step: int) -> float:
        """Subtract all steps after ``step`` and return the seconds that went into them."""
        undone_s = 0.0
        while self._steps and self._steps[-1][0] > step:
            undone_s += self._steps.pop()[1]
        self._productive_s -= undone_s
        return undone_s

    def ratio(self, now: float) -> float | None:
        """Return the goodput from 0 to 1, or ``None`` before the first step."""
        if self._began_at is None:
            return None
        elapsed_s = (now if self._ended_at is None else self._ended_at) - self._began_at
        return min(1.0, max(0.0, self._productive_s / elapsed_s)) if elapsed_s > 0 else 1.0
