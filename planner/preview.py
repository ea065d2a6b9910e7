"""Plans for a number of equal nodes before they exist: templates and the chosen instantiation.

Nodes have no names here, so none are assigned and nothing is transferred; for that see ``planner.planner``.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from planner.errors import InfeasibleError
from planner.mapping.mapper import best_templates
from planner.pipelines.batch import check_batch
from planner.pipelines.instantiation import Instantiation, Instantiator
from planner.stages.costs import StageCosts
from planner.templates import Templates, check_tolerance, costs_for, expected_share, smallest_pipeline
from planner.values import ModelProfile, Policy, Template


@dataclass(frozen=True, slots=True, kw_only=True)
class Preview:
    """A plan for ``nodes`` nodes that have no names: the templates, and the instantiation that would be
    chosen.
    """

    nodes: int
    costs: StageCosts
    templates: Mapping[int, Template]
    """Templates by their numbers of nodes, the smallest first."""
    planned_microbatches: Mapping[int, int]
    """Number of microbatches for which each template was mapped, if its objective counts microbatches."""
    instantiation: Instantiation

    @property
    def idle_nodes(self) -> int:
        return self.nodes - self.instantiation.nodes


def preview(profile: ModelProfile, policy: Policy, nodes: int, template_nodes: int | None = None) -> Preview:
    """Plan a fresh start on ``nodes`` nodes, with all templates or, if given, with one alone.

    :raises InfeasibleError: the profile or the policy makes no sense, nothing fits into memory, or the nodes
        do not hold f + 1 pipelines.
    :raises BatchError: the batch cannot be distributed to f + 1 pipelines.
    """
    costs = costs_for(profile, policy)
    check_batch(policy.global_batch, policy.microbatch_rows, 1)
    if template_nodes is not None:
        return _of_one_size(costs, nodes, template_nodes)
    check_tolerance(policy, smallest_pipeline(costs), nodes, costs)
    templates = Templates(costs, nodes)
    return Preview(
        nodes=nodes,
        costs=costs,
        templates=templates.by_nodes,
        planned_microbatches={size: expected_share(policy, size, nodes) for size in templates.sizes},
        instantiation=Instantiator(costs, templates).best(nodes),
    )


def _of_one_size(costs: StageCosts, nodes: int, size: int) -> Preview:
    """Return as many pipelines of ``size`` nodes as there are nodes and microbatches for; one mapping is
    computed.
    """
    policy = costs.policy
    most = min(costs.most_nodes, nodes // (policy.tolerate + 1))
    if not 1 <= size <= most:
        raise InfeasibleError(_no_such_size(costs, nodes, size, most))
    check_tolerance(policy, size, nodes)
    pipelines = min(nodes // size, policy.microbatches)
    even, extra = divmod(policy.microbatches, pipelines)
    shares = tuple(even + (index < extra) for index in range(pipelines))
    template = best_templates(costs, {size: shares[0]}).get(size)
    if template is None:
        raise InfeasibleError(_does_not_fit(costs, size))
    step_ms = costs.step_cost(template.stages, pipelines)
    return Preview(
        nodes=nodes,
        costs=costs,
        templates={size: template},
        planned_microbatches={size: shares[0]},
        instantiation=Instantiation(
            sizes=(size,) * pipelines,
            microbatches=shares,
            pipeline_ms=tuple(map(step_ms, shares)),
        ),
    )


def _no_such_size(costs: StageCosts, nodes: int, size: int, most: int) -> str:
    what = f"no template of {size} nodes of {costs.devices_per_node} devices can be made"
    if costs.most_nodes < 1:
        return f"{what}: every stage needs a layer, and {costs.layers} layers cannot fill even one node"
    if size > costs.most_nodes:
        why = f"every stage needs a layer, and {costs.layers} layers fill at most {costs.most_nodes} nodes"
    else:
        why = f"{costs.policy.tolerate + 1} of them must fit into {nodes} nodes"
    return f"{what}: {why}; the largest that works has {most} nodes"


def _does_not_fit(costs: StageCosts, size: int) -> str:
    n0 = smallest_pipeline(costs)
    remedy = f"the smallest template that fits has {n0} nodes" if size < n0 else f"a template of {n0} fits"
    return f"no template of {size} nodes fits into devices of {costs.memory.limit_bytes} bytes; {remedy}"
