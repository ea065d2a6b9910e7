"""GPU–stage mapping (Oobleck §4.1.2): which layers and how many devices each stage of a template gets.

A stage's devices are in one node and every device of every node is used; a node may be split in any way.
Oobleck's own divide and conquer is not optimal (layer times [30, 23, 6, 51, 1] on three one-device nodes:
it finds 682, there is 646), because the best part of a mapping depends on where the slowest stage falls.
"""

import heapq
from dataclasses import dataclass
from math import inf

from planner.additive import PAPER, AdditiveMapping
from planner.costs import StageCosts
from planner.iteration import IterationMapper
from planner.values import StageTemplate, Template

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
        self._iteration = IterationMapper(costs, self._additive)

    def template(self, nodes: int, microbatches: int) -> Template | None:
        """The best mapping for ``nodes`` nodes, ``None`` if none fits into memory.

        :param microbatches: what the ``iteration`` objective counts with; ``paper`` means 4 per stage.
        """
        paper = self._as_template(nodes, self._bisect(nodes))
        if paper is None or self._costs.policy.objective == "paper":
            return paper
        return self._iteration.template(nodes, microbatches, [paper.stages])

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

    def _bisect(self, nodes: int) -> _Search:
        """Best first over intervals of the slowest stage's time B.

        The additive minimum over an interval bounds every mapping in it from below, and the mapping that
        attains it bounds the optimum from above. The search ends when the bounds meet.
        """
        times_ms, search = self._additive.times_ms, _Search()
        queue: list[tuple[float, int, int]] = []

        def look(low: int, high: int) -> None:
            least = self._additive.minimum(PAPER, times_ms[low], times_ms[high], nodes)
            if least == inf:
                return
            stages = self._additive.stages(PAPER, times_ms[low], times_ms[high], nodes)
            search.offer(self._costs.paper_ms(stages), stages)
            heapq.heappush(queue, (least + 4.0 * times_ms[low], low, high))

        look(0, len(times_ms) - 1)
        while queue:
            bound_ms, low, high = queue[0]
            search.bound_ms = min(bound_ms, search.best_ms)
            if low == high or bound_ms >= search.best_ms * (1 - ROUNDING):
                return search
            heapq.heappop(queue)
            middle = (low + high) // 2
            look(low, middle)
            look(middle + 1, high)
        search.bound_ms = search.best_ms
        return search
