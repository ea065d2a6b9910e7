"""Draws a replay: throughput over time under each policy with the number of nodes beneath, as Figure 10 of Oobleck,
and where the time went, as its Figure 11.
"""

from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from ftd.observe.view.files import write_file
from ftd.observe.view.plots.image import render_image
from ftd.observe.view.plots.palette import (
    BLUE,
    FAINT,
    GREEN,
    INK,
    ORANGE,
    PAPER,
    PURPLE,
    RED,
    SKY,
    WAITING,
    YELLOW,
)
from ftd.replay.comparison import REFERENCE
from ftd.replay.policy import Category
from ftd.replay.report import ReplayedPolicy, ReplayReport
from ftd.replay.tables import trace_line

FORMATS = (".png", ".svg", ".html")

COLOURS: dict[Category, str] = {
    "computing": GREEN,
    "reduced": "#9ad5c2",
    "redone": RED,
    "stalled": ORANGE,
    "detecting": PURPLE,
    "planning": SKY,
    "moving": BLUE,
    "restarting": YELLOW,
    "waiting": "#9aa3b0",
}
"""Colour of each category, in the order from left to right of the bars."""
_UNITS = ((2 * 86_400.0, 86_400.0, "days"), (7200.0, 3600.0, "hours"), (120.0, 60.0, "minutes"))
"""Least duration, length and name of the units of the time axis."""
_WIDTH_IN, _PANEL_IN, _NODES_IN, _BAR_IN = 11.0, 0.85, 1.0, 0.32


def plot_replay(report: ReplayReport, path: Path) -> None:
    """Write the image to ``path``. The suffix names the format; ``.html`` writes a whole page.

    :raises ConfigurationError: the file cannot be written.
    """
    if path.suffix.lower() == ".html":
        from ftd.replay.page import render_replay_page

        data = render_replay_page(report, render_image(lambda: draw_replay(report), ".svg").decode()).encode()
    else:
        data = render_image(lambda: draw_replay(report), path.suffix)
    write_file(path, data, "--plot")


def draw_replay(report: ReplayReport) -> Figure:
    """Return the figure: a panel for each policy, the number of nodes, and the bars."""
    count = len(report.policies)
    bars_in = 0.9 + _BAR_IN * count
    heights_in = [*[_PANEL_IN] * count, _NODES_IN, bars_in]
    figure = Figure(figsize=(_WIDTH_IN, sum(heights_in) + 1.6), layout="constrained", facecolor=PAPER)
    figure.get_layout_engine().set(h_pad=0.05, hspace=0.0)  # type: ignore[union-attr, call-arg]
    rows = figure.subplots(count + 2, 1, height_ratios=heights_in, squeeze=False)[:, 0]
    for axes in rows:
        axes.set_facecolor(PAPER)
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[["bottom", "left"]].set_color(FAINT)
        axes.tick_params(colors=FAINT, labelsize=8)
    unit_s, unit = _unit(report.trace.duration_s)
    end = report.trace.duration_s / unit_s
    highest = 1.08 * max((max(policy.throughput) for policy in report.policies), default=0.0) or 1.0
    for axes, policy in zip(rows, report.policies, strict=False):
        axes.sharex(rows[0])
        _draw_throughput(axes, report, policy, unit_s)
        axes.set_ylim(0, highest)
        axes.tick_params(axis="x", labelbottom=False)
    nodes, bars = rows[-2], rows[-1]
    nodes.sharex(rows[0])
    _draw_nodes(nodes, report, unit_s)
    rows[0].set_xlim(0, end)
    nodes.set_xlabel(f"{unit} of virtual time", color=FAINT, fontsize=9)
    _draw_bars(bars, report)
    figure.suptitle(
        f"{report.job.name}, simulated: samples/s", x=0.012, ha="left", fontsize=13, color=INK, weight="bold"
    )
    rows[0].set_title(trace_line(report), loc="left", fontsize=9, color=FAINT, pad=14)
    return figure


def _unit(duration_s: float) -> tuple[float, str]:
    return next(((length, name) for least, length, name in _UNITS if duration_s >= least), (1.0, "seconds"))


def _draw_throughput(axes: Axes, report: ReplayReport, policy: ReplayedPolicy, unit_s: float) -> None:
    """Draw the policy's throughput before that of ``ideal``, and its mean as a dotted line."""
    edges = [0.0, *(end_s / unit_s for end_s in report.windows_s)]
    ideal = next((each for each in report.policies if each.policy == REFERENCE), None)
    if ideal is not None:
        axes.stairs(ideal.throughput, edges, fill=True, color=WAITING)
    axes.stairs(policy.throughput, edges, color=BLUE, linewidth=1.3, baseline=None)
    duration_s = report.windows_s[-1]
    mean = policy.committed[-1] / duration_s
    axes.axhline(mean, color=ORANGE, linewidth=1.3, linestyle=":")
    goodput = ""
    if ideal is not None and ideal.committed[-1] > 0:
        goodput = f"\n{policy.committed[-1] / ideal.committed[-1]:.1%} of ideal"
    captions: list[tuple[str, float, Any]] = [
        (policy.policy, 0.72, {"fontsize": 10, "color": INK, "weight": "bold"}),
        (f"{mean:,.4g} samples/s{goodput}", 0.30, {"fontsize": 8.5, "color": FAINT}),
    ]
    for text, height, style in captions:
        axes.annotate(text, (1.01, height), xycoords="axes fraction", va="center", **style)
    axes.yaxis.set_major_locator(MaxNLocator(3))


def _draw_nodes(axes: Axes, report: ReplayReport, unit_s: float) -> None:
    times = [at_s / unit_s for at_s, _ in report.trace.nodes]
    edges = [*times, max(times[-1], report.trace.duration_s / unit_s)]
    axes.stairs([count for _, count in report.trace.nodes], edges, color=INK, linewidth=1.1, baseline=None)
    axes.set_ylim(0, 1.1 * report.trace.most_nodes)
    axes.yaxis.set_major_locator(MaxNLocator(3, integer=True))
    axes.annotate("nodes", (1.01, 0.5), xycoords="axes fraction", fontsize=10, color=INK, va="center")


def _draw_bars(axes: Axes, report: ReplayReport) -> None:
    """Draw one bar of 100% for each policy, in the order of the panels."""
    shown = [category for category in COLOURS if category in report.used_categories]
    names = [policy.policy for policy in report.policies]
    lefts = [0.0] * len(names)
    for category in shown:
        shares = [
            100 * max(0.0, policy.seconds[category]) / report.trace.duration_s for policy in report.policies
        ]
        axes.barh(
            range(len(names)),
            shares,
            left=lefts,
            height=0.72,
            color=COLOURS[category],
            edgecolor=PAPER,
            linewidth=0.4,
        )
        lefts = [left + share for left, share in zip(lefts, shares, strict=True)]
    axes.set_yticks(range(len(names)), names, color=INK, fontsize=9)
    axes.invert_yaxis()
    axes.set_xlim(0, 100)
    axes.spines["left"].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:.0f}%")
    mean = f", mean of {report.traces} traces" if report.traces > 1 else ""
    axes.set_title(f"where the time went{mean}", loc="left", fontsize=10, color=INK, pad=24)
    axes.legend(
        handles=[Patch(facecolor=COLOURS[category], label=category) for category in shown],
        loc="lower left",
        bbox_to_anchor=(-0.005, 0.985),
        ncols=len(shown),
        frameon=False,
        fontsize=8.5,
        labelcolor=INK,
        handlelength=1.1,
        columnspacing=1.3,
    )
