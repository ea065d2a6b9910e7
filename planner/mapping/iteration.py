"""The mapping with the quickest step: the true 1F1B recurrence for the microbatches that are really run.

A few mappings are all enumerated. Of more, the search is branch and bound over intervals of the slowest
stage's time: lower bounds that are sums over stages (``paths``) are minimised over all mappings of an
interval; the mappings that attain them are simulated; intervals whose bound is not below the best makespan
are closed, others are cut into parts. The intervals left in the end, single values of the slowest stage's
time, are enumerated as far as a budget permits, guided by the bound. Before that a local search improves
the best mapping.

The mapping that is best for the paper's objective is the first candidate, so the result is never worse.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from planner.mapping.paths import (
    Option,
    PathTables,
    PathWeights,
    StageBounds,
    evenly,
    join,
    round_trips,
    through_slowest,
)
from planner.mapping.quickest import Row, all_mappings, as_row, descend, mapping_count, quickest, quickest_of
from planner.stages.costs import StageCosts
from planner.stages.makespan import ROUNDING, Floats
from planner.values import StageTemplate, Template

ENUMERATED_MAPPINGS = 5_000
"""Number of mappings up to which all are enumerated: about ten milliseconds."""
FIRST_PARTS, PARTS = 16, 4
"""Numbers of parts of the first interval, and of each later one."""
CUT_AT_ONCE = 4
"""Number of intervals cut in one round: those with the lowest bounds."""
MOST_ROUNDS = 12
MIXTURES = (0.75, 0.5, 0.25, 0.0)
"""Shares, besides 1, of the path that goes twice through the stages after the slowest one, for a single
slowest time.
"""
CANDIDATES = 6
"""Number of mappings simulated after each round: those with the lowest bounds."""
EXPANSIONS = 500
"""Number of partial mappings expanded in the final enumeration: a tenth of a second."""
PRICES = 24
"""Number of prices of a stage that are tried for the bound on the number of stages."""
GROUP = 64
"""Number of complete mappings simulated at a time in the final enumeration."""


def quickest_template(
    costs: StageCosts, nodes: int, microbatches: int, seeds: Iterable[tuple[StageTemplate, ...]]
) -> Template | None:
    """Return the quickest mapping found, ``None`` if none fits into memory; it is not slower than any seed.

    :param seeds: mappings that fit into memory; at least one, unless none fits.
    """
    rows = [as_row(stages) for stages in seeds]
    search = _Search(costs, nodes, microbatches)
    if mapping_count(costs, nodes) <= ENUMERATED_MAPPINGS:
        search.look_at_all()
    elif rows:
        search.offer(rows)
        search.run()
    else:
        return None
    return search.template()


@dataclass(slots=True)
class _Interval:
    """Interval of slowest times ``times_ms[low : high + 1]`` and the best bound on mappings that have them."""

    bound_ms: float
    low: int
    high: int

    def parts(self, count: int) -> list["_Interval"]:
        edges = np.unique(np.linspace(self.low, self.high + 1, count + 1).astype(np.int64))
        return [_Interval(self.bound_ms, int(a), int(b) - 1) for a, b in pairwise(edges)]


@dataclass(slots=True)
class _Search:
    """Search for one template: the best mapping so far and a lower bound on all mappings."""

    costs: StageCosts
    nodes: int
    microbatches: int
    best_ms: float = np.inf
    stages: tuple[StageTemplate, ...] = ()
    bound_ms: float = 0.0
    _stage_bounds: Mapping[tuple[Option, int], Floats] | None = None
    _most_stages: int = 0
    _possible: NDArray[np.bool_] | None = None
    """Options that some mapping can take, shaped as the tables of costs; ``None``: all of them."""

    def template(self) -> Template | None:
        if not self.stages:
            return None
        return Template(
            nodes=self.nodes,
            stages=self.stages,
            objective_ms=self.best_ms,
            lower_bound_ms=self.best_ms if self._closed(self.bound_ms) else self.bound_ms,
        )

    def look_at_all(self) -> None:
        for cuts, devices in all_mappings(self.costs, self.nodes):
            found = quickest(self.costs, cuts, devices, self.microbatches, below_ms=self.best_ms)
            if found is not None:
                self.best_ms, self.stages = found
        self.bound_ms = self.best_ms

    def offer(self, rows: list[Row]) -> None:
        found = quickest_of(self.costs, rows, self.microbatches, self.best_ms)
        if found is not None:
            self.best_ms, self.stages = found

    def _closed(self, bound_ms: float) -> bool:
        return bound_ms >= self.best_ms * (1 - ROUNDING)

    def run(self) -> None:
        """Bound, improve, and prove as far as the budgets go."""
        costs, none = self.costs, np.zeros(1)
        trips = round_trips(1, 0, none)
        if len(costs.modes) == 1:
            everything = np.ones(costs.time_ms.shape, dtype=np.bool_)
        else:
            everything = self._possible = _possible(costs)
        sums = PathTables(
            costs, self.nodes, everything, trips, none, none + np.inf, costs.layers, costs.layers
        )
        # One round trip of one microbatch; with a single microbatch that is the whole step.
        round_ms = float(sums.least[0])
        self.offer([sums.mapping(0)])
        if self.microbatches == 1:
            self.bound_ms = round_ms
            return
        allowed = self._allowed(round_ms)
        if not allowed.any():
            self.bound_ms = self.best_ms
            return
        self._most_stages = self._deepest(allowed)
        times = np.unique(costs.time_ms[allowed])
        left = self._branch(_Interval(0.0, 0, len(times) - 1).parts(FIRST_PARTS), times, round_ms)
        if left:
            self._stage_bounds = StageBounds(
                costs, self.nodes, self.microbatches, self._allowed(round_ms), self._most_stages
            ).of
            left = self._branch(left, times, round_ms)
        if left:
            floor_ms = min(interval.bound_ms for interval in left)
            found = descend(costs, self.stages, self.best_ms, self.microbatches, floor_ms)
            self.best_ms, self.stages = found
            left = self._prove(left, times, round_ms)
        self.bound_ms = min((interval.bound_ms for interval in left), default=self.best_ms)
        balanced_ms = round_ms + (self.microbatches - 1) * self._work_ms()
        self.bound_ms = min(max(self.bound_ms, balanced_ms), self.best_ms)

    def _allowed(self, round_ms: float) -> NDArray[np.bool_]:
        """Return the stages that a mapping quicker than the best one can have, shaped as the tables of costs.

        A stage is busy for N microbatches. ``round_ms`` and N − 1 times the longer of its forward and
        backward are a path, too.
        """
        costs, turns = self.costs, self.microbatches
        busy_ms = turns * costs.time_ms
        path_ms = round_ms + (turns - 1) * np.maximum(costs.forward_ms, costs.backward_ms)
        longest_ms = np.maximum(busy_ms, path_ms)
        allowed: NDArray[np.bool_] = longest_ms < self.best_ms * (1 - ROUNDING)
        return allowed if self._possible is None else allowed & self._possible

    def _branch(self, parts: list[_Interval], times: Floats, round_ms: float) -> list[_Interval]:
        """Cut intervals into parts until none is open, or for some rounds; return the open ones."""
        whole: list[_Interval] = []
        for _ in range(MOST_ROUNDS):
            self._evaluate(parts, times, round_ms)
            still = [part for part in [*whole, *parts] if not self._closed(part.bound_ms)]
            still.sort(key=lambda interval: interval.bound_ms)
            cut = [interval for interval in still if interval.low < interval.high][:CUT_AT_ONCE]
            if not cut:
                return still
            parts = [part for interval in cut for part in interval.parts(PARTS)]
            whole = [interval for interval in still if interval not in cut]
        return [*whole, *parts]

    def _evaluate(self, intervals: list[_Interval], times: Floats, round_ms: float) -> None:
        """Raise the intervals' bounds, and simulate the mappings that attain the lowest."""
        rows: list[tuple[_Interval, float | None]] = [(interval, 1.0) for interval in intervals]
        rows += [(x, mix) for x in intervals if x.low == x.high for mix in MIXTURES]
        if self._turns() and self.costs.link_ms.any():
            rows += [(interval, None) for interval in intervals]
        tables = self._tables(rows, times, round_ms)
        order = np.argsort(tables.least)
        for number, (interval, _) in enumerate(rows):
            interval.bound_ms = max(interval.bound_ms, float(tables.least[number]))
        promising = [int(q) for q in order[:CANDIDATES] if not self._closed(float(tables.least[q]))]
        self.offer([tables.mapping(q) for q in promising])

    def _deepest(self, allowed: NDArray[np.bool_]) -> int:
        """Return the most stages that a mapping quicker than the best one can have.

        S stages take a round trip of Σ trip ≥ min Σ (trip − λ) + λ·S for any λ, and ``_work_ms`` N − 1
        times.
        """
        costs, devices = self.costs, self.nodes * self.costs.devices_per_node
        most = min(costs.layers, devices)
        if most <= self.microbatches - 1:
            return most
        price_ms = np.linspace(0.0, 4 * costs.time_ms[allowed].max(), PRICES)
        none = np.zeros(PRICES)
        weights = evenly(np.ones(PRICES), -price_ms)
        sums = PathTables(costs, self.nodes, allowed, weights, none, none + np.inf, most, most).least
        stages = np.arange(1, most + 1)
        bounds = (sums + price_ms * stages[:, None]).max(axis=1) + (self.microbatches - 1) * self._work_ms()
        return int(stages[bounds < self.best_ms * (1 - ROUNDING)].max(initial=1))

    def _work_ms(self) -> float:
        """Return a lower bound on the longer of forward and backward of the busiest stage: the mean of devices."""
        costs, devices = self.costs, self.nodes * self.costs.devices_per_node
        sizes, firsts = np.array(costs.stage_devices)[:, None], np.arange(costs.layers)
        tables = [
            table.min(axis=0) if len(costs.modes) > 1 else table[0]
            for table in (costs.forward_ms, costs.backward_ms)
        ]
        one_layer = [table[sizes, firsts, firsts + 1] for table in tables]
        return max(float((layer_ms * sizes).min(axis=0).sum()) / devices for layer_ms in one_layer)

    def _turns(self) -> int:
        """Return how many round trips are a path for every number of stages that is considered."""
        return (self.microbatches - 1) // self._most_stages

    def _tables(
        self, rows: list[tuple[_Interval, float | None]], times: Floats, round_ms: float
    ) -> PathTables:
        """Return tables with one row for each interval and share of the path that goes twice (``None``: round
        trips).
        """
        costs, allowed = self.costs, self._allowed(round_ms)
        low_ms = np.array([times[interval.low] for interval, _ in rows])
        high_ms = np.array([times[interval.high] for interval, _ in rows])
        weights: list[PathWeights] = []
        shorter_ms = np.where(allowed, np.minimum(costs.forward_ms, costs.backward_ms), -np.inf)
        for (_, mix), low, high in zip(rows, low_ms, high_ms, strict=True):
            at = np.full(1, low)
            if mix is None:
                weights.append(round_trips(self.microbatches, self._turns(), at))
                continue
            slowest = (costs.time_ms >= low) & (costs.time_ms <= high)
            longest = np.full(1, shorter_ms[slowest].max() if mix < 1 else 0.0)
            weights.append(through_slowest(self.microbatches, at, np.maximum(longest, 0.0), np.full(1, mix)))
        most_after = self.microbatches - 2
        return PathTables(
            costs,
            self.nodes,
            allowed,
            join(weights),
            low_ms,
            high_ms,
            most_after,
            self._most_stages,
            self._stage_bounds,
            self.best_ms * (1 - ROUNDING),
        )

    def _prove(self, intervals: list[_Interval], times: Floats, round_ms: float) -> list[_Interval]:
        """Simulate all mappings whose bound is below the best makespan; return the intervals where the budget
        ended.
        """
        failed: list[_Interval] = []
        budget = EXPANSIONS
        for interval in sorted(intervals, key=lambda interval: interval.bound_ms):
            if not self._closed(interval.bound_ms) and budget > 0:
                rows: list[tuple[_Interval, float | None]] = [(interval, mix) for mix in (1.0, *MIXTURES)]
                tables = self._tables(rows, times, round_ms)
                budget = self._enumerate(tables, int(tables.least.argmax()), budget)
            if budget <= 0:
                failed.append(interval)
        return [interval for interval in failed if not self._closed(interval.bound_ms)]

    def _enumerate(self, tables: PathTables, q: int, budget: int) -> int:
        """Simulate all mappings of row q whose bound is below the best makespan; return the rest of the
        budget.

        The order is depth first, the stage with the lowest bound first; complete mappings are simulated in
        groups.
        """
        layers = self.costs.layers
        stack: list[tuple[float, int, bool, tuple[int, ...], tuple[int, ...]]] = [
            (0.0, tables.devices, False, (0,), ())
        ]
        complete: list[Row] = []
        while stack and budget > 0:
            spent_ms, left, found, cuts, devices = stack.pop()
            if cuts[-1] == layers:
                complete.append((list(cuts), list(devices)))
                if len(complete) == GROUP:
                    self.offer(complete)
                    complete.clear()
                continue
            budget -= 1
            limit_ms = self.best_ms * (1 - ROUNDING) - spent_ms
            near: list[tuple[float, int, int, bool]] = []
            for sums, d, slowest in tables.choices(q, left, cuts[-1], found):
                for offset in np.flatnonzero(sums < limit_ms):
                    near.append((float(sums[offset]), cuts[-1] + 1 + int(offset), d, slowest))
            for sum_ms, end, d, slowest in sorted(near, reverse=True):
                rest = tables.after if slowest else tables.done
                step_ms = sum_ms - float(rest[left - d, q, end])
                stack.append((spent_ms + step_ms, left - d, slowest, (*cuts, end), (*devices, d)))
        self.offer(complete)
        return budget


def _possible(costs: StageCosts) -> NDArray[np.bool_]:
    """Return the options that a stage can take, with any number of stages after it."""
    possible = np.zeros(costs.time_ms.shape, dtype=np.bool_)
    for d in costs.stage_devices:
        for mode in costs.modes_of(d):
            possible[mode, d] = costs.may_be_quickest(mode, d, 0, costs.layers - 1)
    return possible
