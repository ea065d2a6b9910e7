"""Description of a plan as plain values for a table, a picture or JSON.

Nothing is printed here.
"""

from collections import Counter
from dataclasses import dataclass

from msgspec import structs

from planner.preview import Preview
from planner.stages.costs import StageCosts
from planner.timeline import Timeline, timeline
from planner.values import Policy, StageTemplate, Template


class StageRow(StageTemplate, frozen=True, kw_only=True):
    """One stage of a template, with the memory of each of its devices and the times of one microbatch."""

    memory_bytes: int
    undivided_bytes: int
    """Part of it that is whole on each device although the stage divides its state: buffers."""
    forward_ms: float
    backward_ms: float

    @property
    def time_ms(self) -> float:
        return self.forward_ms + self.backward_ms


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateRow:
    nodes: int
    objective_ms: float
    lower_bound_ms: float
    proved_optimal: bool
    microbatches: int
    """Number of microbatches for which the template was mapped, which the ``iteration`` objective counts."""
    memory_bytes: int
    """Memory of the fullest device."""
    stages: tuple[StageRow, ...]
    link_ms: tuple[float, ...]
    """Time from each stage to the next for one microbatch."""

    @property
    def gap(self) -> float:
        """Return how much better the optimum might be, relative to the lower bound; 0 if the template is
        proved optimal.
        """
        if self.proved_optimal:
            return 0.0
        return self.objective_ms / self.lower_bound_ms - 1 if self.lower_bound_ms > 0 else float("inf")


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineRow:
    """``count`` equal pipelines of the instantiation, and what one step of each is expected to take."""

    count: int
    nodes: int
    """Number of nodes of the pipeline's template."""
    microbatches: int
    memory_bytes: int
    """Memory of the fullest device."""
    makespan_ms: float
    """Time from the first forward to the last backward of a step."""
    sync_ms: float
    """Time of the gradient all-reduce if none of it is hidden; the step takes ``makespan_ms + sync_ms``."""
    bubble_ratio: float
    """Fraction of its devices' time within the makespan in which they wait."""

    @property
    def step_ms(self) -> float:
        return self.makespan_ms + self.sync_ms


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    policy: Policy
    nodes: int
    idle_nodes: int
    layers: int
    memory_limit_bytes: int | None
    """Memory of one device; ``None`` for no limit."""
    templates: tuple[TemplateRow, ...]
    """Templates, the smallest first."""
    pipelines: tuple[PipelineRow, ...]
    """Pipelines, the largest first."""
    iteration_ms: float
    samples_per_s: float | None
    """``None`` if a step is estimated to take no time."""

    def template(self, nodes: int) -> TemplateRow:
        return next(row for row in self.templates if row.nodes == nodes)

    @property
    def bubble_ratio(self) -> float:
        """Return the fraction of the time of all used devices in which they wait for their own pipeline."""
        there = sum(row.count * row.nodes * row.makespan_ms for row in self.pipelines)
        waits = sum(row.count * row.nodes * row.makespan_ms * row.bubble_ratio for row in self.pipelines)
        return waits / there if there else 0.0


def describe(seen: Preview) -> Description:
    """Return a preview with every number that a person or a script may need."""
    costs, chosen = seen.costs, seen.instantiation
    rows = {
        size: _template_row(costs, template, seen.planned_microbatches[size])
        for size, template in seen.templates.items()
    }
    groups = Counter(zip(chosen.sizes, chosen.microbatches, strict=True))
    step_s = chosen.iteration_ms / 1e3
    return Description(
        policy=costs.policy,
        nodes=seen.nodes,
        idle_nodes=seen.idle_nodes,
        layers=costs.layers,
        memory_limit_bytes=costs.memory.limit_bytes,
        templates=tuple(rows.values()),
        pipelines=tuple(
            _pipeline_row(costs, seen.templates[size], rows[size], share, count, len(chosen.sizes))
            for (size, share), count in sorted(groups.items(), reverse=True)
        ),
        iteration_ms=chosen.iteration_ms,
        samples_per_s=costs.policy.global_batch / step_s if step_s else None,
    )


def timeline_of(template: TemplateRow, microbatches: int) -> Timeline:
    """Return the 1F1B schedule of a pipeline made from this template."""
    return timeline(
        [stage.forward_ms for stage in template.stages],
        [stage.backward_ms for stage in template.stages],
        template.link_ms,
        microbatches,
    )


def _template_row(costs: StageCosts, template: Template, microbatches: int) -> TemplateRow:
    """Return one template with the needs of each of its stages."""
    sizes = costs.memory.template_bytes(template.stages)
    forwards_ms, backwards_ms, links_ms = costs.pipeline_ms(template.stages)
    return TemplateRow(
        nodes=template.nodes,
        objective_ms=template.objective_ms,
        lower_bound_ms=template.lower_bound_ms,
        proved_optimal=template.proved_optimal,
        microbatches=microbatches,
        memory_bytes=max(sizes),
        link_ms=tuple(links_ms),
        stages=tuple(
            StageRow(
                **structs.asdict(stage),
                memory_bytes=size,
                undivided_bytes=costs.memory.breakdown(
                    stage.first_layer,
                    stage.end_layer,
                    stage.devices,
                    len(template.stages) - 1 - position,
                    stage.mode,
                ).undivided,
                forward_ms=forward_ms,
                backward_ms=backward_ms,
            )
            for position, (stage, size, forward_ms, backward_ms) in enumerate(
                zip(template.stages, sizes, forwards_ms, backwards_ms, strict=True)
            )
        ),
    )


def _pipeline_row(
    costs: StageCosts, template: Template, row: TemplateRow, microbatches: int, count: int, pipelines: int
) -> PipelineRow:
    makespan_ms = costs.clock(template.stages).makespan_ms(microbatches)
    busy_ms = microbatches * sum(stage.time_ms * stage.devices for stage in row.stages)
    there_ms = makespan_ms * sum(stage.devices for stage in row.stages)
    return PipelineRow(
        count=count,
        nodes=template.nodes,
        microbatches=microbatches,
        memory_bytes=row.memory_bytes,
        makespan_ms=makespan_ms,
        sync_ms=costs.sync_ms(template.stages, pipelines),
        # Without bubbles the two are equal but for the order of their sums.
        bubble_ratio=max(0.0, 1 - busy_ms / there_ms) if there_ms else 0.0,
    )
