"""Valid messages of each kind, as bytes."""

import zlib

import msgspec


class Wire:
    """All that a few simulated clusters say, as bytes: one message of each kind."""

    def __init__(self) -> None:
        self.signals: dict[str, bytes] = {}
        self.commands: dict[str, bytes] = {}
        self.broadcasts: dict[str, bytes] = {}
        """What is ``folded`` of commands to several nodes."""


def folded(content: bytes) -> bytes:
    """A command to several nodes, as it travels."""
    return msgspec.msgpack.encode({"folded": True, "content": zlib.compress(content)})
