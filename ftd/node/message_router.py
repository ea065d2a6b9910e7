"""Routing of the MQTT messages that a node receives: each payload is checked, decoded and handed on."""

from collections.abc import Callable
from typing import Any, Protocol

from ftd.errors import WireError
from ftd.transport.wire.codec import check_not_retained, decode_to_node, decode_to_nodes
from ftd.transport.wire.public import NodeStateMessage, decode_json
from ftd.transport.wire.topics import Topics
from statemachine.messages.cluster import ToNode


class NodeMessageHandler(Protocol):
    """Handler of the decoded messages; implemented by the daemon."""

    @property
    def incarnation(self) -> int:
        """The present incarnation of the node."""

    def on_command(self, message: ToNode) -> None: ...

    def on_chaos(self, payload: bytes) -> None: ...

    def on_trace(self, payload: bytes) -> None: ...

    def on_state(self, seen: NodeStateMessage | None) -> None:
        """Handle a state that somebody published on this node's own topic; ``None`` if the retained one was
        deleted.
        """

    def publish_event(
        self, event: str, reason: str, details: dict[str, Any], *, over_mqtt: bool = True
    ) -> None: ...


class NodeMessageRouter:
    """The mapping from each topic that the node subscribes to onto the decoder of its messages."""

    def __init__(self, topics: Topics, node: str, handler: NodeMessageHandler) -> None:
        self._node, self._handler, self._all = node, handler, topics.command
        decoders: dict[str, Callable[[bytes, bool], None]] = {
            topics.node_command(node): self._command,
            topics.command: self._command_to_several,
            topics.chaos(node): self._chaos,
            topics.trace(node): self._trace,
            topics.node_state(node): self._state,
        }
        self._decoders = decoders

    def on_message(self, topic: str, payload: bytes, retained: bool) -> None:
        """Decode a message and hand it on, or report that it was rejected.

        A broken message on the topic that all nodes receive is only logged, since the coordinator reports
        it; otherwise a thousand nodes would report it at once.
        """
        decoders = self._decoders.get(topic)
        if decoders is None:
            return
        try:
            decoders(payload, retained)
        except WireError as error:
            details = {"topic": topic, "why": str(error)}
            self._handler.publish_event(
                "MessageRejected", f"{topic}: {error}", details, over_mqtt=topic != self._all
            )

    def _command(self, payload: bytes, retained: bool) -> None:
        check_not_retained(retained)
        self._handler.on_command(decode_to_node(payload, self._node))

    def _command_to_several(self, payload: bytes, retained: bool) -> None:
        check_not_retained(retained)
        message = decode_to_nodes(payload).addressed(self._node, self._handler.incarnation)
        if message is not None:
            self._handler.on_command(message)

    def _chaos(self, payload: bytes, retained: bool) -> None:
        if not retained:  # A fault that somebody left retained must not be injected at every start.
            self._handler.on_chaos(payload)

    def _trace(self, payload: bytes, retained: bool) -> None:
        if not retained:
            self._handler.on_trace(payload)

    def _state(self, payload: bytes, retained: bool) -> None:
        self._handler.on_state(decode_json(payload, NodeStateMessage) if payload else None)
