"""A plan as one HTML page that needs nothing else: the picture, the tables, light and dark."""

from collections.abc import Iterable, Sequence
from html import escape

from ftd.view.palette import FAINT, INK, PAPER, WAITING
from ftd.view.plan import (
    MOST_DRAWN,
    chosen_line,
    comparison_line,
    devices_of,
    elapsed,
    memory,
    named_templates,
    pipelines_line,
    proof,
    shape_line,
)
from ftd.view.text import layer_range, number, pipeline_name, plural
from planner.describe import Description, TemplateRow

_STYLE = """
:root { color-scheme: light dark; --ink: #1b1f27; --faint: #69707d; --waiting: #e7eaee; --paper: #fefefe;
  --line: #dfe3e8; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9ee; --faint: #9aa3b0; --waiting: #2b313b;
  --paper: #14171c; --line: #2b313b; } }
body { margin: 2rem auto; padding: 0 1.25rem; max-width: 76rem; color: var(--ink);
  background: var(--paper); font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; margin: 0; } h2 { font-size: 1.1rem; margin: 2rem 0 .5rem; }
p { margin: .25rem 0; } .faint { color: var(--faint); }
.figures { display: flex; flex-wrap: wrap; gap: .75rem 2.5rem; margin: 1.25rem 0; }
.figures b { display: block; font-size: 1.3rem; }
.scroll { overflow-x: auto; }
svg { width: 100%; min-width: 46rem; height: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th { font-weight: 500; color: var(--faint); text-align: right; }
th, td { padding: .25rem .9rem .25rem 0; border-bottom: 1px solid var(--line); white-space: nowrap; }
td { text-align: right; } .left { text-align: left; } .chosen td { font-weight: 600; }
"""


def plan_page(told: Description, svg: str, *, name: str, other: Description | None) -> str:
    """The page around a picture that ``plan_plot`` drew."""
    title = escape(name)
    head = (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{title}: the plan for {plural(told.nodes, 'node')}</title>\n"
        f"<style>{_STYLE}</style>\n</head>\n"
    )
    policy = told.policy
    parts = [
        f'<h1>{title}</h1>\n<p class="faint">{escape(shape_line(told))}</p>',
        _figures(told),
        _comparison(told, other) if other is not None else "",
        f'<h2>One step</h2>\n<p class="faint">{escape(chosen_line(told))}; equal ones are drawn once. '
        f"Global batch {policy.global_batch} as {policy.microbatches} × {policy.microbatch_rows}.</p>",
        f'<div class="scroll">{_themed(svg)}</div>',
        "<h2>Pipelines</h2>",
        _pipelines(told),
        *(
            _stages(letter, told.template(row.nodes), told)
            for letter, row in named_templates(told)[:MOST_DRAWN]
        ),
        "<h2>Templates</h2>",
        _templates(told),
    ]
    return f"{head}<body>\n" + "\n".join(part for part in parts if part) + "\n</body>\n</html>\n"


def _themed(svg: str) -> str:
    """The drawing itself, its neutral colours left to the page."""
    drawing = svg[svg.index("<svg") :]
    for colour, variable in (
        (INK, "--ink"),
        (FAINT, "--faint"),
        (WAITING, "--waiting"),
        (PAPER, "--paper"),
    ):
        drawing = drawing.replace(colour, f"var({variable})")
    return drawing


def _figures(told: Description) -> str:
    shown = [
        ("expected step", elapsed(told.iteration_ms)),
        ("samples/s", number(told.samples_per_s, 0)),
        ("bubbles", f"{told.bubble_ratio:.1%}"),
        ("pipelines", str(sum(row.count for row in told.pipelines))),
        ("nodes at work", f"{told.nodes - told.idle_nodes} of {told.nodes}"),
    ]
    cells = (f'<div><b>{escape(value)}</b><span class="faint">{label}</span></div>' for label, value in shown)
    return f'<div class="figures">{"".join(cells)}</div>'


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
    return _table(columns, rows, left={0})


def _stages(letter: str, template: TemplateRow, told: Description) -> str:
    limit = told.memory_limit_bytes
    rows = (
        (
            str(index + 1),
            str(stage.node_offset + 1),
            layer_range(stage.first_layer, stage.end_layer),
            str(stage.devices),
            elapsed(stage.forward_ms),
            elapsed(stage.backward_ms),
            memory(stage.memory_bytes),
            *(() if limit is None else (f"{stage.memory_bytes / limit:.0%}",)),
        )
        for index, stage in enumerate(template.stages)
    )
    columns = ("stage", "node", "layers", "GPUs", "forward", "backward", "memory")
    title = f'<h2>Stages of {letter}</h2>\n<p class="faint">times of one microbatch</p>\n'
    return title + _table((*columns, *(() if limit is None else ("of device",))), rows)


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
    return _table(columns, rows, marked=marked)


def _table(
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    left: Iterable[int] = (),
    marked: Iterable[int] = (),
) -> str:
    """``left`` are columns aligned to the left, ``marked`` rows to be seen at once."""
    aligned, bold = set(left), set(marked)

    def row_of(tag: str, cells: Sequence[str]) -> str:
        return "".join(
            f"<{tag}{' class=left' if index in aligned else ''}>{escape(cell)}</{tag}>"
            for index, cell in enumerate(cells)
        )

    lines = [
        f"<tr{' class=chosen' if index in bold else ''}>{row_of('td', cells)}</tr>"
        for index, cells in enumerate(rows)
    ]
    body = "\n".join(lines)
    return f'<div class="scroll"><table>\n<tr>{row_of("th", columns)}</tr>\n{body}\n</table></div>'
