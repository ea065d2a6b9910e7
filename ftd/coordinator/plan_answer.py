"""The answers to ``ComputePlan`` and ``CheckDrain`` as events: the plan with its protection, or the reason why
there is none.
"""

from collections.abc import Callable

from ftd.coordinator.plan_worker import explain
from ftd.coordinator.protection_choice import choose_protection
from planner.errors import PlanningError, StateLostError, TooFewNodesError
from planner.values import LayerProfile, Plan, Situation
from statemachine.effects import CheckDrain, ComputePlan
from statemachine.events import DrainChecked, PlanImpossible, PlanReady


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


def answer_drain_check(
    effect: CheckDrain, make: Callable[[Situation], Plan], now: Callable[[], float]
) -> DrainChecked:
    """Return the event that answers ``effect``. The plan is made as for a generation, and dropped.

    :param make: returns a plan, or raises PlanningError.
    """
    problem = None
    try:
        make(effect.situation)
    except PlanningError as error:
        problem = explain(error)
    return DrainChecked(
        at=now(), cause=effect.cause, generation=effect.generation, nodes=effect.nodes, problem=problem
    )
