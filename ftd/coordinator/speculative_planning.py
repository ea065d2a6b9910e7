"""Plans that are computed before they are requested, and the additional checks of a job's first plan.

Everything here runs in the planning thread. A plan for a loss is computed while the remaining nodes report
what they hold, which takes longer (``SpeculativePlan``). After each plan, the losses that are likely next
are planned for (``plan_likely_losses``): for 1,000 nodes, the step times of pipelines with new shares of
the batch take as long to compute as the plan itself, and the planner remembers them.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from msgspec.structs import replace

from planner.errors import InfeasibleError, PlanningError, StateLostError, TooFewNodesError
from planner.values import Device, Plan, Situation
from statemachine.cluster.rules import owned_layers
from statemachine.effects import PlanAhead

if TYPE_CHECKING:
    from planner.planner import Planner

SHARE_LOST = 0.1
"""Largest share of the nodes whose loss is planned for in advance."""


def expected_situation(effect: PlanAhead) -> Situation:
    """Return the situation of the next ``ComputePlan``, if every node reports the layers that the plan gave
    it.
    """
    owned = owned_layers(effect.previous)
    devices = (
        Device(node=node, index=index) for node, count in effect.devices.items() for index in range(count)
    )
    return Situation(
        nodes=tuple(effect.devices),
        holdings={device: owned.get(device, frozenset()) for device in devices},
        previous=effect.previous,
        speeds=effect.speeds,
        horizon_s=effect.horizon_s,
    )


class SpeculativePlan:
    """The plan for the newest loss, until it is requested."""

    def __init__(self) -> None:
        self._entry: tuple[Situation, Plan] | None = None

    def compute(self, planner: "Planner", effect: PlanAhead) -> None:
        """Plan for the expected situation."""
        self._entry = None
        situation = expected_situation(effect)
        try:
            self._entry = (situation, planner.plan(situation))
        except Exception:
            return  # The error is reported when the plan is requested.

    def take(self, situation: Situation) -> Plan | None:
        """Return the plan if it is for exactly this situation, else None."""
        entry, self._entry = self._entry, None
        return entry[1] if entry is not None and entry[0] == situation else None


def make_plan(planner: "Planner", situation: Situation) -> Plan:
    """Return a plan. A job must start with ``tolerance.failures`` spare nodes; later it may continue with
    fewer.

    :raises TooFewNodesError: there are too few nodes to start or to continue.
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
    """Compare a profile from a file with the model, which every node holds completely at the start.

    :raises StateLostError: their numbers of layers differ.
    """
    held = max((layer + 1 for layers in situation.holdings.values() for layer in layers), default=0)
    profiled = len(planner.profile.layers)
    if held not in (0, profiled):
        raise StateLostError(
            f"the profile has {profiled} layers and the model has {held}: correct planner.profile, or leave "
            "it out, and a node measures the model",
            tuple(range(min(held, profiled), max(held, profiled))),
        )


def plan_likely_losses(planner: "Planner", situation: Situation, plan: Plan) -> None:
    """Plan for losses after ``plan``, which was made for ``situation``, and drop the results."""
    for loss in likely_losses(situation, plan):
        try:
            planner.plan(loss)
        except PlanningError:
            return  # Neither is there a plan for fewer nodes.


def likely_losses(situation: Situation, plan: Plan) -> Iterator[Situation]:
    """Yield the loss of one node of the plan, and of a tenth of its nodes, spread over the pipelines."""
    names, owned = plan.nodes, owned_layers(plan)
    for count in sorted({1, int(SHARE_LOST * len(names))} - {0}):
        lost = frozenset(names[:: len(names) // count][:count])
        left = {device: layers for device, layers in owned.items() if device.node not in lost}
        nodes = tuple(name for name in situation.nodes if name not in lost)
        yield replace(situation, nodes=nodes, holdings=left, previous=plan, parts=None, in_memory=True)
