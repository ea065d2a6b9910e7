"""Renders the output of ``ftd plan``: the templates of a model, and the pipelines chosen for a number of
nodes.
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ftd.observe.view.blocks import add_numbers, plain_table
from ftd.observe.view.text import format_rate, format_size, layer_range, pipeline_name, plural
from planner.describe import Description, PipelineRow, StageRow, TemplateRow
from planner.errors import SolverError
from planner.reasons import describe_within
from planner.values import Within

if TYPE_CHECKING:
    from planner.crosscheck import CrossCheck

MAX_TEMPLATES = 30
MAX_STAGES = 24
"""Largest number of rows in a table of stages; a longer table has one row for each node and omits the middle."""
MAX_PIPELINES = 3
"""Number of kinds of pipelines that are shown in full."""
PIPELINE_COLUMNS = ("nodes", "microbatches", "1F1B", "all-reduce", "step", "bubbles", "memory")
"""Names of what ``pipeline_cells`` returns."""
_BAR_WIDTH = 10
_SHARES_BY = {
    "exact": "shares of the batch by the exact method",
    "pyomo": "shares of the batch by an integer program (Pyomo, HiGHS)",
}


def render_plan(
    description: Description,
    *,
    planning_s: float,
    other: Description | None = None,
    check: "CrossCheck | SolverError | None" = None,
) -> RenderableType:
    """Return the templates and the chosen pipelines; best at 100 columns, readable at 80.

    :param other: the plan for the same question under the other objective.
    """
    parts: list[RenderableType] = [
        Text.assemble(("Templates", "bold"), (f"  {shape_line(description)}", "dim")),
        _template_table(description),
        Text(f"planned in {planning_s:.3g} s; {_SHARES_BY[description.policy.batch_solver]}", style="dim"),
        "",
        Text.assemble(("Chosen", "bold"), (f"  {chosen_line(description)}", "dim")),
        _pipeline_table(description),
    ]
    for name, row in named_templates(description)[:MAX_PIPELINES]:
        template = description.template(row.nodes)
        title = Text.assemble((f"Pipeline {name}", "bold"), (f"  {_template_line(template)}", "dim"))
        parts += ["", title, _stages_table(template, description.memory_limit_bytes)]
        if whole := max(stage.undivided_bytes for stage in template.stages):
            buffers = f"buffers are whole on each device: up to {format_size(whole)} of it"
            parts.append(Text(buffers, style="dim"))
    parts += ["", *(_comparison(description, other) if other is not None else ()), closing_line(description)]
    return Group(*parts, *([] if check is None else [_check_line(check)]))


def shape_line(description: Description) -> str:
    limit, policy = description.memory_limit_bytes, description.policy
    room = f"a device has {format_size(limit)}" if limit is not None else "no memory limit"
    split = ", aligned split" if policy.split == "aligned" else ""
    shape = (
        f"{plural(description.layers, 'layer')}, {plural(policy.devices_per_node, 'device')} a node, {room}"
    )
    return f"{shape}, {policy.objective} objective{split}"


def chosen_line(description: Description) -> str:
    pipelines = sum(row.count for row in description.pipelines)
    idle = f", {description.idle_nodes} of them idle" if description.idle_nodes else ""
    return f"{plural(pipelines, 'pipeline')} for {plural(description.nodes, 'node')}{idle}"


MAX_DRAWN = 4
"""Number of kinds of pipelines in an image."""


def named_templates(description: Description) -> list[tuple[str, PipelineRow]]:
    """Return the chosen templates, each once, with the name and the largest share of its first pipeline."""
    named: dict[int, tuple[str, PipelineRow]] = {}
    for index, row in enumerate(description.pipelines):
        named.setdefault(row.nodes, (pipeline_name(index), row))
    return list(named.values())


def format_elapsed(value_ms: float) -> str:
    """Return a time with four significant digits in a suitable unit."""
    for unit, factor in (("s", 1e3), ("ms", 1.0), ("µs", 1e-3)):
        if value_ms >= factor:
            digits = f"{value_ms / factor:#.4g}".rstrip(".")
            return f"{value_ms / 1e3:,.0f} s" if value_ms >= 9_999_500 else f"{digits} {unit}"
    return "0 ms" if value_ms == 0 else f"{value_ms * 1e6:.3g} ns"


def format_memory(size_bytes: int) -> str:
    """Return a size, or ``–`` if it is 0 because the profile has no sizes."""
    return format_size(size_bytes) if size_bytes else "–"


def format_optimality_gap(row: TemplateRow) -> str:
    """Return how close to the optimum the objective provably is."""
    if row.proved_optimal:
        return "proved"
    return "0.01%" if row.gap < 1e-4 else f"{row.gap:.2%}"


def devices_of(stages: Sequence[StageRow]) -> str:
    """Return how many stages have how many devices, and how these share the work: ``4×2 sharded + 8×1``."""
    counts: dict[tuple[int, Within, int], int] = {}
    for stage in stages:
        kind = stage.devices, stage.within, stage.replicas
        counts[kind] = counts.get(kind, 0) + 1
    return " + ".join(
        f"{count}×{devices}{'' if within == 'replicate' else f' {describe_within(within, replicas)}'}"
        for (devices, within, replicas), count in sorted(counts.items(), reverse=True)
    )


def devices_words(stage: StageRow) -> str:
    """Return the devices of one stage: ``2, sharded``."""
    if stage.within == "replicate":
        return str(stage.devices)
    return f"{stage.devices}, {describe_within(stage.within, stage.replicas)}"


def comparison_line(description: Description, other: Description) -> str:
    """Return a sentence about the cost of the other objective's plan."""
    name = "the paper's plan" if other.policy.objective == "paper" else "the iteration objective's plan"
    if description.iteration_ms <= 0:
        return f"{name} takes no time either"
    change = other.iteration_ms / description.iteration_ms - 1
    if abs(change) < 5e-5:  # It would be shown as 0.00%.
        return f"{name} would take the same time"
    return f"{name} would take {abs(change):.2%} {'longer' if change > 0 else 'less'}"


def _template_table(description: Description) -> Table:
    table = plain_table()
    add_numbers(table, "nodes", "stages")
    table.add_column("stages × devices", justify="right", overflow="fold")
    add_numbers(table, "micro-\nbatches", "objective", "optimal\nwithin", "memory")
    table.add_column("", no_wrap=True)
    chosen = {row.nodes for row in description.pipelines}
    for row in _abridged(description.templates, chosen):
        if row is None:
            table.add_row("⋮", style="dim")
            continue
        table.add_row(
            str(row.nodes),
            str(len(row.stages)),
            devices_of(row.stages),
            str(row.microbatches),
            format_elapsed(row.objective_ms),
            Text(format_optimality_gap(row), style="green" if row.proved_optimal else ""),
            format_memory(row.memory_bytes),
            "◂" if row.nodes in chosen else "",
            style="bold" if row.nodes in chosen else "",
        )
    return table


def _abridged(rows: Sequence[TemplateRow], chosen: set[int]) -> Iterator[TemplateRow | None]:
    """Yield all rows, or the first, the last and the chosen ones, with ``None`` in place of omitted rows."""
    ends = MAX_TEMPLATES // 3
    skipping = False
    for index, row in enumerate(rows):
        shown = index < ends or index >= len(rows) - ends or row.nodes in chosen
        if len(rows) <= MAX_TEMPLATES or shown:
            skipping = False
            yield row
        elif not skipping:
            skipping = True
            yield None


def _pipeline_table(description: Description) -> RenderableType:
    table = plain_table()
    table.add_column("", no_wrap=True)
    add_numbers(table, *PIPELINE_COLUMNS)
    shown = description.pipelines[:MAX_STAGES]
    for index, row in enumerate(shown):
        table.add_row(
            Text.assemble((pipeline_name(index), "bold"), f" × {row.count}" if row.count > 1 else ""),
            *pipeline_cells(row),
        )
    hidden = len(description.pipelines) - len(shown)
    if not hidden:
        return table
    return Group(table, Text(f"… and {plural(hidden, 'more kind', 'more kinds')}", style="dim"))


def pipeline_cells(row: PipelineRow) -> tuple[str, ...]:
    """Return the values of a kind of pipelines for ``PIPELINE_COLUMNS``."""
    return (
        str(row.nodes),
        str(row.microbatches),
        format_elapsed(row.makespan_ms),
        format_elapsed(row.sync_ms),
        format_elapsed(row.step_ms),
        f"{row.bubble_ratio:.1%}",
        format_memory(row.memory_bytes),
    )


def recomputes(template: TemplateRow) -> bool:
    """Return whether any stage computes activations again in its backward pass."""
    return any(stage.recompute != "none" for stage in template.stages)


def _template_line(template: TemplateRow) -> str:
    nodes = plural(template.nodes, "node")
    optimal = (
        "proved optimal"
        if template.proved_optimal
        else f"within {format_optimality_gap(template)} of the optimum"
    )
    return f"template of {nodes}, {plural(len(template.stages), 'stage')}, {optimal}"


def _stages_table(template: TemplateRow, limit_bytes: int | None) -> RenderableType:
    """Return a row for each stage; for deep pipelines a row for each node, without the middle ones."""
    groups: list[tuple[str, tuple[StageRow, ...]]]
    deep = len(template.stages) > MAX_STAGES
    if deep:
        by_node: dict[int, list[StageRow]] = {}
        for stage in template.stages:
            by_node.setdefault(stage.node_offset, []).append(stage)
        groups = [(devices_of(stages), tuple(stages)) for stages in by_node.values()]
    else:
        groups = [(devices_words(stage), (stage,)) for stage in template.stages]
    slowest_ms = max(stage.time_ms for stage in template.stages)
    table = plain_table()
    add_numbers(table, "node")
    table.add_column("layers", no_wrap=True)
    recomputing = recomputes(template)
    columns = ("stages×GPUs" if deep else "GPUs", *(("recompute",) if recomputing else ()))
    add_numbers(table, *columns, "forward", "backward")
    table.add_column("load", no_wrap=True)
    add_numbers(table, "memory", *(() if limit_bytes is None else ("of device",)))
    half = MAX_STAGES // 2
    for index, (devices, stages) in enumerate(groups):
        if len(groups) > MAX_STAGES and half <= index < len(groups) - half:
            if index == half:
                table.add_row("⋮", f"{plural(len(groups) - 2 * half, 'more node')}", style="dim")
            continue
        _add_stages(table, devices, stages, slowest_ms, limit_bytes, recomputing=recomputing)
    note = "slowest stage and fullest device of each node; times of one microbatch"
    return Group(table, Text(note if deep else "times of one microbatch", style="dim"))


def _add_stages(
    table: Table,
    devices: str,
    stages: Sequence[StageRow],
    slowest_ms: float,
    limit_bytes: int | None,
    *,
    recomputing: bool,
) -> None:
    slow = max(stages, key=lambda stage: stage.time_ms)
    fullest = max(stage.memory_bytes for stage in stages)
    load = slow.time_ms / slowest_ms if slowest_ms else 1.0
    cells: list[str | Text] = [
        str(stages[0].node_offset + 1),
        layer_range(stages[0].first_layer, stages[-1].end_layer),
        devices,
        *((", ".join(dict.fromkeys(stage.recompute for stage in stages)),) if recomputing else ()),
        format_elapsed(slow.forward_ms),
        format_elapsed(slow.backward_ms),
        Text.assemble((_bar(load), "#5fafff"), f" {load:4.0%}"),
        format_memory(fullest),
    ]
    if limit_bytes is not None:
        cells.append(f"{fullest / limit_bytes:.0%}")
    table.add_row(*cells)


def _bar(part: float) -> str:
    """Return the share ``part`` of a full bar, to an eighth of a character."""
    eighths = round(part * _BAR_WIDTH * 8)
    full, rest = divmod(eighths, 8)
    return ("█" * full + (" ▏▎▍▌▋▊▉"[rest] if rest else "")).ljust(_BAR_WIDTH)


def _comparison(description: Description, other: Description) -> list[RenderableType]:
    table = plain_table()
    table.add_column("", no_wrap=True)
    add_numbers(table, "step", "bubbles")
    table.add_column("pipelines", overflow="fold")
    for plan in sorted((description, other), key=lambda one: one.policy.objective):
        table.add_row(
            plan.policy.objective,
            format_elapsed(plan.iteration_ms),
            f"{plan.bubble_ratio:.1%}",
            pipelines_line(plan),
            "◂ chosen" if plan is description else "",
        )
    title = Text.assemble(("Objectives", "bold"), ("  both under the true 1F1B, all-reduce included", "dim"))
    return [title, table, Text(comparison_line(description, other)), ""]


def pipelines_line(description: Description) -> str:
    """Return a text such as ``2 of 4 nodes (16 stages), 1 of 3 nodes (12 stages)``."""
    counts: dict[int, int] = {}
    for row in description.pipelines:
        counts[row.nodes] = counts.get(row.nodes, 0) + row.count
    kinds = [
        f"{count} of {plural(nodes, 'node')} ({plural(len(description.template(nodes).stages), 'stage')})"
        for nodes, count in counts.items()
    ]
    more = f" and {len(kinds) - MAX_PIPELINES} more kinds" if len(kinds) > MAX_PIPELINES else ""
    return ", ".join(kinds[:MAX_PIPELINES]) + more


def closing_line(description: Description) -> Text:
    policy = description.policy
    return Text.assemble(
        ("expected step ", "dim"),
        (format_elapsed(description.iteration_ms), "bold"),
        (f", {format_rate(description.samples_per_s)} samples/s; ", "dim"),
        (f"global batch {policy.global_batch} as ", "dim"),
        (f"{plural(policy.microbatches, 'microbatch', 'microbatches')} of {policy.microbatch_rows}", "dim"),
    )


def _check_line(check: "CrossCheck | SolverError") -> Text:
    if isinstance(check, SolverError):
        return Text(f"batch distribution not checked against the integer program: {check}", style="yellow")
    done = "batch distribution checked against the integer program (Pyomo): "
    if check.agrees:
        return Text.assemble((done, "dim"), ("equal", "green"))
    shares = ", ".join(map(str, check.model_microbatches))
    times = f"{check.model_score_ms:.6g} ms instead of {check.score_ms:.6g} ms"
    return Text.assemble(done, (f"it finds {times} with {shares} microbatches; this is a bug", "bold red"))
