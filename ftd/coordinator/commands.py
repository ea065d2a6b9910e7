"""What the machine has nodes told, as messages: to one node on its own topic, to several on that of all; and
what the broker is to forget of one."""

import asyncio
from collections import deque
from typing import Protocol

import structlog

from ftd.transport.mqtt.session import ECHO_S
from ftd.transport.wire.codec import check_not_retained, decode_to_nodes, encode_to_node, encode_to_nodes
from ftd.transport.wire.topics import Topics
from statemachine.effects import BroadcastCommand, RemoveNode, SendCommand

_log = structlog.get_logger("ftd.coordinator")

MAX_UNCONFIRMED_BROADCASTS = 64
"""Broadcasts that are known again when the broker sends them to us, too."""


class CommandSession(Protocol):
    """The seat, as far as it is used here."""

    @property
    def connected(self) -> bool: ...

    def publish(self, topic: str, payload: bytes, *, retain: bool = False) -> None: ...


class CommandSender:
    """See the module.

    It hears the topic of all nodes itself, and refuses for all of them what they cannot read.
    """

    def __init__(self, topics: Topics, session: CommandSession) -> None:
        self._topics, self._session = topics, session
        self._said: deque[bytes] = deque(maxlen=MAX_UNCONFIRMED_BROADCASTS)

    def send(self, effect: SendCommand | BroadcastCommand | RemoveNode) -> None:
        if isinstance(effect, RemoveNode):
            self._session.publish(self._topics.node_state(effect.node), b"", retain=True)
        elif isinstance(effect, SendCommand):
            self._session.publish(self._topics.node_command(effect.node), encode_to_node(effect.message))
        else:
            payload = encode_to_nodes(effect.message)
            self._said.append(payload)
            self._session.publish(self._topics.command, payload)
            asyncio.get_running_loop().call_later(ECHO_S, self._miss, payload)

    def on_connected(self) -> None:
        """A new session: what went out by the one before does not come back."""
        self._said.clear()

    def receive_broadcast(self, payload: bytes, retained: bool) -> None:
        """What came on the topic of all nodes: mostly our own words, which are not read again.

        :raises WireError: no node can act on it.
        """
        check_not_retained(retained)
        if payload in self._said:
            self._said.remove(payload)
        else:
            decode_to_nodes(payload)

    def _miss(self, payload: bytes) -> None:
        """mosquitto drops without a word what an ACL forbids: then the nodes do not hear it, either."""
        if payload in self._said and self._session.connected:
            self._said.remove(payload)
            remedy = "does the broker's ACL know this topic? one made by ftd acl of this version does"
            _log.error("unheard", topic=self._topics.command, remedy=remedy)
