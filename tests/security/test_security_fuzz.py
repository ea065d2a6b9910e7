"""Input from outside, corrupted in thousands of seeded ways: its reader rejects it with the documented error,
and nothing else happens. The run is bounded; a longer one: ``FTD_FUZZ=20 pytest tests/security``.
"""

import copy
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from ftd.config.daemon import load_daemon_config
from ftd.config.job import job_from_data, load_job_data, profile_from_data
from ftd.coordinator.journal import Journal
from ftd.coordinator.public_state import public_state
from ftd.errors import ConfigurationError, FtdError, JournalError, WireError
from ftd.faults.chaos.scenario import load_scenario
from ftd.faults.sim.simulation_run import run_seed
from ftd.snapshots.shards.protocol import NodeManifest
from ftd.transport.wire import checking, codec, contract_examples
from ftd.transport.wire.public import (
    Answer,
    AnyRequest,
    ChaosRequest,
    EventMessage,
    NodeStateMessage,
    TraceRequest,
    decode_json,
)
from runtime.wire import store_protocol, zygote_protocol
from runtime.wire.frames import Decoder, ProtocolError, encode
from statemachine.agent.events import CommandArrived
from statemachine.agent.machine import AgentMachine
from statemachine.cluster.durable import durable
from statemachine.cluster.machine import ClusterMachine
from statemachine.effects import BroadcastCommand, SendCommand
from statemachine.events import SignalArrived
from statemachine.messages import trace as trace_protocol
from statemachine.messages import trainer as protocol
from statemachine.timing import Timing
from storage.checkpoint import CheckpointStore
from storage.errors import CorruptDataError, StorageError
from storage.image import GroupImage, LayerImage
from storage.layerstate import decode_header
from storage.manifest import SnapshotManifest, SnapshotPart, check_parts, decode_record, digest_of
from tests.helpers.fuzzing import deep, garbled, seeded, survives, twisted
from tests.helpers.kept_snapshots import make_layer
from tests.helpers.wire_messages import Wire, compressed_command, encoded

ROOT = Path(__file__).resolve().parents[2]
EFFORT = int(os.environ.get("FTD_FUZZ", "1"))
SEED = int(os.environ.get("FTD_FUZZ_SEED", "20"))


# --- our own wires --------------------------------------------------------------------------------


def test_corrupted_signals_and_commands_are_rejected(wire: Wire) -> None:
    corpora = [
        (list(wire.signals.values()), lambda data: codec.decode_from_node(data, "node-0")),
        (list(wire.commands.values()), lambda data: codec.decode_to_node(data, "node-0")),
        (list(wire.broadcasts.values()), lambda data: codec.decode_to_nodes(compressed_command(data))),
    ]
    for corpus, decode in corpora:
        taken = 0
        for rng in seeded(SEED, 1500 * EFFORT):
            payload = rng.choice(corpus)
            if rng.random() < 0.5:
                wrong = garbled(rng, payload)
            else:
                data = msgspec.msgpack.decode(payload)
                place = "body" if rng.random() < 0.8 else rng.choice(list(data))
                wrong = msgspec.msgpack.encode({**data, place: twisted(rng, data[place])})
            taken += survives(decode, wrong, (WireError,))
        assert 0 < taken < 1500 * EFFORT
        for nested in (deep(b"\x91"), deep(b"\x81\xa4body"), b"", b"\xc1"):
            assert not survives(decode, nested, (WireError,))


def test_a_hostile_node_and_a_hostile_coordinator_break_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A twin of each simulated machine also receives what somebody with the right credential could send:
    well-formed messages and nonsense. It raises nothing, its state can be written and read again, and it
    continues.
    """
    rng = next(seeded(SEED, 1))
    sent = {"cluster": 0, "agent": 0}
    together = ClusterMachine.steps
    steps: dict[str, Callable[[Any, Any], Any]] = {
        "cluster": lambda machine, event: together(machine, [event]),
        "agent": AgentMachine.step,
    }

    def sound(twin: Any, effects: list[Any]) -> None:
        if not isinstance(twin, ClusterMachine):
            return
        for effect in effects:
            if isinstance(effect, SendCommand):
                codec.encode_to_node(effect.message)
            elif isinstance(effect, BroadcastCommand):
                encoded(effect)
        state = public_state(twin.public_state(), {"coordinator": 1}, None, 1e9)
        checking.encode_state(state)  # It raises in tests if the state is not as its model says.
        kept = msgspec.msgpack.decode(msgspec.msgpack.encode(twin.durable_state()))
        ClusterMachine.restore(Timing(), kept, 1e9, "c")

    def with_hostile(kind: str, event_type: Any, write: Any, read: Any) -> Callable[[Any, Any], Any]:
        step = steps[kind]
        twins: dict[Any, list[Any]] = {}

        def both(machine: Any, event: Any) -> Any:
            mine = twins.setdefault(machine, [])
            for twin in mine:
                step(twin, event)
            if isinstance(event, event_type) and rng.random() < 0.15:
                data = msgspec.msgpack.decode(write(event.message))
                data["body"] = twisted(rng, data["body"])
                try:
                    wrong = read(msgspec.msgpack.encode(data))
                except WireError:
                    pass
                else:
                    twin = copy.deepcopy(machine)
                    sound(twin, step(twin, event_type(at=event.at, cause="c", message=wrong)))
                    sent[kind] += 1
                    mine[:] = [*mine[-3:], twin]
            return step(machine, event)

        return both

    hostile_step = with_hostile("cluster", SignalArrived, codec.encode_from_node, codec.decode_from_node)
    monkeypatch.setattr(
        ClusterMachine,
        "steps",
        lambda machine, events, bug: [effect for event in events for effect in hostile_step(machine, event)],
    )
    hostile = with_hostile("agent", CommandArrived, codec.encode_to_node, codec.decode_to_node)
    monkeypatch.setattr(AgentMachine, "step", hostile)
    for seed in range(30 * EFFORT):
        assert run_seed(seed).violation is None
    assert sent["cluster"] > 100 and sent["agent"] > 30


def trace() -> trace_protocol.Traced:
    return trace_protocol.Traced(request="r", rank=0, generation=1, dropped=0, spans=())


FRAMES: list[tuple[Any, list[Any]]] = [
    (
        store_protocol.StoreRequest,
        [
            store_protocol.StoreHello(proof="p", generation=1, rank=0),
            store_protocol.StoreSet(key="key", value=b"value"),
            store_protocol.StoreGet(keys=("a", "b"), timeout_s=1.0),
            store_protocol.StoreAdd(key="n", amount=1),
        ],
    ),
    (store_protocol.StoreReply, [store_protocol.StoreValues(values=(b"1", b"2"))]),
    (protocol.Report, [protocol.Raised(where="step", detail="Traceback"), trace()]),
    (protocol.FirstFrame, [protocol.Attached(device=0, pid=7), protocol.Output(device=0, pid=7)]),
    (zygote_protocol.ZygoteNotice, [
        zygote_protocol.Spawned(device=0, pid=7),
        zygote_protocol.NotForked(device=0, check=None, reason="no process is left"),
    ]),
]  # fmt: skip


@pytest.mark.parametrize(("union", "frames"), FRAMES, ids=lambda value: str(value)[:40])
def test_corrupted_frames_are_rejected(union: Any, frames: list[Any]) -> None:
    def feed(stream: bytes) -> None:
        decoder: Decoder[Any] = Decoder(union, 1 << 20)
        for at in range(0, len(stream), 7):
            decoder.feed(stream[at : at + 7])

    for rng in seeded(SEED, 600 * EFFORT):
        body = encode(rng.choice(frames))[4:]
        if rng.random() < 0.5:
            body = garbled(rng, body)
        else:
            body = msgspec.msgpack.encode(twisted(rng, msgspec.msgpack.decode(body)))
        head = len(body) if rng.random() < 0.9 else rng.choice((0, 3, 1 << 20, (1 << 20) + 1, (1 << 32) - 1))
        survives(feed, head.to_bytes(4, "big") + body, (ProtocolError,))
    for body in (deep(b"\x91"), b"", b"\xc1"):
        assert not survives(feed, len(body).to_bytes(4, "big") + body, (ProtocolError,))


# --- JSON: what tools write ----------------------------------------------------------------------


def test_corrupted_requests_events_and_states_are_rejected() -> None:
    ask = {"request": "r-1", "reply": "me"}
    job = msgspec.to_builtins(load_job_data(ROOT / "examples" / "gpt.toml"))
    event = {
        "event": "TrainerStarted", "node": "n", "generation": None, "step": None, "reason": "", "at": "",
        "monotonic": 1.0, "cause": "c", "details": contract_examples.DETAILS["TrainerStarted"],
    }  # fmt: skip
    state = {
        "node": "n", "incarnation": 1, "state": "HEALTHY", "generation": 1, "step": 2, "reason": "", "at": "",
        "devices": 1, "host": "h",
    }  # fmt: skip
    corpora: list[tuple[Any, dict[str, Any]]] = [
        (AnyRequest, {**ask, "do": "submit", "job": job}),
        (AnyRequest, {**ask, "do": "snapshot", "now": True, "every_steps": "auto"}),
        (AnyRequest, {**ask, "do": "history", "after": 3}),
        (ChaosRequest, {**ask, "do": "stop", "target": "node", "for_s": 1.0}),
        (TraceRequest, {**ask, "steps": 3}),
        (EventMessage, event),
        (NodeStateMessage, state),
        (Answer, {"request": "r", "accepted": True, "detail": "", "data": {}}),
    ]

    def take(kind: Any, payload: bytes) -> None:
        message = decode_json(payload, kind)
        if getattr(message, "job", None) is not None and hasattr(message.job, "policy"):
            job_from_data(message.job, job_id="j", devices_per_node=1)
            profile_from_data(message.job)
        if isinstance(message, EventMessage):
            checking.problem_of_details(message.event, msgspec.json.encode(message.details))

    for kind, example in corpora:
        for rng in seeded(SEED, 300 * EFFORT):
            if rng.random() < 0.4:
                wrong = garbled(rng, json.dumps(example).encode())
            else:
                wrong = json.dumps(twisted(rng, example), default=str).encode()
            survives(lambda data, kind=kind: take(kind, data), wrong, (WireError, ConfigurationError))
        for nested in (deep(b"[", b"]"), deep(b'{"a":', b"}"), b"", b"\xff", b"null"):
            assert not survives(lambda data, kind=kind: take(kind, data), nested, (WireError,))


# --- files ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("load", "file"),
    [
        (lambda path: load_daemon_config(path, environment={}), ROOT / "ftd" / "cli" / "units" / "ftd.toml"),
        (load_job_data, ROOT / "examples" / "gpt.toml"),
        (load_scenario, ROOT / "examples" / "demo-chaos.toml"),
    ],
    ids=["ftd.toml", "job", "scenario"],
)
def test_corrupted_toml_files_are_rejected_in_a_sentence(
    load: Callable[[Path], object], file: Path, tmp_path: Path
) -> None:
    lines = file.read_bytes().splitlines(keepends=True)
    # A sample consists of comments: enable its keys, so that there is something to corrupt.
    original = b"".join(line.removeprefix(b"# ") if b" = " in line else line for line in lines)
    path = tmp_path / "file.toml"

    def read(text: bytes) -> None:
        path.write_bytes(text)
        load(path)

    for rng in seeded(SEED, 250 * EFFORT):
        survives(read, garbled(rng, original), (FtdError,))
    for nested in (b"a = " + deep(b"[", b"]"), b"[" + b"a." * 3000 + b"a]", b"\xff\xfe"):
        assert not survives(read, nested, (FtdError,))


def group_image() -> GroupImage:
    made = make_layer(3, [40, 100], buffer_bytes=16)
    layer = LayerImage(
        layer=3, offset=0, size_bytes=len(made.shared), header=made.header, buffers=made.buffers
    )
    return GroupImage(bucket_bytes=len(made.shared), layers=(layer,))


def test_corrupted_manifests_and_images_are_reported_as_corrupt() -> None:
    data = np.arange(100, dtype=np.uint8)
    part = SnapshotPart.from_bytes("group-0/shard", 0, data)
    manifest = SnapshotManifest(
        job_id="j", step=5, generation=1, slot=0, parts=(part,), layout={"groups": []}
    )
    body = msgspec.json.encode(NodeManifest(manifests=(manifest,)))
    image, header = group_image().to_bytes(), make_layer(3, [40, 100]).header

    def as_record(wrong: bytes) -> None:
        found = decode_record(digest_of(wrong).encode() + b"\n" + wrong, NodeManifest, "it")
        for one in found.manifests:
            check_parts(one, 100)

    readers: list[tuple[bytes, Callable[[bytes], object], Any]] = [
        (body, as_record, msgspec.json),
        (image, GroupImage.from_bytes, msgspec.msgpack),
        (header, lambda wrong: decode_header(wrong, 3, 144), msgspec.msgpack),
    ]
    for original, read, form in readers:
        for rng in seeded(SEED, 800 * EFFORT):
            wrong = (
                garbled(rng, original)
                if rng.random() < 0.5
                else form.encode(twisted(rng, form.decode(original)))
            )
            survives(read, wrong, (CorruptDataError,))
        for nested in (deep(b"["), deep(b"\x91"), b""):
            assert not survives(read, nested, (CorruptDataError,))


def test_corrupted_checkpoints_are_skipped(tmp_path: Path) -> None:
    store = CheckpointStore.at(str(tmp_path / "kept"), create=True)
    layer = make_layer(0, [64])
    draft = store.begin(7)
    file = store.write_layer(draft, 0, layer.header, [layer.payload.data])
    store.commit(draft, [file], job="j", job_id="j-1", vote=None, written_at=1.0, ftd_version="0")
    paths = [path for path in (tmp_path / "kept").rglob("*") if path.is_file()]
    originals = {path: path.read_bytes() for path in paths}

    def read(_: bytes) -> None:
        for step in store.steps():
            checkpoint = store.open(step)
            checkpoint.verify()
            for layer in range(len(checkpoint.manifest.layers)):
                checkpoint.read_layer(layer)

    assert survives(read, b"", ()) and store.steps() == (7,)
    for rng in seeded(SEED, 120 * EFFORT):
        path = rng.choice(paths)
        wrong = garbled(rng, originals[path])
        if path.suffix == ".json" and rng.random() < 0.6:  # This bypasses the digest.
            inner = json.dumps(
                twisted(rng, json.loads(originals[path].split(b"\n", 1)[1])), default=str
            ).encode()
            wrong = digest_of(inner).encode() + b"\n" + inner
        path.write_bytes(wrong)
        survives(read, wrong, (StorageError,))
        path.write_bytes(originals[path])
    assert store.steps() == (7,)


def test_a_corrupted_journal_is_rejected_in_a_sentence(tmp_path: Path) -> None:
    machine = ClusterMachine(Timing())
    state = msgspec.msgpack.encode(machine.durable_state())

    def restore(wrong: bytes) -> None:
        ClusterMachine.restore(Timing(), msgspec.msgpack.decode(wrong), 1.0, "c")

    for rng in seeded(SEED, 400 * EFFORT):
        wrong = msgspec.msgpack.encode(twisted(rng, msgspec.msgpack.decode(state)))
        survives(restore, wrong, (durable.InvalidJournalError,))

    journal = Journal(tmp_path)
    journal.save(state, forced=True)
    journal.close()
    sound = journal.path.read_bytes()

    def open_it(wrong: bytes) -> None:
        for leftover in tmp_path.glob("journal.sqlite-*"):
            leftover.unlink()
        journal.path.write_bytes(wrong)
        opened = Journal(tmp_path)
        try:
            opened.load()
            opened.events(after=0, limit=10, newest=False)
            opened.save(state, forced=False)
        finally:
            opened.close()

    for rng in seeded(SEED, 40 * EFFORT):
        survives(open_it, garbled(rng, sound), (JournalError,))
    assert not survives(open_it, b"no database" * 100, (JournalError,))
