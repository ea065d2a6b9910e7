"""What a node says over MQTT: its retained state with the last will, signals, events, answers."""

import asyncio
from collections.abc import Callable

import msgspec
import structlog

from ftd.config.daemon import DaemonConfig
from ftd.driver import EventRateLimiter
from ftd.node.message_faults import MessageFaultInjector
from ftd.transport.mqtt.session import MqttSession, Will
from ftd.transport.wire.checking import encode_event
from ftd.transport.wire.codec import encode_from_node
from ftd.transport.wire.public import Answer, NodeStateMessage, encode_json, event_message, timestamp
from ftd.transport.wire.topics import Topics
from statemachine.effects import EmitEvent, PublishNode
from statemachine.messages import cluster as messages
from statemachine.messages.cluster import FromNode
from statemachine.messages.values import NodeState

log = structlog.get_logger("ftd.node")

SETTLE_S = 1.0
"""How long two daemons of one name wait for the coordinator to say which of them the name belongs to."""
STATE_PERIOD_S = 0.1
"""HEALTHY, SNAP, OFFLINE and so on are told at once, what else is in a state so much later, the newest only:
where a thousand nodes quiesce and resume, that many states would stand in the way of what is urgent."""


class NodePublisher:
    """One incarnation of a node on the broker: its own client id, its own last will."""

    def __init__(
        self,
        config: DaemonConfig,
        incarnation: int,
        *,
        disturbance: MessageFaultInjector,
        clock: Callable[[], float],
        on_message: Callable[[str, bytes, bool], None],
        on_connected: Callable[[], None],
        on_lost: Callable[[], None],
        on_acknowledged: Callable[[float], None],
        watch: Callable[[EmitEvent], None],
    ) -> None:
        """:param watch: sees every event before one is held back."""
        self.incarnation = incarnation
        self._config = config
        self._node = config.node
        self._topics = Topics(cluster=config.cluster)
        self._commands = (self._topics.node_command(self._node), self._topics.command)
        self._clock = clock
        self._disturbance = disturbance
        self._on_message, self._on_connected = on_message, on_connected
        self._watch = watch
        self._gate = EventRateLimiter()
        self._state: NodeStateMessage | None = None
        self._introduced = False
        """The state was told since the connection was made."""
        self._state_timer: asyncio.TimerHandle | None = None
        self._rejected = False
        self._topic = self._topics.node_state(self._node)
        will = self._state_message(NodeState.OFFLINE, 0, 0, "the connection to the broker broke")
        self._session = MqttSession(
            config.broker,
            client_id=f"ftd-{config.cluster}-{self._node}-{incarnation}",
            subscriptions=(
                self._topics.node_command(self._node),
                self._topics.chaos(self._node),
                self._topics.trace(self._node),
                self._topic,
            ),
            # Of a thousand nodes the broker would have a thousand acknowledgements to read, and each node's
            # answer to a command behind its own.
            unacknowledged=(self._topics.command,),
            will=Will(topic=self._topic, payload=encode_json(will)),
            on_message=self._hear,
            on_connected=self._note_connected,
            on_lost=on_lost,
            on_acknowledged=on_acknowledged,
        )
        self._task = asyncio.get_running_loop().create_task(self._session.run())

    @property
    def connected(self) -> bool:
        return self._session.connected

    async def close(self, flush_s: float) -> None:
        """Let what was said be acknowledged, then take leave of the broker."""
        if self._state_timer is not None:
            self.say_state()
        await self._session.flush(flush_s)
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def flush(self, timeout_s: float) -> None:
        await self._session.flush(timeout_s)

    def interrupt(self, for_s: float) -> None:
        """Cut the connection without a goodbye and stay away for so long."""
        self._session.interrupt(for_s)

    def signal(self, signal: messages.Signal) -> None:
        message = FromNode(node=self._node, incarnation=self.incarnation, signal=signal)
        topic, payload = self._topics.node_signal(self._node), encode_from_node(message)
        # Where the connection breaks it is not said again: the next one begins with a Hello, acknowledged or
        # not. So it need not be; a thousand nodes' answers at once would have to wait for that.
        self._disturbance.outgoing.carry(lambda: self._session.publish(topic, payload, qos=0))

    def _note_connected(self) -> None:
        self._introduced = False
        self._on_connected()

    def _hear(self, topic: str, payload: bytes, retained: bool) -> None:
        if topic in self._commands:
            self._disturbance.incoming.carry(lambda: self._on_message(topic, payload, retained))
        else:
            self._on_message(topic, payload, retained)

    def answer(self, client: str, answer: Answer) -> None:
        self._session.publish(self._topics.reply(client), encode_json(answer))

    # --- events ----------------------------------------------------------------------------------

    def event(self, effect: EmitEvent, *, aloud: bool = True) -> None:
        """Publish an event; an outage of the broker delays it, a flood of its kind thins it out. Not
        ``aloud``: it is counted and logged, and that is all."""
        self._watch(effect)
        now = self._clock()
        suppressed = self._gate.admit(effect, now)
        if suppressed is None:
            return
        log.info(
            effect.name,
            reason=effect.reason,
            generation=effect.generation,
            step=effect.step,
            cause=effect.cause,
            **({"details": effect.details} if effect.details else {}),
        )
        if not aloud:
            return
        message = event_message(effect, monotonic=now, suppressed=suppressed, source=f"node/{self._node}")
        self._session.publish(self._topics.events, encode_event(message), queue_offline=True)

    # --- the retained state ------------------------------------------------------------------------

    def state(self, effect: PublishNode) -> None:
        said = self._state_message(effect.state, effect.generation, effect.step, effect.reason)
        before = self._state
        # The machine says OFFLINE only on purpose; the unwanted end of a node is the last will's to tell.
        self._state = msgspec.structs.replace(said, graceful=effect.state is NodeState.OFFLINE)
        if not self._introduced or before is None or before.state is not said.state:
            self.say_state()
        elif self._state_timer is None:
            self._state_timer = asyncio.get_running_loop().call_later(STATE_PERIOD_S, self.say_state)

    def say_state(self) -> None:
        """Publish the last state (again), unless the topic belongs to another live node of our name."""
        if self._state_timer is not None:
            self._state_timer.cancel()
            self._state_timer = None
        self._introduced = self._session.connected
        if self._state is not None and not self._rejected:
            self._session.publish(self._topic, encode_json(self._state), retain=True)

    def note_command(self, command: messages.Command) -> None:
        """The coordinator's commands show whether the name is ours."""
        if isinstance(command, messages.Reject):
            if not self._rejected:
                log.error("rejected", reason=command.reason, remedy="trying again every second")
            self._rejected = True
        elif not isinstance(command, messages.RequestHello):
            self._rejected = False

    def note_state(self, seen: NodeStateMessage | None) -> None:
        """Somebody else's word on our topic: say ours again.

        An older incarnation's last will is answered at once, and so is a coordinator that forgot our name
        (``None``) when we were on our way back. A live state is a second daemon of our name:
        the coordinator rejects one of us, which a moment later will have settled who writes here.
        """
        if seen is not None and seen.incarnation == self.incarnation:
            return
        if seen is None or seen.state is NodeState.OFFLINE:
            self.say_state()
        else:
            asyncio.get_running_loop().call_later(SETTLE_S, self.say_state)

    def _state_message(self, state: NodeState, generation: int, step: int, reason: str) -> NodeStateMessage:
        return NodeStateMessage(
            node=self._node,
            incarnation=self.incarnation,
            state=state,
            generation=generation,
            step=step,
            reason=reason,
            at=timestamp(),
            devices=self._config.devices,
            host=self._config.host,
        )
