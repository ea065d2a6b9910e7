"""The simulated broker and the connections to it.

It does what MQTT does with QoS 1 and clean sessions:

- Messages of one sender to one receiver keep their order. Messages of different senders do not, nor do
  the coordinator's messages to one node and those to all.
- A message may arrive twice, the second time at any later moment (which is harsher than real brokers).
- Messages under way when a connection breaks may be lost.
- An abnormal end of a connection publishes the last will.
- A client id that connects again ends the earlier connection.
- A restarted broker has forgotten everything, or comes back with what it once saved, and publishes
  no wills.

Payloads are those of production. A node is a client with one connection; a coordinator's process has one
per session.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

from ftd.faults.sim.world import World
from ftd.transport.mqtt.session import Will
from ftd.transport.wire.codec import decode_to_node, decode_to_nodes, encode_from_node
from ftd.transport.wire.public import NodeStateMessage, decode_json, encode_json
from ftd.transport.wire.topics import Topics
from statemachine.messages.cluster import FromNode, ToNode, ToNodes
from statemachine.messages.values import NodeState

TOPICS = Topics(cluster="simulated")
COMMAND, EVENTS, JOURNAL = TOPICS.command, TOPICS.events, TOPICS.journal
LEADER = "leader"
"""The client id of the cluster's leader."""

KEEP_ALIVE_S = 4.0
"""A connection over a cut link breaks after this time; a shorter cut only delays its messages."""
_NOTICE_S = 0.25
"""Time from the return of a link until a leader finds out that its connection ended while the link was cut."""
_ACKNOWLEDGED_S = 0.005
"""The time from the arrival of a message at the broker to its acknowledgement."""
_AT = "2000-01-01T00:00:00.000Z"

TO_ALL = "coordinator to all"
"""The sender of broadcasts in ``_last``, since MQTT keeps the order of messages only within one topic."""
BROKER = "broker"
"""The sender of all messages between coordinators in ``_last``, since the broker keeps their order."""


class NodeClient(Protocol):
    """A node's daemon."""

    name: str
    incarnation: int

    def connected(self) -> None: ...

    def disconnected(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageFaults:
    """Faults of the messages between a node and the coordinator."""

    drop: float = 0.0
    duplicate: float = 0.0
    late_s: float = 0.0
    """The longest extra delay."""


class BrokerLink:
    """The link between a host and the broker."""

    __slots__ = ("client", "cut", "held", "open", "since")

    def __init__(self, client: NodeClient | None) -> None:
        self.client = client
        self.open = 0
        """The number of the node's connection, from 1; 0 if it has none."""
        self.cut = False
        self.held: list[tuple[bool, Callable[..., None], tuple[Any, ...]]] = []
        """Actions that wait for a cut link to heal, in order, each with whether this host sent the message."""
        self.since = 0.0


class SimConnection:
    """One connection of a coordinator's process."""

    def __init__(
        self,
        host: str,
        client_id: str,
        subscriptions: tuple[str, ...],
        will: Will | None,
        *,
        receive: Callable[["SimConnection", str, bytes, bool], None],
        closed: Callable[["SimConnection"], None],
        acknowledge: Callable[["SimConnection", Callable[[], None]], None],
    ) -> None:
        """:param receive: called with each message, at the process's own time; likewise ``closed`` and
        ``acknowledge``.
        """
        self.host, self.client_id, self.will = host, client_id, will
        self.exact = frozenset(topic for topic in subscriptions if "+" not in topic)
        self.filters = tuple(topic for topic in subscriptions if "+" in topic)
        self.receive, self.closed, self.acknowledge = receive, closed, acknowledge
        self.open = True
        self.since = 0.0

    def matches(self, topic: str) -> bool:
        """Return whether it subscribed to this topic."""
        return topic in self.exact or (bool(self.filters) and _matches_any(self.filters, topic))


@lru_cache(maxsize=4096)
def _matches_any(filters: tuple[str, ...], topic: str) -> bool:
    """Return whether one of these filters matches a topic; ``+`` stands for any one level."""
    given = topic.split("/")
    return any(
        len(levels) == len(given) and all(a in ("+", b) for a, b in zip(levels, given, strict=True))
        for levels in (pattern.split("/") for pattern in filters)
    )


class SimNetwork:
    """All links and connections, and the broker's state."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.up = True
        self.links: dict[str, BrokerLink] = {}
        self.connections: dict[str, SimConnection] = {}
        """The coordinators' connections by client id."""
        self.retained: dict[str, bytes] = {}
        self.lost_state_at = 0.0  # When it last lost everything, or everything since it was saved.
        self.restored_stale = False
        """Whether the broker came back with less than it had, which clients that connect then cannot know."""
        self.fences = True
        """Whether a deposed leader's messages are dropped; off only for a planted bug."""
        self.duplicate_probability = 0.0
        """The probability that a message is duplicated."""
        self.slow_probability = 0.0
        """The probability that a message takes long."""
        self.message_faults: dict[str, MessageFaults] = {}
        """The faults of individual nodes' messages."""
        self.partitioned_pairs: set[frozenset[str]] = set()
        """Pairs of nodes that do not reach each other."""
        self.on_command: Callable[[str, ToNode | ToNodes], None] = lambda name, message: None
        """Callback for each command that arrives at a node."""
        self.on_published: Callable[[SimConnection, str, bytes, Any], None] = lambda *published: None
        """Callback for each message that a coordinator publishes, once the broker has it, with the note that
        came with it.
        """
        self._last: dict[tuple[str, str], float] = {}

    # --- nodes ---------------------------------------------------------------------------------

    def register(self, client: NodeClient) -> None:
        """Connect a node's daemon that has just started, as soon as possible."""
        link = self.links.get(client.name)
        if link is None:
            link = self.links[client.name] = BrokerLink(client)
        link.client = client
        link.open = 0
        self.world.call_later(
            self.world.between(0.005, 0.05), self._connect_node, link, client, client.incarnation
        )

    def _connect_node(self, link: BrokerLink, client: NodeClient, incarnation: int) -> None:
        if link.client is not client or link.open or client.incarnation != incarnation:
            return
        if not self.up or link.cut:
            again_s = self.world.between(0.2, 1.0)
            self.world.call_later(again_s, self._connect_node, link, client, incarnation)
            return
        link.open = self.world.next_serial()
        link.since = self.world.now
        client.connected()

    def is_connected(self, node: str) -> bool:
        """Return whether a node has a connection."""
        return self.links[node].open > 0

    def forget_connection(self, node: str) -> None:
        """Drop the connection of a node whose host lost power. Nobody notices before the keep-alive expires."""
        self.links[node].open = 0

    def signal(self, message: FromNode) -> None:
        """Publish a node's signal."""
        link = self.links[message.node]
        if link.open and self.up:
            self._from_node(
                link, link.open, message.node, TOPICS.node_signal(message.node), encode_from_node(message)
            )

    def retain(self, node: str, offline: bool, incarnation: int) -> None:
        """Publish a node's own state."""
        link = self.links[node]
        if self.up and link.open and not link.cut:
            self.publish_node_state(node, offline, incarnation, False)

    def publish_node_state(self, node: str, offline: bool, incarnation: int, graceful: bool) -> None:
        """Publish a node's state at the broker, from the node itself or as its last will."""
        topic = TOPICS.node_state(node)
        message = NodeStateMessage(
            node=node,
            incarnation=incarnation,
            state=NodeState.OFFLINE if offline else NodeState.HEALTHY,
            generation=0,
            step=0,
            reason="",
            at=_AT,
            devices=1,
            host=f"host-{node}",
            graceful=graceful,
        )
        self.retained[topic] = payload = encode_json(message)
        for connection in list(self.connections.values()):
            if connection.matches(topic):
                self._pass(BROKER, connection, topic, payload, False)

    def offline(self) -> dict[str, int]:
        """Return the incarnation of each node whose retained state is OFFLINE."""
        found: dict[str, int] = {}
        for topic, payload in self.retained.items():
            if topic.endswith("/state") and (node := TOPICS.node_of(topic)) is not None:
                state = decode_json(payload, NodeStateMessage)
                if state.state is NodeState.OFFLINE:
                    found[node] = state.incarnation
        return found

    def _from_node(self, link: BrokerLink, number: int, node: str, topic: str, payload: bytes) -> None:
        if link.open != number or not self.up:
            return
        if link.cut:
            link.held.append((True, self._from_node, (link, number, node, topic, payload)))
            return
        for connection in list(self.connections.values()):
            if connection.matches(topic):
                self._pass(node, connection, topic, payload, False)

    # --- coordinators --------------------------------------------------------------------------

    @property
    def leader(self) -> SimConnection | None:
        """The connection under the leader's client id."""
        return self.connections.get(LEADER)

    def reaches(self, host: str) -> bool:
        """Return whether a connection from this host would succeed now."""
        return self.up and not self._link(host).cut

    def connect(self, connection: SimConnection) -> None:
        """Open a connection and end one with the same client id. Retained messages arrive first."""
        if (before := self.connections.get(connection.client_id)) is not None:
            self._end(before)
        connection.since = self.world.now
        self.connections[connection.client_id] = connection
        for topic, payload in list(self.retained.items()):
            if connection.matches(topic):
                self._pass(BROKER, connection, topic, payload, True)

    def publish(
        self,
        connection: SimConnection,
        topic: str,
        payload: bytes,
        retain: bool,
        there: Callable[[], None] | None,
        note: Any = None,
    ) -> None:
        """Publish a message. Messages keep the order of the calls."""
        link = self._link(connection.host)
        if link.cut and (connection.open or not self.fences):
            link.held.append((True, self.publish, (connection, topic, payload, retain, there, note)))
            return
        if not self.up or not (connection.open or not self.fences):
            return
        self.on_published(connection, topic, payload, note)
        if retain and payload:
            self.retained[topic] = payload
        elif retain:
            self.retained.pop(topic, None)
        self._spread(topic, payload)
        if there is not None:
            self.world.call_later(_ACKNOWLEDGED_S, connection.acknowledge, connection, there)

    def disconnect(self, connection: SimConnection) -> None:
        """Close a connection in order. Over a cut link the broker does not notice."""
        if self.connections.get(connection.client_id) is connection and not self._link(connection.host).cut:
            del self.connections[connection.client_id]
            connection.open = False

    def drop_leader(self) -> None:
        """Break the leader's connection."""
        if (leader := self.leader) is not None:
            self._end(leader)

    def _spread(self, topic: str, payload: bytes) -> None:
        if topic == COMMAND:
            message = decode_to_nodes(payload)
            for name, link in sorted(self.links.items()):
                if link.open and link.client is not None:
                    self._to_node(TO_ALL, link, name, message)
        elif topic.endswith("/command"):
            node = TOPICS.node_of(topic) or ""
            there = self.links.get(node)
            if there is not None and there.open:
                self._to_node(LEADER, there, node, decode_to_node(payload))
        for connection in list(self.connections.values()):
            if connection.matches(topic):
                self._pass(BROKER, connection, topic, payload, False)

    def _end(self, connection: SimConnection) -> None:
        """End a connection at the broker: its last will is published, and its owner notices when it can."""
        if self.connections.get(connection.client_id) is not connection:
            return
        del self.connections[connection.client_id]
        connection.open = False
        if self.up and (will := connection.will) is not None:
            self.retained[will.topic] = will.payload
            self._spread(will.topic, will.payload)
        self._notice(connection)

    def _notice(self, connection: SimConnection) -> None:
        if self._link(connection.host).cut and connection.client_id == LEADER:
            self.world.call_later(_NOTICE_S, self._notice, connection)
        else:
            self.world.call_later(self.world.between(0.001, 0.05), connection.closed, connection)

    # --- messages ------------------------------------------------------------------------------

    def _to_node(self, sender: str, link: BrokerLink, name: str, message: ToNode | ToNodes) -> None:
        number = link.open
        for delay_s in self._delays(sender, name):
            self.world.call_later(delay_s, self._arrive_at_node, link, number, name, message)

    def _arrive_at_node(self, link: BrokerLink, number: int, name: str, message: ToNode | ToNodes) -> None:
        if not self.up or link.open != number:
            return
        if link.cut:
            link.held.append((False, self._arrive_at_node, (link, number, name, message)))
            return
        self.on_command(name, message)

    def _pass(self, sender: str, to: SimConnection, topic: str, payload: bytes, retained: bool) -> None:
        for delay_s in self._delays(sender, to.client_id):
            self.world.call_later(delay_s, self._arrive, to, topic, payload, retained)

    def _arrive(self, to: SimConnection, topic: str, payload: bytes, retained: bool) -> None:
        if not self.up or not to.open:
            return
        link = self._link(to.host)
        if link.cut:
            link.held.append((False, self._arrive, (to, topic, payload, retained)))
            return
        to.receive(to, topic, payload, retained)

    def _delays(self, sender: str, receiver: str) -> list[float]:
        """Return the delay of each delivery of a message; empty if it is lost."""
        world = self.world
        random = world.rng.random()
        delay = 0.001 + 0.012 * random
        if self.slow_probability and random < self.slow_probability:
            delay += world.between(0.0, 1.0)
        line = self.message_faults.get(sender) or self.message_faults.get(receiver)
        if line is not None and world.chance(line.drop):
            return []
        delay += world.between(0.0, line.late_s) if line is not None else 0.0
        key = (sender, receiver)
        due = max(world.now + delay, self._last.get(key, 0.0))
        self._last[key] = due
        duplicates = self.duplicate_probability if line is None else line.duplicate
        if sender != BROKER and duplicates and world.chance(duplicates):
            return [due - world.now, due - world.now + world.between(0.0, 2.0)]
        return [due - world.now]

    # --- links and the broker ------------------------------------------------------------------

    def _link(self, name: str) -> BrokerLink:
        link = self.links.get(name)
        if link is None:
            link = self.links[name] = BrokerLink(None)
        return link

    def drop(self, name: str, *, process_died: bool = False, graceful: bool = False) -> None:
        """End the connections of a host: by its process's death, by a reset, or by a proper goodbye
        (``graceful``).
        """
        link = self._link(name)
        link.held.clear()
        for connection in [one for one in self.connections.values() if one.host == name]:
            self._end(connection)
        client = link.client
        if client is None:
            return
        was_open, link.open = link.open, 0
        if was_open and self.up:
            self.publish_node_state(name, True, client.incarnation, graceful)
        if not process_died:
            client.disconnected()
            self.world.call_later(
                self.world.between(0.05, 1.0), self._connect_node, link, client, client.incarnation
            )

    def cut(self, name: str, for_s: float) -> None:
        """Cut a link for a while. Nobody notices at once."""
        link = self._link(name)
        if link.cut:
            return
        link.cut = True
        if for_s > KEEP_ALIVE_S:
            connections = [one for one in self.connections.values() if one.host == name]
            self.world.call_later(KEEP_ALIVE_S, self._keep_alive, name, link, link.open, connections)
        self.world.call_later(for_s, self.heal, name)

    def _keep_alive(self, name: str, link: BrokerLink, number: int, connections: list[SimConnection]) -> None:
        if not link.cut:
            return
        if link.client is not None and number and link.open == number:
            self.drop(name)
        for connection in connections:
            self._end(connection)

    def heal(self, name: str) -> None:
        """Heal a link."""
        link = self._link(name)
        link.cut = False
        held, link.held = link.held, []
        for _, action, arguments in sorted(held, key=lambda one: not one[0]):
            action(*arguments)  # A host sends what it had to send before it receives.

    def stop_broker(self, for_s: float, left: dict[str, bytes] | None = None) -> None:
        """Stop the broker.

        :param left: what it retains when it comes back; nothing by default.
        """
        if not self.up:
            return
        self.up = False
        for link in self.links.values():
            was_open, link.open = link.open, 0
            link.held.clear()
            if (client := link.client) is not None:
                if was_open:
                    client.disconnected()
                again_s = self.world.between(0.05, 1.0)
                self.world.call_later(again_s, self._connect_node, link, client, client.incarnation)
        for connection in list(self.connections.values()):
            self._end(connection)
        before, self.retained = self.retained.get(JOURNAL), dict(left or {})
        self.restored_stale = left is not None and left.get(JOURNAL) != before
        self.lost_state_at = self.world.now
        self.world.call_later(for_s, self.start_broker)

    def start_broker(self) -> None:
        """Start the broker."""
        self.up = True
