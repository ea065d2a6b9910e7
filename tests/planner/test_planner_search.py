"""Components of the search over instantiations: clocks of many pipelines, and the exact fill."""

from random import Random

import numpy as np
import pytest

from planner.pipelines.knapsack import bound, fill, most_work
from planner.stages.clocks import Clocks, Stages
from planner.stages.makespan import PipelineClock
from tests.helpers.oracles import simulated_makespan_ms


def random_pipelines(random: Random) -> list[Stages]:
    """Return pipelines, some of them with equal stages and slow links, whose schedules repeat after several
    rounds only.
    """
    pipelines: list[Stages] = []
    even = random.random() < 0.5
    for _ in range(random.randint(1, 6)):
        stages = random.randint(1, 8)
        forward_ms, backward_ms = (
            [scale * (1.0 if even else random.uniform(0.5, 2)) for _ in range(stages)] for scale in (1, 2)
        )
        link_ms = [random.choice([0.0, 0.3, 1.7])] * (stages - 1)
        pipelines.append((forward_ms, backward_ms, link_ms))
    return pipelines


def test_many_clocks_agree_with_the_operation_list() -> None:
    random = Random(1)
    for _ in range(15):
        pipelines = random_pipelines(random)
        clocks, everyone = Clocks(pipelines), np.arange(len(pipelines))
        for microbatches in random.sample(range(1, 30), 8):
            found = clocks.times_ms(everyone, np.full(len(pipelines), microbatches))
            expected = [simulated_makespan_ms(*pipeline, microbatches) for pipeline in pipelines]
            assert found == pytest.approx(expected, rel=1e-12)


def test_times_of_many_microbatches_follow_from_the_period() -> None:
    """Compare with the schedule itself, simulated to the end by a clock that does not know about periods."""
    random = Random(2)
    for _ in range(6):
        pipelines = random_pipelines(random)
        far = Clocks(pipelines).times_ms(np.arange(len(pipelines)), np.full(len(pipelines), 3000))
        for pipeline, found in zip(pipelines, far, strict=True):
            plain = PipelineClock(*pipeline)
            for _ in range(3000):
                plain._next_round()
            expected = plain._drain(3000)
            assert found == pytest.approx(expected, rel=1e-10)
            assert PipelineClock(*pipeline).makespan_ms(3000) == pytest.approx(expected, rel=1e-10)


def test_the_most_in_a_limit_is_what_counting_gives() -> None:
    random = Random(3)
    for _ in range(25):
        pipelines, batch = random_pipelines(random), random.randint(1, 90)
        limits_ms = [random.uniform(-3, 300) for _ in pipelines]
        found = Clocks(pipelines).most(np.array(limits_ms), batch)
        for pipeline, limit_ms, most in zip(pipelines, limits_ms, found, strict=True):
            clock = PipelineClock(*pipeline)
            expected = sum(clock.makespan_ms(m) <= limit_ms for m in range(1, batch + 1))
            assert most == expected


def all_work(sizes: list[int], shares: list[int], nodes: int, most: int) -> list[int | None]:
    """Return the most work of 0, 1, … ``most`` templates of ``nodes`` nodes in all."""
    tables: list[dict[int, int]] = [{0: 0}]
    for _ in range(most):
        grown: dict[int, int] = {}
        for total, work in tables[-1].items():
            for size, share in zip(sizes, shares, strict=True):
                if share and total + size <= nodes:
                    grown[total + size] = max(work + share, grown.get(total + size, 0))
        tables.append(grown)
    return [table.get(nodes) for table in tables]


def test_the_fill_and_its_bound_against_a_table_of_everything() -> None:
    random = Random(4)
    filled = 0
    for _ in range(700):
        sizes = sorted(random.sample(range(1, 13), random.randint(1, 7)))
        shares = [random.choice([0, random.randint(1, 30), 2 * size]) for size in sizes]
        count = random.randint(1, 12)
        nodes = random.randint(count, 8 * count)
        work = all_work(sizes, shares, nodes, count)
        expected = work[count]
        as_arrays = np.array(sizes), np.array(shares)
        assert most_work(*as_arrays, nodes, count) == (-np.inf if expected is None else expected)
        if expected is not None:
            filled += 1
            found = fill(*as_arrays, nodes, count)
            assert len(found) == count and sum(found) == nodes
            assert sum(shares[sizes.index(size)] for size in found) == expected
        fewest = random.randint(1, count)
        reached = [done for done in work[fewest:] if done is not None]
        assert bound(*as_arrays, nodes, fewest, count) >= max(reached, default=-np.inf) - 1e-9
    assert filled > 200
