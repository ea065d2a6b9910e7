"""Life of a job: accepted, built and measured on nodes, templates, the first plan, the end."""

import hashlib
from typing import Any

from planner.reasons import count_noun
from statemachine.cluster import corruption, drains
from statemachine.cluster.boundaries import follow_running, schedule_join
from statemachine.cluster.horizon import Exposure
from statemachine.cluster.loss_spikes import LossSpikes
from statemachine.cluster.membership import device_mismatch, mark_healthy, prepare, reject
from statemachine.cluster.node import NodeEvent, NodeMachine
from statemachine.cluster.phases import (
    Ended,
    Paused,
    PhaseEvent,
    Planning,
    Quiescing,
    Resuming,
    Running,
    TrainingGroup,
    Waiting,
)
from statemachine.cluster.progress import learn_evaluation, publish_steps
from statemachine.cluster.quarantine import readmit_needed
from statemachine.cluster.recovery import ask_plan, follow_group, note_cause, plan_ahead, reconfigure
from statemachine.cluster.skipped_updates import find_failure
from statemachine.cluster.snapshots import orders, persisting, requests
from statemachine.cluster.snapshots.snapshot_state import JobCheckpoints, JobSnapshots
from statemachine.cluster.snapshots.snapshots import record_if_complete
from statemachine.cluster.state import (
    FIND,
    FINISH,
    JOIN,
    PAUSE_LIMIT,
    QUIESCE,
    RESUME,
    SETTLE,
    SNAPSHOT,
    STEPS,
    SUSPICION,
    Cluster,
    ReplicaComparisons,
    StragglerState,
    TrainingProgress,
)
from statemachine.effects import BuildTemplates, CancelTemplates
from statemachine.error_text import describe_failing_nodes
from statemachine.events import StopRequested, SubmitRequested
from statemachine.messages.cluster import Heartbeat, Release, Stop
from statemachine.messages.common import Finished, Prepared
from statemachine.messages.values import ClusterPhase, CommittedStep, ProfiledJob

STOPPED = "stopped by a user"
"""Outcome of a job that a user stopped."""
SPARE_TEMPLATES = 2
"""Templates are made for this many nodes more than are present, so that they are ready for a join."""


def submit(c: Cluster, event: SubmitRequested) -> None:
    """Accept a job if none is under way, and reset what was known about the last one."""
    job = event.job
    if c.job is not None and c.job.job_id == job.job_id:
        # The client asks again because the answer was lost. The job may have ended meanwhile.
        c.answer(event.request, True, job.job_id)
        return
    if c.active and c.job is not None:
        c.answer(event.request, False, f"job {c.job.name!r} is under way: ftd stop {c.job.name}")
        return
    begin = event.start_checkpoint
    if begin is not None and begin.step > job.steps:
        beyond = (
            f"checkpoint.url holds the state after step {begin.step}, and the job ends with step {job.steps}"
        )
        c.answer(event.request, False, f"{beyond}: give it more steps, or another url")
        return
    c.transition(PhaseEvent.JOB_ACCEPTED, Waiting())
    c.job, c.last_failure, c.failing = job, "", {}
    c.profiled = c.profiler = c.resumption = None
    c.templates_ready, c.templates_for, c.templates_before, c.raised, c.repeated_error = False, 0, 0, 0, None
    c.progress, c.exposure, c.straggler_state = TrainingProgress(), Exposure(), StragglerState()
    c.snapshots, c.lineage, c.replicas = JobSnapshots(), 0, ReplicaComparisons()
    c.spikes = LossSpikes(skipped_batches=begin.vote.skipped_batches if begin is not None else ())
    c.checkpoints = JobCheckpoints(newest=begin, last_tried_step=begin.step if begin is not None else 0)
    if event.profile is not None:
        c.profiled = ProfiledJob(job=job, profile=event.profile)
    if begin is not None:
        # As if its steps had been committed here and all nodes that held them were dead: see ``rollback``.
        c.progress.known, c.progress.published_step = (
            CommittedStep(step=begin.step, vote=begin.vote),
            begin.step,
        )
        c.progress.loss, c.progress.evaluated = begin.vote.loss, begin.step
    for fault in c.faults.values():
        fault.outlived = True
    for node in list(c.nodes.values()):
        node.reset_job()
        problem = device_mismatch(node.facts, job.policy)
        if node.alive and problem is not None:
            del c.nodes[node.name]
            reject(c, node.name, node.incarnation, problem)
    c.persist()
    c.answer(event.request, True, job.job_id)
    c.emit(
        "JobSubmitted",
        f"job {job.name!r}: {count_noun(job.steps, 'step')}",
        name=job.name,
        steps=job.steps,
        job=job.job_id,
        global_batch=job.policy.global_batch,
    )
    c.publish()


def stop(c: Cluster, event: StopRequested) -> None:
    job = c.job
    is_named = job is not None and event.job in (job.job_id, job.name)
    # The client asks again if the answer was lost.
    was_stopped = is_named and isinstance(c.state, Ended) and c.state.outcome == STOPPED
    if job is None or not (c.active or was_stopped):
        c.answer(event.request, False, "no job is under way")
    elif not is_named:
        c.answer(event.request, False, f"the job under way is {job.name!r}, not {event.job!r}")
    else:
        c.answer(event.request, True, f"job {job.name!r} is stopped")
        if not was_stopped:
            end_job(c, PhaseEvent.JOB_ENDED, STOPPED, "JobStopped")


def end_job(c: Cluster, event: PhaseEvent, reason: str, name: str, **details: Any) -> None:
    """End the job, whatever its outcome: its trainers end, the nodes stay."""
    ended = ClusterPhase.FINISHED if event is PhaseEvent.JOB_ENDED else ClusterPhase.FAILED
    c.transition(event, Ended(phase=ended, outcome=reason))
    requests.refuse_all(c, f"the job has ended: {reason}")
    persisting.abandon(c, "the job is over")
    c.snapshots.pending = None
    for node in c.nodes.values():
        node.feed(NodeEvent.ABANDONED)
        if node.alive:
            node.feed(NodeEvent.HEALTHY)  # Its trainers, lost or not, end with the job; new ones start.
    for timer in (QUIESCE, RESUME, JOIN, SETTLE, STEPS, PAUSE_LIMIT, SUSPICION, SNAPSHOT, FINISH, FIND):
        c.cancel_timer(timer)
    c.persist()
    c.emit(name, reason, **details)
    # The process for its plans starts while the model is measured.
    if c.templates_for or c.profiled is None:
        c.out.append(CancelTemplates(cause=c.cause, job_id=c.current_job.job_id))
    c.send_all(
        c.alive(), Stop(job_id=c.current_job.job_id, reason=reason, failed=event is PhaseEvent.JOB_FAILED)
    )
    drains.settle(c)
    c.publish()


def send_stop(c: Cluster, node: NodeMachine, job_id: str) -> None:
    """Stop a job on a node. What the node holds of a job that failed or is unknown stays, since it may be
    needed.
    """
    done = c.job is not None and c.job.job_id == job_id and c.phase is ClusterPhase.FINISHED
    c.send(node, Stop(job_id=job_id, reason="this job is not under way", failed=not done))


def fail(c: Cluster, reason: str) -> None:
    end_job(c, PhaseEvent.JOB_FAILED, reason, "JobFailed")


# --- towards the first plan ----------------------------------------------------------------------


def take_prepared(c: Cluster, node: NodeMachine, signal: Prepared) -> None:
    """Record that a node built the job, and its measurements if it was asked for them."""
    job = c.job
    if job is None or not c.active or signal.job_id != job.job_id:
        c.ignore("prepared for a job that is not under way", node.name)
        send_stop(c, node, signal.job_id)
        node.prepare_sent = False
        c.dirty = True
        return
    if node.released:
        c.ignore("prepared after it was released", node.name)
        c.send(node, Release())
        return
    if c.profiler == node.name and signal.profile is None:
        c.ignore("prepared without the profile that was requested", node.name)
        return
    newly_prepared = not node.prepared
    mark_healthy(c, node)
    if signal.profile is not None and c.profiled is None:
        c.profiled = ProfiledJob(job=job, profile=signal.profile)
        c.profiler = None
        c.persist()
    if newly_prepared:
        c.publish()


def take_build_progress(c: Cluster, node: NodeMachine, signal: Heartbeat) -> None:
    """Record how far a node is with starting its trainers and building the model, which people see before the
    start.
    """
    if signal.building != node.building:
        node.building = signal.building
        if c.phase is ClusterPhase.WAITING:
            c.publish()


def templates_ready(c: Cluster, job_id: str) -> None:
    if c.job is None or c.job.job_id != job_id or c.templates_ready or not c.active:
        return
    c.templates_ready = True
    c.dirty = True
    if c.resumption is None:
        c.emit("JobPrepared", f"templates for up to {c.templates_for} nodes are ready")
        c.set_timer(SETTLE, c.timing.start_settle_s)
    c.publish()
    if isinstance(c.state, Planning):
        ask_plan(c, c.state)


def templates_failed(c: Cluster, job_id: str, reason: str) -> None:
    if c.job is None or c.job.job_id != job_id or not c.active:
        return
    if c.templates_ready:
        c.ignore(f"templates for more nodes cannot be made: {reason}")
    else:
        fail(c, reason)


def build(c: Cluster) -> None:
    """Ask nodes to build the job, one of them to measure it, and the planner for templates."""
    asked = []
    for node in c.alive():
        if node.prepare_sent or node.departing or node.build_error is not None:
            continue
        profile = c.profiled is None and c.profiler is None and node.quarantine is None
        if node.prepared and not profile:
            continue
        node.prepare_sent, node.prepared = True, False
        if profile:
            c.profiler = node.name
        asked.append(node)
    if asked:
        prepare(c, asked)
    build_templates(c)


def build_templates(c: Cluster) -> None:
    """Request templates if this process has none, or if more nodes came than they are for."""
    present = sum(1 for node in c.alive() if not node.released)
    if c.profiled is not None and (c.templates_for == 0 or present > c.templates_for):
        c.templates_for = max(present + SPARE_TEMPLATES, c.templates_before)
        c.out.append(
            BuildTemplates(
                cause=c.cause, profiled=c.profiled, max_nodes=c.templates_for, present=max(present, 1)
            )
        )


def nobody_can_build(c: Cluster) -> str | None:
    """Return why the job is at fault, if every present node failed to build it."""
    alive = [node for node in c.alive() if not node.released]
    errors = [node.build_error for node in alive if node.build_error is not None]
    if alive and len(errors) == len(alive):
        return f"no node can build the job; {alive[-1].name} reports: {errors[-1]}"
    return None


def maybe_start(c: Cluster) -> None:
    """Start with the first plan: with all nodes, or after a short while with those that are ready."""
    job = c.current_job
    if not c.templates_ready or c.profiled is None:
        return
    ready = [node.name for node in c.alive() if node.ready and not node.departing]
    building = any(node.prepare_sent and node.quarantine is None for node in c.alive())
    if not ready and not building:
        readmit_needed(c)
    enough = len(ready) > job.policy.tolerate
    settled = SETTLE not in c.due
    if not ready or not (settled or (enough and not building)):
        return
    c.cancel_timer(SETTLE)
    why = f"job {job.name!r} starts on {count_noun(len(ready), 'node')}"
    reconfigure(c, why, "abort", note_cause(c, "start", ready))


# --- the end -------------------------------------------------------------------------------------


def maybe_finish(c: Cluster, group: Running) -> None:
    """End the job, whose planned nodes have finished, once every step was published."""
    job = c.current_job
    if corruption.take_end(c, group):
        return
    if c.progress.published_step < job.steps:
        known = c.progress.known
        if known is not None and known.step not in c.progress.pending:
            c.progress.pending[known.step] = known.vote
            publish_steps(c)
        return
    if orders.last_checkpoint_missing(c) or persisting.last_export_missing(c):
        return
    digests: dict[int, str] = {}
    for name in group.planned:
        for layer, digest in sorted(group.finished[name].digests.items()):
            if digests.setdefault(layer, digest) != digest:
                c.emit(
                    "ReplicasDiverged",
                    f"the owners of layer {layer} do not agree",
                    node=name,
                    layer=layer,
                    digests=[digests[layer], digest],
                )
    lines = "".join(f"{layer}:{digest}\n" for layer, digest in sorted(digests.items()))
    checksum = hashlib.sha256(lines.encode()).hexdigest()
    failing = describe_failing_nodes(c.failing.items())
    outcome = f"finished after {count_noun(job.steps, 'step')}" + (f", but {failing}" if failing else "")
    end_job(c, PhaseEvent.JOB_ENDED, outcome, "JobFinished", checksum=checksum)


# --- level-triggered: called after every event that changed something -----------------------------


def reconcile(c: Cluster) -> None:
    """Reconcile the cluster with its present state, whatever event led to it."""
    if not c.active:
        drains.settle(c)
        return
    progress, job = c.progress, c.current_job
    if progress.skipped.runs:
        why = find_failure(
            progress.skipped,
            step=progress.published_step,
            steps=job.steps,
            max_skipped=job.updates.max_skipped,
        )
        if why is not None:
            fail(c, why)
            return
    if isinstance(c.state, Resuming | Running):
        follow_group(c, c.state)
    drains.settle(c)
    if c.snapshots.requests:
        requests.settle(c)
    build(c)
    if job.checkpoint.url:
        persisting.reconcile(c)
        persisting.reconcile_export(c)
    match c.state:
        case Waiting():
            problem = nobody_can_build(c)
            if problem is not None:
                fail(c, problem)
                return
            maybe_start(c)
        case Quiescing() as state:
            plan_ahead(c, state)
        case Running() if c.spikes.pending is not None:
            why = c.spikes.pending.describe()
            reconfigure(c, why, "abort", note_cause(c, "loss_spike", []))
        case Running() as group:
            if job.updates.on_spike == "skip":
                record_if_complete(c)
            if group.all_finished:
                maybe_finish(c, group)
            if c.state is group:
                follow_running(c, group)
            if c.state is group:
                orders.reconcile(c, group)
        case Paused():
            schedule_join(c)
            if JOIN not in c.due and not c.state.pause_limited:
                readmit_needed(c)


def take_finished(c: Cluster, node: NodeMachine, signal: Finished) -> None:
    group = c.state
    if not isinstance(group, TrainingGroup) or signal.generation != group.generation:
        c.ignore("an unexpected Finished", node.name)
        return
    group.finished[node.name] = signal
    node.step = max(node.step, signal.step)
    learn_evaluation(c, signal.step, signal.evaluation)
    publish_steps(c)
    c.dirty = True
