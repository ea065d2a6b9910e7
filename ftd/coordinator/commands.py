"""What the machine has nodes told, as messages: to one node on its own topic, to several on that of all."""

from collections import deque
from collections.abc import Callable

from ftd.wire.codec import check_not_retained, decode_to_nodes, encode_to_node, encode_to_nodes
from ftd.wire.topics import Topics
from statemachine.effects import BroadcastCommand, SendCommand

MOST_SAID = 64
"""Broadcasts that are known again when the broker sends them to us, too."""


class Commands:
    """See the module.

    It hears the topic of all nodes itself, and refuses for all of them what they cannot read.
    """

    def __init__(self, topics: Topics, publish: Callable[[str, bytes], None]) -> None:
        self._topics, self._publish = topics, publish
        self._said: deque[bytes] = deque(maxlen=MOST_SAID)

    def send(self, effect: SendCommand | BroadcastCommand) -> None:
        if isinstance(effect, SendCommand):
            self._publish(self._topics.node_command(effect.node), encode_to_node(effect.message))
        else:
            payload = encode_to_nodes(effect.message)
            self._said.append(payload)
            self._publish(self._topics.command, payload)

    def overhear(self, payload: bytes, retained: bool) -> None:
        """What came on the topic of all nodes: mostly our own words, which are not read again.

        :raises WireError: no node can act on it.
        """
        check_not_retained(retained)
        if payload in self._said:
            self._said.remove(payload)
        else:
            decode_to_nodes(payload)
