"""Whose a message is, and for whom: what signals and commands travel in.

Every envelope carries the node's name and incarnation: from a node its own, to a node the one that the
coordinator means. Who gets one of another incarnation ignores, counts and logs it; what is for several nodes
(``ToNodes``) is heard by all, and whom it does not name it does not concern.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from statemachine.messages import Command, Signal


@dataclass(frozen=True, slots=True, kw_only=True)
class FromNode:
    node: str
    incarnation: int
    signal: Signal


@dataclass(frozen=True, slots=True, kw_only=True)
class ToNode:
    node: str
    incarnation: int
    command: Command
    cause: str
    """Cause id of the event that made the coordinator say this (``ftd story``)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToNodes:
    """A command that is equal for several nodes: all of the cluster hear it, those named obey it."""

    receivers: Mapping[str, int]
    """Name → the incarnation that is meant."""
    command: Command
    cause: str

    def addressed(self, node: str, incarnation: int) -> ToNode | None:
        """The command as this incarnation's own; ``None``: it is not for it."""
        if self.receivers.get(node) != incarnation:
            return None
        return ToNode(node=node, incarnation=incarnation, command=self.command, cause=self.cause)
