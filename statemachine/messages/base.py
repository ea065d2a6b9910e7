"""Base class of all messages."""

import msgspec


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A message of a protocol. On the wire, its field ``type`` holds the name of its class."""
