"""Failures with their reasons in all views of a run that finished although a node failed again and again."""

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console
from typer.testing import CliRunner

from ftd.cli.main import app
from ftd.observe.dashboard.model import DashboardModel
from ftd.observe.run_model import RunModel
from ftd.observe.view.document import Report
from ftd.observe.view.lines import plain_event
from ftd.observe.view.pages.report_page import render_report_page
from ftd.observe.view.report import build_report
from ftd.observe.view.sentences import describe_recovery
from ftd.observe.view.summary import render_summary
from ftd.transport.wire.public import EventMessage, encode_document

Json = dict[str, Any]
Make = Callable[..., Json]
ERROR = "ValueError: sample 7 is corrupt"
WHERE = "journalctl -u ftd-node.service on 10.0.0.3"


def failing_run(
    event: Make, run_events: list[Json], *, log: str = "journalctl -u ftd-node.service"
) -> list[Json]:
    """Return the run in which a trainer of node-1 raises 15 times, and one of node-3 is killed on purpose."""
    details = {
        "device": 0, "cause": "raised", "fault_at": None, "error": ERROR, "host": "10.0.0.3", "log": log,
        "detail": f"Traceback (most recent call last):\n  File \"train.py\", line 3\n{ERROR}",
    }  # fmt: skip
    raised = [
        event("TrainerLost", 1011.0 + n, node="node-1", cause=f"raise-{n}", reason=f"raised, {ERROR}",
                   details=details)
        for n in range(15)
    ]  # fmt: skip
    fault = {"fault": "kill", "at": 1011.5, "target": "trainer", "device": 0}
    killed = details | {"cause": "exited", "error": "killed by SIGKILL", "fault_at": 1011.5, "detail": ""}
    on_purpose = [
        event("ChaosInjected", 1011.4, node="node-3", details=fault),
        event("TrainerLost", 1011.51, node="node-3", reason="killed", details=killed),
    ]
    *before, finished = run_events
    return [*before, *raised, *on_purpose, finished | {"monotonic": 1030.0}]


def report_of(events: list[Json]) -> Report:
    run = RunModel()
    for one in events:
        run.on_event(one)
    return build_report(run)


def printed(report: Report) -> str:
    out = io.StringIO()
    Console(file=out, width=120).print(render_summary(report))
    return out.getvalue()


def test_a_finished_run_tells_which_node_failed_how_often_and_why(
    event: Make, run_events: list[Json]
) -> None:
    report = report_of(failing_run(event, run_events))
    assert report.outcome == "finished"
    found = {failure.node: failure for failure in report.failures}
    assert (found["node-1"].times, found["node-1"].injected, found["node-1"].error) == (15, False, ERROR)
    assert (found["node-3"].times, found["node-3"].injected) == (1, True)
    text, page = printed(report), render_report_page(report)
    assert f"but node-1 failed 15 times: {ERROR}" in text and "but node-3" not in text
    assert f"full output: {WHERE}" in text and 'File "train.py"' not in text, "the log has it"
    assert WHERE in page and "node-1 failed 15 times" in page and "line 3" in page
    assert "failed" not in printed(report_of(run_events)).split("Failures and changes")[0].replace(
        "failure", ""
    )


def test_errors_that_differ_in_a_number_are_one_failure_of_which_the_last_is_shown(event: Make) -> None:
    lost = {"device": 0, "cause": "raised", "detail": "", "host": "10.0.0.3", "log": ""}
    errors = [*(f"IndexError: {17 * n} at 0x7f{n}" for n in range(3)), "MemoryError"]
    submitted = event("JobSubmitted", 1000.0, details={"name": "gpt", "steps": 9, "global_batch": 8})
    raised = [
        event("TrainerLost", 1001.0 + n, node="node-1", details=lost | {"error": error})
        for n, error in enumerate(errors)
    ]
    report = report_of([submitted, *raised])
    found = [(one.error, one.times) for one in report.failures]
    assert found == [("IndexError: 34 at 0x7f2", 3), ("MemoryError", 1)]
    assert "node-1 failed 4 times: IndexError: 34 at 0x7f2 (and 1 other error)" in printed(report)


def test_what_a_lost_node_says_of_its_log_is_told_in_every_view(event: Make, run_events: list[Json]) -> None:
    host = {"host": "10.0.0.2", "log": "journalctl -u ftd-node.service"}
    where = "its log: journalctl -u ftd-node.service on 10.0.0.2"
    events = [
        one | {"details": one["details"] | host} if one["event"] == "NodeLost" else one for one in run_events
    ]
    report = report_of(events)
    [lost] = [one for one in events if one["event"] == "NodeLost"]
    assert where in plain_event(lost)
    sentences = describe_recovery(report.recoveries[0], report)
    assert f"node-2: {where}." in sentences
    assert not any("log" in sentence for sentence in describe_recovery(report.recoveries[1], report))
    assert where in printed(report) and where in render_report_page(report)
    model = DashboardModel()
    started = next(one for one in events if one["event"] == "GenerationStarted" and one["generation"] == 2)
    for number, one in enumerate((lost, started)):
        message = {"source": "coordinator", "id": f"e-{number}", "severity": "warning"} | one
        model.on_event(msgspec.convert(message, EventMessage), own=True)
    [loss] = (model.current_recovery or {})["losses"]
    assert loss["log"] == "journalctl -u ftd-node.service on 10.0.0.2"


def test_a_failure_that_no_recovery_followed_is_no_uneventful_run(
    event: Make, run_events: list[Json]
) -> None:
    changes = ("RecoveryCompleted", "NodeLost")
    events = [one for one in failing_run(event, run_events) if one["event"] not in changes]
    text = printed(report_of(events))
    assert "No recovery was completed." in text and "one plan was used" not in text


def test_a_traceback_that_no_log_keeps_is_printed(event: Make, run_events: list[Json]) -> None:
    text = printed(report_of(failing_run(event, run_events, log="")))
    assert 'File "train.py", line 3' in text and "full output" not in text


def test_the_dashboard_shows_the_error_and_where_the_output_is(event: Make, run_events: list[Json]) -> None:
    model = DashboardModel()
    events = failing_run(event, run_events)
    lost = next(one for one in events if one["event"] == "TrainerLost")
    started = event("GenerationStarted", lost["monotonic"] + 0.01, generation=4)
    for number, one in enumerate((lost, started)):
        message = {"source": "coordinator", "id": f"e-{number}", "severity": "warning"} | one
        model.on_event(msgspec.convert(message, EventMessage), own=True)
    [loss] = (model.current_recovery or {})["losses"]
    assert (loss["error"], loss["log"]) == (ERROR, WHERE)


@pytest.mark.parametrize("arguments", [[], ["node-1"]])
def test_a_story_is_told_from_the_file_of_a_report(
    event: Make, run_events: list[Json], tmp_path: Path, arguments: list[str]
) -> None:
    path = tmp_path / "report.json"
    path.write_bytes(encode_document(report_of(failing_run(event, run_events))))
    done = CliRunner().invoke(app, ["story", str(path), *arguments], env={"COLUMNS": "400"})
    assert done.exit_code == 0, done.output
    text = " ".join(done.output.split())
    assert text.count(ERROR) == 15 and WHERE in text
    assert ("The story of node-1" in text) == bool(arguments)


def test_a_recovery_is_described_from_the_file_of_a_report(
    event: Make, run_events: list[Json], tmp_path: Path
) -> None:
    path = tmp_path / "report.json"
    path.write_bytes(encode_document(report_of(failing_run(event, run_events))))
    done = CliRunner().invoke(app, ["story", str(path), "2"])
    assert "in all 253 ms from the fault" in done.output, done.output
    wrong = CliRunner().invoke(app, ["story", str(tmp_path / "none.json"), "2"])
    assert wrong.exit_code != 0


def test_the_events_of_a_report_are_without_layouts(run_events: list[Json]) -> None:
    document = json.loads(encode_document(report_of(run_events)))
    named = {one["event"]: one for one in document["events"]}
    assert "StepCommitted" not in named and "pipelines" not in named["PlanChosen"]["details"]
    assert "pipelines_after" not in named["RecoveryCompleted"]["details"]["recovery"]
