"""What stands in for paho's socket: messages go past paho, everything else through it.

A thousand nodes that answer at once are a thousand small packets. Of each, paho makes four reads, a dozen
calls, three locks and a message that aiomqtt makes into another one: more than all that is done about it. So
the stream is read in large pieces and cut into packets here (OASIS "MQTT Version 3.1.1", sections 2 and 3.3).
A sound PUBLISH is handed on at once, in its turn; of others paho is given the bytes when it asks: of those of
connecting, subscribing, pinging and leaving, and of what is malformed, which is paho's to judge. What is
published leaves here, too, between two packets of paho's: at once, where it would take aiomqtt a task and two
turns of the loop, and its acknowledgement as many.

paho sees little of the traffic, so it pings the broker however much there is, and the answer may be far back
in that. So while a ping is out, any word of the broker's answers it.

paho and aiomqtt know sockets that have more than the kernel says, those of TLS, and ask them (``pending``).
"""

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Callable
from functools import lru_cache
from typing import Protocol

READ_BYTES = 32 * 1024
"""About so much is handled in one turn of the event loop: milliseconds, if it is all small packets."""
MAX_READ_BYTES = 1024 * 1024
"""A large packet is read in pieces of up to so much."""

WRITE_RETRY_S = 0.005
"""When the broker does not read, it is tried again so much later: of a socket, the event loop tells one when
it can be written to, and that is paho."""

_PUBLISH = 0x30
_PUBACK = b"\x40\x02"
_PINGREQ, _PINGRESP = b"\xc0\x00", b"\xd0\x00"
_DISCONNECT = b"\xe0\x00"
_MOST_LENGTH_BYTES = 4
_MOST_BYTES = 128**_MOST_LENGTH_BYTES - 1
_MOST_TOPIC_BYTES = 65_535
_BLOCKED = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


class SocketLike(Protocol):
    """What paho wants of one."""

    def recv(self, buffer_size: int) -> bytes: ...
    def send(self, buffer: bytes | bytearray) -> int: ...
    def close(self) -> None: ...
    def fileno(self) -> int: ...
    def setblocking(self, flag: bool) -> None: ...


class FastPathSocket:
    """Stands in for ``sock``, which does not block, from a packet's first byte on.

    Errors are as of ``sock``, behind what it had to say. One piece is read for each time that nothing was
    ``pending``, or nothing else would get a turn while more comes.
    """

    def __init__(
        self,
        sock: SocketLike,
        on_message: Callable[[str, bytes, bool], None],
        on_acknowledged: Callable[[int], None],
    ) -> None:
        """``on_message`` gets topic, payload and whether it was retained, ``on_acknowledged`` the number of a
        message that we published. They must not raise."""
        self.inner = sock
        self._on_message, self._on_acknowledged = on_message, on_acknowledged
        self._hidden: Callable[[], int] = getattr(sock, "pending", lambda: 0)
        self._piece, self._at = b"", 0
        self._parts: list[bytes] = []
        """What came of a packet whose end has not; ``_lacking`` bytes of it are known to be missing."""
        self._lacking = 0
        self._given, self._given_at = b"", 0
        """A packet that is paho's, as far as it has read it."""
        self._due = True
        """The next piece may be read."""
        self._pings = self._answered = 0
        """Of paho's that are out; and those that are answered for it, whose own answer is to come."""
        self._unsent = bytearray()
        self._torn = 0
        """Bytes of a packet of paho's of which some have left: it must send the rest before anybody else."""
        self._later: asyncio.TimerHandle | None = None

    def publish(self, topic: str, payload: bytes, *, retain: bool, number: int) -> None:
        """Send it now, or as soon as the broker reads; at QoS 1 under this number, at QoS 0 where it is 0.

        Never raises for the connection's sake: that it is broken is seen by who reads.

        :raises ValueError: what MQTT does not allow.
        """
        name = _named(topic)
        size = len(name) + len(payload) + (2 if number else 0)
        if size > _MOST_BYTES:
            raise ValueError(f"a message of {size} bytes")
        head = bytearray((_PUBLISH | (0x02 if number else 0) | retain,))
        while size >= 128:
            head.append(size & 0x7F | 0x80)
            size >>= 7
        head.append(size)
        head += name
        if number:
            head += number.to_bytes(2, "big")
        head += payload
        self._write(head)

    def disconnect(self) -> None:
        """Say goodbye behind all that was published: the broker forgets the last will, and closes."""
        self._write(bytearray(_DISCONNECT))

    def abort(self) -> None:
        """Break the connection, so that whoever waits for it goes on."""
        if isinstance(self.inner, socket.socket):
            with contextlib.suppress(OSError):
                self.inner.shutdown(socket.SHUT_RDWR)

    def recv(self, buffer_size: int) -> bytes:
        """At most ``buffer_size`` bytes of what is paho's; none at the end. :raises OSError: as ``sock``."""
        while self._given_at >= len(self._given):
            if self._next_given():
                break
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
        """A packet of paho's, or what is left of it. :raises OSError: as ``sock``."""
        if not self._torn:
            self._send_unsent()
            if self._unsent:
                raise BlockingIOError
        # What blocks half way must be tried again with the same bytes: TLS insists.
        self._torn = len(buffer)
        sent = self.inner.send(buffer)
        self._torn -= sent
        self._pings += buffer == _PINGREQ and not self._torn
        return sent

    def close(self) -> None:
        if self._later is not None:
            self._later.cancel()
        self.inner.close()

    def fileno(self) -> int:
        return self.inner.fileno()

    def setblocking(self, flag: bool) -> None:
        self.inner.setblocking(flag)

    def _write(self, packet: bytearray) -> None:
        if self._unsent:
            self._unsent += packet
            return
        self._unsent = packet
        self._send_unsent()

    def _send_unsent(self) -> None:
        while self._unsent and not self._torn:
            try:
                del self._unsent[: self.inner.send(self._unsent)]
            except _BLOCKED:
                break
            except OSError:
                self._unsent.clear()  # As of a connection that is over: whoever reads will see it.
        if self._unsent and self._later is None:
            self._later = asyncio.get_running_loop().call_later(WRITE_RETRY_S, self._send_later)

    def _send_later(self) -> None:
        self._later = None
        self._send_unsent()

    def _read(self) -> bool:
        """One more piece; ``False`` at the end."""
        more = self.inner.recv(max(READ_BYTES, min(self._lacking, MAX_READ_BYTES)))
        self._due = False
        if self._pings and more:
            self._pings, self._answered = self._pings - 1, self._answered + 1
            self._given, self._given_at = _PINGRESP, 0
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
                        if level:
                            self._write(bytearray(_PUBACK + piece[number:body]))
                        on_message(topic, piece[body:stop], bool(first & 1))
                        continue
            elif first == _PUBACK[0] and size == 2:
                self._on_acknowledged(piece[start] << 8 | piece[start + 1])
                continue
            elif first == _PINGRESP[0] and self._answered:
                self._answered -= 1
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


@lru_cache(maxsize=1024)
def _named(topic: str) -> bytes:
    """A topic as it stands in a packet. :raises ValueError: it cannot be published to (4.7)."""
    name = topic.encode()
    if not name or len(name) > _MOST_TOPIC_BYTES or not {"#", "+", "\0"}.isdisjoint(topic):
        raise ValueError(f"there is no topic {topic[:80]!r}")
    return len(name).to_bytes(2, "big") + name
