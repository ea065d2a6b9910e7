"""Clients of the simulated broker, and their connections to it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

COORDINATOR = "coordinator"
"""The seat: the session of whichever coordinator leads."""


class Client(Protocol):
    """Who has a session: a coordinator's watch or a node's daemon."""

    name: str
    incarnation: int

    def connected(self) -> None: ...

    def disconnected(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """What becomes of messages between a node and the coordinator."""

    drop: float = 0.0
    duplicate: float = 0.0
    late_s: float = 0.0
    """At most so much later."""


class Session:
    """One client's connection to the broker, over all of its reconnections."""

    __slots__ = ("client", "cut", "epoch", "held", "open")

    def __init__(self, client: Client) -> None:
        self.client = client
        self.open = False
        self.epoch = 0
        """Counts connections: a message belongs to the connection it was sent on."""
        self.cut = False
        self.held: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
        """What waits for a cut link to heal, in order."""


class Vacant:
    """Stands in the seat's session, whose holder is ``Network.seat``."""

    name = COORDINATOR
    incarnation = 0

    def connected(self) -> None:
        return

    def disconnected(self) -> None:
        return
