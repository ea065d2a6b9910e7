"""The end of a played scenario, decided alike for the real service and the simulator."""

from typing import Any

from ftd.faults.chaos.end_condition import GRACE_S, EndCondition
from ftd.faults.chaos.record import ScenarioRecord
from ftd.faults.chaos.scenario import parse_scenario

KILL = {"id": "kill", "at_step": 3, "do": "kill", "node": "a"}


class Story:
    """A scenario and what was observed of it so far."""

    def __init__(self, fault: dict[str, Any] = KILL, **tables: Any) -> None:
        self.scenario = parse_scenario({"fault": [fault], "limit_s": 100, "steps_after": 2, **tables}, "s")
        self.record = ScenarioRecord()
        self.record.on_state({"phase": "RUNNING"})
        self.end_condition = EndCondition(self.scenario, self.record)
        self.steps = 0

    def inject(self, at_s: float) -> None:
        [fault] = self.scenario.faults
        self.record.on_injected(fault, at_s).over_at_s = at_s + fault.duration_s

    def receive(self, name: str, at_s: float) -> None:
        self.record.on_event({"event": name, "id": name, "monotonic": at_s, "details": {}}, at_s)

    def commit(self, count: int) -> None:
        for _ in range(count):
            self.steps += 1
            step = {"event": "StepCommitted", "step": self.steps, "monotonic": self.steps, "details": {}}
            self.record.on_event(step, 0.0)

    def end_reason(self, now_s: float, *, injecting: bool = False, waiting: bool = False) -> str:
        return self.end_condition.end_reason(now_s, injecting=injecting, waiting=waiting)


def test_it_ends_some_steps_after_all_expectations_are_met() -> None:
    story = Story(expect={"events": ["NodeLost"]})
    assert story.end_reason(0.5, waiting=True) == ""
    story.inject(1.0)
    story.commit(3)
    assert story.end_reason(1.1) == ""
    story.receive("NodeLost", 1.2)
    assert story.end_reason(1.3) == ""
    story.commit(1)
    assert story.end_reason(1.4) == ""
    story.commit(1)
    assert story.end_reason(1.5) == "all expectations met"


def test_it_waits_until_a_fault_is_over() -> None:
    story = Story({**KILL, "do": "disconnect", "for_s": 4.0}, steps_after=0)
    story.inject(1.0)
    assert story.end_reason(1.1, injecting=True) == ""
    assert story.end_reason(4.9) == ""
    assert story.end_reason(5.1) == "all expectations met"


def test_it_waits_for_the_default_duration_of_a_fault() -> None:
    story = Story({**KILL, "do": "disconnect"}, steps_after=0)
    story.inject(1.0)
    assert story.end_reason(5.9) == ""
    assert story.end_reason(6.1) == "all expectations met"


def test_it_waits_for_a_coordinator_to_restart() -> None:
    away = {"id": "kill", "at_step": 3, "do": "kill", "role": "coordinator", "restart_after_s": 20.0}
    story = Story(away, steps_after=0)
    story.inject(1.0)
    assert story.end_reason(20.9) == ""
    assert story.end_reason(21.1) == "all expectations met"


def test_it_does_not_wait_for_steps_while_nothing_trains() -> None:
    story = Story()
    story.inject(1.0)
    assert story.end_reason(1.1) == ""
    story.record.on_state({"phase": "PAUSED"})
    assert story.end_reason(1.2) == "all expectations met"


def test_messages_may_still_arrive_after_the_job_s_end() -> None:
    story = Story(expect={"nodes": {"a": "OFFLINE"}})
    story.inject(1.0)
    story.receive("JobFinished", 2.0)
    assert story.end_reason(2.1) == ""
    story.record.on_state({"phase": "FINISHED", "nodes": {"a": {"state": "OFFLINE"}}})
    assert story.end_reason(2.2) == "the end of the job (JobFinished)"
    story.record.on_state({"phase": "FINISHED", "nodes": {"a": {"state": "HEALTHY"}}})
    assert story.end_reason(2.1 + GRACE_S - 0.1) == ""
    assert story.end_reason(2.1 + GRACE_S + 0.1) == "the end of the job (JobFinished)"


def test_it_waits_until_a_fault_is_over_also_if_the_job_has_ended() -> None:
    story = Story({**KILL, "do": "disconnect", "for_s": 30.0}, expect={"events": ["NodeLost"]})
    story.inject(1.0)
    story.receive("JobFinished", 2.0)
    assert story.end_reason(2.1) == story.end_reason(31.0 + GRACE_S - 0.1) == ""
    assert story.end_reason(31.0 + GRACE_S + 0.1) == "the end of the job (JobFinished)"


def test_it_ends_when_an_expectation_or_a_fault_fails() -> None:
    story = Story(expect={"no_events": ["NodeLost"], "events": ["NodeJoined"]})
    story.inject(1.0)
    assert story.end_reason(1.1) == ""
    story.receive("NodeLost", 1.2)
    assert story.end_reason(1.3) == "an expectation that cannot be met any more"
    rejected = Story()
    rejected.inject(1.0)
    rejected.record.injected["kill"].problem = "a is not up"
    assert rejected.end_reason(1.1, injecting=True) == ""
    assert rejected.end_reason(1.2) == "a fault that could not be injected"
    assert Story().end_reason(100.1, waiting=True) == "the time limit of 100 s"
