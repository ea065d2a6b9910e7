"""Committed steps: what is known, what the world has been told, and how gaps are filled.

``StepCommitted`` goes out once per step and in order. A coordinator that was away, or a message that fell
into an outage, leaves a gap; the votes are asked back from a node that trained on (``StepsWanted``), since
every rank knows the vote of every step.
"""

from collections.abc import Iterable

from msgspec.structs import replace

from statemachine.cluster.node import NodeMachine
from statemachine.cluster.phases import Paused, Planning, Running
from statemachine.cluster.state import STEPS, Cluster
from statemachine.effects import EmitEvent, RecordSteps
from statemachine.events import StepsMissed
from statemachine.messages.cluster import Heartbeat, Stepped, StepsWanted
from statemachine.messages.values import CommittedStep, Evaluation, Job, Vote


def _is_news(c: Cluster, generation: int) -> bool:
    """May a commit reported under ``generation`` raise what is known?

    Not when a later generation was resumed since, and not between a decision and its Resume: the step to
    resume from is settled then, and what a dead rank did beyond it is being redone.
    """
    state = c.state
    settled = isinstance(state, Planning) or (isinstance(state, Paused) and state.decided)
    return generation >= c.resumed_generation > 0 and not settled


def take_stepped(c: Cluster, node: NodeMachine, signal: Stepped) -> None:
    """Steps that a rank committed; from an older group only what is already known counts (as an answer)."""
    ledger = c.ledger
    if not c.active:
        c.ignore("steps while no job is under way", node.name)
        return
    if signal.lineage != c.lineage:
        c.ignore("steps of another lineage", node.name)
        signal = replace(signal, steps=())
    fresh = _is_news(c, signal.generation)
    steps = [s for s in signal.steps if fresh or s.step <= ledger.known_step]
    if len(steps) < len(signal.steps):
        c.ignore("steps of an older generation", node.name)
    before, told = ledger.known_step, ledger.told
    learn(c, steps)
    if fresh and steps and signal.step_s > 0:
        ledger.step_s = signal.step_s
    if steps and node.step < steps[-1].step:
        node.step = steps[-1].step
    if ledger.known_step > before:
        committed_again(c)
        c.persist()
        tell(c)
        c.publish()
        c.dirty = True
    else:
        tell(c)
        c.dirty = True
    _take_missed(c, node, signal)
    if signal.wanted == told + 1:
        c.cancel_timer(STEPS)
        if ledger.told == told:
            ledger.lacking.add(node.name)
        if ledger.told < ledger.known_step and ledger.pending:
            ask(c)


def take_heartbeat(c: Cluster, node: NodeMachine, signal: Heartbeat) -> None:
    """The newest step a node knows of: counts for the rule; the votes in between come with Stepped."""
    committed = signal.committed
    if committed is None or signal.lineage != c.lineage or not c.active:
        return
    node.step = max(node.step, committed.step)
    if committed.step > c.ledger.known_step and _is_news(c, signal.generation):
        c.ledger.known = committed
        committed_again(c)
        c.persist()
        c.dirty = True


def committed_again(c: Cluster) -> None:
    """There is progress: what was in its way is not."""
    c.raised = 0
    if c.raising is not None and c.ledger.known_step >= c.raising.step:
        c.raising = None
    c.persisting.refused_at = None


def learn(c: Cluster, steps: Iterable[CommittedStep]) -> None:
    ledger = c.ledger
    for committed in steps:
        if committed.step > ledger.known_step:
            ledger.known = committed
        if committed.step > ledger.told:
            ledger.pending[committed.step] = committed.vote


def learn_evaluation(c: Cluster, step: int, evaluation: Evaluation | None) -> None:
    """A group evaluated the state after ``step``. Where it was done twice, the first result that is heard counts."""
    if evaluation is not None and step > c.ledger.evaluated:
        c.ledger.evaluations.setdefault(step, evaluation)


def tell(c: Cluster) -> None:
    """Emit every step that is next in order; ask for the gap before the others."""
    ledger, job = c.ledger, c.job
    if job is None:
        return
    _tell_evaluation(c)
    while (vote := ledger.pending.pop(ledger.told + 1, None)) is not None:
        learn_evaluation(c, ledger.told, vote.evaluation)
        _tell_evaluation(c)
        ledger.told += 1
        c.dirty = True
        ledger.loss = vote.loss
        ledger.lacking.clear()
        c.out.append(_committed(c, job, ledger.told, vote, ledger.step_s))
        _warn_of_skipped(c, vote)
        _tell_evaluation(c)
    if ledger.told >= ledger.known_step:
        ledger.behind_since = None
        ledger.pending.clear()
        c.cancel_timer(STEPS)
    elif ledger.pending:
        ask(c)


def _tell_evaluation(c: Cluster) -> None:
    """Emit the evaluation of the step told last, once; an evaluation of a skipped step is nobody's any more."""
    ledger = c.ledger
    for step in [step for step in ledger.evaluations if step < ledger.told]:
        del ledger.evaluations[step]
    evaluation = ledger.evaluations.pop(ledger.told, None)
    if evaluation is None or ledger.told <= ledger.evaluated:
        return
    ledger.evaluated = ledger.told
    c.dirty = True
    c.out.append(_evaluated(c, ledger.told, evaluation))


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
    """:param step_s: duration of the step; 0: unknown."""
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
    """Return the model FLOPs utilisation of all planned devices, from 0 to 1; ``None`` where it is unknown."""
    profile = c.profiled.profile if c.profiled is not None else None
    devices = len(c.planned) * job.policy.devices_per_node
    if profile is None or not profile.flops or not profile.device_peak_flops or not devices or step_s <= 0:
        return None
    microbatches = job.policy.global_batch / profile.microbatch_rows
    return profile.flops * microbatches / (step_s * devices * profile.device_peak_flops)


def _warn_of_skipped(c: Cluster, vote: Vote) -> None:
    """Of the first in a row, the tenth, the hundredth …: a job that learns nothing must not look well."""
    ledger = c.ledger
    ledger.skipped = ledger.skipped + 1 if vote.skipped else 0
    if ledger.skipped and str(ledger.skipped).strip("0") == "1":
        so_far = f", {ledger.skipped} steps in a row" if ledger.skipped > 1 else ""
        c.emit(
            "UpdateSkipped",
            f"the gradients of step {ledger.told} are not finite: no parameter was updated{so_far}",
            step=ledger.told,
            loss=vote.loss,
            steps=ledger.skipped,
        )


def ask(c: Cluster) -> None:
    """Ask one node after the other for the missing steps; when nobody has them, go on behind the gap."""
    ledger = c.ledger
    if STEPS in c.due:
        return
    names = [node.name for node in c.alive() if node.prepared and node.name not in ledger.lacking]
    last = min(ledger.pending) - 1 if ledger.pending else ledger.known_step
    if names:
        after = [name for name in names if ledger.asked is not None and name > ledger.asked]
        ledger.asked = (after or names)[0]
        c.send(c.nodes[ledger.asked], StepsWanted(first=ledger.told + 1, last=last))
        c.set_timer(STEPS, c.timing.steps_wanted_s)
    elif ledger.pending and isinstance(c.state, Running):
        c.ignore(f"nobody has the votes of steps {ledger.told + 1} to {last}")
        ledger.told = last
        tell(c)


# --- reported by another coordinator, and unknown to this one ------------------------------------------


def missed(c: Cluster, event: StepsMissed) -> None:
    """Ask a node for steps that another coordinator reported; if the one asked before did not answer, another one."""
    ledger = c.ledger
    wanted = event.first, min(event.last, ledger.told)
    if not c.active or wanted[0] > wanted[1]:
        return
    if ledger.missed is not None and ledger.missed[0] == wanted[0]:
        ledger.missed_lacking.add(ledger.missed_asked)
    else:
        ledger.missed_lacking.clear()
    ledger.missed = wanted
    _ask_missed(c)


def _ask_missed(c: Cluster) -> None:
    ledger = c.ledger
    names = [node.name for node in c.alive() if node.prepared and node.name not in ledger.missed_lacking]
    if ledger.missed is None or not names:
        ledger.missed = None
        return
    ledger.missed_asked = names[0]
    c.send(c.nodes[names[0]], StepsWanted(first=ledger.missed[0], last=ledger.missed[1]))


def _take_missed(c: Cluster, node: NodeMachine, signal: Stepped) -> None:
    """Put what a node remembers of them into the history; ask the others for the rest."""
    ledger, job = c.ledger, c.job
    if ledger.missed is None or signal.wanted != ledger.missed[0] or job is None:
        return
    first, last = ledger.missed
    known = [(one.step, one.vote) for one in signal.steps if first <= one.step <= last]
    if known:
        recalled: list[EmitEvent] = []
        for step, vote in known:
            if vote.evaluation is not None:
                recalled.append(_evaluated(c, step - 1, vote.evaluation))
            recalled.append(_committed(c, job, step, vote, 0.0))
        c.out.append(RecordSteps(cause=c.cause, steps=tuple(recalled)))
        ledger.missed_lacking.clear()
        newest = known[-1][0]
        ledger.missed = (newest + 1, last) if newest < last else None
    else:
        ledger.missed_lacking.add(node.name)
    _ask_missed(c)


# --- what is known, and was not told ---------------------------------------------------------------------


def steps_overdue(c: Cluster) -> None:
    """A node that was asked for missing steps did not answer: ask another one."""
    if c.ledger.told < c.ledger.known_step and c.ledger.known is not None:
        c.ledger.pending.setdefault(c.ledger.known.step, c.ledger.known.vote)
        ask(c)


def look(c: Cluster) -> None:
    """At every tick: heartbeats know of steps that no Stepped told, for longer than one should take."""
    ledger = c.ledger
    if ledger.told >= ledger.known_step:
        ledger.behind_since = None
    elif ledger.behind_since is None:
        ledger.behind_since = c.at
    elif c.at - ledger.behind_since > c.timing.steps_wanted_s / 2 and ledger.known is not None:
        ledger.pending.setdefault(ledger.known.step, ledger.known.vote)
        tell(c)
