"""A plan as one HTML page that needs nothing else: the picture, the tables, light and dark."""

from html import escape

from ftd.observe.view.pages.page import figures, page, table, themed
from ftd.observe.view.plan import (
    MOST_DRAWN,
    chosen_line,
    comparison_line,
    devices_of,
    devices_words,
    elapsed,
    memory,
    named_templates,
    pipelines_line,
    proof,
    recomputes,
    shape_line,
)
from ftd.observe.view.text import format_number, layer_range, pipeline_name, plural
from planner.describe import Description, TemplateRow


def plan_page(told: Description, svg: str, *, name: str, other: Description | None) -> str:
    """The page around a picture that ``plan_plot`` drew."""
    policy = told.policy
    parts = [
        f'<h1>{escape(name)}</h1>\n<p class="faint">{escape(shape_line(told))}</p>',
        _figures(told),
        _comparison(told, other) if other is not None else "",
        f'<h2>One step</h2>\n<p class="faint">{escape(chosen_line(told))}; equal ones are drawn once. '
        f"Global batch {policy.global_batch} as {policy.microbatches} × {policy.microbatch_rows}.</p>",
        f'<div class="scroll">{themed(svg)}</div>',
        "<h2>Pipelines</h2>",
        _pipelines(told),
        *(
            _stages(letter, told.template(row.nodes), told)
            for letter, row in named_templates(told)[:MOST_DRAWN]
        ),
        "<h2>Templates</h2>",
        _templates(told),
    ]
    return page(f"{name}: the plan for {plural(told.nodes, 'node')}", parts)


def _figures(told: Description) -> str:
    shown = [
        ("expected step", elapsed(told.iteration_ms)),
        ("samples/s", format_number(told.samples_per_s, 0)),
        ("bubbles", f"{told.bubble_ratio:.1%}"),
        ("pipelines", str(sum(row.count for row in told.pipelines))),
        ("nodes at work", f"{told.nodes - told.idle_nodes} of {told.nodes}"),
    ]
    return figures(shown)


def _comparison(told: Description, other: Description) -> str:
    said = comparison_line(told, other)
    return f"<p>{escape(said[0].upper() + said[1:])}: {escape(pipelines_line(other))}.</p>"


def _pipelines(told: Description) -> str:
    rows = (
        (
            pipeline_name(index),
            f"{row.count}×",
            str(row.nodes),
            str(row.microbatches),
            elapsed(row.makespan_ms),
            elapsed(row.sync_ms),
            elapsed(row.step_ms),
            f"{row.bubble_ratio:.1%}",
            memory(row.memory_bytes),
        )
        for index, row in enumerate(told.pipelines)
    )
    columns = ("", "pipelines", "nodes", "microbatches", "1F1B", "all-reduce", "step", "bubbles", "memory")
    return table(columns, rows, left={0})


def _stages(letter: str, template: TemplateRow, told: Description) -> str:
    limit = told.memory_limit_bytes
    recomputing = recomputes(template)
    rows = (
        (
            str(index + 1),
            str(stage.node_offset + 1),
            layer_range(stage.first_layer, stage.end_layer),
            devices_words(stage),
            *((stage.recompute,) if recomputing else ()),
            elapsed(stage.forward_ms),
            elapsed(stage.backward_ms),
            memory(stage.memory_bytes),
            *(() if limit is None else (f"{stage.memory_bytes / limit:.0%}",)),
        )
        for index, stage in enumerate(template.stages)
    )
    again = ("recompute",) if recomputing else ()
    columns = ("stage", "node", "layers", "GPUs", *again, "forward", "backward", "memory")
    title = f'<h2>Stages of {letter}</h2>\n<p class="faint">times of one microbatch</p>\n'
    return title + table((*columns, *(() if limit is None else ("of device",))), rows)


def _templates(told: Description) -> str:
    chosen = {row.nodes for row in told.pipelines}
    rows = (
        (
            str(row.nodes),
            str(len(row.stages)),
            devices_of(row.stages),
            str(row.microbatches),
            elapsed(row.objective_ms),
            elapsed(row.lower_bound_ms),
            proof(row),
            memory(row.memory_bytes),
        )
        for row in told.templates
    )
    marked = {index for index, row in enumerate(told.templates) if row.nodes in chosen}
    columns = (
        "nodes",
        "stages",
        "stages × GPUs",
        "microbatches",
        "objective",
        "bound",
        "optimal within",
        "memory",
    )
    return table(columns, rows, marked=marked)
