"""Compression of large payloads that are sent to every node, or with every step.

Of successive maps whose large values seldom change, each value is encoded and compressed separately, so an
unchanged one costs nothing (``IncrementalCompressor``). The result is ordinary: one msgpack map in one zlib
stream. A stream may consist of chunks that each end with a full flush, after which nothing refers to earlier
data.
"""

import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from ftd.errors import WireError

LEVEL = 1
"""zlib's level. Higher ones take several times as long and save little."""
_CHUNK_FROM_BYTES = 4096
"""Size from which a value is a chunk by itself; smaller values share one."""
_SHORT_BYTES = 64
"""Size up to which a chunk is stored and not compressed."""
_BASE = 65521
"""Modulus of Adler-32 (RFC 1950)."""
_BEGIN, _END = b"\x78\x01", b"\x03\x00"
"""Header of a zlib stream, and its empty last block."""


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


@dataclass(slots=True)
class _Chunk:
    plain: bytes
    value: Any = None
    """The value that was encoded."""
    deflated: bytes = b""
    adler: int = 1


class IncrementalCompressor:
    """An encoder of one map after another."""

    def __init__(self, from_bytes: int) -> None:
        """Begin without a previous map.

        :param from_bytes: size above which a map is compressed.
        """
        self._from_bytes = from_bytes
        self._encode = msgspec.msgpack.Encoder().encode
        self._deflate = zlib.compressobj(LEVEL, zlib.DEFLATED, -zlib.MAX_WBITS)
        self._previous: dict[int, _Chunk] = {}
        """Chunks of the previous map, by their values' identity."""

    def compress(self, content: Mapping[str, Any]) -> bytes:
        """Encode ``content``, and compress it if it is large. A value that is the same object as one in the
        previous map must not have changed.
        """
        current: dict[int, _Chunk] = {}
        rest = [b"\xde", len(content).to_bytes(2, "big")]
        large: list[_Chunk] = []
        for name, value in content.items():
            chunk = self._previous.get(id(value))
            if chunk is None:
                chunk = _Chunk(self._encode(value), value)
            if len(chunk.plain) < _CHUNK_FROM_BYTES:
                rest += self._encode(name), chunk.plain
            else:
                current[id(value)] = chunk
                large += _Chunk(self._encode(name)), chunk
        self._previous = current
        chunks = [_Chunk(b"".join(rest)), *large]
        if sum(len(chunk.plain) for chunk in chunks) <= self._from_bytes:
            return b"".join(chunk.plain for chunk in chunks)
        return self._stream(chunks)

    def _stream(self, chunks: list[_Chunk]) -> bytes:
        adler = 1
        for chunk in chunks:
            if not chunk.deflated:
                chunk.deflated, chunk.adler = self._block(chunk.plain), zlib.adler32(chunk.plain)
            adler = _adler_of_both(adler, chunk.adler, len(chunk.plain))
        return b"".join([_BEGIN, *(chunk.deflated for chunk in chunks), _END, adler.to_bytes(4, "big")])

    def _block(self, plain: bytes) -> bytes:
        """Return a block of the stream that refers to no other."""
        size = len(plain)
        if size <= _SHORT_BYTES:  # A stored block: its length, and the length inverted (RFC 1951).
            return b"\0" + size.to_bytes(2, "little") + (size ^ 0xFFFF).to_bytes(2, "little") + plain
        return self._deflate.compress(plain) + self._deflate.flush(zlib.Z_FULL_FLUSH)


def _adler_of_both(first: int, second: int, second_bytes: int) -> int:
    """Return the checksum of two chunks in a row from the checksums of each."""
    low = (first & 0xFFFF) + (second & 0xFFFF) - 1
    high = (first >> 16) + (second >> 16) + second_bytes * ((first & 0xFFFF) - 1)
    return high % _BASE << 16 | low % _BASE
