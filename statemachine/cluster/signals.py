"""Handlers of nodes' signals, one per kind."""

from typing import assert_never

from statemachine.cluster import corruption, health
from statemachine.cluster.acknowledgement import take_acknowledgement
from statemachine.cluster.drains import take_leaving
from statemachine.cluster.jobs import send_stop, take_build_progress, take_finished, take_prepared
from statemachine.cluster.membership import (
    TABLE,
    SignalAction,
    admit,
    fence,
    inquire,
    mark_unhealthy,
    may_return,
    note_joined,
    prepare,
    reject,
    request_overdue_hello,
    sender_status,
)
from statemachine.cluster.node import NodeMachine
from statemachine.cluster.phases import Paused, Quiescing, Resuming, Running
from statemachine.cluster.progress import take_heartbeat, take_stepped
from statemachine.cluster.quarantine import MAX_FAILURES, note_failure
from statemachine.cluster.recovery import (
    include_returned_node,
    learn_generation,
    lose_node,
    note_cause,
    reconfigure,
    recover_from_loss,
    resume_command,
    take_quiesced,
    take_resumed,
    take_suspicion,
)
from statemachine.cluster.recovery_times import note_time_of_failure
from statemachine.cluster.rollback import take_restore_failed
from statemachine.cluster.snapshots import intervals, persisting, snapshots
from statemachine.cluster.state import TICK, Cluster
from statemachine.cluster.stragglers import take_times
from statemachine.cluster.trainers import trainer_lost
from statemachine.events import SignalArrived
from statemachine.messages.cluster import (
    HealthChecked,
    Heartbeat,
    Hello,
    LayersPersisted,
    Leaving,
    PersistFailed,
    Quiesced,
    Release,
    RestoreFailed,
    Signal,
    SnapshotCompleted,
    Stepped,
    TrainerLost,
)
from statemachine.messages.common import (
    Finished,
    OptimizerReplicaDiverged,
    PeerSuspected,
    Prepared,
    Quiesce,
    ReplicaDigests,
    Resumed,
    SnapshotFailed,
    SnapshotStarted,
)
from statemachine.messages.values import ClusterPhase


def receive(c: Cluster, event: SignalArrived) -> None:
    """Look up the action for this signal of this sender, and carry it out."""
    name, incarnation, signal = event.message.node, event.message.incarnation, event.message.signal
    action = TABLE[type(signal), sender_status(c, name, incarnation)]
    match action:
        case SignalAction.TAKE:
            node = c.nodes[name]
            node.heard_at = c.at
            handle(c, node, signal)
            return
        case SignalAction.ADMIT:
            assert isinstance(signal, Hello), "only Hello introduces a node"
            take_newcomer(c, name, incarnation, signal)
        case SignalAction.RETURN:
            take_returned(c, c.nodes[name], signal)
        case SignalAction.FENCE:
            fence(c, name, incarnation, "this incarnation is over")
        case SignalAction.INQUIRE:
            if (name, incarnation) not in c.rejected:
                inquire(c, name, incarnation)
        case SignalAction.IGNORE:
            c.ignore(f"{type(signal).__name__} of an incarnation that is not current", name)
        case _:
            assert_never(action)
    c.others_heard_at = c.at


def handle(c: Cluster, node: NodeMachine, signal: Signal) -> None:
    """Handle a signal of a node's current incarnation."""
    match signal:
        case Hello():
            take_hello(c, node, signal)
        case Heartbeat():
            node.obeyed = max(node.obeyed, signal.generation)
            take_heartbeat(c, node, signal)
            take_build_progress(c, node, signal)
            if not node.said_hello:  # Its Hello was lost, or this coordinator is new.
                request_overdue_hello(c, node, c.timing.silence_s)
            take_acknowledgement(c, node, signal)
            take_times(node, signal)
            found = []
            if snapshots.take_retained(c, node, signal):
                corrupt = f"the snapshot of step {signal.corrupt_step} is corrupt in its memory"
                # An earlier incarnation may have reported the same part.
                if all(failure.detail != corrupt for failure in node.failures):
                    found.append(corrupt)
            repairs = min(snapshots.take_repairs(node, signal), MAX_FAILURES)  # A hostile node may say 2**60.
            found += ["bytes of a snapshot changed in its memory, and were repaired"] * repairs
            for detail in found:
                if note_failure(c, node, "checksum", detail):
                    recover_from_loss(c, node, "node_lost", "quarantine", f"{node.name} is set aside")
        case HealthChecked():
            health.take_report(c, node, signal.report)
        case Prepared():
            take_prepared(c, node, signal)
        case Quiesced():
            take_quiesced(c, node, signal)
        case Resumed():
            take_resumed(c, node, signal)
        case Stepped():
            intervals.note_step(c, signal)
            take_stepped(c, node, signal)
        case TrainerLost():
            trainer_lost(c, node, signal)
        case PeerSuspected():
            take_suspicion(c, node, signal)
        case OptimizerReplicaDiverged():
            detail, where = signal.detail, {"generation": signal.generation, "step": signal.step}
            c.emit("OptimizerReplicaDiverged", detail, node=node.name, **where, layer=signal.layer)
        case ReplicaDigests():
            corruption.take_digests(c, node, signal)
        case Finished():
            take_finished(c, node, signal)
        case Leaving():
            take_leaving(c, node, signal)
        case SnapshotStarted():
            snapshots.take_started(c, node, signal)
        case SnapshotCompleted():
            snapshots.take_completed(c, node, signal)
        case SnapshotFailed():
            snapshots.take_failed(c, node, signal)
        case LayersPersisted():
            persisting.take_persisted(c, node, signal)
        case PersistFailed():
            persisting.take_persist_failed(c, node, signal)
        case RestoreFailed():
            take_restore_failed(c, node, signal)
        case _:
            assert_never(signal)


# --- Hello ---------------------------------------------------------------------------------------


def take_newcomer(c: Cluster, name: str, incarnation: int, signal: Hello) -> None:
    """Handle a Hello of an incarnation that is not known here."""
    learn_generation(c, signal.generation)
    old = c.nodes.get(name)
    if old is not None and old.alive:
        # If this process was suspended, the messages of the live node are yet to be read; the tick is overdue then.
        suspended = c.at - c.due.get(TICK, c.at) > c.timing.silence_s / 2
        if suspended or c.at - c.heard_at(old) <= c.timing.silence_s:
            reason = f"a node named {name!r} is alive at {old.facts.host}: give this one another name"
            reject(c, name, incarnation, reason)
            return
        lose_node(c, old, "silence", f"{name} is silent, and a new incarnation of it appeared")
    if admit(c, name, incarnation, signal):
        take_hello(c, c.nodes[name], signal)


def take_returned(c: Cluster, node: NodeMachine, signal: Signal) -> None:
    """Handle a node that was declared OFFLINE and is heard again under the same incarnation."""
    if not may_return(c, node):
        fence(
            c,
            node.name,
            node.incarnation,
            "the cluster continued without this node: return as a new incarnation",
        )
    elif not isinstance(signal, Hello):
        inquire(c, node.name, node.incarnation)
    else:
        note_joined(c, node, f"{node.name} is back with its state: nothing was resumed without it")
        include_returned_node(c, node)
        take_hello(c, node, signal, is_back=True)


def take_hello(c: Cluster, node: NodeMachine, signal: Hello, *, is_back: bool = False) -> None:
    """Compare what the node reports with what is known here, and repeat what it may have missed.

    :param is_back: the node was absent until now.
    """
    if signal.generation < node.obeyed:
        c.ignore("a Hello that is older than this node's last report", node.name)
        return
    node.obeyed = signal.generation
    node.facts = signal.facts
    if signal.health is not None:
        health.take_report(c, node, signal.health)
        if not node.alive:
            return
    new_snapshots = snapshots.take_held(c, node, signal, is_back=is_back)
    learn_generation(c, signal.generation)
    under_way = c.current_job.job_id if c.active else None
    if signal.job_id is not None and signal.job_id != under_way:
        send_stop(c, node, signal.job_id)
    if node.released:
        c.send(node, Release())
    if under_way is None:
        if node.snapshots and c.phase is ClusterPhase.FINISHED:
            send_stop(c, node, c.current_job.job_id)
        return
    if node.prepare_sent:
        prepare(c, [node])
    if node.prepared and (signal.job_id != under_way or not signal.prepared):
        mark_unhealthy(c, node)
        node.returning = True
        note_time_of_failure(c, node)
        recover_from_loss(c, node, "trainer_lost", "hello", f"the trainers of {node.name} are gone")
    if new_snapshots and isinstance(c.state, Paused) and c.state.pause_limited:
        record = note_cause(c, "resumed", [node.name])
        reconfigure(c, f"{node.name} holds a part of the snapshot", "abort", record)
    else:
        persisting.repeat_order(c, node, signal)
        repeat_command(c, node, signal)


def repeat_command(c: Cluster, node: NodeMachine, signal: Hello) -> None:
    """Send the command again that this node has yet to obey."""
    match c.state:
        case Quiescing() as state:
            if node.name not in state.expected or node.name in state.reports:
                return
            planned = c.resumption is not None and node.name in c.resumption.plan.nodes
            obeyed = signal.generation >= state.generation
            if state.mode == "boundary" and planned and not obeyed and not signal.training:
                # Without these trainers the others may not reach the boundary.
                _recover_trainers(c, node, f"{node.name} trains no longer")
            else:
                c.send(node, Quiesce(generation=state.generation, mode=state.mode))
        case Resuming() | Running() as group:
            here = signal.generation == group.generation
            if node.name not in group.members or (here and signal.training):
                return
            if here and signal.quiesced:
                c.send(node, resume_command(c, group))
            elif node.name in group.planned:
                _recover_trainers(c, node, f"{node.name} does not train under generation {group.generation}")


def _recover_trainers(c: Cluster, node: NodeMachine, why: str) -> None:
    """Recover from the loss of trainers that failed and are back, both within one outage of the broker."""
    node.returning = True
    recover_from_loss(c, node, "trainer_lost", "hello", why)
