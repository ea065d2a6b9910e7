"""Routing of the messages that a coordinator receives while it leads.

A thousand nodes send a heartbeat each second, and all of them answer at once when one is lost. So a topic
is parsed once, and its handler is remembered.
"""

from collections.abc import Callable
from functools import partial

from ftd.coordinator.commands import CommandSender
from ftd.coordinator.events import EventStream
from ftd.coordinator.requests import RequestHandler
from ftd.driver import Driver
from ftd.errors import WireError
from ftd.transport.wire.codec import decode_from_node
from ftd.transport.wire.public import ClusterStateHeader, NodeStateMessage, decode_json
from ftd.transport.wire.topics import Topics
from statemachine.effects import EmitEvent
from statemachine.events import NodeVanished, SignalArrived
from statemachine.messages.values import NodeState

_MAX_HANDLERS = 10_000
"""Topics whose handlers are remembered. The number is limited because clients may make up names of nodes."""

_Handler = Callable[[bytes, bool], None]
"""A handler: takes a payload and whether it was retained; raises WireError for what is no message of its
topic.
"""


class CoordinatorMessageRouter:
    """The router that passes each message to its handler. See the module."""

    def __init__(
        self,
        topics: Topics,
        driver: Driver,
        *,
        requests: RequestHandler,
        events: EventStream,
        commands: CommandSender,
        on_unreachable: Callable[[], None],
        on_rejected: Callable[[EmitEvent], None],
    ) -> None:
        """Begin without any topics.

        :param on_unreachable: called when a message says that no coordinator leads.
        :param on_rejected: called with an event for a payload that nobody can act on.
        """
        self._topics, self._driver = topics, driver
        self._requests, self._events, self._commands = requests, events, commands
        self._on_unreachable, self._on_rejected = on_unreachable, on_rejected
        self._handlers: dict[str, _Handler] = {}

    def on_message(self, topic: str, payload: bytes, retained: bool) -> None:
        """Handle one message, and report what is wrong with it."""
        handler = self._handlers.get(topic)
        if handler is None:
            if len(self._handlers) >= _MAX_HANDLERS:
                self._handlers.clear()
            handler = self._handlers[topic] = self._handler_for(topic)
        try:
            handler(payload, retained)
        except WireError as error:
            self._reject(topic, str(error))

    def _handler_for(self, topic: str) -> _Handler:
        topics = self._topics
        if topic == topics.request:
            return self._handle_request
        if topic == topics.events:
            return lambda payload, _: self._events.receive_as_leader(payload)
        if topic == topics.cluster_state:
            return lambda payload, _: self._handle_cluster_state(payload)
        if topic == topics.command:
            return self._commands.receive_broadcast
        node = topics.node_of(topic)
        if node is not None and topic == topics.node_signal(node):
            return partial(self._handle_signal, node)
        if node is not None and topic == topics.node_state(node):
            return partial(self._handle_node_state, node)
        return lambda payload, retained: None

    def _handle_signal(self, node: str, payload: bytes, _: bool) -> None:
        message = decode_from_node(payload, node)
        self._driver.feed(SignalArrived(**self._driver.stamp(), message=message))

    def _handle_request(self, payload: bytes, retained: bool) -> None:
        if not retained:  # A retained request would be served again at every connection.
            self._requests.handle(payload)

    def _handle_node_state(self, node: str, payload: bytes, _: bool) -> None:
        if not payload:  # An empty payload deletes the retained message.
            return
        state = decode_json(payload, NodeStateMessage)
        if state.node != node:
            raise WireError(f"a message on {node!r}'s topic claims to be {state.node[:64]!r}'s")
        if state.state is NodeState.OFFLINE:
            self._driver.feed(
                NodeVanished(
                    **self._driver.stamp(), node=node, incarnation=state.incarnation, graceful=state.graceful
                )
            )

    def _handle_cluster_state(self, payload: bytes) -> None:
        """Publish our own state over the predecessor's last will, which may arrive after our first state."""
        if decode_json(payload, ClusterStateHeader).phase == "UNREACHABLE":
            self._on_unreachable()

    def _reject(self, topic: str, why: str) -> None:
        self._on_rejected(
            EmitEvent(
                cause=self._driver.new_cause(),
                name="MessageRejected",
                reason=f"{topic}: {why}",
                node=self._topics.node_of(topic),
                details={"topic": topic, "why": why},
            )
        )
