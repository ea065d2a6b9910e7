"""A socket that is read in large pieces, for paho, which reads a packet in four small ones.

A thousand nodes that answer at once are a thousand small packets. Each costs paho four calls of the kernel
and the event loop a turn; out of a piece of them that is here already, none of that. paho and aiomqtt know
sockets that have more than the kernel says, those of TLS, and ask them (``pending``).
"""

from collections.abc import Callable
from typing import Protocol

PIECE_BYTES = 32 * 1024
"""About so much is handled in one turn of the event loop: milliseconds, if it is all small packets."""


class SocketLike(Protocol):
    """What paho wants of one."""

    def recv(self, buffer_size: int) -> bytes: ...
    def send(self, buffer: bytes | bytearray) -> int: ...
    def close(self) -> None: ...
    def fileno(self) -> int: ...
    def setblocking(self, flag: bool) -> None: ...


class ReadAhead:
    """Stands in for ``sock``, which does not block; errors are as of that one, behind what it had to say.

    One piece for each time that nothing was ``pending``, or nothing else would get a turn while more comes: a
    packet that the piece has only the beginning of is read to its end and no further.
    """

    def __init__(self, sock: SocketLike) -> None:
        self.inner = sock
        self._hidden: Callable[[], int] = getattr(sock, "pending", lambda: 0)
        self._piece, self._at = b"", 0
        self._due = True
        """The next read may be a large one."""

    def recv(self, buffer_size: int) -> bytes:
        """At most ``buffer_size`` bytes; none at the end. :raises OSError: as ``sock``."""
        if self._at >= len(self._piece):
            self._piece, self._at = b"", 0
            if not self._due or buffer_size >= PIECE_BYTES:
                return self.inner.recv(buffer_size)
            self._piece = self.inner.recv(PIECE_BYTES)
            self._due = False
        begin, self._at = self._at, self._at + buffer_size
        return self._piece[begin : self._at]

    def pending(self) -> int:
        """Bytes that are here, of which the kernel says nothing."""
        here = max(0, len(self._piece) - self._at)
        self._due = not here
        return here + self._hidden()

    def send(self, buffer: bytes | bytearray) -> int:
        return self.inner.send(buffer)

    def close(self) -> None:
        self.inner.close()

    def fileno(self) -> int:
        return self.inner.fileno()

    def setblocking(self, flag: bool) -> None:
        self.inner.setblocking(flag)
