"""The wire encoding: every message is decoded as it was, and nothing else is accepted."""

import itertools
import re
import zlib
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ftd.config.profile_document import MAX_BYTES_PER_S, MAX_LAYERS
from ftd.errors import WireError
from ftd.transport.wire import codec
from ftd.transport.wire.codec import (
    MAX_COMMAND_BYTES,
    MAX_PAYLOAD_BYTES,
    MAX_RECEIVERS,
    decode_from_node,
    decode_to_node,
    decode_to_nodes,
    encode_from_node,
    encode_to_node,
    encode_to_nodes,
)
from ftd.transport.wire.plans import pack
from ftd.transport.wire.public import (
    Answer,
    AnyRequest,
    ChaosRequest,
    DrainRequest,
    EventMessage,
    HistoryRequest,
    NodeStateMessage,
    StatusRequest,
    StopRequest,
    decode_json,
    encode_json,
    event_message,
)
from ftd.transport.wire.topics import Topics
from planner.values import (
    Device,
    LayerProfile,
    Link,
    ModelProfile,
    PipelinePlacement,
    Plan,
    Policy,
    Recomputation,
    ReleasedLayers,
    SplitTime,
    StagePlacement,
    StatePart,
    TensorSplit,
    Transfer,
)
from runtime.wire.measurement import MAX_BYTES, MAX_COUNT, MAX_DEVICES, MAX_MS
from statemachine.agent.commands import STEPS_PER_MESSAGE
from statemachine.effects import EmitEvent
from statemachine.messages.cluster import (
    Acknowledgement,
    Command,
    FromNode,
    Heartbeat,
    Hello,
    Prepare,
    Quiesced,
    Resume,
    Signal,
    Stepped,
    ToNode,
    ToNodes,
)
from statemachine.messages.common import Prepared, Quiesce
from statemachine.messages.values import (
    MAX_METRIC_NAME_CHARACTERS,
    MAX_METRICS,
    BuildProgress,
    BuildStage,
    CommittedStep,
    Counter,
    DeviceHealth,
    DeviceReport,
    Duration,
    Evaluation,
    HealthReport,
    HeldPart,
    HeldSnapshot,
    Job,
    LayerFile,
    LinkHealth,
    Measured,
    NodeActivity,
    NodeFacts,
    NodeState,
    ReplicaPeer,
    Restore,
    Snapshot,
    SnapshotGroup,
    SnapshotPolicy,
    Vote,
)

numbers = st.integers(min_value=0, max_value=2**53)
reals = st.floats(allow_nan=False)
names = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,11}", fullmatch=True)
texts = st.text(max_size=40)
metrics = st.dictionaries(st.text(min_size=1, max_size=MAX_METRIC_NAME_CHARACTERS), reals, max_size=3)
evaluations = st.builds(
    Evaluation, loss=reals, weight=reals, metrics=metrics, took_s=st.floats(min_value=0, max_value=1e9)
)
votes = st.builds(
    Vote,
    loss=reals,
    gradient_norm=reals,
    skipped=st.booleans(),
    weight=reals,
    loss_scale=reals,
    learning_rate=reals,
    metrics=metrics,
    evaluation=st.none() | evaluations,
)
steps = st.builds(CommittedStep, step=numbers, vote=votes)
parts = st.lists(st.integers(0, 64), min_size=3, max_size=3, unique=True).flatmap(
    lambda bounds: st.builds(
        StatePart,
        layer=numbers,
        start=st.just(sorted(bounds)[0]),
        end=st.just(sorted(bounds)[1]),
        of=st.just(sorted(bounds)[2]),
        replica=st.booleans(),
    )
)
reports = st.builds(
    DeviceReport,
    device=numbers,
    committed_step=numbers,
    ready_step=st.none() | numbers,
    vote=st.none() | votes,
    held=st.lists(numbers, max_size=4).map(tuple),
    lineage=numbers,
    parts=st.lists(parts, max_size=3).map(tuple),
    evaluation=st.none() | evaluations,
)
LAYER_NUMBERS = [
    name for name in LayerProfile.__struct_fields__ if name not in ("split", "tensor", "full", "selective")
]
times, sizes = st.floats(0, MAX_MS), st.integers(0, MAX_BYTES)
splits = st.builds(
    SplitTime,
    devices=st.integers(2, MAX_DEVICES),
    forward_ms=times,
    backward_ms=times,
    activation_bytes=st.none() | sizes,
)
tensor_splits = st.builds(
    TensorSplit,
    **{
        name: st.integers(0, MAX_LAYERS) if name.endswith("_exchanges") else sizes
        for name in TensorSplit.__struct_fields__
    },
)
recomputations = st.builds(Recomputation, activation_bytes=sizes, recompute_ms=times)
layers = st.builds(
    LayerProfile,
    **{name: times if name.endswith("_ms") else sizes for name in LAYER_NUMBERS},
    full=st.none() | recomputations,
    selective=st.none() | recomputations,
    tensor=st.none() | tensor_splits,
    split=st.lists(splits, max_size=2).map(tuple),
)
links = st.builds(Link, latency_ms=times, bytes_per_s=st.floats(1, MAX_BYTES_PER_S))
profiles = st.builds(
    ModelProfile,
    layers=st.lists(layers, min_size=1, max_size=3).map(tuple),
    microbatch_rows=st.integers(1, MAX_COUNT),
    tensor_counts=st.lists(st.tuples(st.just("heads"), st.integers(1, MAX_COUNT)), max_size=2).map(tuple),
    device_memory_bytes=st.none() | st.integers(1, MAX_BYTES),
    stage_devices=st.none()
    | st.sets(st.integers(1, MAX_DEVICES), min_size=1, max_size=3).map(sorted).map(tuple),
    link=links,
    ring=links,
    inner=st.none() | links,
    shard_problem=st.none() | texts,
)
policies = st.builds(
    Policy,
    devices_per_node=numbers,
    tolerate=numbers,
    global_batch=numbers,
    microbatch_rows=numbers,
    minimum=st.sampled_from(["one_replica", "oobleck"]),
    objective=st.sampled_from(["iteration", "paper"]),
    split=st.sampled_from(["any", "aligned"]),
    batch_objective=st.sampled_from(["minmax", "variance"]),
    batch_solver=st.sampled_from(["exact", "pyomo"]),
    activation_checkpointing=st.sampled_from(["none", "selective", "full", "auto"]),
    device_memory_bytes=st.none() | numbers,
    zero1=st.booleans(),
    within_node=st.sampled_from(["auto", "replicate", "shard", "tensor"]),
)
jobs = st.builds(
    Job,
    job_id=names,
    name=names,
    steps=numbers,
    policy=policies,
    training=st.dictionaries(names, texts | numbers | st.booleans(), max_size=3),
    snapshot=st.builds(SnapshotPolicy, every_steps=numbers, protection=texts),
)
held = st.builds(HeldSnapshot, job_id=names, step=numbers, generation=numbers, owner=texts)
restores = st.builds(
    Restore,
    job_id=names,
    step=numbers,
    generation=numbers,
    groups=st.lists(
        st.builds(
            SnapshotGroup,
            first_layer=numbers,
            end_layer=numbers,
            owners=st.lists(names, max_size=3).map(tuple),
            protection=texts,
            replica_peer=texts,
        ),
        max_size=2,
    ).map(tuple),
    sources=st.dictionaries(names, texts, max_size=3),
)
devices = st.builds(Device, node=names, index=numbers)
held_parts = st.builds(
    HeldPart,
    device=devices,
    first_layer=numbers,
    end_layer=numbers,
    start=numbers,
    end=numbers,
    of=numbers,
    replica=st.booleans(),
    whole=st.booleans(),
)
stages = st.builds(
    StagePlacement,
    first_layer=numbers,
    end_layer=numbers,
    devices=st.lists(devices, max_size=3).map(tuple),
    recompute=st.sampled_from(["none", "selective", "full"]),
    within=st.sampled_from(["replicate", "shard", "tensor"]),
)
pipelines = st.builds(
    PipelinePlacement,
    stages=st.lists(stages, max_size=3).map(tuple),
    first_microbatch=numbers,
    microbatches=numbers,
    estimated_s=reals,
)
transfers = st.builds(Transfer, layer=numbers, source=devices, target=devices, size_bytes=numbers)
plans = st.builds(
    Plan,
    pipelines=st.lists(pipelines, max_size=3).map(tuple),
    transfers=st.lists(transfers, max_size=3).map(tuple),
    method=st.sampled_from(["initial", "unchanged", "rebalance", "simple", "borrow", "merge", "best"]),
    reason=texts,
    estimated_iteration_s=reals,
    idle_nodes=st.lists(names, max_size=2).map(tuple),
    part_bytes=numbers,
    released_layers=st.lists(
        st.builds(
            ReleasedLayers,
            device=devices,
            parked=st.lists(numbers, max_size=2).map(tuple),
            dropped=st.lists(numbers, max_size=2).map(tuple),
        ),
        max_size=2,
    ).map(tuple),
)
facts = st.builds(
    NodeFacts,
    devices=st.integers(1, 64),
    host=names,
    rendezvous_port=st.integers(0, 65535),
    chaos_allowed=st.booleans(),
    snapshot_port=st.integers(0, 65535),
)
snapshots = st.builds(
    Snapshot,
    step=numbers,
    generation=numbers,
    vote=votes,
    groups=st.just(()),
    size_bytes=numbers,
    at=reals,
)
files = st.builds(
    LayerFile,
    layer=numbers,
    name=names,
    size_bytes=numbers,
    digest=names,
    header_bytes=numbers,
    header_digest=names,
    payload_bytes=numbers,
)
speeds = st.floats(0, 1e9)
health = st.builds(
    HealthReport,
    number=numbers,
    devices=st.lists(
        st.builds(
            DeviceHealth,
            device=st.integers(0, 64),
            kind=names,
            wrong=names,
            failed=names,
            compute_gflops=speeds,
            memory_gb_s=speeds,
        ),
        min_size=1,
        max_size=3,
    ).map(tuple),
    links=st.lists(st.builds(LinkHealth, node=names, latency_ms=speeds, mb_s=speeds), max_size=3).map(tuple),
)
peers = st.builds(ReplicaPeer, node=names, address=texts)
BY_TYPE: dict[Any, st.SearchStrategy[Any]] = {
    HealthReport: health,
    HealthReport | None: st.none() | health,
    tuple[ReplicaPeer, ...]: st.lists(peers, max_size=3).map(tuple),
    Counter: numbers,
    Duration: st.floats(0, 1e9),
    Snapshot: snapshots,
    tuple[LayerFile, ...]: st.lists(files, max_size=3).map(tuple),
    tuple[int, ...]: st.lists(numbers, max_size=3).map(tuple),
    str: texts,
    bool: st.booleans(),
    NodeFacts: facts,
    Plan: plans,
    Job: jobs,
    CommittedStep | None: st.none() | steps,
    Acknowledgement | None: st.none()
    | st.builds(Acknowledgement, activity=st.sampled_from(NodeActivity), job_id=st.none() | names),
    BuildProgress | None: st.none()
    | st.builds(BuildProgress, stage=st.sampled_from(BuildStage), done=numbers, total=numbers),
    Vote | None: st.none() | votes,
    Vote: votes,
    Evaluation | None: st.none() | evaluations,
    Restore | None: st.none() | restores,
    tuple[HeldPart, ...]: st.lists(held_parts, max_size=3).map(tuple),
    tuple[HeldSnapshot, ...]: st.lists(held, max_size=3).map(tuple),
    tuple[str, ...]: st.lists(names, max_size=3).map(tuple),
    ModelProfile | None: st.none() | profiles,
    str | None: st.none() | names,
    float | None: st.none() | reals,
    Counter | None: st.none() | numbers,
    tuple[Measured, ...] | None: st.none() | st.lists(st.floats(0, 1e9), max_size=3).map(tuple),
    tuple[DeviceReport, ...]: st.lists(reports, max_size=3).map(tuple),
    tuple[CommittedStep, ...]: st.lists(steps, max_size=3).map(tuple),
    dict[int, int]: st.dictionaries(numbers, numbers, max_size=3),
    dict[int, str]: st.dictionaries(numbers, texts, max_size=3),
    dict[str, str]: st.dictionaries(names, texts, max_size=3),
    dict[str, ReplicaPeer]: st.dictionaries(names, peers, max_size=3),
}


def strategy_of(kind: Any) -> st.SearchStrategy[Any]:
    def of(field: Any) -> st.SearchStrategy[Any]:
        choices = get_args(field.type)
        if choices and all(isinstance(choice, str) for choice in choices):
            return st.sampled_from(choices)
        return BY_TYPE[field.type]

    return st.builds(kind, **{field.name: of(field) for field in msgspec.structs.fields(kind)})


@pytest.mark.parametrize("kind", get_args(Signal), ids=lambda kind: kind.__name__)
def test_every_signal_is_decoded_as_it_was(kind: Any) -> None:
    @settings(max_examples=25)
    @given(st.builds(FromNode, node=names, incarnation=numbers, signal=strategy_of(kind)))
    def check(message: FromNode) -> None:
        assert decode_from_node(encode_from_node(message), message.node) == message

    check()


@pytest.mark.parametrize("kind", (*get_args(Signal), *get_args(Command)), ids=lambda kind: kind.__name__)
@given(data=st.data())
@settings(max_examples=1)
def test_impossible_numbers_are_wire_errors(kind: Any, data: st.DataObject) -> None:
    message = data.draw(strategy_of(kind))
    limited = [field.name for field in msgspec.structs.fields(kind) if field.type in (Counter, Duration)]
    for name, wrong in itertools.product(limited, (-1, 2**53 + 1)):
        changed = msgspec.structs.replace(message, **{name: wrong})
        with pytest.raises(WireError, match=rf"malformed {kind.__name__}: Expected `\w+` [<>]= "):
            if isinstance(message, get_args(Signal)):
                decode_from_node(encode_from_node(FromNode(node="n", incarnation=1, signal=changed)))
            else:
                decode_to_node(encode_to_node(ToNode(node="n", incarnation=1, command=changed, cause="c")))


def test_every_number_of_a_message_has_limits() -> None:
    kinds = (*get_args(Signal), *get_args(Command))
    assert not [k for k in kinds for f in msgspec.structs.fields(k) if f.type in (int, float, int | None)]


def test_identical_messages_of_nodes_are_decoded_once() -> None:
    def decoded(node: str, signal: Signal) -> Signal:
        return decode_from_node(encode_from_node(FromNode(node=node, incarnation=1, signal=signal))).signal

    report = DeviceReport(device=0, committed_step=7, ready_step=None, vote=None, held=(1, 2))
    one, other = Quiesced(generation=3, reports=(report,)), Quiesced(generation=4, reports=(report,))
    assert decoded("a", one) is decoded("b", one)
    assert decoded("a", other) == other
    # The caches are limited: strangers cannot fill them with many or with large messages.
    for generation in range(2000):
        decoded("a", Quiesced(generation=generation, reports=()))
    assert len(codec._REPEATED["Quiesced"]) <= codec._MAX_REPEATED
    large = Quiesced(generation=3, reports=(msgspec.structs.replace(report, held=tuple(range(2000))),))
    assert decoded("a", large) == large
    assert decoded("a", large) is not decoded("b", large)


@pytest.mark.parametrize("kind", get_args(Command), ids=lambda kind: kind.__name__)
def test_every_command_is_decoded_as_it_was(kind: Any) -> None:
    @settings(max_examples=25)
    @given(st.builds(ToNode, node=names, incarnation=numbers, command=strategy_of(kind), cause=texts))
    def check(message: ToNode) -> None:
        assert decode_to_node(encode_to_node(message), message.node) == message

    check()


RECEIVERS = st.dictionaries(names, numbers, min_size=1, max_size=80)
COMMANDS = st.sampled_from(get_args(Command)).flatmap(strategy_of)


@settings(max_examples=100, deadline=None)
@given(message=st.builds(ToNodes, receivers=RECEIVERS, command=COMMANDS, cause=texts), stranger=names)
def test_a_command_to_several_nodes_is_decoded_as_it_was(message: ToNodes, stranger: str) -> None:
    decoded = decode_to_nodes(encode_to_nodes(message))
    assert decoded == message
    for name, incarnation in message.receivers.items():
        meant = decoded.addressed(name, incarnation)
        assert meant == ToNode(
            node=name, incarnation=incarnation, command=message.command, cause=message.cause
        )
        assert decoded.addressed(name, incarnation + 1) is None
    assert (decoded.addressed(stranger, 1) is None) == (message.receivers.get(stranger) != 1)


def test_a_command_to_a_thousand_nodes_is_small() -> None:
    """Every node receives all names."""
    began, quiesce = 1_790_000_000_000_000, Quiesce(generation=7, mode="abort")
    receivers = {f"node-{number:04}": began + 123_456_789_011 * number % 10**12 for number in range(1000)}
    payload = encode_to_nodes(ToNodes(receivers=receivers, command=quiesce, cause="c"))
    assert len(payload) < 10_000
    assert decode_to_nodes(payload).receivers == receivers


def to_several(**changes: Any) -> dict[str, Any]:
    body = {"generation": 1, "mode": "abort"} | changes.pop("body", {})
    return {"receivers": {"n": 1, "m": 2}, "type": "Quiesce", "body": body, "cause": "c"} | changes


def uncompressed(**changes: Any) -> bytes:
    content = msgspec.msgpack.encode(to_several(**changes))
    return msgspec.msgpack.encode({"compressed": False, "content": content})


def compressed(content: bytes) -> bytes:
    return msgspec.msgpack.encode({"compressed": True, "content": content})


@pytest.mark.parametrize(
    ("payload", "says"),
    [
        (b"", "malformed command"),
        (b"\xc1", "malformed command"),
        (b"\x91" * 100_000, "malformed command"),
        (b"x" * (MAX_COMMAND_BYTES + 1), "at most 8388608"),
        (msgspec.msgpack.encode(to_several()), "compressed"),
        (msgspec.msgpack.encode({"compressed": False, "content": b"\xc1"}), "malformed command"),
        (compressed(b"no deflated bytes"), "cannot be decompressed"),
        (compressed(zlib.compress(msgspec.msgpack.encode(to_several()))[:-5]), "truncated"),
        (compressed(zlib.compress(bytes(MAX_COMMAND_BYTES + 1))), "larger than 8388608 bytes"),
        (compressed(zlib.compress(b"\xc1")), "malformed command"),
        (uncompressed(receivers={}), "a command to 0 nodes"),
        (uncompressed(receivers={str(n): n for n in range(MAX_RECEIVERS + 1)}), "a command to 65537 nodes"),
        (uncompressed(receivers=["n"]), "malformed command"),
        (uncompressed(receivers={"n": "1"}), "malformed command"),
        (uncompressed(receivers={"n": -1}), r"Expected `int` >= 0 - at `\$.receivers\[...\]`"),
        (uncompressed(receivers={"n": 2**60}), "Expected `int` <= 9007199254740992"),
        (uncompressed(receivers={"n/m": 1}), "'n/m' is not the name of a node"),
        (uncompressed(receivers={"": 1}), "not the name of a node"),
        (uncompressed(type="Hello"), "unknown message type 'Hello'"),
        (uncompressed(body={"generation": -1}), r"malformed \w+: Expected `int` >= 0 - at `\$.generation`"),
        (uncompressed(body={"mode": "now"}), "malformed Quiesce"),
        (uncompressed(type="Resume", body={}), "malformed Resume"),
    ],
)
def test_a_malformed_command_to_several_nodes_is_a_wire_error(payload: bytes, says: str) -> None:
    with pytest.raises(WireError, match=says):
        decode_to_nodes(payload)


@pytest.mark.parametrize(("start", "end", "of"), [(2, 3, 2), (1, 1, 2), (-1, 1, 2), (0, 0, 0)])
def test_a_report_of_an_impossible_part_is_a_wire_error(start: int, end: int, of: int) -> None:
    part = StatePart(layer=1, start=start, end=end, of=of)
    report = DeviceReport(device=0, committed_step=1, ready_step=None, vote=None, held=(), parts=(part,))
    message = FromNode(node="n", incarnation=1, signal=Quiesced(generation=1, reports=(report,)))
    with pytest.raises(WireError, match="malformed Quiesced: there is no StatePart"):
        decode_from_node(encode_from_node(message))


def heartbeat(**changes: Any) -> dict[str, Any]:
    body = {"generation": 1, "committed": None} | changes.pop("body", {})
    return {"node": "n", "incarnation": 1, "type": "Heartbeat", "body": body} | changes


def with_metrics(metrics: dict[str, Any]) -> bytes:
    vote = {"loss": 1.0, "gradient_norm": 1.0, "metrics": metrics}
    return msgspec.msgpack.encode(heartbeat(body={"committed": {"step": 1, "vote": vote}}))


MANY_METRICS = r"Expected `object` of length <= 32 - at `\$.committed.vote[.\w]*.metrics`"


def with_evaluation(**changes: Any) -> bytes:
    vote = {
        "loss": 1.0,
        "gradient_norm": 1.0,
        "evaluation": {"loss": 1.0, "weight": 1.0, "took_s": 1.0} | changes,
    }
    return msgspec.msgpack.encode(heartbeat(body={"committed": {"step": 1, "vote": vote}}))


@pytest.mark.parametrize(
    ("payload", "says"),
    [
        (b"", "malformed signal"),
        (b"\xc1", "malformed signal"),
        (b"\x81\xa4node", "malformed signal"),
        (b"\x91" * 100_000, "malformed signal"),
        (b"x" * (MAX_PAYLOAD_BYTES + 1), "at most 1048576"),
        (msgspec.msgpack.encode({"node": "n"}), "incarnation"),
        (msgspec.msgpack.encode(heartbeat(node=3)), "Expected `str`"),
        (msgspec.msgpack.encode(heartbeat(type="Inquiry")), "unknown message type 'Inquiry'"),
        (msgspec.msgpack.encode(heartbeat(type="__class__")), "unknown message type"),
        (msgspec.msgpack.encode(heartbeat(body={"generation": "1"})), "malformed Heartbeat"),
        (
            msgspec.msgpack.encode(heartbeat(body={"generation": -1})),
            r"malformed \w+: Expected `int` >= 0 - at `\$.generation`",
        ),
        (msgspec.msgpack.encode(heartbeat(body={"committed": {"step": 1}})), "vote"),
        (msgspec.msgpack.encode(heartbeat(body={"generation": 1.5})), "Heartbeat"),
        (msgspec.msgpack.encode(heartbeat(body={"microbatch_ms": [1.0, -1.0]})), "microbatch_ms"),
        (msgspec.msgpack.encode(heartbeat(body={"microbatch_ms": [float("nan")]})), "microbatch_ms"),
        (msgspec.msgpack.encode(heartbeat(node="other")), "'n'"),
        (
            with_metrics({f"m{n}": 1.0 for n in range(33)}),
            MANY_METRICS,
        ),
        (
            with_evaluation(metrics={f"m{n}": 1.0 for n in range(33)}),
            MANY_METRICS,
        ),
        (with_evaluation(took_s=-1.0), r"Expected `float` >= 0.0 - at `\$.committed.vote.evaluation.took_s`"),
        (with_metrics({"m" * 65: 1.0}), "Expected `str` of length <= 64"),
        (with_metrics({"": 1.0}), "Expected `str` of length >= 1"),
        (with_metrics({"accuracy": "high"}), "malformed Heartbeat"),
    ],
)
def test_a_malformed_signal_is_a_wire_error(payload: bytes, says: str) -> None:
    with pytest.raises(WireError, match=says):
        decode_from_node(payload, "n")


@pytest.mark.parametrize("change", [{"devices": 0}, {"devices": 10**6}, {"rendezvous_port": 70000}])
def test_a_hello_with_impossible_facts_is_rejected(change: dict[str, int]) -> None:
    good = NodeFacts(devices=1, host="h", rendezvous_port=1)
    hello = Hello(
        facts=msgspec.structs.replace(good, **change),
        job_id=None,
        prepared=False,
        generation=0,
        training=False,
    )
    with pytest.raises(WireError, match="malformed Hello"):
        decode_from_node(encode_from_node(FromNode(node="n", incarnation=1, signal=hello)), "n")


def numbers_of(value: Any, where: str = "") -> list[str]:
    """Return the paths of all numbers in plain data."""
    if isinstance(value, dict):
        return [found for name in value for found in numbers_of(value[name], f"{where}.{name}".lstrip("."))]
    if isinstance(value, list | tuple):
        return [found for n, item in enumerate(value) for found in numbers_of(item, f"{where}[{n}]")]
    return [where] if isinstance(value, int | float) else []


def placed(data: Any, where: str, value: Any) -> None:
    """Put ``value`` at ``where`` (``layers[0].split[1].forward_ms``) of plain data."""
    *way, last = [int(step) if step.isdigit() else step for step in re.findall(r"\w+", where)]
    for step in way:
        data = data[step]
    data[last] = value


@settings(max_examples=200)
@given(data=st.data())
def test_a_profile_that_no_clock_can_have_measured_is_rejected_by_name(data: st.DataObject) -> None:
    prepared = Prepared(job_id="j", profile=data.draw(profiles))
    message = msgspec.msgpack.decode(
        encode_from_node(FromNode(node="n", incarnation=1, signal=prepared)), strict=False
    )
    profile = message["body"]["profile"]
    where = data.draw(st.sampled_from(numbers_of(profile)))
    real = where.endswith(("_ms", "bytes_per_s"))
    wrong = data.draw(
        st.sampled_from([float("nan"), float("inf"), -float("inf"), -1.0] if real else [-1, 2**62])
    )
    placed(profile, where, wrong)
    with pytest.raises(WireError) as refused:
        decode_from_node(msgspec.msgpack.encode(message), "n")
    name = re.escape(re.sub(r"\[\d+\]$", "", where))
    assert re.search(rf"malformed Prepared: its profile's {name}(\[\d+\])? (is|does) ", str(refused.value))


@pytest.mark.parametrize(
    ("change", "says"),
    [({"layers": ()}, "the number of layers is 0"), ({"stage_devices": (2, 1)}, "is not ascending")],
)
def test_a_profile_of_an_impossible_shape_is_rejected(change: dict[str, Any], says: str) -> None:
    good = ModelProfile(layers=(LayerProfile(**dict.fromkeys(LAYER_NUMBERS, 1)),), microbatch_rows=1)
    prepared = Prepared(job_id="j", profile=msgspec.structs.replace(good, **change))
    with pytest.raises(WireError, match=says):
        decode_from_node(encode_from_node(FromNode(node="n", incarnation=1, signal=prepared)), "n")


@settings(max_examples=200)
@given(st.binary(max_size=300))
def test_no_bytes_raise_anything_but_a_wire_error(payload: bytes) -> None:
    for decode in (decode_from_node, decode_to_node):
        with pytest.raises(WireError):
            decode(payload, "n")
    with pytest.raises(WireError):
        decode_to_nodes(payload)
    for into in (AnyRequest, ChaosRequest, NodeStateMessage, dict):
        try:
            decode_json(payload, into)
        except WireError:
            continue


@settings(max_examples=60)
@given(data=st.data())
def test_no_corrupt_message_raises_anything_but_a_wire_error(data: st.DataObject) -> None:
    message = ToNode(
        node="n",
        incarnation=1,
        cause="c",
        command=Resume(
            generation=1,
            job_id="j",
            step=3,
            vote=None,
            plan=data.draw(plans),
            hosts={"a": "b"},
            rendezvous="h:1",
        ),
    )
    payload = bytearray(encode_to_node(message))
    payload[data.draw(st.integers(0, len(payload) - 1))] ^= data.draw(st.integers(1, 255))
    try:
        decode_to_node(bytes(payload), "n")
    except WireError:
        return


def test_the_most_steps_of_one_message_fit_with_all_their_metrics() -> None:
    """The coordinator asks for the steps that it missed: an answer that did not fit would never come."""
    named = {
        f"{n:02}" + "\N{GRINNING FACE}" * (MAX_METRIC_NAME_CHARACTERS - 2): 0.1 * n
        for n in range(MAX_METRICS)
    }
    evaluation = Evaluation(loss=1.0, weight=1.0, metrics=named, took_s=1.0)
    vote = Vote(loss=1.0, gradient_norm=1.0, metrics=named, evaluation=evaluation)
    answer = tuple(CommittedStep(step=2**53, vote=vote) for _ in range(STEPS_PER_MESSAGE))
    message = FromNode(
        node="n", incarnation=1, signal=Stepped(generation=1, steps=answer, step_s=0.1, requested_first=1)
    )
    assert decode_from_node(encode_from_node(message), "n") == message


def test_a_message_that_is_too_large_is_not_sent() -> None:
    policy = Policy(global_batch=1, microbatch_rows=1)
    job = Job(job_id="j", name="j", steps=1, policy=policy, training={"x": "y" * MAX_COMMAND_BYTES})
    with pytest.raises(WireError, match="at most"):
        encode_to_node(ToNode(node="n", incarnation=1, cause="c", command=Prepare(job=job, profile=False)))


def test_a_plan_with_very_many_transfers_fits() -> None:
    """100 of 1,000 nodes with eight devices each may leave this many."""
    names = [f"node-{number:04}" for number in range(900)]
    stages = tuple(
        StagePlacement(
            first_layer=0, end_layer=96, devices=tuple(Device(node=name, index=index) for index in range(8))
        )
        for name in names
    )
    moves = tuple(
        Transfer(
            layer=n % 96, source=stages[n % 900].devices[0], target=stages[n % 7].devices[1], size_bytes=n
        )
        for n in range(12_000)
    )
    pipelines = tuple(
        PipelinePlacement(stages=(stage,), first_microbatch=n, microbatches=1, estimated_s=1.0)
        for n, stage in enumerate(stages)
    )
    plan = Plan(pipelines=pipelines, transfers=moves, method="best", reason="so.", estimated_iteration_s=1.0)
    resume = Resume(
        generation=1,
        job_id="j",
        step=1,
        vote=None,
        plan=plan,
        hosts=dict.fromkeys(names, "10.0.0.1"),
        rendezvous="10.0.0.1:1",
    )
    message = ToNode(node="n", incarnation=1, cause="c", command=resume)
    payload = encode_to_node(message)
    assert len(payload) < MAX_PAYLOAD_BYTES / 4
    assert decode_to_node(payload, "n") == message


@pytest.mark.parametrize("body", [b"", b"x", zlib.compress(b"x"), zlib.compress(b"\x80" * 5)[:-3]])
def test_a_resume_that_cannot_be_decompressed_is_rejected(body: bytes) -> None:
    envelope = {"node": "n", "incarnation": 1, "type": "Resume", "body": body, "cause": "c"}
    with pytest.raises(WireError, match="malformed Resume"):
        decode_to_node(msgspec.msgpack.encode(envelope), "n")


def test_a_resume_that_decompresses_without_end_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ftd.transport.wire.plans.MAX_UNPACKED_BYTES", 1000)
    body = zlib.compress(b"\x00" * 100_000)
    envelope = {"node": "n", "incarnation": 1, "type": "Resume", "body": body, "cause": "c"}
    with pytest.raises(WireError, match="its plan is larger"):
        decode_to_node(msgspec.msgpack.encode(envelope), "n")


@pytest.mark.parametrize("number", [-1, 7])
def test_a_plan_that_names_an_unlisted_device_is_rejected(number: int) -> None:
    stage = StagePlacement(first_layer=0, end_layer=1, devices=(Device(node="a", index=0),))
    pipeline = PipelinePlacement(stages=(stage,), first_microbatch=0, microbatches=1, estimated_s=1.0)
    plan = Plan(pipelines=(pipeline,), transfers=(), method="best", reason="so.", estimated_iteration_s=1.0)
    resume = Resume(generation=1, job_id="j", step=1, vote=None, plan=plan, hosts={}, rendezvous="h:1")
    nodes, devices, arrays = msgspec.msgpack.decode(zlib.decompress(pack(resume)))
    found = arrays[Resume.__struct_fields__.index("plan")][0][0][0][0]
    assert found[2] == [0]
    found[2] = [number]
    body = zlib.compress(msgspec.msgpack.encode([nodes, devices, arrays]))
    envelope = {"node": "n", "incarnation": 1, "type": "Resume", "body": body, "cause": "c"}
    with pytest.raises(WireError, match="does not list"):
        decode_to_node(msgspec.msgpack.encode(envelope), "n")


def test_a_reader_ignores_fields_of_a_newer_writer() -> None:
    payload = msgspec.msgpack.encode(heartbeat(body={"later": 1}, also_later=2))
    assert decode_from_node(payload).signal == Heartbeat(generation=1, committed=None)


@pytest.mark.parametrize(
    "message",
    [
        StopRequest(request="r", reply="c", job="gpt"),
        DrainRequest(request="r", reply="c", node="n"),
        StatusRequest(request="r", reply="c"),
        HistoryRequest(request="r", reply="c", what="steps", after=3, limit=10, newest=True),
    ],
)
def test_requests_are_decoded_as_they_were(message: Any) -> None:
    assert decode_json(encode_json(message), AnyRequest) == message


def test_other_public_messages_are_decoded_as_they_were() -> None:
    chaos = ChaosRequest(request="r", reply="c", do="stop", target="trainer", device=1, for_s=0.5)
    assert decode_json(encode_json(chaos), ChaosRequest) == chaos
    answer = Answer(request="r", accepted=True, detail="d", data={"x": [1]})
    assert decode_json(encode_json(answer), Answer) == answer
    state = NodeStateMessage(
        node="n",
        incarnation=1,
        state=NodeState.OFFLINE,
        generation=2,
        step=3,
        reason="",
        at="2026-01-01T00:00:00.000Z",
        devices=1,
        host="h",
    )
    assert decode_json(encode_json(state), NodeStateMessage) == state
    assert msgspec.json.decode(encode_json(state))["schema"] == 2


@pytest.mark.parametrize(
    ("payload", "says"),
    [
        (b"{", "malformed JSON"),
        (b"[]", "malformed JSON"),
        (b'{"do": "explode", "request": "r", "reply": "c"}', "explode"),
        (b'{"do": "stop", "request": "r", "reply": "c"}', "job"),
        (b'{"do": "stop", "request": "r", "reply": "c", "job": "x", "force": true}', "force"),
        (b'{"do": "drain", "request": 1, "reply": "c", "node": "x"}', "request"),
        (b"[" * 200_000, "malformed JSON"),
        (b'"' + b"x" * MAX_PAYLOAD_BYTES + b'"', "at most"),
    ],
)
def test_malformed_requests_name_what_is_wrong(payload: bytes, says: str) -> None:
    with pytest.raises(WireError, match=says):
        decode_json(payload, AnyRequest)


def test_an_event_says_how_many_were_suppressed() -> None:
    effect = EmitEvent(cause="c-1", name="MessageIgnored", reason="r", node="n", details={"why": "w"})
    message = event_message(effect, monotonic=1.0, suppressed=3)
    assert message.details == {"why": "w", "suppressed": 3}
    assert effect.details == {"why": "w"}
    assert decode_json(encode_json(message), EventMessage) == message
    assert message.at.endswith("Z")


def test_a_loss_that_is_not_a_number_is_null_in_json() -> None:
    effect = EmitEvent(cause="c", name="StepCommitted", reason="", details={"loss": float("nan")})
    assert msgspec.json.decode(encode_json(event_message(effect, monotonic=0.0)))["details"]["loss"] is None


def test_topics_are_built_and_parsed() -> None:
    topics = Topics(cluster="lab")
    assert topics.node_signal() == "ftd/v2/lab/node/+/signal"
    for topic in (
        topics.node_state("n"),
        topics.node_signal("n"),
        topics.node_command("n"),
        topics.chaos("n"),
    ):
        assert topics.node_of(topic) == "n"
    for topic in (
        topics.events,
        topics.command,
        topics.request,
        topics.cluster_state,
        "ftd/v2/other/node/n/state",
        "x",
    ):
        assert topics.node_of(topic) is None
