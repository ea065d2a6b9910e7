"""Every reconfiguration - start, failure, join, drain, going on after a pause - is this one path.

generation += 1, persisted → Quiesce → reports → ``rules.decide`` → ComputePlan → Resume → Resumed → first
commit. A failure at any moment starts it again with the next generation. Which moments need that:

* QUIESCING: any expected node, since trainers may wait for it at a boundary; where they abort, only one whose
  trainers failed, since a node that is gone has no report to give, and nobody waits for it;
* RECOVERING before the Resume: any node whose report counted, since the planner was told of it;
* RECOVERING after the Resume, and RUNNING: any planned node.
"""

from collections.abc import Iterable
from typing import TypeVar

from planner.values import Device, Situation, StatePart
from statemachine.cluster.horizon import failed, horizon_s, plan_began, plan_ended
from statemachine.cluster.ledger import learn, learn_evaluation, tell
from statemachine.cluster.membership import fence, lose
from statemachine.cluster.node import NodeMachine
from statemachine.cluster.phases import PhaseEvent
from statemachine.cluster.public import plan_in_words
from statemachine.cluster.resuming import restore_of, resume_command, resume_limit_s
from statemachine.cluster.rules import Decision, Resumption, decide, trusted
from statemachine.cluster.sharding import held_parts, only_replicas
from statemachine.cluster.snapshots.buddies import able, buddies_of
from statemachine.cluster.snapshots.protections import settled, wanted, wish_of
from statemachine.cluster.snapshots.snapshots import interrupt
from statemachine.cluster.state import (
    FIND,
    GIVE_UP,
    JOIN,
    LOSSES,
    QUIESCE,
    RESUME,
    SUSPICION,
    Attempt,
    Cluster,
    Recovery,
)
from statemachine.effects import ComputePlan
from statemachine.events import PlanImpossible, PlanReady
from statemachine.messages.cluster import Prepare, Quiesced
from statemachine.messages.common import Quiesce
from statemachine.messages.values import ClusterPhase, CommittedStep, QuiesceMode

T = TypeVar("T")


def next_generation(c: Cluster) -> int:
    """One more than any generation ever persisted, and than any a node says it obeyed."""
    return c.generation + 1


def note_cause(c: Cluster, cause: str, nodes: list[str], how: str | None = None) -> None:
    """Start or extend the record of the recovery under way; a loss outranks what it interrupts."""
    record = c.recovery
    if record is None or (cause in LOSSES and record.cause not in LOSSES):
        before = c.resumption.plan.pipelines if c.resumption is not None else ()
        if cause in LOSSES:
            failed(c)
        c.recovery = Recovery(
            cause=cause,
            nodes=list(nodes),
            detected_how=how,
            detected_at=c.at,
            tried=record.tried if record is not None else 0,
            recomputed_steps=record.recomputed_steps if record is not None else c.discarded_steps,
            before=before,
        )
        return
    record.nodes.extend(name for name in nodes if name not in record.nodes)


def reconfigure(c: Cluster, why: str, mode: QuiesceMode) -> None:
    """Steps 1 and 2: announce a new generation to everybody who may take part."""
    was_running = c.phase is ClusterPhase.RUNNING
    record = c.recovery
    if record is not None:
        if was_running and mode == "abort" and c.job is not None and c.ledger.known_step < c.job.steps:
            record.recomputed_steps = 1
        record.tried += 1
        record.quiesced_at = record.planned_at = record.resumed_at = record.committed_at = None
    c.enter(PhaseEvent.GENERATION_STARTED)
    plan_ended(c)
    c.generation = next_generation(c)
    members = [node for node in c.alive() if node.ready]
    c.attempt = Attempt(
        generation=c.generation,
        mode=mode,
        began_at=c.at,
        expected=dict.fromkeys(node.name for node in members),
    )
    interrupt(c, why)
    for name in (JOIN, RESUME, GIVE_UP, SUSPICION, FIND):
        c.cancel_timer(name)
    c.giving_up = False
    c.persist()
    c.emit("GenerationStarted", why, mode=mode, why=why)
    c.send_all(members, Quiesce(generation=c.generation, mode=mode))
    limit = c.timing.quiesce_s if mode == "abort" else c.timing.boundary_limit_s(c.ledger.step_s)
    c.set_timer(QUIESCE, max(limit, c.grace_until - c.at))
    c.publish()
    if not members:
        c.cancel_timer(QUIESCE)
        pause(c, "no node is ready", needed=1)


def after_loss(c: Cluster, node: NodeMachine, why: str) -> None:
    """A node or one of its trainers is gone: does the generation need it?"""
    attempt = c.attempt
    if attempt is None or not c.active:
        return
    match c.phase:
        case ClusterPhase.QUIESCING:
            needed = node.name in attempt.expected
            if needed and not node.alive and attempt.mode == "abort":
                do_without(c, attempt, node)
                return
        case ClusterPhase.RECOVERING:
            needed = node.name in (c.planned if attempt.resume_sent else attempt.expected)
            needed = needed or (not node.alive and node.name in attempt.sources)
        case ClusterPhase.RUNNING:
            needed = node.name in c.planned
        case _:
            needed = False
    if needed:
        reconfigure(c, why, "abort")


def do_without(c: Cluster, attempt: Attempt, node: NodeMachine) -> None:
    """A node is lost while reports come in: nothing was decided yet, and who aborts waits for nobody.

    So that a hundred nodes that are lost at once are one generation. What it may have reported goes with it.
    """
    attempt.expected.pop(node.name, None)
    attempt.reports.pop(node.name, None)
    c.dirty = True
    if not attempt.expected:
        c.cancel_timer(QUIESCE)
        pause(c, "no node is ready", needed=1)
    elif attempt.reported:
        settle(c, attempt)


def do_with(c: Cluster, attempt: Attempt, node: NodeMachine) -> None:
    """A node that was lost is back with its state before anything was decided: its report counts, too."""
    if c.phase is not ClusterPhase.QUIESCING or attempt.mode != "abort":
        reconfigure(c, f"{node.name} is back before anything was decided", "abort")
    elif node.ready:
        attempt.expected[node.name] = None  # Its Hello is answered with the Quiesce.


# --- reports -------------------------------------------------------------------------------------


def take_quiesced(c: Cluster, node: NodeMachine, signal: Quiesced) -> None:
    """One node's reports; with the last of them the generation is decided."""
    attempt = c.attempt
    if (
        attempt is None
        or c.phase is not ClusterPhase.QUIESCING
        or signal.generation != attempt.generation
        or node.name not in attempt.expected
    ):
        c.ignore("reports that nobody waits for", node.name)
        return
    node.obeyed = max(node.obeyed, signal.generation)
    if len({report.device for report in signal.reports}) < node.facts.devices:
        # Its trainers are not (all) prepared, whatever it said before: it joins when they are.
        node.prepared = False
        if c.job is not None:
            node.asked = True
            c.send(node, Prepare(job=c.job, profile=False))
        attempt.reports[node.name] = ()
    else:
        attempt.reports[node.name] = signal.reports
    if attempt.reported:
        settle(c, attempt)


def settle(c: Cluster, attempt: Attempt) -> None:
    """Step 3: everybody answered; decide the step to resume from."""
    reports = {name: devices for name, devices in attempt.reports.items() if devices}
    strangers = [
        name
        for name, devices in reports.items()
        if not trusted(devices, c.nodes[name].counted_in, c.resumption)
    ]
    if strangers:
        for name in strangers:
            reason = "its trainers missed a decision that was carried out without them"
            fence(c, name, c.nodes[name].incarnation, reason)
            lose(c, c.nodes[name], "no_answer", reason)
        note_cause(c, "node_lost", strangers, "no_answer")
        reconfigure(c, f"{', '.join(strangers)} may not go on with stale state", "abort")
        return
    c.cancel_timer(QUIESCE)
    zero1 = c.job is not None and c.job.policy.zero1
    decision = decide(reports, c.ledger.known, c.resumption, attempt.mode, zero1=zero1)
    attempt.decision = decision
    attempt.members = set(reports)
    c.enter(PhaseEvent.REPORTS_COMPLETED)
    if decision.vote is not None:
        learn(c, [CommittedStep(step=decision.step, vote=decision.vote)])
    learn_evaluation(c, decision.step, decision.evaluation)
    if c.recovery is not None:
        c.recovery.quiesced_at = c.at
        if decision.outcome != "redo":
            c.recovery.recomputed_steps = 0
    c.persist()
    c.emit(
        "Quiesced",
        _explain(decision),
        step=decision.step,
        decision=decision.outcome,
        in_flight=decision.in_flight,
    )
    tell(c)
    ask_plan(c, attempt, with_draining=False)


def _explain(decision: Decision) -> str:
    match decision.outcome:
        case "start":
            return "everybody is at the start"
        case "boundary":
            return f"everybody stopped behind step {decision.step}"
        case "roll_forward":
            return f"step {decision.step} is committed somewhere: all roll forward to it"
        case "redo":
            return f"nobody committed step {decision.step + 1}: all discard it and redo it"


def ask_plan(c: Cluster, attempt: Attempt, *, with_draining: bool) -> None:
    """Step 4. First without the nodes that wait for their release; with them where it cannot be done."""
    decision = attempt.decision
    assert decision is not None, "a plan is asked for after a decision"
    draining = frozenset(name for name in attempt.members if c.nodes[name].draining is not None)
    attempt.kept = draining if with_draining else frozenset()
    left_out = frozenset() if with_draining else draining
    usable = tuple(name for name in sorted(attempt.members) if name not in left_out)
    attempt.situation = Situation(
        nodes=usable,
        holdings=of_nodes(decision.holdings, usable),
        previous=c.resumption.plan if c.resumption is not None else None,
        speeds=c.speeds,
        horizon_s=horizon_s(c, len(usable)),
        parts=parts_of(c, decision, usable),
        in_memory=decision.step > 0 and attempt.restoring is None,
    )
    c.publish()
    if c.templates_ready:
        attempt.wish = wish_of(c)
        c.out.append(
            ComputePlan(
                cause=c.cause,
                generation=attempt.generation,
                situation=attempt.situation,
                protection=wanted(c, usable),
            )
        )


def parts_of(
    c: Cluster, decision: Decision, usable: tuple[str, ...]
) -> dict[Device, tuple[StatePart, ...]] | None:
    """What parts of layers the devices of these nodes have, where layers are in parts."""
    if c.job is None or not (c.job.policy.zero1 or decision.parted):
        return None
    return of_nodes(decision.parts, usable)


def of_nodes(held: dict[Device, T], names: Iterable[str]) -> dict[Device, T]:
    """What the devices of these nodes hold."""
    among = frozenset(names)
    return {device: what for device, what in held.items() if device.node in among}


def no_plan(c: Cluster, attempt: Attempt, event: PlanImpossible) -> str | None:
    """There is no plan for these nodes now. Returns what state is lost, if that is why."""
    reason = event.reason
    waiting = [name for name in sorted(attempt.members) if c.nodes[name].draining is not None]
    if waiting and not attempt.kept:
        c.emit("NodeDraining", f"{', '.join(waiting)} cannot be released yet: {reason}", nodes=waiting)
        attempt.kept_for = event.lost_layers
        ask_plan(c, attempt, with_draining=True)
        return None
    if event.too_few:
        pause(c, reason, needed=event.needed)
        return None
    return reason


def pause(c: Cluster, reason: str, *, needed: int | None) -> None:
    c.lacking = reason
    if c.recovery is not None:
        # It ends here, without a commit; going on will be a recovery of its own.
        c.discarded_steps, c.recovery = c.recovery.recomputed_steps, None
    c.enter(PhaseEvent.NODES_LACKED)
    present = sum(1 for node in c.alive() if node.ready)
    c.persist()
    c.emit("ClusterPaused", reason, needed=needed, present=present)
    c.publish()


# --- resume --------------------------------------------------------------------------------------


def awaits_plan(c: Cluster, event: PlanReady) -> bool:
    attempt = c.attempt
    if attempt is None or attempt.decision is None or attempt.resume_sent:
        return False
    return c.phase is ClusterPhase.RECOVERING and event.generation == attempt.generation


def take_plan(c: Cluster, event: PlanReady) -> None:
    """Step 5: the plan is here; from now on this generation is the one whose group may commit."""
    attempt = c.attempt
    if not awaits_plan(c, event) or attempt is None or attempt.decision is None:
        c.ignore("a plan of an older generation")
        return
    decision, plan = attempt.decision, event.plan
    sharded = c.job is not None and (c.job.policy.zero1 or decision.parted)
    from_replicas = only_replicas(plan, decision.parts) if sharded else []
    protection = settled(c, event.protection)
    c.resumption = Resumption(
        generation=attempt.generation,
        step=decision.step,
        vote=decision.vote,
        plan=plan,
        ready=decision.ready,
        ready_parts={device: decision.parts[device] for device in decision.ready if decision.parts[device]},
        held_parts=held_parts(plan, decision.holdings, decision.parts) if sharded else (),
        lineage=c.lineage,
        restore=restore_of(c, attempt),
        protection=protection,
        wish=attempt.wish,
        buddies=buddies_of(plan, protection, able(c, attempt.members)),
        evaluated=c.ledger.evaluated,
    )
    attempt.resume_sent = True
    c.keeping.urgent = True
    c.balance.speeds = dict(attempt.situation.speeds) if attempt.situation is not None else {}
    plan_began(c, len(plan.nodes))
    for name in attempt.members:
        c.nodes[name].counted_in = attempt.generation
    if c.recovery is not None:
        c.recovery.planned_at = c.at
        if from_replicas:
            c.recovery.tier = "replica"
    c.persist()
    c.emit(
        "PlanChosen",
        plan.reason,
        step=decision.step,
        method=plan.method,
        reason=plan.reason,
        transfers=len(plan.transfers),
        transfer_bytes=plan.part_bytes + sum(transfer.size_bytes for transfer in plan.transfers),
        from_replicas=from_replicas,
        estimated_iteration_s=plan.estimated_iteration_s,
        idle_nodes=list(plan.idle_nodes),
        **plan_in_words(plan),
    )
    command = resume_command(c)
    if command is not None:
        c.send_all((c.nodes[name] for name in sorted(attempt.members)), command)
    c.set_timer(RESUME, resume_limit_s(c))
    c.publish()
