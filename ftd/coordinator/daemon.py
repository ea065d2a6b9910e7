"""``ftd coordinator``: the coordinator with the system's clocks, MQTT, SQLite, planning processes and threads."""

import asyncio
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import structlog

import ftd
from ftd import systemd
from ftd.config.daemon import DaemonConfig
from ftd.coordinator.checkpoints import CheckpointService
from ftd.coordinator.coordinator import Coordinator
from ftd.coordinator.journal import LocalDisk
from ftd.coordinator.plan_cache import PlanCache
from ftd.coordinator.planning import PlanningService
from ftd.coordinator.ports import Feed, Observer, Ports, Program
from ftd.driver import Driver, SystemClock
from ftd.observe.tracking.writer_process import TrackingWriterProcess
from ftd.tasks import cancel_all
from ftd.transport.mqtt.transport import MqttTransport
from statemachine.cluster.durable import durable
from statemachine.election.leadership import Peer

if TYPE_CHECKING:
    from ftd.observe.dashboard.dashboard import Dashboard
    from ftd.observe.metrics.server import MetricsServer

_log = structlog.get_logger("ftd.coordinator")


class CoordinatorDaemon:
    """The process of ``ftd coordinator``: ``await CoordinatorDaemon(config).run()`` serves until a signal ends
    it.
    """

    def __init__(self, config: DaemonConfig, *, reset: bool = False) -> None:
        """Open the journal.

        :param reset: discard the job, here and at the broker, once this coordinator leads.
        :raises JournalError: there is no usable journal in ``coordinator.state_dir``.
        """
        self._cluster = config.cluster
        self._cache = PlanCache(config.state_dir / "plans")
        self._metrics_server: MetricsServer | None = None
        self._dashboard: Dashboard | None = None
        self._coordinator = Coordinator(
            Ports(
                program=Program(version=ftd.__version__, schema=durable.SCHEMA),
                clock=SystemClock(),
                transport=MqttTransport(config.broker, config.cluster),
                disk=LocalDisk(),
                planning=self._new_planning,
                checkpoints=lambda feed, driver: CheckpointService(feed, driver.now),
                observer=self._new_observer(config),
            ),
            Peer(name=config.coordinator, incarnation=time.time_ns() // 1000, priority=config.priority),
            cluster=config.cluster,
            directory=config.state_dir,
            timing=config.timing,
            hardware=config.hardware,
            reset=reset,
            expected_nodes=config.expected_nodes,
        )
        coordinator = self._coordinator
        self._tracking = TrackingWriterProcess(
            coordinator.journal.path,
            on_failed=coordinator.report_logging_failure,
            on_missing=coordinator.fetch_missed,
        )

    def _new_planning(self, feed: Feed, driver: Driver, on_progress: Callable[[], None]) -> PlanningService:
        self._planning = PlanningService(feed, driver, self._cache, on_progress=on_progress)
        return self._planning

    def _new_observer(self, config: DaemonConfig) -> Observer:
        """Return the callbacks for what this coordinator has: a third of its modules is for metrics and
        dashboard, and is loaded only if they are served.
        """
        observer = Observer(
            track_job=lambda *job: self._tracking.set_job(*job),  # noqa: PLW0108  # made later
            on_status=lambda text: systemd.notify(f"STATUS={text}"),
            on_stopping=lambda: systemd.notify("STOPPING=1"),
        )
        if config.coordinator_metrics is not None:
            from ftd.observe.metrics.cluster import ClusterMetrics
            from ftd.observe.metrics.server import MetricsServer

            metrics = ClusterMetrics(
                state=lambda: self._coordinator.machine.public_state(),  # noqa: PLW0108  # machines are replaced
                clock=SystemClock.monotonic_s,
                connected=lambda: self._coordinator.leadership.online,
                leading=lambda: self._coordinator.leadership.connected,
                internal_errors=lambda: self._coordinator.driver.bugs,
            )
            self._metrics_server = MetricsServer(config.coordinator_metrics, metrics.registry)
            observer = replace(
                observer,
                on_own_event=metrics.on_event,
                on_node_event=metrics.on_node_event,
                on_acknowledged=metrics.broker_round_trip.observe,
            )
        if config.dashboard is not None:
            from ftd.observe.dashboard.dashboard import Dashboard

            self._dashboard = Dashboard(config.dashboard, cluster=config.cluster)
            observer = replace(
                observer,
                on_published=self._dashboard.on_event,
                on_broker_alive=self._dashboard.on_broker_message,
                on_state=self._dashboard.on_state,
            )
        return observer

    async def run(self) -> None:
        """Serve until SIGTERM or SIGINT. Trainers continue: they need no coordinator to train.

        :raises JournalError: the journal can no longer be written.
        :raises ConfigurationError: metrics or the dashboard cannot be served at their address.
        """
        coordinator = self._coordinator
        if self._metrics_server is not None:
            await self._metrics_server.start()
        if self._dashboard is not None:
            await self._dashboard.start(coordinator.journal, coordinator.public_state())
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)
        self._planning.warm_up()
        _log.info("started", cluster=self._cluster)
        watchdog = asyncio.ensure_future(systemd.feed_watchdog())
        systemd.notify("READY=1", f"STATUS={coordinator.status()}")
        try:
            await coordinator.run(stop)
        finally:
            await cancel_all([watchdog])
            for server in (self._metrics_server, self._dashboard):
                if server is not None:
                    await server.close()
            await self._planning.close()
            coordinator.journal.flush()
            await self._tracking.close()
            coordinator.journal.close()
            _log.info("stopped")
