"""``ideal``: recovery that costs nothing.

Assumptions: a change of the cluster is known at once, takes no time and loses no work; on any number of nodes the
job runs at the throughput of the best plan. This is the upper bound to which goodput is related.
"""

from collections.abc import Sequence

from ftd.replay.job import ReplayJob
from ftd.replay.policy import Change, Reaction, RecoveryPolicy, Running


class IdealPolicy(RecoveryPolicy):
    """Recovery that costs nothing."""

    name = "ideal"

    def __init__(self, job: ReplayJob) -> None:
        self._job = job

    def start(self, nodes: Sequence[str]) -> Reaction:
        """Return the best way of running on ``nodes``."""
        return self._react(len(nodes))

    def change(self, change: Change) -> Reaction | None:
        """Return the best way of running on the nodes that are left, without a pause."""
        return self._react(len(change.nodes)) if change.removed or change.added else None

    def _react(self, nodes: int) -> Reaction:
        iteration_s = self._job.iteration_s(nodes)
        if iteration_s is None:
            return Reaction(running=None)
        return Reaction(running=Running(iteration_s=iteration_s, samples=self._job.policy.global_batch))
