"""Verdicts about scenarios: what was told, and when, against what was expected."""

from typing import Any

import pytest

from ftd.chaos import values as v
from ftd.chaos.judge import Judge, Verdict

KILL = v.Fault(id="one", trigger=v.AtStep(step=5), do="kill", target=v.Nodes(names=("node-1",)))


def told(name: str, step: int = 0, **details: Any) -> dict[str, Any]:
    return {"event": name, "step": step, "reason": "", "details": details}


def recovery(cause: str, tier: str = "live_replica", rolled_back: int = 0, again: int = 1) -> dict[str, Any]:
    facts = {"cause": cause, "tier": tier, "rolled_back_steps": rolled_back, "recomputed_steps": again}
    return told("RecoveryCompleted", recovery=facts)


def state(phase: str, **nodes: str) -> dict[str, Any]:
    found = {name.replace("_", "-"): {"state": state} for name, state in nodes.items()}
    return {"phase": phase, "nodes": found}


def judged(*expect: v.Expectation, faults: tuple[v.Fault, ...] = (KILL,), **more: Any) -> Judge:
    return Judge(scenario=v.Scenario(faults=faults, expect=expect, **more), reference={6: 0.5, 7: 0.25})


def play(judge: Judge, *, loss: float = 0.5, cause: str = "node_lost", tier: str = "live_replica") -> None:
    """The start, a kill at 10 s, a recovery 2 s later, and a few steps."""
    judge.on_event(recovery("start"), 1.0)
    judge.on_event(told("StepCommitted", 5, loss=1.0), 9.0)
    judge.struck(KILL, 10.0)
    judge.on_event(told("NodeLost"), 10.5)
    judge.on_state(state("RUNNING", node_0="HEALTHY", node_1="OFFLINE"), 11.0)
    judge.on_event(told("StepCommitted", 6, loss=loss), 12.0)
    judge.on_event(recovery(cause, tier, rolled_back=2), 12.0)
    for step in (7, 8, 9):
        judge.on_event(told("StepCommitted", step, loss=0.25), 13.0)


MET_AND_NOT: list[tuple[v.Expectation, v.Expectation, str]] = [
    (v.ResumedWithin(limit_s=2.5), v.ResumedWithin(limit_s=1.5), "after 2.000 s"),
    (v.StepsLost(most=2), v.StepsLost(most=1), "2 undone"),
    (v.StepsRecomputed(most=1), v.StepsRecomputed(most=0), "1 computed again"),
    (v.Recoveries(most=1), v.Recoveries(most=0), "1 seen (node_lost)"),
    (v.Tier(allowed=("live_replica",)), v.Tier(allowed=("none", "decoded")), "live_replica"),
    (v.Cause(allowed=("node_lost",)), v.Cause(allowed=("trainer_lost",)), "node_lost"),
    (v.Seen(event="NodeLost"), v.Seen(event="JobFailed"), "seen 0 times"),
    (v.NotSeen(event="JobFailed"), v.NotSeen(event="NodeLost"), "seen 1 times"),
    (v.InState(phase="RUNNING"), v.InState(phase="PAUSED"), "RUNNING"),
]


@pytest.mark.parametrize(("met", "failed", "said"), MET_AND_NOT, ids=lambda case: type(case).__name__)
def test_each_expectation_is_met_or_not(met: v.Expectation, failed: v.Expectation, said: str) -> None:
    judge = judged(met, failed)
    play(judge)
    verdicts = {verdict.what: verdict for verdict in judge.conclude()}
    assert verdicts[str(met)].status == "met"
    assert verdicts[str(failed)] == Verdict(fault="", what=str(failed), status="failed", detail=said)


def test_states_of_nodes() -> None:
    wanted = v.NodeStates(states=(("node-0", "HEALTHY"), ("node-1", "OFFLINE")))
    other = v.NodeStates(states=(("node-1", "HEALTHY"), ("node-9", "HEALTHY")))
    judge = judged(wanted, other)
    play(judge)
    first, second, *_ = judge.conclude()
    assert (first.status, second.status) == ("met", "failed")
    assert second.detail == "node-1 OFFLINE, node-9 unknown"


def test_losses_are_those_of_the_undisturbed_run() -> None:
    for loss, wanted in ((0.5, "met"), (0.5 + 1e-3, "failed")):
        judge = judged(v.SameLosses(relative=1e-6))
        play(judge, loss=loss)
        assert judge.conclude()[0].status == wanted


def test_nothing_to_compare_with_is_not_equal() -> None:
    judge = Judge(scenario=v.Scenario(faults=(KILL,), expect=(v.SameLosses(relative=1e-6),)))
    play(judge)
    assert judge.conclude()[0].status == "failed"


def test_the_tier_is_that_of_the_failure_and_not_of_the_return() -> None:
    judge = judged(v.Tier(allowed=("decoded",)))
    play(judge, tier="decoded")
    judge.on_event(recovery("node_returned", "live_replica"), 14.0)
    assert judge.conclude()[0].status == "met"


def test_a_fault_answers_for_its_own_window() -> None:
    first = v.Fault(**{**fields(KILL), "expect": (v.Recoveries(most=1), v.NotSeen(event="TrainerLost"))})
    second = v.Fault(**{**fields(KILL), "id": "two", "expect": (v.Seen(event="TrainerLost"),)})
    judge = judged(faults=(first, second))
    judge.struck(first, 1.0)
    judge.on_event(recovery("node_lost"), 2.0)
    assert not judge.settled
    assert "two" in judge.waiting_for
    judge.struck(second, 3.0)
    judge.on_event(told("TrainerLost"), 3.1)
    judge.on_event(recovery("trainer_lost"), 4.0)
    for step in (1, 2, 3):
        assert not judge.settled
        judge.on_event(told("StepCommitted", step), 5.0)
    assert judge.settled
    assert {verdict.status for verdict in judge.conclude()} == {"met"}


def test_faults_of_one_moment_share_their_window() -> None:
    expect = (v.Cause(allowed=("node_lost",)),)
    faults = tuple(v.Fault(**{**fields(KILL), "id": name, "expect": expect}) for name in ("one", "two"))
    judge = judged(faults=faults, steps_after=0)
    judge.struck(faults[0], 1.0)
    judge.struck(faults[1], 1.01)
    judge.on_event(recovery("node_lost"), 2.0)
    assert judge.settled
    assert {verdict.status for verdict in judge.conclude()} == {"met"}


def test_a_fault_that_never_struck_or_was_refused_fails_and_a_skipped_one_does_not() -> None:
    seen = (v.Seen(event="NodeLost"),)
    never, refused, skipped = (
        v.Fault(**{**fields(KILL), "id": name, "expect": seen}) for name in ("never", "refused", "skipped")
    )
    judge = judged(faults=(never, refused, skipped), steps_after=0)
    judge.refused(refused, "chaos is off there")
    judge.skipped(skipped, "there is no such thing here")
    by_fault: dict[str, set[str]] = {}
    for verdict in judge.conclude():
        by_fault.setdefault(verdict.fault, set()).add(verdict.status)
    assert by_fault == {"never": {"failed"}, "refused": {"failed"}, "skipped": {"skipped"}}


def test_steps_must_follow_unless_the_scenario_ends_in_a_standstill() -> None:
    judge = judged(v.InState(phase="PAUSED"))
    judge.struck(KILL, 1.0)
    assert not judge.settled
    judge.on_state(state("PAUSED"), 2.0)
    assert judge.settled
    assert [verdict.status for verdict in judge.conclude()] == ["met"]
    judge = judged(v.InState(phase="RUNNING"))
    judge.struck(KILL, 1.0)
    judge.on_state(state("RUNNING"), 2.0)
    assert not judge.settled
    assert judge.waiting_for == "3 more steps"
    assert [verdict.status for verdict in judge.conclude()] == ["met", "failed"]


def test_a_second_delivery_changes_nothing() -> None:
    judge = judged(v.Recoveries(most=1))
    judge.struck(KILL, 1.0)
    event = {**recovery("node_lost"), "id": "e-1"}
    judge.on_event(event, 2.0)
    judge.on_event(event, 2.5)
    assert judge.conclude()[0].status == "met"


def test_a_job_that_is_over_settles_everything() -> None:
    judge = judged(v.Finishes(), v.Seen(event="NodeLost"))
    judge.struck(KILL, 1.0)
    judge.on_event({**told("JobFailed"), "reason": "layer 3 is lost"}, 2.0)
    assert judge.settled
    finishes, seen = judge.conclude()
    assert (finishes.status, finishes.detail) == ("failed", "JobFailed: layer 3 is lost")
    assert seen.status == "failed"


def test_what_nobody_can_see_is_not_judged() -> None:
    losses = v.SameLosses(relative=1e-6)
    judge = judged(losses, steps_after=0)
    judge.unjudged(losses, "no losses here")
    judge.struck(KILL, 1.0)
    assert judge.conclude()[0].status == "skipped"


def fields(fault: v.Fault) -> dict[str, Any]:
    return {name: getattr(fault, name) for name in v.Fault.__dataclass_fields__}
