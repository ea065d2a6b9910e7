"""Lost messages: a node's heartbeats acknowledge orders and mention reports, which are compared with what was
sent and received.

The connections to the broker may lose any message. A heartbeat says what the node does and which reports it
has sent (``Acknowledgement``). If it contradicts for ``Timing.resend_s`` what the coordinator knows, a
message was lost. An order is sent again at the next tick, to all nodes that lack it in one message; a
report is requested with a RequestHello, since the Hello that answers it repeats all reports that still
count. Both are repeated until the heartbeats agree, so that one lost message costs about a second. Orders
and reports that arrive twice are harmless.
"""

from typing import Literal

from statemachine.cluster.membership import inquire, prepare
from statemachine.cluster.node import NodeMachine
from statemachine.cluster.phases import Quiescing, TrainingGroup
from statemachine.cluster.recovery import resume_command
from statemachine.cluster.snapshots import persisting
from statemachine.cluster.state import SUSPICION, Cluster
from statemachine.messages.cluster import (
    Acknowledgement,
    CancelPersist,
    Heartbeat,
    Release,
    TakeSnapshot,
)
from statemachine.messages.common import Quiesce
from statemachine.messages.values import NodeActivity

Lost = Literal[
    "report", "Prepare", "Quiesce", "Resume", "Release", "TakeSnapshot", "Persist", "CancelPersist"
]
"""A report of the node, or the order that it lacks."""

_BUILT = frozenset(NodeActivity) - {NodeActivity.NONE, NodeActivity.BUILDING}
_RESUMED = frozenset({NodeActivity.TRAINING, NodeActivity.FINISHED})


def take_acknowledgement(c: Cluster, node: NodeMachine, signal: Heartbeat) -> None:
    """Note what this node lacks, and repeat what it has lacked for ``resend_s``."""
    reported = signal.acknowledgement
    if reported is None or (lost := _lost(c, node, signal.generation, reported)) is None:
        node.lost_message = None
    elif node.lost_message is None or node.lost_message[0] != lost:
        # The heartbeat may have crossed the order or the report.
        node.lost_message = (lost, c.at)
    elif c.at - node.lost_message[1] >= c.timing.resend_s:
        node.lost_message = (lost, c.at)
        if lost == "report":
            inquire(c, node.name, node.incarnation)
        elif lost == "CancelPersist":
            c.send(node, CancelPersist(job_id=c.current_job.job_id, attempt=reported.persist_attempt))
        else:
            c.unacknowledged.setdefault(lost, []).append(node.name)


def repeat_orders(c: Cluster) -> None:
    """Send lost orders again, as far as they still stand; called at every tick."""
    unacknowledged, c.unacknowledged = c.unacknowledged, {}
    for lost, names in unacknowledged.items():
        nodes = [c.nodes[name] for name in names if name in c.nodes]
        nodes = [
            node
            for node in nodes
            if node.alive and node.lost_message is not None and node.lost_message[0] == lost
        ]
        if nodes:
            _repeat(c, lost, nodes)


# --- finding lost messages -----------------------------------------------------------------------


def _lost(c: Cluster, node: NodeMachine, generation: int, reported: Acknowledgement) -> Lost | None:
    """Return what has not arrived, at the node or here, judging by one heartbeat, or ``None`` if everything
    has.
    """
    activity = reported.activity
    if node.released:
        return "Release" if reported.leaving or activity is not NodeActivity.NONE else None
    if reported.leaving and not node.leaving:
        return "report"
    if reported.health_number > (node.health.number if node.health is not None else 0):
        return "report"
    # A Hello of a node with a job that is not under way is answered with a Stop.
    if not c.active:
        return "report" if reported.job_id is not None else None
    if reported.job_id != c.current_job.job_id:
        if node.prepare_sent:
            return "Prepare"
        return "report" if reported.job_id is not None or node.prepared else None
    if node.prepare_sent or node.prepared:
        built = activity in _BUILT
        if built == node.prepare_sent:
            # It has built the job, and Prepared was lost; or TrainerLost was.
            return "report"
    return _lost_in_generation(c, node, generation, reported) or _lost_of_snapshots(
        c, node, generation, reported
    )


def _lost_in_generation(
    c: Cluster, node: NodeMachine, generation: int, reported: Acknowledgement
) -> Lost | None:
    state, activity = c.state, reported.activity
    if isinstance(state, Quiescing):
        if node.name not in state.expected or node.name in state.reports:
            return None
        if generation < state.generation:
            return "Quiesce"
        return "report" if activity is not NodeActivity.QUIESCING else None
    if (
        not isinstance(state, TrainingGroup)
        or generation != state.generation
        or node.name not in state.members
    ):
        return None
    if activity is NodeActivity.QUIESCED:
        return "Resume"
    lost = activity is NodeActivity.PREPARED  # Its trainers are new, and TrainerLost was lost.
    lost = lost or (activity in _RESUMED and node.name not in state.resumed)
    lost = lost or (activity is NodeActivity.FINISHED and node.name not in state.finished)
    lost = lost or reported.restore_failed
    lost = lost or (reported.suspects_peer and SUSPICION not in c.due)
    return "report" if lost else None


def _lost_of_snapshots(
    c: Cluster, node: NodeMachine, generation: int, reported: Acknowledgement
) -> Lost | None:
    pending, writing = c.snapshots.pending, c.checkpoints.writing
    if pending is not None and generation == pending.generation:
        if node.name not in pending.completed and reported.snapshot_reported == pending.step:
            return "report"
        if node.name in pending.ordered and reported.snap_after < pending.snap_after:
            return "TakeSnapshot"
    if writing is not None:
        if node.name in writing.unwritten:
            if reported.persist_attempt != writing.attempt:
                return "Persist"
            return "report" if reported.persist_reported else None
    elif reported.persist_attempt and not reported.persist_reported:
        return "CancelPersist"
    return None


# --- repeating orders ----------------------------------------------------------------------------


def _repeat(c: Cluster, lost: str, nodes: list[NodeMachine]) -> None:
    state, pending, writing = c.state, c.snapshots.pending, c.checkpoints.writing
    match lost:
        case "Prepare":
            prepare(c, [node for node in nodes if node.prepare_sent])
        case "Quiesce" if isinstance(state, Quiescing):
            c.send_all(nodes, Quiesce(generation=state.generation, mode=state.mode))
        case "Resume" if isinstance(state, TrainingGroup):
            c.send_all(nodes, resume_command(c, state))
        case "Release":
            c.send_all(nodes, Release())
        case "TakeSnapshot" if pending is not None:
            c.send_all(nodes, TakeSnapshot(generation=pending.generation, after_step=pending.snap_after))
        case "Persist" if writing is not None:
            for node in nodes:
                if node.name in writing.unwritten:
                    persisting.send_order(c, node)
