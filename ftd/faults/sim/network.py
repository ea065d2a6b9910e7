"""The broker and the connections to it.

What MQTT with QoS 1 and clean sessions really does: messages of one sender to one receiver keep their order, different
senders' do not, nor do the coordinator's to one node and those to all; a message may come twice (at any later time,
which is harsher than real); what is under way when a connection breaks may be lost; an abnormal end publishes the last
will; a client id that connects again ends the connection before; a restarted broker has forgotten everything, or comes
back with what it once saved, and publishes no wills.

Payloads are those of production. A node is a client with one connection; a coordinator's process has one per session.
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
"""A connection over a cut link breaks after this long; a shorter cut only delays its messages."""
_NOTICE_S = 0.25
"""A leader that was cut off when its connection ended finds out so long after the link is back, at most."""
_ACKNOWLEDGED_S = 0.005
"""So long after the broker has a message its acknowledgement is there."""
_AT = "2000-01-01T00:00:00.000Z"

TO_ALL = "coordinator to all"
"""The sender of broadcasts, for ``Network._last``: MQTT keeps the order of messages on one topic alone."""
BROKER = "broker"
"""The sender of everything between coordinators, for ``Network._last``: to them the broker keeps its order."""


class NodeClient(Protocol):
    """A node's daemon."""

    name: str
    incarnation: int

    def connected(self) -> None: ...

    def disconnected(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageFaults:
    """What becomes of messages between a node and the coordinator."""

    drop: float = 0.0
    duplicate: float = 0.0
    late_s: float = 0.0
    """At most so much later."""


class BrokerLink:
    """The link between a host and the broker."""

    __slots__ = ("client", "cut", "held", "open", "since")

    def __init__(self, client: NodeClient | None) -> None:
        self.client = client
        self.open = 0
        """Number of the node's connection, from 1 on; 0: it has none."""
        self.cut = False
        self.held: list[tuple[bool, Callable[..., None], tuple[Any, ...]]] = []
        """What waits for a cut link to heal, in order: whether it was sent, and what then happens."""
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
        """:param receive, closed, acknowledge: called by the network, at the process's own time."""
        self.host, self.client_id, self.will = host, client_id, will
        self.exact = frozenset(topic for topic in subscriptions if "+" not in topic)
        self.filters = tuple(topic for topic in subscriptions if "+" in topic)
        self.receive, self.closed, self.acknowledge = receive, closed, acknowledge
        self.open = True
        self.since = 0.0

    def wants(self, topic: str) -> bool:
        """Whether it subscribed to this topic."""
        return topic in self.exact or (bool(self.filters) and _matches_any(self.filters, topic))


@lru_cache(maxsize=4096)
def _matches_any(filters: tuple[str, ...], topic: str) -> bool:
    """Return whether a topic is of one of these filters, in which ``+`` stands for any one level."""
    given = topic.split("/")
    return any(
        len(levels) == len(given) and all(a in ("+", b) for a, b in zip(levels, given, strict=True))
        for levels in (wanted.split("/") for wanted in filters)
    )


class SimNetwork:
    """All links and connections, and the broker's state."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.up = True
        self.links: dict[str, BrokerLink] = {}
        self.connections: dict[str, SimConnection] = {}
        """Of coordinators, by client id."""
        self.retained: dict[str, bytes] = {}
        self.forgot_at = 0.0  # Everything, last; or all since it was saved.
        self.aged = False
        """It came back with less than it had, and who comes then cannot know."""
        self.fences = True
        """Off only for a planted bug: what a previous leader sends goes through."""
        self.duplicates = 0.0
        """Probability that a message comes again."""
        self.slow = 0.0
        """Probability that a message takes long."""
        self.lines: dict[str, MessageFaults] = {}
        """Nodes whose line to the coordinator is bad."""
        self.apart: set[frozenset[str]] = set()
        """Pairs of nodes that do not reach each other."""
        self.take_command: Callable[[str, ToNode | ToNodes], None] = lambda name, message: None
        """By the node of that name."""
        self.at_broker: Callable[[SimConnection, str, bytes, Any], None] = lambda *published: None
        """Sees everything that a coordinator publishes once the broker has it, with the note that it came with."""
        self._last: dict[tuple[str, str], float] = {}

    # --- nodes ---------------------------------------------------------------------------------

    def register(self, client: NodeClient) -> None:
        """A node's daemon starts: it will connect as soon as it can."""
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
        link.open = self.world.serial()
        link.since = self.world.now
        client.connected()

    def is_connected(self, node: str) -> bool:
        """Whether a node has a connection."""
        return self.links[node].open > 0

    def forget_connection(self, node: str) -> None:
        """A node's host lost power: nobody hears of it before the keep-alive is over."""
        self.links[node].open = 0

    def signal(self, message: FromNode) -> None:
        """A node publishes a signal."""
        link = self.links[message.node]
        if link.open and self.up:
            self._from_node(
                link, link.open, message.node, TOPICS.node_signal(message.node), encode_from_node(message)
            )

    def retain(self, node: str, offline: bool, incarnation: int) -> None:
        """A node publishes its own state."""
        link = self.links[node]
        if self.up and link.open and not link.cut:
            self.publish_node_state(node, offline, incarnation, False)

    def publish_node_state(self, node: str, offline: bool, incarnation: int, graceful: bool) -> None:
        """At the broker: a node's state, by itself or as its last will."""
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
            if connection.wants(topic):
                self._pass(BROKER, connection, topic, payload, False)

    def offline(self) -> dict[str, int]:
        """Nodes whose retained state is OFFLINE, with their incarnations."""
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
            if connection.wants(topic):
                self._pass(node, connection, topic, payload, False)

    # --- coordinators --------------------------------------------------------------------------

    @property
    def leader(self) -> SimConnection | None:
        """The connection under the leader's client id."""
        return self.connections.get(LEADER)

    def reaches(self, host: str) -> bool:
        """Whether a connection from there would succeed now."""
        return self.up and not self._link(host).cut

    def connect(self, connection: SimConnection) -> None:
        """Open a connection; one under the same client id ends. What is retained comes first."""
        if (before := self.connections.get(connection.client_id)) is not None:
            self._end(before)
        connection.since = self.world.now
        self.connections[connection.client_id] = connection
        for topic, payload in list(self.retained.items()):
            if connection.wants(topic):
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
        """Publish, in the order of the calls."""
        link = self._link(connection.host)
        if link.cut and (connection.open or not self.fences):
            link.held.append((True, self.publish, (connection, topic, payload, retain, there, note)))
            return
        if not self.up or not (connection.open or not self.fences):
            return
        self.at_broker(connection, topic, payload, note)
        if retain and payload:
            self.retained[topic] = payload
        elif retain:
            self.retained.pop(topic, None)
        self._spread(topic, payload)
        if there is not None:
            self.world.call_later(_ACKNOWLEDGED_S, connection.acknowledge, connection, there)

    def disconnect(self, connection: SimConnection) -> None:
        """Say goodbye; over a cut link the broker does not hear it."""
        if self.connections.get(connection.client_id) is connection and not self._link(connection.host).cut:
            del self.connections[connection.client_id]
            connection.open = False

    def end_leader(self) -> None:
        """The leader's connection breaks."""
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
            if connection.wants(topic):
                self._pass(BROKER, connection, topic, payload, False)

    def _end(self, connection: SimConnection) -> None:
        """The broker ends a connection: its last will goes out, and its owner notices when it can."""
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
        self.take_command(name, message)

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
        """After how long it arrives, each time that it does."""
        world = self.world
        random = world.rng.random()
        delay = 0.001 + 0.012 * random
        if self.slow and random < self.slow:
            delay += world.between(0.0, 1.0)
        line = self.lines.get(sender) or self.lines.get(receiver)
        if line is not None and world.chance(line.drop):
            return []
        delay += world.between(0.0, line.late_s) if line is not None else 0.0
        key = (sender, receiver)
        due = max(world.now + delay, self._last.get(key, 0.0))
        self._last[key] = due
        duplicates = self.duplicates if line is None else line.duplicate
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
        """The connections of a host end: by its process's death, by a reset, or (``graceful``) by a goodbye."""
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
        """The link is dead for a while; nobody notices at once."""
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
        """The link is back."""
        link = self._link(name)
        link.cut = False
        held, link.held = link.held, []
        for _, action, arguments in sorted(held, key=lambda one: not one[0]):
            action(*arguments)  # What it sent, it sent before it hears.

    def stop_broker(self, for_s: float, left: dict[str, bytes] | None = None) -> None:
        """:param left: what it finds of all that it retained; nothing, where that is not said."""
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
        self.aged = left is not None and left.get(JOURNAL) != before
        self.forgot_at = self.world.now
        self.world.call_later(for_s, self.start_broker)

    def start_broker(self) -> None:
        """The broker is back."""
        self.up = True
