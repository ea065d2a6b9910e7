"""The tables of ``evaluation.md`` and ``rerouting.md`` in ``docs/explanation``, generated from stored results.

    python -m benchmarks.evaluation_page     # as make docs does; replays nothing

The results are in ``benchmarks/results/evaluation``: a file for each part of ``benchmarks.evaluation``, that of
``benchmarks.replay_validation``, and two of ``benchmarks.rerouting``. A test checks that the pages are current.
"""

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.common import EVALUATION
from benchmarks.generated_tables import markdown_table, with_tables

EXPLANATION = Path(__file__).resolve().parents[1] / "docs" / "explanation"
RATES = ("6h", "1h", "10m")
SPOT_NAMES = {"oobleck_ec2_p3_scaled": "EC2 P3", "oobleck_gcp_scaled": "GCP"}
OTHER_TRAINING = "torchft"
"""Policy whose steps have fewer samples after a loss, so that it does not compute the same training."""
HOURLY = "oobleck_fail_1h"
TARGET = 0.97
"""Share of ``ideal`` that ftd should reach with a failure per hour."""
RECOVERIES = {
    "loss": "losses of a node or trainer",
    "boundary": "joins, returns and drains",
    "rollback": "returns to a checkpoint",
}

Row = tuple[str, ...]


@cache
def stored(part: str) -> dict[str, Any]:
    """Return the stored result of a part."""
    document: dict[str, Any] = json.loads((EVALUATION / f"{part}.json").read_text(encoding="utf-8"))
    return document


def cells(part: str) -> Iterator[tuple[list[str], Any]]:
    """Yield the figures of a part with the names to which they belong."""
    for names, figures in stored(part)["data"].items():
        yield names.split(","), figures


def number(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def signed(value: float, form: str) -> str:
    """Return a number with its sign; without one if it is rounded to 0."""
    shown = format(value, f"+{form}")
    return shown if any(digit in shown for digit in "123456789") else shown[1:]


def difference(ours: float | None, published: float | None) -> str:
    return "–" if ours is None or not published else signed(ours / published - 1, ".1%")


def tables_of(page: Path) -> dict[str, str]:
    """Return the tables of a page by the names that it gives them."""
    if page.name == "rerouting.md":
        return {"choice": choice(), "alone": rerouting_alone(), "origin": origin("rerouting")}
    return {
        "origin": origin(""),
        "table2": table2(),
        "table2-ftd": table2_ftd(),
        "table4": table4(),
        "spot": spot(),
        "breakdown": breakdown(),
        "phases": phases(),
        "validation": validation(),
        "bars": bars(),
        "excluded": excluded(),
        "wins": wins(),
        "gap": gap(),
        "closed": closed(),
        "chance": chance(),
        "sensitivity": sensitivity(),
        "reft": reft(),
    }


def origin(prefix: str) -> str:
    """Return when and where the stored results were computed, of parts whose names begin with ``prefix``."""
    places: dict[str, list[str]] = defaultdict(list)
    for path in sorted(EVALUATION.glob(f"{prefix}*.json")):
        if not prefix and path.stem.startswith("rerouting"):
            continue
        where = stored(path.stem)["machine"]
        places[
            f"on {where['at'][:10]} at commit `{where['commit']}`, Python {where['python']}, "
            f"{where['cores']} cores of {where['cpu']}"
        ].append(f"`{path.stem}`")
    return "".join(f"* {', '.join(parts)}: {place}.\n" for place, parts in places.items())


def table2() -> str:
    rows = [
        (
            *names,
            number(found["published"]),
            number(found["rules"]),
            "–" if found["rules"] is None else signed(found["rules_difference"], ".2f"),
            number(found["replay"]),
            difference(found["replay"], found["published"]),
        )
        for names, found in cells("table2")
        if "published" in found
    ]
    head = ("system", "model", "failure every", "published", "simulator's rules", "difference", "replay")
    return markdown_table((*head, "difference"), rows, left=3)


def table2_ftd() -> str:
    rows: dict[str, Row] = {}
    for (_, model, _), found in cells("table2"):
        if "published_oobleck" in found:
            published, ours = found["published_oobleck"], found["replay"]
            shown = (number(published), number(ours), difference(ours, published))
            rows[model] = (*rows.get(model, (model,)), *shown)
    head = [f"{rate} Oobleck" if n == 0 else ("ftd", "difference")[n - 1] for rate in RATES for n in range(3)]
    return markdown_table(("model", *head), list(rows.values()), left=1)


def table4() -> str:
    rows = [
        (
            *names,
            number(found["published"]),
            number(found["replay"]),
            difference(found["replay"], found["published"]),
        )
        for names, found in cells("table4")
    ]
    return markdown_table(("model", "failure every", "published", "replay", "difference"), rows, left=2)


def spot() -> str:
    rows, head = [], list[str]()
    for (trace, model), found in cells("spot"):
        head = list(found)
        ratio = number(found["ftd"] / found["oobleck"] if found["oobleck"] else None)
        rows.append((SPOT_NAMES[trace], model, *map(number, found.values()), ratio))
    return markdown_table(("trace", "model", *head, "ftd / Oobleck"), rows, left=2)


def breakdown() -> str:
    rows, head = [], list[str]()
    for names, shares in cells("breakdown"):
        head = list(shares)
        rows.append((*names, *(f"{share:.1%}" if share else "" for share in shares.values())))
    return markdown_table(("system", "model", "failure every", *head), rows, left=3)


def phases() -> str:
    rows = [
        (
            *names,
            number(found["samples_per_s"]),
            f"{found['of_ideal']:.1%}",
            f"{found['of_ideal_as_here']:.1%}",
            f"{found['phases_s']:.3f}",
            f"{found['transfer_s']:.3f}",
            f"{found['redone_s']:.1f}",
        )
        for names, found in cells("phases")
    ]
    head = ("model", "failure every", "samples/s", "of ideal", "of ideal, transfers as here")
    return markdown_table((*head, "measured phases, s", "transfer, s", "lost work, s"), rows, left=2)


def validation() -> str:
    rows: list[Row] = []
    for (scenario,), found in cells("validation"):
        if scenario == "parameters":
            continue
        steps = found["predicted_steps"], found["real_steps"]
        rows.append((scenario, "committed steps", *map(str, steps), difference(*steps)))
        for kind, words in RECOVERIES.items():
            predicted, real = found["predicted_s"].get(kind, []), found["real_s"].get(kind, [])
            if predicted and real:
                medians = median(predicted), median(real)
                times = (f"{value:.2f} s" for value in medians)
                rows.append((scenario, f"{words} ({len(real)}), median", *times, difference(*medians)))
    head = ("scenario, 185 s", "figure", "predicted (simulated)", "real", "difference")
    return markdown_table(head, rows, left=2)


def shares_of_ideal() -> Iterator[tuple[str, str, dict[str, float]]]:
    """Yield each trace and model with the policies' committed samples as a share of ``ideal``."""
    for names, shares in cells("bars"):
        if len(names) == 2:
            yield names[0], names[1], shares


def best_other(shares: Mapping[str, float], *, without: Sequence[str] = ()) -> str:
    """Return the policy other than ftd that commits most."""
    others = [name for name in shares if name.split("-")[0] != "ftd" and name not in without]
    return max(others, key=lambda name: shares[name])


def bars() -> str:
    policies = stored("bars")["columns"][1:-1]
    rows = []
    for trace, model, shares in shares_of_ideal():
        best = best_other(shares)
        margin = signed(100 * (shares["ftd"] - shares[best]), ".1f")
        shown = (f"{shares[policy]:.1%}" if policy in shares else "–" for policy in policies)
        rows.append((f"`{trace}`", model, *shown, f"{margin} ({best})"))
    head = ("trace", "model", *policies, "ftd less the best other, points")
    return markdown_table(head, rows, left=2)


def excluded() -> str:
    found = stored("bars")["data"]["excluded"]
    return "".join(f"* {names.replace(',', ' on ')}: {why}.\n" for names, why in found.items())


def wins() -> str:
    """Return in how many cases ftd commits most, and its worst with a failure per hour."""
    cases = list(shares_of_ideal())
    won = sum(shares["ftd"] >= shares[best_other(shares)] for _, _, shares in cases)
    same = sum(
        shares["ftd"] >= shares[best_other(shares, without=(OTHER_TRAINING,))] for _, _, shares in cases
    )
    hourly = {model: shares["ftd"] for trace, model, shares in cases if trace == HOURLY}
    worst = min(hourly, key=lambda model: hourly[model])
    return (
        f"ftd commits most in {won} of {len(cases)} cases, and in {same} among the policies that compute the same\n"
        f"training (all but `{OTHER_TRAINING}`). With a failure per hour on 30 nodes it commits at least\n"
        f"{hourly[worst]:.1%} of `ideal` ({worst}); {TARGET:.0%} is the aim.\n"
    )


SEVERAL_STAGES = ("gpt3-2.7b", "gpt3-6.7b")
"""Models of which no replica fits on one node, so that pipelines have several stages and idle slots."""


def gap() -> str:
    rows, head = [], list[str]()
    for (trace, model), shares in cells("gap"):
        head = list(shares)
        if model in SEVERAL_STAGES:
            rows.append((f"`{trace}`", model, *(f"{share:.1%}" for share in shares.values())))
    return markdown_table(("trace", "model", *head), rows, left=2)


def closed() -> str:
    """Return in how many cases ftd would commit as much as the best other policy, under other assumptions."""
    bars_of = {(trace, model): shares for trace, model, shares in shares_of_ideal()}
    found = {(trace, model): shares for (trace, model), shares in cells("gap")}
    hourly = {model: one["ftd, gradients kept"] for (trace, model), one in found.items() if trace == HOURLY}
    worst = min(hourly, key=lambda model: hourly[model])
    most = sum(
        one["ftd, gradients kept"] >= bars_of[case][best_other(bars_of[case])] for case, one in found.items()
    )
    ahead = ", ".join(
        f"{sum(one['ftd'] >= one[title] for one in found.values())} ({title})"
        for title in next(iter(found.values()))
        if not title.startswith("ftd")
    )
    return (
        f"* **Gradients kept.** With a failure per hour ftd would commit at least {hourly[worst]:.1%} of `ideal`\n"
        f"  ({worst}), and most of all policies in {most} of {len(found)} cases.\n"
        f"* **ReCycle's assumptions.** Of {len(found)} cases, ftd commits at least as much as ReCycle in\n  {ahead}.\n"
    )


def chance() -> str:
    rows = []
    for (trace, model, policy), found in cells("chance"):
        mean, half = 100 * found["mean"], 100 * found["half_width"]
        interval = f"{signed(mean - half, '.2f')} to {signed(mean + half, '.2f')}"
        shown = (signed(100 * found["as_it_is"], ".1f"), signed(mean, ".2f"), f"{100 * found['spread']:.2f}")
        rows.append((f"`{trace}`", model, policy, *shown, interval, found["ahead"]))
    head = ("trace", "model", "other policy", "trace as it is", "mean", "standard deviation", "95% interval")
    return markdown_table((*head, "ahead"), rows, left=3)


def sensitivity() -> str:
    rows, head = [], list[str]()
    for names, found in cells("sensitivity"):
        system, *constant, rate = names
        if rate == "1h":
            continue
        head = list(found)
        changes = ("–" if change is None else signed(change, ".1%") for change in found.values())
        rows.append((system, ",".join(constant), rate, *changes))
    return markdown_table(("system", "constant", "failure every", *head), rows, left=3)


def reft() -> str:
    rows = []
    for what, found in stored("reft")["data"].items():
        if "model" in found:
            published, ours = found["published"], found["model"]
            rows.append((what, number(published), number(ours), difference(ours, published)))
        else:
            rows.append((what, signed(found["published"], ".1%"), "–", "–"))
    return markdown_table(("", "published", "cost model", "difference"), rows, left=1)


def by_model(part: str) -> dict[str, list[Any]]:
    """Return the figures of each model, one for each trace."""
    found: dict[str, list[Any]] = defaultdict(list)
    for (model, _), figures in cells(part):
        found[model].append(figures)
    return found


def extent(values: Sequence[float], form: str) -> str:
    """Return the least and the largest value; one of them if they are shown alike."""
    low, high = format(min(values), form), format(max(values), form)
    return low if low == high else f"{low} to {high}"


def choice() -> str:
    rows, links = [], list[str]()
    for model, traces in by_model("rerouting").items():
        links = list(traces[0]["gains"])
        ratios = [figures["median_ratio"] for figures in traces if figures["median_ratio"] is not None]
        gains = (f"{max(figures['gains'][link] for figures in traces):.1%}" for link in links)
        rows.append((model, extent(ratios, ".2f"), *gains))
    head = ("model", "R / T, medians of the traces", *(f"added at most, {link}" for link in links))
    return markdown_table(head, rows, left=1)


def rerouting_alone() -> str:
    rows, head = [], list[str]()
    for model, traces in by_model("rerouting-alone").items():
        head = list(traces[0])
        rows.append((model, *(extent([figures[title] for figures in traces], ".3f") for title in head)))
    return markdown_table(("model", *head), rows, left=1)


PAGES = (EXPLANATION / "evaluation.md", EXPLANATION / "rerouting.md")


def main() -> None:
    """Write the pages again."""
    for page in PAGES:
        text = with_tables(page.read_text(encoding="utf-8"), tables_of(page))
        page.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
