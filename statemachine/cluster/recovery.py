"""Recovery: the path from a loss to the first commit after it. It reads from top to bottom.

Every reconfiguration takes this one path: start, failure, join, drain, continuing after a pause.

    generation += 1, persisted → Quiesce → reports → ``rules.decide``
    → ComputePlan → Resume → Resumed → first commit

A failure at any moment starts it again with the next generation. Which failures do so depends on the phase:

* QUIESCING: a failure of any expected node, since trainers may wait for it at a boundary. In mode
  ``abort``, only a failure of trainers: a node that is gone has no report to send, and no node waits for
  it;
* RECOVERING before the Resume: a failure of any node whose report counted, since the planner was informed of
  it;
* RECOVERING after the Resume, and RUNNING: a failure of any planned node.

If live replicas are not enough, ``rollback`` finds another state to continue from.
"""

from dataclasses import replace
from typing import Any

import msgspec

from planner.reasons import join_names
from planner.values import Situation
from statemachine.cluster import recovery_times
from statemachine.cluster.drains import describe_released, leavers, settle_plan
from statemachine.cluster.membership import (
    declare_lost,
    fence,
    inquire,
    prepare,
    remove_unknown,
    silent_nodes,
)
from statemachine.cluster.node import NodeMachine
from statemachine.cluster.phases import (
    ActiveRecovery,
    Paused,
    PhaseEvent,
    Planning,
    Quiescing,
    Resuming,
    Running,
    TrainingGroup,
)
from statemachine.cluster.progress import learn, learn_evaluation, publish_steps
from statemachine.cluster.public import pipelines, plan_details
from statemachine.cluster.quarantine import describe_aside, note_failure, quarantine_node
from statemachine.cluster.replicas import describe, settle
from statemachine.cluster.rules import Outcome, Resumption, decide, is_trusted, of_nodes
from statemachine.cluster.sharding import held_parts, only_replicas
from statemachine.cluster.snapshots import persisting
from statemachine.cluster.snapshots.protections import (
    adopt_protection,
    protection_request,
    requested_protection,
)
from statemachine.cluster.snapshots.replica_peers import choose_replica_peers, eligible_peers
from statemachine.cluster.snapshots.snapshot_state import JobSnapshots
from statemachine.cluster.snapshots.snapshots import interrupt, restore_from
from statemachine.cluster.state import (
    FIND,
    JOIN,
    LOSSES,
    PAUSE_LIMIT,
    QUIESCE,
    RESUME,
    SUSPICION,
    Cluster,
)
from statemachine.effects import ComputePlan, PlanAhead
from statemachine.events import NodeVanished, PlanReady, RestoreChecked
from statemachine.messages.cluster import Quiesced, Resume
from statemachine.messages.common import PeerSuspected, Quiesce, Resumed
from statemachine.messages.values import (
    CommittedStep,
    Divergence,
    NodeFailure,
    QuiesceMode,
    ReplicaPeer,
    Restore,
)

_DECIDED: dict[Outcome, str] = {
    "start": "all nodes are at the start",
    "boundary": "all nodes stopped after step {step}",
    "roll_forward": "some rank committed step {step}: all roll forward to it",
    "redo": "no rank committed step {next}: all discard it and redo it",
}
"""Words for a decision, by its outcome."""
_CONTINUES = {
    "start": "training begins",
    "node_lost": "training continues after the loss of {who}",
    "trainer_lost": "training continues after the loss of a trainer of {who}",
    "connection_lost": "training continues after a connection broke",
    "speed_changed": "training continues with a plan for the changed speed of {who}",
    "protection_changed": "training continues with another protection of snapshots",
    "resumed": "training continues after a pause",
    "corruption": "training continues after silent corruption",
    "loss_spike": "training continues without the batch of a spike of the loss",
}
"""Words for the end of a recovery, by the cause of the reconfiguration; see also ``_describe``."""


# --- 1. a node is lost ----------------------------------------------------------------------------


def take_vanished(c: Cluster, event: NodeVanished) -> None:
    """Handle the broker's message that a node's session is over."""
    c.rejected.pop((event.node, event.incarnation), None)
    node = c.nodes.get(event.node)
    if node is None:
        remove_unknown(c, event.node)
        return
    if node.incarnation != event.incarnation or not node.alive:
        return
    if event.graceful:
        lose_node(c, node, "goodbye", f"{node.name} left")
    elif c.at < c.wills_unreliable_until:
        inquire(c, node.name, node.incarnation)  # If it does not answer, it is lost for its silence.
    else:
        lose_node(c, node, "last_will", f"the broker lost the session of {node.name}")


def lose_node(c: Cluster, node: NodeMachine, how: str, reason: str) -> None:
    """Continue without a node that went OFFLINE."""
    declare_lost(c, node, how, reason)
    c.persist()
    c.publish()
    recover_from_loss(c, node, "node_lost", how, reason)


def lose_silent_nodes(c: Cluster) -> None:
    """Continue without the nodes that have been silent for too long."""
    for node in silent_nodes(c):
        c.cause = f"silence:{node.name}:{node.incarnation}"
        lose_node(c, node, "silence", f"nothing was heard from {node.name} for {c.timing.silence_s} s")


def note_cause(c: Cluster, cause: str, nodes: list[str], how: str | None = None) -> ActiveRecovery:
    """Begin the record of a recovery, or extend the one under way. A loss outranks the cause that it
    interrupts.
    """
    record = c.recovery
    if record is None or (cause in LOSSES and record.cause not in LOSSES):
        past = c.state.interrupted if isinstance(c.state, Paused) else record
        if cause in LOSSES:
            c.exposure.failures += 1
        found = ActiveRecovery(
            cause=cause,
            nodes=list(nodes),
            detected_how=how,
            detected_at=c.at,
            began_at=c.at,
            tried=record.tried if record is not None else 0,
            before=c.resumption.plan.pipelines if c.resumption is not None else (),
        )
        recovery_times.find_begin(c, found, nodes)
        if past is not None:
            found.recomputed_steps, found.rolled_back_steps = past.recomputed_steps, past.rolled_back_steps
            found.tier = past.tier
            if isinstance(c.state, Paused) or past.waited_until is not None:
                recovery_times.continue_after_pause(found, past, c.at)
        return found
    record.nodes.extend(name for name in nodes if name not in record.nodes)
    recovery_times.find_begin(c, record, nodes)
    return record


def recover_from_loss(c: Cluster, node: NodeMachine, cause: str, how: str, why: str) -> None:
    """Start a reconfiguration if the current generation needs a node or trainer that is gone."""
    state = c.state
    if node.name in c.required_nodes:
        record = note_cause(c, cause, [node.name], how)
    elif isinstance(state, Planning | Resuming) and node.name in state.sources and not node.alive:
        record = state.recovery
    else:
        return
    if isinstance(state, Quiescing) and state.mode == "abort" and not node.alive:
        state.recovery = record
        continue_without(c, state, node)
    else:
        reconfigure(c, why, "abort", record)


def continue_without(c: Cluster, state: Quiescing, node: NodeMachine) -> None:
    """Continue without a node that was lost while reports come in: nothing was decided, and nodes that abort
    do not wait for it.

    So a hundred nodes that are lost at once take one generation. What the node may have reported is
    discarded.
    """
    state.expected.pop(node.name, None)
    state.reports.pop(node.name, None)
    c.dirty = True
    if not state.expected:
        c.cancel_timer(QUIESCE)
        pause(c, "no node is ready", needed=1)
    elif state.reported:
        take_all_reports(c, state)


def include_returned_node(c: Cluster, node: NodeMachine) -> None:
    """Include a node that was lost and is back with its state: before the decision its report counts too."""
    state = c.state
    if not isinstance(state, Quiescing | Planning):
        return
    if isinstance(state, Planning) or state.mode == "boundary":
        reconfigure(c, f"{node.name} is back before anything was decided", "abort", state.recovery)
    elif node.ready:
        state.expected[node.name] = None  # Its Hello is answered with the Quiesce.


# --- 2. a new generation: all nodes stop and report -----------------------------------------------


def next_generation(c: Cluster) -> int:
    """Return one more than any generation ever persisted, or reported by a node as obeyed."""
    return c.generation + 1


def learn_generation(c: Cluster, generation: int) -> None:
    """Take note of a generation that a node has obeyed, whoever announced it."""
    if generation > c.generation:
        c.generation = generation
        c.persist()
        c.publish()


def reconfigure(c: Cluster, why: str, mode: QuiesceMode, record: ActiveRecovery) -> None:
    """Announce a new generation to every node that may take part (steps 1 and 2)."""
    interrupted = isinstance(c.state, Running) and mode == "abort"
    if interrupted and c.progress.known_step < c.current_job.steps:
        record.recomputed_steps = 1
    record.tried += 1
    record.quiesced_at = record.planned_at = record.resumed_at = record.committed_at = None
    c.exposure.plan_ended(c.at)
    c.generation = next_generation(c)
    members = [node for node in c.alive() if node.ready]
    expected = dict.fromkeys(node.name for node in members)
    c.transition(
        PhaseEvent.GENERATION_STARTED,
        Quiescing(generation=c.generation, recovery=record, mode=mode, began_at=c.at, expected=expected),
    )
    interrupt(c, why)
    for name in (JOIN, RESUME, PAUSE_LIMIT, SUSPICION, FIND):
        c.cancel_timer(name)
    c.persist()
    c.emit("GenerationStarted", why, mode=mode, why=why, recovery_cause=record.cause)
    c.send_all(members, Quiesce(generation=c.generation, mode=mode))
    limit_s = c.timing.quiesce_s if mode == "abort" else c.timing.boundary_limit_s(c.progress.step_s)
    c.set_timer(QUIESCE, max(limit_s, c.grace_until - c.at))
    c.publish()
    if not members:
        c.cancel_timer(QUIESCE)
        pause(c, "no node is ready", needed=1)


def plan_ahead(c: Cluster, state: Quiescing) -> None:
    """Request the plan that will likely be needed; repeat it whenever the set of expected nodes has changed.

    After a loss the other nodes stop in the same step, each with the layers that the plan gave it. If a
    node reports anything else, the plan is computed when that is known, as if nothing had been planned
    ahead.
    """
    resumption = c.resumption
    if state.mode != "abort" or state.planned_ahead_for == len(state.expected):
        return
    if resumption is None or not c.templates_ready or resumption.held_parts:
        return  # Devices then hold other parts than the plan alone determines.
    state.planned_ahead_for = len(state.expected)
    nodes = [c.nodes[name] for name in sorted(state.expected)]
    leaving = leavers(c)
    devices = {node.name: node.facts.devices for node in nodes if node not in leaving}
    if devices:
        c.out.append(
            PlanAhead(
                cause=c.cause,
                devices=devices,
                previous=resumption.plan,
                speeds=c.speeds,
                horizon_s=c.horizon_s(len(devices)),
            )
        )


def take_quiesced(c: Cluster, node: NodeMachine, signal: Quiesced) -> None:
    """Record one node's reports; with the last of them, decide."""
    state = c.state
    if (
        not isinstance(state, Quiescing)
        or signal.generation != state.generation
        or node.name not in state.expected
    ):
        c.ignore("unexpected reports", node.name)
        return
    node.obeyed = max(node.obeyed, signal.generation)
    if len({report.device for report in signal.reports}) < node.facts.devices:
        # Its trainers are not (all) prepared, whatever it reported before: it joins when they are.
        node.prepared = False
        node.prepare_sent = True
        prepare(c, [node])
        state.reports[node.name] = ()
    else:
        state.reports[node.name] = signal.reports
    if state.reported:
        take_all_reports(c, state)


# --- 3. the step to resume from is decided, and a plan is requested -------------------------------


def take_all_reports(c: Cluster, state: Quiescing) -> None:
    """Step 3: all nodes have answered; decide the step to resume from."""
    reports = {name: devices for name, devices in state.reports.items() if devices}
    strangers = [
        name
        for name, devices in reports.items()
        if not is_trusted(devices, c.nodes[name].counted_in, c.resumption)
    ]
    if strangers:
        for name in strangers:
            reason = "its trainers missed a decision that was carried out without them"
            fence(c, name, c.nodes[name].incarnation, reason)
            declare_lost(c, c.nodes[name], "no_answer", reason)
        record = note_cause(c, "node_lost", strangers, "no_answer")
        reconfigure(c, f"{', '.join(strangers)} must not continue with stale state", "abort", record)
        return
    diverged = settle(c) if c.replicas.reported else c.replicas.diverged
    if diverged is not None and not diverged.announced:
        # It may have been found only now, in a group that was stopped for something else.
        state.recovery = note_cause(c, "corruption", list(diverged.minority or diverged.nodes), "digests")
        if announce_divergence(c, diverged):
            reconfigure(c, describe(diverged), "abort", state.recovery)
            return
    c.cancel_timer(QUIESCE)
    zero1 = c.current_job.policy.zero1
    decision = decide(reports, c.progress.known, c.resumption, state.mode, zero1=zero1)
    if diverged is not None or c.spikes.pending is not None:
        decision = decision.without_state()
    planning = Planning(
        generation=state.generation,
        recovery=state.recovery,
        mode=state.mode,
        began_at=state.began_at,
        expected=state.expected,
        members=set(reports),
        decision=decision,
    )
    c.transition(PhaseEvent.REPORTS_COMPLETED, planning)
    if decision.vote is not None:
        learn(c, [CommittedStep(step=decision.step, vote=decision.vote)])
    learn_evaluation(c, decision.step, decision.evaluation)
    state.recovery.quiesced_at = c.at
    if decision.outcome != "redo":
        state.recovery.recomputed_steps = 0
    c.persist()
    c.emit(
        "Quiesced",
        _DECIDED[decision.outcome].format(step=decision.step, next=decision.step + 1),
        step=decision.step,
        decision=decision.outcome,
        in_flight=decision.in_flight,
    )
    publish_steps(c)
    ask_plan(c, planning)


def announce_divergence(c: Cluster, diverged: Divergence) -> bool:
    """Publish that copies of layers differ, and set the nodes aside that are known to be at fault. Return whether
    one was.
    """
    c.replicas.diverged = msgspec.structs.replace(diverged, announced=True)
    c.persist()
    c.emit(
        "ReplicasDiverged",
        describe(diverged),
        step=diverged.step,
        layer=diverged.layers[0],
        digests=sorted(set(diverged.digests.values())),
        layers=list(diverged.layers),
        nodes=list(diverged.nodes),
        minority=list(diverged.minority),
        agreed_step=diverged.agreed_step,
    )
    aside = False
    for name in diverged.minority:
        failure = NodeFailure(
            cause="corruption",
            at=c.at,
            step=diverged.step,
            generation=diverged.generation,
            detail=describe(diverged),
        )
        # A node that is set aside already must not be readmitted for the need of the job from now on.
        why = "its copies of layers are corrupt"
        aside = quarantine_node(c, c.nodes[name], "corruption", [failure], why) or aside
    return aside


def ask_plan(c: Cluster, state: Planning, left_out: frozenset[str] | None = None) -> None:
    """Step 4: request a plan.

    :param left_out: nodes that it is to do without; ``None``: all that are to leave (``drains``), at first.
    """
    decision = state.decision
    if left_out is None:
        left_out = frozenset(node.name for node in leavers(c)) & state.members
        state.drain_problems = {}
    state.left_out = left_out
    usable = tuple(name for name in sorted(state.members) if name not in left_out)
    state.situation = Situation(
        nodes=usable,
        holdings=of_nodes(decision.holdings, usable),
        previous=c.resumption.plan if c.resumption is not None else None,
        speeds=c.speeds,
        horizon_s=c.horizon_s(len(usable)),
        parts=of_nodes(decision.parts, usable) if decision.parted else None,
        in_memory=decision.step > 0 and state.restore_check is None,
    )
    c.publish()
    if c.templates_ready:
        state.requested_protection = requested_protection(c)
        c.out.append(
            ComputePlan(
                cause=c.cause,
                generation=state.generation,
                situation=state.situation,
                protection=protection_request(c, usable),
            )
        )


def pause(c: Cluster, reason: str, *, needed: int | None, pause_limited: bool = False) -> None:
    """Pause until what is missing arrives: there is no plan for the present nodes."""
    state = c.state
    assert isinstance(state, Quiescing | Planning), "only a generation that was not resumed can pause"
    # The recovery ends here without a commit; continuing will be a recovery of its own.
    decided = isinstance(state, Planning)
    paused = Paused(
        generation=state.generation,
        expected=state.expected,
        members=state.members if isinstance(state, Planning) else set(),
        sources=state.sources if isinstance(state, Planning) else (),
        decided=decided,
        reason=reason,
        pause_limited=pause_limited,
        interrupted=replace(state.recovery, nodes=[], before=()),
    )
    c.transition(PhaseEvent.NODES_MISSING, paused)
    present = sum(1 for node in c.alive() if node.ready)
    c.persist()
    aside = describe_aside(c, lasting=not pause_limited)
    why = "; ".join(filter(None, [reason, aside, describe_released(c)]))
    c.emit("ClusterPaused", why, needed=needed, present=present)
    c.publish()


# --- 4. the plan is here: all nodes resume --------------------------------------------------------


def take_plan(c: Cluster, event: PlanReady) -> None:
    """Step 5: resume under the plan. From now on only the group of this generation may commit."""
    state = c.state
    if not isinstance(state, Planning) or event.generation != state.generation:
        c.ignore("a plan of an older generation")
        return
    assert state.situation is not None, "the plan was requested"
    restore = None
    if state.restore_check is not None:
        roll_back(c, state, state.restore_check)
        restore = restore_of(c, state)
    decision, plan = state.decision, event.plan
    if state.left_out or state.drain_problems:
        settle_plan(c, state, plan.pipelines)
    from_replicas = only_replicas(plan, decision.parts) if decision.parted else []
    protection = adopt_protection(c, event.protection)
    resumption = c.resumption = Resumption(
        generation=state.generation,
        step=decision.step,
        vote=decision.vote,
        plan=plan,
        ready=decision.ready,
        ready_parts={device: decision.parts[device] for device in decision.ready if decision.parts[device]},
        held_parts=held_parts(plan, decision.holdings, decision.parts) if decision.parted else (),
        lineage=c.lineage,
        restore=restore,
        protection=protection,
        requested_protection=state.requested_protection,
        replica_peers=choose_replica_peers(plan, protection, eligible_peers(c, state.members)),
        evaluated=c.progress.evaluated,
    )
    group = c.state = Resuming(
        generation=state.generation,
        recovery=state.recovery,
        began_at=state.began_at,
        members=state.members,
        resumption=resumption,
        planned=plan.nodes,
        sources=state.sources,
        holdings=decision.holdings,
    )
    c.snapshots.urgent = True
    if plan.transfers or plan.part_bytes:
        c.replicas.copied = True
    c.straggler_state.speeds = dict(state.situation.speeds)
    c.exposure.plan_began(len(group.planned), c.at)
    for name in state.members:
        c.nodes[name].counted_in = state.generation
    group.recovery.planned_at = c.at
    if from_replicas:
        group.recovery.tier = "replica"
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
        **plan_details(plan),
    )
    c.send_all((c.nodes[name] for name in sorted(group.members)), resume_command(c, group))
    c.set_timer(RESUME, resume_limit_s(c, group))
    c.publish()


def roll_back(c: Cluster, state: Planning, event: RestoreChecked) -> None:
    """Undo, together with the Resume, what was committed after the step that is restored."""
    target = state.checkpoint or c.snapshots.newest
    assert target is not None, "it was checked"
    progress, before = c.progress, c.progress.known_step
    progress.roll_back(target.step, target.vote)
    c.lineage = state.generation
    if state.checkpoint is not None:
        persisting.discard_after(c, state.checkpoint)
        # A job that begins from a checkpoint lost nothing, and a second try returns from the same loss.
        if c.resumption is not None and state.recovery.tier != "persistent":
            c.exposure.state_losses += 1
        c.snapshots = JobSnapshots()
    c.snapshots.last_order_step = target.step
    c.replicas.roll_back(target.step)
    c.spikes = c.spikes.rolled_back(target.step)
    for node in c.nodes.values():
        node.step = min(node.step, target.step)
    undone = before - target.step
    state.recovery.rolled_back_steps += undone
    state.recovery.tier = event.tier
    what = "checkpoint" if state.checkpoint is not None else "snapshot"
    continues, lost = f"the job continues after step {target.step}: {event.reason}", state.loss_reason
    details: dict[str, Any] = {
        "generation": state.generation,
        "step": target.step,
        "from_step": before,
        "to_step": target.step,
        "undone_steps": undone,
        "tier": event.tier,
        "sources": list(state.sources),
    }
    if c.resumption is None:
        c.emit("JobResumed", continues, **details)
    else:
        back = f"{lost}; back to the {what} of step {target.step}: {event.reason}"
        c.emit("RolledBack", back, **details)


def restore_of(c: Cluster, state: Planning) -> Restore:
    """Return the source of the state of all trainers after a rollback."""
    record, checkpoint, job = c.snapshots.newest, state.checkpoint, c.current_job
    if checkpoint is not None:
        return Restore(
            job_id=job.job_id,
            step=checkpoint.step,
            generation=0,
            groups=(),
            sources={},
            url=job.checkpoint.url,
            job_name=job.name,
        )
    assert record is not None, "it was checked"
    return restore_from(c, record, state.sources)


def resume_command(c: Cluster, group: TrainingGroup) -> Resume:
    """Return the Resume of the current generation, also for a node that has to receive it again."""
    resumption, job = group.resumption, c.current_job
    plan = msgspec.structs.replace(resumption.plan, considered=())  # They are for people only.
    nodes = plan.nodes
    first = c.nodes[nodes[0]].facts
    return Resume(
        generation=resumption.generation,
        job_id=job.job_id,
        step=resumption.step,
        vote=resumption.vote,
        plan=plan,
        hosts={name: c.nodes[name].facts.host for name in nodes},
        rendezvous=f"{first.host}:{first.rendezvous_port}",
        lineage=resumption.lineage,
        protection=resumption.protection,
        restore=resumption.restore,
        held_parts=resumption.held_parts,
        skipped_batches=c.spikes.skipped_batches,
        evaluated=resumption.evaluated,
        replica_peers={
            owner: ReplicaPeer(node=name, address=c.nodes[name].facts.snapshot_server)
            for owner, name in resumption.replica_peers.items()
            if name in c.nodes
        },
    )


def take_resumed(c: Cluster, node: NodeMachine, signal: Resumed) -> None:
    """Record that a node is in the group. The last one, or a commit, ends the recovery (``follow_group``)."""
    group = c.state
    if not isinstance(group, TrainingGroup) or signal.generation != group.generation:
        c.ignore("an unexpected Resumed", node.name)
        return
    group.resumed[node.name] = signal
    c.dirty = c.dirty or len(group.resumed) >= len(group.planned)
    if isinstance(group, Resuming) and group.recovery.cause == "start":
        c.publish()  # People see how many nodes have joined their groups.


# --- 5. the group trains, and commits its first step -----------------------------------------------


def follow_group(c: Cluster, group: Resuming | Running) -> None:
    """Check whether the group has resumed, and whether it has committed its first step."""
    committed = c.progress.known_step > group.resumption.step or bool(group.finished)
    if isinstance(group, Resuming):
        if not (group.all_resumed or committed):
            return
        # A commit needs every rank, so it proves that the others resumed, whatever messages are still under
        # way.
        group.recovery.resumed_at = c.at
        group = Running.of(group)
        c.transition(PhaseEvent.GROUP_RESUMED, group)
        c.cancel_timer(RESUME)
        c.failed_to_resume.clear()
        c.unreached.clear()
        c.persist()
        c.emit(
            "TrainingResumed",
            f"generation {group.generation} trains from step {group.resumption.step} on",
            step=group.resumption.step,
            bytes_moved=sum(signal.bytes_moved for signal in group.resumed.values()),
            rendezvous_s=max((signal.rendezvous_s for signal in group.resumed.values()), default=0.0),
            state_s=max((signal.state_s for signal in group.resumed.values()), default=0.0),
        )
        c.publish()
    record = group.recovery
    if record is None or not committed:
        return
    if record.committed_at is None:
        record.committed_at = c.at
    if group.all_resumed or record.committed_at < c.at:
        _complete(c, group, record)


def _complete(c: Cluster, group: Running, record: ActiveRecovery) -> None:
    """Complete the recovery: the new generation has committed its first step."""
    group.recovery = None
    recovery_times.note_survivors(c, group.planned, group.began_at)
    plan = group.resumption.plan
    recovery = {
        "cause": record.cause,
        "nodes": record.nodes,
        "detected_how": record.detected_how,
        "detected_at": record.detected_at,
        "began_at": record.began_at,
        "measured_from": record.measured_from,
        **recovery_times.durations_ms(record),
        "rolled_back_steps": record.rolled_back_steps,
        "recomputed_steps": record.recomputed_steps,
        "tier": record.tier or ("live_replica" if plan.transfers or plan.part_bytes else "none"),
        "bytes_moved": sum(signal.bytes_moved for signal in group.resumed.values()),
        "method": plan.method,
        "reason": plan.reason,
        "generation": group.generation,
        "generations_tried": record.tried,
        "step": group.resumption.step,
        "pipelines_before": pipelines(record.before),
        "pipelines_after": pipelines(plan.pipelines),
    }
    drained = [name for name in record.nodes if (node := c.nodes.get(name)) is not None and node.departing]
    if record.cause in _CONTINUES and not drained:
        words = _CONTINUES[record.cause].format(who=join_names(record.nodes))
    else:
        words = _describe(group, record, drained)
    c.emit("RecoveryCompleted", words, recovery=recovery)
    c.publish()


def _describe(group: Running, record: ActiveRecovery, drained: list[str]) -> str:
    """Return how training continues when nodes join or leave, from what the plan does and not from what was
    intended.
    """
    others = [name for name in record.nodes if name not in drained]
    joined = [name for name in others if name in group.planned]
    idle = [name for name in others if name not in joined]
    match record.cause:
        case "node_drained":
            words = f"with {join_names(others)}, which cannot be drained yet" if others else ""
        case "node_joined" | "node_returned":
            returned = ", which returned" if record.cause == "node_returned" else ""
            words = f"with {join_names(joined)}{returned}" if joined else ""
            if idle:
                words += (" and " if words else "") + f"with {join_names(idle)} as spare"
        case cause:
            words = _CONTINUES[cause].format(who=join_names(others)).removeprefix("training continues ")
    were = "was" if len(drained) == 1 else "were"
    left = f"without {join_names(drained)}, which {were} drained" if drained else ""
    return "training continues " + " and ".join(part for part in (words, left) if part)


# --- a node is too slow, or a connection broke ----------------------------------------------------


def resume_limit_s(c: Cluster, group: TrainingGroup) -> float:
    """Return the time in which the group must form."""
    return c.timing.restore_s if group.resumption.restore is not None else c.timing.resume_s


def quiesce_overdue(c: Cluster) -> None:
    """Continue without the nodes that did not answer Quiesce in time."""
    state = c.state
    if not isinstance(state, Quiescing):
        return
    missing = [name for name in state.expected if name not in state.reports]
    if state.mode == "boundary":
        reconfigure(
            c, f"{', '.join(missing)} did not reach the step boundary in time", "abort", state.recovery
        )
        return
    _drop_nodes(c, state, missing, "Quiesce")


def resume_overdue(c: Cluster) -> None:
    """Try again with every node that still answers Quiesce, since the group did not form in time.

    A node that hangs does not answer and is fenced then. A node that answers, but for the second time
    cannot resume although others could, is fenced: one node at a time, and the one that has least to lose,
    since the nodes that wait for it look the same from here.
    """
    group = c.state
    if not isinstance(group, Resuming):
        return
    missing = [name for name in group.planned if name not in group.resumed]
    again = [name for name in missing if name in c.failed_to_resume] if group.resumed else []
    c.failed_to_resume = set(missing) if group.resumed else set()
    if again:
        worst = min(again, key=lambda name: (_layers_held(group, name), name))
        _drop_nodes(c, group, [worst], "Resume", ", again")
    else:
        late = ", ".join(missing)
        record = note_cause(c, "connection_lost", [], "no_answer")
        reconfigure(c, f"{late} did not resume generation {group.generation} in time", "abort", record)


def _layers_held(group: TrainingGroup, name: str) -> int:
    return sum(len(layers) for device, layers in group.holdings.items() if device.node == name)


def _drop_nodes(
    c: Cluster, state: Quiescing | Resuming, names: list[str], order: str, again: str = ""
) -> None:
    """Continue without these nodes.

    A node that obeyed and yet did not answer is fenced. A node that was not heard at all may be cut off, or
    this coordinator is. A node that the order did not reach may have a connection that loses many messages.
    Nodes of both kinds may return with their state, the latter only once.
    """
    reason = f"no answer to {order} of generation {state.generation}{again}"
    for name in names:
        node = c.nodes[name]
        heard = node.heard_at > state.began_at
        if heard and (node.obeyed >= state.generation or name in c.unreached):
            fence(c, name, node.incarnation, reason)
            declare_lost(c, node, "no_answer", reason)
            note_failure(c, node, "hung", reason)
        elif heard:
            c.unreached.add(name)
            declare_lost(c, node, "no_answer", reason)
        else:
            declare_lost(c, node, "silence", reason)
    record = note_cause(c, "node_lost", names, "no_answer")
    reconfigure(c, f"{', '.join(names)}: {reason}", "abort", record)


def take_suspicion(c: Cluster, node: NodeMachine, signal: PeerSuspected) -> None:
    """Note a suspicion. Other means find out which node died; if none did, the group must be formed again in
    the end.
    """
    c.emit("PeerSuspected", signal.detail, node=node.name, generation=signal.generation)
    group = c.state
    if isinstance(group, TrainingGroup) and signal.generation == group.generation and SUSPICION not in c.due:
        group.suspected_at_step, group.seen_committing = c.progress.known_step, False
        c.set_timer(SUSPICION, c.timing.silence_s + c.timing.suspicion_s)


def suspicion_overdue(c: Cluster) -> None:
    """Form the group again: a connection inside it broke, and no node was found to be the cause.

    If the group continues regardless, nothing is done. The step that was past its VOTE when the connection
    broke proves nothing, nor do late messages about earlier steps: the group must be seen to commit twice.
    """
    group = c.state
    if not isinstance(group, TrainingGroup):
        return
    if not c.connected:
        c.set_timer(SUSPICION, c.timing.silence_s + c.timing.suspicion_s)
    elif c.progress.known_step > group.suspected_at_step + 1:
        first, group.seen_committing = not group.seen_committing, True
        if first:
            group.suspected_at_step = c.progress.known_step
            c.set_timer(SUSPICION, c.timing.silence_s + c.timing.suspicion_s)
    else:
        lose_silent_nodes(c)  # One of them may be the cause, whose last will was lost with the broker.
        if c.state is group:
            record = note_cause(c, "connection_lost", [], "peer")
            recovery_times.estimate_begin(record, c.at - c.timing.silence_s - c.timing.suspicion_s)
            reconfigure(c, "a connection between trainers broke, and all of them are alive", "abort", record)
