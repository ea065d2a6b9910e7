"""Handlers of the coordinator's commands."""

from typing import assert_never

from statemachine.agent import persisting as agent_persisting
from statemachine.agent import snapshots as agent_snapshots
from statemachine.agent.health import obey_order, stop_check
from statemachine.agent.snapshots import (
    begin_lineage,
    drop_all,
    free_job,
    order_snapshot,
    retain,
    send_snapshot_state,
)
from statemachine.agent.state import HELLO, Agent, TrainerPhase
from statemachine.effects import ExitDaemon, InstructTrainer, PrepareTrainer, RenewIncarnation, ResumeTrainer
from statemachine.messages.cluster import (
    Acknowledgement,
    CancelPersist,
    CheckHealth,
    Command,
    Fence,
    Heartbeat,
    Hello,
    Leaving,
    Persist,
    Prepare,
    Quiesced,
    Reject,
    Release,
    RequestHello,
    RequestSteps,
    Resume,
    RetainSnapshot,
    Stepped,
    Stop,
    TakeSnapshot,
)
from statemachine.messages.common import Finished, Prepared, Quiesce, Resumed
from statemachine.messages.values import BuildProgress, BuildStage, CommittedStep, NodeActivity, NodeState

STEPS_PER_MESSAGE = 50
"""Most steps per message. With as many metrics as a step and an evaluation may have, all with the longest
names, this many fit into one signal.
"""


def obey(a: Agent, command: Command) -> None:
    """Obey one command of the coordinator for this incarnation. Any command but a rejection or a request for
    Hello shows that the node is admitted.
    """
    if a.rejected and not isinstance(command, Reject | RequestHello):
        a.rejected = False
        a.cancel_timer(HELLO)
    match command:
        case RequestHello():
            send_hello(a)
        case CheckHealth():
            obey_order(a, command)
        case Prepare():
            prepare(a, command)
        case Quiesce():
            quiesce(a, command)
        case Resume():
            resume(a, command)
        case RequestSteps():
            answer_steps_request(a, command)
        case Stop():
            stop(a, command)
        case Fence():
            fence(a, command)
        case Reject():
            a.rejected = True
            a.publish(a.state, f"rejected: {command.reason}")
            a.set_timer(HELLO, a.timing.hello_retry_s)
        case Release():
            release(a)
        case TakeSnapshot():
            order_snapshot(a, command)
        case RetainSnapshot():
            retain(a, command)
        case Persist():
            agent_persisting.persist(a, command)
        case CancelPersist():
            agent_persisting.cancel(a, command)
        case _:
            assert_never(command)


# --- reports -------------------------------------------------------------------------------------


def send_hello(a: Agent) -> None:
    """Introduce the node and repeat every fact that still holds, so that whatever was lost in an outage is
    sent again.
    """
    a.send(
        Hello(
            facts=a.facts,
            job_id=a.job.job_id if a.job is not None else None,
            prepared=a.built,
            generation=a.generation,
            training=a.training,
            quiesced=a.quiesced,
            snapshots=tuple(a.snapshots),
            health=a.health,
        )
    )
    if a.rejected:
        return
    if a.trainer_lost is not None:
        a.send(a.trainer_lost)
    if a.built and a.job is not None:
        a.send(Prepared(job_id=a.job.job_id, profile=a.profile))
    send_snapshot_state(a)
    agent_persisting.send_answer(a)
    send_heartbeat(a)
    if a.quiesced:
        send_reports(a)
    send_resumed(a)
    send_finished(a)
    for standing in (a.peer_suspected, a.restore_failed):
        if standing is not None:
            a.send(standing)
    if a.leaving is not None:
        a.send(Leaving(reason=a.leaving))


def _building(a: Agent) -> BuildProgress | None:
    """Return the progress of the trainers: how many have started, then how far the first of them is with the
    job.
    """
    up = sum(1 for trainer in a.trainers if trainer.alive)
    if up < len(a.trainers):
        return BuildProgress(stage=BuildStage.STARTING, done=up, total=len(a.trainers))
    preparing = (t.build_progress for t in a.trainers if t.phase is TrainerPhase.PREPARING)
    return next(filter(None, preparing), None)


def send_heartbeat(a: Agent) -> None:
    """Send the newest commit and the node's activity, with which the heartbeat acknowledges orders and
    mentions reports.
    """
    a.send(
        Heartbeat(
            generation=a.generation,
            committed=a.committed,
            microbatch_ms=a.microbatch_ms(),
            lineage=a.lineage,
            retained_step=a.retained_step,
            corrupt_step=a.corrupt_step,
            repairs=a.repairs,
            building=_building(a),
            acknowledgement=Acknowledgement(
                activity=a.activity,
                job_id=a.job.job_id if a.job is not None else None,
                leaving=a.leaving is not None,
                suspects_peer=a.peer_suspected is not None,
                restore_failed=a.restore_failed is not None,
                snap_after=a.last_snapshot_order[1] if a.last_snapshot_order[0] == a.generation else 0,
                snapshot_reported=agent_snapshots.reported_step(a),
                persist_attempt=a.persist_order.attempt
                if a.persist_order is not None
                else a.cancelled_attempt,
                persist_reported=a.persist_answer is not None or a.persist_order is None,
                health_number=a.health.number if a.health is not None else 0,
            ),
        )
    )


def send_reports(a: Agent) -> None:
    """Send the reports of those trainers that have one."""
    resumed = a.resume.generation if a.resume is not None else 0
    reports = tuple(report for trainer in a.trainers if (report := trainer.report(resumed)) is not None)
    a.send(Quiesced(generation=a.generation, reports=reports))


def send_resumed(a: Agent) -> None:
    """Send Resumed once every trainer with a rank here has met the others and holds its layers."""
    if a.resume is None or not a.training:
        return
    resumed = [a.trainers[device].resumed for device in a.ranked_devices(a.resume)]
    there = [event for event in resumed if event is not None]
    if len(there) == len(resumed):
        a.send(
            Resumed(
                generation=a.resume.generation,
                bytes_moved=sum(event.bytes_moved for event in there),
                rendezvous_s=max(event.rendezvous_s for event in there),
                state_s=max(event.state_s for event in there),
            )
        )


def send_finished(a: Agent) -> None:
    """Send Finished once every trainer with a rank here is done. If devices disagree, both digests are sent."""
    if a.resume is None or a.job is None or not a.training:
        return
    digests: dict[int, str] = {}
    kinds: set[str] = set()
    evaluation = None
    for device in a.ranked_devices(a.resume):
        own = a.trainers[device].finished
        if own is None:
            return
        for layer, digest in own.digests.items():
            other = digests.setdefault(layer, digest)
            if other != digest:
                digests[layer] = f"{other}|{digest}"
        kinds.add(own.kind)
        evaluation = evaluation or own.evaluation
    a.send(
        Finished(
            generation=a.resume.generation,
            step=a.job.steps,
            digests=digests,
            kind=", ".join(sorted(kinds)),
            evaluation=evaluation,
        )
    )


def send_steps(a: Agent) -> None:
    if a.resume is not None:
        for first in range(0, len(a.unsent), STEPS_PER_MESSAGE):
            steps = tuple(a.unsent[first : first + STEPS_PER_MESSAGE])
            a.send(Stepped(generation=a.resume.generation, steps=steps, step_s=a.step_s, lineage=a.lineage))
    a.unsent.clear()


# --- commands ------------------------------------------------------------------------------------


def prepare(a: Agent, command: Prepare) -> None:
    """Prepare the trainers for a job. The command is idempotent: trainers that are ready report so, busy ones
    continue; in any other case new trainers are started.
    """
    if a.leaving is not None:
        return
    if a.is_past(command.job):
        a.ignore("a Prepare for a job that is over")
        return
    same = a.job is not None and a.job.job_id == command.job.job_id
    if same and (a.wants_profile or not command.profile):
        if a.built:
            a.send(Prepared(job_id=command.job.job_id, profile=a.profile))
        return
    fresh = a.job is None and all(
        trainer.phase in (TrainerPhase.STARTING, TrainerPhase.UP) for trainer in a.trainers
    )
    if a.job is not None and not same:
        a.note_past(a.job)
    stop_check(a)
    a.job, a.wants_profile, a.profile, a.trainer_lost = command.job, command.profile, None, None
    a.failures = 0
    if not same:
        agent_persisting.abandon(a)
        a.lineage = a.retained_step = a.retained_lineage = a.pinned_step = a.build_failures = 0
    a.history.clear()
    a.publish(NodeState.HEALTHY, f"preparing job {command.job.name!r}")
    if not fresh:
        a.kill_trainers()
        a.start_trainers()
    for trainer in a.trainers:
        if trainer.phase is TrainerPhase.UP:
            prepare_trainer(a, trainer.device)


def prepare_trainer(a: Agent, device: int) -> None:
    """Let one trainer measure the model; the others only build it."""
    trainer, job = a.trainers[device], a.job
    if job is None:
        trainer.phase = TrainerPhase.UP
        return
    trainer.phase = TrainerPhase.PREPARING
    profile = a.wants_profile and a.profile is None and device == 0
    a.out.append(PrepareTrainer(cause=a.cause, device=device, job=job, profile=profile))


def quiesce(a: Agent, command: Quiesce) -> None:
    """Enter a higher generation, whatever the trainers are doing."""
    if command.generation < a.generation:
        a.ignore("a Quiesce of an older generation")
        return
    if command.generation == a.generation:
        # The report was lost. Trainers that had not built the job when the order came, or that were lost
        # since, have none.
        if a.quiesced or not a.built or a.activity is NodeActivity.PREPARED:
            send_reports(a)
        return
    a.generation = command.generation
    a.peer_suspected = a.restore_failed = a.snapshot_failed = None
    if not a.built:
        send_reports(a)
        return
    for trainer in a.trainers:
        trainer.phase = TrainerPhase.QUIESCING
        trainer.state = trainer.resumed = trainer.finished = None
        a.out.append(InstructTrainer(cause=a.cause, device=trainer.device, instruction=command))
    a.local_snapshot = None
    resting = NodeState.HEALTHY if a.state in (NodeState.SNAP, NodeState.COMPLETED) else a.state
    a.publish(resting, f"quiescing for generation {a.generation}")


def resume(a: Agent, command: Resume) -> None:
    """Send the Resume to every trainer, also to those without a rank, and discard steps that were undone."""
    if (
        command.generation != a.generation
        or not a.quiesced
        or a.job is None
        or command.job_id != a.job.job_id
    ):
        a.ignore("a Resume that this node does not expect")
        return
    if command.lineage != a.lineage:
        # Its history belongs to a past that was undone, unless this very Resume undoes it.
        restore, last = command.restore, a.resume.generation if a.resume is not None else 0
        if restore is None or restore.url or restore.generation > last:
            a.history.clear()
        begin_lineage(a, command.restore)
    if command.restore is not None and command.restore.url:
        drop_all(a)
    a.resume, a.stepping, a.lineage = command, False, command.lineage
    a.drop_history_after(command.step)
    # Sent under the new lineage, a step that was undone would count again.
    a.unsent = [step for step in a.unsent if a.history.get(step.step) == step]
    if command.vote is not None:
        remember_step(a, CommittedStep(step=command.step, vote=command.vote))
    ranked = set(a.ranked_devices(command))
    if ranked:
        stop_check(a)
    a.committed = a.history.get(command.step) if ranked else None
    for trainer in a.trainers:
        trainer.computed_ms.clear()
        trainer.phase = TrainerPhase.RESUMING if trainer.device in ranked else TrainerPhase.PARKED
        a.out.append(ResumeTrainer(cause=a.cause, device=trainer.device, resume=command))
    a.publish(a.state, f"resuming at step {command.step}" if ranked else "idle: the plan has no rank for it")


def remember_step(a: Agent, committed: CommittedStep) -> None:
    a.history.pop(committed.step, None)
    a.history[committed.step] = committed
    while len(a.history) > a.timing.steps_remembered:
        del a.history[next(iter(a.history))]


def answer_steps_request(a: Agent, command: RequestSteps) -> None:
    last = min(command.last, command.first + STEPS_PER_MESSAGE - 1)
    steps = [a.history[step] for step in range(command.first, last + 1) if step in a.history]
    # The answer is sent even if it is empty: the coordinator then asks another node.
    a.send(
        Stepped(
            generation=a.generation,
            steps=tuple(steps),
            step_s=a.step_s,
            requested_first=command.first,
            lineage=a.lineage,
        )
    )


def stop(a: Agent, command: Stop) -> None:
    if not command.failed:
        free_job(a, command.job_id)
    if a.job is None or a.job.job_id != command.job_id:
        return
    a.note_past(a.job)
    agent_persisting.abandon(a)
    a.job = a.profile = a.trainer_lost = None
    a.wants_profile, a.failures = False, 0
    a.history.clear()
    a.durations.clear()
    a.kill_trainers()
    if a.leaving is not None:
        leave_now(a)
        return
    a.start_trainers()
    a.publish(NodeState.HEALTHY, f"the job is over: {command.reason}")


def fence(a: Agent, command: Fence) -> None:
    """End everything that this incarnation does, since it is fenced. A node that is leaving leaves at once."""
    a.kill_trainers()
    if a.leaving is not None:
        leave_now(a)
        return
    agent_persisting.abandon(a)
    a.publish(NodeState.OFFLINE, f"fenced: {command.reason}")
    for name in list(a.due):
        a.cancel_timer(name)
    a.active = False
    a.out.append(RenewIncarnation(cause=a.cause))


def release(a: Agent) -> None:
    if a.leaving is not None:
        leave_now(a)
        return
    a.kill_trainers(a.timing.kill_grace_s)
    agent_persisting.abandon(a)
    a.job = a.profile = a.trainer_lost = None
    a.wants_profile = False
    a.history.clear()
    a.publish(NodeState.HEALTHY, "drained: it may be stopped")


def leave_now(a: Agent) -> None:
    a.kill_trainers(a.timing.kill_grace_s)
    agent_persisting.abandon(a)
    for name in list(a.due):
        a.cancel_timer(name)
    a.active = False
    a.publish(NodeState.OFFLINE, f"left: {a.leaving}")
    a.out.append(ExitDaemon(cause=a.cause, code=0))
