"""The step time of a pipeline, three ways, and its lower bound."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.stages.makespan import PipelineClock, makespans, paper_objective_ms, path_bounds
from tests.helpers.oracles import paper_ms, simulated_makespan_ms

seconds = st.floats(0, 10, allow_nan=False).map(lambda x: round(x, 3))


@st.composite
def pipelines(draw: st.DrawFn) -> tuple[list[float], list[float], list[float]]:
    stages = draw(st.integers(1, 6))
    some = st.lists(seconds, min_size=stages, max_size=stages)
    links = st.lists(st.sampled_from([0.0, 0.1, 2.0]), min_size=stages - 1, max_size=stages - 1)
    return draw(some), draw(some), draw(links)


@given(pipelines(), st.lists(st.integers(1, 12), min_size=1, max_size=4))
def test_the_clock_the_batch_and_the_operation_list_agree(
    pipeline: tuple[list[float], list[float], list[float]], questions: list[int]
) -> None:
    forward_ms, backward_ms, link_ms = pipeline
    clock = PipelineClock(forward_ms, backward_ms, link_ms)
    arrays = [np.array([values]).reshape(1, -1) for values in pipeline]
    for microbatches in questions:
        expected = simulated_makespan_ms(forward_ms, backward_ms, link_ms, microbatches)
        assert clock.makespan_ms(microbatches) == pytest.approx(expected, abs=1e-9)
        assert makespans(*arrays, microbatches)[0] == pytest.approx(expected, abs=1e-9)
        assert path_bounds(*arrays, microbatches)[0] <= expected + 1e-9


def test_a_balanced_pipeline_takes_n_plus_s_minus_one_rounds() -> None:
    assert PipelineClock([1] * 4, [2] * 4, [0] * 3).makespan_ms(8) == (8 + 4 - 1) * 3


def test_the_bound_is_tight_for_a_balanced_pipeline() -> None:
    stages = np.ones((1, 4))
    assert path_bounds(stages, 2 * stages, np.zeros((1, 3)), 8)[0] == (8 + 4 - 1) * 3


def test_the_paper_underestimates_an_unbalanced_pipeline() -> None:
    """The paper's idle gaps can be negative: with N_b = 16 the true step of [10, 1, 1, 1] takes 160."""
    assert paper_objective_ms([10, 1, 1, 1]) == 136
    assert PipelineClock([5, 0.5, 0.5, 0.5], [5, 0.5, 0.5, 0.5], [0] * 3).makespan_ms(16) == 160


@given(st.lists(st.integers(1, 9), min_size=1, max_size=8))
def test_the_paper_objective_is_the_sum_of_its_three_terms(times_ms: list[int]) -> None:
    assert paper_objective_ms(times_ms) == paper_ms(times_ms)
