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
from msgspec.structs import fields, replace

from ftd.config.validation import NAME_PATTERN
from ftd.errors import WireError
from ftd.transport.wire.compression import LEVEL, decompress
from ftd.transport.wire.plans import pack, unpack
from ftd.transport.wire.profiles import problem_of_profile
from statemachine.messages.cluster import (
    Command,
    FromNode,
    HealthChecked,
    Hello,
    Resume,
    Signal,
    ToNode,
    ToNodes,
)
from statemachine.messages.common import Prepared
from statemachine.messages.values import (
    MAX_METRIC_NAME_CHARACTERS,
    MAX_METRICS,
    Evaluation,
    HealthReport,
    Vote,
)

MAX_PAYLOAD_BYTES = 1024 * 1024
"""Largest payload from anybody but the coordinator: signals, requests, events, states."""

MAX_COMMAND_BYTES = 8 * MAX_PAYLOAD_BYTES
"""Largest payload from the coordinator to nodes. A Resume (``plans``) takes about 20 KiB for 1,000 devices,
and more with ``held_parts`` under ZeRO-1.
"""


COMPRESS_COMMAND_FROM_BYTES = 1024
"""Size above which a command to several nodes is compressed."""

MAX_RECEIVERS = 65_536

MAX_DEVICES = 4096
"""Most devices of a node."""
MAX_LINKS = 16
MAX_HEALTH_CHARACTERS = 500
"""Most links, and most characters of a text, in the result of a health check."""

MAX_COUNTER = 2**53
"""Largest value of any counter: what every reader of JSON, and the journal, can hold."""


VERSION_HINT = "is another version of ftd in use? install the same one on all hosts, the coordinator's first"
MAX_DURATION_S = 1e9
"""Largest duration."""


class _FromNode(msgspec.Struct, frozen=True, kw_only=True):
    node: str
    incarnation: int
    type: str
    body: msgspec.Raw


class _ToNode(_FromNode, frozen=True, kw_only=True):
    cause: str


class _ToNodes(msgspec.Struct, frozen=True, kw_only=True):
    receivers: dict[str, int]
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
    _check_numbers(signal)
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
    for name, incarnation in inner.receivers.items():
        if not NAME_PATTERN.fullmatch(name):
            raise WireError(f"{name[:64]!r} is not the name of a node")
        if not 0 <= incarnation <= MAX_COUNTER:
            raise WireError(f"malformed command: the incarnation of {name!r} is {incarnation}")
    return ToNodes(receivers=inner.receivers, command=_command(inner.type, inner.body), cause=inner.cause)


def _command(name: str, body: msgspec.Raw) -> Any:
    command = _body(_COMMANDS, name, body)
    if name == Resume.__name__:
        command = _unpacked(command)
    _check_numbers(command)
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


_LIMITED: dict[type, tuple[tuple[str, float], ...]] = {
    kind: tuple(
        (field.name, MAX_COUNTER if field.type is int else MAX_DURATION_S)
        for field in fields(kind)
        if field.type is int or (field.type is float and field.name.endswith("_s"))
    )
    for kind in (*get_args(Signal), *get_args(Command))
}
"""Counts and durations of each message, and their largest values."""


def _check_numbers(message: Any) -> None:
    """Check what types cannot express: no counter is negative, or too large for some reader."""
    for name, most in _LIMITED[type(message)]:
        if not 0 <= (value := getattr(message, name)) <= most:
            raise WireError(f"malformed {type(message).__name__}: {name} is {value}")
    committed = getattr(message, "committed", None)
    for committed_step in (*getattr(message, "steps", ()), *((committed,) if committed is not None else ())):
        if not 0 <= committed_step.step <= MAX_COUNTER:
            raise WireError(f"malformed {type(message).__name__}: step is {committed_step.step}")
        _check_vote(message, committed_step.vote)
    _check_vote(message, getattr(message, "vote", None))
    _check_evaluation(message, getattr(message, "evaluation", None))
    if not all(0 <= value < float("inf") for value in getattr(message, "microbatch_ms", None) or ()):
        raise WireError(f"malformed {type(message).__name__}: microbatch_ms is {message.microbatch_ms}")
    for report in getattr(message, "reports", ()):
        _check_vote(message, report.vote)
        _check_evaluation(message, report.evaluation)
        for held in report.parts:
            if held.layer < 0 or not 0 <= held.start < held.end <= held.of:
                raise WireError(f"malformed {type(message).__name__}: there is no {held}")
    profile = message.profile if isinstance(message, Prepared) else None
    if profile is not None and (problem := problem_of_profile(profile)) is not None:
        raise WireError(f"malformed Prepared: its profile's {problem}")
    if isinstance(message, HealthChecked):
        _check_health(message, message.report)
    if isinstance(message, Hello):
        facts = message.facts
        if message.health is not None:
            _check_health(message, message.health)
        if not 1 <= facts.devices <= MAX_DEVICES:
            raise WireError(f"malformed Hello: {facts.devices} devices; 1 to {MAX_DEVICES} are allowed")
        if not 0 <= facts.rendezvous_port <= 65535:
            raise WireError(f"malformed Hello: rendezvous_port is {facts.rendezvous_port}")
        if not 0 <= facts.snapshot_port <= 65535:
            raise WireError(f"malformed Hello: snapshot_port is {facts.snapshot_port}")


def _check_health(message: Any, report: HealthReport) -> None:
    """Check the result of a health check, whose speeds are compared with those of other nodes.

    :raises WireError: a number is negative or not finite, a text is too long, or there are too many results.
    """
    kind = type(message).__name__
    if not 0 <= report.number <= MAX_COUNTER:
        raise WireError(f"malformed {kind}: number is {report.number}")
    if not (1 <= len(report.devices) <= MAX_DEVICES and len(report.links) <= MAX_LINKS):
        raise WireError(f"malformed {kind}: {len(report.devices)} devices and {len(report.links)} links")
    for device in report.devices:
        if not (0 <= device.compute_gflops < float("inf") and 0 <= device.memory_gb_s < float("inf")):
            raise WireError(f"malformed {kind}: there is no {device}")
        if max(map(len, (device.kind, device.wrong, device.failed))) > MAX_HEALTH_CHARACTERS:
            raise WireError(f"malformed {kind}: a text has more than {MAX_HEALTH_CHARACTERS} characters")
    for link in report.links:
        if not (0 <= link.latency_ms < float("inf") and 0 <= link.mb_s < float("inf")):
            raise WireError(f"malformed {kind}: there is no {link}")
        _check_node(link.node, link.node)


def _check_vote(message: Any, vote: Vote | None) -> None:
    """Check the metrics of a vote.

    :raises WireError: there are more metrics than a step may have, or the name of one is too long.
    """
    if vote is not None:
        _check_metrics(message, vote.metrics)
        _check_evaluation(message, vote.evaluation)


def _check_evaluation(message: Any, evaluation: Evaluation | None) -> None:
    if evaluation is None:
        return
    _check_metrics(message, evaluation.metrics)
    if not 0 <= evaluation.took_s <= MAX_DURATION_S:
        raise WireError(f"malformed {type(message).__name__}: an evaluation took {evaluation.took_s} s")


def _check_metrics(message: Any, metrics: dict[str, float]) -> None:
    kind, most = type(message).__name__, MAX_METRICS
    if len(metrics) > most:
        raise WireError(f"malformed {kind}: {len(metrics)} metrics; at most {most} are allowed")
    for name in metrics:
        if not 1 <= len(name) <= MAX_METRIC_NAME_CHARACTERS:
            raise WireError(
                f"malformed {kind}: a metric's name has {len(name)} characters; "
                f"1 to {MAX_METRIC_NAME_CHARACTERS} are allowed"
            )
