"""Words of reasons that events give."""

from collections.abc import Sequence

from planner.reasons import names

_GOES_ON = {
    "start": "training begins",
    "node_lost": "training goes on after the loss of {who}",
    "trainer_lost": "training goes on after the loss of a trainer of {who}",
    "connection_lost": "training goes on after a connection broke",
    "node_joined": "training goes on with {who}",
    "node_returned": "training goes on with {who}, back again",
    "node_drained": "training goes on without {who}, as was asked for",
    "speed_changed": "training goes on, shares made anew for the speed of {who}",
    "protection_changed": "training goes on, snapshots protected anew",
    "resumed": "training goes on after a pause",
}
"""By what a reconfiguration was for."""


def counted(count: int, noun: str) -> str:
    """``1 node``, ``2 nodes``."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def who(nodes: Sequence[str]) -> str:
    """At most four names."""
    return names(nodes) if nodes else "nobody"


def goes_on(cause: str, nodes: Sequence[str]) -> str:
    """That a reconfiguration is over."""
    return _GOES_ON[cause].format(who=who(nodes))
