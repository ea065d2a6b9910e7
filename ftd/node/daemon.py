"""``ftd node``: the daemon of one host. It carries out what the agent machine decides.

In here: the MQTT session with the last will, the rendezvous server, the trainers' supervisor, and the
lives of an incarnation. All decisions are in ``statemachine.agent``; this module loads no torch.
"""

import asyncio
import contextlib
import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any, assert_never, cast

import msgspec
import structlog

from ftd import systemd
from ftd.config.daemon import DaemonConfig
from ftd.driver import Driver, EventGate
from ftd.errors import ConfigurationError, WireError
from ftd.mqtt.session import MqttSession, Will
from ftd.node.chaos import Chaos
from ftd.node.processes import adopt_orphans
from ftd.node.rendezvous import RendezvousServer
from ftd.node.supervisor import Supervisor
from ftd.node.translation import prepare_frame, resume_frame
from ftd.wire.codec import decode_to_node, encode_from_node
from ftd.wire.public import (
    Answer,
    EventMessage,
    NodeStateMessage,
    decode_json,
    encode_json,
    timestamp,
)
from ftd.wire.topics import Topics
from planner.values import Device
from runtime import protocol
from statemachine import effects, messages
from statemachine.agent import AgentMachine
from statemachine.events import (
    AgentStarted,
    BrokerConnected,
    BrokerLost,
    CommandArrived,
    Event,
    TerminationRequested,
    TrainerUp,
)
from statemachine.values import NodeFacts, NodeState

log = structlog.get_logger("ftd.node")

GOODBYE_S = 1.0
"""How long the goodbye may wait for the broker's acknowledgement."""
SETTLE_S = 1.0
MAX_SOCKET_PATH_BYTES = 107

AgentEffect = (
    effects.SendSignal
    | effects.PublishNode
    | effects.EmitEvent
    | effects.StartTrainer
    | effects.KillTrainer
    | effects.TrainerPrepare
    | effects.TrainerQuiesce
    | effects.TrainerResume
    | effects.NewIncarnation
    | effects.ExitDaemon
)


class NodeDaemon:
    """One ``ftd node``: ``await NodeDaemon(config).run()`` lasts until the node has left."""

    def __init__(self, config: DaemonConfig) -> None:
        self._config = config
        self._node = config.node
        self._topics = Topics(cluster=config.cluster)
        self._secret = config.require_secret()
        self._incarnation = time.time_ns() // 1000
        self._directory = config.runtime_dir / str(os.getpid())
        self._driver = Driver(AgentMachine(config.node, config.timing), self._perform)
        self._gate = EventGate()
        self._rendezvous = RendezvousServer(
            self._secret, host=_listening_address(config.host), port=config.rendezvous_port
        )
        self._session: MqttSession | None = None
        self._session_task: asyncio.Task[None] | None = None
        self._exit: asyncio.Future[int] | None = None
        self._state: NodeStateMessage | None = None
        self._rejected = False
        self._signals = 0
        self._chaos = Chaos(node=config.node, devices=config.devices, allowed=config.chaos, hands=self)

    async def run(self) -> int:
        """Serve until the node has left; the exit code.

        :raises ConfigurationError: the runtime directory or the rendezvous port cannot be used.
        :raises FtdError: the daemon cannot go on.
        """
        loop = asyncio.get_running_loop()
        self._exit = loop.create_future()
        adopt_orphans()
        self._make_directory()
        self._supervisor = Supervisor(
            devices=self._config.devices,
            directory=self._directory,
            feed=self._on_trainer,
            cause=self._driver.cause,
            environment=trainer_environment,
        )
        try:
            await self._listen()
            await self._supervisor.start()
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(number, self._on_signal, number)
            self._begin_incarnation()
            systemd.notify("READY=1", f"STATUS=node {self._node}, {self._config.devices} devices")
            return await self._serve()
        finally:
            systemd.notify("STOPPING=1")
            await self._end()

    async def _serve(self) -> int:
        """Run the machine, and the watchdog beside it, until the machine or a signal ends the daemon."""
        assert self._exit is not None
        driving = asyncio.ensure_future(self._driver.run())
        watchdog = asyncio.ensure_future(systemd.watchdog())
        ending: list[asyncio.Future[Any]] = [self._exit, driving]
        try:
            await asyncio.wait(ending, return_when=asyncio.FIRST_COMPLETED)
            if not self._exit.done():
                driving.result()  # Only an error ends the driver: hand it on.
            return self._exit.result()
        finally:
            for task in (driving, watchdog):
                task.cancel()
            await asyncio.gather(driving, watchdog, return_exceptions=True)

    async def _end(self) -> None:
        """Leave nothing behind: trainers, connection, sockets, files."""
        self._driver.stop_timers()
        await self._supervisor.close()
        if self._session is not None:
            await self._session.flush(GOODBYE_S)
        await self._end_session()
        await self._rendezvous.close()
        shutil.rmtree(self._directory, ignore_errors=True)

    # --- setting up --------------------------------------------------------------------------------

    def _make_directory(self) -> None:
        """A private directory of this very process, so that two daemons of one name cannot collide."""
        length = len(os.fsencode(self._directory / "trainers.sock"))
        if length > MAX_SOCKET_PATH_BYTES:
            raise ConfigurationError(
                f"{self._config.runtime_dir} is too long for a unix socket by "
                f"{length - MAX_SOCKET_PATH_BYTES} bytes",
                field="node.runtime_dir",
                remedy="choose a shorter one, for example under /run or /tmp",
            )
        try:
            self._config.runtime_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
            _remove_stale(self._config.runtime_dir)
            shutil.rmtree(self._directory, ignore_errors=True)
            self._directory.mkdir(mode=0o700)
        except OSError as error:
            raise ConfigurationError(
                f"{self._config.runtime_dir} cannot be used: {error.strerror}",
                field="node.runtime_dir",
                remedy="choose a directory that this user can write to",
            ) from error

    async def _listen(self) -> None:
        try:
            await self._rendezvous.start()
        except OSError as error:
            raise ConfigurationError(
                f"cannot listen on port {self._config.rendezvous_port} for rendezvous: {error.strerror}",
                field="node.rendezvous_port",
                remedy="is another daemon running? choose another port, or 0 for any free one",
            ) from error

    def _begin_incarnation(self) -> None:
        """A new last will, a new connection under a new client id, and the machine starts over."""
        topic = self._topics.node_state(self._node)
        will = NodeStateMessage(
            node=self._node,
            incarnation=self._incarnation,
            state=NodeState.OFFLINE,
            generation=0,
            step=0,
            reason="the connection to the broker broke",
            at=timestamp(),
            devices=self._config.devices,
            host=self._config.host,
        )
        self._session = MqttSession(
            self._config.broker,
            client_id=f"ftd-{self._config.cluster}-{self._node}-{self._incarnation}",
            subscriptions=(self._topics.node_command(self._node), self._topics.chaos(self._node), topic),
            will=Will(topic=topic, payload=encode_json(will)),
            on_message=self._on_message,
            on_connected=self._on_connected,
            on_lost=self._on_lost,
        )
        facts = NodeFacts(
            devices=self._config.devices,
            host=self._config.host,
            rendezvous_port=self._rendezvous.port,
            chaos_allowed=self._config.chaos,
        )
        log.info("begin_incarnation", incarnation=self._incarnation, rendezvous_port=self._rendezvous.port)
        self._driver.feed(AgentStarted(**self._stamp(), incarnation=self._incarnation, facts=facts))
        self._session_task = asyncio.get_running_loop().create_task(self._session.run())

    async def _end_session(self) -> None:
        if self._session_task is not None:
            self._session_task.cancel()
            await asyncio.gather(self._session_task, return_exceptions=True)
            self._session_task = None

    # --- what happens ------------------------------------------------------------------------------

    def _stamp(self) -> dict[str, Any]:
        return {"at": self._driver.now(), "cause": self._driver.cause()}

    def _on_signal(self, number: signal.Signals) -> None:
        """The first leaves gracefully, a second does not wait for the coordinator, a third for nobody."""
        assert self._exit is not None
        self._signals += 1
        if self._signals > 2 and not self._exit.done():
            self._exit.set_result(128 + number)
        self.leave(signal.Signals(number).name)

    def _on_connected(self) -> None:
        self._driver.feed(BrokerConnected(**self._stamp()))
        if self._state is not None:
            self._publish_state(self._state)

    def _on_lost(self) -> None:
        self._driver.feed(BrokerLost(**self._stamp()))

    def _on_message(self, topic: str, payload: bytes, retained: bool) -> None:
        try:
            if topic == self._topics.node_command(self._node):
                self._on_command(decode_to_node(payload, self._node), retained)
            elif topic == self._topics.chaos(self._node):
                if not retained:  # A fault that somebody left retained must not strike at every start.
                    self._chaos.on_request(payload)
            elif topic == self._topics.node_state(self._node):
                self._on_own_state(decode_json(payload, NodeStateMessage))
        except WireError as error:
            log.warning("message_refused", topic=topic, reason=str(error))
            self.announce("MessageRefused", str(error), {"why": str(error), "topic": topic})

    def _on_command(self, message: messages.ToNode, retained: bool) -> None:
        if retained:
            raise WireError("a retained command; commands are never retained")
        if message.incarnation == self._incarnation:
            self._note_acceptance(message.command)
        self._driver.feed(CommandArrived(at=self._driver.now(), cause=message.cause, message=message))

    def _note_acceptance(self, command: messages.Command) -> None:
        """While another node of our name is alive, the name's retained state is not ours to write."""
        if isinstance(command, messages.Rejection):
            if not self._rejected:
                log.error("rejected", reason=command.reason, remedy="trying again every second")
            self._rejected = True
        elif not isinstance(command, messages.Inquiry):
            self._rejected = False

    def _on_own_state(self, seen: NodeStateMessage) -> None:
        """Somebody else's word on our topic: say ours again.

        An older incarnation's last will is answered at once. A live state is a second daemon of our name:
        the coordinator rejects one of us, which a moment later will have settled who writes here.
        """
        if seen.incarnation == self._incarnation:
            return
        if seen.state is NodeState.OFFLINE:
            self._say_state_again()
        else:
            asyncio.get_running_loop().call_later(SETTLE_S, self._say_state_again)

    def _say_state_again(self) -> None:
        if self._state is not None and self._session is not None and not self._rejected:
            self._publish_state(self._state)

    def _on_trainer(self, event: Event) -> None:
        if isinstance(event, TrainerUp):
            details = {"device": event.device, "pid": event.pid}
            self._publish_event("TrainerStarted", "", details=details, cause=event.cause)
        self._driver.feed(event)

    # --- what the machine wants ----------------------------------------------------------------------

    async def _perform(self, effect: effects.Effect) -> None:
        wanted = cast(AgentEffect, effect)  # Timers are the driver's, and the rest is the coordinator's.
        match wanted:
            case effects.SendSignal():
                self._send(wanted.signal)
            case effects.PublishNode():
                self._note_state(wanted)
            case effects.EmitEvent():
                self._emit(wanted)
            case effects.StartTrainer():
                self._supervisor.start_trainer(wanted.device)
            case effects.KillTrainer():
                self._supervisor.kill_trainer(wanted.device, wanted.grace_s)
            case effects.TrainerPrepare():
                self._prepare(wanted)
            case effects.TrainerQuiesce():
                frame = protocol.Quiesce(generation=wanted.generation, mode=wanted.mode)
                self._supervisor.send(wanted.device, frame)
            case effects.TrainerResume():
                device = Device(node=self._node, index=wanted.device)
                self._supervisor.send(wanted.device, resume_frame(wanted.resume, device, self._secret))
            case effects.NewIncarnation():
                await self._renew()
            case effects.ExitDaemon():
                if self._exit is not None and not self._exit.done():
                    self._exit.set_result(wanted.code)
            case _:
                assert_never(wanted)

    def _send(self, signal_: messages.Signal) -> None:
        if self._session is None:
            return
        message = messages.FromNode(node=self._node, incarnation=self._incarnation, signal=signal_)
        self._session.publish(self._topics.node_signal(self._node), encode_from_node(message))

    def _prepare(self, effect: effects.TrainerPrepare) -> None:
        try:
            frame = prepare_frame(effect.job, effect.profile)
        except msgspec.ValidationError as error:
            self._supervisor.refuse(effect.device, "unprepared", f"the job cannot be understood: {error}")
            return
        self._supervisor.send(effect.device, frame)

    async def _renew(self) -> None:
        """Fenced: what this daemon was is over; it comes back as somebody new."""
        await self._end_session()
        self._incarnation = max(self._incarnation + 1, time.time_ns() // 1000)
        self._state = None
        self._rejected = False
        self._begin_incarnation()

    def _note_state(self, effect: effects.PublishNode) -> None:
        self._state = NodeStateMessage(
            node=self._node,
            incarnation=self._incarnation,
            state=effect.state,
            generation=effect.generation,
            step=effect.step,
            reason=effect.reason,
            at=timestamp(),
            devices=self._config.devices,
            host=self._config.host,
            graceful=effect.state is NodeState.OFFLINE,
        )
        if not self._rejected:
            self._publish_state(self._state)

    def _publish_state(self, state: NodeStateMessage) -> None:
        if self._session is not None:
            self._session.publish(self._topics.node_state(self._node), encode_json(state), retain=True)

    def _emit(self, effect: effects.EmitEvent) -> None:
        held_back = self._gate.admit(effect, self._driver.now())
        if held_back is None:
            return
        details = effect.details | ({"held_back": held_back} if held_back else {})
        self._publish_event(
            effect.name,
            effect.reason,
            details=details,
            cause=effect.cause,
            generation=effect.generation,
            step=effect.step,
        )

    def _publish_event(
        self,
        name: str,
        reason: str,
        *,
        details: dict[str, Any],
        cause: str,
        generation: int | None = None,
        step: int | None = None,
    ) -> None:
        log.info("event", name=name, reason=reason, generation=generation, step=step, cause=cause)
        if self._session is None:
            return
        message = EventMessage(
            event=name,
            node=self._node,
            generation=generation,
            step=step,
            reason=reason,
            at=timestamp(),
            monotonic=self._driver.now(),
            cause=cause,
            details=details,
        )
        self._session.publish(self._topics.events, encode_json(message), keep=True)

    # --- chaos' hands ----------------------------------------------------------------------------------

    def trainer_pids(self, device: int | None) -> list[int]:
        return self._supervisor.pids(device)

    def zygote_pid(self) -> int | None:
        return self._supervisor.zygote_pid

    def send_sleep(self, device: int, frame: protocol.Sleep) -> None:
        self._supervisor.send(device, frame)

    def leave(self, reason: str) -> None:
        self._driver.feed(TerminationRequested(**self._stamp(), reason=reason))

    def disconnect(self, for_s: float) -> None:
        if self._session is not None:
            self._session.interrupt(for_s)

    def announce(self, event: str, reason: str, details: dict[str, Any]) -> None:
        self._publish_event(event, reason, details=details, cause=self._driver.cause())

    def answer(self, client: str, answer: Answer) -> None:
        if self._session is not None:
            self._session.publish(self._topics.reply(client), encode_json(answer))

    async def flush(self, timeout_s: float) -> None:
        if self._session is not None:
            await self._session.flush(timeout_s)


def trainer_environment(device: int) -> dict[str, str]:
    """Each trainer sees its own GPU as the first: of those this daemon was given, where it was given some."""
    given = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    if not given:
        return {"CUDA_VISIBLE_DEVICES": str(device)}
    return {"CUDA_VISIBLE_DEVICES": given[device]} if device < len(given) else {}


def _listening_address(host: str) -> str:
    """Loopback stays on loopback; any other name of this host may not be one it can bind (NAT, DNS)."""
    return host if host in ("127.0.0.1", "::1", "localhost") else "0.0.0.0"


def _remove_stale(directory: Path) -> None:
    """What daemons that were killed left here: directories named after processes that are gone."""
    for entry in directory.iterdir():
        if entry.name.isdigit() and not Path(f"/proc/{entry.name}").exists():
            with contextlib.suppress(OSError):
                shutil.rmtree(entry)
