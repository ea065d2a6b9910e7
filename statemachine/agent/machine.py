"""The agent machine: one node daemon's part of the protocol, as one pure object.

It stands between the coordinator and the trainers of its node. It passes commands down, combines the
trainers' answers into one signal per node, detects trainers that die, raise or hang, and keeps going while
the broker or the coordinator is away. ``step(event) -> list[Effect]``; the effects are in order.
"""

from typing import assert_never

from statemachine.agent import health
from statemachine.agent import persisting as agent_persisting
from statemachine.agent import snapshots as agent_snapshots
from statemachine.agent.commands import (
    leave_now,
    obey,
    prepare_trainer,
    remember_step,
    send_finished,
    send_heartbeat,
    send_hello,
    send_reports,
    send_resumed,
    send_steps,
)
from statemachine.agent.events import (
    AgentStarted,
    CommandArrived,
    HealthCheckEnded,
    PersistEnded,
    SnapshotCopiesChanged,
    SnapshotCopyCommitted,
    SnapshotCopyFailed,
    SnapshotCorrupted,
    SnapshotRepaired,
    SnapshotsFound,
    StagingFailed,
    TerminationRequested,
    TrainerConnected,
    TrainerFailed,
    TrainerReported,
    TrainerStarved,
)
from statemachine.agent.hangs import add_starved_time, find_hang, take_heartbeat
from statemachine.agent.state import (
    HEARTBEAT,
    HELLO,
    LEAVE,
    NOT_BUILT,
    RESTART,
    STEPPED,
    Agent,
    TrainerPhase,
    TrainerRecord,
)
from statemachine.effects import Effect, ExitDaemon
from statemachine.events import BrokerConnected, BrokerDisconnected, TimerFired
from statemachine.messages.cluster import Leaving, TrainerLost
from statemachine.messages.common import (
    Finished,
    OptimizerReplicaDiverged,
    PeerSuspected,
    Prepared,
    ReplicaDigests,
    Resumed,
    SnapshotFailed,
    SnapshotStarted,
)
from statemachine.messages.trainer import (
    MachineReport,
    ShardWritten,
    TrainerHeartbeat,
    TrainerQuiesced,
    TrainerStepped,
)
from statemachine.messages.values import CommittedStep, FailureCause, NodeState
from statemachine.timing import Timing

AgentEvent = (
    AgentStarted
    | TimerFired
    | BrokerConnected
    | BrokerDisconnected
    | CommandArrived
    | TrainerConnected
    | TrainerReported
    | TrainerStarved
    | TrainerFailed
    | SnapshotsFound
    | SnapshotCopiesChanged
    | SnapshotCorrupted
    | SnapshotRepaired
    | SnapshotCopyCommitted
    | SnapshotCopyFailed
    | StagingFailed
    | PersistEnded
    | HealthCheckEnded
    | TerminationRequested
)


class AgentMachine:
    """State machine of one node. Feed ``AgentStarted`` first, and again after each ``RenewIncarnation``."""

    def __init__(self, node: str, timing: Timing) -> None:
        self._a = Agent(name=node, timing=timing)

    def step(self, event: AgentEvent) -> list[Effect]:
        """Handle one event and return the effects in order."""
        a = self._a
        a.at, a.cause = event.at, event.cause
        self._dispatch(event)
        a = self._a  # AgentStarted creates a new one
        out, a.out = a.out, []
        return out

    @property
    def agent(self) -> Agent:
        """Return the whole state. Only the machine changes it."""
        return self._a

    def _dispatch(self, event: AgentEvent) -> None:
        a = self._a
        match event:
            case AgentStarted():
                self._start(event)
            case BrokerConnected():
                a.connected = True
                if a.active:
                    self._introduce()
            case BrokerDisconnected():
                a.connected = False
                a.cancel_timer(HEARTBEAT)
                a.cancel_timer(HELLO)
            case SnapshotsFound():
                agent_snapshots.add_found(a, event.snapshots)
                if a.active and a.connected:
                    send_hello(a)
            case SnapshotCopiesChanged():
                agent_snapshots.set_copies(a, event)
            case SnapshotCorrupted():
                a.corrupt_step = event.step  # The next heartbeat reports it; its sound parts still count.
            case SnapshotRepaired():
                a.repairs += 1  # The next heartbeat reports it.
            case TerminationRequested() if not a.active:
                a.out.append(ExitDaemon(cause=a.cause, code=0))  # Nothing is left to hand over.
            case _ if not a.active:
                pass  # fenced or gone: nothing counts until a new AgentStarted
            case CommandArrived():
                if event.message.node == a.name and event.message.incarnation == a.incarnation:
                    obey(a, event.message.command)
                else:
                    a.ignore(f"{type(event.message.command).__name__} for another incarnation")
            case TimerFired():
                self._timer(event)
            case TerminationRequested():
                self._terminate(event)
            case TrainerFailed():
                self._trainer_failed(event)
            case SnapshotCopyCommitted():
                agent_snapshots.note_copied(a, event)
            case SnapshotCopyFailed():
                agent_snapshots.note_failed(a, event.failure)
            case StagingFailed():
                if self._in_group(event.failure.generation):
                    a.restore_failed = event.failure
                    a.send(event.failure)
            case PersistEnded():
                agent_persisting.take_answer(a, event)
            case HealthCheckEnded():
                if health.note_ended(a, event.report) and a.built:
                    self._built()
            case TrainerConnected():
                self._trainer_up(event)
            case TrainerStarved():
                trainer = a.trainers[event.device]
                if trainer.alive:
                    add_starved_time(a, trainer, event)
            case TrainerReported():
                self._take_report(event.device, event.report)
            case _:
                assert_never(event)

    def _start(self, event: AgentStarted) -> None:
        old = self._a
        a = self._a = Agent(name=old.name, timing=old.timing)
        a.at, a.cause, a.connected = old.at, old.cause, old.connected
        a.ended_pids, a.snapshots, a.check_number = old.ended_pids, old.snapshots, old.check_number
        a.incarnation, a.facts = event.incarnation, event.facts
        a.trainers = [TrainerRecord(device=device) for device in range(event.facts.devices)]
        a.active = True
        health.check_before_work(a)
        a.start_trainers()
        if a.connected:
            self._introduce()

    def _introduce(self) -> None:
        a = self._a
        send_hello(a)
        a.publish(a.state, a.reason)
        a.set_timer(HEARTBEAT, a.timing.heartbeat_s)
        if a.rejected:
            a.set_timer(HELLO, a.timing.hello_retry_s)

    # --- trainers ----------------------------------------------------------------------------

    def _trainer_up(self, event: TrainerConnected) -> None:
        a = self._a
        trainer = a.trainers[event.device]
        # For a second process, the first one was a late message from a process that was ended before its
        # pid was known.
        if trainer.phase in NOT_BUILT and event.pid != trainer.pid:
            trainer.pid = event.pid
            a.ended_pids.pop(event.device, None)
            trainer.heartbeat_at = trainer.progress_at = a.at
            prepare_trainer(a, event.device)

    def _take_report(self, device: int, report: MachineReport) -> None:
        """Handle a message of a trainer. Messages of a trainer that has ended do not count, except that a
        replica diverged.
        """
        a = self._a
        trainer = a.trainers[device]
        match report:
            case OptimizerReplicaDiverged():
                if self._in_group(report.generation):
                    a.send(report)
            case ReplicaDigests():
                # They count until a later Resume was obeyed, also while a Quiesce is under way.
                if a.resume is not None and report.generation == a.resume.generation:
                    a.send(report)
            case _ if not trainer.alive:
                pass
            case TrainerHeartbeat():
                take_heartbeat(a, trainer, report)
            case Prepared():
                self._trainer_prepared(report, trainer)
            case TrainerQuiesced():
                if report.generation == a.generation and trainer.phase is TrainerPhase.QUIESCING:
                    trainer.phase, trainer.state = TrainerPhase.QUIESCED, report
                    if a.quiesced:
                        send_reports(a)
            case Resumed():
                if self._in_group(report.generation) and trainer.phase is TrainerPhase.RESUMING:
                    trainer.phase, trainer.resumed = TrainerPhase.TRAINING, report
                    send_resumed(a)
            case TrainerStepped():
                self._trainer_stepped(device, report)
            case PeerSuspected():
                if self._in_group(report.generation):
                    a.peer_suspected = report
                    a.suspected_at_step = a.committed.step if a.committed is not None else 0
                a.send(report)
            case Finished():
                if self._in_group(report.generation) and trainer.phase is TrainerPhase.TRAINING:
                    trainer.phase, trainer.finished = TrainerPhase.DONE, report
                    send_steps(a)
                    send_finished(a)
            case SnapshotStarted():
                agent_snapshots.note_started(a, report)
            case ShardWritten():
                agent_snapshots.note_written(a, device, report)
            case SnapshotFailed():
                agent_snapshots.note_failed(a, report)
            case _:
                assert_never(report)

    def _in_group(self, generation: int) -> bool:
        """Return whether the trainers of this node last resumed this generation and it is still the current
        one.
        """
        a = self._a
        return a.resume is not None and generation == a.resume.generation == a.generation

    def _trainer_prepared(self, report: Prepared, trainer: TrainerRecord) -> None:
        a = self._a
        if a.job is None or report.job_id != a.job.job_id or trainer.phase is not TrainerPhase.PREPARING:
            return
        trainer.phase = TrainerPhase.PREPARED
        agent_snapshots.send_retained(a, trainer.device)
        if report.profile is not None:
            a.profile = report.profile
        if a.built:
            self._built()

    def _built(self) -> None:
        """Report that every trainer has built the job."""
        a = self._a
        assert a.job is not None, "nothing is built without a job"
        a.trainer_lost, a.build_failures = None, 0
        a.send(Prepared(job_id=a.job.job_id, profile=a.profile))
        a.publish(NodeState.HEALTHY, f"prepared for job {a.job.name!r}")

    def _trainer_stepped(self, device: int, report: TrainerStepped) -> None:
        """Record a commit. It counts until a later Resume was obeyed, also while a Quiesce is under way."""
        a = self._a
        if a.resume is None or report.generation != a.resume.generation:
            return
        if report.microbatch_ms > 0:
            a.trainers[device].computed_ms.append(report.microbatch_ms)
        if a.committed is not None and report.step <= a.committed.step:
            return
        a.committed = CommittedStep(step=report.step, vote=report.vote)
        if report.step > a.suspected_at_step + 1:
            a.peer_suspected = None
        remember_step(a, a.committed)
        a.failures = 0
        a.step_s = report.step_s
        a.durations.append(report.step_s)
        # After the last step a trainer computes digests, which may take any time.
        a.stepping = a.job is not None and report.step < a.job.steps
        if a.resume.plan.devices[0].node == a.name:  # The node of rank 0 reports the steps.
            a.unsent.append(a.committed)
            if STEPPED not in a.due:
                send_steps(a)
                a.set_timer(STEPPED, a.timing.stepped_s)

    def _trainer_failed(self, event: TrainerFailed) -> None:
        a = self._a
        trainer = a.trainers[event.device]
        known = trainer.pid is None or trainer.pid == event.pid
        ended = a.ended_pids.get(event.device) == event.pid
        if trainer.phase is TrainerPhase.DOWN or ended or not known:
            return
        self._restart_trainers(trainer, event.cause_of_failure, event.detail)

    def _restart_trainers(
        self, trainer: TrainerRecord, cause: FailureCause, detail: str, unnoticed_s: float = 0.0
    ) -> None:
        """Start over with new trainers on all devices, since one trainer failed."""
        a = self._a
        device = trainer.device
        a.failures += 1
        tries = a.failures if cause == "unprepared" else a.failures - 1
        if trainer.phase is TrainerPhase.PREPARING and cause != "unprepared":
            a.build_failures += 1
            if a.build_failures >= a.timing.raise_limit:  # Waiting does not help a job that ends the process.
                detail = (
                    f"trainers ended {a.build_failures} times while they built the model; the last: {detail}"
                )
                cause = "unprepared"
        if a.job is not None:
            # The newest commit goes first, because it counts for the roll-forward rule.
            send_heartbeat(a)
            a.trainer_lost = TrainerLost(
                generation=a.generation, device=device, cause=cause, detail=detail, unnoticed_s=unnoticed_s
            )
            a.send(a.trainer_lost)
            a.publish(NodeState.UNHEALTHY, f"trainer {device} {cause}")
        a.kill_trainers()
        health.check_after_failure(a, cause, detail)
        if tries <= 0:
            a.start_trainers()
        else:
            delay = a.timing.restart_backoff_s * 2 ** min(tries - 1, 16)
            a.set_timer(RESTART, min(delay, a.timing.restart_backoff_max_s))

    # --- timers, and leaving --------------------------------------------------------------------

    def _timer(self, event: TimerFired) -> None:
        a = self._a
        late_s = a.at - a.due.pop(event.name, a.at)
        match event.name:
            case "heartbeat":
                if a.connected:
                    send_heartbeat(a)
                    a.set_timer(HEARTBEAT, a.timing.heartbeat_s)
            case "hello":
                if a.connected and a.rejected:
                    send_hello(a)
                    a.set_timer(HELLO, a.timing.hello_retry_s)
            case "stepped":
                if a.unsent:
                    send_steps(a)
                    a.set_timer(STEPPED, a.timing.stepped_s)
            case "watch":
                hanging = find_hang(a, late_s)
                if hanging is not None:
                    trainer, why, since_s = hanging
                    a.cause = f"hang:{a.name}/{trainer.device}:{a.generation}"
                    self._restart_trainers(trainer, "hung", why, since_s)
            case "restart":
                a.start_trainers()
            case _:  # "leave": the coordinator did not release the node in time
                leave_now(a)

    def _terminate(self, event: TerminationRequested) -> None:
        """Leave with notice if a coordinator can take it; leave at once on a second request."""
        a = self._a
        first = a.leaving is None
        a.leaving = event.reason
        if not first or not a.connected or a.job is None or not a.built:
            leave_now(a)
            return
        a.send(Leaving(reason=event.reason))
        a.publish(a.state, f"leaving: {event.reason}")
        a.set_timer(LEAVE, a.timing.leave_s)
