"""Changes that wait for a step boundary: nodes that join or leave, and another protection of snapshots."""

from statemachine.cluster import drains
from statemachine.cluster.node import NodeMachine
from statemachine.cluster.phases import Paused, Running
from statemachine.cluster.recovery import note_cause, reconfigure
from statemachine.cluster.snapshots.protections import request_changed, requested_protection
from statemachine.cluster.state import JOIN, Cluster


def newcomers(c: Cluster) -> list[NodeMachine]:
    """Return the nodes that could take part but did not when the current generation was made.

    A node that is to leave is none while others train, but may be what a paused job waits for.
    """
    members, paused = c.members, isinstance(c.state, Paused)
    absent = [node for node in c.alive() if node.ready and node.name not in members]
    leaving = drains.leavers(c) if absent else []
    return [node for node in absent if node not in leaving or paused]


def departing(c: Cluster) -> list[NodeMachine]:
    """Return the nodes of this generation, planned or replica peers, that the next one can do without."""
    group = c.state
    if not isinstance(group, Running):
        return []
    return [node for node in c.alive() if node.departing and node.name in group.needed]


def schedule_join(c: Cluster) -> None:
    if JOIN not in c.due and (newcomers(c) or departing(c)):
        c.set_timer(JOIN, c.timing.join_settle_s)


def join(c: Cluster) -> None:
    """Reconfigure for the joins and drains whose settle time is over."""
    c.dirty = True
    if not isinstance(c.state, Running | Paused):
        return
    joining, leaving = newcomers(c), departing(c)
    if not joining and not leaving:
        return
    if c.recovery is not None:
        # The recovery under way reaches its first commit undisturbed; ``follow_running`` tries again.
        return
    paused = isinstance(c.state, Paused)
    names = [node.name for node in joining]
    cause = "node_drained"
    if paused:
        cause = "resumed" if c.resumption is not None else "start"
    elif joining:
        cause = "node_returned" if all(node.returning for node in joining) else "node_joined"
    why = [f"{', '.join(names)} can take part"] if names else []
    why += [f"{', '.join(node.name for node in leaving)} is to leave"] if leaving else []
    for node in joining:
        node.returning = False
    record = note_cause(c, cause, names + [node.name for node in leaving])
    reconfigure(c, "; ".join(why), "abort" if paused else "boundary", record)


# --- while the group trains -----------------------------------------------------------------------


def follow_running(c: Cluster, group: Running) -> None:
    """Do what needs no new generation, or begin a generation at the next boundary."""
    if c.recovery is None and (leaving := drains.leavers(c)):
        drains.ask_planner(c, group, leaving)
    schedule_join(c)
    if c.recovery is not None:
        return
    peers = sorted(set(group.resumption.replica_peers.values()))
    lost = [name for name in peers if not c.nodes[name].alive]
    if JOIN not in c.due and request_changed(c, group):
        # Another protection was requested than this group was planned with: a boundary, and the same plan.
        why = f"snapshots get another protection: {requested_protection(c)}"
        reconfigure(c, why, "boundary", note_cause(c, "protection_changed", []))
    elif lost:
        # Other nodes must hold the copies that a lost node held. The loss of a planned node is noticed
        # before this.
        why = f"{', '.join(lost)} held copies of snapshots and is gone"
        reconfigure(c, why, "boundary", note_cause(c, "node_lost", lost))
