"""A map that is written again and again, and of which the large parts seldom change: encoded and deflated bit
by bit, so that a part that is as it was costs nothing.

What is written is ordinary, one msgpack map in one zlib stream, as ``folding.fold`` makes it: a stream may be
put together of pieces where each ends with a full flush, behind which nothing refers to what was before.
"""

import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from ftd.wire.folding import LEVEL

_PIECE_FROM_BYTES = 4096
"""Of a part that is deflated by itself; what is smaller is one piece together."""
_BASE = 65521
"""Of Adler-32 (RFC 1950)."""
_BEGIN, _END = b"\x78\x01", b"\x03\x00"
"""Of a zlib stream: its header, and an empty last block."""


@dataclass(slots=True)
class _Piece:
    value: Any
    """What it was made of."""
    plain: bytes
    """As one name and one value of the map."""
    deflated: bytes = b""
    adler: int = 1


class PartFolder:
    """Writes one map after the other."""

    def __init__(self, from_bytes: int) -> None:
        """:param from_bytes: what is larger is deflated."""
        self._from_bytes = from_bytes
        self._encode = msgspec.msgpack.Encoder().encode
        self._deflate = zlib.compressobj(LEVEL, zlib.DEFLATED, -zlib.MAX_WBITS)
        self._kept: dict[str, _Piece] = {}

    def fold(self, content: Mapping[str, Any]) -> bytes:
        """``content`` encoded, and deflated if it is large. A value that is the same object as in the map
        before must not have changed since."""
        kept: dict[str, _Piece] = {}
        rest = [b"\xde", len(content).to_bytes(2, "big")]
        for name, value in content.items():
            piece = self._kept.get(name)
            if piece is None or piece.value is not value:
                piece = _Piece(value, self._encode(name) + self._encode(value))
            if len(piece.plain) < _PIECE_FROM_BYTES:
                rest.append(piece.plain)
            else:
                kept[name] = piece
        self._kept = kept
        pieces = [_Piece(None, b"".join(rest)), *kept.values()]
        if sum(len(piece.plain) for piece in pieces) <= self._from_bytes:
            return b"".join(piece.plain for piece in pieces)
        return self._stream(pieces)

    def _stream(self, pieces: list[_Piece]) -> bytes:
        adler = 1
        for piece in pieces:
            if not piece.deflated:
                flushed = self._deflate.compress(piece.plain), self._deflate.flush(zlib.Z_FULL_FLUSH)
                piece.deflated, piece.adler = b"".join(flushed), zlib.adler32(piece.plain)
            adler = _adler_of_both(adler, piece.adler, len(piece.plain))
        return b"".join([_BEGIN, *(piece.deflated for piece in pieces), _END, adler.to_bytes(4, "big")])


def _adler_of_both(first: int, second: int, second_bytes: int) -> int:
    """The checksum of two pieces, one behind the other, from those of each."""
    low = (first & 0xFFFF) + (second & 0xFFFF) - 1
    high = (first >> 16) + (second >> 16) + second_bytes * ((first & 0xFFFF) - 1)
    return high % _BASE << 16 | low % _BASE
