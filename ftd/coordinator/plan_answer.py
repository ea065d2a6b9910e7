"""The answer to ``ComputePlan`` as an event: the plan with its protection, or the reason why there is none."""

from collections.abc import Callable

from ftd.coordinator.plan_worker import explain
from ftd.coordinator.protection_choice import choose_protection
from planner.errors import PlanningError, StateLostError, TooFewNodesError
from planner.values import LayerProfile, Plan, Situation
from statemachine.effects import ComputePlan
from statemachine.events import PlanImpossible, PlanReady


def answer_plan(
    effect: ComputePlan,
    make: Callable[[Situation], Plan],
    layers: tuple[LayerProfile, ...],
    now: Callable[[], float],
) -> PlanReady | PlanImpossible:
    """Return the event that answers ``effect``.

    :param make: returns a plan, or raises PlanningError.
    :param now: returns the time of the answer, when it is known.
    """
    try:
        plan = make(effect.situation)
    except PlanningError as error:
        return PlanImpossible(
            at=now(),
            cause=effect.cause,
            generation=effect.generation,
            too_few=isinstance(error, TooFewNodesError),
            needed=error.needed if isinstance(error, TooFewNodesError) else None,
            reason=explain(error),
            lost_layers=error.layers if isinstance(error, StateLostError) else (),
        )
    wish = effect.protection
    return PlanReady(
        at=now(),
        cause=effect.cause,
        generation=effect.generation,
        plan=plan,
        protection=None if wish is None else choose_protection(plan, layers, wish),
    )
