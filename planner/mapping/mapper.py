"""GPU–stage mapping (Oobleck §4.1.2): which layers and how many devices each stage of a template gets.

A stage's devices are in one node and every device of every node is used; a node may be split in any way.
Oobleck's own divide and conquer is not optimal (layer times [30, 23, 6, 51, 1] on three one-device nodes:
it finds 682, there is 646), because the best part of a mapping depends on where the slowest stage falls.
"""

from collections.abc import Mapping

from planner.mapping.additive import AdditiveMapping
from planner.mapping.iteration import quickest_template
from planner.mapping.paper import paper_templates
from planner.stages.costs import StageCosts
from planner.values import Template


class Mapper:
    """Mappings of one model for templates of up to ``nodes`` nodes; intermediate results that they share are
    computed once.
    """

    def __init__(self, costs: StageCosts, nodes: int) -> None:
        self._costs = costs
        self._additive = AdditiveMapping(costs, nodes)

    def template(self, nodes: int, microbatches: int) -> Template | None:
        """Return the best mapping for ``nodes`` nodes, ``None`` if none fits into memory.

        :param microbatches: number for which the ``iteration`` objective minimises the step; ``paper``
            assumes 4 per stage.
        """
        return self.templates({nodes: microbatches}).get(nodes)

    def templates(self, microbatches: Mapping[int, int]) -> dict[int, Template]:
        """Return the ``template`` of several numbers of nodes, ascending; quicker than one by one.

        :param microbatches: microbatches of a pipeline, by its number of nodes.
        """
        templates = paper_templates(self._additive, list(microbatches))
        if self._costs.policy.objective == "paper":
            return templates
        for nodes, paper in templates.items():
            found = quickest_template(self._costs, nodes, microbatches[nodes], [paper.stages])
            assert found is not None, "the paper's mapping fits"
            templates[nodes] = found
        return templates
