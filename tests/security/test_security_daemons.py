"""Real daemons with every port open: clients with no credential, a wrong or an old one, or malformed messages
are rejected, counted and logged once; the daemons continue undisturbed.
"""

import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ftd.local.child_processes import private_directory, shared_memory
from ftd.transport.address import BrokerAddress, ClusterAddress
from ftd.transport.client import ClusterClient
from ftd.transport.mqtt.mosquitto import await_listening, find_mosquitto, free_port, mosquitto_command
from ftd.transport.wire.codec import MAX_COMMAND_BYTES, MAX_PAYLOAD_BYTES
from ftd.transport.wire.public import StatusRequest
from ftd.transport.wire.topics import Topics
from runtime.groups.store import Rendezvous, StoreConnection, StoreError
from runtime.wire import frames, store_protocol
from tests.helpers.fuzzing import deep, garbled, seeded, twisted
from tests.helpers.listening import Door, answer, documented, doors_of, refusal, undocumented
from tests.helpers.waiting import PATIENCE_S
from tests.helpers.wire_messages import Wire, compressed_command

pytestmark = pytest.mark.skipif(find_mosquitto() is None, reason="mosquitto is not installed")

ROOT = Path(__file__).resolve().parents[2]
SECRET, TOKEN = "a secret of this test", "a-token-of-this-test"
EFFORT = int(os.environ.get("FTD_FUZZ", "1"))
T = Topics(cluster="lab")


@dataclass(slots=True)
class Daemon:
    name: str
    process: subprocess.Popen[bytes]
    log: Path

    @property
    def said(self) -> str:
        return self.log.read_text()

    def alive(self) -> bool:
        return self.process.poll() is None


class Deployment:
    """A broker, a coordinator, a node and a snapshot agent, as on separate hosts; everything that can listen
    does.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.daemons: dict[str, Daemon] = {}
        self.ports = {
            name: free_port() for name in ("broker", "coordinator", "dashboard", "node", "snapshot agent")
        }
        for file, text in (("secret", SECRET), ("token", TOKEN)):
            path = directory / file
            path.touch(mode=0o600)
            path.write_text(text)
        self._start("broker", mosquitto_command(directory, self.ports["broker"]))
        await_listening("127.0.0.1", self.ports["broker"], PATIENCE_S)
        tables = f'[coordinator]\nstate_dir = "state"\n{self._metrics("coordinator")}'
        tables += f'[dashboard]\nlisten = "0.0.0.0:{self.ports["dashboard"]}"\ntoken_file = "token"\n'
        self._ftd("coordinator", tables, "coordinator")
        self._ftd("node", self._node("host-a", self._metrics("node")), "node")
        self._ftd("snapshot agent", self._node("host-k", ""), "node", "--snapshots-only")
        for name, word in (
            ("coordinator", '"started"'),
            ("node", '"connected"'),
            ("snapshot agent", '"snapshot_agent_started"'),
        ):
            until(
                lambda name=name, word=word: word in self.daemons[name].said,
                f"{name} is up",
                self.daemons[name],
            )

    def _metrics(self, name: str) -> str:
        return f'metrics_port = {self.ports[name]}\nmetrics_host = "0.0.0.0"\nmetrics_token_file = "token"\n'

    def _node(self, name: str, more: str) -> str:
        # 127.0.0.2 is this host, and for ftd an address like any other: it listens on all addresses.
        memory = shared_memory(self.directory) / name
        return (
            f'[node]\nname = "{name}"\nhost = "127.0.0.2"\nruntime_dir = "{self.directory / name}"\npreload = []\n'
            f'snapshot_dir = "{memory}"\n{more}'
        )

    def _ftd(self, name: str, tables: str, *command: str) -> None:
        config = self.directory / f"{name}.toml"
        url = f"mqtt://127.0.0.1:{self.ports['broker']}"
        config.write_text(f'cluster = "lab"\nsecret_file = "secret"\n[broker]\nurl = "{url}"\n{tables}')
        self._start(name, [sys.executable, "-m", "ftd.cli.main", *command, "--config", str(config)])

    def _start(self, name: str, command: list[str]) -> None:
        log = self.directory / f"{name}.log"
        with log.open("wb") as output:
            process = subprocess.Popen(command, stdout=output, stderr=output, cwd=ROOT)
        self.daemons[name] = Daemon(name, process, log)

    @property
    def address(self) -> ClusterAddress:
        return ClusterAddress(
            broker=BrokerAddress(host="127.0.0.1", port=self.ports["broker"]), cluster="lab"
        )

    def metric(self, name: str, metric: str) -> float:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.ports[name]}/metrics", headers={"Authorization": f"Bearer {TOKEN}"}
        )
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as response:
            text = response.read().decode()
        return sum(float(value) for value in re.findall(rf"^{metric}(?:\{{[^}}]*\}})? (\S+)$", text, re.M))

    def door(self, name: str, how: str) -> Door:
        """Return the port whose service rejects strangers in this way."""
        found = [d for d in doors_of(self.daemons[name].process.pid) if d.kind == "tcp" and refusal(d) == how]
        return next(door for door in found if door.port not in self.ports.values())

    def close(self) -> None:
        for daemon in reversed(self.daemons.values()):
            daemon.process.send_signal(signal.SIGTERM if daemon.name == "node" else signal.SIGKILL)
        for daemon in self.daemons.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                daemon.process.wait(30)
            daemon.process.kill()
            daemon.process.wait()


def until(holds: Callable[[], Any], what: str, daemon: Daemon) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        assert daemon.alive() and time.monotonic() < deadline, f"{what}\n{daemon.said[-3000:]}"
        time.sleep(0.05)


@pytest.fixture(scope="module")
def lab() -> Iterator[Deployment]:
    with private_directory() as directory:
        lab = Deployment(directory)
        try:
            yield lab
        finally:
            lab.close()


@pytest.fixture(autouse=True)
def check_daemons(lab: Deployment) -> Iterator[None]:
    """Check after each test that no daemon has ended, found a bug, or filled its log."""
    before = {name: len(daemon.said) for name, daemon in lab.daemons.items()}
    yield
    for name, daemon in lab.daemons.items():
        assert daemon.alive(), daemon.said[-3000:]
        assert "Traceback" not in daemon.said, daemon.said[-6000:]
        assert len(daemon.said) - before[name] < 60_000, "the log is flooded"
    for name in ("coordinator", "node"):
        assert lab.metric(name, "ftd_internal_errors_total") == 0


# --- who listens ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["coordinator", "node", "snapshot agent"])
def test_nothing_listens_that_the_model_does_not_name(lab: Deployment, name: str) -> None:
    pid = lab.daemons[name].process.pid
    found = doors_of(pid)
    assert len(found) == len(documented(name)), found
    assert undocumented(name, pid) == []


def test_an_undocumented_port_is_found() -> None:
    with socket.create_server(("127.0.0.1", 0)) as forgotten:
        assert Door(kind="tcp", address="127.0.0.1", port=forgotten.getsockname()[1]) in doors_of(os.getpid())


# --- ports ---------------------------------------------------------------------------------------

HTTP = [
    ("coordinator", "coordinator"),
    ("coordinator", "dashboard"),
    ("node", "node"),
    ("node", ""),
    ("snapshot agent", ""),
]


def nonsense(rng: Any) -> bytes:
    line = rng.choice(
        (b"GET /metrics", b"GET /v1/j/5", b"PUT /v1/j/5/copies/o/0", b"POST /scripts/pin", b"BREW /")
    )
    token = rng.choice((b"", b"Bearer ", b"Bearer guess", b"Basic eDp5", b"Bearer \xff\xfe"))
    body = rng.choice((b"", b"{}", b"x" * 70_000, deep(b"[")))
    head = line + b" HTTP/1.1\r\nHost: x\r\nAuthorization: " + token + b"\r\n"
    head += rng.choice(
        (b"", b"Content-Length: 5\r\n", b"Content-Length: -1\r\n", b"Transfer-Encoding: chunked\r\n")
    )
    return garbled(rng, head + b"Connection: close\r\n\r\n") + body


@pytest.mark.parametrize(("name", "port"), HTTP, ids=str)
def test_http_servers_reject_every_stranger(lab: Deployment, name: str, port: str) -> None:
    door = Door(kind="tcp", address="", port=lab.ports[port]) if port else lab.door(name, "401")
    for rng in seeded(7, 60 * EFFORT):
        back = answer(door, nonsense(rng), patience_s=0.3)
        assert not re.match(rb"HTTP/1\.\d 2", back), back[:300]
        assert SECRET.encode() not in back and TOKEN.encode() not in back
    assert refusal(door) == "401"
    if name == "node":
        metric = "ftd_metrics_unauthorised_total" if port else "ftd_node_unauthorised_total"
        assert lab.metric("node", metric) > 0


def test_a_rendezvous_rejects_other_secrets_old_proofs_and_nonsense(lab: Deployment) -> None:
    door = lab.door("node", "StoreRejected")
    there = {"host": "127.0.0.1", "port": door.port}
    current = StoreConnection(Rendezvous(**there, token=SECRET, generation=7), 0, PATIENCE_S)
    current.request(store_protocol.StoreSet(key="k", value=b"v"))
    with pytest.raises(StoreError, match="wrong secret"):
        StoreConnection(Rendezvous(**there, token="guess", generation=8), 0, PATIENCE_S)
    with pytest.raises(StoreError, match="generation 6 is over"):
        StoreConnection(Rendezvous(**there, token=SECRET, generation=6), 0, PATIENCE_S)
    heard_on_the_wire = store_protocol.make_proof(SECRET, 7)
    for generation in (8, 2**63):
        replayed = store_protocol.StoreHello(proof=heard_on_the_wire, generation=generation, rank=0)
        assert b"wrong secret" in answer(door, frames.encode(replayed))
    hello = frames.encode(store_protocol.StoreHello(proof=heard_on_the_wire, generation=7, rank=0))
    for rng in seeded(8, 150 * EFFORT):
        wrong = garbled(rng, frames.encode(store_protocol.StoreSet(key="another", value=b"x")))
        answer(door, (hello + wrong) if rng.random() < 0.5 else wrong, patience_s=0.05)
    answer(door, (1 << 19).to_bytes(4, "big") + b"x" * 5000, patience_s=0.2)
    assert current.request(store_protocol.StoreGet(keys=("k",), timeout_s=1.0)) == (b"v",)
    current.close()
    assert lab.metric("node", "ftd_node_rendezvous_rejected_total") > 20
    assert lab.daemons["node"].said.count('"rendezvous_rejected"') <= 2


def test_silent_strangers_do_not_block_a_trainer(lab: Deployment) -> None:
    door = lab.door("node", "StoreRejected")
    with contextlib.ExitStack() as stack:
        for _ in range(400):
            stack.enter_context(socket.create_connection(("127.0.0.1", door.port), PATIENCE_S))
        rendezvous = Rendezvous(host="127.0.0.1", port=door.port, token=SECRET, generation=9)
        StoreConnection(rendezvous, 0, PATIENCE_S).close()


# --- topics --------------------------------------------------------------------------------------


def poison(wire: Wire, rng: Any) -> tuple[str, bytes]:
    """Return a topic and an invalid message for it; some are old ones from an earlier run."""
    ask = {"request": f"r-{rng.random()}", "reply": "me"}
    signal, command = rng.choice(list(wire.signals.values())), rng.choice(list(wire.commands.values()))
    job = {"name": "j", "steps": 3, "policy": {}, "training": {}}
    state = {
        "node": "host-a", "incarnation": 1, "state": "HEALTHY", "generation": 1, "step": 2, "reason": "",
        "at": "", "devices": 1, "host": "h",
    }  # fmt: skip
    event = {
        "event": "RolledBack", "node": "host-a", "generation": 1, "step": 2**63, "reason": "", "at": "",
        "monotonic": 1.0, "cause": "c", "details": {}, "source": "node/host-a",
    }  # fmt: skip
    topic, valid = rng.choice(
        [
            (T.node_signal("host-a"), signal),
            (T.node_signal("ghost"), signal),
            (T.node_command("host-a"), command),
            (T.command, rng.choice(list(wire.broadcasts.values()))),
            (T.node_state("host-a"), state),
            (T.node_state("ghost"), {**state, "node": "ghost", "state": "OFFLINE"}),
            (T.request, {**ask, "do": "submit", "job": job}),
            (T.request, {**ask, "do": "history", "after": rng.choice((2**64, -5, 0))}),
            (T.request, {**ask, "do": "snapshot", "every_steps": "auto", "protection": "arc:9"}),
            (T.events, event),
            (T.events, {**event, "event": "TrainerStarted", "step": None}),
            (T.cluster_state, {"phase": "RUNNING"}),
            (T.chaos("host-a"), {**ask, "do": "kill"}),
            (T.trace("host-a"), {**ask, "steps": 3}),
            (T.node_echo("host-a"), {"x": 1}),
        ]
    )
    if isinstance(valid, bytes):
        data = msgspec.msgpack.decode(valid)
        if topic != T.command:
            data["node"] = topic.split("/")[-2]
        wrong = msgspec.msgpack.encode({**data, "body": twisted(rng, data["body"])})
        found = rng.choice((valid, garbled(rng, valid), wrong))
        return topic, compressed_command(found) if topic == T.command and rng.random() < 0.8 else found
    text = json.dumps(twisted(rng, valid) if rng.random() < 0.6 else valid, default=str).encode()
    return topic, garbled(rng, text) if rng.random() < 0.3 else text


def test_daemons_survive_any_message_on_their_topics(lab: Deployment, wire: Wire) -> None:
    """Forged, replayed, oversized, malformed: no job runs, no fault is injected, and the journal is unchanged."""

    async def scene() -> None:
        async with ClusterClient(lab.address, listen=True) as client:
            session = client._session
            for rng in seeded(9, 1200 * EFFORT):
                topic, payload = poison(wire, rng)
                session.publish(topic, payload, retain=rng.random() < 0.02)
            for topic in (T.node_signal("host-a"), T.request, T.events, T.trace("host-a")):
                session.publish(topic, b"\x91" * (MAX_PAYLOAD_BYTES + 1))
                session.publish(topic, deep(b"[", b"]"))
            for topic in (T.node_command("host-a"), T.command):
                session.publish(topic, b"\x91" * (MAX_COMMAND_BYTES + 1))
            session.publish(T.command, compressed_command(bytes(MAX_COMMAND_BYTES + 1)))
            await session.flush(PATIENCE_S)
            answer = await client.request(StatusRequest(**client.envelope()))
            assert answer.data is not None and answer.data["job"] is None
            history = await client.history()
            assert not [e for e in history if e["event"] in ("RolledBack", "JobSubmitted", "ChaosInjected")]
            deadline = time.monotonic() + PATIENCE_S
            while not any(e["details"].get("suppressed", 0) > 1 for e in history):
                assert time.monotonic() < deadline, "rejections are published one by one"
                # The number that was suppressed comes with the next event.
                session.publish(T.request, b"\x91")
                await asyncio.sleep(0.2)
                history = await client.history()

    asyncio.run(scene())
    for name in ("coordinator", "node"):
        assert lab.metric(name, "ftd_messages_rejected_total") > 50
    until(lambda: "host-a" in state_of(lab)["nodes"], "the node is still known", lab.daemons["coordinator"])


def state_of(lab: Deployment) -> dict[str, Any]:
    async def ask() -> dict[str, Any]:
        async with ClusterClient(lab.address) as client:
            answer = await client.request(StatusRequest(**client.envelope()))
            assert answer.data is not None
            return answer.data

    return asyncio.run(ask())
