"""The check of published events: everything that a journal at the broker decided is published, and nothing
twice.
"""

from collections.abc import Iterable

import msgspec

from ftd.faults.sim.oracle import Oracle
from ftd.transport.wire.public import EventMessage


class PublishedEvents:
    """The events of all coordinators together, whichever of them publishes them."""

    def __init__(self, oracle: Oracle) -> None:
        self._oracle = oracle
        self._seen: dict[str, EventMessage] = {}
        self._due: dict[str, str] = {}
        """Events that were decided in a journal at the broker and are not published yet."""
        self.journal_losses = 0
        """Number of times that the newest journals were lost together with their content."""

    def on_journaled(self, outbox: Iterable[tuple[str, str]]) -> None:
        """Note the outbox of a journal that is at the broker."""
        self._due |= {number: event for number, event in outbox if number not in self._seen}

    def is_new(self, message: EventMessage) -> bool:
        """Return whether a message is new, as receivers decide that drop duplicates by id."""
        self._due.pop(message.id, None)
        content = msgspec.structs.replace(message, at="", monotonic=0.0)
        if message.id not in self._seen:
            self._seen[message.id] = content
            return True
        if self._seen[message.id] != content:
            self._oracle.violated(f"event {message.id} was {self._seen[message.id]}, and then {content}")
        return False

    def on_journals_lost(self) -> None:
        """Note that nobody has the newest journals any more."""
        self.journal_losses += 1
        self._due.clear()

    def check_complete(self) -> None:
        """Check at the end that every event was published."""
        if self._due:
            self._oracle.violated(f"decided, but never published: {list(self._due.values())}")
