"""The best mapping for one time of the slowest stage: an additive problem, solved by dynamic programming.

Write B for the slowest stage's time and k* for its place. Both objectives are sums over stages then:

    paper (N_b = 4S)      Σ_{k<k*} (t_k + 4B) + 4B  + Σ_{k>k*} (2 t_k + 3B)
    iteration, N ≥ S      Σ_{k<k*}  t_k       + N·B + Σ_{k>k*} (2 t_k −  B)  + 2 Σ links     (a lower bound)
    iteration, N < S      Σ_{k<k*}  t_k + (N+1)/2·B + Σ_{k>k*}    t_k        + 2 Σ links     (a lower bound)

so neither S nor k* is part of the state. The bounds are paths through the 1F1B schedule (``path_bounds``).
With an interval [low, high] in the place of B, high as the cap on stage times and low in the weights, the
minimum is a lower bound for every mapping whose slowest stage is in the interval (each coefficient of B is
≥ 0); at a single value it is exact.
"""

from dataclasses import dataclass

import numpy as np

from planner.costs import StageCosts
from planner.makespan import Floats
from planner.values import StageTemplate


@dataclass(frozen=True, slots=True)
class Weights:
    """A stage in front of the slowest costs ``t + before_b·B``, one behind ``after_t·t + after_b·B``."""

    before_b: float
    after_t: float
    after_b: float
    links: bool
    """Whether crossing to the next stage, and back, costs time."""


PAPER = Weights(before_b=4, after_t=2, after_b=3, links=False)
DEEP = Weights(before_b=0, after_t=2, after_b=-1, links=True)
SHALLOW = Weights(before_b=0, after_t=1, after_b=0, links=True)


@dataclass(frozen=True, slots=True)
class Solution:
    """Minimal sums for any number of devices, without the slowest stage's own multiple of B.

    ``after[g]`` and ``done[g]`` have shape (K, L + 1): the minimum over all ways to put layers [u, L) on the
    pipeline's last g devices, with k stages (row k) where memory makes that matter, else in the only row;
    ``done`` counts the slowest stage in, ``after`` stops short of it.
    """

    after: list[Floats]
    done: list[Floats]


class AdditiveMapping:
    """Evaluations of one model for pipelines of up to ``nodes`` nodes, remembered."""

    def __init__(self, costs: StageCosts, nodes: int) -> None:
        self._costs = costs
        self._devices = nodes * costs.devices_per_node
        self._layered = costs.memory.limit_bytes is not None
        depths = min(self._devices, costs.layers) if self._layered else 1
        self._fits = {
            d: np.stack([costs.fits(d, depth) for depth in range(depths)]) for d in costs.stage_devices
        }
        self._solved: dict[tuple[Weights, float, float], Solution] = {}
        times = np.unique(costs.time_ms[1:])
        self.times_ms = times[np.isfinite(times)]
        """Every time that a slowest stage can have, ascending."""

    def minimum(self, weights: Weights, low_ms: float, high_ms: float, nodes: int) -> float:
        """The least sum for ``nodes`` nodes, ``inf`` if no mapping has its slowest stage in the interval."""
        solution = self._solve(weights, low_ms, high_ms)
        return float(solution.done[nodes * self._costs.devices_per_node][:, 0].min())

    def stages(
        self, weights: Weights, low_ms: float, high_ms: float, nodes: int
    ) -> tuple[StageTemplate, ...]:
        """A mapping that attains ``minimum``, which is finite."""
        solution = self._solve(weights, low_ms, high_ms)
        before, at, after = self._stage_costs(weights, low_ms, high_ms)
        total = left = nodes * self._costs.devices_per_node
        depth, first, found = int(solution.done[left][:, 0].argmin()), 0, False
        stages: list[StageTemplate] = []
        while first < self._costs.layers:
            best: tuple[float, int, int, bool] | None = None
            for d in self._splits_before(left):
                row = depth - 1 if self._layered else 0
                choices = [(after, solution.after, True)]
                if not found:
                    choices = [(at, solution.after, True), (before, solution.done, False)]
                for cost, rest, slowest_found in choices:
                    sums = cost[d][row, first] + rest[left - d][row]
                    end = int(sums.argmin())
                    if best is None or sums[end] < best[0]:
                        best = float(sums[end]), d, end, slowest_found
            assert best is not None
            _, d, end, found = best
            offset = (total - left) // self._costs.devices_per_node
            stages.append(StageTemplate(first_layer=first, end_layer=end, node_offset=offset, devices=d))
            first, left, depth = end, left - d, depth - 1
        return tuple(stages)

    def _splits_before(self, devices: int) -> list[int]:
        """Sizes of a stage that is the first of the last ``devices`` devices and stays within its node."""
        position = -devices % self._costs.devices_per_node
        return [d for d in self._costs.stage_devices if self._costs.can_start(position, d)]

    def _stage_costs(
        self, weights: Weights, low_ms: float, high_ms: float
    ) -> tuple[dict[int, Floats], dict[int, Floats], dict[int, Floats]]:
        """Costs of a stage [u, v) in front of, as and behind the slowest one: per d, shape (K, L+1, L+1)."""
        before, at, after = {}, {}, {}
        link_ms = 2 * self._costs.link_ms if weights.links else np.zeros(self._costs.layers + 1)
        for d, fits in self._fits.items():
            time_ms = self._costs.time_ms[d]
            # The rightmost slowest stage is k*, so at an exact B the stages behind it are quicker.
            behind = time_ms < high_ms if low_ms == high_ms else time_ms <= high_ms
            slowest = (low_ms <= time_ms) & (time_ms <= high_ms)
            before[d] = np.where(
                fits & (time_ms <= high_ms), time_ms + weights.before_b * low_ms + link_ms, np.inf
            )
            at[d] = np.where(fits & slowest, link_ms, np.inf)
            after_ms = weights.after_t * time_ms + weights.after_b * low_ms + link_ms
            after[d] = np.where(fits & behind, after_ms, np.inf)
        return before, at, after

    def _solve(self, weights: Weights, low_ms: float, high_ms: float) -> Solution:
        key = (weights, low_ms, high_ms)
        known = self._solved.get(key)
        if known is not None:
            return known
        before, at, after = self._stage_costs(weights, low_ms, high_ms)
        rows = next(iter(self._fits.values())).shape[0] + int(self._layered)
        nothing = np.full((rows, self._costs.layers + 1), np.inf)
        nothing[0, -1] = 0.0
        solution = Solution(after=[nothing], done=[np.full_like(nothing, np.inf)])
        for g in range(1, self._devices + 1):
            behind, done = np.full_like(nothing, np.inf), np.full_like(nothing, np.inf)
            for d in self._splits_before(g):
                self._extend(behind, after[d], solution.after[g - d])
                self._extend(done, at[d], solution.after[g - d])
                self._extend(done, before[d], solution.done[g - d])
            solution.after.append(behind)
            solution.done.append(done)
        self._solved[key] = solution
        return solution

    def _extend(self, best: Floats, stage: Floats, rest: Floats) -> None:
        """best[k + 1, u] = min over v of stage[k, u, v] + rest[k, v], in place."""
        if self._layered:
            sums = (stage + rest[:-1, None, :]).min(axis=2)
            np.minimum(best[1:], sums, out=best[1:])
        else:
            np.minimum(best, (stage[0] + rest[0]).min(axis=1), out=best)
