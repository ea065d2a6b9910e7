"""One duration for a recovery, and phases that add up to it, in everything that shows a recovery."""

import io
import re
from typing import Any

import msgspec
import pytest
from rich.console import Console

from ftd.observe.dashboard.model import DashboardModel
from ftd.observe.run_model import RunModel
from ftd.observe.view.lines import event_line
from ftd.observe.view.pages.report_page import render_report_page
from ftd.observe.view.report import build_report
from ftd.observe.view.sentences import describe_recovery
from ftd.observe.view.summary import render_summary
from ftd.transport.wire.public import EventMessage

Json = dict[str, Any]
ODD = {"detected_ms": 3.4, "quiesce_ms": 25.4, "plan_ms": 4.4, "state_ms": 31.4, "resume_ms": 190.4}
"""Phases of 255 ms that are 253 ms if each is rounded by itself."""


@pytest.fixture
def events(run_events: list[Json]) -> list[Json]:
    """Return the run in which node-2 is killed, with phases that do not end at whole milliseconds."""
    for event in run_events:
        recovery = event["details"].get("recovery")
        if recovery and recovery["cause"] == "node_lost":
            recovery |= ODD | {"total_ms": 255.0}
    return run_events


def test_every_view_shows_the_duration_of_the_event_and_phases_that_add_up_to_it(events: list[Json]) -> None:
    run, dashboard = RunModel(), DashboardModel()
    for number, event in enumerate(events):
        run.on_event(event)
        message = {"source": "coordinator", "id": f"e-{number}", "severity": "info"} | event
        dashboard.on_event(msgspec.convert(message, EventMessage, strict=False), own=True)
    report = build_report(run)
    killed = report.recoveries[0]
    assert killed.total_ms == report.faults[0].total_ms == 255.0

    out = io.StringIO()
    Console(file=out, width=120).print(render_summary(report))
    row = next(line for line in out.getvalue().splitlines() if "last will" in line).split("last will")[1]
    *phases_ms, total_ms = map(int, row.split()[:6])
    assert sum(phases_ms) == total_ms == 255

    text = "\n".join(describe_recovery(killed, report))
    *phases_ms, total_ms = map(int, re.findall(r"(\d+) ms", text))
    assert sum(phases_ms) == total_ms == 255

    cells = re.findall(r"<td[^>]*>([^<]*)</td>", render_report_page(report).split("Recoveries in numbers")[1])
    first = cells.index("last will") + 1
    assert sum(map(int, cells[first : first + 5])) == int(cells[first + 5]) == 255

    shown = dashboard.document()["recoveries"]
    assert [one["cause"] for one in shown] == ["node_lost", "node_joined"], "the first plan is no recovery"
    assert shown[0]["total_ms"] == sum(took_ms for _, took_ms in shown[0]["phases"]) == 255.0

    completed = [event for event in events if event["event"] == "RecoveryCompleted"]
    lines = [event_line(event, with_clock=False).plain for event in completed]
    assert "(255 ms, " in lines[1] and lines[1].startswith("✔ recovery completed")
    assert lines[0].startswith("✔ training started")


def test_a_long_recovery_adds_up_in_the_unit_of_its_total(events: list[Json]) -> None:
    for event in events:
        recovery = event["details"].get("recovery")
        if recovery and recovery["cause"] == "node_lost":
            recovery |= {"waited_ms": 3004.0, "total_ms": 3259.0}
    run = RunModel()
    for event in events:
        run.on_event(event)
    report = build_report(run)
    text = "\n".join(describe_recovery(report.recoveries[0], report))
    assert "Training was paused for 3.01 s." in text and "in all 3.26 s from the fault" in text
    found = re.findall(r"([\d.]+) (ms|s)\b", text.split("in all")[0])
    assert round(sum(float(value) * (1000 if unit == "s" else 1) for value, unit in found)) == 3260
