"""The msgpack encoding of messages between coordinator and nodes: ``FromNode``, ``ToNode`` and ``ToNodes``.

On the wire::

    {"node": "node-3", "incarnation": 17…, "type": "Quiesced", "body": {…}}              from a node
    {… the same …, "cause": "c-00042-a1b2"}                                              to a node
    {"compressed": false, "content": {"receivers": {"node-3": 17…, …}, "type": …, …}}    to several

A command to several nodes is sent to all of them, with the receivers' names. For 1,000 nodes these take 19
KiB, which the broker would send 1,000 times. So the message is compressed, in 0.2 ms, to 7 to 9 KiB, most
of it digits of incarnations.

The messages are plain dataclasses of the pure core, which knows no encoding. So the envelope holds the
type's name, and a registry maps it to the class. A Resume's body is packed (``plans``). Nothing is ever
unpickled: a payload can only become one of these values.
"""

import zlib
from typing import Any, get_args

import msgspec
from msgspec.structs import replace

from ftd.config.validation import NAME_PATTERN
from ftd.errors import WireError
from ftd.transport.wire.compression import LEVEL, decompress
from ftd.transport.wire.plans import pack, unpack
from ftd.transport.wire.profiles import problem_of_profile
from statemachine.messages.cluster import (
    Command,
    FromNode,
    Hello,
    Resume,
    Signal,
    ToNode,
    ToNodes,
)
from statemachine.messages.common import Prepared
from statemachine.messages.values import Counter

MAX_PAYLOAD_BYTES = 1024 * 1024
"""Largest payload from anybody but the coordinator, and of an event: signals, requests, states of nodes."""

MAX_COMMAND_BYTES = 8 * MAX_PAYLOAD_BYTES
"""Largest payload from the coordinator: commands, the cluster's state and answers. A Resume (``plans``) takes about
20 KiB for 1,000 devices, and more with ``held_parts`` under ZeRO-1; the state takes 250 to 1,000 bytes for each node.
"""


COMPRESS_COMMAND_FROM_BYTES = 1024
"""Size above which a command to several nodes is compressed."""

MAX_RECEIVERS = 65_536

VERSION_HINT = "is another version of ftd in use? install the same one on all hosts, the coordinator's first"


class _FromNode(msgspec.Struct, frozen=True, kw_only=True):
    node: str
    incarnation: Counter
    type: str
    body: msgspec.Raw


class _ToNode(_FromNode, frozen=True, kw_only=True):
    cause: str


class _ToNodes(msgspec.Struct, frozen=True, kw_only=True):
    receivers: dict[str, Counter]
    type: str
    body: msgspec.Raw
    cause: str


class _Compressed(msgspec.Struct, frozen=True, kw_only=True):
    compressed: bool
    content: bytes


class _SentFacts(msgspec.Struct, frozen=True):
    protocol: int = 0


class _SentHello(msgspec.Struct, frozen=True):
    """The part of a Hello that shows which fields the node really sent."""

    facts: _SentFacts


_SENT_HELLO = msgspec.msgpack.Decoder(_SentHello)
_ENCODER = msgspec.msgpack.Encoder()
_FROM_NODE = msgspec.msgpack.Decoder(_FromNode)
_TO_NODE = msgspec.msgpack.Decoder(_ToNode)
_TO_NODES = msgspec.msgpack.Decoder(_ToNodes)
_COMPRESSED = msgspec.msgpack.Decoder(_Compressed)
_SIGNALS: dict[str, msgspec.msgpack.Decoder[Any]] = {
    kind.__name__: msgspec.msgpack.Decoder(kind) for kind in get_args(Signal)
}
_REPEATED: dict[str, dict[bytes, Any]] = {"Quiesced": {}, "Resumed": {}}
"""Messages that many nodes send in identical form in answer to one command; each is decoded once. The keys
are the type and the body.
"""
_MAX_REPEATED, _MAX_REPEATED_BYTES = 512, 1024
_COMMANDS: dict[str, msgspec.msgpack.Decoder[Any]] = {
    kind.__name__: msgspec.msgpack.Decoder(bytes if kind is Resume else kind) for kind in get_args(Command)
}


def encode_from_node(message: FromNode) -> bytes:
    return _sized(
        _FromNode(
            node=message.node,
            incarnation=message.incarnation,
            type=type(message.signal).__name__,
            body=msgspec.Raw(_ENCODER.encode(message.signal)),
        ),
        MAX_PAYLOAD_BYTES,
    )


def encode_to_node(message: ToNode) -> bytes:
    return _sized(
        _ToNode(
            node=message.node,
            incarnation=message.incarnation,
            type=type(message.command).__name__,
            body=_BODIES.body(message.command),
            cause=message.cause,
        ),
        MAX_COMMAND_BYTES,
    )


def encode_to_nodes(message: ToNodes) -> bytes:
    """Encode a command to several nodes.

    :raises WireError: see ``encode_to_node``.
    """
    content = _sized(
        _ToNodes(
            receivers=dict(message.receivers),
            type=type(message.command).__name__,
            body=_BODIES.body(message.command),
            cause=message.cause,
        ),
        MAX_COMMAND_BYTES,
    )
    compressed = len(content) > COMPRESS_COMMAND_FROM_BYTES
    if compressed:
        content = zlib.compress(content, LEVEL)
    return _sized(_Compressed(compressed=compressed, content=content), MAX_COMMAND_BYTES)


class _Bodies:
    """The body that was encoded last: a command to a thousand nodes is one object, and its body is the same
    for all.
    """

    def __init__(self) -> None:
        self._of: Command | None = None
        self._body = msgspec.Raw()

    def body(self, command: Command) -> msgspec.Raw:
        if self._of is not command:
            packed = pack(command) if isinstance(command, Resume) else command
            self._body, self._of = msgspec.Raw(_ENCODER.encode(packed)), command
        return self._body


_BODIES = _Bodies()


def decode_from_node(payload: bytes, node: str | None = None) -> FromNode:
    """Decode a node's signal.

    :param node: the name in the topic on which it came.
    :raises WireError: it is oversized or malformed, has an unknown type or impossible numbers, or names
        another node than its topic.
    """
    envelope: _FromNode = decode_msgpack(_FROM_NODE, payload, "signal", MAX_PAYLOAD_BYTES)
    _check_node(envelope.node, node)
    repeated = _REPEATED.get(envelope.type)
    signal = repeated.get(body := bytes(envelope.body)) if repeated is not None else None
    if signal is None:
        signal = _signal(envelope)
        if repeated is not None and len(body) <= _MAX_REPEATED_BYTES:
            if len(repeated) >= _MAX_REPEATED:
                repeated.clear()
            repeated[body] = signal
    return FromNode(node=envelope.node, incarnation=envelope.incarnation, signal=signal)


def _signal(envelope: _FromNode) -> Any:
    signal = _body(_SIGNALS, envelope.type, envelope.body)
    if isinstance(signal, Hello) and not _SENT_HELLO.decode(envelope.body).facts.protocol:
        # The message has no protocol number, so it is older than that field, whose default would be our own
        # number.
        signal = replace(signal, facts=replace(signal.facts, protocol=0))
    _check_contents(signal)
    return signal


def decode_to_node(payload: bytes, node: str | None = None) -> ToNode:
    """Decode a command to ``node``.

    :raises WireError: see ``decode_from_node``.
    """
    envelope: _ToNode = decode_msgpack(_TO_NODE, payload, "command", MAX_COMMAND_BYTES)
    _check_node(envelope.node, node)
    command = _command(envelope.type, envelope.body)
    return ToNode(node=envelope.node, incarnation=envelope.incarnation, command=command, cause=envelope.cause)


def decode_to_nodes(payload: bytes) -> ToNodes:
    """Decode a command to several nodes.

    :raises WireError: see ``decode_from_node``.
    """
    envelope: _Compressed = decode_msgpack(_COMPRESSED, payload, "command", MAX_COMMAND_BYTES)
    content = (
        decompress(envelope.content, MAX_COMMAND_BYTES, "a command")
        if envelope.compressed
        else envelope.content
    )
    inner: _ToNodes = decode_msgpack(_TO_NODES, content, "command", MAX_COMMAND_BYTES)
    if not 1 <= len(inner.receivers) <= MAX_RECEIVERS:
        raise WireError(f"a command to {len(inner.receivers)} nodes; 1 to {MAX_RECEIVERS} are allowed")
    for name in inner.receivers:
        _check_node(name, name)
    return ToNodes(receivers=inner.receivers, command=_command(inner.type, inner.body), cause=inner.cause)


def _command(name: str, body: msgspec.Raw) -> Any:
    command = _body(_COMMANDS, name, body)
    if name == Resume.__name__:
        command = _unpacked(command)
    _check_contents(command)
    return command


def check_not_retained(retained: bool) -> None:
    """Check that a command was not retained by the broker, and thus outdated.

    :raises WireError: the command was retained.
    """
    if retained:
        raise WireError("a retained command; commands are never retained")


def check_size(payload: bytes, max_bytes: int = MAX_PAYLOAD_BYTES) -> None:
    """Check a payload's size.

    :raises WireError: the payload has more than ``max_bytes``.
    """
    if len(payload) > max_bytes:
        raise WireError(f"payload of {len(payload)} bytes; at most {max_bytes} are allowed")


def _sized(envelope: msgspec.Struct, max_bytes: int) -> bytes:
    payload = _ENCODER.encode(envelope)
    check_size(payload, max_bytes)
    return payload


def decode_msgpack(decoder: msgspec.msgpack.Decoder[Any], payload: bytes, what: str, max_bytes: int) -> Any:
    """Decode a payload of at most ``max_bytes``.

    :param what: names the message in an error.
    :raises WireError: it is oversized or malformed.
    """
    check_size(payload, max_bytes)
    try:
        return decoder.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise WireError(f"malformed {what}: {error}") from None


def _body(registry: dict[str, msgspec.msgpack.Decoder[Any]], name: str, body: msgspec.Raw) -> Any:
    decoder = registry.get(name)
    if decoder is None:
        raise WireError(f"unknown message type {name[:40]!r}; {VERSION_HINT}")
    try:
        return decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise WireError(f"malformed {name}: {error}; {VERSION_HINT}") from None


def _unpacked(packed: bytes) -> Resume:
    try:
        return unpack(packed)
    except (WireError, ValueError, msgspec.DecodeError, RecursionError) as error:
        raise WireError(f"malformed Resume: {error}; {VERSION_HINT}") from None


def _check_node(claimed: str, topic: str | None) -> None:
    if topic is not None and claimed != topic:
        raise WireError(f"a message on {topic[:64]!r}'s topic claims to be {claimed[:64]!r}'s")
    if topic is not None and not NAME_PATTERN.fullmatch(claimed):
        raise WireError(f"{claimed[:64]!r} is not the name of a node")


def _check_contents(message: Any) -> None:
    """Check what types cannot express.

    :raises WireError: a part of the state, a profile or the name of a node is impossible.
    """
    kind = type(message).__name__
    for report in getattr(message, "reports", ()):
        for held in report.parts:
            if held.layer < 0 or not 0 <= held.start < held.end <= held.of:
                raise WireError(f"malformed {kind}: there is no {held}")
    profile = message.profile if isinstance(message, Prepared) else None
    if profile is not None and (problem := problem_of_profile(profile)) is not None:
        raise WireError(f"malformed {kind}: its profile's {problem}")
    health = getattr(message, "health", None) or getattr(message, "report", None)
    for link in () if health is None else health.links:
        _check_node(link.node, link.node)
