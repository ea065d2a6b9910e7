"""Who comes and who goes while the job trains, or waits for them: at a boundary, some at a time."""

from statemachine.cluster.group import kept
from statemachine.cluster.node import NodeMachine
from statemachine.cluster.recovery import note_cause, reconfigure
from statemachine.cluster.snapshots.buddies import present_buddies
from statemachine.cluster.state import JOIN, Cluster
from statemachine.messages.values import ClusterPhase


def newcomers(c: Cluster) -> list[NodeMachine]:
    """Nodes that could take part but did not when the present generation was made."""
    members = c.attempt.members if c.attempt is not None else set()
    return [node for node in c.alive() if node.ready and node.draining is None and node.name not in members]


def leavers(c: Cluster) -> list[NodeMachine]:
    """Draining nodes, planned or a buddy, that this generation did not try to do without, or could by now."""
    if c.phase is not ClusterPhase.RUNNING or c.attempt is None:
        return []
    planned = {*c.planned, *present_buddies(c).values()} - kept(c)
    return [node for node in c.alive() if node.draining is not None and node.name in planned]


def want_join(c: Cluster) -> None:
    if JOIN not in c.due and (newcomers(c) or leavers(c)):
        c.set_timer(JOIN, c.timing.join_settle_s)


def join(c: Cluster) -> None:
    """The settle time of joins and drains is over."""
    if c.phase not in (ClusterPhase.RUNNING, ClusterPhase.PAUSED):
        return
    joining, leaving = newcomers(c), leavers(c)
    if not joining and not leaving:
        return
    if c.phase is ClusterPhase.RUNNING and c.recovery is not None:
        # The recovery under way gets its first commit undisturbed; then it is its turn.
        c.set_timer(JOIN, c.timing.join_settle_s)
        return
    paused = c.phase is ClusterPhase.PAUSED
    names = [node.name for node in joining]
    if paused:
        note_cause(c, "resumed", names)
    elif joining:
        returned = all(node.returning for node in joining)
        note_cause(c, "node_returned" if returned else "node_joined", names)
    if leaving:
        note_cause(c, "node_drained", [node.name for node in leaving])
    why = [f"{', '.join(names)} can take part"] if names else []
    why += [f"{', '.join(node.name for node in leaving)} will leave"] if leaving else []
    for node in joining:
        node.returning = False
    reconfigure(c, "; ".join(why), "abort" if paused else "boundary")
