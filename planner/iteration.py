"""The mapping with the quickest step: the true 1F1B recurrence for the microbatches really run.

Few mappings are all looked at. Of more, an additive lower bound over intervals of the slowest stage's time
(``additive``) gives candidates and a bound that none can beat; a local search goes on from the best one.
The mapping that is best for the paper's objective is a candidate too, so the answer is never worse than it.
"""

import heapq
from collections.abc import Iterable
from dataclasses import dataclass
from math import inf

import numpy as np

from planner.additive import DEEP, SHALLOW, AdditiveMapping
from planner.costs import StageCosts
from planner.enumeration import all_mappings, mapping_count, quickest
from planner.values import StageTemplate, Template

ENUMERATED_MAPPINGS = 20_000
"""Up to so many mappings are all looked at: tens of milliseconds."""
EVALUATIONS = 48
"""Intervals evaluated for a lower bound where mappings are too many."""
ROUNDING = 1e-12
"""Two sums of the same terms in another order differ by less, relatively."""


@dataclass(slots=True)
class _Search:
    """The best mapping so far and a bound that none can beat."""

    best_ms: float = inf
    stages: tuple[StageTemplate, ...] = ()
    bound_ms: float = 0.0

    def offer(self, objective_ms: float, stages: tuple[StageTemplate, ...]) -> None:
        if objective_ms < self.best_ms:
            self.best_ms, self.stages = objective_ms, stages


class IterationMapper:
    """Mappings of one model; what templates share is computed once."""

    def __init__(self, costs: StageCosts, additive: AdditiveMapping) -> None:
        self._costs = costs
        self._additive = additive

    def template(
        self, nodes: int, microbatches: int, seeds: Iterable[tuple[StageTemplate, ...]]
    ) -> Template | None:
        """The quickest mapping that was found, ``None`` if none fits into memory; not slower than any seed.

        :param seeds: mappings that fit into memory.
        """
        search = _Search()
        if mapping_count(self._costs, nodes) <= ENUMERATED_MAPPINGS:
            for cuts, devices in all_mappings(self._costs, nodes):
                found = quickest(self._costs, cuts, devices, microbatches)
                if found is not None:
                    search.offer(*found)
            search.bound_ms = search.best_ms
        else:
            for stages in seeds:
                search.offer(self._costs.clock(stages).makespan_ms(microbatches), stages)
            self._bisect(search, nodes, microbatches)
            if search.stages:
                self._descend(search, nodes, microbatches)
        if not search.stages:
            return None
        proved = search.bound_ms >= search.best_ms * (1 - ROUNDING)
        return Template(
            nodes=nodes,
            stages=search.stages,
            objective_ms=search.best_ms,
            lower_bound_ms=search.best_ms if proved else search.bound_ms,
        )

    def _bisect(self, search: _Search, nodes: int, microbatches: int) -> None:
        """Best first over intervals of the slowest stage's time.

        The additive minimum over an interval bounds every mapping in it from below, and the mapping that
        attains it, simulated, bounds the optimum from above.
        """
        deep = microbatches >= min(self._costs.layers, nodes * self._costs.devices_per_node)
        weights, slowest = (DEEP, float(microbatches)) if deep else (SHALLOW, (microbatches + 1) / 2)
        times_ms = self._additive.times_ms
        queue: list[tuple[float, int, int]] = []

        def look(low: int, high: int) -> None:
            least = self._additive.minimum(weights, times_ms[low], times_ms[high], nodes)
            if least < inf:
                stages = self._additive.stages(weights, times_ms[low], times_ms[high], nodes)
                search.offer(self._costs.clock(stages).makespan_ms(microbatches), stages)
                heapq.heappush(queue, (least + slowest * times_ms[low], low, high))

        look(0, len(times_ms) - 1)
        looked = 1
        while queue:
            bound_ms, low, high = queue[0]
            search.bound_ms = min(bound_ms, search.best_ms)
            if looked >= EVALUATIONS or low == high or bound_ms >= search.best_ms * (1 - ROUNDING):
                return
            heapq.heappop(queue)
            middle = (low + high) // 2
            look(low, middle)
            look(middle + 1, high)
            looked += 2
        search.bound_ms = search.best_ms

    def _descend(self, search: _Search, nodes: int, microbatches: int) -> None:
        """Move one cut by one layer, or split or join two stages of a node, as long as that helps."""
        while search.bound_ms < search.best_ms:
            before_ms = search.best_ms
            by_depth: dict[int, list[tuple[list[int], list[int]]]] = {}
            for cuts, devices in _neighbours(search.stages, self._costs):
                by_depth.setdefault(len(devices), []).append((cuts, devices))
            for _, group in sorted(by_depth.items()):
                all_cuts = np.array([cuts for cuts, _ in group], dtype=np.int64)
                all_devices = np.array([devices for _, devices in group], dtype=np.int64)
                found = quickest(self._costs, all_cuts, all_devices, microbatches)
                if found is not None:
                    search.offer(*found)
            if search.best_ms == before_ms:
                return


def _neighbours(stages: tuple[StageTemplate, ...], costs: StageCosts) -> list[tuple[list[int], list[int]]]:
    """Mappings one move away, as (cuts, devices)."""
    cuts = [stage.first_layer for stage in stages] + [costs.layers]
    positions = _positions(stages)
    devices = [stage.devices for stage in stages]
    near: list[tuple[list[int], list[int]]] = []
    for index in range(1, len(stages)):
        for cut in (cuts[index] - 1, cuts[index] + 1):
            if cuts[index - 1] < cut < cuts[index + 1]:
                near.append(([*cuts[:index], cut, *cuts[index + 1 :]], devices))
        together = devices[index - 1] + devices[index]
        same_node = stages[index - 1].node_offset == stages[index].node_offset
        if same_node and together in costs.stage_devices and costs.can_start(positions[index - 1], together):
            joined = [*devices[: index - 1], together, *devices[index + 1 :]]
            near.append(([*cuts[:index], *cuts[index + 1 :]], joined))
    for index, stage in enumerate(stages):
        for left in costs.stage_devices:
            right, position = stage.devices - left, positions[index]
            if right not in costs.stage_devices or not costs.can_start(position + left, right):
                continue
            split = [*devices[:index], left, right, *devices[index + 1 :]]
            for cut in range(stage.first_layer + 1, stage.end_layer):
                near.append(([*cuts[: index + 1], cut, *cuts[index + 1 :]], split))
    return near


def _positions(stages: tuple[StageTemplate, ...]) -> list[int]:
    """Of each stage, the first of its devices in its node."""
    positions: list[int] = []
    used, node = 0, 0
    for stage in stages:
        used, node = (used, node) if stage.node_offset == node else (0, stage.node_offset)
        positions.append(used)
        used += stage.devices
    return positions
