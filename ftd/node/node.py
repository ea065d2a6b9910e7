"""One node: it connects the agent machine to the broker, the trainers and the snapshots of its host.

All decisions are made in ``statemachine.agent``. ``Node`` carries them out, on any event loop and with any
``Ports``. The daemon (``ftd.node.daemon``) and the simulator both run it.
"""

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
import structlog

from ftd.config.daemon import DaemonConfig
from ftd.driver import Driver
from ftd.errors import WireError
from ftd.node.chaos import NodeFaultInjector
from ftd.node.instructions import make_prepare_instruction, make_resume_instruction
from ftd.node.ports import Ports
from ftd.node.publisher import NodePublisher
from ftd.node.supervisor import TrainerSupervisor
from ftd.node.traces import TraceService
from ftd.snapshots.service import SnapshotService
from ftd.transport.wire.codec import check_not_retained, decode_to_node, decode_to_nodes
from ftd.transport.wire.public import Answer, NodeStateMessage, decode_json
from ftd.transport.wire.topics import Topics
from planner.values import Device
from statemachine import effects
from statemachine.agent.events import (
    AgentStarted,
    CommandArrived,
    TerminationRequested,
    TrainerConnected,
    TrainerFailed,
    TrainerReported,
)
from statemachine.agent.machine import AgentMachine
from statemachine.events import BrokerConnected, BrokerDisconnected, Event
from statemachine.messages import trainer as protocol
from statemachine.messages.cluster import ToNode
from statemachine.messages.common import Quiesce, Resumed
from statemachine.messages.trace import Traced

log = structlog.get_logger("ftd.node")

DISCONNECT_TIMEOUT_S = 1.0
"""Time that the last messages have to be acknowledged by the broker before the connection closes."""


class Node:
    """One node process. ``run`` drives it; see the module."""

    def __init__(
        self,
        config: DaemonConfig,
        ports: Ports,
        *,
        watch: Callable[[Event | effects.Effect], None] | None = None,
        cause_suffix: str = "",
    ) -> None:
        """Prepare the node; nothing is started yet.

        :param watch: see ``Driver``.
        :param cause_suffix: see ``Driver``; random by default.
        :raises ConfigurationError: the configuration has no shared secret.
        """
        self._config, self._ports = config, ports
        self._node = config.node
        self._topics = topics = Topics(cluster=config.cluster)
        self._secret = config.require_secret()
        self.incarnation = 0
        """The present incarnation of the node."""
        self.machine = AgentMachine(config.node, config.timing)
        self.driver = Driver(self.machine, self._perform, watch, clock=ports.clock, suffix=cause_suffix)
        self.supervisor = TrainerSupervisor(
            config,
            ports,
            feed=self._on_trainer,
            stamp=self.driver.stamp,
            on_side_report=self._on_side_report,
        )
        self.snapshots = SnapshotService(
            config,
            ports.snapshots,
            driver=self.driver,
            publish_event=self.publish_event,
            trainers=self.supervisor,
        )
        self.chaos = NodeFaultInjector(
            config, ports, actions=self, supervisor=self.supervisor, memory=self.snapshots
        )
        self._traces = TraceService(config, send=self.supervisor.send, answer=self.send_answer)
        self._handlers: dict[str, Callable[[bytes, bool], None]] = {
            topics.node_command(self._node): self._on_command_to_this_node,
            topics.command: self._on_command_to_several,
            topics.chaos(self._node): self._on_fault_request,
            topics.trace(self._node): self._on_trace_request,
            topics.node_state(self._node): self._on_own_state,
        }
        """Handlers by topic; they take a payload and whether it was retained."""
        self._publisher: NodePublisher | None = None
        self._exit: asyncio.Future[int] | None = None

    @property
    def connected(self) -> bool:
        """Whether the node has a connection to the broker."""
        return self._publisher is not None and self._publisher.session.connected

    async def start(self) -> None:
        """Start to serve snapshots and to accept trainers.

        :raises ConfigurationError: see ``SnapshotService.start``.
        """
        self._exit = asyncio.get_running_loop().create_future()
        await self.snapshots.start()
        await self.supervisor.start()

    async def introduce(self) -> None:
        """Begin the first incarnation, and report the snapshots that are in memory."""
        self._begin_incarnation()
        # Trainers start later: the machine, which starts them, does not run yet.
        await self.snapshots.scan()

    async def run(self) -> int:
        """Serve until the node has left, and return the exit code. Call ``start`` and ``introduce`` first, and
        ``close`` after it.

        :raises FtdError: the node cannot continue.
        """
        assert self._exit is not None, "it was started"
        driving = asyncio.ensure_future(self.driver.run())
        ending: list[asyncio.Future[Any]] = [self._exit, driving]
        try:
            await asyncio.wait(ending, return_when=asyncio.FIRST_COMPLETED)
            if not self._exit.done():
                driving.result()  # Only an error ends the driver: raise it here.
            return self._exit.result()
        finally:
            driving.cancel()
            await asyncio.gather(driving, return_exceptions=True)

    async def close(self) -> None:
        """Release everything: trainers, connection and snapshots."""
        self.driver.stop_timers()
        self._traces.close()
        self.chaos.close()
        await self.supervisor.close()
        if self._publisher is not None:
            await self._publisher.close(DISCONNECT_TIMEOUT_S)
        await self.snapshots.close()

    def exit(self, code: int) -> None:
        """Let ``run`` return this exit code; the first call counts."""
        if self._exit is not None and not self._exit.done():
            self._exit.set_result(code)

    def _begin_incarnation(self) -> None:
        """Start a new incarnation: a new last will, a new connection with a new client id, and a reset of the
        machine.
        """
        self.incarnation = max(self.incarnation + 1, int(self._ports.clock.wall_s() * 1e6))
        facts = self._ports.facts()
        log.info("incarnation_began", incarnation=self.incarnation, rendezvous_port=facts.rendezvous_port)
        self.driver.feed(AgentStarted(**self.driver.stamp(), incarnation=self.incarnation, facts=facts))
        self._publisher = NodePublisher(
            self._config,
            self._ports,
            self.incarnation,
            message_faults=self.chaos.message_faults,
            on_message=self._on_message,
            on_connected=lambda: self.driver.feed(BrokerConnected(**self.driver.stamp())),
            on_lost=lambda: self.driver.feed(BrokerDisconnected(**self.driver.stamp())),
        )

    # --- events for the machine --------------------------------------------------------------------

    def _on_trainer(self, event: Event) -> None:
        match event:
            case TrainerReported(report=protocol.TrainerHeartbeat()):
                self._ports.observer.on_heartbeat(event.device, event.at)
            case TrainerReported(report=Resumed(generation=generation)):
                self.snapshots.stager.resumed(event.device, generation)
            case TrainerFailed():
                self._traces.on_trainer_ended(event.device)
            case TrainerConnected():
                self._traces.on_trainer_ended(event.device)  # The former one may have been retired.
                self.publish_event(
                    "TrainerStarted",
                    f"process {event.pid}",
                    {"device": event.device, "pid": event.pid, "daemon_pid": self._ports.processes.own_pid},
                )
        self.driver.feed(event)

    def _on_side_report(self, device: int, frame: protocol.DaemonReport) -> None:
        match frame:
            case Traced():
                self._traces.on_traced(device, frame)
            case protocol.StagingCorrupted():
                self.snapshots.stager.handle_corrupt(device, frame)
            case protocol.ModelDescribed():
                self.snapshots.persister.set_description(frame.job_id, frame.description)

    # --- effects of the machine ----------------------------------------------------------------------

    async def _perform(self, effect: effects.Effect) -> None:
        match effect:
            case effects.SendSignal():
                self._present_publisher().send_signal(effect.signal)
            case effects.PublishNode():
                self._present_publisher().publish_state(effect)
            case effects.EmitEvent():
                self._present_publisher().publish_event(effect)
            case effects.StartTrainer():
                self.supervisor.start_trainer(effect.device)
            case effects.KillTrainer():
                self.supervisor.kill_trainer(effect.device, effect.grace_s)
            case effects.PrepareTrainer():
                self._prepare(effect)
            case effects.InstructTrainer():
                if isinstance(effect.instruction, Quiesce):
                    self.snapshots.abandon()
                self.supervisor.send(effect.device, effect.instruction)
            case effects.ResumeTrainer():
                self._resume(effect)
            case effects.SendSnapshotCopy():
                self.snapshots.send_copy(effect)
            case effects.RetainSnapshotCopies():
                order = effect.order
                self.snapshots.retain_copies(order.job_id, order.step, order.restore)
            case effects.RemoveSnapshots():
                self.snapshots.remove(effect.job_id)
            case effects.PersistLayers():
                self.snapshots.persister.begin(effect.order)
            case effects.StopPersisting():
                self.snapshots.persister.stop(effect.attempt)
            case effects.RunHealthCheck():
                self.supervisor.health.start(effect.number, effect.peers)
            case effects.StopHealthCheck():
                self.supervisor.health.stop()
            case effects.RenewIncarnation():
                await self._present_publisher().close(DISCONNECT_TIMEOUT_S)
                self._begin_incarnation()
            case effects.ExitDaemon():
                self.exit(effect.code)
            case _:  # The driver handles timers, and all other effects are the coordinator's.
                raise AssertionError(f"no effect of a node: {effect!r}")

    def _present_publisher(self) -> NodePublisher:
        assert self._publisher is not None, "the machine is fed only after the first incarnation began"
        return self._publisher

    def _prepare(self, effect: effects.PrepareTrainer) -> None:
        try:
            arena, limit_bytes = self.snapshots.prepare(effect.job, effect.device)
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
            self.supervisor.fail_trainer(effect.device, "unprepared", f"the job is invalid: {error}")
            return
        self.supervisor.send(effect.device, frame)

    def _resume(self, effect: effects.ResumeTrainer) -> None:
        resume, device = effect.resume, Device(node=self._node, index=effect.device)

        def send(staged: str) -> None:
            self.supervisor.send(effect.device, make_resume_instruction(resume, device, self._secret, staged))

        self.snapshots.stager.resume(resume, effect.device, send)

    # --- received messages ---------------------------------------------------------------------------

    def _on_message(self, topic: str, payload: bytes, retained: bool) -> None:
        """Decode a message and act on it, or report that it was rejected.

        A broken message on the topic that all nodes receive is only logged, since the coordinator reports
        it; otherwise a thousand nodes would report it at once.
        """
        handler = self._handlers.get(topic)
        if handler is None:
            return
        try:
            handler(payload, retained)
        except WireError as error:
            details = {"topic": topic, "why": str(error)}
            to_all = topic == self._topics.command
            self.publish_event("MessageRejected", f"{topic}: {error}", details, over_mqtt=not to_all)

    def _on_command_to_this_node(self, payload: bytes, retained: bool) -> None:
        check_not_retained(retained)
        self.on_command(decode_to_node(payload, self._node))

    def _on_command_to_several(self, payload: bytes, retained: bool) -> None:
        check_not_retained(retained)
        message = decode_to_nodes(payload).addressed(self._node, self.incarnation)
        if message is not None:
            self.on_command(message)

    def on_command(self, message: ToNode) -> None:
        """Pass a command of the coordinator to the machine."""
        if self._publisher is not None and message.incarnation == self.incarnation:
            self._publisher.observe_command(message.command)
        self.driver.feed(CommandArrived(at=self.driver.now(), cause=message.cause, message=message))

    def _on_fault_request(self, payload: bytes, retained: bool) -> None:
        if not retained:  # A fault that somebody left retained must not be injected at every start.
            self.chaos.on_request(payload)

    def _on_trace_request(self, payload: bytes, retained: bool) -> None:
        if not retained:
            self._traces.on_request(payload)

    def _on_own_state(self, payload: bytes, _: bool) -> None:
        """Take a state that somebody published on this node's own topic; an empty one deletes the retained
        state.
        """
        self._present_publisher().observe_state(decode_json(payload, NodeStateMessage) if payload else None)

    # --- actions of fault injection --------------------------------------------------------------------

    def leave(self, reason: str) -> None:
        self.driver.feed(TerminationRequested(**self.driver.stamp(), reason=reason))

    def disconnect(self, for_s: float) -> None:
        self._present_publisher().session.interrupt(for_s)

    def publish_event(
        self, event: str, reason: str, details: dict[str, Any], *, over_mqtt: bool = True
    ) -> None:
        """Publish an event that the machine did not decide on."""
        effect = effects.EmitEvent(
            cause=self.driver.new_cause(), name=event, reason=reason, node=self._node, details=details
        )
        self._present_publisher().publish_event(effect, over_mqtt=over_mqtt)

    def send_answer(self, client: str, answer: Answer) -> None:
        self._present_publisher().send_answer(client, answer)

    async def flush(self, timeout_s: float) -> None:
        await self._present_publisher().session.flush(timeout_s)
