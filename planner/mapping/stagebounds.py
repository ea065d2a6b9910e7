"""How quick a mapping can be that has a given stage in a given place: what rules stages out.

The paths of ``makespan.path_bounds`` through stage [u, v) on d devices with g devices behind it, where the
stages in front of it and those behind it are the best that there can be. A stage behind counts as
2·trip − t or as trip − μ, with t the stage's time and μ the shorter of its forward and backward; so their
least sums are needed for every t and μ, and are taken at the next higher value of a grid.
"""

import numpy as np
from numpy.typing import NDArray

from planner.mapping.paths import Band, Option, PathTables, PathWeights, most_behind, options
from planner.stages.costs import StageCosts
from planner.stages.makespan import Floats

GRID = 24
"""Values of t, and of μ, that sums are made for."""


class StageBounds:
    """``of[option, g]`` has shape (W, L + 1): a bound for stage [u, u + 1 + w) at ``[w, u]``, or ``inf``."""

    def __init__(
        self,
        costs: StageCosts,
        nodes: int,
        microbatches: int,
        allowed: NDArray[np.bool_],
        most_stages: int,
    ) -> None:
        """
        :param allowed: stages to choose from, shape as ``costs.time_ms``.
        :param most_stages: of a mapping that is looked for.
        """
        self._microbatches = microbatches
        self._devices = nodes * costs.devices_per_node
        shorter_ms = np.where(allowed, np.minimum(costs.forward_ms, costs.backward_ms), 0.0)
        self._times = np.linspace(0.0, costs.time_ms[allowed].max(), GRID)
        self._shorter = np.linspace(0.0, shorter_ms.max(), GRID)
        twice = np.repeat([1.0, 0.0], GRID)
        less = np.concatenate((self._times, self._shorter))
        weights = PathWeights(
            before_trip=1 + twice,
            before_ms=-less,
            at_trip=1 + twice,
            at_link=0 * twice,
            at_ms=-less,
            after_trip=1 + twice,
            after_ms=-less,
        )
        none = np.zeros(len(less))
        self._behind = PathTables(
            costs, nodes, allowed, weights, none, none + np.inf, costs.layers, costs.layers
        )
        self._in_front = _fronts(costs, self._devices, allowed)
        self.of: dict[tuple[Option, int], Floats] = {}
        for option in options(costs):
            _, d = option
            band = Band(costs, np.where(allowed[option], costs.time_ms[option], np.inf), np.inf)
            shorter = shorter_ms[option][np.arange(costs.layers + 1), band.inside]
            for left in range(self._devices - d + 1):
                if d in self._behind.splits_before(left + d):
                    most = most_behind(costs, self._devices, d, left, most_stages)
                    if most >= 0:
                        self.of[option, left] = self._place(band, shorter, d, left, most)
                    else:
                        self.of[option, left] = np.full_like(band.time_ms, np.inf)

    def _place(self, band: Band, shorter_ms: Floats, d: int, left: int, most_behind: int) -> Floats:
        turns, ends = self._microbatches, band.inside
        known = np.isfinite(band.time_ms)
        time_ms = np.where(known, band.time_ms, 0.0)
        rest = self._behind.after[left]
        most = np.minimum(most_behind, band.layers - ends)
        sums = rest[np.searchsorted(self._times, time_ms).clip(max=GRID - 1), ends]
        twice = np.maximum(sums, rest[0, ends] - most * time_ms) + 4 * band.link_ms
        sums = rest[GRID + np.searchsorted(self._shorter, shorter_ms).clip(max=GRID - 1), ends]
        hidden_ms = np.minimum(most, turns - 1) * shorter_ms
        once = np.maximum(sums, rest[GRID, ends] - hidden_ms) + 2 * band.link_ms
        longest = np.where(most <= turns - 2, np.maximum(once, twice), once)
        bound = self._in_front[self._devices - left - d] + turns * time_ms + longest
        return np.where(known, bound, np.inf)


def _fronts(costs: StageCosts, devices: int, allowed: NDArray[np.bool_]) -> Floats:
    """The least sum of trips of layers [0, v) on the first g devices, shape (G + 1, L + 1)."""
    fronts = np.full((devices + 1, costs.layers + 1), np.inf)
    fronts[0, 0] = 0.0
    trips = np.where(allowed, costs.time_ms + 2 * costs.link_ms, np.inf).min(axis=0)
    for g in range(1, devices + 1):
        for d in costs.stage_devices:
            if d <= g and costs.can_start((g - d) % costs.devices_per_node, d):
                fronts[g] = np.minimum(fronts[g], (fronts[g - d][:, None] + trips[d]).min(axis=0))
    return fronts
