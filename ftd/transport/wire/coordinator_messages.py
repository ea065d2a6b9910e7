"""What coordinators of one cluster tell each other: who leads, who is there, and the leader's journal.

The journal's topic is our own, so it is msgpack; the others are JSON, for people who look.
"""

import msgspec

from ftd.errors import WireError
from ftd.transport.wire.codec import MAX_COMMAND_BYTES, check_size
from ftd.transport.wire.compression import decompress
from ftd.transport.wire.incremental_compression import IncrementalCompressor
from ftd.transport.wire.public import SCHEMA, decode_json, encode_json
from statemachine.election.leadership import Leader, Peer

MAX_COPY_BYTES = MAX_COMMAND_BYTES
"""Of a journal on its topic, and of what it may unfold to."""
COMPRESS_FROM_BYTES = 64 * 1024
"""A larger durable state is compressed: it is written, and goes out, with each step that is told."""
_DEFLATED = b"\x78\x01"
"""What is compressed begins so; the msgpack of a state, which is a map, does not."""


def state_compressor() -> IncrementalCompressor:
    """Of durable states, one after the other, as they are kept, here and at the broker."""
    return IncrementalCompressor(COMPRESS_FROM_BYTES)


def is_compressed(kept: bytes) -> bool:
    return kept.startswith(_DEFLATED)


def decompress_state(kept: bytes) -> bytes:
    """:raises WireError: it cannot be, or is too large."""
    return decompress(kept, MAX_COPY_BYTES, "a durable state") if is_compressed(kept) else kept


class LeaderMessage(msgspec.Struct, frozen=True, kw_only=True):
    """The coordinator that leads, on ``coordinator/leader`` and, for as long as it does, on ``…/beat``."""

    term: int
    name: str
    incarnation: int
    version: str = ""
    schema: int = SCHEMA


class PeerMessage(msgspec.Struct, frozen=True, kw_only=True):
    """A coordinator that is there, leading or ready to."""

    name: str
    incarnation: int
    priority: int = 0
    position: tuple[int, int] = (0, 0)
    """Term and number of the newest state that it keeps."""
    version: str = ""
    ineligible: str = ""
    """Why it must not lead; empty: it would."""
    departed: bool = False
    """It is not there any more: its last will."""
    schema: int = SCHEMA


class JournalCopy(msgspec.Struct, frozen=True, kw_only=True):
    """The leader's durable state, and when it was written on both of its host's clocks."""

    term: int
    serial: int
    """Counts the states written under this term."""
    wall_s: float
    monotonic_s: float
    version: str
    schema: int
    """Of ``state``."""
    state: bytes
    """As it is kept: see ``state_compressor``."""
    compressed: bool = False
    """Which one sees; older versions ask."""
    protocol: int = 0
    """That the writer's nodes speak; 0: it did not say."""

    @property
    def position(self) -> tuple[int, int]:
        return (self.term, self.serial)


def encode_leader(leader: Leader, version: str) -> bytes:
    return encode_json(
        LeaderMessage(term=leader.term, name=leader.name, incarnation=leader.incarnation, version=version)
    )


def decode_leader(payload: bytes) -> Leader:
    """:raises WireError: it is no record of a leader."""
    message = decode_json(payload, LeaderMessage)
    if message.term < 1:
        raise WireError(f"a leader's term is {message.term}")
    return Leader(term=message.term, name=message.name, incarnation=message.incarnation)


def encode_peer(peer: Peer, version: str, *, departed: bool = False) -> bytes:
    return encode_json(
        PeerMessage(
            name=peer.name,
            incarnation=peer.incarnation,
            priority=peer.priority,
            position=peer.position,
            version=version,
            ineligible=peer.ineligible,
            departed=departed,
        )
    )


def encode_unreachable(reason: str, *, incarnation: int, graceful: bool) -> bytes:
    """The cluster's state where nobody leads. ``incarnation``: of who did."""
    return encode_json(
        {
            "schema": SCHEMA,
            "phase": "UNREACHABLE",
            "reason": reason,
            "nodes": {},
            "coordinator": incarnation,
            "graceful": graceful,
        }
    )


def encode_copy(copy: JournalCopy) -> bytes:
    """:raises WireError: it is too large to be kept at the broker."""
    payload = msgspec.msgpack.encode(copy)
    check_size(payload, MAX_COPY_BYTES)
    return payload


def decode_copy(payload: bytes) -> JournalCopy:
    """:raises WireError: it is no journal."""
    check_size(payload, MAX_COPY_BYTES)
    try:
        copy = msgspec.msgpack.decode(payload, type=JournalCopy)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise WireError(f"malformed journal: {error}") from None
    if copy.term < 0 or copy.serial < 0:
        raise WireError(f"malformed journal: its position is {copy.position}")
    return copy
