"""``ftd node``: the node with the system's clocks, MQTT, a zygote that forks trainers, and files in memory.

It owns the rendezvous server and the runtime directory. This module does not load torch.
"""

import asyncio
import os
import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import structlog

from ftd import systemd
from ftd.config.daemon import DaemonConfig
from ftd.driver import SystemClock
from ftd.errors import ConfigurationError
from ftd.logs import log_location
from ftd.node.node import Node
from ftd.node.ports import NodeObserver, Ports
from ftd.node.rendezvous import RendezvousServer
from ftd.node.starvation import StarvationMonitor
from ftd.node.trainer_processes import LocalProcesses, ZygoteTrainers
from ftd.processes import (
    become_subreaper,
    prepare_compile_cache,
    remove_stale_directories,
    trainer_environment,
)
from ftd.snapshots.storage import LocalSnapshotStorage
from ftd.tasks import cancel_all
from ftd.transport.http_server import listen
from ftd.transport.mqtt.session import MqttSession
from planner.reasons import count_noun
from runtime.wire.store_protocol import secret_fingerprint
from statemachine.effects import Effect
from statemachine.events import Event
from statemachine.messages.values import NodeFacts

if TYPE_CHECKING:
    from ftd.observe.metrics.node import NodeSample
    from ftd.observe.metrics.server import MetricsServer

log = structlog.get_logger("ftd.node")

MAX_SOCKET_PATH_BYTES = 107


class NodeDaemon:
    """The node daemon; ``await NodeDaemon(config).run()`` returns when the node has left."""

    def __init__(self, config: DaemonConfig) -> None:
        """:raises ConfigurationError: the configuration has no shared secret."""
        self._config = config
        self._secret = config.require_secret()
        self._directory = config.runtime_dir / str(os.getpid())
        self._compile_cache: dict[str, str] = {}
        self._rendezvous = RendezvousServer(
            self._secret, host=config.listening_host, port=config.rendezvous_port
        )
        self._metrics_server: MetricsServer | None = None
        observer, watch = self._new_observer(config)
        self._node = node = Node(
            config,
            Ports(
                clock=SystemClock(),
                open_session=partial(MqttSession, config.broker),
                processes=LocalProcesses(),
                trainers=ZygoteTrainers(
                    directory=self._directory,
                    environment=self._trainer_environment,
                    preload=config.preload,
                ),
                snapshots=LocalSnapshotStorage(config),
                facts=self._facts,
                observer=observer,
            ),
            watch=watch,
        )
        self._starvation = StarvationMonitor(node.supervisor.pids, node.driver)
        self._signals = 0

    async def run(self) -> int:
        """Serve until the node has left, and return the exit code.

        :raises ConfigurationError: the runtime directory or the rendezvous port cannot be used.
        :raises FtdError: the daemon cannot continue.
        """
        loop = asyncio.get_running_loop()
        become_subreaper()
        self._make_directory()
        self._make_compile_cache()
        background: list[asyncio.Future[None]] = []
        try:
            await listen(self._rendezvous.start(), self._config.rendezvous_port, field="node.rendezvous_port")
            if self._metrics_server is not None:
                await self._metrics_server.start()
            await self._node.start()
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(number, self._on_signal, number)
            await self._node.introduce()
            name = self._config.node
            systemd.notify("READY=1", f"STATUS=node {name}, {count_noun(self._config.devices, 'device')}")
            background += [
                asyncio.ensure_future(work) for work in (systemd.feed_watchdog(), self._starvation.run())
            ]
            return await self._node.run()
        finally:
            systemd.notify("STOPPING=1")
            await cancel_all(background)
            await self._node.close()
            await self._rendezvous.close()
            if self._metrics_server is not None:
                await self._metrics_server.close()
            shutil.rmtree(self._directory, ignore_errors=True)

    def _new_observer(
        self, config: DaemonConfig
    ) -> tuple[NodeObserver, Callable[[Event | Effect], None] | None]:
        """Return the callbacks for what this node has, and the one for its driver: the modules for metrics are
        loaded only if they are served.
        """
        observer = NodeObserver(
            on_heartbeat=lambda *beat: self._starvation.record_heartbeat(*beat)  # noqa: PLW0108  # made later
        )
        if config.node_metrics is None:
            return observer, None
        from ftd.observe.metrics.node import NodeMetrics
        from ftd.observe.metrics.server import MetricsServer

        metrics = NodeMetrics(config.devices, self._now)
        self._metrics_server = MetricsServer(config.node_metrics, metrics.registry)
        counting = replace(
            observer, on_event=metrics.count_own_event, on_acknowledged=metrics.broker_round_trip.observe
        )
        return counting, metrics.observe

    # --- start -------------------------------------------------------------------------------------

    def _make_directory(self) -> None:
        """Make a private directory of this process, so that two daemons of one name cannot collide."""
        excess = len(os.fsencode(self._directory / "trainers.sock")) - MAX_SOCKET_PATH_BYTES
        if excess > 0:
            raise ConfigurationError(
                f"{self._config.runtime_dir} is {excess} bytes too long for a unix socket",
                field="node.runtime_dir",
                remedy="choose a shorter one, for example under /run or /tmp",
            )
        try:
            self._config.runtime_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
            remove_stale_directories(self._config.runtime_dir)
            shutil.rmtree(self._directory, ignore_errors=True)
            self._directory.mkdir(mode=0o700)
        except OSError as error:
            raise ConfigurationError(
                f"{self._config.runtime_dir} cannot be used: {error.strerror}",
                field="node.runtime_dir",
                remedy="choose a directory that this user can write to",
            ) from error

    def _trainer_environment(self, device: int) -> dict[str, str]:
        return trainer_environment(device) | self._compile_cache

    def _make_compile_cache(self) -> None:
        """Make the directory for compiled code. Without it torch uses a directory below /tmp, and the node
        works as well.
        """
        try:
            self._compile_cache = prepare_compile_cache(self._config.compile_cache_dir)
        except OSError as error:
            path = str(self._config.compile_cache_dir)
            log.warning("compile_cache_unusable", path=path, reason=error.strerror or str(error))

    def _facts(self) -> NodeFacts:
        config, snapshots = self._config, self._node.snapshots.storage
        return NodeFacts(
            devices=config.devices,
            host=config.host,
            rendezvous_port=self._rendezvous.port,
            chaos_allowed=config.chaos,
            snapshot_port=snapshots.port,
            snapshot_bytes=snapshots.size_bytes,
            snapshot_limited=config.snapshot_limit_bytes is not None,
            secret_fingerprint=secret_fingerprint(self._secret),
            log=log_location(),
            checks_health=config.hardware.health.enabled,
        )

    def _on_signal(self, number: signal.Signals) -> None:
        """Leave gracefully on the first signal, without the coordinator on the second, and at once on the
        third.
        """
        self._signals += 1
        if self._signals > 2:
            self._node.exit(128 + number)
        self._node.leave(signal.Signals(number).name)

    def _now(self) -> "NodeSample":
        from ftd.observe.metrics.node import NodeSample

        node = self._node
        return NodeSample(
            connected=node.connected,
            internal_errors=node.driver.bugs,
            trainers=len(node.supervisor.pids()),
            rendezvous_rejected=self._rendezvous.rejected,
            **node.snapshots.storage.metrics(),
        )
