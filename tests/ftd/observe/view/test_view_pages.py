"""The summary, the status page and a node's story as text."""

import io
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console, RenderableType

from ftd.cli.options import print_rich
from ftd.observe.run_model import RunModel
from ftd.observe.view.document import Report, ReportedEvaluation
from ftd.observe.view.report import build_report
from ftd.observe.view.status import render_status
from ftd.observe.view.story import chapters, render_story
from ftd.observe.view.summary import render_summary

Json = dict[str, Any]
Make = Callable[..., Json]


def printed(page: RenderableType, width: int = 100) -> str:
    out = io.StringIO()
    Console(file=out, width=width).print(page)
    return out.getvalue()


def columns(line: str) -> list[str]:
    return line.split()


@pytest.fixture
def report(run_events: list[Json], state: Json) -> Report:
    run = RunModel()
    run.on_state(state)
    for event in run_events:
        run.on_event(event)
    return build_report(run)


@pytest.mark.parametrize("width", [100, 120])
def test_the_summary_has_a_row_for_each_change(report: Report, width: int) -> None:
    text = printed(render_summary(report), width)
    lines = text.splitlines()
    head = next(i for i, line in enumerate(lines) if "quiesce" in line)
    assert columns(lines[head])[-9:] == [
        "detect", "quiesce", "plan", "state", "resume", "total", "moved", "lost", "redone",
    ]  # fmt: skip
    killed, joined = lines[head + 1], lines[head + 2]
    assert columns(killed) == columns("1 40 node-2 lost (kill) last will 3 25 4 31 190 253 3.0 MiB 0 1")
    assert columns(joined) == columns("2 80 node-4 joined – – 60 3 42 130 235 2.0 MiB 0 0")
    assert max(map(len, lines)) <= width


def test_a_narrow_summary_leaves_out_columns_but_no_number(report: Report) -> None:
    lines = printed(render_summary(report), 80).splitlines()
    head = next(i for i, line in enumerate(lines) if "quiesce" in line)
    assert columns(lines[head + 1]) == columns("1 40 3 25 4 31 190 253 3.0 MiB 0 1")
    assert any(columns(line)[:6] == columns("1 what node-2 lost (kill) at") for line in lines)
    assert max(map(len, lines)) <= 80


def test_the_summary_gives_decisions_and_reasons(report: Report) -> None:
    text = printed(render_summary(report))
    assert "simple: 3 of 4 nodes are left: node-3 takes all layers of the second pipeline" in text
    assert "no rank had passed the vote of step 41, so all computed it again" in text
    assert "B  node-2 0–3 │ node-3 4–7  × 4       B  node-3 0–7  × 3" in text
    below = [line.strip() for line in printed(render_summary(report), 60).splitlines()]
    before = below.index("B  node-2 0–3 │ node-3 4–7  × 4")
    assert below[before + 1] == "→"
    assert below[before + 3] == "B  node-3 0–7  × 3"


def test_the_summary_begins_with_the_outcome(report: Report) -> None:
    text = printed(render_summary(report))
    assert "finished after 15.0 s" in text
    assert "120 of 120 committed, 0 lost, 1 recomputed" in text
    assert "6.6175 → 2.0968" in text
    assert "at most 253 ms from a failure to the next committed step" in text
    assert "ab" * 32 in text


def test_the_summary_of_an_unfinished_run_without_failures(event: Make) -> None:
    run = RunModel()
    text = printed(render_summary(build_report(run)))
    assert "unfinished" in text
    assert "No step was committed" in text
    assert "none: the job did not finish" in text
    run.on_event(event("StepCommitted", 1.0, step=1, generation=1, details={"loss": 2.0, "step_s": 0.1}))
    assert "No failure, join or drain interrupted training" in printed(render_summary(build_report(run)))
    run.on_event(event("ClusterPaused", 2.0, generation=2, reason="no node is ready"))
    paused = printed(render_summary(build_report(run)))
    assert "the cluster paused" in paused and "No failure" not in paused


def test_the_summary_lists_pauses_and_faults_without_a_recovery(event: Make) -> None:
    run = RunModel()
    run.on_event(event("JobSubmitted", 1.0, details={"name": "gpt", "steps": 5}))
    run.on_event(event("ChaosInjected", 3.0, node="a", details={"fault": "disconnect", "at": 3.0}))
    run.on_event(event("ClusterPaused", 4.5, reason="1 node is left and 2 are needed"))
    text = printed(render_summary(build_report(run)))
    assert "disconnect a after 2.00 s" in text
    assert "Paused after 3.50 s: 1 node is left and 2 are needed" in text


def test_the_roll_forward_names_the_step_that_was_saved(event: Make, recovery: Make) -> None:
    found = recovery("node_lost", 2, 41, nodes=["a"])
    run = RunModel()
    run.on_event(event("Quiesced", 5.0, generation=2, details={"decision": "roll_forward"}))
    run.on_event(event("RecoveryCompleted", 5.2, details={"recovery": found}))
    text = printed(render_summary(build_report(run)))
    assert "every rank held complete gradients of step 41: all applied it" in text


def test_the_status_page(state: Json) -> None:
    text = printed(render_status(state))
    assert "RUNNING  training" in text
    assert "90 of 120 (75%), loss 2.6112, 320 samples/s, 100 ms a step" in text
    rows = {columns(line)[0]: line for line in text.splitlines() if line.startswith("node-")}
    assert "OFFLINE" in rows["node-2"] and "layers" not in rows["node-2"]
    assert rows["node-4"].split() == ["node-4", "●", "HEALTHY", "A", "layers", "6–7"]
    assert "× 5 microbatches" in text and "× 3 microbatches" in text


def test_the_status_page_of_a_slow_job_that_has_one_step_left(state: Json) -> None:
    job = state["job"] | {"steps": 1000}
    text = printed(render_status(state | {"job": job, "step": 999, "samples_per_s": 0.31, "step_s": 103.0}))
    assert "999 of 1000 (99%), loss 2.6112, 0.31 samples/s, 1:43 a step" in text
    assert "1000 of 1000 (100%)" in printed(render_status(state | {"job": job, "step": 1000}))


def test_brackets_and_colons_in_names_are_printed_as_they_are(
    state: Json, report: Report, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = {"url": "/data/[/run]/[red]:smile:", "step": None, "writing_step": None, "size_bytes": 0}
    print_rich(render_status(state | {"checkpoint": checkpoint}))
    assert "in /data/[/run]/[red]:smile:" in capsys.readouterr().out
    metrics = {"f1[macro]": 0.25, "[/x]": 0.5}
    evaluated = ReportedEvaluation(
        step=9, loss=1.0, weight=None, metrics=metrics, took_s=None, generation=1, at_s=9.0
    )
    print_rich(render_summary(replace(report, evaluations=(evaluated,))))
    out = capsys.readouterr().out
    assert "f1[macro] 0.2500, [/x] 0.5000" in out and "─ ftd · gpt ─" in out


def test_the_status_without_a_job_and_while_waiting(state: Json) -> None:
    assert "ftd submit JOB.toml" in printed(render_status({"phase": "WAITING", "nodes": {}, "pipelines": []}))
    paused = state | {"phase": "PAUSED", "waiting_for": "no node is ready", "pipelines": []}
    text = printed(render_status(paused))
    assert "PAUSED" in text and "reason   no node is ready" in text


def test_the_status_shows_how_a_job_ended_and_why_no_coordinator_leads(state: Json) -> None:
    def status_of(**other: object) -> str:
        return printed(render_status(state | other))

    assert "FINISHED  stopped by a user" in status_of(phase="FINISHED", outcome="stopped by a user")
    assert "FAILED  the job cannot continue: layer 3 is lost" in status_of(
        phase="FAILED", outcome="layer 3 is lost"
    )
    raised = status_of(phase="FAILED", outcome="train.py:build raised KeyError: 'x'\nTraceback:\n  line 3")
    assert "FAILED  the job cannot continue: train.py:build raised KeyError: 'x'" in raised
    assert "(ftd report gpt shows the rest)" in raised and "line 3" not in raised
    assert "UNREACHABLE  it vanished; no coordinator" in status_of(phase="UNREACHABLE", reason="it vanished")


def test_the_status_shows_the_progress_of_planning(state: Json) -> None:
    text = printed(render_status(state | {"planning": {"done": 16, "total": 64}}))
    assert "━" * 6 + "─" * 18 + "  25% 16 of 64 numbers of nodes" in text
    assert "planning" not in printed(render_status(state | {"planning": None}))


def test_the_status_shows_the_progress_of_the_start(state: Json) -> None:
    startup = {"number": 3, "stages": 7, "share": 0.5, "text": "node-0 is measuring layer 3 of 10"}
    waiting = state | {"phase": "WAITING", "waiting_for": "node-0 to build and measure the model"}
    text = printed(render_status(waiting | {"startup": startup}))
    assert "WAITING  the job is starting" in text and "submit" not in text and "no job" not in text
    assert "━" * 12 + "─" * 12 + "  50% node-0 is measuring layer 3 of 10 (stage 3 of 7)" in text
    nodes = printed(render_status(waiting | {"startup": startup, "job": None}))
    assert "WAITING  the nodes are starting" in nodes and "submit" not in nodes
    idle = printed(render_status(waiting | {"startup": None, "job": None, "waiting_for": "a job"}))
    assert "no job is running" in idle and "submit one with" in idle


def test_the_status_names_the_newest_snapshot(state: Json) -> None:
    snapshot = {
        "step": 80, "generation": 3, "at": "2026-05-04T12:00:04.000Z", "size_bytes": 9, "protection": "aec",
        "owners": 4, "present": 4,
    }  # fmt: skip
    now = {"at": "2026-05-04T12:00:16.000Z"}
    text = printed(render_status(state | now | {"snapshot": snapshot}))
    assert "step 80, 12.0 s old, aec, on 4 nodes" in text
    text = printed(render_status(state | now | {"snapshot": snapshot | {"present": 3}}))
    assert "on 4 nodes (1 lost)" in text
    assert "snapshot" not in printed(render_status(state | {"snapshot": None}))


def test_the_status_without_a_coordinator() -> None:
    text = printed(render_status({"schema": 1, "phase": "UNREACHABLE"}))
    assert "UNREACHABLE" in text and "training continues without it" in text


def test_the_story_follows_the_cause_into_the_recovery(run_events: list[Json]) -> None:
    found = chapters(run_events, "node-2")
    names = [[e["event"] for e in chapter] for chapter in found]
    assert names == [
        ["NodeJoined"],
        ["ChaosInjected"],
        ["NodeLost", "GenerationStarted", "Quiesced", "PlanChosen", "TrainingResumed", "RecoveryCompleted"],
    ]
    text = printed(render_story(run_events, "node-2"))
    assert "The story of node-2: 8 events" in text
    assert "6 events in 250 ms  (cause will-2)" in text
    recovered = next(line for line in text.splitlines() if "recovery completed" in line)
    assert columns(recovered)[:2] == ["+250", "ms"]
    assert "▌" in recovered


def test_the_story_omits_events_of_other_nodes(run_events: list[Json]) -> None:
    found = chapters(run_events + run_events, "node-4")
    assert [[e["event"] for e in c] for c in found] == [["NodeJoined"], ["RecoveryCompleted"]]
    assert "Nothing is known of a node named node-9" in printed(render_story(run_events, "node-9"))


def test_later_events_of_a_generation_form_their_own_chapter(run_events: list[Json], event: Make) -> None:
    """Every event of the coordinator carries the current generation, even the failure that ends it."""
    later = event("NodeLost", 1012.0, node="node-2", generation=2, cause="will-3", reason="again")
    found = chapters([*run_events, later], "node-2")
    assert [e["event"] for e in found[-1]] == ["NodeLost"]
    assert len(found[-2]) == 6
