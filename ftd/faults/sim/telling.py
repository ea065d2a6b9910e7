"""What the world hears: everything that a journal at the broker says was decided, and nothing twice."""

from typing import TYPE_CHECKING, Any

from ftd.faults.sim.disk import Copy
from statemachine.cluster.durable.outbox import OUTBOX
from statemachine.effects import EmitEvent

if TYPE_CHECKING:
    from ftd.faults.sim.invariants import Invariants


class Telling:
    """Of all coordinators together, whichever of them tells."""

    def __init__(self, truth: "Invariants") -> None:
        self._truth = truth
        self._heard: dict[str, EmitEvent] = {}
        self._due: dict[str, Any] = {}
        """Decided in a journal that was at the broker, and not heard yet."""
        self.losses = 0
        """Times that the newest journals were lost, and what they said with them."""

    def decided(self, copy: Copy) -> None:
        """At the broker."""
        self._due |= {number: event for number, event in copy.journal[OUTBOX] if number not in self._heard}

    def is_news(self, number: str, event: EmitEvent) -> bool:
        """Somebody who drops what comes twice looks at its id; without one it is told but once."""
        if not number:
            return True
        self._due.pop(number, None)
        if number not in self._heard:
            self._heard[number] = event
            return True
        if self._heard[number] != event:
            self._truth.broken(f"{number} is {self._heard[number]}, and then {event}")
        return False

    def lose(self) -> None:
        """Nobody has the newest journals any more."""
        self.losses += 1
        self._due.clear()

    def complete(self) -> None:
        """At the end everything was told."""
        if self._due:
            self._truth.broken(f"decided, and never told: {list(self._due.values())}")
