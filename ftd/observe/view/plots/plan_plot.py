"""Draws a plan: the 1F1B timeline of each kind of pipeline, and the memory of its stages.

Equal pipelines are drawn once. All timelines share one axis, so the slowest pipeline is the longest.
matplotlib is imported only by modules that draw.
"""

from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from numpy.typing import NDArray

from ftd.errors import ConfigurationError
from ftd.observe.view.files import write_file
from ftd.observe.view.plan import MAX_DRAWN, chosen_line, comparison_line, format_elapsed, named_templates
from ftd.observe.view.plots.image import render_image
from ftd.observe.view.plots.palette import BACKWARD, FAINT, FORWARD, GREEN, INK, PAPER, RED, WAITING
from ftd.observe.view.text import layer_range, plural
from planner.describe import Description, PipelineRow, StageRow, TemplateRow, timeline_of
from planner.reasons import describe_within
from planner.timeline import Timeline

Floats = NDArray[np.float64]

SYNC, MEMORY, LIMIT = GREEN, "#8a97ab", RED

MAX_SHAPES = 5_000
"""Largest number of operations that are drawn one by one; a larger timeline is drawn as an image of mixed
colours.
"""
MAX_OPERATIONS = 4_000_000
"""Largest number of operations in a timeline, which takes some seconds to draw."""
_IMAGE_COLUMNS, _AVERAGED = 2_400, 4
"""Width of an image of mixed colours, and the number of microbatches over which each column is averaged."""
_WIDTH_IN, _TIMELINE_IN = 13.0, 8.6
_STAGE_IN, _LEAST_IN, _MAX_IN = 0.30, 0.62, 5.0
_LABELLED_STAGES = 20
_GAPPED_STAGES, _GAP_ROWS = 64, 12
"""Up to this number of stages have gaps between them in an image; a stage then has ``_GAP_ROWS`` rows of
pixels, two of which are the gap.
"""
_UNITS = ((1e3, "s"), (1.0, "ms"), (1e-3, "µs"))


def draw_plan(description: Description, *, name: str, other: Description | None = None) -> Figure:
    """Return the figure of the chosen pipelines.

    :param other: the plan under the other objective, for a sentence of comparison.
    :raises ConfigurationError: the timelines have too many operations to draw.
    """
    kinds = named_templates(description)[:MAX_DRAWN]
    for _, row in kinds:
        _check_size(description.template(row.nodes), row)
    heights = [_height_in(description.template(row.nodes)) for _, row in kinds]
    with_memory = any(row.memory_bytes for _, row in kinds)
    top_in, gap_in, bottom_in = 1.05, 0.75, 0.62
    height_in = top_in + sum(heights) + gap_in * (len(kinds) - 1) + bottom_in
    figure = Figure(figsize=(_WIDTH_IN, height_in), facecolor=PAPER)
    unit_ms, unit = _unit(max(row.step_ms for _, row in kinds))
    longest = max(row.step_ms for _, row in kinds) / unit_ms or 1.0
    timeline_in = _TIMELINE_IN if with_memory else _WIDTH_IN - 2.0
    left_in, below_in = 1.6, height_in - top_in
    for index, ((letter, row), tall_in) in enumerate(zip(kinds, heights, strict=True)):
        below_in -= tall_in
        template = description.template(row.nodes)
        position = (left_in / _WIDTH_IN, below_in / height_in, timeline_in / _WIDTH_IN, tall_in / height_in)
        axes = figure.add_axes(position)
        axes.set_xlim(0, longest)
        _draw_timeline(axes, timeline_of(template, row.microbatches), row, unit_ms)
        _stage_labels(axes, template)
        axes.set_title(_title(description, letter, row), loc="left", fontsize=10, color=INK, pad=7)
        last = index == len(kinds) - 1
        axes.set_xlabel(f"time within a step [{unit}]" if last else "", color=FAINT, fontsize=9)
        if with_memory:
            left = (left_in + timeline_in + 0.35) / _WIDTH_IN
            memory_axes = figure.add_axes((left, position[1], 1 - left - 0.35 / _WIDTH_IN, position[3]))
            _draw_memory(memory_axes, template, description, last=last)
        below_in -= gap_in
    _header(figure, description, name, other, with_memory)
    return figure


def plot_plan(description: Description, path: Path, *, name: str, other: Description | None = None) -> None:
    """Write the image to ``path``. The suffix names the format; ``.html`` writes a whole page.

    :raises ConfigurationError: there is too much to draw, or the file cannot be written.
    """
    kind = path.suffix.lower()
    if kind == ".html":
        from ftd.observe.view.pages.plan_page import render_plan_page

        svg = render_image(lambda: draw_plan(description, name=name), ".svg").decode()
        data = render_plan_page(description, svg, name=name, other=other).encode()
    else:
        data = render_image(lambda: draw_plan(description, name=name, other=other), kind)
    write_file(path, data, "--plot")


def _check_size(template: TemplateRow, row: PipelineRow) -> None:
    operations = 2 * len(template.stages) * row.microbatches
    if operations > MAX_OPERATIONS:
        most = MAX_OPERATIONS // (2 * len(template.stages))
        raise ConfigurationError(
            f"{row.microbatches} microbatches in {len(template.stages)} stages are too many to draw",
            field="--plot",
            remedy=f"plan with fewer --microbatches: at most {most} a pipeline",
        )


def _too_thin(stages: int, microbatches: int) -> bool:
    """Return whether there are too many operations to draw them one by one."""
    return 2 * stages * microbatches > MAX_SHAPES


def _height_in(template: TemplateRow) -> float:
    return min(max(_STAGE_IN * len(template.stages), _LEAST_IN), _MAX_IN)


def _unit(longest_ms: float) -> tuple[float, str]:
    return next(((ms, unit) for ms, unit in _UNITS if longest_ms >= 10 * ms), _UNITS[-1])


def _title(description: Description, letter: str, row: PipelineRow) -> str:
    equal = [one for one in description.pipelines if one.nodes == row.nodes]
    count = sum(one.count for one in equal)
    least, most = min(one.microbatches for one in equal), row.microbatches
    share = f"{least} or {most}" if least < most else str(most)
    times = f" × {count}" if count > 1 else ""
    return (
        f"{letter}{times}   {plural(row.nodes, 'node')}, "
        f"{plural(len(description.template(row.nodes).stages), 'stage')}, "
        f"{share} {'microbatch' if most == 1 else 'microbatches'}, {format_elapsed(row.step_ms)}, "
        f"{row.bubble_ratio:.1%} bubbles"
    )


def _header(
    figure: Figure, description: Description, name: str, other: Description | None, with_memory: bool
) -> None:
    height_in = float(figure.get_figheight())
    left = 0.25 / _WIDTH_IN
    figure.text(left, 1 - 0.34 / height_in, name, fontsize=14, color=INK, weight="bold", va="center")
    step = f"a step takes {format_elapsed(description.iteration_ms)}, {description.bubble_ratio:.1%} bubbles"
    subtitle = f"{chosen_line(description)}; {step}"
    if other is not None:
        subtitle += f"; {comparison_line(description, other)}"
    figure.text(left, 1 - 0.62 / height_in, subtitle, fontsize=9.5, color=FAINT, va="center")
    hidden = len(named_templates(description)) - MAX_DRAWN
    if hidden > 0:
        figure.text(left, 0.16 / height_in, f"and {plural(hidden, 'more kind')} of pipelines", color=FAINT)
    shown = [
        Patch(color=FORWARD[0], label="forward"),
        Patch(color=BACKWARD[0], label="backward"),
        Patch(color=WAITING, label="waiting"),
    ]
    if any(
        _too_thin(len(description.template(row.nodes).stages), row.microbatches)
        for row in description.pipelines
    ):
        third = _mixed(np.array([1 / 3]))[0]
        shown.insert(2, Patch(color=tuple(third.tolist()), label="both, too many to separate"))
    if any(row.sync_ms for row in description.pipelines):
        shown.append(Patch(color=SYNC, label="all-reduce"))
    if with_memory:
        shown.append(Patch(color=MEMORY, label="memory"))
    figure.legend(
        handles=shown,
        loc="upper right",
        bbox_to_anchor=(1 - 0.3 / _WIDTH_IN, 1 - 0.16 / height_in),
        ncols=len(shown),
        frameon=False,
        fontsize=9,
        labelcolor=INK,
        handlelength=1.1,
        handleheight=0.9,
        columnspacing=1.4,
    )


# --- the timeline ------------------------------------------------------------------------------


def _draw_timeline(axes: Axes, schedule: Timeline, row: PipelineRow, unit_ms: float) -> None:
    stages = schedule.stages
    end, step = row.makespan_ms / unit_ms, row.step_ms / unit_ms
    axes.autoscale(enable=False)
    axes.set_ylim(stages - 0.5, -0.5)
    _style(axes)
    axes.barh(range(stages), end, height=0.84, color=WAITING, linewidth=0)
    if row.sync_ms:
        axes.barh(range(stages), step - end, left=end, height=0.84, color=SYNC, linewidth=0)
    if _too_thin(stages, schedule.microbatches):
        _draw_mixture(axes, schedule, end)
        return
    shapes = (
        (schedule.forward_start_ms, schedule.forward_end_ms, FORWARD, ("#ffffff", "#04263c")),
        (schedule.backward_start_ms, schedule.backward_end_ms, BACKWARD, ("#3a2a00", "#3a2a00")),
    )
    for start, stop, colours, inks in shapes:
        for parity, colour in enumerate(colours):
            boxes = _boxes(start[:, parity::2] / unit_ms, stop[:, parity::2] / unit_ms)
            axes.add_collection(PolyCollection(list(boxes), facecolors=colour, linewidths=0), autolim=False)
        _number(axes, start / unit_ms, stop / unit_ms, inks)


def _boxes(start: Floats, stop: Floats) -> Floats:
    """Return the corners of each operation; shape (operations, 4, 2)."""
    stage = np.broadcast_to(np.arange(start.shape[0], dtype=np.float64)[:, None], start.shape)
    top, bottom = stage - 0.42, stage + 0.42
    corners = ((start, top), (stop, top), (stop, bottom), (start, bottom))
    boxes: Floats = np.stack([np.stack(corner, axis=-1) for corner in corners], axis=-2)
    return boxes.reshape(-1, 4, 2)


def _number(axes: Axes, start: Floats, stop: Floats, inks: tuple[str, str]) -> None:
    """Write the number of each microbatch, counted from 1, into its box if there is room."""
    stages, microbatches = start.shape
    box, (_, longest) = axes.get_position(), axes.get_xlim()
    wide_in = box.width * _WIDTH_IN * (stop - start) / longest
    tall_in = box.height * float(axes.figure.get_window_extent().height) / axes.figure.dpi / stages
    if tall_in < 0.17:
        return
    for microbatch in range(microbatches):
        text = str(microbatch + 1)
        for stage in np.flatnonzero(wide_in[:, microbatch] >= 0.055 * len(text) + 0.02).tolist():
            middle = (start[stage, microbatch] + stop[stage, microbatch]) / 2
            ink = inks[microbatch % 2]
            axes.text(middle, stage, text, ha="center", va="center_baseline", fontsize=6.5, color=ink)


def _draw_mixture(axes: Axes, schedule: Timeline, end: float) -> None:
    """Draw an image in which each column has the mixed colour of its operations; waiting is transparent.

    A column averages over several microbatches; with fewer, the alternation of passes would cause moiré
    patterns.
    """
    stages = schedule.stages
    span_ms = schedule.makespan_ms or 1.0
    columns_ms = (np.arange(_IMAGE_COLUMNS) + 0.5) / _IMAGE_COLUMNS * span_ms
    around_ms = span_ms * max(1 / _IMAGE_COLUMNS, _AVERAGED / (schedule.microbatches + stages)) / 2
    low_ms, high_ms = np.maximum(columns_ms - around_ms, 0), np.minimum(columns_ms + around_ms, span_ms)
    image = np.zeros((stages, _IMAGE_COLUMNS, 4), dtype=np.uint8)
    for stage in range(stages):
        forward = schedule.forward_start_ms[stage], schedule.forward_end_ms[stage]
        backward = schedule.backward_start_ms[stage], schedule.backward_end_ms[stage]
        forward_ms = _busy(*forward, high_ms) - _busy(*forward, low_ms)
        both = forward_ms + _busy(*backward, high_ms) - _busy(*backward, low_ms)
        part = np.divide(forward_ms, both, out=np.zeros_like(both), where=both > 0)
        image[stage, :, :3] = np.round(255 * _mixed(np.clip(part, 0.0, 1.0)))
        image[stage, :, 3] = np.round(255 * np.clip(both / (high_ms - low_ms), 0.0, 1.0))
    if stages <= _GAPPED_STAGES:
        image = np.repeat(image, _GAP_ROWS, axis=0)
        image[::_GAP_ROWS, :, 3] = image[_GAP_ROWS - 1 :: _GAP_ROWS, :, 3] = 0
    extent = (0.0, end, stages - 0.5, -0.5)
    axes.imshow(image, extent=extent, aspect="auto", interpolation="nearest", zorder=2)


def _mixed(part: Floats) -> Floats:
    """Return colours between backward (0) and forward (1); shape (…, 3)."""
    mixed: Floats = part[..., None] * to_rgb(FORWARD[0]) + (1 - part[..., None]) * to_rgb(BACKWARD[0])
    return mixed


def _busy(start_ms: Floats, stop_ms: Floats, until_ms: Floats) -> Floats:
    """Return how long a sequence of operations had been busy at each time of ``until_ms``."""
    done = np.concatenate(([0.0], np.cumsum(stop_ms - start_ms)))
    begun = np.searchsorted(start_ms, until_ms, side="right")
    left = np.maximum(stop_ms[np.maximum(begun - 1, 0)] - until_ms, 0.0)
    busy: Floats = done[begun] - np.where(begun > 0, left, 0.0)
    return busy


# --- labels and memory -------------------------------------------------------------------------


def _style(axes: Axes) -> None:
    axes.set_facecolor("none")
    axes.spines[:].set_visible(False)
    axes.tick_params(colors=FAINT, labelsize=8.5, length=0)
    axes.tick_params(axis="x", length=3, color=FAINT)


def _stage_labels(axes: Axes, template: TemplateRow) -> None:
    """Label the stages; if there are many, label the first stage of some nodes."""
    stages = template.stages
    if len(stages) <= _LABELLED_STAGES and _height_in(template) / len(stages) > 0.18:
        several = any(stage.devices > 1 for stage in stages)
        axes.set_yticks(range(len(stages)), [_stage_label(stage, with_devices=several) for stage in stages])
        return
    firsts = {stage.node_offset: index for index, stage in reversed(list(enumerate(stages)))}
    every = -(-len(firsts) // 12)
    shown = sorted(firsts)[::every]
    labels = [f"node {node + 1} · layer {stages[firsts[node]].first_layer}" for node in shown]
    axes.set_yticks([firsts[node] for node in shown], labels)


def _stage_label(stage: StageRow, *, with_devices: bool) -> str:
    layers = "layer" if stage.end_layer - stage.first_layer == 1 else "layers"
    parts = [f"{layers} {layer_range(stage.first_layer, stage.end_layer)}"]
    if with_devices:
        divided = describe_within(stage.within, stage.replicas) if stage.within != "replicate" else ""
        parts.append(", ".join(filter(None, [plural(stage.devices, "GPU"), divided])))
    if stage.recompute != "none":
        parts.append(f"recompute {stage.recompute}")
    return " · ".join(parts)


def _draw_memory(axes: Axes, template: TemplateRow, description: Description, *, last: bool) -> None:
    """Draw a bar for the memory of each stage, relative to a device's memory."""
    limit = description.memory_limit_bytes
    chosen = {row.nodes for row in description.pipelines}
    fullest = max(row.memory_bytes for row in description.templates if row.nodes in chosen)
    most = max(fullest, limit or 0)
    factor, unit = next((f, u) for f, u in _SIZES if most >= f or f == 1)
    count = len(template.stages)
    _style(axes)
    axes.set_ylim(count - 0.5, -0.5)
    axes.set_xlim(0, most / factor * (1.06 if limit else 1.02))
    axes.set_yticks([])
    height = 0.84 if count <= _LABELLED_STAGES else 1.0
    if limit is not None:
        axes.barh(range(count), limit / factor, height=height, color=WAITING, linewidth=0)
    sizes = [stage.memory_bytes / factor for stage in template.stages]
    axes.barh(range(count), sizes, height=height, color=MEMORY, linewidth=0)
    if limit is not None:
        axes.axvline(limit / factor, color=LIMIT, linewidth=1.4)
        axes.set_title("limit", loc="right", fontsize=8.5, color=LIMIT, pad=4)
    axes.set_xlabel(f"memory of a device [{unit}]" if last else "", color=FAINT, fontsize=9)


_SIZES = ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"), (1, "B"))
