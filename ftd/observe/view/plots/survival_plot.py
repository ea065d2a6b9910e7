"""Draws the survival curves of ``ftd reliability`` as in Figure 8 of REFT."""

from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from ftd.config.reliability_file import ReliabilityInput
from ftd.observe.view.files import require_format, write_file
from ftd.observe.view.plots.image import render_image
from ftd.observe.view.plots.palette import BLUE, RED
from ftd.observe.view.reliability import days
from planner.reliability import safe_days


def plot_survival(question: ReliabilityInput, path: Path) -> None:
    """Write the image.

    :raises ConfigurationError: the format is not offered, or the file cannot be written.
    """
    require_format(path, (".svg", ".png"), "--plot")
    write_file(path, render_image(lambda: _draw(question), path.suffix), "--plot")


def _draw(question: ReliabilityInput) -> Figure:
    protection, threshold = question.protection, question.threshold
    safe = safe_days(protection.protected, threshold)
    longest = 4 * safe if np.isfinite(safe) else 365.0
    shown = np.linspace(0.0, longest, 400)
    figure = Figure(figsize=(8, 4.2), layout="constrained")
    axes = figure.add_subplot()
    curves = ((protection.protected, BLUE, "protected"), (protection.unprotected, RED, "not protected"))
    for survival, colour, name in curves:
        until = safe_days(survival, threshold)
        label = f"{name}: {threshold} " + (f"until {days(until)}" if np.isfinite(until) else days(None))
        axes.plot(shown, [survival(day) for day in shown.tolist()], color=colour, linewidth=2, label=label)
        if until <= longest:
            axes.plot([until], [threshold], "o", color=colour)
    axes.axhline(threshold, color="#888888", linewidth=0.8, linestyle="--")
    axes.set(xlabel="days without a persistent checkpoint", ylabel="probability that the state survives")
    axes.set(xlim=(0, longest), ylim=(0, 1.02))
    axes.set_title(f"{protection.nodes} nodes in groups of {protection.group}", loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    return figure
