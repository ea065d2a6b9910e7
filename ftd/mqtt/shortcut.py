"""What stands in for paho's socket: messages go past paho, everything else through it.

A thousand nodes that answer at once are a thousand small packets. Of each, paho makes four reads, a dozen
calls, three locks and a message that aiomqtt makes into another one: more than all that is done about it. So
the stream is read in large pieces and cut into packets here (OASIS "MQTT Version 3.1.1", sections 2 and 3.3).
A sound PUBLISH is handed on at once, in its turn; of others paho is given the bytes when it asks: of those of
connecting, subscribing, pinging and leaving, and of what is malformed, which is paho's to judge.

paho and aiomqtt know sockets that have more than the kernel says, those of TLS, and ask them (``pending``).
"""

from collections.abc import Callable
from typing import Protocol

PIECE_BYTES = 32 * 1024
"""About so much is handled in one turn of the event loop: milliseconds, if it is all small packets."""
LARGE_BYTES = 1024 * 1024
"""A large packet is read in pieces of up to so much."""

_PUBLISH = 0x30
_MOST_LENGTH_BYTES = 4


class SocketLike(Protocol):
    """What paho wants of one."""

    def recv(self, buffer_size: int) -> bytes: ...
    def send(self, buffer: bytes | bytearray) -> int: ...
    def close(self) -> None: ...
    def fileno(self) -> int: ...
    def setblocking(self, flag: bool) -> None: ...


class Shortcut:
    """Stands in for ``sock``, which does not block, from a packet's first byte on.

    Errors are as of ``sock``, behind what it had to say. One piece is read for each time that nothing was
    ``pending``, or nothing else would get a turn while more comes.
    """

    def __init__(self, sock: SocketLike, on_message: Callable[[str, bytes, bool, int], None]) -> None:
        """``on_message`` gets topic, payload, retained and the number to acknowledge (0: none is), and must
        not raise."""
        self.inner = sock
        self._on_message = on_message
        self._hidden: Callable[[], int] = getattr(sock, "pending", lambda: 0)
        self._piece, self._at = b"", 0
        self._parts: list[bytes] = []
        """What came of a packet whose end has not; ``_lacking`` bytes of it are known to be missing."""
        self._lacking = 0
        self._given, self._given_at = b"", 0
        """A packet that is paho's, as far as it has read it."""
        self._due = True
        """The next piece may be read."""

    def recv(self, buffer_size: int) -> bytes:
        """At most ``buffer_size`` bytes of what is paho's; none at the end. :raises OSError: as ``sock``."""
        while self._given_at >= len(self._given):
            if not self._next_given():
                if not self._due:
                    raise BlockingIOError
                if not self._read():
                    return b""
        begin, self._given_at = self._given_at, self._given_at + buffer_size
        return self._given[begin : self._given_at]

    def pending(self) -> int:
        """Bytes that are here, of which the kernel says nothing."""
        here = len(self._given) - self._given_at
        if here <= 0 and (here := len(self._piece) - self._at) <= 0:
            here = 0
            self._due = True
        return here + self._hidden()

    def send(self, buffer: bytes | bytearray) -> int:
        return self.inner.send(buffer)

    def close(self) -> None:
        self.inner.close()

    def fileno(self) -> int:
        return self.inner.fileno()

    def setblocking(self, flag: bool) -> None:
        self.inner.setblocking(flag)

    def _read(self) -> bool:
        """One more piece; ``False`` at the end."""
        more = self.inner.recv(max(PIECE_BYTES, min(self._lacking, LARGE_BYTES)))
        self._due = False
        if self._parts:
            self._parts.append(more)
            self._lacking -= len(more)
            if self._lacking <= 0:
                more, self._parts = b"".join(self._parts), []
            else:
                return bool(more)
        self._piece, self._at = more, 0
        return bool(more)

    def _next_given(self) -> bool:
        """Hand on messages, up to the first whole packet that is paho's: ``_given`` is that; ``False``: there
        is none."""
        piece, end = self._piece, len(self._piece)
        on_message = self._on_message
        while self._at < end:
            at = self._at
            first, start, size = piece[at], at + 2, 0
            if start <= end and (size := piece[at + 1]) >= 128:
                start, size = _long_size(piece, at + 1)
            stop = start + size
            if stop > end:
                self._parts, self._lacking = [piece[at:]], stop - end
                self._piece, self._at = b"", 0
                return False
            self._at = stop
            if first & 0xF0 == _PUBLISH and size > 2 and (level := first & 0x06) < 0x04:
                text = start + 2
                body = number = text + (piece[start] << 8 | piece[start + 1])
                if level:
                    body += 2
                if text < number and body <= stop:
                    try:
                        topic = piece[text:number].decode()
                    except UnicodeDecodeError:
                        pass
                    else:
                        mid = piece[number] << 8 | piece[number + 1] if level else 0
                        on_message(topic, piece[body:stop], bool(first & 1), mid)
                        continue
            self._given, self._given_at = piece[at:stop], 0
            return True
        return False


def _long_size(data: bytes, at: int) -> tuple[int, int]:
    """Where a packet's rest begins and how many bytes it has (2.2.3), of a length in several bytes; one byte
    more than there is where that is not all here, and none behind a length that is too long."""
    size = 0
    for place, digit in enumerate(data[at : at + _MOST_LENGTH_BYTES]):
        size |= (digit & 0x7F) << 7 * place
        if digit < 128:
            return at + place + 1, size
    return (len(data), 1) if len(data) - at < _MOST_LENGTH_BYTES else (at + _MOST_LENGTH_BYTES, 0)
