"""Events that were decided, and that the world may not have heard yet.

They are kept with the durable state from the write that decides them until the broker has them: so what a
coordinator that is killed in between had to tell outlives it, and whoever leads next tells it, each under the
id that it has. What is told once too often is known by its id.
"""

from typing import Generic, TypeVar

T = TypeVar("T")

REPEATED = frozenset({"MessageIgnored", "MessageRefused", "PeerSuspected", "NodeRejected"})
"""Of what somebody else says, and may say again and again: told now and then, and not kept."""
OF_THE_MOMENT = frozenset({"CoordinatorStarted", "BrokerLost", "BrokerRestored"})
"""Of the process that tells them: nothing was decided."""
UNTOLD = "untold_events"
"""Where they are in the durable state, which is the machine's otherwise."""
MOST = 2_000
"""Kept at once, the newest; as many come together when as many nodes do."""


def is_kept(name: str) -> bool:
    """Whether an event of this name is in the journal before anybody hears of it."""
    return name not in REPEATED and name not in OF_THE_MOMENT


class Untold(Generic[T]):
    """See the module. ``T``: an event, as it is kept."""

    def __init__(self) -> None:
        self._events: dict[str, T] = {}
        self._parts: tuple[tuple[str, T], ...] = ()

    def add(self, number: str, event: T) -> None:
        """It is decided, under this id."""
        self._events[number] = event
        if len(self._events) > MOST:
            del self._events[next(iter(self._events))]
        self._parts = ()

    def told(self, number: str) -> None:
        """The broker has it."""
        if self._events.pop(number, None) is not None:
            self._parts = ()

    def clear(self) -> None:
        """What another one leads is its own to tell."""
        self._events.clear()
        self._parts = ()

    @property
    def parts(self) -> tuple[tuple[str, T], ...]:
        """With their ids, the oldest first; the same object until there is one more or less."""
        if len(self._parts) != len(self._events):
            self._parts = tuple(self._events.items())
        return self._parts
