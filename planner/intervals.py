"""Number of steps from one snapshot in memory to the next: time lost to copying against work that is repeated.

A failure that live replicas do not cover undoes the steps after the newest snapshot. With a snapshot after
every k steps of s seconds, each of which costs C seconds of training, work proceeds in pieces of k·s
seconds that take w = k·s + C. Under failures at the constant rate 1/M a piece that a failure interrupts
begins again, so it takes M·(e^(w/M) − 1) seconds on average (Daly 2006, Eq. 13 without the restart, which
multiplies every k alike and so has no influence on the choice). The share of time lost is that over k·s,
minus one:

    lost(k) = M·(e^((k·s + C)/M) − 1) / (k·s) − 1

For k·s + C ≪ M this is C/(k·s) + k·s/2M, whose minimum is Young's k·s = √(2·C·M). As a function of x = k·s
it has one minimum, where its derivative is zero: e^(−(x + C)/M) = 1 − x/M. The left side minus the right
one rises with x from below zero, so the root is found by bisection; of the two integers k around it the
better one is exact. The time until a snapshot is complete everywhere adds the same to every k and has no
influence either.

REFT's bound comes first: a snapshot that costs less than a small share of a step is taken after every step,
because then losing nothing is worth more than that share.

M is the expected time to the next failure of any node. Most failures are covered by live replicas, so the
interval errs on the side of short ones.
"""

import math
from dataclasses import dataclass

KEEP_INTERVAL_WITHIN = 1.1
"""An interval stays while it loses at most this factor times what the best one loses: near the optimum the
curve is flat, and measurements vary.
"""
CHEAP_WITHIN = 1.5
"""Snapshots after every step stay until a snapshot costs this factor times the share for which they were
chosen.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotCost:
    """Measurements and assumptions from which an interval is chosen."""

    step_s: float
    """Time of a step without a snapshot."""
    cost_s: float
    """Training time that one snapshot takes."""
    horizon_s: float
    """Expected time to the next failure, M."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IntervalChoice:
    every_steps: int
    lost_share: float
    """Expected share of all time that is lost."""
    reason: str


def lost_share(every_steps: int, cost: SnapshotCost) -> float:
    """Return lost(k) of the module's docstring; infinite if a piece is never expected to end."""
    work_s = every_steps * cost.step_s
    exponent = (work_s + cost.cost_s) / cost.horizon_s
    if exponent > 700:
        return math.inf
    return cost.horizon_s * math.expm1(exponent) / work_s - 1


def best_interval(cost: SnapshotCost, most: int) -> int:
    """Return the integer k from 1 to ``most`` that loses least."""
    low, high = 0.0, cost.horizon_s
    for _ in range(200):
        middle = (low + high) / 2
        if middle in (low, high):
            break
        if math.exp(-(middle + cost.cost_s) / cost.horizon_s) < 1 - middle / cost.horizon_s:
            low = middle
        else:
            high = middle
    below = min(max(1, int(low / cost.step_s)), most)
    return min((below, min(below + 1, most)), key=lambda every: (lost_share(every, cost), every))


def choose_interval(
    cost: SnapshotCost, *, present: int, most: int, cheap_share: float, settled: bool = True
) -> IntervalChoice:
    """Return the interval to continue with: ``present`` unless another one is worth the change.

    :param present: the interval so far.
    :param settled: whether ``present`` was chosen from measurements too; if not, the best one is taken.
    :param cheap_share: share of a step; a snapshot that costs no more is taken after every step.
    """
    share = cost.cost_s / cost.step_s
    what = f"a snapshot costs {_ms(cost.cost_s)} of a step of {_ms(cost.step_s)} ({share:.2%})"
    limit = cheap_share * (CHEAP_WITHIN if settled and present == 1 else 1.0)
    if share <= limit:
        lost = lost_share(1, cost)
        return IntervalChoice(every_steps=1, lost_share=lost, reason=f"{what}: cheap enough for every step")
    best = best_interval(cost, most)
    kept, lost = lost_share(present, cost), lost_share(best, cost)
    if settled and present <= most and kept <= KEEP_INTERVAL_WITHIN * lost:
        best, lost = present, kept
    reason = (
        f"{what}, and a failure is expected every {_span(cost.horizon_s)}: "
        f"every {best} steps loses {lost:.2%} of the time"
    )
    if best != present:
        reason += f", every {present} would lose {kept:.2%}"
    return IntervalChoice(every_steps=best, lost_share=lost, reason=reason)


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms"


def _span(seconds: float) -> str:
    for unit, length_s in (("days", 86_400.0), ("h", 3_600.0), ("min", 60.0)):
        if seconds >= 2 * length_s:
            return f"{seconds / length_s:.3g} {unit}"
    return f"{seconds:.3g} s"
