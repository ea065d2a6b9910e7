"""The condition that ends a played scenario, the same for the real service and the simulator. It is pure: the
caller passes the time.

A scenario is over when everything expected has been observed, or cannot be any more: the job has ended, a
fault could not be injected, an expectation can no longer be met, or the time limit is reached.
"""

from ftd.faults.chaos.record import ScenarioRecord
from ftd.faults.chaos.values import Scenario
from ftd.faults.chaos.verdicts import find_statuses

GRACE_S = 10.0
"""Longest time for which states and events may still arrive after the job has ended and all faults are over."""
IDLE_PHASES = frozenset({"PAUSED", "WAITING"})
"""Phases in which no further step can be expected."""


class EndCondition:
    """The condition that ends the observation of a scenario. Call ``end_reason`` repeatedly while ``record``
    grows.
    """

    def __init__(self, scenario: Scenario, record: ScenarioRecord) -> None:
        self._scenario, self._record = scenario, record
        self._satisfied_steps: int | None = None
        """The number of commits at the time when all expectations were met."""
        self._ended_at_s: float | None = None

    def end_reason(self, now_s: float, *, injecting: bool, waiting: bool) -> str:
        """Return why the scenario is over, or an empty string while it is not.

        :param injecting: whether a due fault is being injected.
        :param waiting: whether a fault is not due yet.
        """
        scenario, record = self._scenario, self._record
        if now_s > scenario.limit_s:
            return f"the time limit of {scenario.limit_s:g} s"
        injected = record.injected.values()
        happened = not injecting and not waiting and all(one.over_at_s <= now_s for one in injected)
        met = [status.met for _, _, status in find_statuses(scenario, record)]
        satisfied = happened and None not in met
        if record.end_event:
            self._ended_at_s = now_s if self._ended_at_s is None else self._ended_at_s
            # The next scenario on this cluster must not begin with this one's faults.
            quiet_since_s = max((self._ended_at_s, *(one.over_at_s for one in injected)))
            over = satisfied or now_s > quiet_since_s + GRACE_S
            return f"the end of the job ({record.end_event})" if over else ""
        if any(one.problem for one in injected) and not injecting:
            return "a fault that could not be injected"
        if False in met:
            return "an expectation that cannot be met any more"
        if not satisfied:
            self._satisfied_steps = None
            return ""
        if self._satisfied_steps is None:
            self._satisfied_steps = record.commits
        enough = record.commits >= self._satisfied_steps + scenario.steps_after
        return "all expectations met" if enough or record.state.get("phase") in IDLE_PHASES else ""
