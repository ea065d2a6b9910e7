"""Tests of evaluations in the cluster machine: each result is reported once, whatever fails."""

import math
from typing import Any

from msgspec.structs import replace

from planner.values import Device
from statemachine.cluster.rules import Resumption, decide
from statemachine.effects import EmitEvent
from statemachine.events import NodeVanished, SubmitRequested, TemplatesReady
from statemachine.messages.cluster import Heartbeat, RequestSteps, Resume, Stepped
from statemachine.messages.common import Finished
from statemachine.messages.values import CheckpointRecord, ClusterPhase, CommittedStep, Evaluation
from tests.helpers.cluster_machine import restarted
from tests.helpers.transcripts import Coordination, committed, job, report, vote


def evaluation(loss: float = 0.5) -> Evaluation:
    return Evaluation(loss=loss, weight=37.0, metrics={"accuracy": 0.25}, took_s=2.0)


def after(step: int, found: Evaluation | None = None) -> CommittedStep:
    """Return step ``step`` as it is committed after an evaluation of the state before it."""
    return CommittedStep(step=step, vote=replace(vote(step), evaluation=found or evaluation()))


def running(steps: int = 10) -> Coordination:
    """Start four nodes and commit step 1."""
    s = Coordination()
    s.running(4, steps)
    return s


def stepped(
    s: Coordination, generation: int, *steps: CommittedStep, node: str = "node-0", **more: Any
) -> None:
    s.say(node, Stepped(generation=generation, steps=steps, step_s=0.1, **more))


def published(s: Coordination) -> list[tuple[str, int | None]]:
    """Return the steps and evaluations among the last effects."""
    return [
        (e.name, e.step) for e in s.all(EmitEvent) if e.name in ("StepCommitted", "Evaluated", "JobFinished")
    ]


def resumed(s: Coordination) -> set[int]:
    return {to_one.command.evaluated for to_one in s.commands(Resume)}


def test_an_evaluation_is_published_between_its_step_and_the_next() -> None:
    s = running()
    stepped(s, 1, committed(2), after(3), committed(4))
    assert published(s) == [
        ("StepCommitted", 2),
        ("Evaluated", 2),
        ("StepCommitted", 3),
        ("StepCommitted", 4),
    ]
    (event,) = [e for e in s.all(EmitEvent) if e.name == "Evaluated"]
    assert event.details == {"loss": 0.5, "weight": 37.0, "metrics": {"accuracy": 0.25}, "took_s": 2.0}
    stepped(s, 1, after(3))  # Comes twice.
    assert published(s) == []


def test_an_evaluation_that_only_a_heartbeat_shows_is_published() -> None:
    s = running()
    s.say("node-1", Heartbeat(generation=1, committed=after(2)))
    heard = []
    for _ in range(8):
        for number in range(4):
            s.say(f"node-{number}", Heartbeat(generation=1, committed=after(2)))
        s.fire("tick", 0.25)
        heard += published(s)
    assert heard == [("Evaluated", 1), ("StepCommitted", 2)]


def test_an_evaluation_in_a_gap_is_published_with_the_missed_steps() -> None:
    s = running()
    stepped(s, 1, committed(4))
    (asked,) = s.commands(RequestSteps)
    assert published(s) == []
    stepped(s, 1, committed(2), after(3), node=asked.node, requested_first=2)
    assert published(s) == [
        ("StepCommitted", 2),
        ("Evaluated", 2),
        ("StepCommitted", 3),
        ("StepCommitted", 4),
    ]


def failure(s: Coordination) -> None:
    s.feed(NodeVanished, node="node-3", incarnation=103)


def test_a_trainer_stopped_after_an_evaluation_reports_it_and_it_is_not_repeated() -> None:
    s = running()
    failure(s)
    known = replace(report(1), evaluation=evaluation())
    s.quiesced("node-0", 2, report(1))
    s.quiesced("node-1", 2, known)
    s.quiesced("node-2", 2, replace(report(1), evaluation=evaluation(0.6)))
    assert published(s) == [("Evaluated", 1)]
    s.plan()
    assert resumed(s) == {1}
    # Other nodes may have a different result of the same step, but it was published.
    stepped(s, 2, after(2, evaluation(0.7)))
    assert published(s) == [("StepCommitted", 2)]


def test_an_evaluation_that_was_not_finished_is_repeated() -> None:
    s = running()
    failure(s)
    for node in ("node-0", "node-1", "node-2"):
        s.quiesced(node, 2, report(1))
    s.plan()
    assert resumed(s) == {0}
    stepped(s, 2, after(2))
    assert published(s) == [("Evaluated", 1), ("StepCommitted", 2)]


def test_roll_forward_publishes_the_evaluation_that_the_vote_carries() -> None:
    s = running()
    failure(s)
    ahead = replace(report(2), vote=after(2).vote)
    s.quiesced("node-0", 2, ahead)
    for node in ("node-1", "node-2"):
        s.quiesced(node, 2, replace(report(1, ready=True), evaluation=evaluation()))
    assert published(s) == [("Evaluated", 1), ("StepCommitted", 2)]
    s.plan()
    assert resumed(s) == {1}


def test_reports_of_another_step_or_lineage_say_nothing_of_this_one() -> None:
    resumption = Resumption(generation=5, step=1, vote=vote(1), plan=None, lineage=3)  # type: ignore[arg-type]
    behind = replace(report(1), evaluation=evaluation(), lineage=3)
    stranger = replace(report(2), evaluation=evaluation())
    reports = {"a": (replace(report(2), lineage=3),), "b": (behind,), "c": (stranger,)}
    assert decide(reports, None, resumption, "abort").evaluation is None
    reports["a"] = (replace(reports["a"][0], evaluation=evaluation(0.1)),)
    decision = decide(reports, None, resumption, "abort")
    assert decision.evaluation == evaluation(0.1) and Device(node="a", index=0) in decision.holdings


def test_a_restarted_coordinator_neither_repeats_nor_loses_an_evaluation() -> None:
    s = running()
    stepped(s, 1, after(2))
    other = restarted(s)
    stepped(other, 1, after(2), after(3))
    assert published(other) == [("Evaluated", 2), ("StepCommitted", 3)]
    other.feed(TemplatesReady, job_id="job-1")
    failure(other)
    for node in ("node-0", "node-1", "node-2"):
        other.quiesced(node, 2, report(3))
    other.plan()
    again = restarted(other)
    again.now += 1.0
    again.hello("node-1", 101, job_id="job-1", prepared=True, generation=2, quiesced=True)
    assert resumed(again) == {2}  # It was published before.


def test_the_last_evaluation_comes_with_the_end_of_the_job() -> None:
    s = running(steps=2)
    stepped(s, 1, committed(2))
    for number in range(4):
        assert s.machine.phase is ClusterPhase.RUNNING
        s.say(f"node-{number}", Finished(generation=1, step=2, digests={}, evaluation=evaluation()))
        assert published(s) == {0: [("Evaluated", 2)], 3: [("JobFinished", 2)]}.get(number, [])
    assert s.machine.phase is ClusterPhase.FINISHED


def test_the_last_evaluation_waits_for_steps_that_were_missed() -> None:
    s = running(steps=3)
    stepped(s, 1, committed(3))
    for number in range(4):
        s.say(f"node-{number}", Finished(generation=1, step=3, digests={}, evaluation=evaluation()))
        assert published(s) == []
    stepped(s, 1, committed(2), requested_first=2)
    assert published(s) == [("StepCommitted", 2), ("StepCommitted", 3), ("Evaluated", 3), ("JobFinished", 3)]


def test_a_job_that_begins_from_a_checkpoint_does_not_evaluate_it() -> None:
    s = Coordination()
    s.feed(
        SubmitRequested,
        request="r",
        job=job(),
        start_checkpoint=CheckpointRecord(step=6, vote=vote(6), layers=4),
    )
    assert s.machine.durable_state()["evaluated"] == 6


def test_a_loss_that_is_not_a_number_is_reported_as_such() -> None:
    s = running()
    stepped(s, 1, after(2, evaluation(math.nan)))
    (event,) = [e for e in s.all(EmitEvent) if e.name == "Evaluated"]
    assert math.isnan(event.details["loss"]) and "nan" in event.reason
