"""Messages among the coordinators of one cluster: who leads, who is there, and the leader's journal.

The journal is msgpack, since only coordinators read it; the others are JSON, which people can read.
"""

import msgspec
from msgspec.structs import asdict

from ftd.errors import WireError
from ftd.transport.wire.codec import MAX_COMMAND_BYTES, check_size, decode_msgpack
from ftd.transport.wire.compression import IncrementalCompressor, decompress
from ftd.transport.wire.public import SCHEMA, decode_json, encode_json
from ftd.transport.wire.states import ClusterUnreachable
from statemachine.election.leadership import Leader, Peer

MAX_COPY_BYTES = MAX_COMMAND_BYTES
"""Largest journal on its topic."""
MAX_STATE_BYTES = 8 * MAX_COPY_BYTES
"""Largest decompressed state: several times what a journal may take on its topic, because a coordinator that cannot
read what it wrote does not start again.
"""
COMPRESS_FROM_BYTES = 64 * 1024
"""Size above which a durable state is compressed: it is written and published with each step that is reported."""
_ZLIB_HEADER = b"\x78\x01"
"""First bytes of a compressed state; the msgpack of a state, which is a map, does not begin with them."""


def state_compressor() -> IncrementalCompressor:
    """Return a compressor for successive durable states, for the journal file and the broker."""
    return IncrementalCompressor(COMPRESS_FROM_BYTES)


def is_compressed(encoded: bytes) -> bool:
    return encoded.startswith(_ZLIB_HEADER)


def decompress_state(encoded: bytes) -> bytes:
    """Return the plain state.

    :raises WireError: it cannot be decompressed, or is too large.
    """
    return decompress(encoded, MAX_STATE_BYTES, "a durable state") if is_compressed(encoded) else encoded


class LeaderMessage(Leader, frozen=True, kw_only=True):
    """The coordinator that leads, on ``coordinator/leader`` and, while it leads, on ``coordinator/heartbeat``."""

    version: str = ""
    schema: int = SCHEMA


class PeerMessage(Peer, frozen=True, kw_only=True):
    """A coordinator that is there, whether it leads or not."""

    version: str = ""
    departed: bool = False
    """Whether the coordinator has left: its last will."""
    schema: int = SCHEMA


class JournalCopy(msgspec.Struct, frozen=True, kw_only=True):
    """The leader's durable state, and the time of its writing on both of its host's clocks."""

    term: int
    serial: int
    """Number of states written under this term."""
    wall_s: float
    monotonic_s: float
    version: str
    schema: int
    """Schema of ``state``."""
    state: bytes
    """The encoded state; see ``state_compressor``."""
    compressed: bool = False
    """Whether ``state`` is compressed, which its first bytes show as well."""
    protocol: int = 0
    """Protocol of the writer's nodes; 0: unknown."""

    @property
    def position(self) -> tuple[int, int]:
        return (self.term, self.serial)


_JOURNAL_COPY = msgspec.msgpack.Decoder(JournalCopy)


def encode_leader(leader: Leader, version: str) -> bytes:
    return encode_json(LeaderMessage(**asdict(leader), version=version))


def decode_leader(payload: bytes) -> Leader:
    """Decode the record of a leader.

    :raises WireError: the payload is not the record of a leader.
    """
    message = decode_json(payload, LeaderMessage)
    if message.term < 1:
        raise WireError(f"a leader's term is {message.term}")
    return Leader(term=message.term, name=message.name, incarnation=message.incarnation)


def encode_peer(peer: Peer, version: str, *, departed: bool = False) -> bytes:
    return encode_json(PeerMessage(**asdict(peer), version=version, departed=departed))


def encode_unreachable(reason: str, *, incarnation: int, graceful: bool) -> bytes:
    """Encode the cluster's state for when nobody leads. ``incarnation`` is the last leader's."""
    return encode_json(
        ClusterUnreachable(
            schema=SCHEMA,
            phase="UNREACHABLE",
            reason=reason,
            nodes={},
            coordinator=incarnation,
            graceful=graceful,
        )
    )


def encode_copy(copy: JournalCopy) -> bytes:
    """Encode a journal.

    :raises WireError: it is too large for the broker.
    """
    payload = msgspec.msgpack.encode(copy)
    check_size(payload, MAX_COPY_BYTES)
    return payload


def decode_copy(payload: bytes) -> JournalCopy:
    """Decode a journal.

    :raises WireError: the payload is not a journal.
    """
    copy: JournalCopy = decode_msgpack(_JOURNAL_COPY, payload, "journal", MAX_COPY_BYTES)
    if copy.term < 0 or copy.serial < 0:
        raise WireError(f"malformed journal: its position is {copy.position}")
    return copy
