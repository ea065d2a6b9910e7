"""The replacement for paho's socket: every packet is delivered once, complete and in order."""

import asyncio
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ftd.transport.mqtt.fast_path import MAX_READ_BYTES, READ_BYTES, WRITE_RETRY_S, FastPathSocket


class ChunkSocket:
    """A socket with these chunks, one for each read; afterwards it has no data yet."""

    def __init__(self, *pieces: bytes) -> None:
        self.pieces = list(pieces)
        self.reads: list[int] = []
        self.hidden = 0
        self.sent = b""

    def recv(self, buffer_size: int) -> bytes:
        self.reads.append(buffer_size)
        if not self.pieces:
            raise BlockingIOError
        piece, rest = self.pieces[0][:buffer_size], self.pieces[0][buffer_size:]
        self.pieces[:1] = [rest] if rest else []
        return piece

    def send(self, buffer: bytes | bytearray) -> int:
        self.sent += buffer
        return len(buffer)

    def close(self) -> None: ...

    def fileno(self) -> int:
        return 7

    def setblocking(self, flag: bool) -> None: ...


def sized(first: int, rest: bytes) -> bytes:
    """Return a packet with its length (2.2)."""
    size, digits = len(rest), bytearray()
    while True:
        size, digit = divmod(size, 128)
        digits.append(digit | 0x80 if size else digit)
        if not size:
            return bytes((first, *digits)) + rest


def publish(topic: bytes, payload: bytes, number: int = 0, *, retained: bool = False) -> bytes:
    name = len(topic).to_bytes(2, "big") + topic
    mid = number.to_bytes(2, "big") if number else b""
    return sized(0x30 | (0x02 if number else 0) | retained, name + mid + payload)


@dataclass
class Reader:
    """A reader that reads as paho and aiomqtt do: one byte, the length byte by byte, then the rest, while
    bytes are pending.
    """

    pieces: ChunkSocket
    seen: list[object] = field(default_factory=list)
    packet: bytearray = field(default_factory=bytearray)
    ended: bool = False

    def __post_init__(self) -> None:
        self.shortcut = FastPathSocket(
            self.pieces, lambda *message: self.seen.append(message), self.seen.append
        )

    def turn(self) -> None:
        """Do what the event loop calls when there is something to read."""
        self.read_packet()
        while self.shortcut.pending() and not self.ended:
            self.read_packet()

    def read_packet(self) -> None:
        try:
            while (lacking := self._lacking()) and not self.ended:
                got = self.shortcut.recv(lacking)
                self.ended = not got
                self.packet += got
        except BlockingIOError:
            return
        if not self.ended:
            self.seen.append(bytes(self.packet))
            self.packet.clear()

    def _lacking(self) -> int:
        size, digits = 0, self.packet[1:5]
        for place, digit in enumerate(digits):
            size |= (digit & 0x7F) << 7 * place
            if digit < 128:
                return 2 + place + size - len(self.packet)
        return 1 if len(digits) < 4 else 0

    def read_all(self) -> list[object]:
        while self.pieces.pieces and not self.ended:
            self.turn()
        assert not self.shortcut.pending()
        return self.seen


NAMES = st.text(min_size=1, max_size=8).filter({"+", "#", "\0"}.isdisjoint)
BODIES = st.one_of(st.binary(max_size=20), st.integers(100, 300).map(bytes))
MESSAGES = st.tuples(NAMES, BODIES, st.booleans(), st.sampled_from((0, 0, 1, 65535)))
OTHERS = st.builds(sized, st.sampled_from((0x20, 0x50, 0x90, 0xD0, 0x34, 0x36)), BODIES)
ACKNOWLEDGEMENTS = st.integers(1, 65535)


def on_the_wire(packet: Any) -> bytes:
    match packet:
        case bytes():
            return packet
        case int():
            return sized(0x40, packet.to_bytes(2, "big"))
        case topic, payload, retained, number:
            return publish(topic.encode(), payload, number, retained=retained)
    raise AssertionError(packet)


def cut(stream: bytes, sizes: list[int]) -> list[bytes]:
    pieces = []
    for size in sizes:
        pieces.append(stream[:size])
        stream = stream[size:]
    return [piece for piece in (*pieces, stream) if piece]


@given(
    packets=st.lists(st.one_of(MESSAGES, OTHERS, ACKNOWLEDGEMENTS), max_size=12),
    sizes=st.lists(st.integers(1, 400), max_size=40),
)
@settings(max_examples=100, deadline=None)
def test_every_packet_is_delivered_complete_and_in_order(packets: list[Any], sizes: list[int]) -> None:
    pieces = ChunkSocket(*cut(b"".join(map(on_the_wire, packets)), sizes))
    seen = Reader(pieces).read_all()
    assert seen == [packet[:3] if isinstance(packet, tuple) else packet for packet in packets]
    due = [packet[3] for packet in packets if isinstance(packet, tuple) and packet[3]]
    assert pieces.sent == b"".join(sized(0x40, number.to_bytes(2, "big")) for number in due)


class NarrowSocket(ChunkSocket):
    """A socket that takes this many bytes at once; 0 means that it is full."""

    def __init__(self, takes: list[int]) -> None:
        super().__init__()
        self.takes = takes

    def send(self, buffer: bytes | bytearray) -> int:
        taken = self.takes.pop(0) if self.takes else len(buffer)
        if not taken:
            raise BlockingIOError
        return super().send(buffer[:taken])


@given(
    packets=st.lists(st.one_of(MESSAGES, OTHERS), max_size=8),
    takes=st.lists(st.sampled_from((0, 0, 1, 2, 7, 150)), max_size=12),
)
@settings(max_examples=60, deadline=None)
def test_messages_are_sent_between_pahos_packets(packets: list[Any], takes: list[int]) -> None:
    """Each is complete, ours in their order and paho's in theirs, however little the socket takes at once."""
    sock = NarrowSocket(takes)
    pahos = [packet for packet in packets if isinstance(packet, bytes)]

    async def scene() -> None:
        shortcut = FastPathSocket(sock, lambda *_: None, lambda _: None)
        left = b""

        def offer() -> None:
            nonlocal left
            try:
                while left:
                    left = left[shortcut.send(left) :]
            except BlockingIOError:
                pass

        for packet in packets:
            if isinstance(packet, bytes):
                left += packet  # paho offers one packet at a time; several in a row are equivalent.
                offer()
            else:
                shortcut.publish(*packet[:2], retain=packet[2], number=packet[3])
        while left or shortcut._unsent:
            offer()
            await asyncio.sleep(WRITE_RETRY_S)

    asyncio.run(scene())
    reader = Reader(ChunkSocket(sock.sent))
    numbers = []
    reader.shortcut._write = lambda packet: numbers.append(int.from_bytes(packet[2:]))  # type: ignore
    seen = reader.read_all()
    assert [packet for packet in seen if isinstance(packet, tuple)] == [
        packet[:3] for packet in packets if isinstance(packet, tuple)
    ]
    assert numbers == [packet[3] for packet in packets if isinstance(packet, tuple) and packet[3]]
    assert [packet for packet in seen if isinstance(packet, bytes)] == pahos


@pytest.mark.parametrize(
    "malformed",
    [
        sized(0x30, b""),
        sized(0x30, b"\x00"),
        sized(0x30, b"\x00\x00"),
        sized(0x30, b"\x00\x00payload"),
        sized(0x30, b"\x00\x05abc"),
        sized(0x32, b"\x00\x03abc"),
        sized(0x32, b"\x00\x03abc\x01"),
        sized(0x34, b"\x00\x01tpayload"),
        sized(0x30, b"\x00\x01\xffpayload"),
        b"\x30\xff\xff\xff\xff",
    ],
)
def test_malformed_packets_are_passed_to_paho(malformed: bytes) -> None:
    assert Reader(ChunkSocket(malformed)).read_all() == [malformed]


def test_one_chunk_is_read_in_each_iteration_of_the_loop() -> None:
    """Otherwise nothing else would run while data keep coming."""
    small = publish(b"t", b"x")
    pieces = ChunkSocket(small * 3, small * 2, small)
    reader = Reader(pieces)
    reader.turn()
    assert (len(reader.seen), pieces.reads) == (3, [READ_BYTES])
    reader.turn()
    assert (len(reader.seen), pieces.reads) == (5, [READ_BYTES] * 2)


def test_a_large_message_is_read_in_large_chunks_and_copied_once() -> None:
    payload = bytes(3 * MAX_READ_BYTES)
    pieces = ChunkSocket(publish(b"t", payload) + publish(b"u", b"next"))
    reader = Reader(pieces)
    assert reader.read_all() == [("t", payload, False), ("u", b"next", False)]
    assert pieces.reads[:2] == [READ_BYTES, MAX_READ_BYTES]
    assert len(pieces.reads) < 8


def test_data_that_tls_has_decrypted_are_pending() -> None:
    pieces = ChunkSocket(publish(b"t", b"1"), publish(b"t", b"2"))
    hidden = [5, 0]
    pieces.pending = lambda: hidden.pop(0)  # type: ignore[attr-defined]
    reader = Reader(pieces)
    reader.turn()
    assert len(reader.seen) == 2


def test_the_end_and_errors_come_after_the_data() -> None:
    reader = Reader(ChunkSocket(publish(b"t", b"last") + b"\xd0\x00" + b"\x30\x09half", b""))
    for _ in range(2):
        reader.turn()
    assert reader.seen == [("t", b"last", False), b"\xd0\x00"]
    assert reader.ended

    class Broken(ChunkSocket):
        def recv(self, buffer_size: int) -> bytes:
            raise ConnectionResetError("reset")

    broken = Reader(Broken())
    with pytest.raises(ConnectionResetError):
        broken.turn()


def test_any_data_from_the_broker_answer_a_ping() -> None:
    ping, answer, message = b"\xc0\x00", b"\xd0\x00", publish(b"t", b"x")
    pieces = ChunkSocket(message, message + answer + message, answer)
    reader = Reader(pieces)
    assert reader.shortcut.send(ping) == 2
    reader.turn()
    assert reader.seen == [answer, ("t", b"x", False)]
    reader.turn()  # The real answer is not given twice.
    assert reader.seen[2:] == [("t", b"x", False)] * 2
    reader.turn()  # This one was not requested: paho must judge it.
    assert reader.seen[4:] == [answer]
    pieces.pieces = [answer]
    reader.shortcut.send(ping)
    reader.turn()
    assert reader.seen[5:] == [answer]


def test_a_broken_connection_is_reported_by_reading() -> None:
    class Broken(ChunkSocket):
        def send(self, buffer: bytes | bytearray) -> int:
            raise BrokenPipeError

    shortcut = FastPathSocket(Broken(), lambda *_: None, lambda _: None)
    shortcut.publish("t", b"x", retain=False, number=1)
    with pytest.raises(BrokenPipeError):
        shortcut.send(b"\xc0\x00")


@pytest.mark.parametrize("topic", ["", "a/+", "a/#", "a\0", "a" * 65_536])
def test_what_mqtt_does_not_allow_is_an_error(topic: str) -> None:
    pieces = ChunkSocket()
    with pytest.raises(ValueError, match="there is no topic"):
        FastPathSocket(pieces, lambda *_: None, lambda _: None).publish(topic, b"", retain=False, number=0)
    assert not pieces.sent
