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

Payloads are those of production.
"""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from ftd.faults.sim.world import World
from ftd.transport.mqtt.session import Will
from ftd.transport.wire.public import NodeStateMessage, decode_json
from ftd.transport.wire.topics import Topics
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
_MOST_TOPICS = 1000

TO_ALL = "coordinator to all"
"""The sender of broadcasts in ``_last``, since MQTT keeps the order of messages only within one topic."""
BROKER = "broker"
"""The sender of all messages between coordinators in ``_last``, since the broker keeps their order."""


@dataclass(slots=True)
class BrokerLink:
    """The link between a host and the broker."""

    cut: bool = False
    held: list[tuple[bool, Callable[..., None], tuple[Any, ...]]] = field(default_factory=list)
    """Actions that wait for a cut link to heal, in order, each with whether this host sent the message."""


class SimConnection:
    """One connection of a daemon's process."""

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
        self.signal_topic = TOPICS.node_signal(host)
        self.is_node = TOPICS.node_command(host) in self.exact
        """Whether it is a node's."""
        self.receiver = host if self.is_node else client_id
        """The receiver of its messages in ``_last``."""
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
        self.links: defaultdict[str, BrokerLink] = defaultdict(BrokerLink)
        self.connections: dict[str, SimConnection] = {}
        """All connections by client id."""
        self.retained: dict[str, bytes] = {}
        self.lost_state_at = 0.0  # When it last lost everything, or everything since it was saved.
        self.restored_stale = False
        """Whether the broker came back with less than it had, which clients that connect then cannot know."""
        self.duplicate_probability = 0.0
        """The probability that a message is duplicated."""
        self.slow_probability = 0.0
        """The probability that a message takes long."""
        self.partitioned_pairs: set[frozenset[str]] = set()
        """Pairs of nodes that do not reach each other."""
        self.on_published: Callable[[SimConnection, str, bytes, Any], None] = lambda *published: None
        """Callback for each message that a daemon publishes, once the broker has it, with the note that
        came with it.
        """
        self._last: dict[tuple[str, str], float] = {}
        self._receivers: dict[str, tuple[SimConnection, ...]] = {}
        """The connections that subscribed to each topic, until any connection begins or ends."""

    # --- what faults and checks look at ----------------------------------------------------------

    def connection_of(self, node: str) -> SimConnection | None:
        """Return the connection of a node, if it has one."""
        return next((one for one in self.connections.values() if one.is_node and one.host == node), None)

    def forget_connection(self, node: str) -> SimConnection | None:
        """Drop and return the connection of a node whose host lost power. Nobody notices before the keep-alive
        expires.
        """
        if (connection := self.connection_of(node)) is not None:
            self._remove(connection)
        return connection

    def publish_will(self, connection: SimConnection, lost_state_at: float) -> None:
        """Publish the last will of a forgotten connection, unless the broker has lost it since."""
        if self.lost_state_at == lost_state_at:
            self._publish_will(connection)

    def _publish_will(self, connection: SimConnection) -> None:
        if self.up and (will := connection.will) is not None:
            self.retained[will.topic] = will.payload
            self._spread(will.topic, will.payload)

    def state_of(self, node: str) -> NodeStateMessage | None:
        """Return the retained state of a node."""
        payload = self.retained.get(TOPICS.node_state(node))
        return decode_json(payload, NodeStateMessage) if payload else None

    def publish_as_client(self, topic: str, payload: bytes) -> None:
        """Publish a message of a client that is no daemon."""
        if self.up:
            self._spread(topic, payload)

    def offline(self) -> dict[str, int]:
        """Return the incarnation of each node whose retained state is OFFLINE."""
        found: dict[str, int] = {}
        for topic, payload in self.retained.items():
            if topic.endswith("/state") and (node := TOPICS.node_of(topic)) is not None:
                state = decode_json(payload, NodeStateMessage)
                if state.state is NodeState.OFFLINE:
                    found[node] = state.incarnation
        return found

    # --- connections ---------------------------------------------------------------------------

    @property
    def leader(self) -> SimConnection | None:
        """The connection under the leader's client id."""
        return self.connections.get(LEADER)

    def reaches(self, host: str) -> bool:
        """Return whether a connection from this host would succeed now."""
        return self.up and not self.links[host].cut

    def connect(self, connection: SimConnection) -> None:
        """Open a connection and end one with the same client id. Retained messages arrive first."""
        if (before := self.connections.get(connection.client_id)) is not None:
            self._end(before)
        connection.since = self.world.now
        self.connections[connection.client_id] = connection
        self._receivers.clear()
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
        link = self.links[connection.host]
        if link.cut and connection.open:
            link.held.append((True, self.publish, (connection, topic, payload, retain, there, note)))
            return
        if not self.up or not connection.open:
            return
        self.on_published(connection, topic, payload, note)
        if retain and payload:
            self.retained[topic] = payload
        elif retain:
            self.retained.pop(topic, None)
        self._spread(topic, payload, connection.host if topic == connection.signal_topic else BROKER)
        if there is not None:
            self.world.call_later(_ACKNOWLEDGED_S, connection.acknowledge, connection, there)

    def disconnect(self, connection: SimConnection) -> None:
        """Close a connection in order. Over a cut link the broker does not notice."""
        if self.connections.get(connection.client_id) is connection and not self.links[connection.host].cut:
            self._remove(connection)

    def abort(self, connection: SimConnection) -> None:
        """Break a connection from its owner's side, without a goodbye. Over a cut link the broker notices later."""
        link = self.links[connection.host]
        if link.cut:
            link.held.append((True, self._end, (connection,)))
        else:
            self._end(connection)

    def drop_leader(self) -> None:
        """Break the leader's connection."""
        if (leader := self.leader) is not None:
            self._end(leader)

    def _spread(self, topic: str, payload: bytes, sender: str = BROKER) -> None:
        command = TO_ALL if topic == COMMAND else LEADER
        is_command = topic.endswith("command")
        for connection in self._receivers_of(topic):
            to_node = is_command and connection.is_node
            self._pass(command if to_node else sender, connection, topic, payload, False)

    def _receivers_of(self, topic: str) -> tuple[SimConnection, ...]:
        """Return the connections that subscribed to a topic."""
        if len(self._receivers) > _MOST_TOPICS:
            self._receivers.clear()
        if topic not in self._receivers:
            self._receivers[topic] = tuple(one for one in self.connections.values() if one.matches(topic))
        return self._receivers[topic]

    def _remove(self, connection: SimConnection) -> None:
        del self.connections[connection.client_id]
        self._receivers.clear()
        connection.open = False

    def _end(self, connection: SimConnection) -> None:
        """End a connection at the broker: its last will is published, and its owner notices when it can."""
        if self.connections.get(connection.client_id) is not connection:
            return
        self._remove(connection)
        self._publish_will(connection)
        self._notice(connection)

    def _notice(self, connection: SimConnection) -> None:
        if self.links[connection.host].cut and connection.client_id == LEADER:
            self.world.call_later(_NOTICE_S, self._notice, connection)
        else:
            self.world.call_later(self.world.between(0.001, 0.05), connection.closed, connection)

    # --- messages ------------------------------------------------------------------------------

    def _pass(self, sender: str, to: SimConnection, topic: str, payload: bytes, retained: bool) -> None:
        for delay_s in self._delays(sender, to.receiver):
            self.world.call_later(delay_s, self._arrive, to, topic, payload, retained)

    def _arrive(self, to: SimConnection, topic: str, payload: bytes, retained: bool) -> None:
        if not self.up or not to.open:
            return
        link = self.links[to.host]
        if link.cut:
            link.held.append((False, self._arrive, (to, topic, payload, retained)))
            return
        to.receive(to, topic, payload, retained)

    def _delays(self, sender: str, receiver: str) -> list[float]:
        """Return the delay of each delivery of a message."""
        world = self.world
        random = world.rng.random()
        delay = 0.001 + 0.012 * random
        if self.slow_probability and random < self.slow_probability:
            delay += world.between(0.0, 1.0)
        key = (sender, receiver)
        due = max(world.now + delay, self._last.get(key, 0.0))
        self._last[key] = due
        if sender != BROKER and self.duplicate_probability and world.chance(self.duplicate_probability):
            return [due - world.now, due - world.now + world.between(0.0, 2.0)]
        return [due - world.now]

    # --- links and the broker ------------------------------------------------------------------

    def drop(self, name: str) -> None:
        """End the connections of a host, by the death of its process or by a reset."""
        self.links[name].held.clear()
        for connection in [one for one in self.connections.values() if one.host == name]:
            self._end(connection)

    def cut(self, name: str, for_s: float) -> None:
        """Cut a link for a while. Nobody notices at once."""
        link = self.links[name]
        if link.cut:
            return
        link.cut = True
        if for_s > KEEP_ALIVE_S:
            connections = [one for one in self.connections.values() if one.host == name]
            self.world.call_later(KEEP_ALIVE_S, self._keep_alive, link, connections)
        self.world.call_later(for_s, self.heal, name)

    def _keep_alive(self, link: BrokerLink, connections: list[SimConnection]) -> None:
        if link.cut:
            for connection in connections:
                self._end(connection)

    def heal(self, name: str) -> None:
        """Heal a link."""
        link = self.links[name]
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
            link.held.clear()
        for connection in list(self.connections.values()):
            self._end(connection)
        before, self.retained = self.retained.get(JOURNAL), dict(left or {})
        self.restored_stale = left is not None and left.get(JOURNAL) != before
        self.lost_state_at = self.world.now
        self.world.call_later(for_s, self.start_broker)

    def start_broker(self) -> None:
        """Start the broker."""
        self.up = True
