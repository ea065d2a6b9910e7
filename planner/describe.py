"""What a plan comes to, as plain values for a table or for JSON; and a second opinion on its shares.

Nothing is printed here.
"""

from dataclasses import dataclass
from functools import partial

from planner.costs import StageCosts
from planner.planner import Planner
from planner.programs import distribute_by_model
from planner.values import PipelinePlacement, Plan, Template


@dataclass(frozen=True, slots=True, kw_only=True)
class StageRow:
    """One stage of a template; memory is of each of its devices."""

    first_layer: int
    end_layer: int
    node_offset: int
    devices: int
    memory_bytes: int
    forward_ms: float
    """Of one microbatch."""
    backward_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateRow:
    nodes: int
    objective_ms: float
    lower_bound_ms: float
    proved_optimal: bool
    memory_bytes: int
    """Of the fullest device."""
    stages: tuple[StageRow, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """What one pipeline of a plan is expected to take for a step."""

    memory_bytes: int
    """Of the fullest device."""
    makespan_ms: float
    """From the first forward to the last backward of a step."""
    sync_ms: float
    """Gradient all-reduce, where none of it is hidden; the step takes ``makespan_ms + sync_ms``."""
    bubble_ratio: float
    """Part of its devices' time within the makespan in which they wait."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    memory_limit_bytes: int | None
    """Of one device; ``None`` for no limit."""
    templates: tuple[TemplateRow, ...]
    """Smallest first."""
    plan: Plan
    estimates: tuple[Estimate, ...]
    """In the order of ``plan.pipelines``."""
    samples_per_s: float | None
    """``None`` where a step is estimated to take no time."""


def describe(planner: Planner, plan: Plan) -> Description:
    """A plan of ``planner``, and every template for as many nodes."""
    templates = planner.templates(_nodes(plan)).by_nodes
    rows = {nodes: _template_row(planner.costs, template) for nodes, template in templates.items()}
    step_s = plan.estimated_iteration_s
    return Description(
        memory_limit_bytes=planner.costs.memory.limit_bytes,
        templates=tuple(rows.values()),
        plan=plan,
        estimates=tuple(
            _estimate(planner.costs, templates[size], rows[size], pipeline.microbatches, len(plan.pipelines))
            for size, pipeline in ((_size(p), p) for p in plan.pipelines)
        ),
        samples_per_s=planner.policy.global_batch / step_s if step_s else None,
    )


def _template_row(costs: StageCosts, template: Template) -> TemplateRow:
    """One template, with what each of its stages needs."""
    sizes = costs.memory.template_bytes(template.stages)
    return TemplateRow(
        nodes=template.nodes,
        objective_ms=template.objective_ms,
        lower_bound_ms=template.lower_bound_ms,
        proved_optimal=template.proved_optimal,
        memory_bytes=max(sizes),
        stages=tuple(
            StageRow(
                first_layer=stage.first_layer,
                end_layer=stage.end_layer,
                node_offset=stage.node_offset,
                devices=stage.devices,
                memory_bytes=size,
                forward_ms=float(costs.forward_ms[stage.devices, stage.first_layer, stage.end_layer]),
                backward_ms=float(costs.backward_ms[stage.devices, stage.first_layer, stage.end_layer]),
            )
            for stage, size in zip(template.stages, sizes, strict=True)
        ),
    )


def _estimate(
    costs: StageCosts, template: Template, row: TemplateRow, microbatches: int, pipelines: int
) -> Estimate:
    makespan_ms = costs.clock(template.stages).makespan_ms(microbatches)
    busy_ms = microbatches * sum(
        (stage.forward_ms + stage.backward_ms) * stage.devices for stage in row.stages
    )
    there_ms = makespan_ms * sum(stage.devices for stage in row.stages)
    return Estimate(
        memory_bytes=row.memory_bytes,
        makespan_ms=makespan_ms,
        sync_ms=costs.sync_ms(template.stages, pipelines),
        # Without bubbles the two are equal but for the order of their sums.
        bubble_ratio=max(0.0, 1 - busy_ms / there_ms) if there_ms else 0.0,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class CrossCheck:
    """The batch distribution of a plan, by the planner's own method and by an integer program."""

    microbatches: tuple[int, ...]
    """In the order of the plan's pipelines."""
    iteration_ms: float
    model_microbatches: tuple[int, ...]
    model_iteration_ms: float

    @property
    def agrees(self) -> bool:
        """Equally quick, to the solver's tolerance; the shares themselves may differ."""
        return abs(self.iteration_ms - self.model_iteration_ms) <= 1e-6 * self.iteration_ms


def cross_check(planner: Planner, plan: Plan) -> CrossCheck:
    """Distribute the batch to the plan's pipelines again, with Pyomo: about a second.

    :raises SolverError: the solver is not there, or found no proved optimum.
    """
    instantiator = planner.instantiator(_nodes(plan))
    costs = [partial(instantiator.cost_ms, _size(p), len(plan.pipelines)) for p in plan.pipelines]
    shares = distribute_by_model(costs, planner.policy.microbatches)
    return CrossCheck(
        microbatches=tuple(p.microbatches for p in plan.pipelines),
        iteration_ms=plan.estimated_iteration_s * 1e3,
        model_microbatches=shares,
        model_iteration_ms=max(cost(share) for cost, share in zip(costs, shares, strict=True)),
    )


def _nodes(plan: Plan) -> int:
    return len(plan.nodes) + len(plan.idle_nodes)


def _size(pipeline: PipelinePlacement) -> int:
    """Nodes of the template that the pipeline was made from."""
    return len(pipeline.nodes)
