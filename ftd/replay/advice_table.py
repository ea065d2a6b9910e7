"""Renders advice for the terminal."""

from rich.console import Group, RenderableType
from rich.text import Text

from ftd.observe.view.blocks import plain_table
from ftd.observe.view.reliability import days
from ftd.observe.view.text import plural
from ftd.replay.advice import Advice, Question
from planner.state_loss import PRIOR_SHARE


def render_advice(advice: Advice) -> RenderableType:
    """Return a table for each question, the tables of a job file, and what the numbers are worth."""
    parts: list[RenderableType] = [
        Text.assemble(
            (advice.job, "bold"),
            (
                f"  on {plural(advice.nodes, 'node')}, {advice.failures_per_day:.3g} failures a day; with this advice "
                f"memory is expected to lose the state every {days(advice.loss_days)}",
                "dim",
            ),
        )
    ]
    for question in advice.questions:
        parts += [
            "",
            Text(question.question, style="bold"),
            _choices(question),
            Text(question.reason, style="dim"),
        ]
    parts += ["", Text("in the job file", style="bold"), Text(advice.job_file.rstrip()), ""]
    parts += [Text(line, style="dim") for line in _remarks(advice)]
    return Group(*parts)


def _choices(question: Question) -> RenderableType:
    table = plain_table()
    for name in ("", "choice", "goodput", "samples/s", ""):
        table.add_column(name, justify="right" if name in ("goodput", "samples/s") else "left")
    for choice in question.choices:
        mark = "best" if choice is question.chosen else "next" if choice is question.runner_up else ""
        goodput = "–" if choice.goodput is None else f"{choice.goodput:.2%}"
        rate = "–" if choice.samples_per_s is None else f"{choice.samples_per_s:,.2f}"
        table.add_row(mark, choice.value, goodput, rate, choice.remark)
    return table


def _remarks(advice: Advice) -> list[str]:
    count = "" if advice.traces == 1 else f", and {advice.traces - 1} more of this model"
    return [
        "Simulated: replays of the policy ftd in virtual time, and models of rare losses. Goodput is relative to a "
        "system that recovers at no cost.",
        f"Job: {advice.job_source}.",
        f"Trace: {advice.trace}{count}.",
        *advice.notes,
        f"Losses of the state: {advice.common_cause_share:.1%} of the failures are taken to have a cause that strikes "
        f"all copies at once, such as power: {PRIOR_SHARE:.0%} before any failure is known, and less the more failures "
        "of the replay leave a copy.",
    ]
