"""Renders a plan as a self-contained HTML page with its image and tables."""

from html import escape

from ftd.observe.view.pages.page import apply_theme, render_figures, render_page, render_table
from ftd.observe.view.plan import (
    MAX_DRAWN,
    PIPELINE_COLUMNS,
    chosen_line,
    comparison_line,
    devices_of,
    devices_words,
    format_elapsed,
    format_memory,
    format_optimality_gap,
    named_templates,
    pipeline_cells,
    pipelines_line,
    recomputes,
    shape_line,
)
from ftd.observe.view.text import format_rate, layer_range, pipeline_name, plural
from planner.describe import Description, TemplateRow


def render_plan_page(description: Description, svg: str, *, name: str, other: Description | None) -> str:
    """Return the page for a plan and the image that ``plan_plot`` drew."""
    policy = description.policy
    parts = [
        f'<h1>{escape(name)}</h1>\n<p class="faint">{escape(shape_line(description))}</p>',
        _figures(description),
        _comparison(description, other) if other is not None else "",
        f'<h2>One step</h2>\n<p class="faint">{escape(chosen_line(description))}; equal ones are drawn once. '
        f"Global batch {policy.global_batch} as {policy.microbatches} × {policy.microbatch_rows}.</p>",
        f'<div class="scroll">{apply_theme(svg)}</div>',
        "<h2>Pipelines</h2>",
        _pipelines(description),
        *(
            _stages(letter, description.template(row.nodes), description)
            for letter, row in named_templates(description)[:MAX_DRAWN]
        ),
        "<h2>Templates</h2>",
        _templates(description),
    ]
    return render_page(f"{name}: the plan for {plural(description.nodes, 'node')}", parts)


def _figures(description: Description) -> str:
    shown = [
        ("expected step", format_elapsed(description.iteration_ms)),
        ("samples/s", format_rate(description.samples_per_s)),
        ("bubbles", f"{description.bubble_ratio:.1%}"),
        ("pipelines", str(sum(row.count for row in description.pipelines))),
        ("nodes at work", f"{description.nodes - description.idle_nodes} of {description.nodes}"),
    ]
    return render_figures(shown)


def _comparison(description: Description, other: Description) -> str:
    sentence = comparison_line(description, other)
    return f"<p>{escape(sentence[0].upper() + sentence[1:])}: {escape(pipelines_line(other))}.</p>"


def _pipelines(description: Description) -> str:
    rows = (
        (pipeline_name(index), f"{row.count}×", *pipeline_cells(row))
        for index, row in enumerate(description.pipelines)
    )
    return render_table(("", "pipelines", *PIPELINE_COLUMNS), rows, left={0})


def _stages(letter: str, template: TemplateRow, description: Description) -> str:
    limit = description.memory_limit_bytes
    recomputing = recomputes(template)
    rows = (
        (
            str(index + 1),
            str(stage.node_offset + 1),
            layer_range(stage.first_layer, stage.end_layer),
            devices_words(stage),
            *((stage.recompute,) if recomputing else ()),
            format_elapsed(stage.forward_ms),
            format_elapsed(stage.backward_ms),
            format_memory(stage.memory_bytes),
            *(() if limit is None else (f"{stage.memory_bytes / limit:.0%}",)),
        )
        for index, stage in enumerate(template.stages)
    )
    optional = ("recompute",) if recomputing else ()
    columns = ("stage", "node", "layers", "GPUs", *optional, "forward", "backward", "memory")
    title = f'<h2>Stages of {letter}</h2>\n<p class="faint">times of one microbatch</p>\n'
    return title + render_table((*columns, *(() if limit is None else ("of device",))), rows)


def _templates(description: Description) -> str:
    chosen = {row.nodes for row in description.pipelines}
    rows = (
        (
            str(row.nodes),
            str(len(row.stages)),
            devices_of(row.stages),
            str(row.microbatches),
            format_elapsed(row.objective_ms),
            format_elapsed(row.lower_bound_ms),
            format_optimality_gap(row),
            format_memory(row.memory_bytes),
        )
        for row in description.templates
    )
    marked = {index for index, row in enumerate(description.templates) if row.nodes in chosen}
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
    return render_table(columns, rows, marked=marked)
