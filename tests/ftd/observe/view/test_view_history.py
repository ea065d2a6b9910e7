"""Reports from a journal's history, as a page, an image and sentences."""

import asyncio
import io
import re
from collections.abc import Callable
from datetime import datetime, timedelta
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from ftd.cli import client as cli_client
from ftd.errors import ConfigurationError, FtdError
from ftd.observe.run_model import RunModel
from ftd.observe.view.document import Report, ReportedStep
from ftd.observe.view.history import build_job_report, find_recovery
from ftd.observe.view.pages.report_page import render_report_page
from ftd.observe.view.plots.report_plot import plot_report
from ftd.observe.view.rates import committed_at_s, goodput_series, throughput_series
from ftd.observe.view.report import build_report
from ftd.observe.view.sentences import describe_recovery
from ftd.observe.view.story import chapters
from ftd.observe.view.summary import render_summary
from ftd.transport.address import BrokerAddress, ClusterAddress
from ftd.transport.wire.public import encode_document
from tests.helpers.commands import ftd_here

Json = dict[str, Any]
JOB = "gpt-5c1f09aa"


@pytest.fixture
def history(run_events: list[Json]) -> tuple[list[Json], list[Json]]:
    """Return the journal's two lists: events, and steps without a monotonic clock."""
    first = run_events[0]
    submitted = first | {
        "event": "JobSubmitted",
        "details": {"name": "gpt", "steps": 120, "job": JOB, "global_batch": 32},
    }
    events = [submitted, *(e for e in run_events if e["event"] not in ("StepCommitted", "JobSubmitted"))]
    steps = [
        {"job": JOB, **{k: e[k] for k in ("step", "generation", "at", "details")}}
        for e in run_events
        if e["event"] == "StepCommitted"
    ]
    return events, steps


@pytest.fixture
def live(run_events: list[Json]) -> Report:
    run = RunModel()
    for event in run_events:
        run.on_event(event)
    return build_report(run)


@pytest.mark.parametrize("name", ["gpt", JOB])
def test_a_report_from_the_journal_equals_one_from_the_live_events(
    history: tuple[list[Json], list[Json]], live: Report, name: str
) -> None:
    report = build_job_report(name, *history)
    assert [s.at_s for s in report.steps] == pytest.approx([s.at_s for s in live.steps], abs=1e-3)
    assert [s.loss for s in report.steps] == [s.loss for s in live.steps]
    assert [(r.cause, r.at_s, r.total_ms, r.decision) for r in report.recoveries] == [
        (r.cause, r.at_s, r.total_ms, r.decision) for r in live.recoveries
    ]
    assert (report.outcome, report.job.global_batch) == ("finished", 32)


def test_no_step_is_lost_if_the_wall_clock_is_set_back_after_the_submission(
    history: tuple[list[Json], list[Json]],
) -> None:
    (first, *events), steps = history

    def set_back(row: Json) -> Json:
        return row | {"at": (datetime.fromisoformat(row["at"]) - timedelta(seconds=30)).isoformat()}

    report = build_job_report(JOB, [first, *map(set_back, events)], [set_back(step) for step in steps])
    assert len(report.steps) == 120 and len(report.recoveries) == 2
    assert report.start is not None and report.outcome == "finished"


@pytest.mark.parametrize("name", ["gpt", JOB])
def test_the_report_of_a_long_job_lacks_only_its_first_events(
    history: tuple[list[Json], list[Json]], name: str
) -> None:
    """The journal has forgotten the submission and what followed it."""
    events, steps = history
    left = [one for one in events if one["monotonic"] > 1004.0]
    report = build_job_report(name, left, steps[10:])
    assert (report.job.job_id, report.job.name, report.outcome) == (JOB, "gpt", "finished")
    assert [step.step for step in report.steps] == [*range(11, 121)]
    assert [one.cause for one in report.recoveries] == ["node_lost", "node_joined"]
    later = events[0] | {"details": {"name": "next", "job": "next-1"}, "at": "2026-05-05T12:00:00Z"}
    assert build_job_report(name, [*left, later], steps[10:]).job.job_id == JOB
    generation = report.recoveries[0].generation
    assert find_recovery(generation, left)[1].cause == "node_lost"
    with pytest.raises(FtdError, match="nothing is known of a job 'gp'"):
        build_job_report("gp", left, steps)


def test_a_name_selects_its_newest_job(history: tuple[list[Json], list[Json]]) -> None:
    events, steps = history
    later = events[0] | {"details": events[0]["details"] | {"job": "gpt-2"}}
    later["at"] = (datetime.fromisoformat(events[-1]["at"]) + timedelta(seconds=9)).isoformat()
    later["monotonic"] = events[-1]["monotonic"] + 9
    report = build_job_report("gpt", [*events, later], steps)
    assert (report.job.job_id, report.steps, report.outcome_reason) == ("gpt-2", (), "it is still running")
    assert len(build_job_report(JOB, [*events, later], steps).steps) == 120
    with pytest.raises(FtdError, match=rf"no.*job 'x' \(known: gpt-2, {JOB}\)"):
        build_job_report("x", [*events, later], steps)


def test_events_from_two_hosts_are_put_on_one_clock(
    history: tuple[list[Json], list[Json]],
) -> None:
    events, steps = history
    before = build_job_report("gpt", events, steps)
    moved = [e if e["monotonic"] < 1006.0 else _on_clock(e, 50_000.0) for e in events]
    assert moved != events
    after = build_job_report("gpt", moved, steps)
    assert [r.total_ms for r in after.recoveries] == [r.total_ms for r in before.recoveries]
    assert [r.at_s for r in after.recoveries] == pytest.approx([r.at_s for r in before.recoveries])
    assert after.duration_s == pytest.approx(before.duration_s)


def _on_clock(event: Json, by: float) -> Json:
    details = dict(event["details"])
    if "recovery" in details:
        details["recovery"] = details["recovery"] | {"detected_at": details["recovery"]["detected_at"] + by}
    if "detected_at" in details:
        details["detected_at"] += by
    return event | {"monotonic": event["monotonic"] + by, "details": details}


def test_a_recovery_is_described_in_sentences(history: tuple[list[Json], list[Json]]) -> None:
    report, recovery = find_recovery(2, history[0])
    text = "\n".join(describe_recovery(recovery, report))
    assert "node-2 lost (kill) at step 40; noticed by: last will, 3 ms after the fault." in text
    assert "All others had stopped and reported after 25 ms: no rank had passed the vote of step 41" in text
    assert recovery.reason.rstrip(".") in text and "3.0 MiB of state came from live replicas" in text
    assert "in all 253 ms from the fault, 0 committed steps lost, 1 step in flight computed again." in text
    with pytest.raises(FtdError, match=r"generation 9 is known \(known: 1, 2, 3\)"):
        find_recovery(9, history[0])


def test_nobody_notices_a_start_or_a_join(history: tuple[list[Json], list[Json]], live: Report) -> None:
    """The words say how a change came about that is no failure, if there is something to say."""
    report, start = find_recovery(1, history[0])
    text = "\n".join(describe_recovery(start, report))
    assert "training began at step 0." in text
    assert "All had reported that they were ready after" in text
    assert "lost" not in text and "stopped" not in text and text.endswith("from that moment.")
    report, join = find_recovery(3, history[0])
    joined = "\n".join(describe_recovery(join, report))
    assert "node-4 joined at step 80, once the job was built there." in joined
    console = Console(width=200, file=io.StringIO(), color_system=None)
    console.print(render_summary(live))
    shown = f"{text}\n{joined}\n{console.file.getvalue()}"  # type: ignore[attr-defined]
    assert "submitted" not in shown and "by: prepared" not in shown


def test_goodput_is_the_share_of_time_in_lasting_steps(history: tuple[list[Json], list[Json]]) -> None:
    report = build_job_report("gpt", *history)
    useful_s = sum(s.step_s or 0 for s in report.steps)
    elapsed_s = report.steps[-1].at_s - (report.steps[0].at_s - (report.steps[0].step_s or 0))
    assert goodput_series(report)[-1] == (report.steps[-1].at_s, pytest.approx(useful_s / elapsed_s))


def test_throughput_counts_every_sample(history: tuple[list[Json], list[Json]]) -> None:
    report = build_job_report("gpt", *history)
    series = throughput_series(report, bins=10)
    width = series[1][0] - series[0][0]
    assert sum(rate for _, rate in series) * width == pytest.approx(120 * 32)


def test_steps_that_arrive_at_once_are_spread_over_their_durations() -> None:
    def step(number: int, at_s: float) -> ReportedStep:
        return ReportedStep(
            step=number, loss=1.0, gradient_norm=None, skipped=False, step_s=1.0, generation=1, at_s=at_s
        )

    before, late = [step(n, float(n)) for n in (1, 2, 3)], [step(n, 10.0 + n / 1000) for n in range(4, 11)]
    assert committed_at_s([*before, *late]) == pytest.approx([*range(1, 11)], abs=0.02)
    twice = [*before, *(step(n, 7.0) for n in (4, 5)), *(step(n, 10.8) for n in range(6, 12))]
    assert committed_at_s(twice)[:5] == pytest.approx(
        [1, 2, 3, 3.8, 4.8]
    )  # They precede those that arrive later.
    crowded = [*before, *(step(n, 5.0) for n in range(4, 11))]  # Their durations exceed the available time.
    times = committed_at_s(crowded)
    assert times == sorted(times) and times[:3] == [1.0, 2.0, 3.0] and times[-1] == 5.0


class Elements(HTMLParser):
    """A parser that counts elements and the external resources that they request."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href", "xlink:href")]


def test_the_page_is_self_contained_and_shows_every_recovery(history: tuple[list[Json], list[Json]]) -> None:
    report = build_job_report("gpt", *history)
    page = render_report_page(report)
    elements = Elements(page)
    assert elements.tags.count("article") == len(report.recoveries) == 2
    assert {"svg", "table", "style"} <= set(elements.tags) and "script" not in elements.tags
    assert all(link.startswith("#") for link in elements.links)
    assert "120 of 120" in page and "node-2 lost (kill)" in page
    assert re.search(r"<b>\d+\.\d%</b><span class=\"faint\">goodput", page)


def test_a_running_job_is_described_as_running(history: tuple[list[Json], list[Json]]) -> None:
    events, steps = history
    report = build_job_report("gpt", [e for e in events if e["event"] != "JobFinished"], steps)
    out = io.StringIO()
    Console(file=out, width=100).print(render_summary(report))
    page, summary = render_report_page(report), out.getvalue()
    assert "running, started 2" in page and "; as of 2" in page and "loss so far" in page
    assert "unfinished" not in page + summary and "final" not in page
    assert "running for" in summary and "none: the job was running when the report was made" in summary


def test_names_cannot_become_html(history: tuple[list[Json], list[Json]]) -> None:
    events, steps = history
    hostile = [events[0] | {"details": events[0]["details"] | {"name": "<script>"}}, *events[1:]]
    assert "script" not in Elements(render_report_page(build_job_report(JOB, hostile, steps))).tags


def test_a_job_without_steps_has_a_page_without_an_image(
    history: tuple[list[Json], list[Json]], tmp_path: Path
) -> None:
    report = build_job_report("gpt", history[0][:1], [])
    assert "svg" not in Elements(render_report_page(report)).tags
    with pytest.raises(ConfigurationError, match="no step was committed"):
        plot_report(report, tmp_path / "r.png")


@pytest.mark.long
def test_images_have_two_formats(history: tuple[list[Json], list[Json]], tmp_path: Path) -> None:
    report = build_job_report("gpt", *history)
    plot_report(report, tmp_path / "r.png")
    plot_report(report, tmp_path / "r.svg")
    assert (tmp_path / "r.png").read_bytes().startswith(b"\x89PNG")
    assert "goodput" in (tmp_path / "r.svg").read_text()
    with pytest.raises(ConfigurationError, match="has no supported suffix"):
        plot_report(report, tmp_path / "r.pdf")
    with pytest.raises(ConfigurationError, match="does not exist"):
        plot_report(report, tmp_path / "no" / "r.png")


def test_every_requested_image_is_written(
    history: tuple[list[Json], list[Json]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "r.json").write_bytes(encode_document(build_job_report("gpt", *history)))
    wanted = [tmp_path / name for name in ("a.png", "b.svg")]
    plots = [word for path in wanted for word in ("--plot", str(path))]
    command = ["report", str(tmp_path / "r.json"), *plots]
    assert ftd_here(*command, patch=monkeypatch, said=capsys) == (0, "", "")
    assert all(path.stat().st_size > 1000 for path in wanted)
    code, _, err = ftd_here(*command, "--plot", "c.gif", patch=monkeypatch, said=capsys)
    assert (code, "c.gif has no supported suffix" in err) == (2, True)


@pytest.mark.usefixtures("fake_client")
def test_a_story_across_two_hosts_is_told_in_order(event: Callable[..., Json]) -> None:
    address = ClusterAddress(broker=BrokerAddress(host="h"))
    past = asyncio.run(cli_client._past(address))
    [chapter] = chapters(past, "node-2")
    assert [one["event"] for one in chapter] == ["NodeLost", "GenerationStarted", "RecoveryCompleted"]
    assert chapter[2]["monotonic"] - chapter[0]["monotonic"] == pytest.approx(30.0)


@pytest.fixture
def fake_client(event: Callable[..., Json], monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the journal have a recovery that began under a coordinator of another host, which had run for longer."""
    same = {"node": "node-2", "cause": "c1", "generation": 2}
    events = [event("NodeLost", 1000.0, **same), event("GenerationStarted", 1001.0, **same)]
    events.append({**event("RecoveryCompleted", 1030.0, **same), "monotonic": 50.0})

    class Client:
        def __init__(self, _address: ClusterAddress) -> None: ...
        async def __aenter__(self) -> "Client":
            return self

        async def __aexit__(self, *_: object) -> None: ...
        async def history(self) -> list[Json]:
            return events

    monkeypatch.setattr("ftd.transport.client.ClusterClient", Client)
