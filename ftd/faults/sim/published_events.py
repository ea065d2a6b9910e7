"""What the world hears: everything that a journal at the broker says was decided, and nothing twice."""

from collections.abc import Iterable

import msgspec

from ftd.faults.sim.oracle import Oracle
from ftd.transport.wire.public import EventMessage


class PublishedEvents:
    """Of all coordinators together, whichever of them tells."""

    def __init__(self, truth: Oracle) -> None:
        self._truth = truth
        self._heard: dict[str, EventMessage] = {}
        self._due: dict[str, str] = {}
        """Decided in a journal that was at the broker, and not heard yet."""
        self.losses = 0
        """Times that the newest journals were lost, and what they said with them."""

    def decided(self, outbox: Iterable[tuple[str, str]]) -> None:
        """At the broker."""
        self._due |= {number: event for number, event in outbox if number not in self._heard}

    def is_news(self, message: EventMessage) -> bool:
        """Somebody who drops what comes twice looks at its id."""
        self._due.pop(message.id, None)
        said = msgspec.structs.replace(message, at="", monotonic=0.0)
        if message.id not in self._heard:
            self._heard[message.id] = said
            return True
        if self._heard[message.id] != said:
            self._truth.broken(f"{message.id} is {self._heard[message.id]}, and then {said}")
        return False

    def lose(self) -> None:
        """Nobody has the newest journals any more."""
        self.losses += 1
        self._due.clear()

    def complete(self) -> None:
        """At the end everything was told."""
        if self._due:
            self._truth.broken(f"decided, and never told: {list(self._due.values())}")
