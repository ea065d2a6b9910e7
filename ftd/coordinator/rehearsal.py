"""What the planner will likely be asked next, asked beforehand, so that the answer is half made by then.

A plan for other numbers of nodes needs the step times of pipelines with shares of the batch that nobody has
asked for yet: of 1,000 nodes they take as long as the plan itself. The planner remembers them.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from planner.errors import PlanningError
from planner.values import Plan, Situation
from statemachine.cluster.rules import owned_layers

if TYPE_CHECKING:
    from planner.planner import Planner

SHARE_LOST = 0.1
"""Of the nodes, at most, in what is rehearsed."""


def rehearse(planner: "Planner", situation: Situation, plan: Plan) -> None:
    """Plan for losses behind ``plan``, which came of ``situation``; what comes of it is forgotten."""
    for loss in likely_losses(situation, plan):
        try:
            planner.plan(loss)
        except PlanningError:
            return  # There is none for so few nodes, nor for fewer.


def likely_losses(situation: Situation, plan: Plan) -> Iterator[Situation]:
    """One node of the plan is lost; a tenth of them are, spread over the pipelines."""
    names, owned = plan.nodes, owned_layers(plan)
    for count in sorted({1, int(SHARE_LOST * len(names))} - {0}):
        lost = frozenset(names[:: len(names) // count][:count])
        left = {device: layers for device, layers in owned.items() if device.node not in lost}
        nodes = tuple(name for name in situation.nodes if name not in lost)
        yield replace(situation, nodes=nodes, holdings=left, previous=plan, parts=None, in_memory=True)
