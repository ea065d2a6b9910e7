"""The 1F1B schedule of one pipeline as start and end times, to be drawn.

The recurrence is that of ``planner.stages.makespan``, but every operation is kept and not only the last
one.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from planner.stages.makespan import Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """Operations of S stages and N microbatches; each array has shape (S, N), in ms from the step's start."""

    forward_start_ms: Floats
    forward_end_ms: Floats
    backward_start_ms: Floats
    backward_end_ms: Floats

    @property
    def stages(self) -> int:
        return int(self.forward_end_ms.shape[0])

    @property
    def microbatches(self) -> int:
        return int(self.forward_end_ms.shape[1])

    @property
    def makespan_ms(self) -> float:
        """``PipelineClock.makespan_ms``: the first stage's last backward is the last operation of all."""
        return float(self.backward_end_ms[0, -1])


def timeline(
    forward_ms: Sequence[float], backward_ms: Sequence[float], link_ms: Sequence[float], microbatches: int
) -> Timeline:
    """Return the schedule of ``microbatches`` ≥ 1 microbatches; ``link_ms[s]`` is from stage s to s + 1 and
    back.

    In round m stage s of S computes the backward of microbatch m − S + s and then the forward of m, if they
    exist. The gradient that the backward needs was computed in the previous round, the activation that the
    forward needs in the same round. This takes S · (N + S) steps.
    """
    stages = len(forward_ms)
    shape = (stages, microbatches)
    forward_start, forward_end, backward_start, backward_end = (np.zeros(shape) for _ in range(4))
    free = [0.0] * stages
    for m in range(microbatches + stages):
        for stage in range(max(0, stages - m), min(stages, microbatches + stages - m)):
            i = m - stages + stage
            start = free[stage]
            if stage + 1 < stages:
                start = max(start, float(backward_end[stage + 1, i]) + link_ms[stage])
            free[stage] = start + backward_ms[stage]
            backward_start[stage, i], backward_end[stage, i] = start, free[stage]
        if m >= microbatches:
            continue
        for stage in range(stages):
            start = free[stage]
            if stage:
                start = max(start, float(forward_end[stage - 1, m]) + link_ms[stage - 1])
            free[stage] = start + forward_ms[stage]
            forward_start[stage, m], forward_end[stage, m] = start, free[stage]
    return Timeline(
        forward_start_ms=forward_start,
        forward_end_ms=forward_end,
        backward_start_ms=backward_start,
        backward_end_ms=backward_end,
    )
