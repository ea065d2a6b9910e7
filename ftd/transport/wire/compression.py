"""Compression of large payloads that are sent to every node, or with every step."""

import zlib

from ftd.errors import WireError

LEVEL = 1
"""zlib's level. Higher ones take several times as long and save little."""


def compress(content: bytes, from_bytes: int) -> tuple[bytes, bool]:
    """Return ``content``, compressed if it is larger than ``from_bytes``, and whether it was compressed."""
    if len(content) <= from_bytes:
        return content, False
    return zlib.compress(content, LEVEL), True


def decompress(content: bytes, max_bytes: int, what: str) -> bytes:
    """Decompress ``content`` to at most ``max_bytes``.

    :param what: names the content in an error.
    :raises WireError: it cannot be decompressed, or is larger.
    """
    unfolding = zlib.decompressobj()
    try:
        plain = unfolding.decompress(content, max_bytes)
    except zlib.error as error:
        raise WireError(f"{what} cannot be decompressed: {error}") from None
    if unfolding.unconsumed_tail or not unfolding.eof:
        raise WireError(f"{what} is larger than {max_bytes} bytes, or truncated")
    return plain
