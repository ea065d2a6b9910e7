"""The cluster machine: the coordinator's whole protocol as one pure object.

``step(event) -> list[Effect]``; effects are to be carried out in order. This module only dispatches each
event to the module that handles it. ``recovery`` has the path from a loss to the first commit after it.
"""

from collections.abc import Callable, Sequence
from typing import Any, assert_never

import msgspec

from statemachine.cluster import (
    boundaries,
    drains,
    health,
    jobs,
    progress,
    public,
    quarantine,
    recovery,
    recovery_times,
    rollback,
    signals,
    stragglers,
)
from statemachine.cluster.acknowledgement import repeat_orders
from statemachine.cluster.durable import durable
from statemachine.cluster.durable.outbox import is_journaled
from statemachine.cluster.membership import inquire_all, remove_absent
from statemachine.cluster.phases import Quiescing, Resuming
from statemachine.cluster.snapshots import orders, persisting, requests, snapshots
from statemachine.cluster.state import (
    DRAIN,
    FIND,
    FINISH,
    JOIN,
    PAUSE_LIMIT,
    PERSIST,
    QUIESCE,
    RESUME,
    SETTLE,
    SNAPSHOT,
    SNAPSHOT_ANSWER,
    STEPS,
    SUSPICION,
    TICK,
    Cluster,
)
from statemachine.effects import AnswerRequest, Effect, EmitEvent, PersistState, PublishCluster
from statemachine.events import (
    BrokerConnected,
    BrokerDisconnected,
    CheckpointCommitFailed,
    CheckpointCommitted,
    CheckpointFound,
    DrainChecked,
    DrainRequested,
    ExportCompleted,
    ExportFailed,
    FaultAnnounced,
    NodeVanished,
    PlanCompared,
    PlanImpossible,
    PlanReady,
    ReadmitRequested,
    RestoreChecked,
    SignalArrived,
    SnapshotRequested,
    StepsMissed,
    StopRequested,
    SubmitRequested,
    TemplatesFailed,
    TemplatesReady,
    TimerFired,
)
from statemachine.hardware import DEFAULT_LIMITS, HardwareLimits
from statemachine.messages.values import ClusterPhase, Job
from statemachine.timing import Timing

ClusterEvent = (
    TimerFired
    | BrokerConnected
    | BrokerDisconnected
    | SignalArrived
    | NodeVanished
    | FaultAnnounced
    | SubmitRequested
    | StopRequested
    | DrainRequested
    | ReadmitRequested
    | DrainChecked
    | SnapshotRequested
    | StepsMissed
    | TemplatesReady
    | TemplatesFailed
    | PlanReady
    | PlanCompared
    | PlanImpossible
    | RestoreChecked
    | CheckpointCommitted
    | CheckpointCommitFailed
    | ExportCompleted
    | ExportFailed
    | CheckpointFound
)

_TIMERS: dict[str, Callable[[Cluster], None]] = {
    QUIESCE: recovery.quiesce_overdue,
    RESUME: recovery.resume_overdue,
    JOIN: boundaries.join,
    STEPS: progress.steps_overdue,
    SNAPSHOT: snapshots.overdue,
    PERSIST: persisting.overdue,
    FINISH: persisting.end_overdue,
    FIND: rollback.find_overdue,
    DRAIN: drains.requests_overdue,
    SNAPSHOT_ANSWER: requests.overdue,
    SUSPICION: recovery.suspicion_overdue,
    PAUSE_LIMIT: rollback.pause_overdue,
}
"""Function that handles each timer but ``TICK`` and ``SETTLE``."""
_DEADLINES = (TICK, QUIESCE, RESUME, PAUSE_LIMIT, STEPS, SNAPSHOT, PERSIST, FINISH)
"""Timers of what is expected from nodes, which cannot be heard while the broker is away."""


class ClusterMachine:
    """State machine of the leading coordinator.

    Create one for a new coordinator and feed ``BrokerConnected``, or ``restore`` one from a journal.
    """

    def __init__(self, timing: Timing, hardware: HardwareLimits = DEFAULT_LIMITS) -> None:
        self._c = Cluster(timing=timing, hardware=hardware)

    @classmethod
    def restore(
        cls,
        timing: Timing,
        durable_state: dict[str, Any],
        at: float,
        cause: str,
        hardware: HardwareLimits = DEFAULT_LIMITS,
    ) -> tuple["ClusterMachine", list[Effect]]:
        """Continue from what ``durable_state()`` last returned; the next event is ``BrokerConnected``.

        :raises durable.InvalidJournalError: the journal is corrupt or of another version.
        """
        machine = cls(timing)
        c = machine._c = durable.read(timing, durable_state, at)
        c.hardware, c.at, c.cause = hardware, at, cause
        health.restore(c)
        if c.active:
            jobs.build_templates(c)
        return machine, machine._take_out()

    def step(self, event: ClusterEvent) -> list[Effect]:
        """Handle one event and return the effects in order."""
        return self.steps([event])

    def steps(
        self, events: Sequence[ClusterEvent], failed: Callable[[ClusterEvent], None] | None = None
    ) -> list[Effect]:
        """Handle events that arrived together as one step, so that durable state is written once for all of
        them.

        :param failed: called from the handler of each event that raises; the other events are handled
            nevertheless.
        """
        c = self._c
        for event in events:
            c.at, c.cause = event.at, event.cause
            try:
                self._dispatch(event)
            except Exception:
                if failed is None:
                    raise
                failed(event)
        while c.dirty:
            c.dirty = False
            jobs.reconcile(c)
        return self._take_out()

    def durable_parts(self) -> dict[str, Any]:
        """Return what must survive a crash, to be stored when ``PersistState`` is carried out."""
        return durable.write(self._c)

    def durable_state(self) -> dict[str, Any]:
        """Return the durable parts as plain data."""
        state: dict[str, Any] = msgspec.to_builtins(self.durable_parts())
        return state

    def public_state(self) -> dict[str, Any]:
        """Return what outside tools see, to be published when ``PublishCluster`` is carried out."""
        return public.public_state(self._c)

    @property
    def cluster(self) -> Cluster:
        """Return the whole state. Only the machine changes it."""
        return self._c

    @property
    def generation(self) -> int:
        return self._c.generation

    @property
    def phase(self) -> ClusterPhase:
        return self._c.phase

    @property
    def job(self) -> Job | None:
        """Return the job under way, or the last one, with its current snapshot policy."""
        return self._c.job

    @property
    def job_id(self) -> str | None:
        """Return the id of the job under way, or of the last one."""
        return self._c.job.job_id if self._c.job is not None else None

    def plan_details(self, generation: int) -> dict[str, Any]:
        """Return the details of a ``PlanChosen`` that the durable state need not hold twice while it has this
        plan.
        """
        resumption = self._c.resumption
        if resumption is None or resumption.generation != generation:
            return {"pipelines": [], "considered": []}
        return public.plan_details(resumption.plan)

    def _take_out(self) -> list[Effect]:
        """Return this step's effects in the best order that is safe.

        Durable state comes first, once: it is the state at the end of the step and holds the events to be
        published. Commands and plans follow, since trainers stand still for them, and then events and the
        public state. Answers come last, so that a client that has its answer finds in the state what it says.
        """
        out, self._c.out = self._c.out, []
        persist = [effect for effect in out if isinstance(effect, PersistState)][:1]
        publish = [effect for effect in out if isinstance(effect, PublishCluster)][-1:]
        events = [effect for effect in out if isinstance(effect, EmitEvent)]
        if not persist and any(is_journaled(event.name) for event in events):
            persist = [PersistState(cause=self._c.cause)]
        answers = [effect for effect in out if isinstance(effect, AnswerRequest)]
        others = (PersistState, PublishCluster, EmitEvent, AnswerRequest)
        urgent = (effect for effect in out if not isinstance(effect, others))
        return [*persist, *urgent, *events, *publish, *answers]

    def _dispatch(self, event: ClusterEvent) -> None:
        c = self._c
        match event:
            case SignalArrived():
                signals.receive(c, event)
            case TimerFired():
                self._timer(event)
            case NodeVanished():
                recovery.take_vanished(c, event)
            case BrokerConnected():
                self._connected()
            case BrokerDisconnected():
                self._disconnected()
            case SubmitRequested():
                jobs.submit(c, event)
            case StopRequested():
                jobs.stop(c, event)
            case DrainRequested():
                drains.take_request(c, event)
            case DrainChecked():
                drains.take_check(c, event)
            case ReadmitRequested():
                quarantine.readmit(c, event)
            case FaultAnnounced():
                recovery_times.take_announced_fault(c, event)
            case StepsMissed():
                progress.take_steps_missed(c, event)
            case SnapshotRequested():
                orders.take_request(c, event)
            case TemplatesReady():
                jobs.templates_ready(c, event.job_id)
            case TemplatesFailed():
                jobs.templates_failed(c, event.job_id, event.reason)
            case PlanReady():
                recovery.take_plan(c, event)
            case PlanCompared():
                stragglers.take_comparison(c, event)
            case PlanImpossible():
                rollback.take_no_plan(c, event)
            case RestoreChecked():
                rollback.take_check(c, event)
            case CheckpointCommitted():
                persisting.take_committed(c, event)
            case CheckpointCommitFailed():
                persisting.take_commit_failed(c, event)
            case ExportCompleted():
                persisting.take_exported(c, event)
            case ExportFailed():
                persisting.take_export_failed(c, event)
            case CheckpointFound():
                rollback.take_checkpoint_found(c, event)
            case _:
                assert_never(event)

    def _timer(self, event: TimerFired) -> None:
        c = self._c
        late_s = c.at - c.due.pop(event.name, c.at)
        if not c.connected and event.name in _DEADLINES:
            return  # It was set during the outage, and is set again when the broker is back.
        if event.name in _DEADLINES and event.name != TICK and late_s > c.timing.silence_s / 2:
            # A deadline that fires this late shows that this process was suspended, not that the nodes are
            # slow: their messages of that time are yet to be read.
            c.set_timer(event.name, c.timing.quiesce_s)
            return
        if event.name == TICK:
            self._tick(late_s)
        elif event.name == SETTLE:
            c.dirty = True  # ``reconcile`` sees that the time is over.
        else:
            _TIMERS[event.name](c)

    def _tick(self, late_s: float) -> None:
        """Check who is silent, and what has changed since the last tick. ``late_s``: how late this tick is."""
        c = self._c
        c.set_timer(TICK, c.timing.heartbeat_s)
        if late_s > c.timing.silence_s / 2:
            # This process was away (stopped, or the machine suspended): the nodes' messages are still
            # queued.
            c.silence_floor_at = c.at
        else:
            progress.check_gaps(c)
            recovery.lose_silent_nodes(c)
            repeat_orders(c)
            remove_absent(c)
            c.dirty = c.dirty or c.recovery is not None
        if c.hardware.health.enabled:
            health.judge_waiting(c)
            health.order_checks(c)
        stragglers.check_stragglers(c)
        snapshots.repeat_retain(c)

    def _connected(self) -> None:
        """Begin, or continue, with the broker: all nodes have a while to send Hello before any counts as
        silent.
        """
        c = self._c
        first = not c.started
        c.started = c.connected = True
        c.grace_until = c.at + c.timing.hello_grace_s
        c.set_timer(TICK, c.timing.heartbeat_s)
        if first:
            c.emit("CoordinatorStarted", "restored from the journal" if c.from_journal else "started")
        else:
            c.wills_unreliable_until = c.grace_until
            c.emit("BrokerRestored", "the broker is back")
        c.silence_floor_at = c.at
        inquire_all(c)
        rollback.restart_waits(c)
        restored, c.from_journal = c.from_journal, False
        if restored:
            # The answers that came before the crash are lost.
            persisting.abandon(c, "the coordinator was restarted")
        match c.state:
            case Quiescing() as state if restored:
                # Reports that arrived before the crash are lost with it.
                why = "the coordinator was restarted during a recovery"
                recovery.reconfigure(c, why, state.mode, state.recovery)
            case Quiescing(mode="abort"):
                c.set_timer(QUIESCE, max(c.timing.quiesce_s, c.timing.hello_grace_s))
            case Quiescing():
                limit_s = c.timing.boundary_limit_s(c.progress.step_s)
                c.set_timer(QUIESCE, max(limit_s, c.timing.hello_grace_s))
            case Resuming() as group:
                c.set_timer(RESUME, recovery.resume_limit_s(c, group))
        if c.snapshots.pending is not None:
            c.set_timer(SNAPSHOT, c.timing.snapshot_limit_s(c.progress.step_s))
        if c.checkpoints.writing is not None:
            committing = c.checkpoints.writing.committing
            c.set_timer(PERSIST, c.timing.checkpoint_location_s if committing else c.timing.persist_s)
        c.dirty = True
        c.publish()

    def _disconnected(self) -> None:
        """Stop all deadlines: while the broker is away no node can be heard."""
        c = self._c
        c.connected = False
        for name in _DEADLINES:
            c.cancel_timer(name)
        c.emit("BrokerLost", "the broker is away; training continues")
