"""Publishing of the machine's commands: to one node on its own topic, to several nodes on the common one. The
module also removes what the broker retains for a node.
"""

import asyncio
from collections import deque

import structlog

from ftd.coordinator.leadership import Leadership
from ftd.transport.mqtt.session import ECHO_S
from ftd.transport.wire.codec import check_not_retained, decode_to_nodes, encode_to_node, encode_to_nodes
from ftd.transport.wire.topics import Topics
from statemachine.effects import BroadcastCommand, RemoveNode, SendCommand
from statemachine.messages.cluster import ToNodes

_log = structlog.get_logger("ftd.coordinator")

MAX_UNCONFIRMED_BROADCASTS = 64
"""Broadcasts that are remembered until the broker delivers them back to this coordinator."""


class CommandSender:
    """The publisher of commands.

    It also receives the topic of all nodes, and rejects on behalf of all of them what they cannot read.
    """

    def __init__(self, topics: Topics, session: Leadership) -> None:
        self._topics, self._session = topics, session
        self._unconfirmed: deque[bytes] = deque(maxlen=MAX_UNCONFIRMED_BROADCASTS)

    def send(self, effect: SendCommand | BroadcastCommand | RemoveNode) -> None:
        if isinstance(effect, RemoveNode):
            self._session.publish(self._topics.node_state(effect.node), b"", retain=True)
        elif isinstance(effect, SendCommand):
            self._session.publish(self._topics.node_command(effect.node), encode_to_node(effect.message))
        else:
            payload = encode_to_nodes(
                ToNodes(receivers=effect.receivers, command=effect.command, cause=effect.cause)
            )
            self._unconfirmed.append(payload)
            self._session.publish(self._topics.command, payload)
            asyncio.get_running_loop().call_later(ECHO_S, self._log_missing, payload)

    def on_connected(self) -> None:
        """Forget the broadcasts of the previous session: they do not come back."""
        self._unconfirmed.clear()

    def receive_broadcast(self, payload: bytes, retained: bool) -> None:
        """Check a message on the topic of all nodes. Most are this coordinator's own, and are not decoded
        again.

        :raises WireError: no node can act on it.
        """
        check_not_retained(retained)
        if payload in self._unconfirmed:
            self._unconfirmed.remove(payload)
        else:
            decode_to_nodes(payload)

    def _log_missing(self, payload: bytes) -> None:
        """Log a broadcast that did not come back. mosquitto drops silently what its ACL forbids, so no node
        receives it either.
        """
        if payload in self._unconfirmed and self._session.connected:
            self._unconfirmed.remove(payload)
            remedy = "does the broker's ACL allow this topic? make it again with this version's ftd acl"
            _log.error("broadcast_not_received", topic=self._topics.command, remedy=remedy)
