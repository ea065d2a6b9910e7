"""One handler per signal of a node."""

from typing import assert_never

from statemachine.cluster.acknowledgement import take_acknowledgement
from statemachine.cluster.forgetting import unknown
from statemachine.cluster.group import take_finished, take_resumed
from statemachine.cluster.jobs import fail, say_not_under_way, set_draining, take_doing, take_prepared
from statemachine.cluster.ledger import take_heartbeat, take_stepped
from statemachine.cluster.membership import (
    TABLE,
    Verdict,
    admit,
    fence,
    inquire,
    may_return,
    reject,
    remind,
    standing,
    take_back,
    unhealthy,
)
from statemachine.cluster.node import NodeMachine
from statemachine.cluster.raising import take_raised
from statemachine.cluster.recovery import after_loss, do_with, note_cause, reconfigure, take_quiesced
from statemachine.cluster.resuming import resume_command
from statemachine.cluster.rollback import foreign, take_restore_failed
from statemachine.cluster.snapshots import intervals, persisting, snapshots
from statemachine.cluster.state import SUSPICION, SUSPICIOUS, Cluster
from statemachine.cluster.stragglers import take_times
from statemachine.cluster.timeouts import node_lost
from statemachine.events import NodeVanished, SignalArrived
from statemachine.messages.cluster import (
    Heartbeat,
    Hello,
    LayersPersisted,
    Leaving,
    PersistFailed,
    Prepare,
    Quiesced,
    Released,
    RestoreFailed,
    Signal,
    SnapshotCompleted,
    Stepped,
    TrainerLost,
)
from statemachine.messages.common import (
    Finished,
    PeerSuspected,
    Prepared,
    Quiesce,
    ReplicaDiverged,
    Resumed,
    Snapping,
    SnapshotFailed,
)
from statemachine.messages.values import ClusterPhase

_LINE_CHARACTERS = 200
"""Of a failure, in the reason of its event: the whole detail is there, too."""


def arrived(c: Cluster, event: SignalArrived) -> None:
    """Look up what this signal of this sender means, and do it."""
    name, incarnation, signal = event.message.node, event.message.incarnation, event.message.signal
    verdict = TABLE[type(signal), standing(c, name, incarnation)]
    match verdict:
        case Verdict.TAKE:
            node = c.nodes[name]
            node.heard_at = c.at
            take(c, node, signal)
            return
        case Verdict.ADMIT:
            assert isinstance(signal, Hello), "only Hello introduces a node"
            newcomer(c, name, incarnation, signal)
        case Verdict.RETURN:
            returned(c, c.nodes[name], signal)
        case Verdict.FENCE:
            fence(c, name, incarnation, "this incarnation is over")
        case Verdict.INQUIRE:
            if (name, incarnation) not in c.rejected:
                inquire(c, name, incarnation)
        case Verdict.IGNORE:
            c.ignore(f"{type(signal).__name__} of an incarnation that is not current", name)
        case _:
            assert_never(verdict)
    c.others_heard_at = c.at


def take(c: Cluster, node: NodeMachine, signal: Signal) -> None:
    """A signal of the current incarnation of a node."""
    match signal:
        case Hello():
            hello(c, node, signal)
        case Heartbeat():
            node.obeyed = max(node.obeyed, signal.generation)
            take_heartbeat(c, node, signal)
            take_doing(c, node, signal)
            if not node.greeted:  # Its Hello was lost, or this coordinator is a new one.
                remind(c, node, c.timing.silence_s)
            take_acknowledgement(c, node, signal)
            snapshots.take_kept(c, node, signal)
            take_times(node, signal)
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
            suspect(c, node, signal)
        case ReplicaDiverged():
            detail, where = signal.detail, {"generation": signal.generation, "step": signal.step}
            c.emit("ReplicaDiverged", detail, node=node.name, **where, layer=signal.layer)
        case Finished():
            take_finished(c, node, signal)
        case Leaving():
            node.leaving = True
            set_draining(c, node, signal.reason)
            if node.released:
                c.send(node, Released())
        case Snapping():
            snapshots.take_snapping(c, node, signal)
        case SnapshotCompleted():
            snapshots.take_completed(c, node, signal)
        case SnapshotFailed():
            snapshots.take_failed(c, node, signal)
        case LayersPersisted():
            persisting.take_persisted(c, node, signal)
        case PersistFailed():
            persisting.take_persist_failed(c, node, signal)
        case RestoreFailed():
            lost = take_restore_failed(c, node, signal)
            if lost is not None:
                fail(c, lost)
        case _:
            assert_never(signal)


# --- Hello ---------------------------------------------------------------------------------------


def newcomer(c: Cluster, name: str, incarnation: int, signal: Hello) -> None:
    """A Hello of an incarnation that is new here."""
    c.generation = max(c.generation, signal.generation)
    old = c.nodes.get(name)
    if old is not None and old.alive:
        if c.at - c.heard_at(old) <= c.timing.silence_s:
            reason = f"a node named {name!r} is alive at {old.facts.host}: give this one another name"
            reject(c, name, incarnation, reason)
            return
        node_lost(c, old, "silence", f"{name} is silent, and a new incarnation of it came")
    if admit(c, name, incarnation, signal):
        hello(c, c.nodes[name], signal)


def returned(c: Cluster, node: NodeMachine, signal: Signal) -> None:
    """A node that was declared OFFLINE is heard again under the same incarnation."""
    if not may_return(c, node):
        fence(c, node.name, node.incarnation, "the cluster went on without this node: come back as a new one")
    elif not isinstance(signal, Hello):
        inquire(c, node.name, node.incarnation)
    else:
        take_back(c, node)
        if c.active and c.attempt is not None and c.changing and not c.attempt.resume_sent:
            do_with(c, c.attempt, node)
        hello(c, node, signal)


def hello(c: Cluster, node: NodeMachine, signal: Hello) -> None:
    """Compare what the node says with what we believe; repeat what it may have missed."""
    if signal.generation < node.obeyed:
        c.ignore("a Hello from before what this node said since", node.name)
        return
    node.obeyed = signal.generation
    node.facts = signal.facts
    news = snapshots.take_held(c, node, signal)
    c.generation = max(c.generation, signal.generation)
    job = c.job
    if signal.job_id is not None and (job is None or not c.active or signal.job_id != job.job_id):
        say_not_under_way(c, node, signal.job_id)
    if node.released:
        c.send(node, Released())
    if job is None:
        return
    if not c.active:
        if node.snapshots and c.phase is ClusterPhase.FINISHED:
            say_not_under_way(c, node, job.job_id)
        return
    if node.asked:
        c.send(node, Prepare(job=job, profile=c.profiler == node.name))
    if node.prepared and (signal.job_id != job.job_id or not signal.prepared):
        unhealthy(c, node)
        node.returning = True
        _lost_trainers(c, node, "hello", f"the trainers of {node.name} are gone")
        return
    if news and c.phase is ClusterPhase.PAUSED and c.giving_up:
        note_cause(c, "resumed", [node.name])
        reconfigure(c, f"{node.name} holds a part of the snapshot", "abort")
        return
    persisting.repeat(c, node, signal)
    repeat(c, node, signal)


def repeat(c: Cluster, node: NodeMachine, signal: Hello) -> None:
    """Send again the command that this node has yet to obey."""
    attempt = c.attempt
    if attempt is None:
        return
    match c.phase:
        case ClusterPhase.QUIESCING:
            if node.name in attempt.expected and node.name not in attempt.reports:
                c.send(node, Quiesce(generation=attempt.generation, mode=attempt.mode))
        case ClusterPhase.RECOVERING | ClusterPhase.RUNNING if attempt.resume_sent:
            here = signal.generation == attempt.generation
            if node.name not in attempt.members or (here and signal.training):
                return
            command = resume_command(c)
            if here and signal.quiesced and command is not None:
                c.send(node, command)
            elif node.name in c.planned:
                # Its trainers failed and are back, all in an outage.
                node.returning = True
                _lost_trainers(
                    c, node, "hello", f"{node.name} does not train under generation {attempt.generation}"
                )
        case _:
            pass


def _lost_trainers(c: Cluster, node: NodeMachine, how: str, reason: str) -> None:
    """``how`` it was noticed: the trainer's cause of failure, or a Hello that did not speak of it."""
    planned = node.name in c.planned or (c.attempt is not None and node.name in c.attempt.expected)
    if planned and c.phase is not ClusterPhase.PAUSED:
        note_cause(c, "trainer_lost", [node.name], how)
    after_loss(c, node, reason)


# --- failures ------------------------------------------------------------------------------------


def suspect(c: Cluster, node: NodeMachine, signal: PeerSuspected) -> None:
    """A hint. Who died is for others to say; but if nobody did, somebody must mend the group in the end."""
    c.emit("PeerSuspected", signal.detail, node=node.name, generation=signal.generation)
    attempt = c.attempt
    concerned = attempt is not None and attempt.resume_sent and signal.generation == attempt.generation
    if concerned and c.phase in SUSPICIOUS and SUSPICION not in c.due:
        c.suspected_at_step, c.seen_going_on = c.ledger.known_step, False
        c.set_timer(SUSPICION, c.timing.silence_s + c.timing.suspicion_s)


def trainer_lost(c: Cluster, node: NodeMachine, signal: TrainerLost) -> None:
    """A trainer of this node died, hung or raised: the node is UNHEALTHY until it is prepared again."""
    if signal.generation < node.obeyed:
        c.ignore("a TrainerLost from before what this node said since", node.name)
        return
    if not c.active:
        c.ignore("a TrainerLost while no job is under way: its node has another one", node.name)
        return
    changed = unhealthy(c, node)
    if not changed and (signal.cause != "unprepared" or node.unfit is not None):
        return
    node.returning = True
    if signal.cause == "unprepared":
        node.unfit = signal.detail
    c.last_failure = f"{node.name}/{signal.device} {signal.cause}: {signal.detail}"
    c.emit(
        "TrainerLost",
        f"trainer {signal.device} of {node.name}: {signal.cause}{_in_a_line(signal)}",
        node=node.name,
        device=signal.device,
        cause=signal.cause,
        detail=signal.detail,
    )
    c.publish()
    if not changed:  # Its loss is told and dealt with; that it cannot come back is news.
        return
    if signal.cause == "foreign" and (why := foreign(c, signal)):
        fail(c, why)
        return
    if signal.cause in ("raised", "foreign") and (why := take_raised(c, node, signal)):
        fail(c, why)
        return
    _lost_trainers(c, node, signal.cause, f"trainer {signal.device} of {node.name}: {signal.cause}")


def _in_a_line(signal: TrainerLost) -> str:
    """The exception of a traceback, which ends it; else what happened, which comes before what it printed."""
    lines = signal.detail.strip().splitlines()
    if not lines:
        return ""
    line = lines[-1] if signal.cause == "raised" else lines[0]
    return f", {line[:_LINE_CHARACTERS]}"


def vanished(c: Cluster, event: NodeVanished) -> None:
    """The broker says that a node's session is over."""
    c.rejected.pop((event.node, event.incarnation), None)
    node = c.nodes.get(event.node)
    if node is None:
        unknown(c, event.node)
        return
    if node.incarnation != event.incarnation or not node.alive:
        return
    if event.graceful:
        node_lost(c, node, "goodbye", f"{node.name} left")
    elif c.at < c.wills_doubtful_until:
        inquire(c, node.name, node.incarnation)  # If it does not answer, it is lost for its silence.
    else:
        node_lost(c, node, "last_will", f"the broker lost the session of {node.name}")
