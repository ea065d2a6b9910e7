"""Rate at which a cluster loses state that only memory holds: live replicas and snapshots together.

Two kinds of failures lose it. *Independent* failures do if more nodes that hold the same layers are lost
than these withstand, before the first loss has been repaired. *Common causes* (power, a switch, a bug that
strikes every host) take many nodes at once, whatever the protection. They are the share β of all failures
that interrupt training: the β-factor model of reliability engineering (IEC 61508-6, Annex D), in which
identical hardware and software in one place have β = 0.1. A job learns its own share: the estimate is the
mean of β under a Beta prior, its conjugate, which weighs as much as ten failures.

With protected nodes common causes outweigh independent failures by far, so a rate that was computed from
independent failures alone would suggest to write next to no checkpoints.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

PRIOR_SHARE = 0.1
"""Share of failures with a common cause before any are known."""
PRIOR_FAILURES = 10
"""Number of failures that the prior weighs as much as."""
NEGLIGIBLE = 1e-20
"""Share of a sum below which a term adds nothing to it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HolderGroup:
    """Nodes that hold the same layers."""

    nodes: int
    tolerated: int
    """Losses among them after which memory still has the state."""


def common_cause_share(failures: int, state_losses: int) -> float:
    """Return the expected share of failures that lose the state in memory.

    :param failures: interruptions of the job so far.
    :param state_losses: those after which no memory held the state.
    """
    return (PRIOR_SHARE * PRIOR_FAILURES + state_losses) / (PRIOR_FAILURES + failures)


def loss_rate(nodes: int, tolerated: int, node_rate: float, repair: float) -> float:
    """Return the rate at which more than ``tolerated`` of these nodes are lost before the first of them is
    replaced.

    Each failure opens a window of length ``repair``; it is a loss if ``tolerated`` others or more fail in
    it. The result is an upper bound, because overlapping windows are counted one by one.

    :param node_rate: failures of one node in a unit of time, in which ``repair`` and the result are, too.
    """
    return nodes * node_rate * _at_least(tolerated, nodes - 1, -math.expm1(-node_rate * repair))


def state_loss_horizon_s(
    failure_horizon_s: float,
    nodes: int,
    groups: Iterable[HolderGroup],
    *,
    repair_s: float,
    common_share: float,
) -> float:
    """Return the expected time until no memory holds the state, in seconds; it may be infinite.

    :param failure_horizon_s: expected time to the next failure of any of ``nodes`` nodes.
    :param groups: holders of all layers; every set of nodes once.
    :param repair_s: time in which a recovery makes the lost copies again.
    :param common_share: ``common_cause_share``.
    """
    rate = 1 / failure_horizon_s
    independent = sum(loss_rate(group.nodes, group.tolerated, rate / nodes, repair_s) for group in groups)
    lost = min(rate, common_share * rate + independent)
    return 1 / lost if lost else math.inf


def _at_least(least: int, trials: int, probability: float) -> float:
    """Return the probability of ``least`` or more successes in independent trials (binomial distribution).

    The terms of the tail are added, so that tiny probabilities are exact. The coordinator's daemon uses this,
    and does not load scipy.
    """
    if least <= 0:
        return 1.0
    if least > trials or probability <= 0:
        return 0.0
    if probability >= 1:
        return 1.0
    log_odds = math.log(probability) - math.log1p(-probability)
    log_none = trials * math.log1p(-probability)
    log_ways = math.lgamma(trials + 1)
    tail = 0.0
    for k in range(least, trials + 1):
        log_rest = math.lgamma(k + 1) + math.lgamma(trials - k + 1)
        term = math.exp(log_ways - log_rest + k * log_odds + log_none)
        tail += term
        # The terms shrink beyond the mean: what is left adds nothing.
        if k > trials * probability and term <= tail * NEGLIGIBLE:
            break
    return min(1.0, tail)
