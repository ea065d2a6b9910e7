"""Templates and instantiations as rows of plain values, for a table or for JSON. Nothing is printed here."""

from dataclasses import dataclass
from functools import partial

from planner.batch import distribute_by_model
from planner.costs import StageCosts
from planner.instantiation import Instantiation
from planner.planner import Planner
from planner.values import Template


@dataclass(frozen=True, slots=True, kw_only=True)
class StageRow:
    """One stage of a template; memory is of each of its devices."""

    first_layer: int
    end_layer: int
    node_offset: int
    devices: int
    memory_bytes: int
    forward_s: float
    """Of one microbatch."""
    backward_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateRow:
    nodes: int
    objective_s: float
    lower_bound_s: float
    proved_optimal: bool
    memory_limit_bytes: int | None
    stages: tuple[StageRow, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineRow:
    """One pipeline of an instantiation."""

    nodes: int
    microbatches: int
    makespan_s: float
    """From the first forward to the last backward of a step."""
    sync_s: float
    """Gradient all-reduce, where none of it is hidden."""
    bubble_ratio: float
    """Part of its devices' time within the makespan in which they wait."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InstantiationRow:
    nodes: int
    idle_nodes: int
    iteration_s: float
    samples_per_s: float
    pipelines: tuple[PipelineRow, ...]


def template_row(costs: StageCosts, template: Template) -> TemplateRow:
    """One template, with what each of its stages needs."""
    sizes = costs.memory.template_bytes(template.stages)
    return TemplateRow(
        nodes=template.nodes,
        objective_s=template.objective_s,
        lower_bound_s=template.lower_bound_s,
        proved_optimal=template.proved_optimal,
        memory_limit_bytes=costs.memory.limit_bytes,
        stages=tuple(
            StageRow(
                first_layer=stage.first_layer,
                end_layer=stage.end_layer,
                node_offset=stage.node_offset,
                devices=stage.devices,
                memory_bytes=size,
                forward_s=float(costs.forward_s[stage.devices, stage.first_layer, stage.end_layer]),
                backward_s=float(costs.backward_s[stage.devices, stage.first_layer, stage.end_layer]),
            )
            for stage, size in zip(template.stages, sizes, strict=True)
        ),
    )


def describe_templates(planner: Planner, nodes: int) -> tuple[TemplateRow, ...]:
    """Every template for a cluster of ``nodes`` nodes, smallest first."""
    return tuple(template_row(planner.costs, t) for t in planner.templates(nodes).by_nodes.values())


def describe_instantiation(planner: Planner, nodes: int) -> InstantiationRow:
    """The best pipelines of ``nodes`` nodes."""
    instantiation = planner.instantiator(nodes).best(nodes)
    return InstantiationRow(
        nodes=nodes,
        idle_nodes=nodes - instantiation.nodes,
        iteration_s=instantiation.iteration_s,
        samples_per_s=planner.policy.global_batch / instantiation.iteration_s
        if instantiation.iteration_s
        else float("inf"),
        pipelines=_pipeline_rows(planner, nodes, instantiation),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class CrossCheck:
    """The batch distribution of an instantiation, by the planner's own method and by an integer program."""

    microbatches: tuple[int, ...]
    iteration_s: float
    model_microbatches: tuple[int, ...]
    model_iteration_s: float

    @property
    def agrees(self) -> bool:
        """Equally quick, to the solver's tolerance; the shares themselves may differ."""
        return abs(self.iteration_s - self.model_iteration_s) <= 1e-6 * self.iteration_s


def cross_check(planner: Planner, nodes: int) -> CrossCheck:
    """Distribute the batch of the best pipelines of ``nodes`` nodes again, with Pyomo: up to a second."""
    instantiator = planner.instantiator(nodes)
    best = instantiator.best(nodes)
    costs = [partial(instantiator.cost_s, size, len(best.sizes)) for size in best.sizes]
    shares = distribute_by_model(costs, planner.policy.microbatches)
    return CrossCheck(
        microbatches=best.microbatches,
        iteration_s=best.iteration_s,
        model_microbatches=shares,
        model_iteration_s=max(cost(share) for cost, share in zip(costs, shares, strict=True)),
    )


def _pipeline_rows(planner: Planner, nodes: int, instantiation: Instantiation) -> tuple[PipelineRow, ...]:
    rows: list[PipelineRow] = []
    for size, share in zip(instantiation.sizes, instantiation.microbatches, strict=True):
        stages = planner.templates(nodes).by_nodes[size].stages
        makespan_s = planner.costs.clock(stages).makespan_s(share)
        times_s = planner.costs.stage_times_s(stages)
        busy_s = share * sum(t * stage.devices for t, stage in zip(times_s, stages, strict=True))
        there_s = makespan_s * sum(stage.devices for stage in stages)
        rows.append(
            PipelineRow(
                nodes=size,
                microbatches=share,
                makespan_s=makespan_s,
                sync_s=planner.costs.sync_s(stages, len(instantiation.sizes)),
                bubble_ratio=1 - busy_s / there_s if there_s else 0.0,
            )
        )
    return tuple(rows)
