"""Reports of jobs out of a coordinator's history: its events, and the committed steps of its journal.

Steps of the journal have a wall clock's time alone, and the monotonic clock of the events is that of the host
that the coordinator ran on at the time. So all of it is put on one clock: that of the first event.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any

from ftd.errors import FtdError
from ftd.observe.run_model import RunModel
from ftd.observe.view.document import UNDER_WAY, Report, ReportedRecovery
from ftd.observe.view.report import build_report
from ftd.observe.view.text import JsonMap

ANOTHER_CLOCK_S = 1.0
"""Between wall and monotonic clock: a larger change of their difference is another host, or a reboot."""
_NESTED = ("at", "detected_at", "fault_at")
"""Details that are moments on the same clock."""


def build_job_report(job: str, events: Sequence[JsonMap], steps: Sequence[JsonMap]) -> Report:
    """The report of a job by its id, or of the newest one by its name.

    :param events: of ``ClusterClient.history()``, oldest first; ``steps``: of ``history(what="steps")``.
    :raises FtdError: no such job is known; the message names those that are.
    """
    runs = _runs(events)
    found = [
        i for i, run in enumerate(runs) if job in (_details(run[0]).get("job"), _details(run[0]).get("name"))
    ]
    if not found:
        known = ", ".join(sorted({str(_details(run[0]).get("job")) for run in runs})) or "none"
        raise FtdError(f"nothing is known of a job {job!r} (known: {known})")
    mine = runs[found[-1]]
    job_id = _details(mine[0]).get("job")
    return _built(_on_one_clock(mine, [step for step in steps if step["job"] == job_id]))


def find_recovery(generation: int, events: Sequence[JsonMap]) -> tuple[Report, ReportedRecovery]:
    """A recovery by its generation (numbers are never used twice), and the report that it belongs to.

    :raises FtdError: no recovery of that generation is known; the message names those that are.
    """
    known: list[int] = []
    for run in _runs(events):
        report = _built(_on_one_clock(run, []))
        recoveries = [*([report.start] if report.start else []), *report.recoveries]
        for recovery in recoveries:
            if recovery.generation == generation:
                return report, recovery
        known += [recovery.generation for recovery in recoveries]
    said = ", ".join(map(str, known)) or "none"
    raise FtdError(f"no recovery of generation {generation} is known (known: {said})")


def _built(events: Iterable[JsonMap]) -> Report:
    run = RunModel()
    for event in events:
        run.on_event(event)
    report = build_report(run)
    return report if report.outcome != "unfinished" else replace(report, outcome_reason=UNDER_WAY)


def _runs(events: Sequence[JsonMap]) -> list[list[JsonMap]]:
    """The events from each submission to the next."""
    runs: list[list[JsonMap]] = []
    for event in events:
        if event["event"] == "JobSubmitted":
            runs.append([])
        if runs:
            runs[-1].append(event)
    return runs


def _on_one_clock(events: Sequence[JsonMap], steps: Sequence[JsonMap]) -> Iterator[dict[str, Any]]:
    """Events and steps in the order of the wall clock, every moment on the first event's monotonic clock."""
    first = offset = _offset(events[0])
    told = [*events, *({**step, "event": "StepCommitted", "node": None} for step in steps)]
    for event in sorted(told, key=_wall):
        if "monotonic" not in event:
            yield {**event, "monotonic": _wall(event) - first}
            continue
        if abs(_offset(event) - offset) > ANOTHER_CLOCK_S:
            offset = _offset(event)
        yield _shifted(event, offset - first)


def _shifted(event: JsonMap, by: float) -> dict[str, Any]:
    if not by:
        return dict(event)
    details = _moved(_details(event), by)
    if recovery := details.get("recovery"):
        details["recovery"] = _moved(recovery, by)
    return {**event, "monotonic": event["monotonic"] + by, "details": details}


def _moved(details: JsonMap, by: float) -> dict[str, Any]:
    return {k: v + by if k in _NESTED and v is not None else v for k, v in details.items()}


def _wall(event: JsonMap) -> float:
    return datetime.fromisoformat(event["at"]).timestamp()


def _offset(event: JsonMap) -> float:
    return _wall(event) - float(event["monotonic"])


def _details(event: JsonMap) -> JsonMap:
    details: JsonMap = event.get("details") or {}
    return details
