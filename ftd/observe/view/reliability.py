"""Renders the answers of ``ftd reliability``: a table and three sentences."""

from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from ftd.config.reliability_file import ReliabilityInput
from ftd.observe.view.blocks import add_numbers, plain_table
from ftd.observe.view.text import JsonMap, plural

_ROWS = (
    ("without_protection", "without protection (Eq. 6)"),
    ("with_protection", "protected (Eq. 5 as Figure 8 has it)"),
    ("with_protection_as_printed", "protected (Eq. 5 as printed)"),
)


def render_reliability(question: ReliabilityInput, answers: JsonMap) -> RenderableType:
    """Return the table and the sentences.
    :param answers: what ``ftd reliability --json`` prints.
    """
    protection = question.protection
    table = plain_table()
    table.add_column("state in host memory")
    safe_for = f"safe for ({question.threshold})"
    add_numbers(table, "after a day", safe_for, "mean to loss", "persist every (Daly)")
    for key, title in _ROWS:
        curve = answers[key]
        table.add_row(
            title,
            _probability(curve["survival_1_day"], certain=curve["mean_days_to_loss"] is None),
            days(curve["safe_days"]),
            days(curve["mean_days_to_loss"]),
            days(curve["daly_days"]),
        )
    shape = (
        f"{plural(protection.nodes, 'node')} in groups of {protection.group}, each of which can lose "
        f"{protection.losses}"
    )
    return Group(
        Text.assemble(("Reliability", "bold"), (f"  {shape}", "dim")),
        table,
        "",
        *_sentences(question, answers),
    )


def _sentences(question: ReliabilityInput, answers: JsonMap) -> list[Text]:
    repaired = answers["with_repair"]
    horizon = f"{question.horizon_days:g} days"
    rate = repaired["losses_per_day"]
    lost = f"once in {days(1 / rate)}" if rate else "never"
    safe_days = answers["with_protection"]["safe_days"]
    kept = _probability(repaired["horizon_survival"], certain=not rate)
    survival = f"with probability {question.threshold} even if no lost node is replaced."
    lines = [
        f"Snapshots in memory survive without end {survival}"
        if safe_days is None
        else f"Persist snapshots from memory at least every {days(safe_days)}: until then they survive {survival}",
        f"If a lost node is replaced within {question.repair_days * 24:g} h: with "
        f"{repaired['node_failures_per_day']:.3g} node failures a day, a group loses more than it can decode "
        f"{lost}; the probability that this does not happen in {horizon} is {kept}.",
    ]
    found: Any = answers["smallest_f"]
    if found is None:
        lines.append(
            f"No reasonable tolerance.failures lets a job survive {horizon}: replace lost nodes sooner."
        )
    else:
        lines.append(
            f"tolerance.failures = {found} is the smallest f for which, with probability {question.threshold}, "
            f"at most f nodes are missing at any time in {horizon}."
        )
    return [Text(line) for line in lines]


def _probability(value: float, *, certain: bool) -> str:
    """Return a probability with four digits; one that is rounded to 1 is not certain unless ``certain`` says so."""
    text = f"{value:.4g}"
    return text if certain or text != "1" else ">0.9999"


def days(value: float | None) -> str:
    """Return a number of days in years, days, hours, minutes or seconds, whichever reads best."""
    if value is None:
        return "without end"
    if value >= 1000:
        years = value / 365.25
        return f"{years:,.0f} years" if 1000 <= years < 1e9 else f"{years:.3g} years"
    if value >= 1:
        return f"{value:.2f} days"
    if value * 24 >= 1:
        return f"{value * 24:.2f} h"
    if value * 24 * 60 >= 1:
        return f"{value * 24 * 60:.1f} min"
    return f"{value * 24 * 3600:.3g} s"
