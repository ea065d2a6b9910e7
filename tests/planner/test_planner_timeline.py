"""The timeline compared with the clock, the operation list and the rules of 1F1B."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.stages.makespan import PipelineClock
from planner.timeline import Timeline, timeline
from tests.helpers.oracles import operations, simulated_makespan_ms
from tests.helpers.timelines import idle_ms

times = st.integers(0, 40).map(lambda x: x / 8)


@st.composite
def pipelines(draw: st.DrawFn) -> tuple[list[float], list[float], list[float]]:
    stages = draw(st.integers(1, 6))
    some = st.lists(times, min_size=stages, max_size=stages)
    links = st.lists(st.sampled_from([0.0, 0.125, 2.0]), min_size=stages - 1, max_size=stages - 1)
    return draw(some), draw(some), draw(links)


@given(pipelines(), st.integers(1, 14))
@settings(max_examples=150)
def test_it_ends_when_the_clock_and_the_operation_list_say(
    pipeline: tuple[list[float], list[float], list[float]], microbatches: int
) -> None:
    drawn = timeline(*pipeline, microbatches)
    assert (drawn.stages, drawn.microbatches) == (len(pipeline[0]), microbatches)
    assert drawn.makespan_ms == simulated_makespan_ms(*pipeline, microbatches)
    assert drawn.makespan_ms == pytest.approx(PipelineClock(*pipeline).makespan_ms(microbatches))


@given(pipelines(), st.integers(1, 10))
@settings(max_examples=100)
def test_every_operation_waits_for_what_it_needs_and_no_longer(
    pipeline: tuple[list[float], list[float], list[float]], microbatches: int
) -> None:
    forward_ms, backward_ms, link_ms = pipeline
    stages = len(forward_ms)
    drawn = timeline(*pipeline, microbatches)
    for stage in range(stages):
        free = 0.0
        for kind, m in operations(stage, stages, microbatches):
            start, end = spans(drawn, kind)
            ready = 0.0
            if kind == "F" and stage:
                ready = float(drawn.forward_end_ms[stage - 1, m]) + link_ms[stage - 1]
            elif kind == "B":
                last = stage == stages - 1
                ready = float(
                    (drawn.forward_end_ms[stage, m]) if last else drawn.backward_end_ms[stage + 1, m]
                )
                ready += 0.0 if last else link_ms[stage]
            assert start[stage, m] == max(free, ready)
            free = float(end[stage, m])
            assert free == start[stage, m] + (forward_ms if kind == "F" else backward_ms)[stage]


def spans(drawn: Timeline, kind: str) -> tuple[np.ndarray, np.ndarray]:
    if kind == "F":
        return drawn.forward_start_ms, drawn.forward_end_ms
    return drawn.backward_start_ms, drawn.backward_end_ms


def test_the_bubbles_of_a_balanced_pipeline() -> None:
    drawn = timeline([1.0] * 4, [2.0] * 4, [0.0] * 3, 8)
    assert idle_ms(drawn).tolist() == [9.0] * 4
    assert drawn.makespan_ms == (8 + 4 - 1) * 3
