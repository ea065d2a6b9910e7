"""The real planner for simulated coordinators, with answers that are cached between seeds."""

from functools import lru_cache
from typing import Any

from planner.errors import PlanningError
from planner.planner import Planner
from planner.values import ModelProfile, Plan, Policy, Situation

MOST_NODES = 7


@lru_cache(maxsize=64)
def planner_for(profile: ModelProfile, policy: Policy) -> Planner:
    """Return the planner for one kind of job. Its templates serve every seed, whatever ran before."""
    planner = Planner(profile, policy)
    planner.precompute(MOST_NODES)
    return planner


_PLANS: dict[Any, Plan | PlanningError] = {}
"""Plans by situation. The planner is deterministic, so a seed's run does not depend on earlier seeds."""


def plan_for(planner: Planner, situation: Situation) -> Plan:
    """Return the plan for a situation.

    :raises PlanningError: the planner raises it.
    """
    holdings, speeds = frozenset(situation.holdings.items()), frozenset(situation.speeds.items())
    parts = None if situation.parts is None else frozenset(situation.parts.items())
    of_others = situation.previous, situation.horizon_s, situation.in_memory
    key = (id(planner), situation.nodes, holdings, speeds, parts, *of_others)
    answer = _PLANS.get(key)
    if answer is None:
        if len(_PLANS) > 20_000:
            _PLANS.clear()
        try:
            answer = planner.plan(situation)
        except PlanningError as error:
            answer = _copy(error)
        _PLANS[key] = answer
    if isinstance(answer, PlanningError):
        raise _copy(answer)
    return answer


def _copy(error: PlanningError) -> PlanningError:
    """Return an equal error without traceback: the frames of one would keep the whole simulated world alive."""
    copy = type(error).__new__(type(error), *error.args)
    copy.__dict__.update(error.__dict__)
    return copy
