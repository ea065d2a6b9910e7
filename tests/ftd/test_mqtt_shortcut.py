"""What stands in for paho's socket: every packet comes out once, whole, and in its turn."""

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ftd.mqtt.shortcut import LARGE_BYTES, PIECE_BYTES, Shortcut


class Pieces:
    """A socket that has these pieces, one for each time that it is read; then nothing yet."""

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
    """A packet (2.2)."""
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
    """Reads as paho and aiomqtt do: a byte, a length byte by byte, the rest; while something is pending."""

    pieces: Pieces
    seen: list[object] = field(default_factory=list)
    packet: bytearray = field(default_factory=bytearray)
    ended: bool = False

    def __post_init__(self) -> None:
        self.shortcut = Shortcut(self.pieces, lambda *message: self.seen.append(message))

    def turn(self) -> None:
        """What the event loop calls when there is something to read."""
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


NAMES = st.text(min_size=1, max_size=8)
BODIES = st.one_of(st.binary(max_size=20), st.integers(100, 300).map(bytes))
MESSAGES = st.tuples(NAMES, BODIES, st.booleans(), st.sampled_from((0, 0, 1, 65535)))
OTHERS = st.builds(sized, st.sampled_from((0x20, 0x40, 0x90, 0xD0, 0x34, 0x36)), BODIES)


@given(
    packets=st.lists(st.one_of(MESSAGES, OTHERS), max_size=12),
    cuts=st.lists(st.integers(1, 400), max_size=40),
)
@settings(max_examples=100, deadline=None)
def test_every_packet_comes_out_whole_and_in_its_turn(packets: list[object], cuts: list[int]) -> None:
    stream = b"".join(
        packet if isinstance(packet, bytes) else publish(packet[0].encode(), packet[1], packet[3],
                                                         retained=packet[2])  # type: ignore[index]
        for packet in packets
    )  # fmt: skip
    pieces = []
    for cut in cuts:
        pieces.append(stream[:cut])
        stream = stream[cut:]
    pieces = [piece for piece in (*pieces, stream) if piece]
    assert Reader(Pieces(*pieces)).read_all() == packets


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
def test_what_is_malformed_is_pahos_to_judge(malformed: bytes) -> None:
    assert Reader(Pieces(malformed)).read_all() == [malformed]


def test_one_piece_is_read_in_a_turn() -> None:
    """Or nothing else would get one while more comes."""
    small = publish(b"t", b"x")
    pieces = Pieces(small * 3, small * 2, small)
    reader = Reader(pieces)
    reader.turn()
    assert (len(reader.seen), pieces.reads) == (3, [PIECE_BYTES])
    reader.turn()
    assert (len(reader.seen), pieces.reads) == (5, [PIECE_BYTES] * 2)


def test_a_large_message_is_read_in_large_pieces_and_copied_once() -> None:
    payload = bytes(3 * LARGE_BYTES)
    pieces = Pieces(publish(b"t", payload) + publish(b"u", b"next"))
    reader = Reader(pieces)
    assert reader.read_all() == [("t", payload, False, 0), ("u", b"next", False, 0)]
    assert pieces.reads[:2] == [PIECE_BYTES, LARGE_BYTES]
    assert len(pieces.reads) < 8


def test_what_tls_has_decrypted_is_asked_for() -> None:
    pieces = Pieces(publish(b"t", b"1"), publish(b"t", b"2"))
    hidden = [5, 0]
    pieces.pending = lambda: hidden.pop(0)  # type: ignore[attr-defined]
    reader = Reader(pieces)
    reader.turn()
    assert len(reader.seen) == 2


def test_the_end_and_errors_come_behind_what_was_said() -> None:
    reader = Reader(Pieces(publish(b"t", b"last") + b"\xd0\x00" + b"\x30\x09half", b""))
    for _ in range(2):
        reader.turn()
    assert reader.seen == [("t", b"last", False, 0), b"\xd0\x00"]
    assert reader.ended

    class Broken(Pieces):
        def recv(self, buffer_size: int) -> bytes:
            raise ConnectionResetError("reset")

    broken = Reader(Broken())
    with pytest.raises(ConnectionResetError):
        broken.turn()


def test_the_rest_is_the_sockets_own() -> None:
    pieces = Pieces()
    shortcut = Shortcut(pieces, lambda *_: None)
    assert (shortcut.fileno(), shortcut.send(b"ab"), pieces.sent) == (7, 2, b"ab")
