"""``ftd plan``: the templates of a job and the pipelines chosen for a number of nodes, as tables."""

from collections.abc import Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ftd.view.blocks import PipelineBars, pipeline_lines
from ftd.view.text import NodeColours, duration, layer_range, number, pipeline_name, plural, size
from planner.memory import MemoryModel
from planner.values import Device, ModelProfile, PipelinePlacement, Plan, Policy, Template

_MOST_BARS = 12


def render_plan(
    *, templates: Sequence[Template], plan: Plan, profile: ModelProfile, policy: Policy
) -> RenderableType:
    """What could run and what would: readable at 100 columns.

    :param templates: one for each pipeline size, smallest first
    :param plan: the one chosen for the nodes in question
    """
    memory = MemoryModel(profile, policy)
    limit = memory.limit_bytes
    shape = f"{plural(len(profile.layers), 'layer')}, {plural(policy.devices_per_node, 'device')} a node"
    room = f"a device has {size(limit)}" if limit is not None else "no memory limit"
    title = Text.assemble(("Templates", "bold"), (f"  {shape}, {room}", "dim"))
    pipelines = [pipeline_json(p) for p in plan.pipelines]
    colours = NodeColours()
    count = plural(len(plan.nodes) + len(plan.idle_nodes), "node")
    chosen = Text.assemble(("Chosen", "bold"), (f"  for {count}", "dim"))
    parts: list[RenderableType] = [
        title,
        _template_table(templates, memory),
        "",
        chosen,
        Text(plan.reason),
        _pipeline_table(plan, pipelines, memory, colours),
    ]
    if plan.idle_nodes:
        parts.append(Text(f"idle: {', '.join(plan.idle_nodes)}", style="yellow"))
    parts += ["", PipelineBars(pipelines, colours, most=_MOST_BARS), "", _closing(plan, policy)]
    return Group(*parts)


def pipeline_json(pipeline: PipelinePlacement) -> dict[str, Any]:
    """A placement in the form that the public state has."""
    return {
        "stages": [
            {
                "first_layer": s.first_layer,
                "end_layer": s.end_layer,
                "devices": [_name(d) for d in s.devices],
            }
            for s in pipeline.stages
        ],
        "microbatches": pipeline.microbatches,
    }


def _name(device: Device) -> str:
    return f"{device.node}/{device.index}"


def _template_table(templates: Sequence[Template], memory: MemoryModel) -> Table:
    table = _table()
    table.add_column("nodes", justify="right")
    table.add_column("stages: layers (devices)", overflow="fold")
    table.add_column("memory", justify="right", no_wrap=True)
    table.add_column("step time", justify="right", no_wrap=True)
    table.add_column("optimal", no_wrap=True)
    for template in templates:
        stages = " │ ".join(
            f"{layer_range(s.first_layer, s.end_layer)} ({s.devices})" for s in template.stages
        )
        gap = template.objective_s / template.lower_bound_s - 1 if template.lower_bound_s else 0.0
        table.add_row(
            str(template.nodes),
            stages,
            size(max(memory.template_bytes(template.stages))),
            duration(template.objective_s),
            "proved" if template.proved_optimal else f"within {gap:.1%}",
        )
    return table


def _pipeline_table(
    plan: Plan, pipelines: Sequence[dict[str, Any]], memory: MemoryModel, colours: NodeColours
) -> Table:
    table = _table()
    table.add_column("", no_wrap=True)
    table.add_column("stages: node layers", overflow="fold")
    table.add_column("microbatches", justify="right", no_wrap=True)
    table.add_column("memory", justify="right", no_wrap=True)
    table.add_column("step time", justify="right", no_wrap=True)
    lines = pipeline_lines(pipelines, colours, with_shares=False).split("\n")
    for index, (placement, line) in enumerate(zip(plan.pipelines, lines, strict=True)):
        stages = placement.stages
        fullest = max(
            memory.stage_bytes(s.first_layer, s.end_layer, len(s.devices), len(stages) - 1 - position)
            for position, s in enumerate(stages)
        )
        table.add_row(
            Text(pipeline_name(index), style="bold"),
            line[3:],
            str(placement.microbatches),
            size(fullest),
            duration(placement.estimated_s),
        )
    return table


def _closing(plan: Plan, policy: Policy) -> Text:
    rate = policy.global_batch / plan.estimated_iteration_s if plan.estimated_iteration_s else None
    return Text.assemble(
        ("expected step ", "dim"),
        (duration(plan.estimated_iteration_s), "bold"),
        (f", {number(rate, 0)} samples/s; global batch {policy.global_batch} as ", "dim"),
        (f"{policy.microbatches} microbatches of {policy.microbatch_rows}", "dim"),
    )


def _table() -> Table:
    return Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False)
