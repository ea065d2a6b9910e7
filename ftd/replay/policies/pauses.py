"""Short forms for the pauses of a reaction."""

import math
from collections.abc import Iterable

from ftd.replay.policy import Category, Pause


def pauses(*steps: tuple[Category, float]) -> tuple[Pause, ...]:
    """Return the pauses of a reaction from pairs of a category and seconds, without those of 0 s."""
    return tuple(Pause(category=category, seconds=seconds) for category, seconds in steps if seconds > 0)


def total_s(steps: Iterable[Pause]) -> float:
    """Return how long pauses take together."""
    return math.fsum(pause.seconds for pause in steps)
