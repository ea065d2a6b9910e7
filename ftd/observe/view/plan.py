"""``ftd plan``: the templates of a model and the pipelines chosen for a number of nodes, as tables."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ftd.observe.view.blocks import plain_table
from ftd.observe.view.text import format_number, format_size, layer_range, pipeline_name, plural
from planner.describe import Description, PipelineRow, StageRow, TemplateRow
from planner.errors import SolverError
from planner.reasons import WITHIN_WORDS
from planner.values import Within

if TYPE_CHECKING:
    from planner.crosscheck import CrossCheck

MOST_TEMPLATES = 30
MOST_STAGES = 24
"""Lines of one table; beyond, stages are told node by node, and the middle is left out."""
MOST_PIPELINES = 3
"""Kinds of pipelines that are told in full."""
_BAR_WIDTH = 10
_SHARES_BY = {
    "exact": "shares of the batch by the exact method",
    "pyomo": "shares of the batch by an integer program (Pyomo, HiGHS)",
}


def render_plan(
    told: Description,
    *,
    planning_s: float,
    other: Description | None = None,
    check: "CrossCheck | SolverError | None" = None,
) -> RenderableType:
    """What could run and what would: made for 100 columns, and still readable in 80.

    ``other`` is the same question under the other objective.
    """
    parts: list[RenderableType] = [
        Text.assemble(("Templates", "bold"), (f"  {shape_line(told)}", "dim")),
        _template_table(told),
        Text(f"planned in {planning_s:.3g} s; {_SHARES_BY[told.policy.batch_solver]}", style="dim"),
        "",
        Text.assemble(("Chosen", "bold"), (f"  {chosen_line(told)}", "dim")),
        _pipeline_table(told),
    ]
    for name, row in named_templates(told)[:MOST_PIPELINES]:
        template = told.template(row.nodes)
        title = Text.assemble((f"Pipeline {name}", "bold"), (f"  {_template_line(template)}", "dim"))
        parts += ["", title, _stages_table(template, told.memory_limit_bytes)]
    parts += ["", *(_comparison(told, other) if other is not None else ()), closing_line(told)]
    return Group(*parts, *([] if check is None else [_check_line(check)]))


def shape_line(told: Description) -> str:
    limit, policy = told.memory_limit_bytes, told.policy
    room = f"a device has {format_size(limit)}" if limit is not None else "no memory limit"
    split = ", aligned split" if policy.split == "aligned" else ""
    shape = f"{plural(told.layers, 'layer')}, {plural(policy.devices_per_node, 'device')} a node, {room}"
    return f"{shape}, {policy.objective} objective{split}"


def chosen_line(told: Description) -> str:
    pipelines = sum(row.count for row in told.pipelines)
    idle = f", {told.idle_nodes} of them idle" if told.idle_nodes else ""
    return f"{plural(pipelines, 'pipeline')} for {plural(told.nodes, 'node')}{idle}"


MOST_DRAWN = 4
"""Kinds of pipelines in a picture."""


def named_templates(told: Description) -> list[tuple[str, PipelineRow]]:
    """The chosen templates, each once, by the name of its first pipeline and with its largest share."""
    named: dict[int, tuple[str, PipelineRow]] = {}
    for index, row in enumerate(told.pipelines):
        named.setdefault(row.nodes, (pipeline_name(index), row))
    return list(named.values())


def elapsed(value_ms: float) -> str:
    """A time to four digits, in the unit that suits it."""
    for unit, factor in (("s", 1e3), ("ms", 1.0), ("µs", 1e-3)):
        if value_ms >= factor:
            digits = f"{value_ms / factor:#.4g}".rstrip(".")
            return f"{value_ms / 1e3:,.0f} s" if value_ms >= 1e7 else f"{digits} {unit}"
    return "0 ms" if value_ms == 0 else f"{value_ms * 1e6:.3g} ns"


def memory(size_bytes: int) -> str:
    """``–`` for none at all: the profile has no sizes."""
    return format_size(size_bytes) if size_bytes else "–"


def proof(row: TemplateRow) -> str:
    """Within which part of the optimum the objective is."""
    if row.proved_optimal:
        return "proved"
    return "0.01%" if row.gap < 1e-4 else f"{row.gap:.2%}"


def devices_of(stages: Sequence[StageRow]) -> str:
    """``4×2 sharded + 8×1``: how many stages have how many devices, and how these share its work."""
    counts: dict[tuple[int, Within], int] = {}
    for stage in stages:
        kind = stage.devices, stage.within
        counts[kind] = counts.get(kind, 0) + 1
    return " + ".join(
        f"{count}×{devices}{'' if within == 'replicate' else f' {WITHIN_WORDS[within]}'}"
        for (devices, within), count in sorted(counts.items(), reverse=True)
    )


def devices_words(stage: StageRow) -> str:
    """``2, sharded``: the devices of one stage."""
    return str(stage.devices) + ("" if stage.within == "replicate" else f", {WITHIN_WORDS[stage.within]}")


def comparison_line(told: Description, other: Description) -> str:
    """What the other objective's plan would cost, in a sentence."""
    name = "the paper's plan" if other.policy.objective == "paper" else "the iteration objective's plan"
    if told.iteration_ms <= 0:
        return f"{name} takes no time either"
    change = other.iteration_ms / told.iteration_ms - 1
    if abs(change) < 5e-6:
        return f"{name} would take the same time"
    return f"{name} would take {abs(change):.2%} {'longer' if change > 0 else 'less'}"


def _template_table(told: Description) -> Table:
    table = plain_table()
    for column in ("nodes", "stages"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("stages × devices", justify="right", overflow="fold")
    for column in ("micro-\nbatches", "objective", "optimal\nwithin", "memory"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    chosen = {row.nodes for row in told.pipelines}
    for row in _abridged(told.templates, chosen):
        if row is None:
            table.add_row("⋮", style="dim")
            continue
        table.add_row(
            str(row.nodes),
            str(len(row.stages)),
            devices_of(row.stages),
            str(row.microbatches),
            elapsed(row.objective_ms),
            Text(proof(row), style="green" if row.proved_optimal else ""),
            memory(row.memory_bytes),
            "◂" if row.nodes in chosen else "",
            style="bold" if row.nodes in chosen else "",
        )
    return table


def _abridged(rows: Sequence[TemplateRow], chosen: set[int]) -> Iterator[TemplateRow | None]:
    """All rows, or the first, the last and the chosen ones; ``None`` where some are left out."""
    ends = MOST_TEMPLATES // 3
    skipping = False
    for index, row in enumerate(rows):
        shown = index < ends or index >= len(rows) - ends or row.nodes in chosen
        if len(rows) <= MOST_TEMPLATES or shown:
            skipping = False
            yield row
        elif not skipping:
            skipping = True
            yield None


def _pipeline_table(told: Description) -> RenderableType:
    table = plain_table()
    table.add_column("", no_wrap=True)
    columns = ("nodes", "microbatches", "1F1B", "all-reduce", "step", "bubbles", "memory")
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    shown = told.pipelines[:MOST_STAGES]
    for index, row in enumerate(shown):
        table.add_row(
            Text.assemble((pipeline_name(index), "bold"), f" × {row.count}" if row.count > 1 else ""),
            str(row.nodes),
            str(row.microbatches),
            elapsed(row.makespan_ms),
            elapsed(row.sync_ms),
            elapsed(row.step_ms),
            f"{row.bubble_ratio:.1%}",
            memory(row.memory_bytes),
        )
    hidden = len(told.pipelines) - len(shown)
    if not hidden:
        return table
    return Group(table, Text(f"… and {plural(hidden, 'more kind', 'more kinds')}", style="dim"))


def recomputes(template: TemplateRow) -> bool:
    """Return whether any stage computes activations again in its backward pass."""
    return any(stage.recompute != "none" for stage in template.stages)


def _template_line(template: TemplateRow) -> str:
    nodes = plural(template.nodes, "node")
    optimal = "proved optimal" if template.proved_optimal else f"within {proof(template)} of the optimum"
    return f"template of {nodes}, {plural(len(template.stages), 'stage')}, {optimal}"


def _stages_table(template: TemplateRow, limit_bytes: int | None) -> RenderableType:
    """A line for each stage; for deep pipelines a line for each node, and the middle left out."""
    groups: list[tuple[str, tuple[StageRow, ...]]]
    deep = len(template.stages) > MOST_STAGES
    if deep:
        by_node: dict[int, list[StageRow]] = {}
        for stage in template.stages:
            by_node.setdefault(stage.node_offset, []).append(stage)
        groups = [(devices_of(stages), tuple(stages)) for stages in by_node.values()]
    else:
        groups = [(devices_words(stage), (stage,)) for stage in template.stages]
    slowest_ms = max(stage.time_ms for stage in template.stages)
    table = plain_table()
    table.add_column("node", justify="right", no_wrap=True)
    table.add_column("layers", no_wrap=True)
    recomputing = recomputes(template)
    columns = ("stages×GPUs" if deep else "GPUs", *(("recompute",) if recomputing else ()))
    for column in (*columns, "forward", "backward"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("load", no_wrap=True)
    table.add_column("memory", justify="right", no_wrap=True)
    if limit_bytes is not None:
        table.add_column("of device", justify="right", no_wrap=True)
    half = MOST_STAGES // 2
    for index, (devices, stages) in enumerate(groups):
        if len(groups) > MOST_STAGES and half <= index < len(groups) - half:
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
        elapsed(slow.forward_ms),
        elapsed(slow.backward_ms),
        Text.assemble((_bar(load), "#5fafff"), f" {load:4.0%}"),
        memory(fullest),
    ]
    if limit_bytes is not None:
        cells.append(f"{fullest / limit_bytes:.0%}")
    table.add_row(*cells)


def _bar(part: float) -> str:
    """``part`` of a full bar, to an eighth of a character."""
    eighths = round(part * _BAR_WIDTH * 8)
    full, rest = divmod(eighths, 8)
    return ("█" * full + (" ▏▎▍▌▋▊▉"[rest] if rest else "")).ljust(_BAR_WIDTH)


def _comparison(told: Description, other: Description) -> list[RenderableType]:
    table = plain_table()
    table.add_column("", no_wrap=True)
    for column in ("step", "bubbles"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("pipelines", overflow="fold")
    for plan in sorted((told, other), key=lambda one: one.policy.objective):
        table.add_row(
            plan.policy.objective,
            elapsed(plan.iteration_ms),
            f"{plan.bubble_ratio:.1%}",
            pipelines_line(plan),
            "◂ chosen" if plan is told else "",
        )
    title = Text.assemble(("Objectives", "bold"), ("  both under the true 1F1B, all-reduce included", "dim"))
    return [title, table, Text(comparison_line(told, other)), ""]


def pipelines_line(told: Description) -> str:
    """``2 of 4 nodes (16 stages), 1 of 3 nodes (12 stages)``."""
    counts: dict[int, int] = {}
    for row in told.pipelines:
        counts[row.nodes] = counts.get(row.nodes, 0) + row.count
    kinds = [
        f"{count} of {plural(nodes, 'node')} ({plural(len(told.template(nodes).stages), 'stage')})"
        for nodes, count in counts.items()
    ]
    more = f" and {len(kinds) - MOST_PIPELINES} more kinds" if len(kinds) > MOST_PIPELINES else ""
    return ", ".join(kinds[:MOST_PIPELINES]) + more


def closing_line(told: Description) -> Text:
    policy = told.policy
    return Text.assemble(
        ("expected step ", "dim"),
        (elapsed(told.iteration_ms), "bold"),
        (f", {format_number(told.samples_per_s, 0)} samples/s; ", "dim"),
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
