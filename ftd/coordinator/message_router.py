"""What the coordinator hears while it leads: each message goes to who it is for.

A thousand nodes say a heartbeat each second, and all answer at once when one is lost: a topic is taken apart
once, and what comes on it goes the same way from then on.
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

_MOST_WAYS = 10_000
"""Topics that are known again. Whoever may say something as a node may make up names."""

_Way = Callable[[bytes, bool], None]
"""Takes a payload and whether it was retained. :raises WireError: it is no message for its topic."""


class CoordinatorMessageRouter:
    """See the module."""

    def __init__(
        self,
        topics: Topics,
        driver: Driver,
        *,
        requests: RequestHandler,
        events: EventStream,
        commands: CommandSender,
        unreachable: Callable[[], None],
        refused: Callable[[EmitEvent], None],
    ) -> None:
        """:param unreachable: somebody says that no coordinator leads. :param refused: told of a payload that
        nobody can act on."""
        self._topics, self._driver = topics, driver
        self._requests, self._events, self._commands = requests, events, commands
        self._unreachable, self._refused = unreachable, refused
        self._ways: dict[str, _Way] = {}

    def on_message(self, topic: str, payload: bytes, retained: bool) -> None:
        """One message; what is wrong with it is told to the world."""
        way = self._ways.get(topic)
        if way is None:
            if len(self._ways) >= _MOST_WAYS:
                self._ways.clear()
            way = self._ways[topic] = self._way_of(topic)
        try:
            way(payload, retained)
        except WireError as error:
            self._refuse(topic, str(error))

    def _way_of(self, topic: str) -> _Way:
        topics = self._topics
        if topic == topics.request:
            return self._hear_request
        if topic == topics.events:
            return lambda payload, _: self._events.receive_as_leader(payload)
        if topic == topics.cluster_state:
            return lambda payload, _: self._hear_cluster_state(payload)
        if topic == topics.command:
            return self._commands.receive_broadcast
        node = topics.node_of(topic)
        if node is not None and topic == topics.node_signal(node):
            return partial(self._hear_signal, node)
        if node is not None and topic == topics.node_state(node):
            return partial(self._hear_node_state, node)
        return lambda payload, retained: None

    def _hear_signal(self, node: str, payload: bytes, _: bool) -> None:
        message = decode_from_node(payload, node)
        driver = self._driver
        driver.feed(SignalArrived(at=driver.now(), cause=driver.new_cause(), message=message))

    def _hear_request(self, payload: bytes, retained: bool) -> None:
        if not retained:  # A retained request would be served again at every connection.
            self._requests.handle(payload)

    def _hear_node_state(self, node: str, payload: bytes, _: bool) -> None:
        if not payload:  # It deletes what was retained.
            return
        state = decode_json(payload, NodeStateMessage)
        if state.node != node:
            raise WireError(f"a message on {node!r}'s topic claims to be {state.node[:64]!r}'s")
        if state.state is NodeState.OFFLINE:
            driver = self._driver
            driver.feed(
                NodeVanished(
                    at=driver.now(),
                    cause=driver.new_cause(),
                    node=node,
                    incarnation=state.incarnation,
                    graceful=state.graceful,
                )
            )

    def _hear_cluster_state(self, payload: bytes) -> None:
        """Our predecessor's last will may come after our own first word."""
        if decode_json(payload, ClusterStateHeader).phase == "UNREACHABLE":
            self._unreachable()

    def _refuse(self, topic: str, why: str) -> None:
        self._refused(
            EmitEvent(
                cause=self._driver.new_cause(),
                name="MessageRejected",
                reason=f"{topic}: {why}",
                node=self._topics.node_of(topic),
                details={"topic": topic, "why": why},
            )
        )
