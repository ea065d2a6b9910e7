"""The JSON messages that other tools read and write: states, events, requests, answers, chaos.

These structs are the contract. Readers ignore unknown fields, so that a field can be added without a new
``schema``. Requests reject unknown fields, because acting on a request that is only half understood is
dangerous.
"""

import secrets
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, Literal

import msgspec

from ftd.errors import WireError
from ftd.transport.wire.catalogue import Severity, severity_of
from ftd.transport.wire.codec import MAX_PAYLOAD_BYTES, check_size
from planner.values import RequestedPolicy
from statemachine.effects import EmitEvent
from statemachine.messages.values import (
    CheckpointOptions,
    LoggingPolicy,
    MlflowPolicy,
    NodeState,
    WandbPolicy,
)

SCHEMA = 2


def timestamp(*, ago_s: float = 0.0) -> str:
    """Return the time now, or ``ago_s`` seconds ago: ISO-8601 in UTC with milliseconds."""
    at = datetime.now(UTC) - timedelta(seconds=ago_s)
    return at.isoformat(timespec="milliseconds").replace("+00:00", "Z")


class NodeStateMessage(msgspec.Struct, frozen=True, kw_only=True):
    """A node's state, retained on ``node/<node>/state``; with state OFFLINE it is the node's last will."""

    node: str
    incarnation: int
    state: NodeState
    generation: int
    step: int
    reason: str
    at: str
    devices: int
    host: str
    graceful: bool = False
    """OFFLINE on purpose: the node left, and nothing failed."""
    schema: int = SCHEMA


class ClusterStateHeader(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of the cluster's state that coordinators need; the rest of it takes long to decode with a
    thousand nodes.
    """

    phase: Any = None
    coordinator: Any = None
    graceful: Any = None


class EventMessage(msgspec.Struct, frozen=True, kw_only=True):
    """A fact, published on ``events``; ``monotonic`` is CLOCK_MONOTONIC of the publishing host, in seconds."""

    event: str
    node: str | None
    generation: int | None
    step: int | None
    reason: str
    at: str
    monotonic: float
    cause: str
    details: dict[str, Any]
    source: str = ""
    """``coordinator`` for the coordinator's own events; for others, the publisher, such as ``node/<node>``."""
    id: str = ""
    """Unique id of the event: QoS 1 may deliver it twice. It is empty in events of old versions."""
    severity: Severity = "info"
    """Severity by the event's name (``ftd.transport.wire.catalogue``)."""
    schema: int = SCHEMA


class PolicyData(RequestedPolicy, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The policy of a submitted job: ``planner.values.Policy`` without what the cluster and ``training``
    determine.
    """

    devices_per_node: int | None = None
    """Devices of each node; ``None``: as many as the nodes of the cluster have."""


class SnapshotData(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``[snapshot]``: the state in the nodes' memory, for when too few live replicas are left."""

    every_steps: int | Literal["auto"] = 0
    """Steps from one snapshot in the nodes' memory to the next; 0: none; auto: according to their cost."""
    protection: Annotated[str | None, msgspec.Meta(examples=["auto"])] = None
    """none, arc:k, aec, aec2, aor, buddy, joined by ``+`` (``storage.codes``), or auto: the cheapest that
    withstands ``tolerance.failures``; default: aec, or aor with zero1.
    """
    cheap_share: float = 0.01
    """Share of a step: with auto, a snapshot that costs no more is taken after every step."""


class CheckpointData(CheckpointOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``[checkpoint]``: the state on a disk, for when no memory holds it; needs ``[snapshot]``."""

    every_steps: int | Literal["auto"] = 0
    """Write the first snapshot that is so many steps after the last checkpoint as a checkpoint; auto: according to
    what a checkpoint costs, and to how often memory is expected to lose the state.
    """


class WandbData(WandbPolicy, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``[logging] wandb = {…}``."""


class MlflowData(MlflowPolicy, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``[logging] mlflow = {…}``."""


class LoggingData(LoggingPolicy, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``[logging]``: where the leading coordinator logs the committed steps, in addition to its journal."""

    wandb: WandbData | None = None
    mlflow: MlflowData | None = None


class JobData(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A job as it is submitted: the tables of its file, with absolute paths.

    ``training`` is statemachine.messages.trainer.TrainingData.
    """

    name: str
    steps: int
    policy: PolicyData
    training: dict[str, Any]
    horizon_s: float | None = None
    """Expected time to the next failure; None: the coordinator learns it from the job's failures."""
    snapshot: SnapshotData = SnapshotData()
    checkpoint: CheckpointData = CheckpointData()
    logging: LoggingData = LoggingData()
    profile: dict[str, Any] | None = None
    """``planner.values.ModelProfile``; None: a node measures the layers."""


class Request(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="do"):
    """Base of all requests. ``request`` is chosen by the client: a request id is served once."""

    request: str
    reply: str
    """Client id; the answer is published on ``reply/<client id>``."""
    schema: int = SCHEMA


class SubmitRequest(Request, frozen=True, kw_only=True, tag="submit"):
    job: JobData


class StopRequest(Request, frozen=True, kw_only=True, tag="stop"):
    job: str
    """Id or name."""


class DrainRequest(Request, frozen=True, kw_only=True, tag="drain"):
    """Request that a node leaves. It is rejected if there is no plan without the node."""

    node: str
    when_possible: bool = False
    """Wait until there is a plan without the node."""
    cancel: bool = False
    """Let the node stay: cancel the drain that was requested before."""


class ReadmitRequest(Request, frozen=True, kw_only=True, tag="readmit"):
    """Request to let a node that was set aside (``NodeQuarantined``) take part again."""

    node: str


class SnapshotRequest(Request, frozen=True, kw_only=True, tag="snapshot"):
    """Request that changes the given values from the next step on."""

    now: bool = False
    """Take a snapshot after the step in flight. The answer comes when it is complete, or cannot be taken."""
    every_steps: int | Literal["auto"] | None = None
    """0: no snapshots at present."""
    protection: str | None = None
    """A scheme of ``storage.codes``, or auto."""


class StatusRequest(Request, frozen=True, kw_only=True, tag="status"):
    """Request for the public state, which is ``data`` of the answer, even if none is retained yet."""


class HistoryRequest(Request, frozen=True, kw_only=True, tag="history"):
    """A page of the journal: events (all but steps) or committed steps, oldest first.

    ``after`` is the ``last`` of the previous page. With ``newest`` the page is the end of the journal.
    """

    what: Literal["events", "steps"] = "events"
    after: int = 0
    limit: int = 200
    newest: bool = False


AnyRequest = (
    SubmitRequest
    | StopRequest
    | DrainRequest
    | ReadmitRequest
    | SnapshotRequest
    | StatusRequest
    | HistoryRequest
)


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """An answer on ``reply/<client id>``; ``detail`` is a sentence, ``data`` what was requested."""

    request: str
    accepted: bool
    detail: str
    outcome: str = ""
    """Consequence of an accepted request to drain a node: ``leaving`` (at the next step boundary),
    ``waiting`` (until there is a plan without it), ``released`` (it may be stopped) or ``cancelled``; of one to
    take a snapshot now: ``complete``, or ``under way`` if it takes long.
    """
    data: dict[str, Any] | None = None
    schema: int = SCHEMA


NodeFault = Literal[
    "kill",
    "term",
    "stop",
    "hang",
    "raise",
    "slow",
    "flip",
    "corrupt",
    "bad_device",
    "disconnect",
    "lossy",
    "fill_memory",
    "fill_disk",
]
"""Faults that a node injects into itself when it is asked over MQTT."""
BadDevice = Literal["wrong", "slow", "hung"]
"""Behaviour of a bad device in the tests of health checks."""


class ChaosRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Order for a fault, on ``chaos/<node>``. The node obeys it only if its configuration has ``chaos =
    true``.
    """

    request: str
    reply: str
    do: NodeFault
    target: Literal["node", "trainer"] = "node"
    device: int | None = None
    """Device of one trainer; default: all trainers of the node."""
    for_s: float | None = None
    factor: float | None = None
    """Factor by which computing takes longer (``slow``); 1 ends the fault."""
    size_mib: int | None = None
    """Maximum to fill (``fill_memory`` and ``fill_disk``)."""
    drop: float | None = None
    duplicate: float | None = None
    """Probability that a message between this node and the coordinator arrives twice (``lossy``); ``drop``:
    not at all.
    """
    late_s: float | None = None
    """Longest delay of a message (``lossy``)."""
    how: BadDevice | None = None
    """Behaviour of the device in health checks (``bad_device``); default: wrong."""
    seed: int = 0
    """Seed of the fault's random numbers (``lossy``)."""
    dry_run: bool = False
    """Whether to inject nothing and only answer if this node could and would."""
    schema: int = SCHEMA


class TraceRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Request for a trace of one trainer during some steps, on ``trace/<node>``; ``data`` of the answer is
    ``TraceData``.
    """

    request: str
    reply: str
    device: int = 0
    first_step: int = 0
    """First step of the trace; if it is over, the trace begins with the next step."""
    steps: int = 5
    within_s: float = 60.0
    """Time after which the request fails if the steps are not over."""
    schema: int = SCHEMA


class TraceData(msgspec.Struct, frozen=True, kw_only=True):
    """A trace. Spans are ``[kind, began_us, took_us, number, size_bytes]`` (``runtime.monitoring.tracing``)."""

    node: str
    device: int
    rank: int
    generation: int
    dropped: int
    spans: list[tuple[str, int, int, int, int]]


_ENCODER = msgspec.json.Encoder()
_DECODERS: dict[Any, msgspec.json.Decoder[Any]] = {}


def encode_json(value: Any) -> bytes:
    """Encode a struct or plain data as JSON; a number that is not finite becomes null."""
    return _ENCODER.encode(value)


def encode_document(value: Any) -> bytes:
    """Encode a struct or plain data as an indented JSON document with a newline at its end."""
    return msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n"


def decode_json(payload: bytes, into: Any, max_bytes: int = MAX_PAYLOAD_BYTES) -> Any:
    """Decode ``payload``, of at most ``max_bytes``, as ``into``: a struct, a union of tagged structs, or ``dict``.

    :raises WireError: it is oversized or malformed; the message names the field.
    """
    check_size(payload, max_bytes)
    decoder = _DECODERS.get(into)
    if decoder is None:
        decoder = _DECODERS[into] = msgspec.json.Decoder(into)
    try:
        return decoder.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise WireError(f"malformed JSON message: {error}") from None


def event_message(
    effect: EmitEvent, *, monotonic: float, suppressed: int = 0, source: str = ""
) -> EventMessage:
    """Return the message for an ``EmitEvent``; ``suppressed`` similar ones were not published
    (``EventRateLimiter``).
    """
    details = dict(effect.details)
    if suppressed:
        details["suppressed"] = suppressed
    return EventMessage(
        event=effect.name,
        node=effect.node,
        generation=effect.generation,
        step=effect.step,
        reason=effect.reason,
        at=timestamp(),
        monotonic=monotonic,
        cause=effect.cause,
        details=details,
        source=source,
        id=f"e-{secrets.token_hex(8)}",
        severity=severity_of(effect.name),
    )
