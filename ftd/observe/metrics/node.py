"""A node's metrics: counted from the events and effects of its state machine, and read from its servers."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import get_args

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from ftd.observe.metrics.common import COPY_S, RECOVERY_S, STEP_S, WRITE_S, CommonMetrics, ScrapeCollector
from statemachine import effects, events
from statemachine.agent import events as agent_events
from statemachine.messages.cluster import LayersPersisted, TrainerLost
from statemachine.messages.common import Resumed
from statemachine.messages.trainer import ShardWritten, TrainerStepped
from statemachine.messages.values import FailureCause, NodeState


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSample:
    """Values of a node that are read at each scrape."""

    connected: bool
    internal_errors: int
    trainers: int
    sent_bytes: int
    """Bytes of snapshots sent to other nodes since the daemon's start."""
    unauthorised: int
    """Requests to the snapshot server without a valid token."""
    rendezvous_rejected: int
    """Rendezvous connections that did not prove knowledge of the secret."""
    snapshot_limit_bytes: int


class NodeMetrics(CommonMetrics):
    """Metrics of a node. Pass every event and effect of its agent machine to ``observe``, and every event that
    the node publishes to ``count_own_event``.
    """

    def __init__(self, devices: int, now: Callable[[], NodeSample]) -> None:
        super().__init__(
            "node", connected=lambda: now().connected, internal_errors=lambda: now().internal_errors
        )
        self._now = now
        self._devices = devices
        self._started: set[int] = set()
        self._lost: TrainerLost | None = None
        self._state, self._generation, self._step = NodeState.HEALTHY, 0, 0
        self._make_trainers()
        self._make_snapshots()
        self.registry.register(ScrapeCollector(self._read))

    def _make_trainers(self) -> None:
        self._restarts = self.counter("ftd_trainer_restarts", "Restarts of trainers.", "device")
        self._failures = self.counter("ftd_trainer_failures", "Trainers that failed, by cause.", "cause")
        self._step_s = self.histogram(
            "ftd_trainer_step_seconds", "Duration of a trainer's steps.", STEP_S, "device"
        )
        self._microbatch_s = self.gauge(
            "ftd_trainer_microbatch_seconds",
            "Time to compute the last microbatch, without waiting.",
            "device",
        )
        self._rendezvous_s = self.histogram(
            "ftd_trainer_rendezvous_seconds", "Time until all ranks of a new generation had met.", RECOVERY_S
        )
        self._state_s = self.histogram(
            "ftd_trainer_state_seconds",
            "Time until the state for a new generation was received or read.",
            RECOVERY_S,
        )
        self._moved = self.counter(
            "ftd_trainer_moved_bytes", "State that trainers received from each other in recoveries."
        )
        for device in range(self._devices):
            self._restarts.labels(str(device))
        for cause in get_args(FailureCause):
            self._failures.labels(cause)

    def _make_snapshots(self) -> None:
        self._snapshot_bytes = self.counter(
            "ftd_trainer_snapshot_bytes", "Bytes of snapshots written into this node's memory."
        )
        self._idle_bytes = self.counter(
            "ftd_trainer_snapshot_idle_bytes", "Bytes of snapshots copied while the stage had to wait anyway."
        )
        self._copy_s = self.histogram(
            "ftd_trainer_snapshot_copy_seconds", "Time to copy one snapshot.", COPY_S
        )
        self._stall_s = self.histogram(
            "ftd_trainer_snapshot_stall_seconds", "Time that a trainer waited for its snapshot.", COPY_S
        )
        self._copied = self.counter(
            "ftd_node_snapshot_copy_bytes", "Bytes of snapshot copies at this node's replica peer."
        )
        self._written = self.counter("ftd_node_checkpoint_bytes", "Bytes written to persistent checkpoints.")
        self._writing_s = self.histogram(
            "ftd_node_checkpoint_seconds", "Time to write this node's share of a checkpoint.", WRITE_S
        )

    def observe(self, item: events.Event | effects.Effect) -> None:
        """Count an event or effect of the agent machine."""
        match item:
            case agent_events.TrainerReported(report=TrainerStepped() as report):
                self._step_s.labels(str(item.device)).observe(report.step_s)
                if report.microbatch_ms > 0:
                    self._microbatch_s.labels(str(item.device)).set(report.microbatch_ms / 1e3)
            case agent_events.TrainerReported(report=Resumed() as report):
                self._rendezvous_s.observe(report.rendezvous_s)
                self._state_s.observe(report.state_s)
                self._moved.inc(report.bytes_moved)
            case agent_events.TrainerReported(report=ShardWritten() as report):
                self._snapshot_bytes.inc(report.size_bytes)
                self._idle_bytes.inc(report.idle_bytes)
                self._copy_s.observe(report.copy_s)
                self._stall_s.observe(report.stall_s)
            case agent_events.TrainerConnected():
                if item.device in self._started:
                    self._restarts.labels(str(item.device)).inc()
                self._started.add(item.device)
            case agent_events.SnapshotCopyCommitted():
                self._copied.inc(item.size_bytes)
            case agent_events.PersistEnded(answer=LayersPersisted() as written):
                self._written.inc(sum(layer.size_bytes for layer in written.layers))
                self._writing_s.observe(written.took_s)
            case events.BrokerDisconnected():
                self.broker_losses.inc()
            case effects.SendSignal(signal=TrainerLost() as lost) if lost is not self._lost:
                self._lost = lost  # A repeated signal, for a coordinator that was away, counts once.
                self._failures.labels(lost.cause).inc()
            case effects.PublishNode():
                self._state, self._generation, self._step = item.state, item.generation, item.step

    def _read(self) -> Iterator[Metric]:
        now = self._now()
        states = GaugeMetricFamily(
            "ftd_node_state", "1 for the state that the node is in, 0 for the others.", labels=("state",)
        )
        for state in NodeState:
            states.add_metric((str(state),), float(self._state is state))
        yield states
        yield GaugeMetricFamily(
            "ftd_node_generation", "Generation of the plan that the node follows.", value=self._generation
        )
        yield GaugeMetricFamily(
            "ftd_node_step", "The last committed step that the node has reported.", value=self._step
        )
        yield GaugeMetricFamily("ftd_node_devices", "Devices of this node.", value=self._devices)
        yield GaugeMetricFamily("ftd_node_trainers", "Running trainers.", value=now.trainers)
        yield GaugeMetricFamily(
            "ftd_node_snapshot_limit_bytes",
            "Limit of the memory for snapshots.",
            value=now.snapshot_limit_bytes,
        )
        yield CounterMetricFamily(
            "ftd_node_snapshot_sent_bytes", "Bytes of snapshots sent to other nodes.", value=now.sent_bytes
        )
        yield CounterMetricFamily(
            "ftd_node_unauthorised",
            "Requests to the node's snapshot server without a valid token.",
            value=now.unauthorised,
        )
        yield CounterMetricFamily(
            "ftd_node_rendezvous_rejected",
            "Rendezvous connections that did not prove knowledge of the secret.",
            value=now.rendezvous_rejected,
        )
