"""The report: how faults are matched to recoveries, its phases, and where measurements begin."""

import io
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from ftd.observe.run_model import RunModel, phases_ms
from ftd.observe.view.document import SCHEMA_VERSION, Report, ReportError
from ftd.observe.view.pages.report_page import render_report_page
from ftd.observe.view.rates import counts_tokens, goodput_series, learning_rates, throughput_series
from ftd.observe.view.report import build_report
from ftd.observe.view.schema import schema_of
from ftd.observe.view.sentences import describe_decision, describe_recovery
from ftd.observe.view.summary import render_summary
from ftd.transport.wire.public import encode_document

Json = dict[str, Any]
Make = Callable[..., Json]
DOCS = Path(__file__).parents[4] / "docs" / "reference"


def built(events: Sequence[Json], state: Json | None = None) -> Report:
    run = RunModel()
    if state is not None:
        run.on_state(state)
    for event in events:
        run.on_event(event)
    return build_report(run)


FROM_FAULT = {"measured_from": "fault", "began_at": 10.0, "detected_ms": 4.0, "total_ms": 200.0}


def test_a_kill_is_measured_from_the_fault(run_events: list[Json], state: Json) -> None:
    report = built(run_events, state)
    killed = report.recoveries[0]
    assert (killed.cause, killed.node, killed.detected_how) == ("node_lost", "node-2", "last_will")
    assert killed.measured_from == "fault"
    assert list(phases_ms(killed).values()) == [3.0, 0.0, 25.0, 4.0, 31.0, 190.0]
    assert killed.total_ms == sum(phases_ms(killed).values()) == report.faults[0].total_ms == 253.0
    assert (killed.rolled_back_steps, killed.recomputed_steps) == (0, 1)
    assert (killed.tier, killed.bytes_moved, killed.decision) == ("live_replica", 3 << 20, "redo")
    assert [len(p.stages) for p in killed.pipelines_before] == [2, 2]
    assert [len(p.stages) for p in killed.pipelines_after] == [2, 1]
    assert killed.pipelines_after[1].stages[0].devices == ("node-3/0",)
    assert killed.commit_gap_ms == pytest.approx((1005.253 - (1000.33 + 4.0)) * 1000)


def test_a_join_is_measured_from_its_detection(run_events: list[Json]) -> None:
    joined = built(run_events).recoveries[1]
    assert (joined.cause, joined.node) == ("node_joined", "node-4")
    assert (joined.measured_from, joined.detected_ms, joined.total_ms) == ("detection", None, 235.0)


def test_the_start_is_not_listed_as_a_recovery(run_events: list[Json]) -> None:
    report = built(run_events)
    assert report.start is not None
    assert report.start.generation == 1
    assert [r.generation for r in report.recoveries] == [2, 3]


def test_steps_job_and_end(run_events: list[Json], state: Json) -> None:
    report = built(run_events, state)
    assert [s.step for s in report.steps] == list(range(1, 121))
    assert report.steps[59].loss == pytest.approx(5.5 * 0.985**60 + 1.2)
    assert (report.job.name, report.job.steps, report.job.global_batch) == ("gpt", 120, 32)
    assert report.outcome == "finished"
    assert report.final.step == 120
    assert report.final.checksum == "ab" * 32
    assert report.duration_s == pytest.approx(15.0)


def test_skipped_updates_are_reported(run_events: list[Json], event: Make) -> None:
    assert "skipped" not in page(built(run_events))
    nothing = {"loss": None, "gradient_norm": None, "skipped": True, "step_s": 0.1, "samples_per_s": None}
    only = [event("StepCommitted", 1001.0 + n, step=n, details=nothing) for n in (1, 2)]
    assert "2 of 2 skipped, which trained nothing (steps 1 to 2)" in page(built(only))
    assert "no loss was a finite number" in page(built(only))


def test_evaluations_on_held_out_data(run_events: list[Json], event: Make) -> None:
    def evaluated(at: float, step: int, generation: int, loss: float) -> Json:
        details = {"loss": loss, "weight": 37.0, "metrics": {"accuracy": 0.25}, "took_s": 1.5}
        return event("Evaluated", at, step=step, generation=generation, details=details)

    # The second evaluation is repeated after a rollback; the newest one counts.
    data = [evaluated(1001.0, 5, 1, 0.5), evaluated(1002.0, 10, 1, 0.4), evaluated(1003.0, 10, 2, 0.45)]
    report = built([*run_events, *data, data[1]])
    assert [(e.step, e.loss, e.generation) for e in report.evaluations] == [(5, 0.5, 1), (10, 0.45, 2)]
    last = report.evaluations[-1]
    assert (last.weight, last.metrics, last.took_s) == (37.0, {"accuracy": 0.25}, 1.5)
    assert "2 evaluations, the last after step 10" in page(report)


def test_undone_steps_that_were_not_repeated_are_left_out(event: Make, recovery: Make) -> None:
    events = [
        e for e in rolled_back_run(event, recovery) if (e["generation"], e["event"]) != (2, "StepCommitted")
    ]
    data = [
        event("Evaluated", 11.0 + step / 100, step=step, generation=1, details={"loss": 1.0})
        for step in (5, 10)
    ]
    report = built([*events, *data])
    assert [step.step for step in report.steps] == list(range(1, 8))
    assert [evaluation.step for evaluation in report.evaluations] == [5]
    assert report.final.step == 7


@pytest.mark.long
def test_speed_is_given_in_tokens_if_the_loss_has_tokens(run_events: list[Json], event: Make) -> None:
    """The batch has 32 rows with 4096 counted tokens, and the learning rate falls."""
    submitted = event("JobSubmitted", 999.0, details={"name": "gpt", "steps": 120, "global_batch": 32})
    rows = built([submitted, *run_events])
    assert not counts_tokens(rows) and "320 samples/s" in page(rows) and not learning_rates(rows)
    events = [
        {**e, "details": {**e["details"], "weight": 4096.0, "learning_rate": 1 / e["step"]}}
        if e["event"] == "StepCommitted"
        else e
        for e in run_events
    ]
    report = built([submitted, *events])
    assert counts_tokens(report)
    last = report.steps[-1]
    assert (last.learning_rate, last.weight) == (1 / 120, 4096.0)
    assert "median step 100 ms, 40,960 tokens/s, learning rate 0.00833" in page(report)
    fastest = max(value for _, value in throughput_series(report))
    assert fastest == pytest.approx(40960.0, rel=0.5)
    assert [value for _, value in learning_rates(report)][:2] == [1.0, 0.5]
    for text_part in ("40,960", "tokens/s", "0.00833", "learning rate"):
        assert text_part in render_report_page(report)


def test_snapshots_and_checkpoints_are_summarised(run_events: list[Json], event: Make) -> None:
    assert "snapshots" not in page(built(run_events))
    events = [
        event("SnapshotCompleted", 1003.0, step=5, details={"protection": "arc:1", "size_bytes": 900}),
        event("SnapshotCompleted", 1004.0, step=10, details={"protection": "aec", "size_bytes": 4 << 20}),
        event("CheckpointStarted", 1004.1, step=10, details={"url": "/checkpoints/gpt"}),
        event("CheckpointAbandoned", 1004.2, step=10, reason="n1: the disk is full"),
    ]
    report = built([*run_events, *events, *events])
    saves = report.snapshots
    assert (saves.completed, saves.newest_step, saves.protection_or_location, saves.size_bytes) == (
        2,
        10,
        "aec",
        4 << 20,
    )
    assert (report.checkpoints.completed, report.checkpoints.abandoned) == (0, 1)
    text = page(report)
    assert "2 in the nodes' memory, the newest of step 10 (aec, 4.0 MiB)" in text
    assert "none; 1 abandoned, the last one because: n1: the disk is full" in text
    events.append(event("CheckpointCompleted", 1005.0, step=20, details={"size_bytes": 1024}))
    text = page(built([*run_events, *events]))
    assert "1 in /checkpoints/gpt, the newest of step 20 (1.0 KiB); 1 abandoned" in text
    assert Report.from_json(json.loads(encode_document(report))) == report


def test_a_second_delivery_changes_nothing(run_events: list[Json]) -> None:
    once = built(run_events)
    assert built(run_events + run_events[::-1]) == once


def test_the_event_of_a_fault_may_arrive_after_its_recovery(run_events: list[Json]) -> None:
    late = sorted(run_events, key=lambda e: e["event"] == "ChaosInjected")
    assert late[-1]["event"] == "ChaosInjected"
    report = built(late)
    assert report.recoveries[0].detected_ms == pytest.approx(3.0)
    (fault,) = report.faults
    assert fault.generations == (2,)
    assert (fault.fault, fault.target, fault.device) == ("kill", "node", None)


def test_two_faults_one_recovery(event: Make, recovery: Make) -> None:
    data = recovery(
        "node_lost", 2, 7, nodes=["a", "b"], detected_at=10.004, **FROM_FAULT | {"total_ms": 204.0}
    )
    report = built(
        [
            event("ChaosInjected", 10.0, node="a", details={"fault": "kill", "at": 10.0}),
            event("ChaosInjected", 10.1, node="b", details={"fault": "stop", "at": 10.1}),
            event("NodeLost", 10.004, node="a", details={"how": "last_will", "detected_at": 10.004}),
            event("NodeLost", 10.15, node="b", details={"how": "silence", "detected_at": 10.15}),
            event("RecoveryCompleted", 10.21, details={"recovery": data}),
        ]
    )
    (only,) = report.recoveries
    assert only.nodes == ("a", "b")
    assert (only.detected_ms, only.total_ms) == (4.0, 204.0)
    first, second = report.faults
    assert (first.fault, first.detected_how, first.detected_ms) == ("kill", "last_will", pytest.approx(4.0))
    assert (second.fault, second.detected_how) == ("stop", "silence")
    assert second.detected_ms == pytest.approx(50.0)
    assert second.total_ms == pytest.approx(104.0)
    assert first.generations == second.generations == (2,)


def test_one_fault_two_recoveries(event: Make, recovery: Make) -> None:
    data = {"nodes": ["a"], "detected_how": None}
    lost = recovery("trainer_lost", 2, 7, detected_at=10.02, **data | FROM_FAULT)
    back = recovery("node_returned", 3, 12, detected_at=10.9, total_ms=90.0, **data)
    report = built(
        [
            event("ChaosInjected", 10.0, node="a", details={"fault": "kill", "at": 10.0}),
            event("TrainerLost", 10.02, node="a", details={"device": 0, "cause": "exited", "detail": "-9"}),
            event("RecoveryCompleted", 10.2, details={"recovery": lost}),
            event("RecoveryCompleted", 10.99, details={"recovery": back}),
        ]
    )
    first, second = report.recoveries
    assert (first.measured_from, first.total_ms) == ("fault", 200.0)
    assert (second.measured_from, second.total_ms) == ("detection", 90.0)
    (fault,) = report.faults
    assert (fault.generations, fault.detected_how) == ((2, 3), "exited")
    assert (first.detected_how, second.detected_how) == ("exited", "prepared")


def test_each_fault_of_a_node_has_its_own_recovery(event: Make, recovery: Make) -> None:
    events = []
    for number, at in ((2, 10.0), (3, 20.0)):
        data = recovery("node_lost", number, number, nodes=["a"], detected_at=at + 0.01, total_ms=100.0)
        events += [
            event("ChaosInjected", at, node="a", details={"fault": "kill", "at": at}),
            event("RecoveryCompleted", at + 0.11, details={"recovery": data}),
        ]
    report = built(events)
    assert [f.generations for f in report.faults] == [(2,), (3,)]


def test_a_fault_of_another_node_or_a_later_one_is_not_matched(event: Make, recovery: Make) -> None:
    data = recovery("node_lost", 2, 7, nodes=["a"], detected_at=10.0, total_ms=100.0)
    report = built(
        [
            event("ChaosInjected", 9.9, node="b", details={"fault": "kill", "at": 9.9}),
            event("RecoveryCompleted", 10.1, details={"recovery": data}),
            event("ChaosInjected", 10.5, node="a", details={"fault": "kill", "at": 10.5}),
        ]
    )
    assert report.recoveries[0].measured_from == "detection"
    assert [f.generations for f in report.faults] == [(), ()]
    assert [f.total_ms for f in report.faults] == [None, None]


def test_processes_pauses_and_a_loss_that_is_not_finite(event: Make) -> None:
    run = RunModel()
    run.on_event(event("StepCommitted", 5.0, step=1, details={"loss": float("nan"), "skipped": True}))
    details = {"needed": 2, "present": 1}
    run.on_event(event("ClusterPaused", 7.5, reason="1 node, 2 needed", details=details))
    for pid in (11, 12, 11):  # The first event is delivered again after the second.
        details = {"device": 0, "pid": pid, "daemon_pid": 10}
        run.on_event(event("TrainerStarted", 6.0, node="a", details=details))
    report = build_report(run)
    assert report.outcome == "unfinished"
    assert report.steps[0].loss is None and report.steps[0].skipped
    assert (report.pauses[0].at_s, report.pauses[0].needed) == (2.5, 2)
    assert report.processes["a"].daemon == (10,)
    assert report.processes["a"].trainers == {"0": (11, 12)}
    assert json.loads(encode_document(report))["steps"][0]["loss"] is None


def test_nodes_that_are_set_aside_are_reported_with_the_reason_until_they_are_readmitted(event: Make) -> None:
    run = RunModel()
    run.on_event(event("StepCommitted", 5.0, step=1, details={"loss": 1.0}))
    for node in ("a", "b"):
        details = {"cause": "raised", "evidence": [], "readmit": f"ftd readmit {node}"}
        run.on_event(event("NodeQuarantined", 6.0, node=node, reason=f"{node} is set aside", details=details))
    run.on_event(event("NodeReadmitted", 7.0, node="a", details={"by": "user", "cause": "raised"}))
    report = build_report(run)
    assert [(one.node, one.at_s, one.cause) for one in report.quarantined] == [("b", 1.0, "raised")]
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(render_summary(report))
    assert "b is set aside" in console.export_text()


def test_nothing_counts_after_the_end(run_events: list[Json], event: Make) -> None:
    details = {"device": 0, "pid": 99, "daemon_pid": 10}
    report = built([*run_events, event("TrainerStarted", 1016.0, node="node-0", details=details)])
    assert report.processes == {}
    assert report.duration_s == pytest.approx(15.0)


def test_what_happens_to_the_idle_cluster_after_the_end_is_no_failure_of_the_job(
    run_events: list[Json], event: Make
) -> None:
    aside = {"cause": "unhealthy", "readmit": "ftd readmit node-8"}
    later = [
        event("NodeRejected", 90_000.0, node="node-9", reason="another version"),
        event("NodeQuarantined", 90_001.0, node="node-8", reason="a bad device", details=aside),
        event("CheckpointExportFailed", 90_002.0, reason="the disk is full"),
        event("ChaosInjected", 90_003.0, node="node-7", details={"fault": "kill", "at": 90_003.0}),
    ]
    report = built([*run_events, *later])
    assert [failure.event for failure in report.failures] == ["CheckpointExportFailed"]
    assert report.quarantined == ()
    assert "node-7" not in [fault.node for fault in report.faults]
    during = built([later[0] | {"monotonic": 1005.0}, later[1] | {"monotonic": 1006.0}, *run_events])
    assert [failure.event for failure in during.failures] == ["NodeRejected", "NodeQuarantined"]
    assert [aside.node for aside in during.quarantined] == ["node-8"]


def test_the_document_can_be_read_back(run_events: list[Json], state: Json) -> None:
    report = built(run_events, state)
    document = json.loads(encode_document(report))
    assert document["schema"] == SCHEMA_VERSION
    assert Report.from_json(document) == report


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"schema": 2}, "schema is 2"),
        ({"duration_s": "long"}, "duration_s"),
        ({"steps": [{"step": 1}]}, "missing required field"),
        ({"outcome": "perhaps"}, "outcome"),
    ],
)
def test_an_invalid_document_is_rejected_with_the_field(
    run_events: list[Json], change: Json, complaint: str
) -> None:
    document = json.loads(encode_document(built(run_events))) | change
    with pytest.raises(ReportError, match=complaint):
        Report.from_json(document)


def test_a_document_that_is_not_an_object_is_rejected() -> None:
    with pytest.raises(ReportError, match="schema is None"):
        Report.from_json([])


def test_the_schema_in_the_documentation_is_current() -> None:
    assert (DOCS / "report.schema.json").read_bytes() == schema_of(Report)


def test_every_field_is_explained_in_the_documentation() -> None:
    text = (DOCS / "report.md").read_text()
    definitions = json.loads(schema_of(Report))["$defs"]
    missing = [
        f"{name}.{field}"
        for name, d in definitions.items()
        for field in d["properties"]
        if f"`{field}`" not in text
    ]
    assert not missing


def rolled_back_run(event: Make, recovery: Make) -> list[Json]:
    """Return the events of a run in which all trainers of both nodes die at step 11 and training returns to
    the snapshot of step 7.
    """
    paused = FROM_FAULT | {"began_at": 11.2, "detected_ms": 20.0, "waited_ms": 2780.0, "total_ms": 3100.0}
    data = recovery("resumed", 2, 7, nodes=["a", "b"], detected_how="exited", detected_at=11.22)
    data |= paused | {"rolled_back_steps": 4, "tier": "memory", "recomputed_steps": 1}
    first = [
        event("StepCommitted", 10 + step / 10, step=step, generation=1, details={"loss": 1.0})
        for step in range(1, 12)
    ]
    again = [
        event("StepCommitted", 14 + step / 10, step=step, generation=2, details={"loss": 0.5})
        for step in range(8, 14)
    ]
    return [
        *first,
        event("ChaosInjected", 11.2, node="a", details={"fault": "kill", "at": 11.2}),
        event("ChaosInjected", 11.2, node="b", details={"fault": "kill", "at": 11.2}),
        event("TrainerLost", 11.22, node="a", details={"device": 0, "cause": "exited", "detail": "-9"}),
        event("TrainerLost", 11.25, node="b", details={"device": 0, "cause": "exited", "detail": "-9"}),
        event("ClusterPaused", 11.3, reason="no node is ready", details={"needed": 1, "present": 0}),
        event(
            "RolledBack",
            14.1,
            step=7,
            generation=2,
            details={"from_step": 11, "to_step": 7, "undone_steps": 4},
        ),
        *again,
        event("RecoveryCompleted", 14.9, details={"recovery": data}),
    ]


def test_a_rollback_is_a_failure_with_its_tier_and_undone_steps(event: Make, recovery: Make) -> None:
    report = built(rolled_back_run(event, recovery))
    assert [fault.generations for fault in report.faults] == [(2,), (2,)]
    (only,) = report.recoveries
    assert (only.rolled_back_steps, only.tier) == (4, "memory")
    assert (only.detected_ms, only.waited_ms, only.total_ms) == (20.0, 2780.0, 3100.0)
    assert [s.loss for s in report.steps] == [1.0] * 7 + [0.5] * 6
    text = page(report)
    assert "1 failure, 0 other changes" in text and "4 lost" in text
    back = "back to step 7 with a snapshot in the nodes' memory; 4 committed steps undone"
    assert back in text
    assert len(re.findall(r"at step 11\b", text)) == 1
    assert " ".join(describe_recovery(only, report)).count("at step 11") == 1
    assert (describe_decision(only) or "").startswith("no live replica was left: back to step 7")
    corrupt = describe_decision(replace(only, cause="corruption")) or ""
    assert corrupt.startswith("wrong gradients have reached all replicas: back to step 7")
    assert "no recovery followed" not in text


def test_the_commit_gap_of_a_rollback_begins_with_the_last_undone_step(event: Make, recovery: Make) -> None:
    events = rolled_back_run(event, recovery)
    (only,) = built(events).recoveries
    assert only.commit_gap_ms == pytest.approx((14.8 - 11.1) * 1000)
    # The journal has forgotten the undone steps.
    (unknown,) = built([one for one in events if (one["step"] or 0) < 8 or one["generation"] != 1]).recoveries
    assert unknown.commit_gap_ms is None


def test_goodput_counts_from_the_first_step_although_a_rollback_undid_it(event: Make, recovery: Make) -> None:
    def steps(first_at: float, generation: int, last: int) -> list[Json]:
        details = {"loss": 1.0, "step_s": 1.0}
        return [
            event("StepCommitted", first_at + n, step=1001 + n, generation=generation, details=details)
            for n in range(last - 1000)
        ]

    start = recovery("start", 1, 1000, detected_at=10.0, total_ms=1000.0)
    events = [
        event("JobSubmitted", 9.0, details={"name": "gpt", "steps": 1100, "job": "gpt-1", "global_batch": 2}),
        *steps(11.0, 1, 1050),
        event("RecoveryCompleted", 11.0, generation=1, details={"recovery": start}),
        event("RolledBack", 70.0, generation=2, step=1000, details={"to_step": 1000, "undone_steps": 50}),
        *steps(71.0, 2, 1100),
    ]
    run = RunModel()
    for one in events:
        run.on_event(one)
    report = build_report(run)
    assert goodput_series(report)[-1][1] == pytest.approx(100 / 160)
    assert run.goodput.ratio(170.0) == pytest.approx(100 / 160)
    assert throughput_series(report)[0][1] == 0.0


def page(report: Report) -> str:
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(render_summary(report))
    return console.export_text()
