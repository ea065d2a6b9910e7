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


def best_templates(costs: StageCosts, microbatches: Mapping[int, int]) -> dict[int, Template]:
    """Return the best mapping for each number of nodes, ascending, where one fits into memory.

    Several numbers of nodes are quicker together than one by one.

    :param microbatches: microbatches of a pipeline, by its number of nodes, for which the ``iteration`` objective
        minimises the step; ``paper`` assumes 4 per stage.
    """
    templates = paper_templates(AdditiveMapping(costs, max(microbatches)), list(microbatches))
    if costs.policy.objective == "paper":
        return templates
    for nodes, paper in templates.items():
        found = quickest_template(costs, nodes, microbatches[nodes], [paper.stages])
        assert found is not None, "the paper's mapping fits"
        templates[nodes] = found
    return templates
