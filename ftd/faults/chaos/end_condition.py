"""When a played scenario is over: one answer, whether it is real or simulated. Pure: time comes in.

Over is what has come, or cannot come any more: the job's end, a fault that could not be done, an expectation
that nothing can make good, the time limit.
"""

from ftd.faults.chaos.record import ScenarioRecord
from ftd.faults.chaos.values import Scenario
from ftd.faults.chaos.verdicts import broken, open_ones

GRACE_S = 10.0
"""When the job is over, states and events may still be under way for so long."""
STANDSTILLS = frozenset({"PAUSED", "WAITING"})
"""Phases in which no step can be waited for."""


class EndCondition:
    """Looked at again and again while ``record`` grows."""

    def __init__(self, scenario: Scenario, record: ScenarioRecord) -> None:
        self._scenario, self._record = scenario, record
        self._satisfied_steps: int | None = None
        """How many commits there were when everything had come."""
        self._ended_at_s: float | None = None

    def why(self, now_s: float, *, under_way: bool, to_come: bool) -> str:
        """Why nothing more is to be seen; empty while there is.

        :param under_way: a fault that is due is being done.
        :param to_come: one has its moment yet to come.
        """
        scenario, record = self._scenario, self._record
        if now_s > scenario.limit_s:
            return f"the limit of {scenario.limit_s:g} s"
        struck = record.struck.values()
        happened = not under_way and not to_come and all(one.over_at_s <= now_s for one in struck)
        satisfied = happened and not open_ones(scenario, record)
        if record.ended:
            self._ended_at_s = now_s if self._ended_at_s is None else self._ended_at_s
            over = satisfied or now_s > self._ended_at_s + GRACE_S
            return f"the job's end ({record.ended})" if over else ""
        if any(one.problem for one in struck) and not under_way:
            return "a fault that could not be done"
        if broken(scenario, record):
            return "an expectation that cannot be met any more"
        if not satisfied:
            self._satisfied_steps = None
            return ""
        if self._satisfied_steps is None:
            self._satisfied_steps = record.steps
        enough = record.steps >= self._satisfied_steps + scenario.steps_after
        return "everything has come" if enough or record.state.get("phase") in STANDSTILLS else ""
