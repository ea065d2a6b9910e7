"""What a simulated coordinator tells the world: kept in its journal until the broker has it."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import msgspec

from statemachine.cluster.durable.outbox import OUTBOX, EventOutbox, is_kept
from statemachine.effects import Effect, EmitEvent

if TYPE_CHECKING:
    from ftd.faults.sim.coordinator import SimCoordinator

ACKNOWLEDGED_S = 0.005
"""So long after the broker has an event its word for it is there."""


class Voice:
    """One process's; a new one is made with each start."""

    def __init__(self, coordinator: "SimCoordinator") -> None:
        self._of = coordinator
        self.outbox: EventOutbox[dict[str, Any]] = EventOutbox()
        self._numbers: dict[int, str] = {}
        """Of the step under way: its events' ids."""
        self._waiting: list[tuple[EmitEvent, str]] = []
        """For the seat to be ours again."""

    def decide(self, effects: Iterable[Effect]) -> None:
        """What is told of them goes into the journal with what was decided."""
        self._numbers = {}
        for effect in effects:
            if isinstance(effect, EmitEvent) and is_kept(effect.name):
                self._numbers[id(effect)] = number = f"e-{self._of.world.serial()}"
                self.outbox.add(number, msgspec.to_builtins(effect))

    def go_on(self, journal: dict[str, Any]) -> None:
        """What the last leader decided and may not have told."""
        for number, event in journal[OUTBOX]:
            self.outbox.add(number, event)
            self._tell(msgspec.convert(event, EmitEvent), number)

    def tell(self, event: EmitEvent) -> None:
        """Now or when the seat is ours again."""
        self._tell(event, self._numbers.get(id(event), ""))

    def _tell(self, event: EmitEvent, number: str) -> None:
        seat, network = self._of.seat, self._of.network
        if network.has_seat(seat) and seat.speaks:
            network.from_seat(seat, self._told, event, number)
        else:
            self._waiting.append((event, number))

    def _told(self, event: EmitEvent, number: str) -> None:
        """At the broker."""
        truth = self._of.invariants
        self._of.world.at(ACKNOWLEDGED_S, self.outbox.acknowledge, number)
        if truth.telling.is_news(number, event):
            truth.public_event(event)
            if self._of.on_event is not None:
                self._of.on_event(event)

    def unsent(self, held: list[tuple[Any, ...]]) -> None:
        """What the broker never acknowledged: of that, events are told later."""
        self._waiting += [(rest[0], rest[1]) for _, action, *rest in held if action == self._told]

    def tell_waiting(self) -> None:
        """The seat is ours."""
        waiting, self._waiting = self._waiting, []
        for event, number in waiting:
            self._tell(event, number)

    def clear(self) -> None:
        """Somebody else tells, or we begin anew."""
        self._waiting.clear()
        self.outbox.clear()
