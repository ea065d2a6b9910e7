"""Waits in the schedule of a pipeline."""

import numpy as np
import numpy.typing as npt

from planner.timeline import Timeline


def idle_ms(drawn: Timeline) -> npt.NDArray[np.float64]:
    """Return for each stage how long it waits within the makespan; shape (S,)."""
    busy = drawn.forward_end_ms - drawn.forward_start_ms + drawn.backward_end_ms - drawn.backward_start_ms
    idle: npt.NDArray[np.float64] = drawn.makespan_ms - busy.sum(axis=1)
    return idle
