"""The plan for a loss, made while the nodes that are left say what they hold, which takes longer.

Everything here happens in the planning thread, or is handed to it.
"""

from typing import TYPE_CHECKING

from planner.values import Plan, Situation
from statemachine.cluster.foresight import expected
from statemachine.effects import ForeseePlan

if TYPE_CHECKING:
    from planner.planner import Planner


class Foresight:
    """One plan at most: the newest."""

    def __init__(self) -> None:
        self._made: tuple[Situation, Plan] | None = None

    def look(self, planner: "Planner", effect: ForeseePlan) -> None:
        """Plan for what is expected."""
        self._made = None
        situation = expected(effect)
        try:
            self._made = (situation, planner.plan(situation))
        except Exception:
            return  # Whatever is wrong is said to who asks.

    def take(self, situation: Situation) -> Plan | None:
        """The plan, if it is for exactly this."""
        made, self._made = self._made, None
        return made[1] if made is not None and made[0] == situation else None
