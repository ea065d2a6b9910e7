"""A job's first plan has to meet more than those after failures: see ``first_or_next_plan``."""

from typing import TYPE_CHECKING

from planner.errors import InfeasibleError, StateLostError, TooFewNodesError
from planner.values import Plan, Situation

if TYPE_CHECKING:
    from planner.planner import Planner


def first_or_next_plan(planner: "Planner", situation: Situation) -> Plan:
    """A plan; a job must start with its ``tolerance.failures`` to spare, later it may go on with less.

    :raises TooFewNodesError: too few nodes to start or to go on.
    :raises StateLostError: no usable device holds some layer, or the profile is of another model.
    """
    if situation.previous is None:
        _check_layers(planner, situation)
        present = len(situation.nodes)
        try:
            planner.check_tolerance(present)
        except InfeasibleError as error:
            needed = (planner.policy.tolerate + 1) * planner.n0
            raise TooFewNodesError(str(error), needed=needed, present=present) from None
    return planner.plan(situation)


def _check_layers(planner: "Planner", situation: Situation) -> None:
    """At the start everybody holds the whole model, so a profile from a file can be compared with it.

    :raises StateLostError: they have different numbers of layers.
    """
    held = max((layer + 1 for layers in situation.holdings.values() for layer in layers), default=0)
    profiled = len(planner.profile.layers)
    if held not in (0, profiled):
        raise StateLostError(
            f"the profile has {profiled} layers and the model has {held}: correct planner.profile, or leave "
            "it out, and a node measures the model",
            tuple(range(min(held, profiled), max(held, profiled))),
        )
