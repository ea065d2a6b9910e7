"""How long until the next failure: the time in which a better plan must earn what it costs to move to it.

The user says it, or it is learned from the job's own failures. They are taken as a Poisson process at one
rate per node; the estimate is the mean of the rate under a Gamma prior (its conjugate):

    rate = (PRIOR_FAILURES + failures) / (PRIOR_FAILURES · PRIOR_NODE_S + node-seconds under a plan)

and the expected time to the next failure of any of n nodes is 1 / (rate · n). The prior is a tenth of a
failure: one failure a day and node before anything is known, and a handful of real ones outweigh it.
Time comes from events, so the same events give the same estimate.
"""

from dataclasses import dataclass

PRIOR_FAILURES = 0.1
PRIOR_NODE_S = 86_400.0


@dataclass(slots=True, kw_only=True)
class Exposure:
    """What the job's nodes lived through."""

    failures: int = 0
    """Losses that interrupted training. Those during one recovery count as one: no plan would outlive less."""
    node_s: float = 0.0
    """Time under plans that are over, summed over their nodes."""
    nodes: int = 0
    """Of the plan that is under way since ``since``."""
    since: float = 0.0

    def plan_began(self, nodes: int, at: float) -> None:
        """From now on ``nodes`` nodes are under a plan and may fail."""
        self.nodes, self.since = nodes, at

    def plan_ended(self, at: float) -> None:
        """Count what the nodes of the plan lived through."""
        self.node_s += self.nodes * max(0.0, at - self.since)
        self.nodes = 0

    def horizon_s(self, nodes: int) -> float:
        """Return the expected time to the next failure among so many nodes, in two digits: more are not known."""
        lived_s = PRIOR_FAILURES * PRIOR_NODE_S + self.node_s
        return float(f"{lived_s / (PRIOR_FAILURES + self.failures) / nodes:.2g}")
