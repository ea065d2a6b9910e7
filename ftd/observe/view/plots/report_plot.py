"""Draws a run: loss, throughput, goodput and learning rate over time, with failures and other changes marked."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ftd.errors import ConfigurationError
from ftd.observe.view.document import Report
from ftd.observe.view.files import require_format, write_file
from ftd.observe.view.plots.palette import BLUE, FAINT, GREEN, INK, ORANGE, PAPER, RED, WAITING
from ftd.observe.view.rates import (
    committed_at_s,
    counts_tokens,
    evaluation_losses,
    goodput_series,
    learning_rates,
    throughput_series,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FORMATS = (".png", ".svg")
MAX_POINTS = 2_000
"""Largest number of points of a curve; more could not be told apart."""
MAX_MARKS = 100
"""Largest number of evaluation marks."""
_SPEEDS = ("samples/s", "tokens/s")
_HELD_OUT: Any = {"color": INK, "linewidth": 0.8, "marker": "D", "markersize": 3.5}
_STYLE: Any = {
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": FAINT,
    "xtick.color": FAINT,
    "ytick.color": FAINT,
    "figure.facecolor": PAPER,
    "axes.facecolor": PAPER,
    "savefig.facecolor": PAPER,
    "font.size": 9,
}


def plot_report(report: Report, path: Path) -> None:
    """Write the image.

    :raises ConfigurationError: no step was committed, the format is not offered, or the file cannot be
        written.
    """
    require_format(path, FORMATS, "--plot")
    if not report.steps:
        raise ConfigurationError("no step was committed: there is nothing to draw", field="--plot")
    write_file(path, render_plot(report, path.suffix), "--plot")


def render_plot(report: Report, kind: str) -> bytes:
    """Return the image of a report with steps.

    :param kind: ``.svg`` or ``.png``.
    """
    from ftd.observe.view.plots.image import render_image

    return render_image(lambda: _draw(report), kind, _STYLE)


def _draw(report: Report) -> "Figure":
    from matplotlib.figure import Figure

    steps = zip(report.steps, committed_at_s(report.steps), strict=True)
    losses = [(at_s, step.loss) for step, at_s in steps if step.loss is not None]
    panels: list[tuple[str, Sequence[tuple[float, float]], str]] = [
        ("loss", losses, BLUE),
        ("tokens/s" if counts_tokens(report) else "samples/s", throughput_series(report), GREEN),
        ("goodput", goodput_series(report), ORANGE),
        ("learning rate", learning_rates(report), BLUE),
    ]
    panels = [panel for panel in panels if panel[1]]
    figure = Figure(figsize=(11, 0.6 + 1.7 * len(panels)), layout="constrained")
    axes = figure.subplots(len(panels), sharex=True, squeeze=False)[:, 0]
    for one, (name, series, colour) in zip(axes, panels, strict=True):
        _panel(one, name, series, colour)
        if name == "loss":
            _evaluations(one, evaluation_losses(report))
        _mark(one, report)
    axes[-1].set_xlabel("seconds since the first event")
    _legend(axes[0], report)
    return figure


def _panel(axes: Any, name: str, series: Sequence[tuple[float, float]], colour: str) -> None:
    every = max(1, len(series) // MAX_POINTS)
    shown = [*series[::every], series[-1]]
    steps = {"drawstyle": "steps-mid"} if name in _SPEEDS else {}
    axes.plot([at for at, _ in shown], [value for _, value in shown], color=colour, linewidth=1.3, **steps)
    axes.set_ylabel(name)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color=WAITING, linewidth=0.8)
    axes.margins(x=0.01)
    if name == "goodput":
        axes.set_ylim(0, 1.05)
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    elif name in _SPEEDS:
        axes.set_ylim(bottom=0)
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.6g}")
    elif name == "learning rate":
        axes.ticklabel_format(axis="y", style="sci", scilimits=(-2, 3), useMathText=True)


def _evaluations(axes: Any, series: Sequence[tuple[float, float]]) -> None:
    if series:
        every = max(1, len(series) // MAX_MARKS)
        shown = [*series[:-1:every], series[-1]]
        axes.plot([at for at, _ in shown], [value for _, value in shown], **_HELD_OUT)


def _mark(axes: Any, report: Report) -> None:
    for change in report.recoveries:
        colour, line = (RED, "-") if change.failure else (FAINT, "--")
        axes.axvline(change.at_s, color=colour, linewidth=0.9, linestyle=line)
        axes.axvspan(change.at_s, change.at_s + change.total_ms / 1000, color=colour, alpha=0.12, linewidth=0)


def _legend(axes: Any, report: Report) -> None:
    """Explain the lines that the image contains."""
    from matplotlib.lines import Line2D

    kinds = {change.failure for change in report.recoveries}
    shown = [
        Line2D([], [], color=RED if kind else FAINT, linestyle="-" if kind else "--", label=label)
        for kind, label in ((True, "failure"), (False, "other change"))
        if kind in kinds
    ]
    if evaluation_losses(report):
        shown.insert(0, Line2D([], [], label="on held-out data", **_HELD_OUT))
    if shown:
        axes.legend(handles=shown, frameon=False, loc="lower right", bbox_to_anchor=(1, 1), ncols=len(shown))
