"""``ftd reliability``: computes how long state in memory is safe, and how often to write checkpoints."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ftd.cli.options import JsonOption, print_json, print_rich

if TYPE_CHECKING:
    from ftd.config.reliability_file import ReliabilityInput
    from planner.reliability import Survival


def reliability(
    cluster: Annotated[
        Path, typer.Argument(help="File that describes the cluster and its failures.", metavar="CLUSTER.toml")
    ],
    plot: Annotated[
        Path | None, typer.Option(help="Draw the survival curves to FILE.svg or FILE.png.", metavar="FILE")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Compute how long snapshots in host memory are safe.

    The command also shows how often to write persistent checkpoints, and the smallest number of failures to
    tolerate.

    It computes survival probabilities after REFT §5, with and without protection, and Young's and Daly's
    intervals. Nothing is measured: the answers are as good as the failure rates in the file.

    Example: ftd reliability examples/reliability.toml
    """
    from ftd.config.reliability_file import load_reliability

    question = load_reliability(cluster)
    if plot is not None:
        from ftd.observe.view.plots.survival_plot import plot_survival

        plot_survival(question, plot)
    result = compute_answers(question)
    if as_json:
        print_json(result)
        return
    from ftd.observe.view.reliability import render_reliability

    print_rich(render_reliability(question, result))


def compute_answers(question: "ReliabilityInput") -> dict[str, Any]:
    """Return the answers as JSON; ``None`` means unlimited, or an f beyond any practical value."""
    import math

    from planner.reliability import loss_rate_per_day, smallest_tolerance

    protection, hardware = question.protection, question.protection.hardware
    groups, rest = divmod(protection.nodes, protection.group)
    lost_per_day = groups * loss_rate_per_day(
        protection.group, protection.losses, hardware, question.repair_days
    )
    if rest:  # As in the curves: the nodes left over are a group, which can lose all but one node at most.
        lost_per_day += loss_rate_per_day(
            rest, min(protection.losses, rest - 1), hardware, question.repair_days
        )
    return {
        "schema": 1,
        "nodes": protection.nodes,
        "threshold": question.threshold,
        "without_protection": _curve(question, protection.unprotected),
        "with_protection": _curve(question, protection.protected),
        "with_protection_as_printed": _curve(question, lambda days: protection.protected(days, "printed")),
        "with_repair": {
            "node_failures_per_day": loss_rate_per_day(protection.nodes, 0, hardware, question.repair_days),
            "losses_per_day": lost_per_day,
            "horizon_survival": math.exp(-lost_per_day * question.horizon_days),
        },
        "smallest_f": smallest_tolerance(
            protection.nodes, hardware, question.repair_days, question.horizon_days, question.threshold
        ),
    }


def _curve(question: "ReliabilityInput", survival: "Survival") -> dict[str, float | None]:
    from planner.reliability import daly_days, mean_days, safe_days, young_days

    mean = mean_days(survival)
    figures = {
        "safe_days": safe_days(survival, question.threshold),
        "mean_days_to_loss": mean,
        "young_days": young_days(question.persist_days, mean),
        "daly_days": daly_days(question.persist_days, mean),
        "survival_1_day": survival(1.0),
    }
    return {name: value if value != float("inf") else None for name, value in figures.items()}
