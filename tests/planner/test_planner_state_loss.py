"""The rate of losses of state in memory: its parts, and the share of common causes that a job learns."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binom

from planner.state_loss import HolderGroup, common_cause_share, loss_rate, state_loss_horizon_s


@given(st.integers(1, 3000), st.integers(0, 8), st.floats(1e-6, 1.0), st.floats(1e-6, 2.0))
def test_the_rate_is_that_of_the_binomial_distribution(
    nodes: int, tolerated: int, rate: float, repair: float
) -> None:
    others = binom.sf(tolerated - 1, nodes - 1, -math.expm1(-rate * repair))
    assert loss_rate(nodes, tolerated, rate, repair) == pytest.approx(
        nodes * rate * others, rel=1e-6, abs=1e-300
    )


@pytest.mark.parametrize("tolerated", range(0, 16, 5))
def test_of_a_thousand_million_nodes_few_terms_are_added(tolerated: int) -> None:
    """All terms would take minutes."""
    chance = -math.expm1(-1e-10)
    others = binom.sf(tolerated - 1, 999_999_999, chance)
    assert loss_rate(1_000_000_000, tolerated, 1e-9, 0.1) == pytest.approx(others, rel=1e-4)


def test_the_share_of_common_causes_is_learned() -> None:
    assert common_cause_share(0, 0) == pytest.approx(0.1)
    assert common_cause_share(90, 0) == pytest.approx(0.01)
    assert common_cause_share(90, 90) == pytest.approx(0.91)


def horizon_s(*groups: HolderGroup, share: float = 0.1) -> float:
    return state_loss_horizon_s(1000.0, 4, groups, repair_s=1.0, common_share=share)


def test_state_that_one_node_alone_holds_is_lost_with_that_node() -> None:
    alone = HolderGroup(nodes=1, tolerated=0)
    assert horizon_s(alone, share=0.0) == pytest.approx(4000.0)
    assert horizon_s(alone, alone, alone, alone) == pytest.approx(1000.0), "as often as any node fails"


def test_of_protected_state_common_causes_remain() -> None:
    pair = HolderGroup(nodes=2, tolerated=1)
    assert horizon_s(pair, pair) == pytest.approx(10_000.0, rel=0.01)
    # Each of two pairs: 2 · (1 / 4000) failures a second, and the other one fails within the second.
    assert horizon_s(share=0.0) == math.inf
    assert 1 / horizon_s(pair, pair, share=0.0) == pytest.approx(2 * 2 / 4000**2, rel=0.01)
