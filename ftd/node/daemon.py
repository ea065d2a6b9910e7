"""The daemon ``ftd node`` of one host, which carries out the decisions of the agent machine.

It owns the rendezvous server, the supervisor of the trainers, the connection to the broker, and the node's
incarnation. All decisions are made in ``statemachine.agent``; this module does not load torch.
"""

import asyncio
import os
import shutil
import signal
import time
from collections.abc import Sequence
from typing import Any, assert_never, cast

import msgspec
import structlog

from ftd import systemd
from ftd.config.daemon import DaemonConfig
from ftd.driver import Driver
from ftd.errors import ConfigurationError
from ftd.logs import log_location
from ftd.node.chaos import NodeFaultInjector
from ftd.node.instructions import make_prepare_instruction, make_resume_instruction
from ftd.node.message_router import NodeMessageRouter
from ftd.node.publisher import NodePublisher
from ftd.node.rendezvous import RendezvousServer
from ftd.node.starvation import StarvationMonitor
from ftd.node.supervisor import TrainerSupervisor
from ftd.node.traces import TraceService
from ftd.observe.metrics.node import NodeMetrics, NodeSample
from ftd.observe.metrics.server import MetricsServer
from ftd.processes import (
    become_subreaper,
    prepare_compile_cache,
    remove_stale_directories,
    trainer_environment,
)
from ftd.snapshots.service import SnapshotService
from ftd.transport.wire.public import Answer, NodeStateMessage
from ftd.transport.wire.topics import Topics
from planner.values import Device
from runtime.wire.store_protocol import secret_fingerprint
from statemachine import effects
from statemachine.agent.events import (
    AgentStarted,
    CommandArrived,
    TerminationRequested,
    TrainerConnected,
    TrainerReported,
)
from statemachine.agent.machine import AgentMachine
from statemachine.events import BrokerConnected, BrokerDisconnected, Event
from statemachine.messages import trainer as protocol
from statemachine.messages.cluster import ToNode
from statemachine.messages.common import Quiesce, Resumed
from statemachine.messages.trace import Traced
from statemachine.messages.values import NodeFacts, PlantedFault

log = structlog.get_logger("ftd.node")

DISCONNECT_TIMEOUT_S = 1.0
"""Time that the last messages have to be acknowledged by the broker before the connection closes."""
MAX_SOCKET_PATH_BYTES = 107

AgentEffect = (
    effects.SendSignal
    | effects.PublishNode
    | effects.EmitEvent
    | effects.StartTrainer
    | effects.KillTrainer
    | effects.PrepareTrainer
    | effects.ResumeTrainer
    | effects.InstructTrainer
    | effects.SendSnapshotCopy
    | effects.RetainSnapshotCopies
    | effects.RemoveSnapshots
    | effects.PersistLayers
    | effects.StopPersisting
    | effects.RunHealthCheck
    | effects.StopHealthCheck
    | effects.RenewIncarnation
    | effects.ExitDaemon
)


class NodeDaemon:
    """The node daemon; ``await NodeDaemon(config).run()`` returns when the node has left."""

    def __init__(self, config: DaemonConfig) -> None:
        """:raises ConfigurationError: the configuration has no shared secret."""
        self._config = config
        self._node = config.node
        self._topics = Topics(cluster=config.cluster)
        self._secret = config.require_secret()
        self._incarnation = 0
        self._directory = config.runtime_dir / str(os.getpid())
        self._metrics = NodeMetrics(config.devices, self._now)
        self._metrics_server = MetricsServer(config.node_metrics, self._metrics.common.registry)
        machine = AgentMachine(config.node, config.timing)
        self._driver = Driver(machine, self._perform, self._metrics.observe)
        self._rendezvous = RendezvousServer(
            self._secret, host=config.listening_host, port=config.rendezvous_port
        )
        self._snapshots = SnapshotService(
            config,
            self._secret,
            host=config.listening_host,
            feed=self._driver.feed,
            stamp=self._stamp,
            publish_event=self.publish_event,
            trainers=self,
        )
        self._chaos = NodeFaultInjector(
            node=config.node,
            devices=config.devices,
            allowed=config.chaos,
            actions=self,
            memory=self._snapshots,
        )
        self._traces = TraceService(
            node=config.node, devices=config.devices, send=self.send, answer=self.send_answer
        )
        self._router = NodeMessageRouter(self._topics, self._node, self)
        self._publisher: NodePublisher | None = None
        self._signals = 0

    async def run(self) -> int:
        """Serve until the node has left, and return the exit code.

        :raises ConfigurationError: the runtime directory or the rendezvous port cannot be used.
        :raises FtdError: the daemon cannot continue.
        """
        loop = asyncio.get_running_loop()
        self._exit: asyncio.Future[int] = loop.create_future()
        become_subreaper()
        self._make_directory()
        self._make_compile_cache()
        self._supervisor = TrainerSupervisor(
            devices=self._config.devices,
            directory=self._directory,
            feed=self._on_trainer,
            cause=self._driver.new_cause,
            environment=self._trainer_environment,
            preload=self._config.preload,
            on_side_report=self._on_side_report,
            test_limit_s=self._config.hardware.health.limit_s,
            test_links=self._snapshots.check_links,
        )
        self._starvation = StarvationMonitor(self._supervisor.pids, self._driver.feed, self._stamp)
        try:
            await self._listen()
            await self._metrics_server.start()
            await self._snapshots.start()
            await self._supervisor.start()
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(number, self._on_signal, number)
            self._begin_incarnation()
            # Trainers start later: the machine, which starts them, does not run yet.
            await self._snapshots.scan()
            systemd.notify("READY=1", f"STATUS=node {self._node}, {self._config.devices} devices")
            return await self._serve()
        finally:
            systemd.notify("STOPPING=1")
            await self._end()

    async def _serve(self) -> int:
        """Run the machine and the background tasks until the machine or a signal ends the daemon."""
        driving = asyncio.ensure_future(self._driver.run())
        background = [
            asyncio.ensure_future(work) for work in (systemd.feed_watchdog(), self._starvation.run())
        ]
        ending: list[asyncio.Future[Any]] = [self._exit, driving]
        try:
            await asyncio.wait(ending, return_when=asyncio.FIRST_COMPLETED)
            if not self._exit.done():
                driving.result()  # Only an error ends the driver: raise it here.
            return self._exit.result()
        finally:
            for task in (driving, *background):
                task.cancel()
            await asyncio.gather(driving, *background, return_exceptions=True)

    async def _end(self) -> None:
        """Release everything: trainers, connection, sockets and files."""
        self._driver.stop_timers()
        self._traces.close()
        self._chaos.close()
        await self._supervisor.close()
        if self._publisher is not None:
            await self._publisher.close(DISCONNECT_TIMEOUT_S)
        await self._rendezvous.close()
        await self._snapshots.close()
        await self._metrics_server.close()
        shutil.rmtree(self._directory, ignore_errors=True)

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
        self._compile_cache: dict[str, str] = {}
        try:
            self._compile_cache = prepare_compile_cache(self._config.compile_cache_dir)
        except OSError as error:
            path = str(self._config.compile_cache_dir)
            log.warning("compile_cache_unusable", path=path, reason=error.strerror or str(error))

    async def _listen(self) -> None:
        try:
            await self._rendezvous.start()
        except OSError as error:
            raise ConfigurationError(
                f"cannot listen on port {self._config.rendezvous_port}: {error.strerror}",
                field="node.rendezvous_port",
                remedy="stop the daemon that uses it, or choose another port (0 takes any free one)",
            ) from error

    def _begin_incarnation(self) -> None:
        """Start a new incarnation: a new last will, a new connection with a new client id, and a reset of the
        machine.
        """
        self._incarnation = max(self._incarnation + 1, time.time_ns() // 1000)
        facts = NodeFacts(
            devices=self._config.devices,
            host=self._config.host,
            rendezvous_port=self._rendezvous.port,
            chaos_allowed=self._config.chaos,
            snapshot_port=self._snapshots.port,
            snapshot_bytes=self._snapshots.size_bytes,
            secret_fingerprint=secret_fingerprint(self._secret),
            log=log_location(),
            checks_health=self._config.hardware.health.enabled,
        )
        log.info("incarnation_began", incarnation=self._incarnation, rendezvous_port=self._rendezvous.port)
        self._driver.feed(AgentStarted(**self._stamp(), incarnation=self._incarnation, facts=facts))
        self._publisher = NodePublisher(
            self._config,
            self._incarnation,
            message_faults=self._chaos.message_faults,
            clock=self._driver.now,
            on_message=self._router.on_message,
            on_connected=lambda: self._driver.feed(BrokerConnected(**self._stamp())),
            on_lost=lambda: self._driver.feed(BrokerDisconnected(**self._stamp())),
            on_acknowledged=self._metrics.common.broker_round_trip.observe,
            on_event=self._metrics.on_published,
        )

    # --- events for the machine --------------------------------------------------------------------

    def _stamp(self) -> dict[str, Any]:
        return {"at": self._driver.now(), "cause": self._driver.new_cause()}

    def _on_signal(self, number: signal.Signals) -> None:
        """Leave gracefully on the first signal, without the coordinator on the second, and at once on the
        third.
        """
        self._signals += 1
        if self._signals > 2 and not self._exit.done():
            self._exit.set_result(128 + number)
        self.leave(signal.Signals(number).name)

    def _on_trainer(self, event: Event) -> None:
        match event:
            case TrainerReported(report=protocol.TrainerHeartbeat()):
                self._starvation.record_heartbeat(event.device, event.at)
            case TrainerReported(report=Resumed(generation=generation)):
                self._snapshots.stager.resumed(event.device, generation)
            case TrainerConnected():
                self.publish_event(
                    "TrainerStarted",
                    f"process {event.pid}",
                    {"device": event.device, "pid": event.pid, "daemon_pid": os.getpid()},
                )
        self._driver.feed(event)

    def _on_side_report(self, device: int, frame: protocol.DaemonReport) -> None:
        match frame:
            case Traced():
                self._traces.on_traced(device, frame)
            case protocol.StagingCorrupted():
                self._snapshots.stager.handle_corrupt(device, frame)
            case protocol.ModelDescribed():
                self._snapshots.set_description(frame.job_id, frame.description)

    # --- effects of the machine ----------------------------------------------------------------------

    async def _perform(self, effect: effects.Effect) -> None:
        wanted = cast(
            AgentEffect, effect
        )  # The driver handles timers, and all other effects are the coordinator's.
        match wanted:
            case effects.SendSignal():
                self._present_publisher().send_signal(wanted.signal)
            case effects.PublishNode():
                self._present_publisher().publish_state(wanted)
            case effects.EmitEvent():
                self._present_publisher().publish_event(wanted)
            case effects.StartTrainer():
                self._supervisor.start_trainer(wanted.device)
            case effects.KillTrainer():
                self._supervisor.kill_trainer(wanted.device, wanted.grace_s)
            case effects.PrepareTrainer():
                self._prepare(wanted)
            case effects.InstructTrainer():
                if isinstance(wanted.instruction, Quiesce):
                    self._snapshots.abandon()
                self._supervisor.send(wanted.device, wanted.instruction)
            case effects.ResumeTrainer():
                self._resume(wanted)
            case effects.SendSnapshotCopy():
                self._snapshots.send_copy(wanted)
            case effects.RetainSnapshotCopies():
                order = wanted.order
                self._snapshots.retain_copies(order.job_id, order.step, order.restore)
            case effects.RemoveSnapshots():
                self._snapshots.remove(wanted.job_id)
            case effects.PersistLayers():
                self._snapshots.persist(wanted.order)
            case effects.StopPersisting():
                self._snapshots.stop_persisting(wanted.attempt)
            case effects.RunHealthCheck():
                self._supervisor.health.start(wanted.number, wanted.peers)
            case effects.StopHealthCheck():
                self._supervisor.health.stop()
            case effects.RenewIncarnation():
                await self._present_publisher().close(DISCONNECT_TIMEOUT_S)
                self._begin_incarnation()
            case effects.ExitDaemon():
                if not self._exit.done():
                    self._exit.set_result(wanted.code)
            case _:
                assert_never(wanted)

    def _now(self) -> NodeSample:
        return NodeSample(
            connected=self._publisher is not None and self._publisher.connected,
            internal_errors=self._driver.bugs,
            trainers=len(self._supervisor.pids()),
            rendezvous_rejected=self._rendezvous.rejected,
            **self._snapshots.metrics(),
        )

    def _present_publisher(self) -> NodePublisher:
        assert self._publisher is not None, "the machine is fed only after the first incarnation began"
        return self._publisher

    def _prepare(self, effect: effects.PrepareTrainer) -> None:
        try:
            arena, limit_bytes = self._snapshots.prepare(effect.job, effect.device)
            # One device's trainer is enough, since every trainer has the whole model.
            describe = bool(effect.job.checkpoint.url) and effect.device == 0
            frame = make_prepare_instruction(
                effect.job,
                effect.profile,
                arena,
                limit_bytes,
                describe=describe,
                memory_limit_bytes=self._config.device_memory_bytes,
            )
        except (msgspec.ValidationError, ValueError) as error:
            self._supervisor.fail_trainer(effect.device, "unprepared", f"the job is invalid: {error}")
            return
        self._supervisor.send(effect.device, frame)

    def _resume(self, effect: effects.ResumeTrainer) -> None:
        resume, device = effect.resume, Device(node=self._node, index=effect.device)

        def send(staged: str) -> None:
            self._supervisor.send(
                effect.device, make_resume_instruction(resume, device, self._secret, staged)
            )

        self._snapshots.stager.resume(resume, effect.device, send)

    # --- received messages ---------------------------------------------------------------------------

    @property
    def incarnation(self) -> int:
        return self._incarnation

    def on_command(self, message: ToNode) -> None:
        if self._publisher is not None and message.incarnation == self._incarnation:
            self._publisher.observe_command(message.command)
        self._driver.feed(CommandArrived(at=self._driver.now(), cause=message.cause, message=message))

    def on_chaos(self, payload: bytes) -> None:
        self._chaos.on_request(payload)

    def on_trace(self, payload: bytes) -> None:
        self._traces.on_request(payload)

    def on_state(self, seen: NodeStateMessage | None) -> None:
        self._present_publisher().observe_state(seen)

    # --- actions of fault injection --------------------------------------------------------------------

    def trainer_pids(self, device: int | None) -> list[int]:
        return self._supervisor.pids(device)

    def zygote_pid(self) -> int | None:
        return self._supervisor.zygote_pid

    def leave(self, reason: str) -> None:
        self._driver.feed(TerminationRequested(**self._stamp(), reason=reason))

    def plant_bad_device(self, how: PlantedFault, devices: Sequence[int], for_s: float) -> None:
        self._supervisor.health.plant(how, devices, for_s)

    def disconnect(self, for_s: float) -> None:
        self._present_publisher().interrupt(for_s)

    def publish_event(
        self, event: str, reason: str, details: dict[str, Any], *, over_mqtt: bool = True
    ) -> None:
        """Publish an event that the machine did not decide on."""
        effect = effects.EmitEvent(
            cause=self._driver.new_cause(), name=event, reason=reason, node=self._node, details=details
        )
        self._present_publisher().publish_event(effect, over_mqtt=over_mqtt)

    def send(self, device: int, frame: protocol.Instruction) -> bool:
        return self._supervisor.send(device, frame)

    def send_answer(self, client: str, answer: Answer) -> None:
        self._present_publisher().send_answer(client, answer)

    async def flush(self, timeout_s: float) -> None:
        await self._present_publisher().flush(timeout_s)
