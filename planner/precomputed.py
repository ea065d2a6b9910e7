"""Results of ``Planner.precompute`` as plain values: computed in one process and used in another, or stored on
disk under a key of everything on which they depend.

The checks here are cheap: they reject results that belong to another job or another cluster, so that no
plan is made from them. That templates and instantiations are the *best* is not checked again.
"""

from dataclasses import dataclass
from itertools import pairwise

from planner.errors import RestoreError
from planner.pipelines.instantiation import Instantiation
from planner.reasons import describe_within
from planner.stages.costs import StageCosts
from planner.values import Template


@dataclass(frozen=True, slots=True, kw_only=True)
class Precomputed:
    """The precomputed values that planning for up to ``nodes`` nodes looks up."""

    nodes: int
    templates: tuple[Template, ...]
    """Templates, the smallest first."""
    instantiations: dict[int, Instantiation]
    """Best instantiation for each number of nodes."""


def check_precomputed(precomputed: Precomputed, costs: StageCosts, n0: int) -> None:
    """Check that these are templates and instantiations of the job to which ``costs`` belongs.

    :raises RestoreError: an entry does not fit; the message names the first one.
    """
    _require(precomputed.nodes >= n0, f"it is for {precomputed.nodes} nodes and one replica needs {n0}")
    sizes = [template.nodes for template in precomputed.templates]
    _require(bool(sizes) and sizes[0] == n0, f"templates begin at {sizes[:1]} nodes and must at {n0}")
    _require(all(a < b for a, b in pairwise(sizes)), f"template sizes {sizes} do not ascend")
    for template in precomputed.templates:
        _check_template(template, costs)
    known = set(sizes)
    for nodes, found in precomputed.instantiations.items():
        name = f"instantiations[{nodes}]"
        _require(n0 <= nodes <= precomputed.nodes, f"{name} is not among {n0} to {precomputed.nodes} nodes")
        _require(set(found.sizes) <= known, f"{name} has pipelines of {found.sizes} nodes, without templates")
        _require(0 < found.nodes <= nodes, f"{name} has pipelines of {found.nodes} nodes in all")
        lengths = {len(found.sizes), len(found.microbatches), len(found.pipeline_ms)}
        _require(lengths == {len(found.sizes)}, f"{name} has not one share and one time for each pipeline")
        _require(list(found.sizes) == sorted(found.sizes, reverse=True), f"{name} is not largest first")
        shared = sum(found.microbatches) == costs.policy.microbatches and min(found.microbatches) >= 1
        _require(shared, f"{name} does not share out {costs.policy.microbatches} microbatches")


def _check_template(template: Template, costs: StageCosts) -> None:
    name = f"the template of {template.nodes} nodes"
    stages = template.stages
    edges = [*(stage.first_layer for stage in stages), costs.layers]
    joined = all(stage.end_layer == next_first for stage, next_first in zip(stages, edges[1:], strict=True))
    _require(edges[0] == 0 and joined, f"{name} has not each of {costs.layers} layers once and in order")
    _require(all(s.first_layer < s.end_layer for s in stages), f"{name} has a stage without layers")
    offsets = [stage.node_offset for stage in stages]
    _require(offsets == sorted(offsets), f"{name} goes back and forth between nodes")
    filled = [costs.devices_per_node] * template.nodes
    used = [sum(s.devices for s in stages if s.node_offset == offset) for offset in range(template.nodes)]
    _require(used == filled, f"{name} does not use all devices of its nodes")
    for behind, stage in enumerate(reversed(stages)):
        _require(stage.devices in costs.stage_devices, f"{name} has a stage of {stage.devices} devices")
        quickest = costs.mode(stage.first_layer, stage.end_layer, stage.devices, behind)
        recomputes = f"recomputes {stage.recompute} and should {quickest.recompute}"
        _require(stage.recompute == quickest.recompute, f"{name} has a stage that {recomputes}")
        own, best = stage.mode[1:], quickest[1:]
        divides = f"is {describe_within(*own)} and should be {describe_within(*best)}"
        _require(own == best, f"{name} has a stage that {divides}")
    _require(costs.memory.fit(stages), f"{name} has a stage that is too large for a device's memory")


def _require(true: bool, otherwise: str) -> None:
    if not true:
        raise RestoreError(f"what was precomputed does not belong to this job: {otherwise}; compute it again")
