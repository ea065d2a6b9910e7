"""The coordinator's metrics: counters of the events that it emits, and gauges read from the public state.

Counters start at zero with each start of the coordinator, as Prometheus expects. Values that the journal
remembers (step, snapshot, nodes) are read from the state.
"""

from collections.abc import Callable
from typing import Any, get_args

from ftd.observe.metrics.common import COPY_S, RECOVERY_S, STEP_S, WRITE_S, CommonMetrics, ScrapeCollector
from ftd.observe.metrics.state import collect_state_metrics
from ftd.observe.run_model import (
    JobSubmittedFact,
    RecoveryCompletedFact,
    RecoveryDetails,
    RolledBackFact,
    RunModel,
    StepCommittedFact,
    phases_ms,
)
from ftd.transport.wire.public import EventMessage
from statemachine.effects import EmitEvent
from statemachine.messages.values import RECOVERY_PHASES, FailureCause

MAX_ENTRIES = 1000
"""Number of entries that the run model keeps."""
_MAX_SUPPRESSED = 1_000_000
LEADING = "1 while this coordinator leads the cluster; 0 while it is a standby or has no broker."


class ClusterMetrics(CommonMetrics):
    """Metrics of a coordinator. Pass its events to ``on_event`` and those of the nodes to ``on_node_event``.

    :param state: returns the machine's ``public_state``.
    :param clock: the clock of the events and of the times in the state.
    :param leading: returns whether this coordinator leads.
    """

    def __init__(
        self,
        *,
        state: Callable[[], dict[str, Any]],
        clock: Callable[[], float],
        connected: Callable[[], bool],
        leading: Callable[[], bool],
        internal_errors: Callable[[], int],
    ) -> None:
        super().__init__("coordinator", connected=connected, internal_errors=internal_errors)
        self._clock = clock
        self._run = RunModel(most=MAX_ENTRIES)
        self._checkpoint_at: float | None = None
        self.gauge("ftd_leading", LEADING).set_function(leading)
        self._make_training()
        self._make_snapshots()
        self._make_failures()
        self.registry.register(
            ScrapeCollector(
                lambda: collect_state_metrics(
                    state(),
                    now=clock(),
                    goodput=self._run.goodput.ratio(clock()),
                    checkpoint_at=self._checkpoint_at,
                )
            )
        )

    def _make_training(self) -> None:
        self._steps = self.counter(
            "ftd_committed_steps", "Committed steps; a step that is repeated after a rollback counts again."
        )
        self._skipped = self.counter(
            "ftd_skipped_updates", "Committed steps without an update, because gradients were not finite."
        )
        self._step_s = self.histogram("ftd_step_seconds", "Duration of committed steps.", STEP_S)
        self._undone_s = self.counter(
            "ftd_rolled_back_seconds", "Time that was spent on steps which rollbacks undid."
        )
        self._undone = self.counter("ftd_rolled_back_steps", "Committed steps that rollbacks undid.")
        self._recomputed = self.counter(
            "ftd_recomputed_steps", "Steps in flight that a recovery dropped and computed again."
        )
        self._recoveries = self.counter(
            "ftd_recoveries",
            "Completed recoveries from failures, joins and drains.",
            "cause",
            "tier",
        )
        self._recovery_s = self.histogram(
            "ftd_recovery_seconds",
            "Time from the fault, or its best estimate, to the next committed step.",
            RECOVERY_S,
            "cause",
        )
        self._phase_s = self.histogram(
            "ftd_recovery_phase_seconds", "Duration of each phase of a recovery.", RECOVERY_S, "phase"
        )
        self._moved = self.counter(
            "ftd_recovery_moved_bytes", "State that trainers sent to each other in recoveries."
        )
        for phase in RECOVERY_PHASES:
            self._phase_s.labels(phase)

    def _make_snapshots(self) -> None:
        self._snapshots = self.counter(
            "ftd_snapshots_completed", "Snapshots that were completed in the memory of all owners."
        )
        self._snapshots_abandoned = self.counter(
            "ftd_snapshots_abandoned", "Snapshots that were abandoned before completion."
        )
        self._snapshot_s = self.histogram(
            "ftd_snapshot_seconds",
            "Time from the order of a snapshot to its completion on all nodes.",
            RECOVERY_S,
        )
        self._copy_s = self.histogram(
            "ftd_snapshot_copy_seconds", "Time to copy a snapshot on the slowest device.", COPY_S
        )
        self._stall_s = self.histogram(
            "ftd_snapshot_stall_seconds", "Longest time that a trainer waited for a snapshot.", COPY_S
        )
        self._checkpoints = self.counter("ftd_checkpoints_written", "Persistent checkpoints completed.")
        self._checkpoints_abandoned = self.counter(
            "ftd_checkpoints_abandoned", "Persistent checkpoints that were abandoned."
        )
        self._checkpoint_s = self.histogram(
            "ftd_checkpoint_seconds", "Time from the order of a persistent checkpoint to its commit.", WRITE_S
        )

    def _make_failures(self) -> None:
        self._takeovers = self.counter("ftd_takeovers", "Takeovers by this coordinator from another leader.")
        self._nodes_lost = self.counter(
            "ftd_nodes_lost", "Nodes that went OFFLINE, by how it was noticed.", "how"
        )
        self._trainers_lost = self.counter("ftd_trainers_lost", "Trainers that failed, by cause.", "cause")
        for how in ("last_will", "silence", "goodbye", "no_answer"):
            self._nodes_lost.labels(how)
        for cause in get_args(FailureCause):
            self._trainers_lost.labels(cause)

    # --- events ------------------------------------------------------------------------------------

    def on_node_event(self, message: EventMessage) -> None:
        """Count a node's event, and the suppressed events that it stands for. It may arrive twice."""
        suppressed = message.details.get("suppressed")
        more = suppressed if isinstance(suppressed, int) and 0 <= suppressed <= _MAX_SUPPRESSED else 0
        self.count_event(message.event, 1 + more)

    def on_event(self, event: EmitEvent) -> None:
        """Count an event of this coordinator before its rate limit."""
        self.count_own_event(event)
        details = event.details
        envelope = {
            "event": event.name,
            "generation": event.generation,
            "step": event.step,
            "details": details,
        }
        match self._run.on_event(envelope, self._clock()):
            case StepCommittedFact() as fact:
                self._count_step(fact)
            case RecoveryCompletedFact() as fact if not fact.recovery.is_start:
                self._count_recovery(fact.recovery)
            case JobSubmittedFact():
                self._checkpoint_at = None
            case RolledBackFact() as fact:
                self._undone.inc(details["undone_steps"])
                self._undone_s.inc(fact.undone_s)
        match event.name:
            case "LeaderElected":
                self._takeovers.inc()
                # It did not see the steps and checkpoints of the meantime, nor perhaps another job.
                self._run, self._checkpoint_at = RunModel(most=MAX_ENTRIES), None
            case "SnapshotCompleted":
                self._snapshots.inc()
                self._copy_s.observe(details["copy_s"])
                self._stall_s.observe(details["stall_s"])
                self._snapshot_s.observe(details["took_s"])
            case "SnapshotAbandoned":
                self._snapshots_abandoned.inc()
            case "CheckpointCompleted":
                self._checkpoints.inc()
                self._checkpoint_s.observe(details["took_s"])
                self._checkpoint_at = self._clock()
            case "CheckpointAbandoned":
                self._checkpoints_abandoned.inc()
            case "NodeLost":
                self._nodes_lost.labels(details["how"]).inc()
            case "TrainerLost":
                self._trainers_lost.labels(details["cause"]).inc()
            case "BrokerLost":
                self.broker_losses.inc()

    def _count_step(self, fact: StepCommittedFact) -> None:
        self._steps.inc()
        if fact.skipped:
            self._skipped.inc()
        if fact.step_s:
            self._step_s.observe(fact.step_s)

    def _count_recovery(self, recovery: RecoveryDetails) -> None:
        self._recoveries.labels(recovery.cause, recovery.tier).inc()
        self._recovery_s.labels(recovery.cause).observe(recovery.total_ms / 1e3)
        for phase, took_ms in phases_ms(recovery).items():
            self._phase_s.labels(phase).observe(took_ms / 1e3)
        self._recomputed.inc(recovery.recomputed_steps)
        self._moved.inc(recovery.bytes_moved)
