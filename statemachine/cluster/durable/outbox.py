"""Outbox: events that were decided and that the broker has not acknowledged yet.

They are stored with the durable state from the write that decides them until the broker acknowledges them.
So they outlive a coordinator that is killed in between, and the next leader publishes them, each under its
identifier. By that identifier a subscriber recognises an event that is published twice.
"""

from typing import Generic, TypeVar

from statemachine.effects import REPEATABLE

T = TypeVar("T")

PROCESS_EVENTS = frozenset({"CoordinatorStarted", "BrokerLost", "BrokerRestored"})
"""Events about the process that publishes them; they record no decision."""
OUTBOX = "unpublished_events"
"""Key of the outbox in the durable state, whose other keys are the machine's."""
MAX_EVENTS = 2_000
"""Most events that are stored, the newest; so many occur together if a thousand nodes join."""


def is_journaled(name: str) -> bool:
    """Return whether an event of this name is stored in the journal before it is published."""
    return name not in REPEATABLE and name not in PROCESS_EVENTS


class EventOutbox(Generic[T]):
    """Events that wait for the broker's acknowledgement. ``T`` is the stored form of an event."""

    def __init__(self) -> None:
        self._events: dict[str, T] = {}
        self._entries: tuple[tuple[str, T], ...] = ()

    def add(self, number: str, event: T) -> None:
        """Add an event that was decided, under its identifier."""
        self._events[number] = event
        if len(self._events) > MAX_EVENTS:
            del self._events[next(iter(self._events))]
        self._entries = ()

    def acknowledge(self, number: str) -> None:
        """Remove an event that the broker has acknowledged."""
        if self._events.pop(number, None) is not None:
            self._entries = ()

    def clear(self) -> None:
        """Remove all events, since another coordinator leads and publishes its own."""
        self._events.clear()
        self._entries = ()

    @property
    def entries(self) -> tuple[tuple[str, T], ...]:
        """Return identifiers and events, the oldest first; the same object until one is added or removed."""
        if len(self._entries) != len(self._events):
            self._entries = tuple(self._events.items())
        return self._entries
