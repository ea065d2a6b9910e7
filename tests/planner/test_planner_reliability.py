"""REFT §5 compared with its published figures, with counting, and with a small simulation."""

import math
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.errors import InfeasibleError
from planner.reliability import (
    FailureDistribution,
    ProtectedCluster,
    daly_days,
    loss_rate_per_day,
    mean_days,
    safe_days,
    smallest_tolerance,
    young_days,
)

FIGURE_8 = ProtectedCluster(
    nodes=3072,
    group=6,
    hardware=FailureDistribution(rate=1e-4, shape=1.3),
    trainer=FailureDistribution(rate=1e-5, shape=1.3),
    snapshots=FailureDistribution(rate=1e-5, shape=1.3),
)


def test_figure_8s_days_follow_from_its_grid_and_the_crossings_are_a_little_earlier() -> None:
    grid = np.linspace(0, 100, 1000).tolist()
    read_off = [next(d for d in grid if s(d) < 0.9) for s in (FIGURE_8.protected, FIGURE_8.unprotected)]
    assert [round(days, 2) for days in read_off] == [16.22, 0.50]
    assert safe_days(FIGURE_8.protected, 0.9) == pytest.approx(16.178, abs=5e-4)
    assert safe_days(FIGURE_8.unprotected, 0.9) == pytest.approx(0.408, abs=5e-4)


def test_equation_5_as_printed_gives_less() -> None:
    printed = safe_days(lambda days: FIGURE_8.protected(days, "printed"), 0.9)
    assert printed == pytest.approx(2.564, abs=5e-4)


def counted(protection: ProtectedCluster, days: float) -> float:
    """Return the probability of survival, from every combination of nodes that are up or down."""
    up = math.exp(protection.hardware.log_survival(days))
    groups = [
        range(first, min(first + protection.group, protection.nodes))
        for first in range(0, protection.nodes, protection.group)
    ]
    total = 0.0
    for state in product((True, False), repeat=protection.nodes):
        lost = [sum(not state[node] for node in group) for group in groups]
        if all(n <= min(protection.losses, len(g) - 1) for n, g in zip(lost, groups, strict=True)):
            total += math.prod(up if there else 1 - up for there in state)
    return total


@given(
    nodes=st.integers(2, 9),
    group=st.integers(1, 5),
    losses=st.integers(0, 4),
    rate=st.floats(0.001, 0.5),
    shape=st.floats(0.5, 2.0),
    days=st.floats(0.1, 10),
)
def test_survival_is_what_counting_all_states_gives(
    nodes: int, group: int, losses: int, rate: float, shape: float, days: float
) -> None:
    group = min(group, nodes)
    losses = min(losses, group - 1)
    law = FailureDistribution(rate=rate, shape=shape)
    protection = ProtectedCluster(nodes=nodes, group=group, losses=losses, hardware=law)
    assert protection.protected(days) == pytest.approx(counted(protection, days), rel=1e-9)
    if losses == 0:
        assert protection.protected(days) == pytest.approx(protection.unprotected(days), rel=1e-9)


def test_more_losses_that_can_be_decoded_are_safer_for_longer() -> None:
    law = FailureDistribution(rate=1e-3)
    safe = [
        safe_days(ProtectedCluster(nodes=60, group=6, losses=n, hardware=law).protected, 0.99)
        for n in range(4)
    ]
    assert safe == sorted(safe) and len(set(safe)) == 4


@given(mean=st.floats(0.1, 1e4), shape=st.floats(0.4, 3.0))
def test_a_law_of_a_mean_has_that_mean(mean: float, shape: float) -> None:
    assert FailureDistribution.of_mean(mean, shape).mean_days == pytest.approx(mean, rel=1e-9)


def test_a_mean_beyond_the_range_of_numbers_is_infinite() -> None:
    assert FailureDistribution(rate=1e-300, shape=0.1).mean_days == math.inf
    assert FailureDistribution.of_mean(1e-300, 5.0).rate == math.inf


@pytest.mark.parametrize("shape", [0.1, 0.2, 0.7, 1.0, 10.0])
def test_the_mean_time_to_loss_of_one_node_is_its_mean(shape: float) -> None:
    """With small shapes the mean is many powers of ten above the median."""
    law = FailureDistribution.of_mean(500.0, shape)
    alone = ProtectedCluster(nodes=1, group=1, losses=0, hardware=law)
    assert mean_days(alone.unprotected) == pytest.approx(law.mean_days, rel=1e-6)
    assert mean_days(lambda _: 1.0) == math.inf
    many = ProtectedCluster(nodes=3072, group=1, losses=0, hardware=law)
    first = FailureDistribution(rate=3072 * law.rate, shape=shape)
    assert mean_days(many.unprotected) == pytest.approx(first.mean_days, rel=1e-6)


@pytest.mark.parametrize(("cost", "mean"), [(1e-3, 2.0), (0.01, 1.0), (0.05, 5.0)])
def test_dalys_interval_wastes_least(cost: float, mean: float) -> None:
    """Compare with the expected time per useful day under exponential failures (Daly 2006, eq. 20, without
    restarts).
    """

    def wasted(interval: float) -> float:
        return mean * (math.exp((interval + cost) / mean) - 1) / interval

    best = daly_days(cost, mean)
    assert all(wasted(best) <= wasted(best * factor) for factor in (0.8, 0.9, 1.1, 1.2))
    assert daly_days(3 * mean, mean) == mean
    assert young_days(cost, mean) == pytest.approx(best, rel=0.1)


def test_losses_come_with_slow_repair_and_spare_replicas_prevent_them() -> None:
    law = FailureDistribution.of_mean(100.0)
    assert loss_rate_per_day(50, 0, law, 0.1) == pytest.approx(0.5)
    rates = [loss_rate_per_day(50, 1, law, repair) for repair in (0.01, 0.1, 1.0)]
    assert rates == sorted(rates)
    # 49 others at 0.01 a day, a tenth of a day long: one fails in the window about once in 21.
    assert rates[1] == pytest.approx(0.5 * (1 - math.exp(-49 * 0.001)), rel=1e-6)
    bought = [smallest_tolerance(50, law, repair, 30.0, 0.9) for repair in (0.001, 0.1, 1.0)]
    assert bought == sorted(bought, key=lambda f: f or 0) and bought[0] == 1
    assert smallest_tolerance(3000, FailureDistribution.of_mean(1.0), 1.0, 30.0, 0.999) is None
    assert smallest_tolerance(50, FailureDistribution(rate=0.0), 1.0, 30.0, 0.999) == 0


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"nodes": 0}, "nodes is 0"),
        ({"group": 0}, "group is 0"),
        ({"group": 7}, "group is 7"),
        ({"losses": 3}, "losses is 3"),
        ({"losses": -1}, "losses is -1"),
        ({"hardware": FailureDistribution(rate=math.nan)}, "hardware.rate is nan"),
        ({"hardware": FailureDistribution(rate=math.inf)}, "hardware.rate is inf; it must be ≥ 0 and finite"),
        ({"trainer": FailureDistribution(rate=-1.0)}, "trainer.rate is -1"),
        ({"hardware": FailureDistribution(rate=1.0, shape=0.0)}, "hardware.shape is 0"),
    ],
)
def test_bad_entries_are_named(change: dict[str, object], names: str) -> None:
    good = {"nodes": 6, "group": 3, "losses": 1, "hardware": FailureDistribution(rate=0.1)}
    with pytest.raises(InfeasibleError, match=names):
        ProtectedCluster(**{**good, **change})  # type: ignore[arg-type]
    with pytest.raises(InfeasibleError, match="threshold is 1"):
        safe_days(lambda days: 0.5, 1.0)
