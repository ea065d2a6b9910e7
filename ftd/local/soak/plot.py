"""The plot of a soak: goodput over time, with the injected faults and the recoveries."""

import math
from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ftd.local.soak.report import FaultRecord, SoakReport
from ftd.observe.view.files import write_file
from ftd.observe.view.plots.image import render_image
from ftd.observe.view.plots.palette import BLUE, FAINT, GREEN, INK, ORANGE, PAPER, RED

FORMATS = (".svg", ".png")
_ROWS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("node killed or left", RED, ("kill", "term")),
    ("trainer killed, raises", ORANGE, ("kill_trainer", "raise")),
    ("stopped, hung, slow", BLUE, ("stop", "stop_trainer", "hang", "slow")),
    ("cut off, messages lost", GREEN, ("disconnect", "lossy")),
    ("bit flipped, memory full", FAINT, ("flip", "fill_memory")),
    ("coordinator, broker", INK, ("kill_coordinator", "stop_coordinator", "kill_broker")),
)
"""Label, colour and faults of each row."""
_TOP = 130.0
"""The top of the axis in percent. Steps that are published together after an outage would reach far above it."""


def plot_soak(report: SoakReport, path: Path) -> None:
    """Plot a soak to a file.

    :raises ConfigurationError: the file cannot be written.
    """
    write_file(path, render_image(lambda: _draw(report), path.suffix), "--plot")


def _draw(report: SoakReport) -> Figure:
    figure = Figure(figsize=(11, 5.4), layout="constrained", facecolor=PAPER)
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1.6))
    _goodput(above, report)
    _faults(below, report.faults)
    below.set_xlim(0, max(report.duration_s, 1.0))
    below.set_xlabel("seconds since the faults began", color=FAINT)
    for axes in (above, below):
        axes.set_facecolor(PAPER)
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(colors=FAINT, labelsize=9)
        for fault in report.faults:
            if not fault.problem:
                axes.axvline(fault.at_s, color=_colour(fault.fault), linewidth=0.7, alpha=0.45, zorder=0.5)
        for violation in report.violations:
            axes.axvline(violation.at_s, color=RED, linewidth=2.0)
    return figure


def _goodput(axes: Axes, report: SoakReport) -> None:
    times = [0.0, *(at_s for at_s, _ in report.goodput.series)]
    values = [math.nan if ratio is None else 100 * ratio for _, ratio in report.goodput.series]
    axes.stairs(values, times, fill=True, color=BLUE, alpha=0.25)
    axes.stairs(values, times, color=BLUE, linewidth=1.4)
    axes.axhline(100, color=FAINT, linewidth=0.8, linestyle="--")
    if report.goodput.ratio is not None:
        whole = 100 * report.goodput.ratio
        level = min(whole, _TOP)  # A label far outside the axes cannot be drawn.
        axes.axhline(level, color=BLUE, linewidth=1.0, linestyle=":")
        axes.annotate(
            f"{whole:.0f} %", (1.0, level), xycoords=("axes fraction", "data"), color=BLUE, fontsize=9
        )
    for recovery in report.recoveries:
        axes.axvspan(recovery.at_s - recovery.total_ms / 1000, recovery.at_s, color=ORANGE, alpha=0.25, lw=0)
    axes.set_ylim(0, _TOP)
    axes.set_ylabel("goodput, % of undisturbed", color=FAINT)
    axes.annotate(
        "shaded: recoveries", (1.0, 1.02), xycoords="axes fraction", ha="right", color=FAINT, fontsize=9
    )
    injected = sum(report.by_kind.values())
    verdict = "every rule held" if report.passed else f"{len(report.violations)} violations"
    axes.set_title(
        f"{report.job} on {report.nodes} nodes, seed {report.seed}: {injected} faults, {verdict}",
        loc="left",
        color=INK,
    )


def _faults(axes: Axes, faults: Sequence[FaultRecord]) -> None:
    """Draw one row for each family of faults, and a line for as long as each fault lasted."""
    for row, (_, colour, kinds) in enumerate(_ROWS):
        shown = [fault for fault in faults if fault.fault in kinds and not fault.problem]
        level = len(_ROWS) - 1 - row
        axes.scatter([f.at_s for f in shown], [level] * len(shown), color=colour, s=26, zorder=3)
        axes.hlines(
            [level] * len(shown),
            [f.at_s for f in shown],
            [f.at_s + f.for_s for f in shown],
            color=colour,
            lw=3,
        )
    axes.set_yticks(range(len(_ROWS)), [name for name, _, _ in reversed(_ROWS)])
    axes.set_ylim(-0.6, len(_ROWS) - 0.4)


def _colour(fault: str) -> str:
    return next(colour for _, colour, kinds in _ROWS if fault in kinds)
