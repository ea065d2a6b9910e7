"""The answers to the machine's questions to the planner, as events: the plan with its protection, whether nodes may
leave, what another plan would save, or the reason why there is no plan.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

import structlog

from ftd.coordinator.plan_worker import explain
from ftd.coordinator.protection_choice import choose_protection
from planner.errors import PlanningError, StateLostError, TooFewNodesError
from planner.values import Plan, Situation
from statemachine.effects import CheckDrain, ComparePlan, ComputePlan
from statemachine.events import DrainChecked, PlanCompared, PlanImpossible, PlanReady

if TYPE_CHECKING:
    from planner.planner import Planner

_log = structlog.get_logger("ftd.planning")

PlanQuestion = ComputePlan | CheckDrain | ComparePlan
PlanAnswer = PlanReady | PlanImpossible | DrainChecked | PlanCompared


def answer_question(
    effect: PlanQuestion,
    planner: "Planner",
    make: Callable[["Planner", Situation], Plan],
    now: Callable[[], float],
) -> PlanAnswer:
    """Return the event that answers ``effect``. For a drain a plan is made as for a generation, and dropped.

    :param make: returns the planner's plan for a situation, or raises PlanningError.
    :param now: returns the time of the answer, when it is known.
    """
    cause, generation = effect.cause, effect.generation
    try:
        match effect:
            case ComputePlan(protection=wish):
                plan = make(planner, effect.situation)
                protection = None if wish is None else choose_protection(plan, planner.profile.layers, wish)
                return PlanReady(
                    at=now(), cause=cause, generation=generation, plan=plan, protection=protection
                )
            case CheckDrain(nodes=nodes):
                make(planner, effect.situation)
                return DrainChecked(at=now(), cause=cause, generation=generation, nodes=nodes, problem=None)
            case ComparePlan():
                current_s, best_s = planner.compare_iteration_s(effect.situation)
                return PlanCompared(
                    at=now(), cause=cause, generation=generation, current_s=current_s, best_s=best_s
                )
    except PlanningError as error:
        if isinstance(effect, ComparePlan):
            _log.warning("comparison_failed", generation=generation, cause=cause, error=explain(error))
        return answer_without_plan(effect, explain(error), now(), error)


def answer_without_plan(
    effect: PlanQuestion, reason: str, at: float, error: PlanningError | None = None
) -> PlanAnswer:
    """Return the event that answers ``effect`` if there is no plan.

    :param error: the planner's error; ``None``: the planner has a bug, or there is none.
    """
    cause, generation = effect.cause, effect.generation
    match effect:
        case ComputePlan():
            return PlanImpossible(
                at=at,
                cause=cause,
                generation=generation,
                too_few=isinstance(error, TooFewNodesError),
                needed=error.needed if isinstance(error, TooFewNodesError) else None,
                reason=reason,
                lost_layers=error.layers if isinstance(error, StateLostError) else (),
            )
        case CheckDrain(nodes=nodes):
            return DrainChecked(at=at, cause=cause, generation=generation, nodes=nodes, problem=reason)
        case ComparePlan():  # There is no better plan, for whatever reason.
            return PlanCompared(at=at, cause=cause, generation=generation, current_s=0.0, best_s=0.0)
