"""Number of steps from one snapshot in memory to the next, and from one persistent checkpoint to the next:
time lost to saving against work that is repeated.

A failure that live replicas do not cover undoes the steps after the newest snapshot. With a snapshot after
every k steps of s seconds, each of which costs C seconds of training, work proceeds in pieces of k·s
seconds that take w = k·s + C. Under failures at the constant rate 1/M a piece that a failure interrupts
begins again, so it takes M·(e^(w/M) − 1) seconds on average (Daly 2006, Eq. 13 without the restart, which
multiplies every k alike and so has no influence on the choice). The time lost per time of useful work is
that over k·s, minus one:

    lost(k) = M·(e^((k·s + C)/M) − 1) / (k·s) − 1

Its share of all time, which is what is reported, is lost(k) / (1 + lost(k)).

For k·s + C ≪ M this is C/(k·s) + k·s/2M, whose minimum is Young's k·s = √(2·C·M). As a function of x = k·s
it has one minimum, where its derivative is zero: e^(−(x + C)/M) = 1 − x/M. The left side minus the right
one rises with x from below zero, so the root is found by bisection; of the two integers k around it the
better one is exact. The time until a snapshot is complete everywhere adds the same to every k and has no
influence either.

REFT's bound comes first: a snapshot that costs less than a small share of a step is taken after every step,
because then losing nothing is worth more than that share.

M is the expected time to the next failure of any node. Most failures are covered by live replicas, so the
interval errs on the side of short ones.

A persistent checkpoint matters only if no memory holds the state any more, so for checkpoints M is the
expected time to that (``state_loss``), and C what one checkpoint costs training, which continues while it is
written. Often that is next to nothing. Then the storage sets the bound: writes are apart by a multiple of
the time that one takes.
"""

import math
from dataclasses import dataclass

KEEP_INTERVAL_WITHIN = 1.1
"""An interval stays while it loses at most this factor times what the best one loses: near the optimum the
curve is flat, and measurements vary.
"""
EXCEED_WITHIN = 1.5
"""A bound with a hysteresis holds until it is exceeded by this factor: the share of a step up to which a
snapshot is cheap, and the least time between two checkpoints.
"""
KEEP_CHECKPOINTS_WITHIN = 1e-3
"""An interval of checkpoints stays while the best one saves less than this share of all time."""
WRITE_PERIODS = 10
"""A checkpoint begins at least this many times the duration of a write after the one before, so that storage,
which other jobs use too, is busy for a tenth of the time at most.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class IntervalCost:
    """Measurements and assumptions from which an interval is chosen."""

    step_s: float
    """Time of a step without a snapshot."""
    cost_s: float
    """Training time that one snapshot or checkpoint takes."""
    horizon_s: float
    """Expected time until it is needed, M."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IntervalChoice:
    every_steps: int
    lost_share: float
    """Expected share of all time that is lost."""
    reason: str


def lost_share(every_steps: int, cost: IntervalCost) -> float:
    """Return the expected share of all time that is lost, from 0 to 1; 1 if a piece is never expected to end."""
    return _share(_lost(every_steps, cost))


def _share(lost: float) -> float:
    """Return the share of all time that ``lost`` of the module's docstring is."""
    return 1 - 1 / (1 + lost)


def _lost(every_steps: int, cost: IntervalCost) -> float:
    """Return lost(k) of the module's docstring; infinite if a piece is never expected to end."""
    work_s = every_steps * cost.step_s
    exponent = (work_s + cost.cost_s) / cost.horizon_s
    if exponent > 700:
        return math.inf
    return cost.horizon_s * math.expm1(exponent) / work_s - 1


def best_interval(cost: IntervalCost, most: int) -> int:
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
    return min((below, min(below + 1, most)), key=lambda every: (_lost(every, cost), every))


def choose_interval(
    cost: IntervalCost, *, present: int, most: int, cheap_share: float, settled: bool = True
) -> IntervalChoice:
    """Return the interval to continue with: ``present`` unless another one is worth the change.

    :param present: the interval so far.
    :param settled: whether ``present`` was chosen from measurements too; if not, the best one is taken.
    :param cheap_share: share of a step; a snapshot that costs no more is taken after every step.
    """
    share = cost.cost_s / cost.step_s
    what = f"a snapshot costs {_ms(cost.cost_s)} of a step of {_ms(cost.step_s)} ({share:.2%})"
    limit = cheap_share * (EXCEED_WITHIN if settled and present == 1 else 1.0)
    if share <= limit:
        lost = _lost(1, cost)
        return IntervalChoice(
            every_steps=1, lost_share=_share(lost), reason=f"{what}: cheap enough for every step"
        )
    best = best_interval(cost, most)
    kept, lost = _lost(present, cost), _lost(best, cost)
    if settled and present <= most and kept <= KEEP_INTERVAL_WITHIN * lost:
        best, lost = present, kept
    reason = (
        f"{what}, and a failure is expected every {_span(cost.horizon_s)}: "
        f"every {best} steps loses {_share(lost):.2%} of the time"
    )
    if best != present:
        reason += f", every {present} would lose {_share(kept):.2%}"
    return IntervalChoice(every_steps=best, lost_share=_share(lost), reason=reason)


def checkpoint_cost_share(step_s: float, writing_step_s: float) -> float:
    """Return the share of the time of a write by which it delays training, from 0 to 1: in W seconds of steps of
    s_w seconds, W·(1 − s/s_w) more pass than the same steps take without a write.

    :param step_s: time of a step while no checkpoint is written, s.
    :param writing_step_s: time of a step while one is written, s_w.
    """
    return max(0.0, 1 - step_s / writing_step_s)


def choose_checkpoint_interval(
    cost: IntervalCost, *, present: int, least: int, most: int, write_s: float, settled: bool = True
) -> IntervalChoice:
    """Return the interval of persistent checkpoints to continue with: ``present`` unless another one is worth
    the change.

    :param present: the interval so far.
    :param least: shortest possible interval, that of the snapshots from which checkpoints are made.
    :param write_s: time from the order of a checkpoint until it is complete.
    :param settled: whether ``present`` was chosen from measurements too; if not, the best one is taken.
    """
    spaced = math.ceil(WRITE_PERIODS * write_s / cost.step_s)
    bound = min(max(least, spaced), most)
    best = max(best_interval(cost, most), bound)
    kept, lost = _lost(present, cost), _lost(best, cost)
    allowed = max(KEEP_INTERVAL_WITHIN * lost, lost + KEEP_CHECKPOINTS_WITHIN)
    if settled and bound <= EXCEED_WITHIN * present and present <= most and kept <= allowed:
        best, lost = present, kept
    reason = (
        f"a checkpoint costs {_span(cost.cost_s)} of training and takes {_span(write_s)} to write, and memory "
        f"is expected to lose the state every {_span(cost.horizon_s)}: every {best} steps loses {_share(lost):.2%} of "
        "the time"
    )
    return IntervalChoice(every_steps=best, lost_share=_share(lost), reason=reason)


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms" if seconds < 1 else _span(seconds)


def _span(seconds: float) -> str:
    for unit, length_s in (("days", 86_400.0), ("h", 3_600.0), ("min", 60.0)):
        if seconds >= 2 * length_s:
            return f"{seconds / length_s:.3g} {unit}"
    return f"{seconds:.3g} s"
