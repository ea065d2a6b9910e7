"""Nodes that leave a job ahead of their announced removal, as spot instances allow it."""

import math
from dataclasses import dataclass

from ftd.replay.policy import Change


@dataclass(frozen=True, slots=True, kw_only=True)
class Membership:
    """Nodes of a job after a change."""

    usable: tuple[str, ...]
    """Present nodes that have not left the job, in the order in which they came."""
    failed: tuple[str, ...]
    """Removed nodes that had not left the job."""


class Departures:
    """Record of the nodes that have left a job and are still present."""

    def __init__(self) -> None:
        self._left: set[str] = set()

    def leave(self, change: Change) -> tuple[str, ...]:
        """Take the nodes that announce their removal out of the job, and return the usable ones."""
        self._left.update(change.leaving)
        return self.after(change).usable

    def after(self, change: Change) -> Membership:
        """Return the membership after a change."""
        failed = tuple(node for node in change.removed if node not in self._left)
        self._left.difference_update(change.removed)
        usable = tuple(node for node in change.nodes if node not in self._left)
        return Membership(usable=usable, failed=failed)


def last_boundary_s(change: Change, iteration_s: float) -> float | None:
    """Return the time from a notice to the last end of an iteration before the removal; ``None``: the iteration in
    flight takes longer.
    """
    if change.boundary_s > change.notice_s:
        return None
    return change.boundary_s + math.floor((change.notice_s - change.boundary_s) / iteration_s) * iteration_s
