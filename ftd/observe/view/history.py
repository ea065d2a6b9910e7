"""Builds the reports of past jobs from a coordinator's history: its events and the committed steps of its
journal.

Steps in the journal have only wall-clock times, and the monotonic times of events belong to the host that
the coordinator ran on at that time. All times are therefore converted to one clock: the monotonic clock of
the first event.
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
"""Change of the difference between wall clock and monotonic clock above which the coordinator moved to
another host or the host rebooted.
"""
_NESTED = ("at", "detected_at", "began_at", "fault_at")
"""Details that are times on the monotonic clock."""


def build_job_report(job: str, events: Sequence[JsonMap], steps: Sequence[JsonMap]) -> Report:
    """Return the report of a job by its id, or of the newest job with this name.

    :param events: result of ``ClusterClient.history()``, oldest first.
    :param steps: result of ``ClusterClient.history(what="steps")``.
    :raises FtdError: no such job is known; the message names the known jobs.
    """
    head, runs = _split_runs(events)
    found = [
        i for i, run in enumerate(runs) if job in (_details(run[0]).get("job"), _details(run[0]).get("name"))
    ]
    if not found and head and (job_id := _find_headless(job, runs, steps)) is not None:
        known_of_job = {"id": job_id, "name": _name_of(job_id)}
        return _build(on_one_clock(head, _steps_of(job_id, steps)), job=known_of_job)
    if not found:
        known = ", ".join(sorted({str(_details(run[0]).get("job")) for run in runs})) or "none"
        raise FtdError(f"nothing is known of a job {job!r} (known: {known})")
    job_events = runs[found[-1]]
    return _build(on_one_clock(job_events, _steps_of(_details(job_events[0]).get("job"), steps)))


def _find_headless(job: str, runs: Sequence[Sequence[JsonMap]], steps: Sequence[JsonMap]) -> str | None:
    """Return the id of a job of this id or name whose first events the journal no longer has: the newest one whose
    submission is missing.
    """
    submitted = {_details(run[0]).get("job") for run in runs}
    newest = next((str(step["job"]) for step in reversed(steps) if step["job"] not in submitted), "")
    return newest if newest and job in (newest, _name_of(newest)) else None


def _name_of(job_id: str) -> str:
    """Return the job's name, which its id begins with."""
    return job_id.rpartition("-")[0]


def _steps_of(job_id: object, steps: Sequence[JsonMap]) -> list[JsonMap]:
    return [step for step in steps if step["job"] == job_id]


def find_recovery(generation: int, events: Sequence[JsonMap]) -> tuple[Report, ReportedRecovery]:
    """Return a recovery by its generation, which is never reused, with the report that contains it.

    :raises FtdError: no recovery of that generation is known; the message names the known ones.
    """
    known: list[int] = []
    head, runs = _split_runs(events)
    for run in (head, *runs):
        report = _build(on_one_clock(run))
        recoveries = [*([report.start] if report.start else []), *report.recoveries]
        for recovery in recoveries:
            if recovery.generation == generation:
                return report, recovery
        known += [recovery.generation for recovery in recoveries]
    known_text = ", ".join(map(str, known)) or "none"
    raise FtdError(f"no recovery of generation {generation} is known (known: {known_text})")


def _build(events: Iterable[JsonMap], job: JsonMap | None = None) -> Report:
    """Return the report of a run. Of a job whose submission is missing, ``job`` says what is known."""
    run = RunModel()
    run.job.update(job or {})
    for event in events:
        run.on_event(event)
    report = build_report(run)
    return report if report.outcome != "unfinished" else replace(report, outcome_reason=UNDER_WAY)


def _split_runs(events: Sequence[JsonMap]) -> tuple[list[JsonMap], list[list[JsonMap]]]:
    """Return the events before the first submission, and those of each run, from a submission to the next."""
    head: list[JsonMap] = []
    runs: list[list[JsonMap]] = []
    for event in events:
        if event["event"] == "JobSubmitted":
            runs.append([])
        (runs[-1] if runs else head).append(event)
    return head, runs


def on_one_clock(events: Sequence[JsonMap], steps: Sequence[JsonMap] = ()) -> Iterator[dict[str, Any]]:
    """Yield events and steps in wall-clock order, with all times on the first event's monotonic clock.

    The first event stays the first, although the wall clock may have been set back after it: in a report, it
    begins the job.
    """
    if not events:
        return
    first = offset = _clock_offset(events[0])
    rows = [*events, *({**step, "event": "StepCommitted", "node": None} for step in steps)]
    begun = _wall_time(events[0])
    for event in sorted(rows, key=lambda row: max(_wall_time(row), begun)):
        if "monotonic" not in event:
            yield {**event, "monotonic": _wall_time(event) - first}
            continue
        if abs(_clock_offset(event) - offset) > ANOTHER_CLOCK_S:
            offset = _clock_offset(event)
        yield _shift_event(event, offset - first)


def _shift_event(event: JsonMap, by: float) -> dict[str, Any]:
    if not by:
        return dict(event)
    details = _shift_times(_details(event), by)
    if recovery := details.get("recovery"):
        details["recovery"] = _shift_times(recovery, by)
    return {**event, "monotonic": event["monotonic"] + by, "details": details}


def _shift_times(details: JsonMap, by: float) -> dict[str, Any]:
    return {k: v + by if k in _NESTED and v is not None else v for k, v in details.items()}


def _wall_time(event: JsonMap) -> float:
    return datetime.fromisoformat(event["at"]).timestamp()


def _clock_offset(event: JsonMap) -> float:
    return _wall_time(event) - float(event["monotonic"])


def _details(event: JsonMap) -> JsonMap:
    details: JsonMap = event.get("details") or {}
    return details
