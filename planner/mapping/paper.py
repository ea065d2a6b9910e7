"""The paper's objective (Oobleck Eq. 1–4, N_b = 4S), minimised with proof, for all template sizes at once.

The method is branch and bound over the slowest stage's time B. The additive minimum of an interval of B
bounds every mapping in it from below; the mapping that attains it, scored by Eq. 1–4 itself, bounds the
optimum from above. Intervals with the lowest bounds are cut into parts until no bound is below the best
mapping found. An interval of a single B is solved exactly, so the search ends.

Where memory makes the number of stages after a stage matter, bounds are taken from a looser program first,
which costs a fraction. The exact program evaluates an interval when that is cut, unless the loose program's
mapping fits anyway.
"""

import heapq
from collections.abc import Sequence
from math import inf

import numpy as np

from planner.mapping.additive import AdditiveMapping, Range
from planner.stages.makespan import ROUNDING, Floats, paper_objective_ms
from planner.values import StageTemplate, Template

PARTS = 4
"""Number of parts into which an interval is cut; evaluating them together costs less than one by one."""


def paper_templates(additive: AdditiveMapping, sizes: Sequence[int]) -> dict[int, Template]:
    """Return the best template of each number of nodes in ``sizes``; sizes where no mapping fits into memory
    are missing.

    Searches of several sizes share their evaluations: one pass over the devices of the largest pipeline
    covers all smaller ones.
    """
    loose = additive
    if additive.rows > 1:
        loose = AdditiveMapping(additive.costs, additive.nodes, loose=True)
    searches = [_Search(additive, loose, nodes) for nodes in sorted(set(sizes), reverse=True)]
    while asked := _ask(searches):
        parts = list(asked)
        for start in range(0, len(parts), loose.batch):
            chunk = parts[start : start + loose.batch]
            _evaluate(loose, {part: asked[part] for part in chunk})
    return {search.nodes: search.template() for search in reversed(searches) if search.stages}


def _ask(searches: list["_Search"]) -> dict[Range, list["_Search"]]:
    """Return the intervals to evaluate, each with the searches that need it, the largest pipelines first."""
    asked: dict[Range, list[_Search]] = {}
    for search in searches:
        for part in search.cut():
            asked.setdefault(part, []).append(search)
    return asked


def _evaluate(loose: AdditiveMapping, asked: dict[Range, list["_Search"]]) -> None:
    most = max(search.nodes for searches in asked.values() for search in searches)
    answers = dict(zip(asked, loose.minima(list(asked), most), strict=True))
    for search in dict.fromkeys(search for searches in asked.values() for search in searches):
        mine = [part for part, searches in asked.items() if search in searches]
        search.learn({part: float(answers[part][search.nodes]) for part in mine})


class _Search:
    """Branch-and-bound search for the template of one size."""

    def __init__(self, additive: AdditiveMapping, loose: AdditiveMapping, nodes: int) -> None:
        self.nodes = nodes
        self.best_ms = inf
        self.stages: tuple[StageTemplate, ...] = ()
        self._additive, self._loose = additive, loose
        # Some stage has the layer that is slowest even on its best devices.
        layers = np.arange(additive.costs.layers)
        one_layer_ms = additive.costs.time_ms[additive.modes, additive.sizes][:, layers, layers + 1]
        alone_ms = one_layer_ms.min(axis=0).max()
        first = int(np.searchsorted(additive.times_ms, alone_ms))
        self._open: list[tuple[float, Range, bool]] = [(0.0, (first, len(additive.times_ms) - 1), True)]
        """Heap of lower bounds, their intervals, and whether a bound is final."""

    def template(self) -> Template:
        """Return the template of the mapping found; valid when nothing is left to evaluate."""
        best_ms = self.best_ms
        return Template(nodes=self.nodes, stages=self.stages, objective_ms=best_ms, lower_bound_ms=best_ms)

    def cut(self) -> list[Range]:
        """Return the parts to evaluate next; none once the best mapping is proved to be optimal."""
        while self._open and self._may_hold_better(self._open[0][0]):
            _, part, tight = heapq.heappop(self._open)
            if tight:
                return _parts(self._additive.times_ms, part)
            self._look_closely(part)
        return []

    def learn(self, bounds_ms: dict[Range, float]) -> None:
        """Take the bounds that were computed for parts of ``cut``."""
        for number, (bound_ms, part) in enumerate(sorted((ms, part) for part, ms in bounds_ms.items())):
            if not self._may_hold_better(bound_ms):
                break
            if number == 0 or part[0] == part[1]:
                stages = self._loose.stages(part, self.nodes)
                self._keep(bound_ms, part, stages if self._attains(stages) else None)
            else:
                self._keep(bound_ms, part, None)

    def _look_closely(self, part: Range) -> None:
        """Evaluate a part with the exact program."""
        bound_ms = float(self._additive.minima([part], self.nodes)[0][self.nodes])
        if self._may_hold_better(bound_ms):
            self._keep(bound_ms, part, self._additive.stages(part, self.nodes))

    def _keep(self, bound_ms: float, part: Range, stages: tuple[StageTemplate, ...] | None) -> None:
        """Add a part with its bound.

        :param stages: the mapping that attains the bound, if it is known and fits.
        """
        if stages is not None:
            stages = self._quickest(stages)
            objective_ms = paper_objective_ms(self._additive.costs.stage_times_ms(stages))
            if objective_ms < self.best_ms:
                self.best_ms, self.stages = objective_ms, stages
        if stages is None or part[0] < part[1]:
            tight = stages is not None or self._loose is self._additive
            heapq.heappush(self._open, (bound_ms, part, tight))

    def _quickest(self, stages: tuple[StageTemplate, ...]) -> tuple[StageTemplate, ...]:
        """Return the stages, each in the quickest mode that fits, where there is a choice.

        Another option may have made a stage the slowest of an interval.
        """
        costs = self._additive.costs
        if len(costs.modes) == 1:
            return stages
        return costs.stages([0, *(stage.end_layer for stage in stages)], [stage.devices for stage in stages])

    def _attains(self, stages: tuple[StageTemplate, ...]) -> bool:
        """Return whether the looser program's mapping is what the exact program would find."""
        if self._loose is self._additive:
            return True
        return self._additive.costs.memory.fit(stages) and self._quickest(stages) == stages

    def _may_hold_better(self, bound_ms: float) -> bool:
        if bound_ms == inf:
            return False
        return bool(bound_ms - self._additive.rounding_ms < self.best_ms * (1 - ROUNDING))


def _parts(times_ms: Floats, whole: Range) -> list[Range]:
    """Cut an interval by time where times are of different magnitude, else by number; equally for all
    searches.
    """
    low, high = whole
    if high - low < PARTS:
        return [(index, index) for index in range(low, high + 1)]
    if times_ms[high] > 2 * times_ms[low] > 0:
        edges = np.searchsorted(times_ms, np.geomspace(times_ms[low], times_ms[high], PARTS + 1)[1:-1])
    else:
        edges = np.linspace(low, high + 1, PARTS + 1)[1:-1].astype(np.int64)
    starts = np.unique(np.concatenate(([low], edges.clip(low, high)))).tolist()
    return [(start, end - 1) for start, end in zip(starts, [*starts[1:], high + 1], strict=True)]
