"""How long until the next failure: the time in which a better plan must earn what it costs to move to it.

The user says it, or it is learned from the job's own failures. They are taken as a Poisson process at one
rate per node; the estimate is the mean of the rate under a Gamma prior (its conjugate):

    rate = (PRIOR_FAILURES + failures) / (PRIOR_FAILURES · PRIOR_NODE_S + node-seconds under a plan)

and the expected time to the next failure of any of n nodes is 1 / (rate · n). The prior is a tenth of a
failure: one failure a day and node before anything is known, and a handful of real ones outweigh it.
Time comes from events, so the same events give the same estimate.
"""

from statemachine.cluster.state import Cluster

PRIOR_FAILURES = 0.1
PRIOR_NODE_S = 86_400.0


def plan_began(c: Cluster, nodes: int) -> None:
    """From now on ``nodes`` nodes are under a plan and may fail."""
    c.exposure.nodes, c.exposure.since = nodes, c.at


def plan_ended(c: Cluster) -> None:
    """The plan is over; what its nodes lived through counts."""
    seen = c.exposure
    seen.node_s += seen.nodes * max(0.0, c.at - seen.since)
    seen.nodes = 0


def failed(c: Cluster) -> None:
    """A loss interrupted training. Losses during one recovery count as one: no plan would outlive less."""
    c.exposure.failures += 1


def horizon_s(c: Cluster, nodes: int) -> float | None:
    """Expected time to the next failure among so many nodes, in two digits: more are not known."""
    if c.job is None or nodes < 1:
        return None
    if c.job.horizon_s is not None:
        return c.job.horizon_s
    seen = c.exposure
    lived_s = PRIOR_FAILURES * PRIOR_NODE_S + seen.node_s
    return float(f"{lived_s / (PRIOR_FAILURES + seen.failures) / nodes:.2g}")
