"""A replacement for paho's socket that handles PUBLISH and PUBACK packets itself and passes all others to
paho.

A thousand nodes that answer at once send a thousand small packets. For each, paho makes four reads, a dozen
calls, three locks and a message that aiomqtt converts into another one, which costs more than everything
that is done with it. So the stream is read in large chunks and split into packets here (OASIS "MQTT Version
3.1.1", sections 2 and 3.3). A well-formed PUBLISH is delivered at once, in order. Packets for connecting,
subscribing, pinging and disconnecting are handed to paho when it reads, and so are malformed ones, which
paho must judge. Messages are also published here, between two packets of paho's: aiomqtt would take a task
and two iterations of the event loop for each, and as many for its acknowledgement.

paho sees little of the traffic, so it pings the broker however much there is, and the answer may come late
in the stream. So while a ping is unanswered, any data from the broker counts as its answer.

paho and aiomqtt know sockets that hold more data than the kernel reports, those of TLS, and ask them
(``pending``).
"""

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Callable
from functools import lru_cache
from typing import Protocol

READ_BYTES = 32 * 1024
"""Bytes that are read in one iteration of the event loop: milliseconds of work if all packets are small."""
MAX_READ_BYTES = 1024 * 1024
"""Most bytes that are read at once of a large packet."""

WRITE_RETRY_S = 0.005
"""Delay until another attempt when the broker does not read. The event loop has one callback per socket for
when it can be written to, and that one is paho's.
"""

_PUBLISH = 0x30
_PUBACK = b"\x40\x02"
_PINGREQ, _PINGRESP = b"\xc0\x00", b"\xd0\x00"
_DISCONNECT = b"\xe0\x00"
_MAX_LENGTH_BYTES = 4
_MAX_BYTES = 128**_MAX_LENGTH_BYTES - 1
_MAX_TOPIC_BYTES = 65_535
_BLOCKED = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


class SocketLike(Protocol):
    """The methods of a socket that paho uses."""

    def recv(self, buffer_size: int) -> bytes: ...
    def send(self, buffer: bytes | bytearray) -> int: ...
    def close(self) -> None: ...
    def fileno(self) -> int: ...
    def setblocking(self, flag: bool) -> None: ...


class FastPathSocket:
    """The replacement of ``sock``, which must not block, from the first byte of a packet on.

    Errors are those of ``sock``, after all data that came before them. One chunk is read for each time that
    nothing was ``pending``; otherwise nothing else would run while data keep coming.
    """

    def __init__(
        self,
        sock: SocketLike,
        on_message: Callable[[str, bytes, bool], None],
        on_acknowledged: Callable[[int], None],
    ) -> None:
        """Begin at the start of a packet.

        :param on_message: receives topic, payload and whether it was retained; must not raise.
        :param on_acknowledged: receives the packet identifier of a message that we published; must not raise.
        """
        self.inner = sock
        self._on_message, self._on_acknowledged = on_message, on_acknowledged
        self._buffered: Callable[[], int] = getattr(sock, "pending", lambda: 0)
        self._chunk, self._at = b"", 0
        self._partial: list[bytes] = []
        """Chunks of an incomplete packet; at least ``_missing`` bytes of it are missing."""
        self._missing = 0
        self._for_paho, self._for_paho_at = b"", 0
        """A packet for paho, and the position up to which paho has read it."""
        self._may_read = True
        """Whether the next chunk may be read."""
        self._pings = self._answered = 0
        """Pings of paho that are not answered yet, and pings that were answered early and whose real answer
        is still to come.
        """
        self._unsent = bytearray()
        self._unsent_of_paho = 0
        """Bytes of a partly sent packet of paho's: it must send the rest before anything else is sent."""
        self._retry: asyncio.TimerHandle | None = None

    def publish(self, topic: str, payload: bytes, *, retain: bool, number: int) -> None:
        """Send a message now, or as soon as the broker reads: at QoS 1 with this packet identifier, at QoS 0
        if it is 0.

        A broken connection raises nothing here; the reader will notice it.

        :raises ValueError: MQTT does not allow this message.
        """
        name = _encode_topic(topic)
        size = len(name) + len(payload) + (2 if number else 0)
        if size > _MAX_BYTES:
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
        """Send DISCONNECT after everything that was published: the broker drops the last will and closes."""
        self._write(bytearray(_DISCONNECT))

    def abort(self) -> None:
        """Break the connection, so that whoever waits for it continues."""
        if isinstance(self.inner, socket.socket):
            with contextlib.suppress(OSError):
                self.inner.shutdown(socket.SHUT_RDWR)

    def recv(self, buffer_size: int) -> bytes:
        """Return at most ``buffer_size`` bytes for paho; none at the end.

        :raises OSError: see ``sock``.
        """
        while self._for_paho_at >= len(self._for_paho):
            if self._next_for_paho():
                break
            if not self._may_read:
                raise BlockingIOError
            if not self._read():
                return b""
        begin, self._for_paho_at = self._for_paho_at, self._for_paho_at + buffer_size
        return self._for_paho[begin : self._for_paho_at]

    def pending(self) -> int:
        """Return the number of bytes that are here and that the kernel does not report."""
        here = len(self._for_paho) - self._for_paho_at
        if here <= 0 and (here := len(self._chunk) - self._at) <= 0:
            here = 0
            self._may_read = True
        return here + self._buffered()

    def send(self, buffer: bytes | bytearray) -> int:
        """Send a packet of paho's, or the rest of one.

        :raises OSError: see ``sock``.
        """
        if not self._unsent_of_paho:
            self._send_unsent()
            if self._unsent:
                raise BlockingIOError
        # If a send blocks, TLS requires that it is repeated with the same bytes.
        self._unsent_of_paho = len(buffer)
        sent = self.inner.send(buffer)
        self._unsent_of_paho -= sent
        self._pings += buffer == _PINGREQ and not self._unsent_of_paho
        return sent

    def close(self) -> None:
        if self._retry is not None:
            self._retry.cancel()
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
        while self._unsent and not self._unsent_of_paho:
            try:
                del self._unsent[: self.inner.send(self._unsent)]
            except _BLOCKED:
                break
            except OSError:
                self._unsent.clear()  # The connection is over; the reader will notice it.
        if self._unsent and self._retry is None:
            self._retry = asyncio.get_running_loop().call_later(WRITE_RETRY_S, self._retry_send)

    def _retry_send(self) -> None:
        self._retry = None
        self._send_unsent()

    def _read(self) -> bool:
        """Read one more chunk; return False at the end."""
        more = self.inner.recv(max(READ_BYTES, min(self._missing, MAX_READ_BYTES)))
        self._may_read = False
        if self._pings and more:
            self._pings, self._answered = self._pings - 1, self._answered + 1
            self._for_paho, self._for_paho_at = _PINGRESP, 0
        if self._partial:
            self._partial.append(more)
            self._missing -= len(more)
            if self._missing <= 0:
                more, self._partial = b"".join(self._partial), []
            else:
                return bool(more)
        self._chunk, self._at = more, 0
        return bool(more)

    def _next_for_paho(self) -> bool:
        """Deliver messages up to the first complete packet for paho, and store that in ``_for_paho``; return
        whether there is one.
        """
        chunk, end = self._chunk, len(self._chunk)
        on_message = self._on_message
        while self._at < end:
            at = self._at
            first, start, size = chunk[at], at + 2, 0
            if start <= end and (size := chunk[at + 1]) >= 128:
                start, size = _parse_long_size(chunk, at + 1)
            stop = start + size
            if stop > end:
                self._partial, self._missing = [chunk[at:]], stop - end
                self._chunk, self._at = b"", 0
                return False
            self._at = stop
            if first & 0xF0 == _PUBLISH and size > 2 and (level := first & 0x06) < 0x04:
                text = start + 2
                body = number = text + (chunk[start] << 8 | chunk[start + 1])
                if level:
                    body += 2
                if text < number and body <= stop:
                    try:
                        topic = chunk[text:number].decode()
                    except UnicodeDecodeError:
                        pass
                    else:
                        if level:
                            self._write(bytearray(_PUBACK + chunk[number:body]))
                        on_message(topic, chunk[body:stop], bool(first & 1))
                        continue
            elif first == _PUBACK[0] and size == 2:
                self._on_acknowledged(chunk[start] << 8 | chunk[start + 1])
                continue
            elif first == _PINGRESP[0] and self._answered:
                self._answered -= 1
                continue
            self._for_paho, self._for_paho_at = chunk[at:stop], 0
            return True
        return False


def _parse_long_size(data: bytes, at: int) -> tuple[int, int]:
    """Return where the rest of a packet begins and how many bytes it has (2.2.3), if its length has several
    bytes.

    If the length is incomplete, the size is one byte more than there is; if the length is too long, the
    size is 0.
    """
    size = 0
    for place, digit in enumerate(data[at : at + _MAX_LENGTH_BYTES]):
        size |= (digit & 0x7F) << 7 * place
        if digit < 128:
            return at + place + 1, size
    return (len(data), 1) if len(data) - at < _MAX_LENGTH_BYTES else (at + _MAX_LENGTH_BYTES, 0)


@lru_cache(maxsize=1024)
def _encode_topic(topic: str) -> bytes:
    """Return a topic as it is encoded in a packet.

    :raises ValueError: nothing can be published to it (4.7).
    """
    name = topic.encode()
    if not name or len(name) > _MAX_TOPIC_BYTES or not {"#", "+", "\0"}.isdisjoint(topic):
        raise ValueError(f"there is no topic {topic[:80]!r}")
    return len(name).to_bytes(2, "big") + name
