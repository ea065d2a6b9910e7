"""Lower bounds on 1F1B steps that are sums over stages, minimised over all mappings by dynamic programming.

Write B for the time of the slowest stage k*, N for the microbatches, trip for a stage's time and twice the
link after it, and μ for the shorter of forward and backward of k*. Paths through the schedule:

    twice after    Σ_{k<k*} trip + N·B + 4 links of k*           + Σ_{k>k*} (2·trip − B)
    once after     Σ_{k<k*} trip + N·B + 2 links of k*           + Σ_{k>k*} (trip − μ)
    round trips    Σ_k ((p + 1)·trip − p·B) + (N − 1)·B              for p·S ≤ N − 1

The first two are those of ``makespan.path_bounds``; they pass twice or once through the stages after k*.
Neither S nor k* is part of the state, and every convex combination of the first two is a bound too. With an
interval [low, high] in the place of B, high as the cap on stage times and low in the sums, the minimum is a
lower bound for every mapping whose slowest stage is in the interval.

A stage whose mode is chosen has one time for each mode that may be the quickest one that fits: the mode
fits with the fewest possible stages after it, and no quicker one fits with the most.

The first two need N − 2 stages after k* at most. So k* is the slowest of the stages that surely have no
more after them; others may be slower, as far as a mapping better than the best one known can have them.

``StageBounds`` bounds the step of every mapping that has a given stage in a given position, which rules
stages out. It takes the same paths through stage [u, v) on d devices with g devices after it, where the
stages before and after it are the best possible. A stage after it counts as 2·trip − t or as trip − μ, with
t the stage's time and μ the shorter of its forward and backward; so their least sums are needed for every t
and μ, and are taken at the next higher value of a grid.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from planner.mapping.quickest import Row
from planner.stages.costs import StageCosts
from planner.stages.makespan import Floats

Option = tuple[int, int]
"""Way in which a stage works: its mode, as a number in ``costs.modes``, and its devices."""


def options(costs: StageCosts) -> list[Option]:
    """Return all options of a stage, ordered by devices."""
    return [(mode, d) for d in costs.stage_devices for mode in costs.modes_of(d)]


@dataclass(frozen=True, slots=True, kw_only=True)
class PathWeights:
    """Weights of a stage before the slowest, the slowest, and a stage after it in the sum; shapes (Q,)."""

    before_trip: Floats
    before_ms: Floats
    at_trip: Floats
    at_link: Floats
    at_ms: Floats
    after_trip: Floats
    after_ms: Floats


def through_slowest(microbatches: int, low_ms: Floats, shorter_ms: Floats, twice: Floats) -> PathWeights:
    """Return the weights of a mixture of the first two paths: ``twice`` of the first, 1 − ``twice`` of the
    second; arrays (Q,).

    :param shorter_ms: the largest possible μ.
    """
    one, none = np.ones_like(low_ms), np.zeros_like(low_ms)
    return PathWeights(
        before_trip=one,
        before_ms=none,
        at_trip=none,
        at_link=2 + 2 * twice,
        at_ms=microbatches * low_ms,
        after_trip=1 + twice,
        after_ms=-twice * low_ms - (1 - twice) * shorter_ms,
    )


def round_trips(microbatches: int, times: int, low_ms: Floats) -> PathWeights:
    """Return the weights of the third path with p = ``times``; p = 0 and N = 1 give the sum of all trips,
    without B.
    """
    weights = evenly(np.full_like(low_ms, times + 1.0), -times * low_ms)
    return replace(weights, at_ms=(microbatches - 1 - times) * low_ms)


def evenly(trip: Floats, each_ms: Floats) -> PathWeights:
    """Return weights that are the same for every stage, the slowest included."""
    return PathWeights(
        before_trip=trip,
        before_ms=each_ms,
        at_trip=trip,
        at_link=np.zeros_like(trip),
        at_ms=each_ms,
        after_trip=trip,
        after_ms=each_ms,
    )


def join(weights: Sequence[PathWeights]) -> PathWeights:
    """Return the rows of all weights, in order."""
    names = [entry.name for entry in fields(PathWeights)]
    return PathWeights(**{name: np.concatenate([getattr(w, name) for w in weights]) for name in names})


class PathTables:
    """Minima for Q intervals at once, for pipelines of ``nodes`` nodes.

    ``after[g]`` and ``done[g]`` have shape (Q, L + 1 + W): the least sum over all ways to put layers [u, L)
    on the last g devices, infinite for u > L; ``done`` includes the slowest stage, ``after`` stops before
    it.
    """

    def __init__(
        self,
        costs: StageCosts,
        nodes: int,
        allowed: NDArray[np.bool_],
        weights: PathWeights,
        low_ms: Floats,
        high_ms: Floats,
        most_after: int,
        most_stages: int,
        bounds: Mapping[tuple[Option, int], Floats] | None = None,
        below_ms: float = np.inf,
    ) -> None:
        """Compute the minima.

        :param allowed: stages to choose from, shape as ``costs.time_ms``.
        :param low_ms, high_ms: the intervals, shape (Q,).
        :param most_after: most stages after the slowest one.
        :param most_stages: most stages of a mapping that is considered.
        :param bounds: ``StageBounds.of``: only stages whose bound is below ``below_ms`` are chosen.
        """
        self._costs, self._most_after, self._most_stages = costs, most_after, most_stages
        self.devices = nodes * costs.devices_per_node
        self._sure: dict[Option, _StageSums] = {}
        self._unsure: dict[Option, _StageSums] = {}
        for option in options(costs):
            mode, d = option
            time_ms = np.where(allowed[mode, d], costs.time_ms[mode, d], np.inf)
            band = Band(costs, time_ms, float(high_ms.max()))
            self._sure[option] = band.sums(weights, low_ms, high_ms, None)
            if min(self.devices - d, most_stages - 1) > most_after:
                band = Band(costs, time_ms, np.inf)
                self._unsure[option] = band.sums(weights, low_ms, high_ms, costs.layers - most_after)
        widest = max(len(sums.at) for sums in (*self._sure.values(), *self._unsure.values()))
        shape = (self.devices + 1, len(low_ms), costs.layers + 1 + widest)
        self.after, self.done = np.full(shape, np.inf), np.full(shape, np.inf)
        self.after[0, :, costs.layers] = 0.0
        self._memory = _MemoryMasks(costs, widest)
        self._bounds, self._below_ms = bounds, below_ms
        for g in range(1, self.devices + 1):
            self._extend(g)

    @property
    def least(self) -> Floats:
        """The lower bounds, shape (Q,); ``inf`` where no mapping has its slowest stage in the interval."""
        least: Floats = self.done[self.devices, :, 0]
        return least

    def choices(self, q: int, devices: int, first: int, found: bool) -> list[tuple[Floats, int, bool]]:
        """Return the choices for a stage that begins at layer ``first``, on the last ``devices`` devices, in
        interval q.

        Each choice is the least sum of the stage and the rest, for each end from ``first`` + 1 on; the
        stage's devices; and whether the slowest stage is this one or an earlier one.

        :param found: whether the slowest stage is an earlier one.
        """
        kinds: list[tuple[Floats, int, bool]] = []
        for d in self._costs.sizes_before(devices):
            in_front, behind = [], []
            for mode in self._costs.modes_of(d):
                left, sums = devices - d, self._sums(devices, (mode, d))
                near = slice(first + 1, first + 1 + len(sums.at))
                mask = self._mask((mode, d), left, len(sums.at))[:, 0, first]
                after, done = self.after[left, q, near] + mask, self.done[left, q, near] + mask
                behind.append((sums.after if found else sums.at)[:, q, first] + after)
                if not found:
                    in_front.append(sums.before[:, q, first] + done)
            kinds.append((_least(behind), d, True))
            if not found:
                kinds.append((_least(in_front), d, False))
        return kinds

    def mapping(self, q: int) -> Row:
        """Return a mapping that attains ``least[q]``, which must be finite."""
        cuts, found = [0], False
        devices: list[int] = []
        while cuts[-1] < self._costs.layers:
            kinds = self.choices(q, self.devices - sum(devices), cuts[-1], found)
            sums, d, found = min(kinds, key=lambda kind: float(kind[0].min()))
            cuts.append(cuts[-1] + 1 + int(sums.argmin()))
            devices.append(d)
        return cuts, devices

    def _sums(self, devices: int, option: Option) -> "_StageSums":
        _, d = option
        most = most_after(self._costs, self.devices, d, devices - d, self._most_stages)
        sure = self._sure[option]
        return self._unsure.get(option, sure) if most > self._most_after else sure

    def _mask(self, option: Option, left: int, longest: int) -> Floats:
        """Return 0, or ``inf`` where a stage is ruled out, shape (W, 1, L + 1)."""
        mask = self._memory.mask(option, left)[:longest]
        if self._bounds is None:
            return mask
        return np.where(self._bounds[option, left][:longest, None, :] < self._below_ms, mask, np.inf)

    def _extend(self, devices: int) -> None:
        layers = self._costs.layers
        after, done = self.after[devices, :, : layers + 1], self.done[devices, :, : layers + 1]
        for d in self._costs.sizes_before(devices):
            for mode in self._costs.modes_of(d):
                sums = self._sums(devices, (mode, d))
                mask = self._mask((mode, d), devices - d, len(sums.at))
                rest = _windows(self.after[devices - d], sums.at.shape) + mask
                rest_done = _windows(self.done[devices - d], sums.at.shape) + mask
                np.minimum(after, (sums.after + rest).min(axis=0), out=after)
                np.minimum(done, (sums.at + rest).min(axis=0), out=done)
                np.minimum(done, (sums.before + rest_done).min(axis=0), out=done)


@dataclass(frozen=True, slots=True)
class _StageSums:
    """Contribution of stage [u, u + 1 + w) before, as and after the slowest: ``[w, q, u]``, or ``inf``."""

    before: Floats
    at: Floats
    after: Floats


class Band:
    """Times of stages on d devices by first layer u and length w + 1, up to the longest that is quick enough."""

    def __init__(self, costs: StageCosts, time_ms: Floats, cap_ms: float) -> None:
        layers = costs.layers
        starts = np.arange(layers + 1)
        # Short stages may be ruled out as well, where they would fit without recomputation.
        firsts, ends = (np.isfinite(time_ms) & (time_ms <= cap_ms)).nonzero()
        longest = int((ends - firsts).max(initial=1))
        self.layers = layers
        self._ends = starts + 1 + np.arange(longest)[:, None]
        self.inside = np.minimum(self._ends, layers)
        behind = np.where(self._ends <= layers, time_ms[starts, self.inside], np.inf)
        self.time_ms: Floats = behind
        self.link_ms: Floats = costs.link_ms[self.inside]

    def sums(self, weights: PathWeights, low_ms: Floats, high_ms: Floats, sure_end: int | None) -> _StageSums:
        """Return the contributions of the stages to the sums.

        :param sure_end: the slowest stage ends there or later, and stages that end earlier may be slower.
        """

        def of_query(values: Floats) -> Floats:
            return values[None, :, None]

        time_ms, link_ms = self.time_ms[:, None, :], self.link_ms[:, None, :]
        trip = time_ms + 2 * link_ms
        low, high = of_query(low_ms), of_query(high_ms)
        within = (time_ms <= high) & np.isfinite(time_ms)
        slowest = within & (time_ms >= low)
        # The rightmost slowest stage is k*, so at an exact B the stages after it are quicker.
        quicker = np.where(low == high, time_ms < high, within)
        in_front = within
        if sure_end is not None:
            surely = (self._ends >= sure_end)[:, None, :]
            slowest = slowest & surely
            in_front = within | (~surely & np.isfinite(time_ms))
        finite = np.where(np.isfinite(trip), trip, 0.0)
        before = of_query(weights.before_trip) * finite + of_query(weights.before_ms)
        at = of_query(weights.at_trip) * finite + of_query(weights.at_link) * link_ms
        after = of_query(weights.after_trip) * finite + of_query(weights.after_ms)
        return _StageSums(
            before=np.where(in_front, before, np.inf),
            at=np.where(slowest, at + of_query(weights.at_ms), np.inf),
            after=np.where(quicker, after, np.inf),
        )


class _MemoryMasks:
    """Masks: 0 where a stage may take an option, else ``inf``."""

    def __init__(self, costs: StageCosts, widest: int) -> None:
        self._costs = costs
        self._limited = costs.memory.limit_bytes is not None or len(costs.modes) > 1
        starts = np.arange(costs.layers + 1)
        self._starts = starts
        self._ends = np.minimum(starts + 1 + np.arange(widest)[:, None], costs.layers)
        self._known: dict[tuple[Option, int, int], Floats] = {}
        self._fewest = _fewest_stages(costs)
        self._none = np.zeros((widest, 1, costs.layers + 1))

    def mask(self, option: Option, left: int) -> Floats:
        """Return the mask of a stage with ``left`` devices after it, shape (W, 1, L + 1)."""
        if not self._limited:
            return self._none
        costs, (mode, d) = self._costs, option
        full, rest = divmod(left, costs.devices_per_node)
        fewest = full * self._fewest[-1] + self._fewest[rest]
        most = min(left, costs.layers - 1) if len(costs.modes) > 1 else 0
        known = self._known.get((option, fewest, most))
        if known is None:
            taken = costs.may_be_quickest(mode, d, fewest, most)[self._starts, self._ends]
            known = self._known[option, fewest, most] = np.where(taken, 0.0, np.inf)[:, None, :]
        return known


def _least(sums: list[Floats]) -> Floats:
    """Return the least value at each index; a shorter array has no values after its end."""
    if len(sums) == 1:
        return sums[0]
    least = np.full(max(map(len, sums)), np.inf)
    for one in sums:
        np.minimum(least[: len(one)], one, out=least[: len(one)])
    return least


def most_after(costs: StageCosts, devices: int, d: int, left: int, most_stages: int) -> int:
    """Return the most stages after one on d devices, with ``left`` of a pipeline's ``devices`` devices after
    it.
    """
    in_front = -(-(devices - left - d) // min(costs.max_devices, costs.devices_per_node))
    return min(left, most_stages - 1 - in_front)


def _fewest_stages(costs: StageCosts) -> list[int]:
    """Return the fewest stages on the last 0, 1, … all devices of a node; where none are possible, the number
    of devices.
    """
    fewest = [0]
    for left in range(1, costs.devices_per_node + 1):
        fewest.append(min((1 + fewest[left - d] for d in costs.sizes_before(left)), default=left))
    return fewest


def _windows(rest: Floats, shape: tuple[int, ...]) -> Floats:
    """Return a view whose element ``[w, q, u]`` is ``rest[q, u + 1 + w]``."""
    row, step = rest.strides
    return as_strided(rest[:, 1:], shape=shape, strides=(step, row, step), writeable=False)


GRID = 24
"""Number of values of t, and of μ, for which sums are computed."""


class StageBounds:
    """Bounds ``of[option, g]`` of shape (W, L + 1), for stage [u, u + 1 + w) at ``[w, u]``, or ``inf``."""

    def __init__(
        self,
        costs: StageCosts,
        nodes: int,
        microbatches: int,
        allowed: NDArray[np.bool_],
        most_stages: int,
    ) -> None:
        """Compute the bounds.

        :param allowed: stages to choose from, shape as ``costs.time_ms``.
        :param most_stages: most stages of a mapping that is considered.
        """
        self._microbatches = microbatches
        self._devices = nodes * costs.devices_per_node
        shorter_ms = np.where(allowed, np.minimum(costs.forward_ms, costs.backward_ms), 0.0)
        self._times = np.linspace(0.0, costs.time_ms[allowed].max(), GRID)
        self._shorter = np.linspace(0.0, shorter_ms.max(), GRID)
        twice = np.repeat([1.0, 0.0], GRID)
        less = np.concatenate((self._times, self._shorter))
        weights = evenly(1 + twice, -less)
        none = np.zeros(len(less))
        self._after = PathTables(
            costs, nodes, allowed, weights, none, none + np.inf, costs.layers, costs.layers
        )
        self._in_front = _fronts(costs, self._devices, allowed)
        self.of: dict[tuple[Option, int], Floats] = {}
        for option in options(costs):
            _, d = option
            band = Band(costs, np.where(allowed[option], costs.time_ms[option], np.inf), np.inf)
            shorter = shorter_ms[option][np.arange(costs.layers + 1), band.inside]
            for left in range(self._devices - d + 1):
                if d in costs.sizes_before(left + d):
                    most = most_after(costs, self._devices, d, left, most_stages)
                    if most >= 0:
                        self.of[option, left] = self._place(band, shorter, d, left, most)
                    else:
                        self.of[option, left] = np.full_like(band.time_ms, np.inf)

    def _place(self, band: Band, shorter_ms: Floats, d: int, left: int, most_after: int) -> Floats:
        turns, ends = self._microbatches, band.inside
        known = np.isfinite(band.time_ms)
        time_ms = np.where(known, band.time_ms, 0.0)
        rest = self._after.after[left]
        most = np.minimum(most_after, band.layers - ends)
        sums = rest[np.searchsorted(self._times, time_ms).clip(max=GRID - 1), ends]
        twice = np.maximum(sums, rest[0, ends] - most * time_ms) + 4 * band.link_ms
        sums = rest[GRID + np.searchsorted(self._shorter, shorter_ms).clip(max=GRID - 1), ends]
        hidden_ms = np.minimum(most, turns - 1) * shorter_ms
        once = np.maximum(sums, rest[GRID, ends] - hidden_ms) + 2 * band.link_ms
        longest = np.where(most <= turns - 2, np.maximum(once, twice), once)
        bound = self._in_front[self._devices - left - d] + turns * time_ms + longest
        return np.where(known, bound, np.inf)


def _fronts(costs: StageCosts, devices: int, allowed: NDArray[np.bool_]) -> Floats:
    """Return the least sum of trips of layers [0, v) on the first g devices, shape (G + 1, L + 1)."""
    fronts = np.full((devices + 1, costs.layers + 1), np.inf)
    fronts[0, 0] = 0.0
    trips = np.where(allowed, costs.time_ms + 2 * costs.link_ms, np.inf).min(axis=0)
    for g in range(1, devices + 1):
        for d in costs.stage_devices:
            if d <= g and costs.can_start((g - d) % costs.devices_per_node, d):
                fronts[g] = np.minimum(fronts[g], (fronts[g - d][:, None] + trips[d]).min(axis=0))
    return fronts
