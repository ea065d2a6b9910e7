"""Changes that wait for a step boundary: who comes and who goes, and how snapshots are protected."""

from statemachine.cluster.node import NodeMachine
from statemachine.cluster.phases import Paused, Running, TrainingGroup
from statemachine.cluster.recovery import note_cause, reconfigure
from statemachine.cluster.snapshots.protections import request_changed, requested_protection
from statemachine.cluster.state import JOIN, Cluster
from statemachine.messages.cluster import Release


def newcomers(c: Cluster) -> list[NodeMachine]:
    """Nodes that could take part but did not when the present generation was made."""
    members = c.members
    return [node for node in c.alive() if node.ready and node.draining is None and node.name not in members]


def leavers(c: Cluster) -> list[NodeMachine]:
    """Draining nodes, planned or a buddy, that this generation did not try to do without, or could by now."""
    group = c.state
    if not isinstance(group, Running):
        return []
    needed = group.needed - still_required_draining(group)
    return [node for node in c.alive() if node.draining is not None and node.name in needed]


def schedule_join(c: Cluster) -> None:
    if JOIN not in c.due and (newcomers(c) or leavers(c)):
        c.set_timer(JOIN, c.timing.join_settle_s)


def join(c: Cluster) -> None:
    """The settle time of joins and drains is over."""
    if not isinstance(c.state, Running | Paused):
        return
    joining, leaving = newcomers(c), leavers(c)
    if not joining and not leaving:
        return
    if isinstance(c.state, Running) and c.recovery is not None:
        # The recovery under way gets its first commit undisturbed; then it is its turn.
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
    """Nodes that wait for their release and that the plan under way cannot do without.

    Where they were kept for layers that nobody else had, its transfers may have brought these to others:
    then it can by now. Where layers are in parts, the plan does not tell who brings them to whom.
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
    """Nodes that were to leave and that no plan needs may go."""
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
    """Do what can be done without a new generation, or begin one at the next boundary."""
    if c.recovery is None or c.recovery.committed_at is not None:
        # A draining node outside the running plan holds nothing once a step of this generation committed.
        release_drained(c)
    schedule_join(c)
    if c.recovery is not None:
        return
    buddies = sorted(set(group.resumption.replica_peers.values()))
    lost = [name for name in buddies if name not in c.nodes or not c.nodes[name].alive]
    if JOIN not in c.due and request_changed(c, group):
        # Another protection was asked for than this group was planned with: a boundary, and the same plan.
        why = f"snapshots get another protection: {requested_protection(c)}"
        reconfigure(c, why, "boundary", note_cause(c, "protection_changed", []))
    elif lost:
        # Others must keep the copies that a lost node kept. Lost nodes of the plan are missed before this.
        why = f"{', '.join(lost)} kept copies of snapshots and is gone"
        reconfigure(c, why, "boundary", note_cause(c, "node_lost", lost))
