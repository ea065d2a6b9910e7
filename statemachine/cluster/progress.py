"""Committed steps: which are known, which were published, and how gaps are filled.

``StepCommitted`` is published once per step and in order. A coordinator that was away, or a message that
was lost in an outage, leaves a gap; the votes are then requested from a node that kept training
(``RequestSteps``), since every rank knows the vote of every step.
"""

from collections.abc import Iterable

from msgspec.structs import replace

from statemachine.cluster.node import NodeMachine
from statemachine.cluster.phases import Paused, Planning, Running
from statemachine.cluster.recovery_times import REPORTED_S, note_survivors
from statemachine.cluster.skipped_updates import explain, is_counted
from statemachine.cluster.spikes import note_loss
from statemachine.cluster.state import STEPS, Cluster
from statemachine.effects import EmitEvent, RecordSteps
from statemachine.events import StepsMissed
from statemachine.messages.cluster import Heartbeat, RequestSteps, Stepped
from statemachine.messages.values import CommittedStep, Evaluation, Job, Vote


def _may_raise(c: Cluster, generation: int) -> bool:
    """Return whether a commit reported under ``generation`` may raise the newest known step.

    It may not if a later generation was resumed since, nor between a decision and its Resume: the step to
    resume from is settled then, and what a dead rank did beyond it is being redone.
    """
    state = c.state
    settled = isinstance(state, Planning) or (isinstance(state, Paused) and state.decided)
    return generation >= c.resumed_generation > 0 and not settled


def take_stepped(c: Cluster, node: NodeMachine, signal: Stepped) -> None:
    """Record steps that a rank committed. From an older group only steps that are already known count (as an
    answer).
    """
    progress = c.progress
    if not c.active:
        c.ignore("steps while no job is under way", node.name)
        return
    if signal.lineage != c.lineage:
        c.ignore("steps of another lineage", node.name)
        signal = replace(signal, steps=())
    fresh = _may_raise(c, signal.generation)
    steps = [s for s in signal.steps if fresh or s.step <= progress.known_step]
    if len(steps) < len(signal.steps):
        c.ignore("steps of an older generation", node.name)
    before, published_before = progress.known_step, progress.published_step
    learn(c, steps)
    if fresh and steps and signal.step_s > 0:
        progress.step_s = signal.step_s
    if steps and node.step < steps[-1].step:
        node.step = steps[-1].step
    if progress.known_step > before:
        note_commit(c)
        c.persist()
        c.publish()
    publish_steps(c)
    c.dirty = True
    if signal.requested_first is not None:
        _take_missed(c, node, signal)
    if signal.requested_first == published_before + 1:
        c.cancel_timer(STEPS)
        if progress.published_step == published_before:
            progress.lacking.add(node.name)
        if progress.published_step < progress.known_step and progress.pending:
            request_missing(c)


def take_heartbeat(c: Cluster, node: NodeMachine, signal: Heartbeat) -> None:
    """Record the newest step that a node knows of. It counts for the roll-forward rule; Stepped brings the
    votes in between.
    """
    committed = signal.committed
    if committed is None or signal.lineage != c.lineage or not c.active:
        return
    node.step = max(node.step, committed.step)
    if committed.step > c.progress.known_step and _may_raise(c, signal.generation):
        c.progress.known = committed
        note_commit(c)
        c.persist()
        c.dirty = True


def note_commit(c: Cluster) -> None:
    """Reset the obstacles to progress, since a step was committed."""
    if c.at >= c.wills_unreliable_until:  # Otherwise an outage of the broker may have held the report back.
        note_survivors(c, c.planned, c.at - REPORTED_S)
    c.raised = 0
    if c.repeated_error is not None and c.progress.known_step >= c.repeated_error.step:
        c.repeated_error = None
    c.checkpoints.state_missing_since = c.checkpoints.unreadable_since = None
    c.checkpoints.wait_over = False


def learn(c: Cluster, steps: Iterable[CommittedStep]) -> None:
    progress = c.progress
    for committed in steps:
        if committed.step > progress.known_step:
            progress.known = committed
        if committed.step > progress.published_step:
            progress.pending[committed.step] = committed.vote


def learn_evaluation(c: Cluster, step: int, evaluation: Evaluation | None) -> None:
    """Record that a group evaluated the state after ``step``. If it was done twice, the first result that is
    received counts.
    """
    if evaluation is not None and step > c.progress.evaluated:
        c.progress.evaluations.setdefault(step, evaluation)


def publish_steps(c: Cluster) -> None:
    """Publish every step that is next in order; request the steps of a gap first."""
    progress, job = c.progress, c.job
    if job is None:
        return
    _publish_evaluation(c)
    while (vote := progress.pending.pop(progress.published_step + 1, None)) is not None:
        learn_evaluation(c, progress.published_step, vote.evaluation)
        _publish_evaluation(c)
        progress.published_step += 1
        c.dirty = True
        progress.loss = vote.loss
        progress.lacking.clear()
        c.out.append(_committed(c, job, progress.published_step, vote, progress.step_s))
        if vote.skipped:
            _note_skipped(c, vote)
        elif job.updates.on_spike == "skip":
            note_loss(c, progress.published_step, vote)
        _publish_evaluation(c)
    if progress.published_step >= progress.known_step:
        progress.gap_since = None
        progress.pending.clear()
        c.cancel_timer(STEPS)
    elif progress.pending:
        request_missing(c)


def _publish_evaluation(c: Cluster) -> None:
    """Publish the evaluation of the last published step, once. Evaluations of steps that were skipped are
    dropped.
    """
    progress = c.progress
    for step in [step for step in progress.evaluations if step < progress.published_step]:
        del progress.evaluations[step]
    evaluation = progress.evaluations.pop(progress.published_step, None)
    if evaluation is None or progress.published_step <= progress.evaluated:
        return
    progress.evaluated = progress.published_step
    c.dirty = True
    c.out.append(_evaluated(c, progress.published_step, evaluation))


def _evaluated(c: Cluster, step: int, evaluation: Evaluation) -> EmitEvent:
    return EmitEvent(
        cause=c.cause,
        name="Evaluated",
        reason=f"loss {evaluation.loss:.6g} on the held-out data after step {step}",
        generation=c.resumed_generation,
        step=step,
        details={
            "loss": evaluation.loss,
            "weight": evaluation.weight,
            "metrics": dict(evaluation.metrics),
            "took_s": evaluation.took_s,
        },
    )


def _committed(c: Cluster, job: Job, step: int, vote: Vote, step_s: float) -> EmitEvent:
    """Return the event of a committed step.

    :param step_s: duration of the step; 0: unknown.
    """
    rows = job.policy.global_batch
    return EmitEvent(
        cause=c.cause,
        name="StepCommitted",
        reason=f"step {step} of {job.steps}",
        generation=c.resumed_generation,
        step=step,
        details={
            "loss": vote.loss,
            "gradient_norm": vote.gradient_norm,
            "skipped": vote.skipped,
            "step_s": step_s,
            "samples_per_s": rows / step_s if step_s > 0 else None,
            "learning_rate": vote.learning_rate,
            "weight": vote.weight,
            "tokens_per_s": vote.weight / step_s if step_s > 0 and vote.weight > rows else None,
            "loss_scale": vote.loss_scale,
            "metrics": dict(vote.metrics),
            "mfu": _mfu(c, job, step_s),
        },
    )


def _mfu(c: Cluster, job: Job, step_s: float) -> float | None:
    """Return the model FLOPs utilisation of all planned devices, from 0 to 1; ``None`` if it is unknown."""
    profile = c.profiled.profile if c.profiled is not None else None
    devices = len(c.planned) * job.policy.devices_per_node
    if profile is None or not profile.flops or not profile.device_peak_flops or not devices or step_s <= 0:
        return None
    microbatches = job.policy.global_batch / profile.microbatch_rows
    return profile.flops * microbatches / (step_s * devices * profile.device_peak_flops)


def _note_skipped(c: Cluster, vote: Vote) -> None:
    """Count a skipped update. Warn about the first one in a row, the tenth, the hundredth …: a job that learns
    nothing must not look healthy.
    """
    if not is_counted(vote):
        return
    progress, place = c.progress, vote.not_finite
    step = progress.published_step
    progress.skipped = progress.skipped.added(step, place)
    in_row = progress.skipped.in_row(step)
    if str(in_row).strip("0") == "1":
        so_far = f", {in_row} steps in a row" if in_row > 1 else ""
        c.emit(
            "UpdateSkipped",
            f"step {step} updated no parameter because {explain(vote)}{so_far}",
            step=step,
            loss=vote.loss,
            steps=in_row,
            value=place.value if place is not None else None,
            layer=place.layer if place is not None else None,
            layer_name=place.name if place is not None else None,
            nodes=list(place.nodes) if place is not None else [],
        )


def request_missing(c: Cluster) -> None:
    """Ask one node after another for the missing steps; if none has them, continue after the gap."""
    progress = c.progress
    if STEPS in c.due:
        return
    candidates = [node.name for node in c.alive() if node.prepared and node.name not in progress.lacking]
    last = min(progress.pending) - 1 if progress.pending else progress.known_step
    if candidates:
        after = [
            name for name in candidates if progress.asked_node is not None and name > progress.asked_node
        ]
        progress.asked_node = (after or candidates)[0]
        c.send(c.nodes[progress.asked_node], RequestSteps(first=progress.published_step + 1, last=last))
        c.set_timer(STEPS, c.timing.steps_request_s)
    elif progress.pending and isinstance(c.state, Running):
        c.ignore(f"no node has the votes of steps {progress.published_step + 1} to {last}")
        progress.published_step = last
        publish_steps(c)


# --- steps that only another coordinator published -----------------------------------------------------


def take_steps_missed(c: Cluster, event: StepsMissed) -> None:
    """Ask a node for steps that another coordinator reported; if the last node asked did not answer, ask a
    different one.
    """
    progress = c.progress
    missed = event.first, min(event.last, progress.published_step)
    if not c.active or missed[0] > missed[1]:
        return
    if progress.missed is not None and progress.missed[0] == missed[0]:
        progress.missed_lacking.add(progress.missed_asked_node)
    else:
        progress.missed_lacking.clear()
    progress.missed = missed
    _request_missed(c)


def _request_missed(c: Cluster) -> None:
    progress = c.progress
    candidates = [
        node.name for node in c.alive() if node.prepared and node.name not in progress.missed_lacking
    ]
    if progress.missed is None or not candidates:
        progress.missed = None
        return
    progress.missed_asked_node = candidates[0]
    c.send(c.nodes[candidates[0]], RequestSteps(first=progress.missed[0], last=progress.missed[1]))


def _take_missed(c: Cluster, node: NodeMachine, signal: Stepped) -> None:
    """Add what a node remembers of the missed steps to the history, and ask other nodes for the rest."""
    progress, job = c.progress, c.job
    if progress.missed is None or signal.requested_first != progress.missed[0] or job is None:
        return
    first, last = progress.missed
    known = [(one.step, one.vote) for one in signal.steps if first <= one.step <= last]
    if known:
        recalled: list[EmitEvent] = []
        for step, vote in known:
            if vote.evaluation is not None:
                recalled.append(_evaluated(c, step - 1, vote.evaluation))
            recalled.append(_committed(c, job, step, vote, 0.0))
        c.out.append(RecordSteps(cause=c.cause, steps=tuple(recalled)))
        progress.missed_lacking.clear()
        newest = known[-1][0]
        progress.missed = (newest + 1, last) if newest < last else None
    else:
        progress.missed_lacking.add(node.name)
    _request_missed(c)


# --- steps that are known and not published --------------------------------------------------------------


def steps_overdue(c: Cluster) -> None:
    """Ask another node for missing steps, since the last one did not answer."""
    if c.progress.published_step < c.progress.known_step and c.progress.known is not None:
        c.progress.pending.setdefault(c.progress.known.step, c.progress.known.vote)
        request_missing(c)


def check_gaps(c: Cluster) -> None:
    """Request steps that only heartbeats mention for longer than a Stepped should take; called at every tick."""
    progress = c.progress
    if progress.published_step >= progress.known_step:
        progress.gap_since = None
    elif progress.gap_since is None:
        progress.gap_since = c.at
    elif c.at - progress.gap_since > c.timing.steps_request_s / 2 and progress.known is not None:
        progress.pending.setdefault(progress.known.step, progress.known.vote)
        publish_steps(c)
