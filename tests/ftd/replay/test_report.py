"""The document of a replay and the tables that are made from it."""

import io
import json

import msgspec
import pytest
from rich.console import Console

from ftd.observe.view.schema import schema_of
from ftd.replay.advice import Advice
from ftd.replay.comparison import Comparison, Estimate, ExcludedPolicy, compare
from ftd.replay.parameters import read_parameters
from ftd.replay.policy import CATEGORIES
from ftd.replay.report import MOST_WINDOWS, ReplayReport, build_report, window_edges_s
from ftd.replay.schema import DOCUMENTS
from ftd.replay.tables import render_replay, result_rows
from ftd.transport.wire.public import encode_document
from tests.helpers.harness import ROOT
from tests.helpers.replay_jobs import make_job, make_trace

JOB = make_job()
TRACE = make_trace(6, (300.0, "remove", "n5"), (600.0, "add", "n5"), end_s=1000.0)
POLICIES = ["ideal", "oobleck", "varuna"]
REFERENCE = ROOT / "docs" / "reference"


def compared(**changes: object) -> Comparison:
    found = compare(JOB, lambda _: TRACE, read_parameters(), most_traces=1, policies=POLICIES)
    fields = {name: getattr(found, name) for name in ("job", "throughput", "traces", "results", "excluded")}
    return Comparison(**(fields | changes))


def printed(report: ReplayReport, width: int = 160) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(render_replay(report))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_document_accounts_for_every_second_and_every_sample() -> None:
    report = build_report(compared(), generated=False, parameters="shipped", price_per_node_hour=2.0)
    document = json.loads(encode_document(report))
    assert document["simulated"] is True and document["schema"] == 1
    assert document["trace"]["nodes"] == [[0.0, 6], [300.0, 5], [600.0, 6]]
    assert [policy["policy"] for policy in document["policies"]] == POLICIES
    for policy in document["policies"]:
        assert list(policy["seconds"]) == list(CATEGORIES)
        assert sum(policy["seconds"].values()) == pytest.approx(1000.0)
        assert policy["committed"][-1] == pytest.approx(policy["samples"]["mean"])
        assert policy["cost_per_sample"]["mean"] > 0
        assert len(policy["committed"]) == len(policy["throughput"]) == len(document["windows_s"])
    [ideal, oobleck, varuna] = document["policies"]
    assert ideal["recoveries"] == [] and ideal["goodput"] == {"mean": 1.0, "half_width": None}
    assert [(each["kind"], each["count"]) for each in oobleck["recoveries"]] == [("join", 1), ("loss", 1)]
    assert all(each["median_s"] > 0 for each in varuna["recoveries"])


def test_the_terminal_shows_results_times_exclusions_and_that_they_are_simulated() -> None:
    found = compared(excluded=(ExcludedPolicy(policy="bamboo", reason="there is no next stage"),))
    text = printed(build_report(found, generated=False, parameters="shipped", price_per_node_hour=2.0))
    lines = text.splitlines()
    [header] = [line for line in lines if "committed samples" in line]
    assert header.split() == ["policy", "samples/s", "committed", "samples", "goodput", "cost", "of", "1,000"]
    [times] = [line for line in lines if "computing" in line]
    assert "redone" in times and "waiting" not in times, "no policy waited"
    assert "not replayed: bamboo: there is no next stage" in text
    assert "Simulated" in text and "Job: test." in text
    assert "cost of" not in printed(build_report(compared(), generated=False, parameters="shipped"))


def test_columns_that_do_not_fit_into_the_terminal_stand_below_the_others() -> None:
    report = build_report(compared(), generated=False, parameters="shipped")
    wide, narrow = printed(report), printed(report, width=45)
    assert "…" not in narrow
    for name in ("policy   ", "varuna "):
        cells = [
            sorted(cell for line in text.splitlines() if line.startswith(name) for cell in line.split()[1:])
            for text in (wide, narrow)
        ]
        assert cells[0] == cells[1], "no cell is left out or cut"


def test_several_traces_have_confidence_intervals() -> None:
    found = compare(
        JOB,
        lambda seed: make_trace(6, (300.0 + seed, "remove", "n5"), end_s=1000.0),
        read_parameters(),
        policies=POLICIES,
        most_traces=3,
    )
    report = build_report(found, generated=True, parameters="shipped")
    assert report.traces == 3 and report.precise is True
    assert all(policy.samples.half_width is not None for policy in report.policies)
    assert "±" in printed(report) and "over 3 traces; for every policy's samples/s it is below 5%" in printed(
        report
    )


@pytest.mark.parametrize("duration_s", [0.5, 600.0, 54_000.0, 54_001.0, 30 * 86_400.0, 9 * 365 * 86_400.0])
def test_windows_are_few_and_cover_the_trace(duration_s: float) -> None:
    edges_s = window_edges_s(duration_s)
    assert edges_s[0] == 0.0 and edges_s[-1] == duration_s
    assert 2 <= len(edges_s) <= MOST_WINDOWS + 1
    assert edges_s == sorted(set(edges_s))


@pytest.mark.parametrize("name", DOCUMENTS)
def test_the_schemas_in_the_documentation_are_current(name: str) -> None:
    """``make docs`` writes them again when this test fails."""
    assert (REFERENCE / f"{name}.schema.json").read_bytes() == schema_of(DOCUMENTS[name])


def test_every_field_is_explained_in_the_documentation() -> None:
    replay, advice = (REFERENCE / "replay-report.md").read_text().split("\n## Advice\n")
    for text, document, more in ((replay, ReplayReport, set(CATEGORIES)), (advice, Advice, set())):
        definitions = json.loads(schema_of(document))["$defs"]
        fields = {field for definition in definitions.values() for field in definition["properties"]}
        assert [field for field in sorted(fields | more) if f"`{field}`" not in text] == []


@pytest.mark.parametrize(
    ("mean", "half_width", "shown"),
    [(0.00254, 0.000006, "2.54 ± 0.006"), (0.25, 0.012, "250 ± 10"), (12.34, 1.2, "12,300 ± 1,000")],
)
def test_a_high_price_is_shown_without_an_exponent(mean: float, half_width: float, shown: str) -> None:
    report = build_report(compared(), generated=False, parameters="shipped")
    cost = Estimate(mean=mean, half_width=half_width)
    policy = msgspec.structs.replace(report.policies[0], cost_per_sample=cost)
    priced = msgspec.structs.replace(report, price_per_node_hour=3.0, policies=(policy,))
    assert result_rows(priced)[1][0][-1] == shown
