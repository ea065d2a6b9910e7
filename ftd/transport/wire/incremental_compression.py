"""A map that is folded again and again, and of which the large parts seldom change: encoded and deflated bit
by bit, so that a part that is as it was costs nothing.

What is written is ordinary, one msgpack map in one zlib stream, as ``folding.fold`` makes it: a stream may be
put together of pieces where each ends with a full flush, behind which nothing refers to what was before.
"""

import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from ftd.transport.wire.compression import LEVEL

_PIECE_FROM_BYTES = 4096
"""Of a value that is a piece by itself; what is smaller is one piece together."""
_SHORT_BYTES = 64
"""What has no more is not deflated."""
_BASE = 65521
"""Of Adler-32 (RFC 1950)."""
_BEGIN, _END = b"\x78\x01", b"\x03\x00"
"""Of a zlib stream: its header, and an empty last block."""


@dataclass(slots=True)
class _Piece:
    plain: bytes
    value: Any = None
    """What it was made of."""
    deflated: bytes = b""
    adler: int = 1


class IncrementalCompressor:
    """Writes one map after the other."""

    def __init__(self, from_bytes: int) -> None:
        """:param from_bytes: what is larger is deflated."""
        self._from_bytes = from_bytes
        self._encode = msgspec.msgpack.Encoder().encode
        self._deflate = zlib.compressobj(LEVEL, zlib.DEFLATED, -zlib.MAX_WBITS)
        self._kept: dict[int, _Piece] = {}
        """Pieces of the map before, by their values' identity."""

    def compress(self, content: Mapping[str, Any]) -> bytes:
        """``content`` encoded, and deflated if it is large. A value that is the same object as one in the map
        before must not have changed since."""
        kept: dict[int, _Piece] = {}
        rest = [b"\xde", len(content).to_bytes(2, "big")]
        large: list[_Piece] = []
        for name, value in content.items():
            piece = self._kept.get(id(value))
            if piece is None:
                piece = _Piece(self._encode(value), value)
            if len(piece.plain) < _PIECE_FROM_BYTES:
                rest += self._encode(name), piece.plain
            else:
                kept[id(value)] = piece
                large += _Piece(self._encode(name)), piece
        self._kept = kept
        pieces = [_Piece(b"".join(rest)), *large]
        if sum(len(piece.plain) for piece in pieces) <= self._from_bytes:
            return b"".join(piece.plain for piece in pieces)
        return self._stream(pieces)

    def _stream(self, pieces: list[_Piece]) -> bytes:
        adler = 1
        for piece in pieces:
            if not piece.deflated:
                piece.deflated, piece.adler = self._block(piece.plain), zlib.adler32(piece.plain)
            adler = _adler_of_both(adler, piece.adler, len(piece.plain))
        return b"".join([_BEGIN, *(piece.deflated for piece in pieces), _END, adler.to_bytes(4, "big")])

    def _block(self, plain: bytes) -> bytes:
        """Of a stream, and whole in itself."""
        size = len(plain)
        if size <= _SHORT_BYTES:  # "Stored": its length, and that inverted (RFC 1951).
            return b"\0" + size.to_bytes(2, "little") + (size ^ 0xFFFF).to_bytes(2, "little") + plain
        return self._deflate.compress(plain) + self._deflate.flush(zlib.Z_FULL_FLUSH)


def _adler_of_both(first: int, second: int, second_bytes: int) -> int:
    """The checksum of two pieces, one behind the other, from those of each."""
    low = (first & 0xFFFF) + (second & 0xFFFF) - 1
    high = (first >> 16) + (second >> 16) + second_bytes * ((first & 0xFFFF) - 1)
    return high % _BASE << 16 | low % _BASE
