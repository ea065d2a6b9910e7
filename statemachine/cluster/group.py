"""The training group of a generation: it resumes, commits its first step, finishes; then drained nodes go."""

from statemachine.cluster.ledger import learn_evaluation, tell
from statemachine.cluster.node import NodeMachine
from statemachine.cluster.phases import PhaseEvent
from statemachine.cluster.public import pipelines
from statemachine.cluster.rules import Resumption
from statemachine.cluster.snapshots.buddies import present_buddies
from statemachine.cluster.state import RESUME, Attempt, Cluster, Recovery
from statemachine.cluster.words import goes_on
from statemachine.messages.cluster import Released
from statemachine.messages.common import Finished, Resumed
from statemachine.messages.values import ClusterPhase


def take_resumed(c: Cluster, node: NodeMachine, signal: Resumed) -> None:
    attempt = c.attempt
    if attempt is None or not attempt.resume_sent or signal.generation != attempt.generation:
        c.ignore("a Resumed that nobody waits for", node.name)
        return
    attempt.resumed[node.name] = signal
    c.dirty = c.dirty or len(attempt.resumed) >= len(c.planned)


def take_finished(c: Cluster, node: NodeMachine, signal: Finished) -> None:
    attempt = c.attempt
    if attempt is None or not attempt.resume_sent or signal.generation != attempt.generation:
        c.ignore("a Finished that nobody waits for", node.name)
        return
    attempt.finished[node.name] = signal
    node.step = max(node.step, signal.step)
    learn_evaluation(c, signal.step, signal.evaluation)
    tell(c)
    c.dirty = True


def follow_group(c: Cluster) -> None:
    """Step 6: has the group resumed, has it committed its first step?"""
    attempt, resumption, record = c.attempt, c.resumption, c.recovery
    if attempt is None or resumption is None or not attempt.resume_sent:
        return
    committed = c.ledger.known_step > resumption.step or bool(attempt.finished)
    everybody = all(name in attempt.resumed for name in resumption.plan.nodes)
    if c.phase is ClusterPhase.RECOVERING and (everybody or committed):
        # A commit needs every rank, so it proves that the others resumed, whatever is still under way.
        c.enter(PhaseEvent.GROUP_RESUMED)
        c.cancel_timer(RESUME)
        c.blamed.clear()
        c.unreached.clear()
        if record is not None:
            record.resumed_at = c.at
        c.persist()
        c.emit(
            "TrainingResumed",
            f"generation {attempt.generation} trains from step {resumption.step} on",
            step=resumption.step,
            bytes_moved=sum(signal.bytes_moved for signal in attempt.resumed.values()),
            rendezvous_s=max((signal.rendezvous_s for signal in attempt.resumed.values()), default=0.0),
            state_s=max((signal.state_s for signal in attempt.resumed.values()), default=0.0),
        )
        c.publish()
    if c.phase is not ClusterPhase.RUNNING or not committed:
        return
    if record is not None and record.committed_at is None:
        record.committed_at = c.at
    late = record is not None and record.committed_at is not None and record.committed_at < c.at
    if record is not None and (everybody or late):
        _complete(c, attempt, resumption, record)
    release_drained(c)


def _ms(later: float | None, earlier: float | None) -> float:
    return round(1e3 * max(0.0, later - earlier), 3) if later is not None and earlier is not None else 0.0


def _complete(c: Cluster, attempt: Attempt, resumption: Resumption, record: Recovery) -> None:
    """The first commit of the new generation: training goes on."""
    c.recovery = None
    moved = sum(signal.bytes_moved for signal in attempt.resumed.values())
    plan = resumption.plan
    recovery = {
        "cause": record.cause,
        "nodes": record.nodes,
        "detected_how": record.detected_how,
        "detected_at": record.detected_at,
        "quiesce_ms": _ms(record.quiesced_at, record.detected_at),
        "plan_ms": _ms(record.planned_at, record.quiesced_at),
        "state_ms": _ms(record.resumed_at, record.planned_at),
        "resume_ms": _ms(record.committed_at, record.resumed_at),
        "total_ms": _ms(record.committed_at, record.detected_at),
        "rolled_back_steps": record.rolled_back_steps,
        "recomputed_steps": record.recomputed_steps,
        "tier": record.tier or ("live_replica" if plan.transfers or plan.part_bytes else "none"),
        "bytes_moved": moved,
        "method": plan.method,
        "reason": plan.reason,
        "generation": attempt.generation,
        "generations_tried": record.tried,
        "step": resumption.step,
        "pipelines_before": pipelines(record.before),
        "pipelines_after": pipelines(plan.pipelines),
    }
    c.emit("RecoveryCompleted", goes_on(record.cause, record.nodes), recovery=recovery)
    c.publish()


def release_drained(c: Cluster) -> None:
    """Nodes that were to leave and that no plan needs may go."""
    if c.active and c.ledger.told < c.ledger.known_step:
        return  # one of them may be the only one that knows the missing votes
    planned = {*c.planned, *present_buddies(c).values()}
    for node in c.alive():
        if node.draining is not None and not node.released and node.name not in planned:
            release(c, node)


def kept(c: Cluster) -> frozenset[str]:
    """Nodes that wait for their release and that the plan under way cannot do without.

    Where they were kept for layers that nobody else had, its transfers may have brought these to others:
    then it can by now. Where layers are in parts, the plan does not tell who brings them to whom.
    """
    attempt, resumption = c.attempt, c.resumption
    if attempt is None or resumption is None or c.job is None:
        return frozenset()
    if not attempt.kept_for or resumption.held_parts:
        return attempt.kept
    elsewhere = {
        layer
        for pipeline in resumption.plan.pipelines
        for stage in pipeline.stages
        if not {device.node for device in stage.devices} & attempt.kept
        for layer in range(stage.first_layer, stage.end_layer)
    }
    everything = max(pipeline.stages[-1].end_layer for pipeline in resumption.plan.pipelines)
    return attempt.kept if len(elsewhere) < everything else frozenset()


def release(c: Cluster, node: NodeMachine) -> None:
    node.released = True
    node.asked = node.prepared = False
    if c.profiler == node.name:
        c.profiler, c.dirty = None, True  # Another one is to measure the job.
    if c.attempt is not None:
        c.attempt.members.discard(node.name)
    c.send(node, Released())
    c.persist()
    c.emit("NodeReleased", f"{node.name} holds nothing that the job needs", node=node.name)
    c.publish()


def release_idle(c: Cluster) -> None:
    """A draining node outside the running plan holds nothing once a step of this generation committed."""
    if c.recovery is None:
        release_drained(c)
