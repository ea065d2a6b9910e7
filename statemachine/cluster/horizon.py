"""Estimate of the time until the next failure, in which a better plan must earn what it costs to move to it.

The user gives it, or it is learned from the job's own failures. They are modelled as a Poisson process with
one rate per node; the estimate is the mean of the rate under a Gamma prior (its conjugate):

    rate = (PRIOR_FAILURES + failures) / (PRIOR_FAILURES · PRIOR_NODE_S + node-seconds under a plan)

and the expected time to the next failure of any of n nodes is 1 / (rate · n). The prior is a tenth of a
failure: one failure per day and node before anything is known, and a handful of real ones outweigh it. Time
comes from events, so the same events give the same estimate.
"""

from dataclasses import dataclass

PRIOR_FAILURES = 0.1
PRIOR_NODE_S = 86_400.0


@dataclass(slots=True, kw_only=True)
class Exposure:
    """Failures of the job so far, and the node-seconds in which they happened."""

    failures: int = 0
    """Losses that interrupted training. Those during one recovery count as one, since no plan would have
    outlived fewer.
    """
    state_losses: int = 0
    """Those of them after which no memory held the state, so that the job returned to a persistent checkpoint."""
    node_s: float = 0.0
    """Time under past plans, summed over their nodes, in seconds."""
    nodes: int = 0
    """Nodes of the plan that has been running since ``since``."""
    since: float = 0.0

    def plan_began(self, nodes: int, at: float) -> None:
        """Note that from now on ``nodes`` nodes are under a plan and may fail."""
        self.nodes, self.since = nodes, at

    def plan_ended(self, at: float) -> None:
        """Add the time that the plan's nodes have run."""
        self.node_s += self.nodes * max(0.0, at - self.since)
        self.nodes = 0

    def horizon_s(self, nodes: int, at: float) -> float:
        """Return the expected time to the next failure among so many nodes, in seconds, rounded to two digits:
        more are not known.
        """
        running_s = self.nodes * max(0.0, at - self.since)
        lived_s = PRIOR_FAILURES * PRIOR_NODE_S + self.node_s + running_s
        return float(f"{lived_s / (PRIOR_FAILURES + self.failures) / nodes:.2g}")
