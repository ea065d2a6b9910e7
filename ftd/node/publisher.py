"""The messages that a node publishes over MQTT: its retained state with the last will, signals, events and answers."""

import asyncio
from collections.abc import Callable

import msgspec
import structlog

from ftd.config.daemon import DaemonConfig
from ftd.driver import EventRateLimiter
from ftd.node.message_faults import MessageFaultInjector
from ftd.node.ports import Ports
from ftd.transport.mqtt.session import Will
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
"""Time after which a node publishes its state again next to another live daemon of its name. Meanwhile the
coordinator rejects one of the two.
"""
STATE_PERIOD_S = 0.1
"""Delay of a state message whose state is unchanged; only the newest is published. Changes to HEALTHY, SNAP,
OFFLINE and so on are published at once. When a thousand nodes quiesce and resume, the other messages would
delay the urgent ones.
"""


class NodePublisher:
    """One incarnation of a node at the broker, with its own client id and last will."""

    def __init__(
        self,
        config: DaemonConfig,
        ports: Ports,
        incarnation: int,
        *,
        message_faults: MessageFaultInjector,
        on_message: Callable[[str, bytes, bool], None],
        on_connected: Callable[[], None],
        on_lost: Callable[[], None],
    ) -> None:
        self.incarnation = incarnation
        self._config = config
        self._node = config.node
        self._topics = Topics(cluster=config.cluster)
        self._commands = (self._topics.node_command(self._node), self._topics.command)
        self._clock, self._watch = ports.clock, ports.observer.on_event
        self._disturbance = message_faults
        self._on_message, self._on_connected = on_message, on_connected
        self._gate = EventRateLimiter()
        self._state: NodeStateMessage | None = None
        self._state_published = False
        """Whether the state was published since the connection was made."""
        self._state_timer: asyncio.TimerHandle | None = None
        self._rejected = False
        self._topic = self._topics.node_state(self._node)
        will = self._state_message(NodeState.OFFLINE, 0, 0, "the connection to the broker broke")
        self.session = ports.open_session(
            client_id=f"ftd-{config.cluster}-{self._node}-{incarnation}",
            subscriptions=(
                self._topics.node_command(self._node),
                self._topics.chaos(self._node),
                self._topics.trace(self._node),
                self._topic,
            ),
            # With a thousand nodes, the broker would have to read a thousand acknowledgements, each ahead
            # of that node's answer to the command.
            unacknowledged=(self._topics.command,),
            will=Will(topic=self._topic, payload=encode_json(will)),
            on_message=self._on_any_message,
            on_connected=self._note_connected,
            on_lost=on_lost,
            on_acknowledged=ports.observer.on_acknowledged,
        )
        self._task = asyncio.get_running_loop().create_task(self.session.run())

    async def close(self, flush_s: float) -> None:
        """Wait for the acknowledgement of what was published, then disconnect."""
        if self._state_timer is not None:
            self.publish_state_now()
        await self.session.flush(flush_s)
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    def send_signal(self, signal: messages.Signal) -> None:
        message = FromNode(node=self._node, incarnation=self.incarnation, signal=signal)
        topic, payload = self._topics.node_signal(self._node), encode_from_node(message)
        # QoS 0 is enough: a signal that is lost with the connection is not sent again, since the next
        # connection begins with a Hello in any case. A thousand nodes' answers at once would otherwise wait
        # for acknowledgements.
        self._disturbance.outgoing.deliver(lambda: self.session.publish(topic, payload, qos=0))

    def _note_connected(self) -> None:
        self._state_published = False
        self._on_connected()

    def _on_any_message(self, topic: str, payload: bytes, retained: bool) -> None:
        if topic in self._commands:
            self._disturbance.incoming.deliver(lambda: self._on_message(topic, payload, retained))
        else:
            self._on_message(topic, payload, retained)

    def send_answer(self, client: str, answer: Answer) -> None:
        self.session.publish(self._topics.reply(client), encode_json(answer))

    # --- events ----------------------------------------------------------------------------------

    def publish_event(self, effect: EmitEvent, *, over_mqtt: bool = True) -> None:
        """Publish an event. An outage of the broker delays it, and a flood of events of its kind is thinned
        out.

        :param over_mqtt: if false, the event is only counted and logged.
        """
        self._watch(effect)
        now = self._clock.monotonic_s()
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
        if not over_mqtt:
            return
        message = event_message(effect, monotonic=now, suppressed=suppressed, source=f"node/{self._node}")
        self.session.publish(self._topics.events, encode_event(message), queue_offline=True)

    # --- the retained state ------------------------------------------------------------------------

    def publish_state(self, effect: PublishNode) -> None:
        message = self._state_message(effect.state, effect.generation, effect.step, effect.reason)
        before = self._state
        # The machine publishes OFFLINE only when the node leaves on purpose; the last will reports an
        # unexpected end.
        self._state = msgspec.structs.replace(message, graceful=effect.state is NodeState.OFFLINE)
        if not self._state_published or before is None or before.state is not message.state:
            self.publish_state_now()
        elif self._state_timer is None:
            self._state_timer = asyncio.get_running_loop().call_later(STATE_PERIOD_S, self.publish_state_now)

    def publish_state_now(self) -> None:
        """Publish the last state (again), unless the topic belongs to another live node of this name."""
        if self._state_timer is not None:
            self._state_timer.cancel()
            self._state_timer = None
        self._state_published = self.session.connected
        if self._state is not None and not self._rejected:
            self.session.publish(self._topic, encode_json(self._state), retain=True)

    def observe_command(self, command: messages.Command) -> None:
        """Learn from the coordinator's commands whether this node owns its name."""
        if isinstance(command, messages.Reject):
            if not self._rejected:
                log.error("node_rejected", reason=command.reason, remedy="the daemon retries every second")
            self._rejected = True
        elif self._rejected and not isinstance(command, messages.RequestHello):
            self._rejected = False
            self.publish_state_now()  # The last will of an older incarnation may be retained.

    def observe_state(self, seen: NodeStateMessage | None) -> None:
        """Publish our state again after somebody else wrote to our topic.

        The last will of an older incarnation is replaced at once, and so is a deleted state (``None``): the
        coordinator removed our name while we were reconnecting. A live state comes from a second daemon of
        our name. The coordinator rejects one of us, which settles after a moment who writes here.
        """
        if seen is not None and seen.incarnation == self.incarnation:
            return
        if seen is None or seen.state is NodeState.OFFLINE:
            self.publish_state_now()
        else:
            asyncio.get_running_loop().call_later(SETTLE_S, self.publish_state_now)

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
