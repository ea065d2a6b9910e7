"""Changes that wait for a step boundary: nodes that join or leave, and another protection of snapshots."""

from statemachine.cluster.node import NodeMachine
from statemachine.cluster.phases import Paused, Running, TrainingGroup
from statemachine.cluster.recovery import note_cause, reconfigure
from statemachine.cluster.snapshots.protections import request_changed, requested_protection
from statemachine.cluster.state import JOIN, Cluster
from statemachine.messages.cluster import Release


def newcomers(c: Cluster) -> list[NodeMachine]:
    """Return the nodes that could take part but did not when the current generation was made."""
    members = c.members
    return [node for node in c.alive() if node.ready and node.draining is None and node.name not in members]


def leavers(c: Cluster) -> list[NodeMachine]:
    """Return the draining nodes, planned or replica peers, that this generation did not try to do without, or
    could by now.
    """
    group = c.state
    if not isinstance(group, Running):
        return []
    needed = group.needed - still_required_draining(group)
    return [node for node in c.alive() if node.draining is not None and node.name in needed]


def schedule_join(c: Cluster) -> None:
    if JOIN not in c.due and (newcomers(c) or leavers(c)):
        c.set_timer(JOIN, c.timing.join_settle_s)


def join(c: Cluster) -> None:
    """Reconfigure for the joins and drains whose settle time is over."""
    if not isinstance(c.state, Running | Paused):
        return
    joining, leaving = newcomers(c), leavers(c)
    if not joining and not leaving:
        return
    if isinstance(c.state, Running) and c.recovery is not None:
        # Let the recovery under way reach its first commit undisturbed, and try again after that.
        c.set_timer(JOIN, c.timing.join_settle_s)
        return
    paused = isinstance(c.state, Paused)
    names = [node.name for node in joining]
    cause = "node_drained"
    if paused:
        cause = "resumed"
    elif joining:
        cause = "node_returned" if all(node.returning for node in joining) else "node_joined"
    why = [f"{', '.join(names)} can take part"] if names else []
    why += [f"{', '.join(node.name for node in leaving)} will leave"] if leaving else []
    for node in joining:
        node.returning = False
    record = note_cause(c, cause, names + [node.name for node in leaving])
    reconfigure(c, "; ".join(why), "abort" if paused else "boundary", record)


# --- nodes that leave -----------------------------------------------------------------------------


def set_draining(c: Cluster, node: NodeMachine, reason: str) -> None:
    if node.draining is not None:
        return
    node.draining = reason
    c.dirty = True
    c.persist()
    c.emit("NodeDraining", f"{node.name}: {reason}", node=node.name)
    c.publish()


def still_required_draining(group: Running) -> frozenset[str]:
    """Return the draining nodes that the current plan cannot do without.

    If they were needed for layers that no other node had, the plan's transfers may have copied these to
    other nodes, which can now do without them. If layers are in parts, the plan does not show which device
    sends them to which.
    """
    resumption = group.resumption
    if not group.required_draining_layers or resumption.held_parts:
        return group.required_draining
    elsewhere = {
        layer
        for pipeline in resumption.plan.pipelines
        for stage in pipeline.stages
        if not {device.node for device in stage.devices} & group.required_draining
        for layer in range(stage.first_layer, stage.end_layer)
    }
    everything = max(pipeline.stages[-1].end_layer for pipeline in resumption.plan.pipelines)
    return group.required_draining if len(elsewhere) < everything else frozenset()


def release_drained(c: Cluster) -> None:
    """Release the draining nodes that no plan needs."""
    if c.active and c.progress.published_step < c.progress.known_step:
        return  # one of them may be the only one that knows the missing votes
    needed = c.state.needed if isinstance(c.state, TrainingGroup) else ()
    for node in c.alive():
        if node.draining is not None and not node.released and node.name not in needed:
            release(c, node)


def release(c: Cluster, node: NodeMachine) -> None:
    node.released = True
    node.prepare_sent = node.prepared = False
    if c.profiler == node.name:
        c.profiler, c.dirty = None, True  # Another one is to measure the job.
    c.members.discard(node.name)
    c.send(node, Release())
    c.persist()
    c.emit("NodeReleased", f"{node.name} holds nothing that the job needs", node=node.name)
    c.publish()


# --- while the group trains -----------------------------------------------------------------------


def follow_running(c: Cluster, group: Running) -> None:
    """Do what needs no new generation, or begin a generation at the next boundary."""
    if c.recovery is None or c.recovery.committed_at is not None:
        # A draining node outside the running plan holds nothing once a step of this generation committed.
        release_drained(c)
    schedule_join(c)
    if c.recovery is not None:
        return
    peers = sorted(set(group.resumption.replica_peers.values()))
    lost = [name for name in peers if name not in c.nodes or not c.nodes[name].alive]
    if JOIN not in c.due and request_changed(c, group):
        # Another protection was requested than this group was planned with: a boundary, and the same plan.
        why = f"snapshots get another protection: {requested_protection(c)}"
        reconfigure(c, why, "boundary", note_cause(c, "protection_changed", []))
    elif lost:
        # Other nodes must hold the copies that a lost node held. The loss of a planned node is noticed
        # before this.
        why = f"{', '.join(lost)} held copies of snapshots and is gone"
        reconfigure(c, why, "boundary", note_cause(c, "node_lost", lost))
