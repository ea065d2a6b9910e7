"""The coordinator's metrics: one observer of the events that it emits, and the public state when asked.

Counters begin anew with each start of the coordinator, as Prometheus expects it; what the journal remembers
(step, snapshot, nodes) is read off the state.
"""

from collections.abc import Callable
from typing import Any, get_args

from prometheus_client.core import GaugeMetricFamily

from ftd.observe.metrics.common import COPY_S, RECOVERY_S, STEP_S, WRITE_S, CommonMetrics, ScrapeCollector
from ftd.observe.metrics.state import state_metrics
from ftd.observe.run_model import (
    JobSubmitted,
    RecoveryCompleted,
    RecoveryDetails,
    RolledBack,
    RunModel,
    StepCommitted,
)
from ftd.transport.wire.public import EventMessage
from statemachine.effects import EmitEvent
from statemachine.messages.values import FailureCause

PHASES = ("quiesce", "plan", "state", "resume")
MOST_KEPT = 1000
"""Of what the model of the run keeps."""
_MOST_HELD_BACK = 1_000_000
LEADING = "1: this coordinator leads the cluster. 0: it stands by, or waits for the broker."


class ClusterMetrics:
    """Hand ``on_event`` every event of the coordinator, and ``on_node_event`` those of the nodes.

    :param leading: whether this coordinator does.
    :param state: the machine's ``public_state``. :param clock: that its times and the events' are on.
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
        self.common = CommonMetrics("coordinator", connected=connected, internal_errors=internal_errors)
        self._clock = clock
        self._run = RunModel(most=MOST_KEPT)
        self._checkpoint_at: float | None = None
        self.common.registry.register(
            ScrapeCollector(lambda: [GaugeMetricFamily("ftd_leading", LEADING, value=float(leading()))])
        )
        self._make_training()
        self._make_keeping()
        self._make_trouble()
        self.common.registry.register(
            ScrapeCollector(
                lambda: state_metrics(
                    state(),
                    now=clock(),
                    goodput=self._run.goodput.ratio(clock()),
                    checkpoint_at=self._checkpoint_at,
                )
            )
        )

    def _make_training(self) -> None:
        self._steps = self.common.counter(
            "ftd_committed_steps", "Committed steps; one that was undone, twice."
        )
        self._skipped = self.common.counter(
            "ftd_skipped_updates", "Committed steps whose gradients were not finite: nothing was updated."
        )
        self._step_s = self.common.histogram("ftd_step_seconds", "How long committed steps took.", STEP_S)
        self._undone_s = self.common.counter(
            "ftd_rolled_back_seconds", "Time that had gone into steps that rollbacks undid."
        )
        self._undone = self.common.counter("ftd_rolled_back_steps", "Committed steps that rollbacks undid.")
        self._recomputed = self.common.counter(
            "ftd_recomputed_steps", "Steps in flight that a recovery dropped and did again."
        )
        self._recoveries = self.common.counter(
            "ftd_recoveries",
            "Reconfigurations, to the first commit behind each: failures, joins, drains, the start.",
            "cause",
            "tier",
        )
        self._recovery_s = self.common.histogram(
            "ftd_recovery_seconds",
            "From noticing to the next committed step.",
            RECOVERY_S,
            "cause",
        )
        self._phase_s = self.common.histogram(
            "ftd_recovery_phase_seconds", "The same by its phases.", RECOVERY_S, "phase"
        )
        self._moved = self.common.counter(
            "ftd_recovery_moved_bytes", "State that trainers sent to each other."
        )
        for phase in PHASES:
            self._phase_s.labels(phase)

    def _make_keeping(self) -> None:
        self._snapshots = self.common.counter(
            "ftd_snapshots_completed", "Snapshots complete in every owner's memory."
        )
        self._snapshots_lost = self.common.counter(
            "ftd_snapshots_abandoned", "Snapshots that were not completed."
        )
        self._snapshot_s = self.common.histogram(
            "ftd_snapshot_seconds", "From the order of a snapshot to its completion everywhere.", RECOVERY_S
        )
        self._copy_s = self.common.histogram(
            "ftd_snapshot_copy_seconds", "Copying a snapshot, at the slowest device.", COPY_S
        )
        self._stall_s = self.common.histogram(
            "ftd_snapshot_stall_seconds", "How long training waited for a snapshot, at most.", COPY_S
        )
        self._checkpoints = self.common.counter(
            "ftd_checkpoints_written", "Persistent checkpoints completed."
        )
        self._checkpoints_lost = self.common.counter(
            "ftd_checkpoints_abandoned", "Persistent checkpoints given up."
        )
        self._checkpoint_s = self.common.histogram(
            "ftd_checkpoint_seconds", "From the order of a persistent checkpoint to its commit.", WRITE_S
        )

    def _make_trouble(self) -> None:
        self._takeovers = self.common.counter(
            "ftd_takeovers", "How often this coordinator took over from another one that led."
        )
        self._nodes_lost = self.common.counter(
            "ftd_nodes_lost", "Nodes that went OFFLINE, by how it was noticed.", "how"
        )
        self._trainers_lost = self.common.counter(
            "ftd_trainers_lost", "Trainers that failed, by cause.", "cause"
        )
        for how in ("last_will", "silence", "goodbye", "no_answer"):
            self._nodes_lost.labels(how)
        for cause in get_args(FailureCause):
            self._trainers_lost.labels(cause)

    # --- what happens ------------------------------------------------------------------------------

    def on_node_event(self, message: EventMessage) -> None:
        """A node's own event. It may have been held back, and may come twice."""
        suppressed = message.details.get("suppressed")
        more = suppressed if isinstance(suppressed, int) and 0 <= suppressed <= _MOST_HELD_BACK else 0
        self.common.heard(message.event, 1 + more)

    def on_event(self, event: EmitEvent) -> None:
        """One of our own, before any is held back."""
        self.common.said(event.name)
        details = event.details
        envelope = {
            "event": event.name,
            "generation": event.generation,
            "step": event.step,
            "details": details,
        }
        match self._run.on_event(envelope, self._clock()):
            case StepCommitted() as fact:
                self._committed(fact)
            case RecoveryCompleted() as fact:
                self._recovered(fact.recovery)
            case JobSubmitted():
                self._checkpoint_at = None
            case RolledBack() as fact:
                self._undone.inc(details["undone_steps"])
                self._undone_s.inc(fact.undone_s)
        match event.name:
            case "LeaderElected":
                self._takeovers.inc()
            case "SnapshotCompleted":
                self._snapshots.inc()
                self._copy_s.observe(details["copy_s"])
                self._stall_s.observe(details["stall_s"])
                self._snapshot_s.observe(details["took_s"])
            case "SnapshotAbandoned":
                self._snapshots_lost.inc()
            case "CheckpointCompleted":
                self._checkpoints.inc()
                self._checkpoint_s.observe(details["took_s"])
                self._checkpoint_at = self._clock()
            case "CheckpointAbandoned":
                self._checkpoints_lost.inc()
            case "NodeLost":
                self._nodes_lost.labels(details["how"]).inc()
            case "TrainerLost":
                self._trainers_lost.labels(details["cause"]).inc()
            case "BrokerLost":
                self.common.broker_losses.inc()

    def _committed(self, fact: StepCommitted) -> None:
        self._steps.inc()
        if fact.skipped:
            self._skipped.inc()
        if fact.step_s:
            self._step_s.observe(fact.step_s)

    def _recovered(self, recovery: RecoveryDetails) -> None:
        self._recoveries.labels(recovery.cause, recovery.tier).inc()
        self._recovery_s.labels(recovery.cause).observe(recovery.total_ms / 1e3)
        phases_ms = (recovery.quiesce_ms, recovery.plan_ms, recovery.state_ms, recovery.resume_ms)
        for phase, took_ms in zip(PHASES, phases_ms, strict=True):
            self._phase_s.labels(phase).observe(took_ms / 1e3)
        self._recomputed.inc(recovery.recomputed_steps)
        self._moved.inc(recovery.bytes_moved)
