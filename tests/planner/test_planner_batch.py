"""Batch distribution compared with all distributions, and with the integer program."""

from functools import partial
from itertools import accumulate, product
from random import Random
from statistics import pvariance

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.errors import BatchError, SolverError
from planner.pipelines import programs
from planner.pipelines.batch import (
    Cost,
    check_batch,
    distribute,
    largest_share,
    score_ms,
)
from planner.pipelines.distribution import distribute_batch
from planner.pipelines.programs import distribute_by_model, least_variance_by_model
from planner.pipelines.variance import least_variance
from planner.stages.makespan import PipelineClock
from planner.values import BatchObjective
from tests.helpers.oracles import shares


def slowest_ms(costs: list[Cost], given: tuple[int, ...]) -> float:
    return max(cost(share) for cost, share in zip(costs, given, strict=True))


def lookup(table: list[float], microbatches: int) -> float:
    return table[microbatches]


def random_costs(random: Random, pipelines: int, microbatches: int) -> list[Cost]:
    """Return growing tables, with plateaus and ties."""
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


@settings(deadline=None, max_examples=40)
@given(st.data())
@pytest.mark.long
def test_both_solvers_find_equally_good_shares(data: st.DataObject) -> None:
    durations = st.floats(0.001, 10.0)
    stages = st.lists(durations, min_size=1, max_size=3)
    kinds = [
        PipelineClock(times, [2 * time for time in times], [0.01] * (len(times) - 1)).makespan_ms
        for times in data.draw(st.lists(stages, min_size=1, max_size=4))
    ]
    costs: list[Cost] = data.draw(st.lists(st.sampled_from(kinds), min_size=1, max_size=8))
    microbatches = data.draw(st.integers(len(costs), 64))
    objectives: tuple[BatchObjective, ...] = ("minmax", "variance")
    for objective in objectives:
        own, modelled = (
            distribute_batch(objective, costs, microbatches, solver) for solver in ("exact", "pyomo")
        )
        assert sum(modelled) == microbatches and min(modelled) >= 1
        best = score_ms(objective, costs, own)
        longest_ms = score_ms("minmax", costs, own)
        assert score_ms(objective, costs, modelled) == pytest.approx(best, rel=1e-6, abs=1e-6 * longest_ms)


def test_hundreds_of_pipelines_are_distributed_by_the_integer_program() -> None:
    random = Random(7)
    clocks = [PipelineClock([random.random()], [random.random()], []) for _ in range(6)] * 50
    costs: list[Cost] = [clock.makespan_ms for clock in clocks]
    own, modelled = (distribute_batch("minmax", costs, 8192, solver) for solver in ("exact", "pyomo"))
    assert sum(modelled) == 8192
    assert slowest_ms(costs, modelled) == pytest.approx(slowest_ms(costs, own), rel=1e-6)


def test_a_program_that_takes_too_long_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "SOLVER_LIMIT_S", 0.001)
    random = Random(8)
    with pytest.raises(SolverError, match="found no proved optimum"):
        least_variance_by_model([random.uniform(0.5, 5) for _ in range(20)], 512)


def spread(times_ms: list[float], given: tuple[int, ...]) -> float:
    return pvariance([share * time for share, time in zip(given, times_ms, strict=True)])


def random_times(random: Random, pipelines: int) -> list[float]:
    """Return times of which some are equal, some in ratios that balance exactly."""
    kinds = [
        random.choice([1.0, 2.0, 3.0, random.uniform(0.2, 5)]) for _ in range(random.randint(1, pipelines))
    ]
    return [random.choice(kinds) for _ in range(pipelines)]


def test_the_variance_is_the_least_of_all_distributions() -> None:
    random = Random(4)
    for _ in range(200):
        pipelines = random.randint(1, 5)
        microbatches = random.randint(pipelines, 14)
        times_ms = random_times(random, pipelines)
        given = least_variance(times_ms, microbatches)
        assert sum(given) == microbatches and min(given) >= 1
        least = min(spread(times_ms, option) for option in shares(microbatches, pipelines))
        assert spread(times_ms, given) == pytest.approx(least, rel=1e-9, abs=1e-12)


def test_the_program_of_the_variance_agrees() -> None:
    random = Random(5)
    for pipelines in (1, 2, 5, 9, 14):
        times_ms = [random.uniform(0.5, 5) for _ in range(pipelines)]
        times_ms[-1] = times_ms[0]
        microbatches = random.randint(pipelines, 128)
        given, modelled = (m(times_ms, microbatches) for m in (least_variance, least_variance_by_model))
        assert sum(modelled) == microbatches and min(modelled) >= 1
        assert spread(times_ms, modelled) == pytest.approx(spread(times_ms, given), rel=1e-6, abs=1e-9)


def test_thousands_of_pipelines_are_distributed_optimally() -> None:
    random = Random(6)
    times_ms = [random.uniform(1, 4) for _ in range(7)] * 700
    given = least_variance(times_ms, 100_003)
    assert sum(given) == 100_003
    # No move of a single microbatch is an improvement.
    spent = [share * time for share, time in zip(given, times_ms, strict=True)]
    squares, total = sum(x * x for x in spent), sum(spent)
    least = squares - total**2 / len(spent)
    for giver, taker in product(range(0, len(given), 97), range(0, len(given), 101)):
        if giver != taker:
            fewer, more = spent[giver] - times_ms[giver], spent[taker] + times_ms[taker]
            moved = squares - spent[giver] ** 2 - spent[taker] ** 2 + fewer**2 + more**2
            changed = total - times_ms[giver] + times_ms[taker]
            assert moved - changed**2 / len(spent) >= least * (1 - 1e-9)
    clocks = [PipelineClock([time / 3], [time * 2 / 3], []) for time in times_ms[:7]] * 700
    costs: list[Cost] = [clock.makespan_ms for clock in clocks]
    slowest = slowest_ms(costs, distribute(costs, 100_003))
    done = sum(largest_share(cost, slowest * (1 - 1e-9), 100_003) for cost in costs)
    assert done < 100_003


def test_each_objective_finds_its_own_minimum() -> None:
    clocks = [PipelineClock([1.0] * s, [2.0] * s, [0.1] * (s - 1)) for s in (1, 2, 4)]
    slow = PipelineClock([3.0, 1.0], [5.0, 2.0], [0.1])
    costs: list[Cost] = [*(clock.makespan_ms for clock in clocks), slow.makespan_ms, slow.makespan_ms]
    objectives: tuple[BatchObjective, ...] = ("minmax", "variance")
    given = {objective: distribute_batch(objective, costs, 61) for objective in objectives}
    for objective in objectives:
        scores = [score_ms(objective, costs, given[other]) for other in objectives]
        assert score_ms(objective, costs, given[objective]) == min(scores)
        modelled = distribute_batch(objective, costs, 61, "pyomo")
        assert score_ms(objective, costs, modelled) == pytest.approx(min(scores), rel=1e-6)


def test_equal_pipelines_share_as_evenly_as_possible_and_the_first_gets_more() -> None:
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


def test_both_solvers_reject_fewer_microbatches_than_pipelines() -> None:
    clock = PipelineClock([1.0], [1.0], [])
    for method in (distribute, distribute_by_model):
        with pytest.raises(BatchError):
            method([clock.makespan_ms] * 3, 2)
