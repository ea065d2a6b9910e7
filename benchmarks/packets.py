"""MQTT 3.1.1 packets for a crowd of a thousand sessions in one process.

A client library for each session would be so slow that the crowd, and not the coordinator, would be
measured. The daemons use aiomqtt.

Source: the OASIS standard "MQTT Version 3.1.1", sections 2 and 3.
"""

from collections.abc import Sequence

PUBLISH = 0x30
SUBACK = 0x90


def packet(first: int, body: bytes) -> bytes:
    """Return a packet; ``first`` is its type with its flags (2.2)."""
    size = len(body)
    if size < 128:
        return bytes((first, size)) + body
    header = bytearray((first,))
    while True:
        size, digit = divmod(size, 128)
        header.append(digit | 0x80 if size else digit)
        if not size:
            return bytes(header) + body


def text(value: bytes) -> bytes:
    """Return a string or binary field, which begins with its length."""
    return len(value).to_bytes(2, "big") + value


def connect_packet(
    client_id: str,
    *,
    keep_alive_s: int,
    will: tuple[str, bytes] | None = None,
) -> bytes:
    """Return a CONNECT that begins a clean session; ``will`` (topic, payload) is retained and has QoS 1 (3.1)."""
    flags, fields = 0x02, text(client_id.encode())
    if will is not None:
        flags |= 0x04 | 0x08 | 0x20
        fields += text(will[0].encode()) + text(will[1])
    return packet(0x10, text(b"MQTT") + bytes((4, flags)) + keep_alive_s.to_bytes(2, "big") + fields)


def publish_packet(topic: bytes, payload: bytes, number: int, *, retain: bool = False) -> bytes:
    """Return a PUBLISH at QoS 1, or at QoS 0 where ``number`` is 0 (3.3)."""
    if not number:
        return packet(PUBLISH | retain, text(topic) + payload)
    return packet(PUBLISH | 0x02 | retain, text(topic) + number.to_bytes(2, "big") + payload)


def puback_packet(number: int) -> bytes:
    return b"\x40\x02" + number.to_bytes(2, "big")


def subscribe_packet(number: int, topics: Sequence[str], unacknowledged: Sequence[str] = ()) -> bytes:
    """Return a SUBSCRIBE to ``topics`` at QoS 1 and to ``unacknowledged`` at QoS 0 (3.8)."""
    filters = b"".join(text(topic.encode()) + b"\x01" for topic in topics)
    filters += b"".join(text(topic.encode()) + b"\x00" for topic in unacknowledged)
    return packet(0x82, number.to_bytes(2, "big") + filters)


def published(first: int, body: bytes) -> tuple[str, bytes, bool, int]:
    """Return topic, payload, retained flag and number of a PUBLISH; number 0 needs no acknowledgement."""
    end = 2 + int.from_bytes(body[:2], "big")
    start = end + 2 if first & 0x06 else end
    return body[2:end].decode(), body[start:], bool(first & 1), int.from_bytes(body[end:start], "big")


class Splitter:
    """Splitter of a byte stream into MQTT packets."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[tuple[int, bytes]]:
        """Take received bytes and return first byte and body of each packet that is now complete."""
        if self._rest:
            data = self._rest + data
        found: list[tuple[int, bytes]] = []
        at, end = 0, len(data)
        while end - at >= 2:
            size, start = data[at + 1], at + 2
            if size >= 128:
                size, start = _long_size(data, at + 1)
                if not start:
                    break
            if end - start < size:
                break
            found.append((data[at], data[start : start + size]))
            at = start + size
        self._rest = data[at:]
        return found


def _long_size(data: bytes, at: int) -> tuple[int, int]:
    """Return a remaining length of several bytes (2.2.3) and its end, or ``(0, 0)`` if it is incomplete."""
    size = 0
    for place, digit in enumerate(data[at : at + 4]):
        size |= (digit & 0x7F) << 7 * place
        if not digit & 0x80:
            return size, at + place + 1
    return 0, 0
