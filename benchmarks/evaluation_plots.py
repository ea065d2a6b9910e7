"""Draws the figures of ``benchmarks.evaluation``. All of them show simulated results."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.evaluation_runs import MODELS, RATES, SPOT, SYSTEMS, job_of, run, shared_traces, trace_of
from ftd.observe.view.plots.palette import BLUE, FAINT, GREEN, INK, ORANGE, RED
from ftd.replay.outcome import Outcome
from ftd.replay.policies.registry import POLICIES, ThroughputSource
from ftd.replay.policy import CATEGORIES

COLOURS = {"ftd": BLUE, "oobleck": ORANGE, "varuna": INK, "bamboo": GREEN}
CATEGORY_COLOURS = dict(
    zip(
        CATEGORIES,
        (BLUE, RED, ORANGE, "#f0e442", "#cc79a7", GREEN, "#56b4e9", INK, "#c8ccd2"),
        strict=True,
    )
)
WINDOW_S = 600.0
"""Width of the windows over which throughput is averaged, as the paper averages it for visibility."""


def draw(directory: Path) -> None:
    """Write ``evaluation-spot.svg``, ``evaluation-breakdown.svg`` and ``evaluation-goodput.svg``."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, figure in (("spot", _spot()), ("breakdown", _breakdown()), ("goodput", _goodput())):
        figure.savefig(
            directory / f"evaluation-{name}.svg", metadata={"Date": None, "Creator": "benchmarks.evaluation"}
        )


def _outcome(policy: str, model: str, trace: str) -> Outcome | None:
    """Return what a system does at its own throughput; ``None``: it does not run the model."""
    if policy not in POLICIES or (policy in SYSTEMS and policy not in job_of(model).published):
        return None
    source: ThroughputSource = "published" if policy in SYSTEMS else "common"
    outcome = run(policy, model, trace, source)
    return outcome if isinstance(outcome, Outcome) else None


def _spot() -> Figure:
    """Return Figures 10 and 12: throughput over time, with the number of nodes beneath."""
    figure = Figure(figsize=(15, 8), layout="constrained")
    axes = figure.subplots(4, len(MODELS), sharex=True, height_ratios=(3, 1, 3, 1))
    for row, name in enumerate(SPOT):
        trace = trace_of(name)
        edges = np.arange(0.0, trace.end_s + 1, WINDOW_S).tolist()
        hours = [edge / 3600 for edge in edges]
        for column, model in enumerate(MODELS):
            above, beneath = axes[2 * row, column], axes[2 * row + 1, column]
            for policy, colour in COLOURS.items():
                outcome = _outcome(policy, model, name)
                if outcome is not None:
                    rates = outcome.throughput(edges)
                    above.stairs(rates, hours, color=colour, label=policy, linewidth=1.2)
                    above.axhline(outcome.samples_per_s, color=colour, linewidth=0.8, linestyle=":")
            counts = trace.node_counts()
            beneath.step(
                [at_s / 3600 for at_s, _ in counts], [n for _, n in counts], where="post", color=FAINT
            )
            above.set_ylim(bottom=0)
            beneath.set_ylim(0, 32)
            _plain(above, beneath)
            if column == 0:
                above.set_ylabel("samples/s")
                beneath.set_ylabel("nodes")
            above.set_title(f"{model}, {'EC2 P3' if 'ec2' in name else 'GCP'}", loc="left", fontsize=9)
        for last in axes[3]:
            last.set_xlabel("hours")
    axes[0, 0].legend(frameon=False, fontsize=8)
    figure.suptitle("Throughput on spot traces, simulated (dotted: mean)")
    return figure


def _breakdown() -> Figure:
    """Return Figures 1 and 11: shares of the time."""
    models = ("bert-large", "gpt3-6.7b")
    figure = Figure(figsize=(12, 4.5), layout="constrained")
    for axes, model in zip(figure.subplots(1, 2, sharey=True), models, strict=True):
        labels: list[str] = []
        for rate in RATES:
            for policy in (*SYSTEMS, "ftd"):
                outcome = _outcome(policy, model, f"oobleck_fail_{rate}")
                if outcome is not None:
                    _stack(axes, len(labels), outcome)
                    labels.append(f"{policy}\n{rate}")
        axes.set_xticks(range(len(labels)), labels, fontsize=7)
        axes.set_title(model, loc="left")
        _plain(axes)
    handles = [axes.bar([0], [0], color=colour, label=name) for name, colour in CATEGORY_COLOURS.items()]
    figure.legend(handles=handles, loc="outside right center", frameon=False)
    figure.suptitle("Share of the time by use, simulated; below: time between failures")
    return figure


def _stack(axes: Axes, position: int, outcome: Outcome) -> None:
    bottom = 0.0
    for category in CATEGORIES:
        share = outcome.seconds[category] / outcome.wall_s
        axes.bar([position], [share], bottom=bottom, color=CATEGORY_COLOURS[category], width=0.8)
        bottom += share


def _goodput() -> Figure:
    """Return committed samples as a share of ``ideal`` for every policy, trace and model."""
    policies = [policy for policy in POLICIES if policy != "ideal"]
    traces = shared_traces()
    figure = Figure(figsize=(13, 6), layout="constrained")
    for axes, trace in zip(figure.subplots(1, len(traces), sharey=True), traces, strict=True):
        _row_of_shares(axes, trace, policies)
    figure.suptitle(
        "Committed samples as a share of ideal at the same throughput, simulated; a dot for each model"
    )
    return figure


def _row_of_shares(axes: Axes, trace: str, policies: Sequence[str]) -> None:
    for position, policy in enumerate(reversed(policies)):
        shares: list[float] = []
        for model in MODELS:
            outcome, ideal = run(policy, model, trace, "common"), run("ideal", model, trace, "common")
            if isinstance(outcome, Outcome) and isinstance(ideal, Outcome):
                shares.append(outcome.samples / ideal.samples)
        colour = BLUE if policy == "ftd" else FAINT
        axes.plot(shares, [position] * len(shares), "o", color=colour, markersize=4, alpha=0.8)
    axes.set_yticks(range(len(policies)), list(reversed(policies)))
    axes.set_xlim(0, 1.02)
    axes.grid(axis="x", linewidth=0.4)
    axes.set_title(trace.replace("_", " "), loc="left", fontsize=8)
    _plain(axes)


def _plain(*all_axes: Axes) -> None:
    for axes in all_axes:
        axes.spines[["top", "right"]].set_visible(False)
