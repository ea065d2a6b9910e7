"""Valid messages of each kind, as bytes."""

import zlib

import msgspec

from ftd.transport.wire.codec import encode_to_nodes
from statemachine.effects import BroadcastCommand
from statemachine.messages.cluster import ToNodes


def encoded(broadcast: BroadcastCommand) -> bytes:
    """Return the message of a command to several nodes."""
    return encode_to_nodes(
        ToNodes(receivers=broadcast.receivers, command=broadcast.command, cause=broadcast.cause)
    )


class Wire:
    """The messages of a few simulated clusters, as bytes: one of each kind."""

    def __init__(self) -> None:
        self.signals: dict[str, bytes] = {}
        self.commands: dict[str, bytes] = {}
        self.broadcasts: dict[str, bytes] = {}
        """Decompressed contents of commands to several nodes."""


def compressed_command(content: bytes) -> bytes:
    """Return a command to several nodes as it is sent."""
    return msgspec.msgpack.encode({"compressed": True, "content": zlib.compress(content)})
