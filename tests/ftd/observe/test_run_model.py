"""The run model: how it folds events, including repeated and late ones."""

from itertools import count
from typing import Any

import pytest

from ftd.observe.run_model import (
    DetectionFact,
    Fact,
    RecoveryCompletedFact,
    RolledBackFact,
    RunModel,
    StepCommittedFact,
)

Json = dict[str, Any]
_NUMBERS = count()


def event(name: str, at: float, /, *, node: str | None = None, generation: int = 1, **details: Any) -> Json:
    number = next(_NUMBERS)
    known = {"event": name, "id": f"e-{number}", "cause": f"c-{number}", "reason": f"because of {name}"}
    return {
        **known,
        "node": node,
        "generation": generation,
        "step": None,
        "monotonic": at,
        "details": details,
    }


def commit(step: int, at: float, *, generation: int = 1, loss: float | None = 1.0) -> Json:
    return {**event("StepCommitted", at, generation=generation, loss=loss, step_s=0.5), "step": step}


def test_a_repeated_event_is_folded_once() -> None:
    run, committed = RunModel(), commit(1, 10.0)
    assert isinstance(run.on_event(committed), StepCommittedFact)
    assert run.on_event(committed) is None
    without_id = {**commit(2, 11.0), "id": ""}
    assert run.on_event(without_id) is not None
    assert run.on_event(dict(without_id)) is None
    assert (run.commits, run.step) == (2, 2)


def test_a_journal_row_of_a_known_step_changes_nothing() -> None:
    run = RunModel()
    run.on_event(commit(1, 10.0))
    before = run.goodput.ratio(20.0)
    row = {
        "event": "StepCommitted",
        "step": 1,
        "generation": 1,
        "monotonic": 10.001,
        "details": {"loss": 1.0},
    }
    fact = run.on_event(row)
    assert isinstance(fact, StepCommittedFact) and not fact.fresh
    assert run.steps[1].at == 10.0
    assert run.goodput.ratio(20.0) == before


def test_a_rollback_undoes_later_steps_and_repeated_steps_count() -> None:
    run = RunModel()
    run.on_state({"phase": "RUNNING", "step": 5, "job": {"id": "gpt-1", "steps": 9}})
    for step in range(1, 6):
        run.on_event(commit(step, 10.0 + step))
    fact = run.on_event(event("RolledBack", 16.0, generation=2, to_step=3))
    assert isinstance(fact, RolledBackFact) and fact.undone_s == pytest.approx(1.0)
    assert (run.step, run.state["step"]) == (3, 3)
    again = run.on_event(commit(4, 17.0, generation=2, loss=0.5))
    assert isinstance(again, StepCommittedFact) and again.fresh
    late = run.on_event(commit(5, 15.1))  # The step of the old generation, from another source.
    assert isinstance(late, StepCommittedFact) and not late.fresh and run.step == 4
    assert [(one.step, one.generation) for one in run.exclude_undone(run.steps)] == [
        (1, 1),
        (2, 1),
        (3, 1),
        (4, 2),
    ]


def test_the_timeline_of_a_recovery_with_two_attempts() -> None:
    run = RunModel()
    lost = run.on_event(event("NodeLost", 10.0, node="b", how="last_will", detected_at=9.95, fault_at=9.9))
    assert isinstance(lost, DetectionFact) and (lost.fault_at, lost.detected_at) == (9.9, 9.95)
    run.on_event(event("GenerationStarted", 10.1, generation=2, mode="abort"))
    run.on_event(event("Quiesced", 10.2, generation=2, decision="redo"))
    run.on_event(event("NodeLost", 10.3, node="c", how="silence"))
    run.on_event(event("GenerationStarted", 10.4, generation=3, mode="abort"))
    run.on_event(event("PlanChosen", 10.5, generation=2))  # It belongs to the abandoned attempt.
    for name, at in (("Quiesced", 10.6), ("PlanChosen", 10.7), ("TrainingResumed", 10.8)):
        run.on_event(event(name, at, generation=3, decision="roll_forward"))
    course = run.current_recovery
    assert course is not None and course.attempts == 2
    assert [loss.node for loss in course.losses] == ["b", "c"]
    assert course.phases == (
        ("detect", 9.9, 10.0), ("quiesce", 10.0, 10.6), ("plan", 10.6, 10.7), ("state", 10.7, 10.8),
        ("resume", 10.8, None),
    )  # fmt: skip
    committed = {
        "generation": 3,
        "cause": "node_lost",
        "detected_at": 9.95,
        "total_ms": 1000.0,
        "a_new_field": 1,
    }
    completed = run.on_event(event("RecoveryCompleted", 10.95, generation=3, recovery=committed))
    assert (
        isinstance(completed, RecoveryCompletedFact)
        and completed.timeline == course
        and completed.recovery.failure
    )
    assert run.current_recovery is None and run.decisions == {2: "redo", 3: "roll_forward"}
    assert run.started_generation == run.completed_generation == 3


def test_another_job_resets_the_model_and_the_same_job_does_not() -> None:
    run = RunModel()
    run.on_event(event("JobSubmitted", 1.0, job="gpt-1", name="gpt", steps=9))
    run.on_event(commit(1, 2.0))
    run.on_event(event("JobSubmitted", 2.5, job="gpt-1", name="gpt", steps=9))
    assert run.step == 1
    run.on_event(event("JobStopped", 3.0))
    assert run.ended is not None
    run.on_event(event("JobSubmitted", 4.0, job="gpt-2", name="gpt", steps=5))
    assert (run.step, run.steps, run.ended, run.job.id, run.job.steps) == (0, {}, None, "gpt-2", 5)


def test_a_job_that_the_state_shows_before_its_event_resets_the_model_once() -> None:
    run = RunModel()
    run.on_event(event("JobSubmitted", 1.0, job="gpt-1", name="gpt", steps=9))
    run.on_event(commit(9, 2.0))
    run.on_state({"phase": "WAITING", "step": 0, "job": {"id": "gpt-2", "name": "gpt", "steps": 5}})
    assert run.step == 0
    run.on_event(event("GenerationStarted", 3.0, generation=2, mode="boundary"))
    run.on_event(event("RecoveryCompleted", 3.5, generation=2, recovery={"generation": 2, "cause": "start"}))
    assert run.start is not None and not run.recoveries, "the first plan is no recovery"
    run.on_event(event("JobSubmitted", 2.9, job="gpt-2", name="gpt", steps=5))
    first = run.on_event(commit(1, 4.0, generation=2))
    assert isinstance(first, StepCommittedFact) and first.fresh
    assert run.start is not None and run.start.recovery.generation == 2


def test_a_bounded_model_drops_old_entries() -> None:
    run = RunModel(most=10)
    for number in range(1, 101):
        run.on_event(commit(number, float(number)))
        run.on_event(event("NodeLost", float(number), node=f"n-{number}", how="silence"))
        run.on_event(event("ClusterPaused", float(number)))
        layout = [{"stages": [], "microbatches": 1}]
        recovery = {"generation": number, "pipelines_before": layout, "pipelines_after": layout}
        run.on_event(event("RecoveryCompleted", float(number), recovery=recovery))
    assert list(run.recoveries) == list(range(91, 101))
    assert not any(one.recovery.pipelines_after for one in run.recoveries.values())
    assert (len(run.steps), len(run.detections), len(run.pauses)) == (10, 10, 10)
    assert (run.step, run.commits) == (100, 100)


def test_a_coordinators_last_will_keeps_the_known_state() -> None:
    run = RunModel()
    run.on_state({"phase": "RUNNING", "step": 5, "leader": "a", "nodes": {"n": {"state": "HEALTHY"}}})
    run.on_state({"phase": "UNREACHABLE", "reason": "it is gone"})
    assert (run.state["phase"], run.state["reason"], run.state["leader"]) == ("UNREACHABLE", "it is gone", "")
    assert run.state["nodes"] == {"n": {"state": "HEALTHY"}}
    fact = run.on_event(event("NodeJoined", 6.0, node="n"))
    assert type(fact) is Fact and fact.event == "NodeJoined"
