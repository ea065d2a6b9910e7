"""Batch distribution by the variance of the pipelines' times (Oobleck §4.2.2, Eq. 6); exact.

Minimise Σ (N_i·T_i − mean)² over integers N_i ≥ 1 with Σ N_i = N, the mean over pipelines. With u_i =
N_i·T_i less a constant, A = Σ u_i² and B = Σ u_i, it is A − B²/x for x pipelines: a concave function of the
point (A, B), so the least over all shares is at a corner of the points' convex hull, and as it grows with
A, at a corner of the lower hull. Those corners are the minima of A − 2c·B for some c, which for a fixed c
is separable and convex: each microbatch goes where it costs least. A search over c alone remains:

* Two corners found at c1 < c2 lie on their supporting lines, and the hull between them lies above both
  lines; A − B²/x is least there at the crossing or at the corners. That bound ends most of the search.
* If no point lies below the chord between two corners, there are no corners between them: the chord is an
  edge of the hull.
* The best c is the mean itself. If the mean is c, Σ (c0 − c)/T_i = −Σ δ_i/T_i for the deviations δ_i, where
  c0 = N / Σ 1/T_i, and Cauchy–Schwarz gives |c − c0| ≤ √(variance sum · Σ T_i⁻²) / Σ T_i⁻¹.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from planner.pipelines.batch import by_pipeline, hand_out, kinds_of

LEAST_SHARE_OF_SLOWEST = 1e-9
"""Least time of a pipeline, relative to the slowest: smaller times count as this one, as the method divides by
them.
"""

PRECISION = 1e-9
"""Relative precision of the sum of squares, at which the rest of the search is skipped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Corner:
    """Shares that minimise A − 2·centre·B. Members of a kind get ``shares``, the first ``extra`` of them one
    more.
    """

    centre: float
    shares: tuple[int, ...]
    extra: tuple[int, ...]
    total: float
    """B: the sum of the deviations from the constant."""
    squares: float
    """A: the sum of their squares."""


class _Kinds:
    """Pipelines of equal time are one kind: ``times[g]`` in units of the slowest, ``counts[g]`` of them."""

    def __init__(self, times: list[float], counts: list[int], microbatches: int) -> None:
        self.times, self.counts, self.microbatches = times, counts, microbatches
        self.pipelines = sum(counts)
        self.inverse = sum(count / time for time, count in zip(times, counts, strict=True))
        self.inverse_square = sum(count / time**2 for time, count in zip(times, counts, strict=True))
        self.level = microbatches / self.inverse
        """c0: the time of every pipeline if microbatches could be divided."""

    def corner(self, centre: float) -> _Corner:
        """Return the shares that minimise A − 2·``centre``·B.

        The k-th microbatch adds T²·(2k − 1) − 2c·T; all that add at most some θ are taken. θ is that of
        shares which need not be whole, where shares below one microbatch are set to one.
        """
        shares = [1.0] * len(self.times)
        active = set(range(len(self.times)))
        while active:
            left = self.microbatches - sum(n for g, n in enumerate(self.counts) if g not in active)
            flat = sum(self.counts[g] * (centre / self.times[g] + 0.5) for g in active)
            theta = 2 * (left - flat) / sum(self.counts[g] / self.times[g] ** 2 for g in active)
            for g in active:
                shares[g] = theta / (2 * self.times[g] ** 2) + centre / self.times[g] + 0.5
            below = {g for g in active if shares[g] < 1}
            if not below:
                break
            active -= below
            for g in below:
                shares[g] = 1.0
        return self._hand_out(centre, [max(1, math.floor(share)) for share in shares])

    def _hand_out(self, centre: float, whole: list[int]) -> _Corner:
        left = self.microbatches - sum(n * k for n, k in zip(self.counts, whole, strict=True))
        # The rounding of the shares by the caller can take one microbatch too many.
        while left < 0:
            g = max((g for g, k in enumerate(whole) if k > 1), key=lambda g: self._added(centre, g, whole[g]))
            whole[g] -= 1
            left += self.counts[g]
        whole, extra = hand_out(self.counts, whole, left, partial(self._added, centre))
        total = squares = 0.0
        for time, count, share, more in zip(self.times, self.counts, whole, extra, strict=True):
            few, many = share * time - self.level, (share + 1) * time - self.level
            total += (count - more) * few + more * many
            squares += (count - more) * few**2 + more * many**2
        return _Corner(centre=centre, shares=tuple(whole), extra=tuple(extra), total=total, squares=squares)

    def _added(self, centre: float, kind: int, share: int) -> float:
        time = self.times[kind]
        return time * (time * (2 * share - 1) - 2 * centre)

    def spread(self, total: float, squares: float) -> float:
        """Return the sum of the squared deviations from the mean."""
        return squares - total**2 / self.pipelines


def least_variance(times_ms: Sequence[float], microbatches: int) -> tuple[int, ...]:
    """Return the shares of pipelines that take ``times_ms`` per microbatch. There are at least as many
    microbatches.

    Equal pipelines differ by one microbatch at most, and the first of them get more.
    """
    slowest_ms = max(times_ms)
    scale = [max(t / slowest_ms, LEAST_SHARE_OF_SLOWEST) if slowest_ms else 1.0 for t in times_ms]
    members = kinds_of(scale)
    kinds = _Kinds(list(members), [len(indices) for indices in members.values()], microbatches)
    best = _search(kinds)
    return by_pipeline(members, best.shares, best.extra)


def _search(kinds: _Kinds) -> _Corner:
    best = kinds.corner(kinds.level)
    least = kinds.spread(best.total, best.squares)
    reach = math.sqrt(max(least, 0.0) * kinds.inverse_square) / kinds.inverse * (1 + PRECISION)
    ends = kinds.corner(kinds.level - reach), kinds.corner(kinds.level + reach)
    for corner in ends:
        spread = kinds.spread(corner.total, corner.squares)
        if spread < least:
            best, least = corner, spread
    todo = [ends]
    while todo:
        low, high = todo.pop()
        width = high.total - low.total
        if width <= PRECISION * kinds.level or _bound(kinds, low, high) >= least * (1 - PRECISION):
            continue
        # The deviations were shifted by c0, which A − 2c·B must undo, so their weight is c − c0.
        middle = kinds.corner(kinds.level + (high.squares - low.squares) / width / 2)
        weight = 2 * (middle.centre - kinds.level)
        chord = low.squares - weight * low.total
        if middle.squares - weight * middle.total >= chord - PRECISION * kinds.level**2 * 1e-3:
            continue
        spread = kinds.spread(middle.total, middle.squares)
        if spread < least:
            best, least = middle, spread
        todo += [(low, middle), (middle, high)]
    return best


def _bound(kinds: _Kinds, low: _Corner, high: _Corner) -> float:
    """Return the least spread of corners between two: at the crossing of their supporting lines."""
    left, right = 2 * (low.centre - kinds.level), 2 * (high.centre - kinds.level)
    if right <= left:
        return math.inf
    total = (low.squares - left * low.total - high.squares + right * high.total) / (right - left)
    return kinds.spread(total, low.squares + left * (total - low.total))
