"""Silent corruption: copies of a layer that should be equal differ (``replicas`` compares them).

The group is stopped. When all nodes have answered, ``recovery`` publishes what differs, sets the nodes aside
that are known to be at fault, and discards the state of every device, so that ``rollback`` returns to the
newest snapshot. That snapshot was compared before it counted.
"""

from statemachine.cluster.node import NodeMachine
from statemachine.cluster.phases import Quiescing, Running, TrainingGroup
from statemachine.cluster.recovery import note_cause, reconfigure
from statemachine.cluster.replicas import compare_finished, comparing, describe
from statemachine.cluster.replicas import take_digests as compare_digests
from statemachine.cluster.snapshots.snapshots import record_if_complete
from statemachine.cluster.state import Cluster
from statemachine.messages.common import ReplicaDigests
from statemachine.messages.values import Divergence


def take_digests(c: Cluster, node: NodeMachine, signal: ReplicaDigests) -> None:
    """Record a device's digests of the last group, and act on what they show."""
    old = signal.generation != c.resumed_generation or signal.step <= c.replicas.agreed_step
    if old or not comparing(c) or not isinstance(c.state, TrainingGroup | Quiescing):
        c.ignore("digests of an older group, or of a step that was compared", node.name)
        return
    diverged = compare_digests(c, node.name, signal)
    if diverged is None:
        record_if_complete(c)
    elif isinstance(c.state, TrainingGroup):
        _stop(c, diverged)


def take_end(c: Cluster, group: Running) -> bool:
    """Compare the parameters after the last step. Return whether they differ, so that steps must be redone."""
    diverged = compare_finished(c, group.finished)
    if diverged is None:
        record_if_complete(c)
        return False
    _stop(c, diverged)
    return True


def _stop(c: Cluster, diverged: Divergence) -> None:
    names = list(diverged.minority or diverged.nodes)
    reconfigure(c, describe(diverged), "abort", note_cause(c, "corruption", names, "digests"))
