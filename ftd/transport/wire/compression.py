"""Large payloads are deflated: what goes to every node, or out with every step."""

import zlib

from ftd.errors import WireError

LEVEL = 1
"""The next ones take several times as long and save little."""


def compress(content: bytes, from_bytes: int) -> tuple[bytes, bool]:
    """``content`` deflated, and whether it was: only where it is larger than ``from_bytes``."""
    if len(content) <= from_bytes:
        return content, False
    return zlib.compress(content, LEVEL), True


def decompress(content: bytes, most_bytes: int, what: str) -> bytes:
    """What was deflated; never more than ``most_bytes`` are made.

    :raises WireError: it cannot be, or is larger.
    """
    unfolding = zlib.decompressobj()
    try:
        plain = unfolding.decompress(content, most_bytes)
    except zlib.error as error:
        raise WireError(f"{what} cannot be unpacked: {error}") from None
    if unfolding.unconsumed_tail or not unfolding.eof:
        raise WireError(f"{what} is larger than {most_bytes} bytes, or cut off")
    return plain
