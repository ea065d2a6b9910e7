"""``ftd plan``: the templates of a job and the pipelines chosen for a number of nodes, as tables."""

from collections.abc import Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ftd.view.blocks import PipelineBars, pipeline_lines
from ftd.view.text import NodeColours, duration, layer_range, number, pipeline_name, plural, size
from planner.describe import CrossCheck, Description, TemplateRow
from planner.errors import SolverError
from planner.values import Device, PipelinePlacement, Policy

_MOST_BARS = 12


def render_plan(
    description: Description, check: CrossCheck | SolverError, *, policy: Policy
) -> RenderableType:
    """What could run and what would: readable at 100 columns."""
    plan, limit = description.plan, description.memory_limit_bytes
    layers = plural(description.templates[0].stages[-1].end_layer, "layer")
    room = f"a device has {size(limit)}" if limit is not None else "no memory limit"
    shape = f"{layers}, {plural(policy.devices_per_node, 'device')} a node, {room}"
    pipelines = [pipeline_json(p) for p in plan.pipelines]
    colours = NodeColours()
    count = plural(len(plan.nodes) + len(plan.idle_nodes), "node")
    parts: list[RenderableType] = [
        Text.assemble(("Templates", "bold"), (f"  {shape}", "dim")),
        _template_table(description.templates),
        "",
        Text.assemble(("Chosen", "bold"), (f"  for {count}", "dim")),
        Text(plan.reason),
        _pipeline_table(description, pipelines, colours),
    ]
    if plan.idle_nodes:
        parts.append(Text(f"idle: {', '.join(plan.idle_nodes)}", style="yellow"))
    parts += ["", PipelineBars(pipelines, colours, most=_MOST_BARS), "", _closing(description, policy)]
    return Group(*parts, _check_line(check))


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


def _template_table(templates: Sequence[TemplateRow]) -> Table:
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
        gap = template.objective_ms / template.lower_bound_ms - 1 if template.lower_bound_ms else 0.0
        table.add_row(
            str(template.nodes),
            stages,
            size(template.memory_bytes),
            duration(template.objective_ms / 1e3),
            "proved" if template.proved_optimal else f"within {gap:.1%}",
        )
    return table


def _pipeline_table(
    description: Description, pipelines: Sequence[dict[str, Any]], colours: NodeColours
) -> Table:
    table = _table()
    table.add_column("", no_wrap=True)
    table.add_column("stages: node layers", overflow="fold")
    table.add_column("microbatches", justify="right", no_wrap=True)
    table.add_column("memory", justify="right", no_wrap=True)
    table.add_column("step time", justify="right", no_wrap=True)
    table.add_column("bubbles", justify="right", no_wrap=True)
    lines = pipeline_lines(pipelines, colours, with_shares=False).split("\n")
    rows = zip(description.plan.pipelines, description.estimates, lines, strict=True)
    for index, (placement, estimate, line) in enumerate(rows):
        table.add_row(
            Text(pipeline_name(index), style="bold"),
            line[3:],
            str(placement.microbatches),
            size(estimate.memory_bytes),
            duration(placement.estimated_s),
            f"{estimate.bubble_ratio:.0%}",
        )
    return table


def _closing(description: Description, policy: Policy) -> Text:
    return Text.assemble(
        ("expected step ", "dim"),
        (duration(description.plan.estimated_iteration_s), "bold"),
        (f", {number(description.samples_per_s, 0)} samples/s; ", "dim"),
        (f"global batch {policy.global_batch} as ", "dim"),
        (f"{policy.microbatches} microbatches of {policy.microbatch_rows}", "dim"),
    )


def _check_line(check: CrossCheck | SolverError) -> Text:
    if isinstance(check, SolverError):
        return Text(f"batch distribution not checked against the integer program: {check}", style="yellow")
    done = "batch distribution checked against the integer program (Pyomo, HiGHS): "
    if check.agrees:
        return Text.assemble((done, "dim"), ("equal", "green"))
    shares = ", ".join(map(str, check.model_microbatches))
    seconds = f"{check.model_iteration_ms:.6g} ms instead of {check.iteration_ms:.6g} ms"
    return Text.assemble(done, (f"it finds {seconds} with {shares} microbatches; this is a bug", "bold red"))


def _table() -> Table:
    return Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False)
