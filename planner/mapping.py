"""GPU–stage mapping (Oobleck §4.1.2): which layers and how many devices each stage of a template gets.

A stage's devices are in one node and every device of every node is used; a node may be split in any way.
Oobleck's own divide and conquer is not optimal (layer times [30, 23, 6, 51, 1] on three one-device nodes:
it finds 682, there is 646), because the best part of a mapping depends on where the slowest stage falls.
"""

import heapq
from dataclasses import dataclass
from math import inf

import numpy as np

from planner.additive import DEEP, PAPER, SHALLOW, AdditiveMapping, Weights
from planner.costs import StageCosts
from planner.enumeration import all_mappings, mapping_count, quickest
from planner.values import StageTemplate, Template

ENUMERATED_MAPPINGS = 20_000
"""Up to so many the iteration objective is solved by looking at all of them: tens of milliseconds."""
EVALUATIONS = 48
"""Intervals evaluated for a lower bound of the iteration objective where mappings are too many."""
ROUNDING = 1e-12
"""Two sums of the same terms in another order differ by less, relatively."""


@dataclass(slots=True)
class _Search:
    """The best mapping so far and a bound that none can beat."""

    best_ms: float = inf
    stages: tuple[StageTemplate, ...] = ()
    bound_ms: float = inf

    def offer(self, objective_ms: float, stages: tuple[StageTemplate, ...]) -> None:
        if objective_ms < self.best_ms:
            self.best_ms, self.stages = objective_ms, stages


class Mapper:
    """Mappings of one model for templates of up to ``nodes`` nodes; what they share is computed once."""

    def __init__(self, costs: StageCosts, nodes: int) -> None:
        self._costs = costs
        self._additive = AdditiveMapping(costs, nodes)

    def template(self, nodes: int, microbatches: int) -> Template | None:
        """The best mapping for ``nodes`` nodes, ``None`` if none fits into memory.

        :param microbatches: what the ``iteration`` objective counts with; ``paper`` means 4 per stage.
        """
        if self._costs.policy.objective == "paper":
            return self._as_template(nodes, self._bisect(nodes, PAPER, 4.0, None, None))
        if mapping_count(self._costs, nodes) <= ENUMERATED_MAPPINGS:
            search = _Search()
            for cuts, devices in all_mappings(self._costs, nodes):
                found = quickest(self._costs, cuts, devices, microbatches)
                if found is not None:
                    search.offer(*found)
            search.bound_ms = search.best_ms
            return self._as_template(nodes, search)
        deepest = min(self._costs.layers, nodes * self._costs.devices_per_node)
        deep = microbatches >= deepest
        weights, slowest = (DEEP, float(microbatches)) if deep else (SHALLOW, (microbatches + 1) / 2)
        search = self._bisect(nodes, weights, slowest, microbatches, EVALUATIONS)
        if search.stages:
            self._descend(search, nodes, microbatches)
        return self._as_template(nodes, search)

    def fits(self, nodes: int) -> bool:
        """Whether any mapping for ``nodes`` nodes fits into memory."""
        times_ms = self._additive.times_ms
        return self._additive.minimum(PAPER, times_ms[0], times_ms[-1], nodes) < inf

    def _as_template(self, nodes: int, search: _Search) -> Template | None:
        if not search.stages:
            return None
        proved = search.bound_ms >= search.best_ms * (1 - ROUNDING)
        return Template(
            nodes=nodes,
            stages=search.stages,
            objective_ms=search.best_ms,
            lower_bound_ms=search.best_ms if proved else search.bound_ms,
        )

    def _bisect(
        self, nodes: int, weights: Weights, slowest: float, microbatches: int | None, evaluations: int | None
    ) -> _Search:
        """Best first over intervals of the slowest stage's time B; exact for the paper's objective.

        The additive minimum over an interval bounds every mapping in it from below, and the mapping that
        attains it, scored by the true objective, bounds the optimum from above. Without a limit on
        ``evaluations`` the search ends when the bounds meet.
        """
        times_ms, search = self._additive.times_ms, _Search()
        queue: list[tuple[float, int, int]] = []

        def look(low: int, high: int) -> None:
            least = self._additive.minimum(weights, times_ms[low], times_ms[high], nodes)
            if least == inf:
                return
            stages = self._additive.stages(weights, times_ms[low], times_ms[high], nodes)
            if microbatches is None:
                search.offer(self._costs.paper_ms(stages), stages)
            else:
                search.offer(self._costs.clock(stages).makespan_ms(microbatches), stages)
            heapq.heappush(queue, (least + slowest * times_ms[low], low, high))

        look(0, len(times_ms) - 1)
        looked = 1
        while queue:
            bound_ms, low, high = queue[0]
            search.bound_ms = min(bound_ms, search.best_ms)
            spent = evaluations is not None and looked >= evaluations
            if spent or low == high or bound_ms >= search.best_ms * (1 - ROUNDING):
                return search
            heapq.heappop(queue)
            middle = (low + high) // 2
            look(low, middle)
            look(middle + 1, high)
            looked += 2
        search.bound_ms = search.best_ms
        return search

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
