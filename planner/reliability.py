"""The time for which state in host memory is safe, the interval at which to persist it, and the f to choose
(REFT §5).

A node survives t days with probability P = exp(−λ·t^c) (Weibull; REFT §5, TTF). Nodes fail independently.
Without protection the state in memory survives while all k nodes do (Eq. 6); with it, while in no sharding
group of n nodes more fail than its code can decode (Eq. 5, there for one loss). Nodes that failed are not
replaced in these curves: they say how long a snapshot that nothing renews would last. ``loss_rate_per_day``
says how often state is lost when each lost node is replaced, and the group protected again, within a time.

The paper's Figure 8 (k = 3072, n = 6, λ = 1e-4 and 1e-5, c = 1.3, survival 0.9) says 16.22 days with
protection and 0.50 without. They follow from Eq. 5 *without* its factor P_re^k, here the reading
``figure``, looked up on a grid of 1,000 points over 100 days; the crossings themselves are at 16.18 and
0.41 days. With Eq. 5 ``printed``, where the programs that hold the snapshots must all survive too, it is
2.56 days.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from scipy.integrate import quad
from scipy.optimize import brentq
from scipy.stats import binom

from planner.errors import InfeasibleError
from planner.state_loss import loss_rate

Reading = Literal["figure", "printed"]
"""Eq. 5 as Figure 8 was drawn with, or as printed, with the factor P_re^k."""

Survival = Callable[[float], float]
"""Probability for a number of days."""

MOST_TOLERATED = 64
"""``smallest_tolerance`` looks no further: nobody buys 65 spare replicas."""

NEGLIGIBLE = 1e-18
"""Part of the mean time to loss, relative to the median, after which a curve is not integrated further."""
LONG_BEFORE = 40.0
"""Logarithm of the median by the time before which a curve, which is at most 1, adds nothing to the mean."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureDistribution:
    """The failures of one node, or of one program on it: survival exp(−rate·t^shape), t in days."""

    rate: float
    """λ, in 1 / days^shape; with shape 1, failures per day."""
    shape: float = 1.0
    """c: 1 is no memory; below 1 young nodes fail more often, as real clusters show; above 1 old ones."""

    @classmethod
    def of_mean(cls, mean_days: float, shape: float = 1.0) -> "FailureDistribution":
        """Return the law with this mean time to failure."""
        return cls(rate=_exp(shape * (math.lgamma(1 + 1 / shape) - math.log(mean_days))), shape=shape)

    def log_survival(self, days: float) -> float:
        return -self.rate * math.pow(days, self.shape)

    @property
    def mean_days(self) -> float:
        """Mean time to failure, λ^(−1/c)·Γ(1 + 1/c)."""
        if not self.rate:
            return math.inf
        return _exp(math.lgamma(1 + 1 / self.shape) - math.log(self.rate) / self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProtectedCluster:
    """A cluster and what its snapshots withstand."""

    nodes: int
    """k."""
    group: int
    """n: nodes of a sharding group, the owners of one bucket."""
    losses: int = 1
    """Nodes of a group whose loss can be decoded; Eq. 5 has one."""
    hardware: FailureDistribution
    trainer: FailureDistribution = FailureDistribution(rate=0.0)
    """The training program; its failure loses state that is only on the device (Eq. 6, P_tr)."""
    snapshots: FailureDistribution = FailureDistribution(rate=0.0)
    """The program that holds the snapshots (Eq. 5, P_re), counted by the reading ``printed`` only."""

    def __post_init__(self) -> None:
        """:raises InfeasibleError: an entry makes no sense."""
        if self.nodes < 1:
            raise InfeasibleError(f"nodes is {self.nodes}; it must be ≥ 1")
        if not 1 <= self.group <= self.nodes:
            raise InfeasibleError(f"group is {self.group}; it must be from 1 to nodes = {self.nodes}")
        if not 0 <= self.losses < self.group:
            raise InfeasibleError(
                f"losses is {self.losses}; a group of {self.group} nodes can lose 0 to {self.group - 1}"
            )
        for name in ("hardware", "trainer", "snapshots"):
            law: FailureDistribution = getattr(self, name)
            if not (math.isfinite(law.rate) and law.rate >= 0):
                raise InfeasibleError(f"{name}.rate is {law.rate}; it must be ≥ 0 and finite")
            if not (math.isfinite(law.shape) and law.shape > 0):
                raise InfeasibleError(f"{name}.shape is {law.shape}; it must be > 0 and finite")

    def unprotected(self, days: float) -> float:
        """Return eq. 6: P_s^k · P_tr^k."""
        return math.exp(self.nodes * (self.hardware.log_survival(days) + self.trainer.log_survival(days)))

    def protected(self, days: float, reading: Reading = "figure") -> float:
        """Return eq. 5 for any number of losses: (Σ_{j ≤ losses} C(n,j)·(1 − P_s)^j·P_s^(n−j))^(k/n) [·
        P_re^k].

        Where n does not divide k, the nodes left over are a smaller group, which can lose all but one node
        at most.
        """
        groups, rest = divmod(self.nodes, self.group)
        log_survival = groups * self._log_group(self.group, days)
        if rest:
            log_survival += self._log_group(rest, days)
        if reading == "printed":
            log_survival += self.nodes * self.snapshots.log_survival(days)
        return math.exp(log_survival)

    def _log_group(self, nodes: int, days: float) -> float:
        failed = -math.expm1(self.hardware.log_survival(days))
        # log1p of the small complement: the sum itself is 1 in floating point long before it matters.
        too_many = float(binom.sf(min(self.losses, nodes - 1), nodes, failed))
        return math.log1p(-too_many) if too_many < 1 else -math.inf


def _exp(exponent: float) -> float:
    """Return e^x, or infinity if that is too large for a float: a law with such a mean is a law without
    failures.
    """
    return math.exp(exponent) if exponent < 700 else math.inf


def safe_days(survival: Survival, threshold: float) -> float:
    """Return the longest time, perhaps infinite, after which ``survival``, which never rises, is still
    ``threshold``.

    :raises InfeasibleError: the threshold is no probability between 0 and 1.
    """
    if not 0 < threshold < 1:
        raise InfeasibleError(f"threshold is {threshold}; it must be between 0 and 1")
    low, high = 1e-9, 4e-9
    while survival(high) >= threshold:
        low, high = high, 4 * high
        if low > 1e12:
            return math.inf
    while survival(low) < threshold:
        low, high = low / 4, low
        if low < 1e-300:
            return 0.0
    root = brentq(lambda x: survival(math.exp(x)) - threshold, math.log(low), math.log(high), xtol=1e-13)
    return math.exp(root)


def mean_days(survival: Survival) -> float:
    """Return the mean time to loss, ∫ survival; infinite if survival does not fall."""
    half = safe_days(survival, 0.5)
    if not math.isfinite(half) or half == 0:
        return half

    def of_logarithm(x: float) -> float:
        return survival(half * math.exp(x)) * math.exp(x)

    # As a function of the logarithm of time it rises to one maximum and falls: with shapes far below 1 that is many
    # powers of ten after the median.
    end = 0.01
    while of_logarithm(end) > NEGLIGIBLE:
        end *= 2
    before, _ = quad(of_logarithm, -LONG_BEFORE, 0.0, limit=200)
    after, _ = quad(of_logarithm, 0.0, end, limit=200)
    return float(half * (before + after))


def young_days(cost_days: float, mean_to_loss_days: float) -> float:
    """Return Young's interval between persistent checkpoints: √(2·C·M), for C ≪ M."""
    return math.sqrt(2 * cost_days * mean_to_loss_days)


def daly_days(cost_days: float, mean_to_loss_days: float) -> float:
    """Return Daly's higher-order interval: √(2CM)·(1 + ⅓·√(C/2M) + ⅑·C/2M) − C, and M where C ≥ 2M.

    Both intervals minimise the time lost to writing and to repeated work under failures without memory.
    The time that a recovery takes has no influence on them.
    """
    if not math.isfinite(mean_to_loss_days):
        return math.inf
    if cost_days >= 2 * mean_to_loss_days:
        return mean_to_loss_days
    ratio = cost_days / (2 * mean_to_loss_days)
    return young_days(cost_days, mean_to_loss_days) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - cost_days


def loss_rate_per_day(nodes: int, tolerated: int, law: FailureDistribution, repair_days: float) -> float:
    """Return the rate per day at which more than ``tolerated`` of these nodes are lost before the first of
    them is replaced (``state_loss.loss_rate``).

    Nodes fail at their long-run rate 1 / mean (renewal theory), whatever the shape.
    """
    rate = 1 / law.mean_days if math.isfinite(law.mean_days) else 0.0
    return loss_rate(nodes, tolerated, rate, repair_days)


def smallest_tolerance(
    nodes: int, law: FailureDistribution, repair_days: float, horizon_days: float, threshold: float
) -> int | None:
    """Return Oobleck's f: the fewest simultaneous node failures to tolerate, so that ``horizon_days`` pass
    without more of them with probability ``threshold``; ``None`` if ``MOST_TOLERATED`` are too few.
    """
    for tolerated in range(min(nodes - 1, MOST_TOLERATED) + 1):
        if math.exp(-horizon_days * loss_rate_per_day(nodes, tolerated, law, repair_days)) >= threshold:
            return tolerated
    return None
