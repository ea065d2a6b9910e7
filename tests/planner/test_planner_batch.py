"""Batch distribution against all distributions, and against the integer program."""

from functools import partial
from itertools import accumulate
from random import Random

import pytest
from oracles import shares

from planner.batch import Cost, check_batch, distribute
from planner.errors import BatchError
from planner.makespan import PipelineClock
from planner.programs import distribute_by_model


def slowest_ms(costs: list[Cost], given: tuple[int, ...]) -> float:
    return max(cost(share) for cost, share in zip(costs, given, strict=True))


def lookup(table: list[float], microbatches: int) -> float:
    return table[microbatches]


def random_costs(random: Random, pipelines: int, microbatches: int) -> list[Cost]:
    """Growing tables, with plateaus and ties."""
    steps = [
        [random.choice([0.0, 1.0, random.random()]) for _ in range(microbatches + 2)]
        for _ in range(pipelines)
    ]
    return [partial(lookup, list(accumulate(column))) for column in steps]


def test_exact_on_random_growing_costs() -> None:
    random = Random(1)
    for _ in range(150):
        pipelines = random.randint(1, 4)
        microbatches = random.randint(pipelines, 10)
        costs = random_costs(random, pipelines, microbatches)
        given = distribute(costs, microbatches)
        assert sum(given) == microbatches and min(given) >= 1
        assert slowest_ms(costs, given) == min(slowest_ms(costs, s) for s in shares(microbatches, pipelines))


def test_the_integer_program_agrees() -> None:
    random = Random(2)
    for _ in range(12):
        pipelines = random.randint(1, 4)
        microbatches = random.randint(pipelines, 24)
        clocks = [
            PipelineClock(times, [2 * t for t in times], [0.01] * (len(times) - 1))
            for times in ([random.random() for _ in range(random.randint(1, 4))] for _ in range(pipelines))
        ]
        costs: list[Cost] = [clock.makespan_ms for clock in clocks]
        given, modelled = distribute(costs, microbatches), distribute_by_model(costs, microbatches)
        assert sum(modelled) == microbatches and min(modelled) >= 1
        assert slowest_ms(costs, given) == pytest.approx(slowest_ms(costs, modelled), rel=1e-6)


def test_equal_pipelines_share_as_evenly_as_can_be_and_the_first_gets_more() -> None:
    clock = PipelineClock([1.0, 1.0], [2.0, 2.0], [0.0])
    assert distribute([clock.makespan_ms] * 3, 128) == (43, 43, 42)


def test_a_slow_pipeline_gets_less() -> None:
    quick, slow = PipelineClock([1.0], [1.0], []), PipelineClock([3.0], [3.0], [])
    assert distribute([slow.makespan_ms, quick.makespan_ms], 8) == (2, 6)


@pytest.mark.parametrize(
    ("batch", "rows", "pipelines", "nearest"),
    [
        (10, 4, 1, (8, 12)),
        (3, 4, 1, (4,)),
        (8, 4, 3, (12,)),
        (10, 4, 4, (16,)),
        (14, 4, 3, (12, 16)),
    ],
)
def test_the_nearest_batches_are_recommended(
    batch: int, rows: int, pipelines: int, nearest: tuple[int, ...]
) -> None:
    with pytest.raises(BatchError, match=str(nearest[-1])) as raised:
        check_batch(batch, rows, pipelines)
    assert raised.value.nearest == nearest
    for better in nearest:
        check_batch(better, rows, pipelines)


def test_fewer_microbatches_than_pipelines_are_refused_by_both() -> None:
    clock = PipelineClock([1.0], [1.0], [])
    for method in (distribute, distribute_by_model):
        with pytest.raises(BatchError):
            method([clock.makespan_ms] * 3, 2)
