"""How much of a job's time went into steps that count.

A step counts while nothing took it back. What is lost is all the rest: detecting, recovering, waiting for
nodes, steps that a rollback undid, steps in flight that were computed twice.
"""

from collections import deque

MOST_STEPS = 100_000
"""Remembered for a rollback; of one that goes back further only so many are taken off."""


class GoodputMeter:
    """Times in seconds on one clock."""

    def __init__(self) -> None:
        self._steps: deque[tuple[int, float]] = deque(maxlen=MOST_STEPS)
        self._productive_s = 0.0
        self._began_at: float | None = None
        self._ended_at: float | None = None

    def end(self, at: float) -> None:
        """The job is over."""
        if self._began_at is not None and self._ended_at is None:
            self._ended_at = at

    def commit(self, step: int, step_s: float, at: float) -> None:
        """A step was committed that took so long."""
        if self._began_at is None:
            self._began_at = at - step_s
        self._ended_at = None
        self._steps.append((step, step_s))
        self._productive_s += step_s

    def roll_back(self, step: int) -> float:
        """What was committed behind ``step`` is undone; the seconds that went into it."""
        undone_s = 0.0
        while self._steps and self._steps[-1][0] > step:
            undone_s += self._steps.pop()[1]
        self._productive_s -= undone_s
        return undone_s

    def ratio(self, now: float) -> float | None:
        """From 0 to 1; ``None`` before the first step."""
        if self._began_at is None:
            return None
        elapsed_s = (now if self._ended_at is None else self._ended_at) - self._began_at
        return min(1.0, max(0.0, self._productive_s / elapsed_s)) if elapsed_s > 0 else 1.0
