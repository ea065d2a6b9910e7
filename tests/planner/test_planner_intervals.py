"""The interval between snapshots compared with every interval, and with failures drawn one by one."""

import math
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.intervals import (
    IntervalCost,
    best_interval,
    choose_checkpoint_interval,
    choose_interval,
    lost_share,
)
from planner.reliability import young_days

costs = st.builds(
    IntervalCost,
    step_s=st.floats(1e-3, 100.0),
    cost_s=st.floats(0.0, 50.0),
    horizon_s=st.floats(1.0, 1e6),
)


@settings(max_examples=300)
@given(costs, st.integers(1, 400))
def test_the_best_interval_is_the_best_of_all(cost: IntervalCost, most: int) -> None:
    tried = min(lost_share(every, cost) for every in range(1, most + 1))
    found = best_interval(cost, most)
    assert 1 <= found <= most
    assert lost_share(found, cost) == pytest.approx(tried, rel=1e-9, abs=1e-11)


def simulated_share(every: int, cost: IntervalCost, pieces: int) -> float:
    """Return the lost share of work whose pieces run under failures drawn one by one: 1 − work / total time."""
    draw, spent_s = random.Random(7), 0.0
    piece_s = every * cost.step_s + cost.cost_s
    for _ in range(pieces):
        while (failed_s := draw.expovariate(1 / cost.horizon_s)) < piece_s:
            spent_s += failed_s
        spent_s += piece_s
    return 1 - pieces * every * cost.step_s / spent_s


@pytest.mark.parametrize("every", [1, 4, 12, 40])
def test_the_share_that_is_lost_is_that_of_drawn_failures(every: int) -> None:
    cost = IntervalCost(step_s=1.0, cost_s=0.5, horizon_s=60.0)
    assert simulated_share(every, cost, 60_000) == pytest.approx(lost_share(every, cost), rel=0.03)


def test_rare_failures_give_young_s_interval() -> None:
    cost = IntervalCost(step_s=0.01, cost_s=0.05, horizon_s=1e5)
    assert best_interval(cost, 10**9) * 0.01 == pytest.approx(young_days(0.05, 1e5), rel=1e-2)


def chosen(share: float, present: int, *, settled: bool = True, horizon_s: float = 3600.0) -> int:
    cost = IntervalCost(step_s=0.1, cost_s=0.1 * share, horizon_s=horizon_s)
    return choose_interval(cost, present=present, most=10_000, cheap_share=0.01, settled=settled).every_steps


def test_very_cheap_snapshots_are_taken_after_every_step_with_hysteresis() -> None:
    assert chosen(0.0, 5) == chosen(0.01, 5) == 1
    assert chosen(0.012, 5) > 1
    assert chosen(0.014, 1) == 1
    assert chosen(0.016, 1) > 1


def test_an_interval_stays_while_another_one_saves_little() -> None:
    best = chosen(0.2, 10_000)
    assert best == pytest.approx((2 * 0.02 * 3600) ** 0.5 / 0.1, rel=0.02)
    assert chosen(0.2, round(1.3 * best)) == round(1.3 * best)
    assert chosen(0.2, round(1.3 * best), settled=False) == best
    assert chosen(0.2, 2 * best) == chosen(0.2, best // 3) == best
    assert chosen(0.2, best, horizon_s=60.0) < best / 4


def checkpoints(present: int = 1, *, settled: bool = False, **fields: float) -> int:
    cost = {"step_s": 0.1, "cost_s": 1.0, "horizon_s": 1e6} | fields
    write_s = cost.pop("write_s", 1.0)
    choice = choose_checkpoint_interval(
        IntervalCost(**cost), present=present, least=5, most=100_000, write_s=write_s, settled=settled
    )
    return choice.every_steps


def test_checkpoints_follow_their_cost_and_how_often_the_state_is_lost() -> None:
    best = checkpoints()
    assert best == pytest.approx(young_days(1.0, 1e6) / 0.1, rel=0.01)
    assert checkpoints(horizon_s=1e4) == pytest.approx(best / 10, rel=0.01)
    assert checkpoints(cost_s=4.0) == pytest.approx(2 * best, rel=0.01)


def test_checkpoints_that_cost_nothing_leave_the_storage_idle_most_of_the_time() -> None:
    assert checkpoints(cost_s=0.0, write_s=1.0) == 100  # Ten times one second.
    assert checkpoints(cost_s=0.0, write_s=0.0) == 5  # Every snapshot.
    assert checkpoints(cost_s=0.0, write_s=1e9) == 100_000  # All steps of the job.


def test_an_interval_of_checkpoints_stays_until_another_one_matters() -> None:
    best = checkpoints(horizon_s=1e4)
    assert checkpoints(round(1.3 * best), horizon_s=1e4, settled=True) == round(1.3 * best)
    assert checkpoints(10 * best, horizon_s=1e4, settled=True) == best
    # Two intervals that each lose less than a thousandth of the time.
    assert checkpoints(100, cost_s=0.0, horizon_s=1e6, settled=True) == 100
    assert checkpoints(140, cost_s=0.0, horizon_s=1e6, settled=True) == 140
    # The storage has become slower.
    assert checkpoints(100, cost_s=0.0, write_s=1.4, settled=True) == 100
    assert checkpoints(100, cost_s=0.0, write_s=2.0, settled=True) == 200


def test_the_reason_has_the_figures() -> None:
    cost = IntervalCost(step_s=0.1, cost_s=0.02, horizon_s=7200.0)
    choice = choose_interval(cost, present=5, most=1000, cheap_share=0.01)
    assert choice.reason == (
        "a snapshot costs 20 ms of a step of 100 ms (20.00%), and a failure is expected every 2 h: every 170 "
        "steps loses 0.24% of the time, every 5 would lose 3.85%"
    )
    assert choice.lost_share == pytest.approx(lost_share(choice.every_steps, cost))


def test_the_share_of_all_time_is_never_more_than_all() -> None:
    cost = IntervalCost(step_s=1.0, cost_s=1.0, horizon_s=1.0)
    assert lost_share(4, cost) == pytest.approx(1 - 4 / (math.e**5 - 1))
    endless = choose_interval(replace(cost, cost_s=1e4), present=4, most=10, cheap_share=0.01)
    assert endless.lost_share == 1.0 and "loses 100.00% of the time" in endless.reason
    endless = choose_checkpoint_interval(cost, present=1, least=1000, most=1000, write_s=1.0)
    assert endless.lost_share == 1.0 and "loses 100.00% of the time" in endless.reason
