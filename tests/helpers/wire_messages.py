"""Valid messages of each kind, as bytes."""

import zlib

import msgspec


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
