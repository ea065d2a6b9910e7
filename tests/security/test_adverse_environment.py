"""Daemons in a faulty environment report the problem once, with the remedy, and wait or end; nothing is lost."""

import asyncio
import contextlib
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from ftd.coordinator.journal import Journal
from ftd.transport.address import BrokerAddress, ClusterAddress
from ftd.transport.client import ClusterClient
from ftd.transport.mqtt.mosquitto import await_listening, free_port, mosquitto_command
from ftd.transport.mqtt.session import MqttSession
from ftd.transport.wire.codec import decode_to_node, encode_from_node
from ftd.transport.wire.topics import Topics
from runtime.wire.store_protocol import secret_fingerprint
from statemachine.messages.cluster import Command, FromNode, Hello, Reject, RequestHello
from statemachine.messages.values import NodeFacts
from tests.helpers.commands import ftd_here
from tests.helpers.secure_broker import SecureBroker, needs_mosquitto
from tests.helpers.waiting import PATIENCE_S, until

pytestmark = needs_mosquitto

ROOT = Path(__file__).resolve().parents[2]
USER = '[broker]\nusername = "u"\n'
SHIFTED = """
import datetime, sys, time
import ftd.transport.wire.public as public
shift = datetime.timedelta(hours=float(sys.argv.pop(1)))
class ShiftedClock(datetime.datetime):
    @classmethod
    def now(cls, tz=None):
        return super().now(tz) + shift
public.datetime = ShiftedClock
honest = time.time_ns
time.time_ns = lambda: honest() + int(shift.total_seconds() * 1e9)
from ftd.cli.main import main
main()
"""


class Coordinator:
    """``ftd coordinator``, with a clock that is an hour wrong if requested."""

    def __init__(self, directory: Path, broker: str, *, hours: float = 0.0, state: str = "state") -> None:
        directory.mkdir(exist_ok=True)
        self.log = directory / "log"
        config = directory / "ftd.toml"
        tables = f'[coordinator]\nstate_dir = "{state}"\n[dashboard]\nlisten = ""\n'
        config.write_text(f'cluster = "lab"\n{broker}\n{tables}')
        config.chmod(0o600)
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", SHIFTED, str(hours), "coordinator", "--config", str(config)],
                stdout=log,
                stderr=log,
                cwd=ROOT,
            )

    @property
    def said(self) -> str:
        return self.log.read_text()

    def until(self, word: str) -> None:
        until(lambda: word in self.said or self.process.poll() is not None, word, describe=lambda: self.said)
        assert word in self.said, self.said

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture
def started() -> Iterator[Callable[..., Coordinator]]:
    running: list[Coordinator] = []

    def start(*arguments: Any, **options: Any) -> Coordinator:
        running.append(Coordinator(*arguments, **options))
        return running[-1]

    yield start
    for one in running:
        one.end()
        assert "Traceback" not in one.said, one.said


@pytest.fixture
def port(tmp_path: Path) -> Iterator[int]:
    """Port of a broker without TLS."""
    port = free_port()
    broker = subprocess.Popen(mosquitto_command(tmp_path, port), stderr=subprocess.DEVNULL)
    await_listening("127.0.0.1", port, PATIENCE_S)
    yield port
    broker.kill()
    broker.wait()


# --- files with secrets --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("role", "tables", "mode", "says"),
    [
        (["node"], 'secret_file = "secret"\n', 0o644, "secret_file: .*mode 0644.*chmod o="),
        (["node"], 'secret_file = "missing"\n', 0o600, "secret_file: .*cannot be read.*check the path"),
        (["node"], 'secret_file = "."\n', 0o600, "secret_file: .*(cannot be read|by everybody).*"),
        (["node", "--snapshots-only"], 'secret_file = "secret"\n', 0o604, "secret_file: .*chmod o="),
        (["node"], "", 0o600, 'secret: .*add secret_file = "secret"'),
        (["node"], 'secret = "open"\n', 0o600, "secret: .*can read or change .*ftd.toml .*chmod o="),
        (["coordinator"], f'{USER}password_file = "secret"\n', 0o644, "password_file: .*chmod o="),
        (["coordinator"], f'{USER}password = "p"\n', 0o600, "broker.password: .*chmod o="),
    ],
)  # fmt: skip
def test_a_file_with_a_secret_that_cannot_be_used(
    tmp_path: Path,
    role: list[str],
    tables: str,
    mode: int,
    says: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The exit code is 2, after which systemd does not start it again (RestartPreventExitStatus)."""
    (tmp_path / "secret").write_text("x\n")
    (tmp_path / "secret").chmod(mode)
    (tmp_path / "ftd.toml").write_text(tables)
    code, _, err = ftd_here(*role, "--config", str(tmp_path / "ftd.toml"), patch=monkeypatch, said=capsys)
    assert code == 2
    (line,) = err.strip().splitlines()
    assert re.search(says, line), line


# Root reads and writes everything: without these two capabilities a file's mode applies to it as the owner.
UNPRIVILEGED = ("setpriv", "--bounding-set", "-dac_override,-dac_read_search",
                "--inh-caps", "-dac_override,-dac_read_search")  # fmt: skip


def test_files_and_directories_that_this_user_may_not_use_are_named_with_the_remedy(tmp_path: Path) -> None:
    """The test runs in separate processes, so that the file modes apply to any user who runs the tests."""
    if os.getuid() == 0 and shutil.which("setpriv") is None:
        pytest.skip("setpriv is not installed, and root may read everything")
    (tmp_path / "secret").write_text("x\n")
    (tmp_path / "closed").mkdir()
    node = '[node]\nname = "a"\nhost = "127.0.0.1"\n'
    cases = {
        "secret": (
            "node",
            'secret_file = "secret"\n',
            2,
            "secret_file: .*check the path and the permissions of this user",
        ),
        "password": (
            "coordinator",
            f'{USER}password_file = "secret"\n',
            2,
            "broker.password_file: .*this user",
        ),
        "state": (
            "coordinator",
            '[coordinator]\nstate_dir = "closed"\n',
            1,
            "denied .*coordinator.state_dir",
        ),
        "runtime": (
            "node",
            f'{node}runtime_dir = "{tmp_path}/closed/run"\n',
            2,
            "node.runtime_dir: .*choose a",
        ),
        "memory": (
            "node",
            f'{node}runtime_dir = "{tmp_path}/run"\nsnapshot_dir = "{tmp_path}/closed/shm"\n',
            2,
            "node.snapshot_dir: .*choose a directory below /dev/shm",
        ),
    }
    (tmp_path / "secret").chmod(0)
    (tmp_path / "closed").chmod(0o555)
    running = {}
    held = UNPRIVILEGED if os.getuid() == 0 else ()
    for name, (role, tables, _, _) in cases.items():
        config = tmp_path / f"{name}.toml"
        config.write_text(tables)
        running[name] = subprocess.Popen(
            [*held, sys.executable, "-m", "ftd.cli.main", role, "--config", str(config)],
            env={**os.environ, "FTD_SECRET": "s"} if name in ("runtime", "memory") else None,
            cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
    try:
        for name, (_, _, code, says) in cases.items():
            said = running[name].communicate(timeout=PATIENCE_S)[1]
            assert running[name].returncode == code and re.search(says, said), f"{name}: {said}"
            assert "Traceback" not in said
    finally:
        for process in running.values():
            process.kill()
            process.wait()


# --- the broker ----------------------------------------------------------------------------------


def test_a_broker_that_rejects_or_is_not_trusted_is_logged_once_and_retried(
    tmp_path: Path, started: Callable[..., Coordinator]
) -> None:
    (tmp_path / "broker").mkdir()
    secure = SecureBroker(tmp_path / "broker")
    try:
        sound = secure.start("localhost")
        expired = secure.start("localhost", expires=datetime.now(UTC) - timedelta(days=1))
        foreign = secure.start("other.example")
        password, authority = "rotanidrooc", f'ca_file = "{secure.directory}/ca.pem"\n'
        cases = {
            "refused": (sound, "wrong", authority, "accept the user coordinator with this password"),
            "expired": (expired, password, authority, "renew the broker's certificate"),
            "foreign": (foreign, password, authority, "use the name that the certificate is for"),
            "unknown": (sound, password, "", "name the certificate of its authority in broker.ca_file"),
        }
        daemons = {}
        for name, (port, word, ca, _) in cases.items():
            user = f'username = "coordinator"\npassword = "{word}"\n{ca}'
            daemons[name] = started(tmp_path / name, f'[broker]\nurl = "mqtts://localhost:{port}"\n{user}')
        for name, (*_, says) in cases.items():
            daemons[name].until('"not_connected"')
            assert says.lower() in daemons[name].said.lower()
        time.sleep(2.0)  # It tries again each second, and logs the problem once.
        for daemon in daemons.values():
            assert daemon.process.poll() is None and daemon.said.count('"not_connected"') == 1
    finally:
        secure.close()


# --- the journal's disk --------------------------------------------------------------------------


def test_a_full_disk_ends_the_coordinator_with_the_remedy_and_loses_nothing(
    tmp_path: Path, port: int, started: Callable[..., Coordinator]
) -> None:
    state = tmp_path / "small"
    state.mkdir()
    mounted = (
        shutil.which("mount") is not None
        and not subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(state)], capture_output=True, check=False
        ).returncode
    )
    if not mounted:
        pytest.skip("no file system can be mounted here")
    broker = f'[broker]\nurl = "mqtt://127.0.0.1:{port}"\n'
    try:
        one = started(tmp_path / "one", broker, state=str(state))
        one.until("CoordinatorStarted")
        one.end()
        before = kept(state)
        fill(state)
        two = started(tmp_path / "two", broker, state=str(state))
        assert two.process.wait(PATIENCE_S) == 1
        assert "is the disk full?" in two.said and "journal.sqlite" in two.said
        (state / "filler").unlink()
        assert kept(state) == before
        three = started(tmp_path / "three", broker, state=str(state))
        three.until("CoordinatorStarted")
        fill(state)
        facts = NodeFacts(devices=1, host="127.0.0.1", rendezvous_port=1)
        asyncio.run(HelloNode(port, "host-a", facts).says_hello())
        assert three.process.wait(PATIENCE_S) == 1
        left = asyncio.run(state_at(port))
        assert left["phase"] == "UNREACHABLE" and "is the disk full?" in left["reason"]
        (state / "filler").unlink()
        four = started(tmp_path / "four", broker, state=str(state))
        four.until("CoordinatorStarted")
        four.process.terminate()  # Its last messages are in the journal.
        assert four.process.wait(PATIENCE_S) == 0
        assert len(kept(state)[1]) > len(before[1])
    finally:
        subprocess.run(["umount", "-l", str(state)], check=False)


def fill(directory: Path) -> None:
    with contextlib.suppress(OSError), (directory / "filler").open("wb", buffering=0) as filler:
        while filler.write(b"x" * 4096):
            pass


async def state_at(port: int) -> dict[str, Any]:
    address = ClusterAddress(broker=BrokerAddress(host="127.0.0.1", port=port), cluster="lab")
    async with ClusterClient(address) as client:
        return dict(await client.state())


def kept(state: Path) -> tuple[bytes | None, list[str]]:
    journal = Journal(state)
    found = journal.load(), [event["id"] for event in journal.events(after=0, limit=100, newest=False)[0]]
    journal.close()
    return found


# --- clocks, secrets and versions of others ------------------------------------------------------


class HelloNode:
    """A node that only says Hello."""

    def __init__(self, port: int, name: str, facts: NodeFacts) -> None:
        self.commands: asyncio.Queue[Command] = asyncio.Queue()
        self._name, self._facts, self._topics = name, facts, Topics(cluster="lab")
        self._session = MqttSession(
            BrokerAddress(host="127.0.0.1", port=port),
            client_id=name,
            subscriptions=[self._topics.node_command(name)],
            on_message=lambda _, payload, __: self.commands.put_nowait(decode_to_node(payload, name).command),
        )

    async def says_hello(self, *, without: str = "", answer_s: float = 1.0) -> Command | None:
        """Return the coordinator's answer within this time; ``None`` if it sends none, as to nodes that it
        accepts.
        """
        running = asyncio.create_task(self._session.run())
        await self._session.wait_connected(PATIENCE_S)
        hello = Hello(
            facts=self._facts, job_id=None, prepared=False, generation=0, training=False, quiesced=False
        )
        signed = FromNode(node=self._name, incarnation=1, signal=hello)
        message = msgspec.msgpack.decode(encode_from_node(signed))
        message["body"]["facts"].pop(without, None)
        self._session.publish(self._topics.node_signal(self._name), msgspec.msgpack.encode(message))
        await self._session.flush(PATIENCE_S)
        found: Command | None = None
        try:
            while found is None or isinstance(found, RequestHello):
                found = await asyncio.wait_for(self.commands.get(), answer_s)
        except TimeoutError:
            found = None
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        return found


def test_wrong_clocks_older_nodes_and_other_secrets(
    tmp_path: Path, port: int, started: Callable[..., Coordinator]
) -> None:
    """A wrong clock changes only what the doctor reports; the other nodes are rejected, with the reason."""
    broker = f'[broker]\nurl = "mqtt://127.0.0.1:{port}"\n'
    patient = "[timing]\nsilence_s = 60.0\n"  # The nodes here send one message each.
    coordinator = started(tmp_path / "late", broker + patient, hours=-1.0)
    coordinator.until('"leading"')  # Earlier log lines are not examined.
    facts = NodeFacts(
        devices=1, host="127.0.0.1", rendezvous_port=1, secret_fingerprint=secret_fingerprint("right")
    )
    config = tmp_path / "doctor.toml"
    config.write_text(f'cluster = "lab"\nsecret_file = "secret"\n{broker}[node]\nname = "host-e"\n')
    (tmp_path / "secret").write_text("right\n")
    (tmp_path / "secret").chmod(0o600)

    async def scene() -> None:
        address = ClusterAddress(broker=BrokerAddress(host="127.0.0.1", port=port), cluster="lab")
        async with ClusterClient(address) as client:
            assert await HelloNode(port, "host-a", facts).says_hello() is None
            other = HelloNode(port, "host-b", replace(facts, secret_fingerprint=secret_fingerprint("wrong")))
            other = await other.says_hello(answer_s=PATIENCE_S)
            assert isinstance(other, Reject) and "secret differs from that of host-a" in other.reason
            old = await HelloNode(port, "host-c", facts).says_hello(without="protocol", answer_s=PATIENCE_S)
            assert isinstance(old, Reject) and "install the same version of ftd" in old.reason
            assert await HelloNode(port, "host-d", facts).says_hello() is None
            joined: list[str] = []
            async with asyncio.timeout(PATIENCE_S):
                while "host-d" not in joined:
                    events = await client.history()
                    joined = [e["node"] for e in events if e["event"] == "NodeJoined"]
            assert joined == ["host-a", "host-d"]
            assert [e["node"] for e in events if e["event"] == "NodeRejected"] == ["host-b", "host-c"]
        doctor = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "ftd.cli.main", "doctor", "--config", str(config),
            cwd=ROOT, stdout=subprocess.PIPE,
        )  # fmt: skip
        said = asyncio.create_task(doctor.communicate())
        for number in range(int(PATIENCE_S)):  # A coordinator that publishes an event shows its clock.
            if said.done():
                break
            await HelloNode(port, f"late-{number}", facts).says_hello()
        text = (await said)[0].decode()
        assert (
            re.search(r"\+(3599|36\d\d)\.\d s relative to the coordinator's clock", text) and "chrony" in text
        ), text

    asyncio.run(scene())
