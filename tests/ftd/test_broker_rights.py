"""A real mosquitto with TLS, passwords and the ACL of ``ftd acl``: who gets through, and who does not."""

import asyncio
import contextlib
import os
import pwd
import shutil
import subprocess
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import trustme
from structlog.testing import capture_logs

from ftd.config.address import BrokerAddress, Tls
from ftd.errors import ConfigurationError, Unreachable
from ftd.mqtt.acl import Users, acl_text
from ftd.mqtt.mosquitto import await_listening, find_mosquitto, free_port
from ftd.mqtt.session import MqttSession, Will
from ftd.wire.topics import Topics

PATIENCE_S = 30.0
T = Topics(cluster="lab")
USERS = Users(nodes=["host-a", "host-b"], operators=["alice"], tools=["grafana"], chaos=["mallory"])
NAMES = (USERS.coordinator, *USERS.nodes, *USERS.operators, *USERS.tools, *USERS.chaos)

pytestmark = pytest.mark.skipif(
    find_mosquitto() is None or shutil.which("mosquitto_passwd") is None, reason="mosquitto is not installed"
)


class SecureBroker:
    """Certificates are made by an authority of the test's own; passwords are names, reversed."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.authority = trustme.CA()
        self.authority.cert_pem.write_to_path(directory / "ca.pem")
        self.ports: list[int] = []
        self.processes: list[subprocess.Popen[bytes]] = []
        (directory / "acl").write_text(acl_text("lab", USERS))
        for file in ("acl", "passwords"):
            (directory / file).touch(mode=0o600)
        for name in NAMES:
            command = ["mosquitto_passwd", "-b", str(directory / "passwords"), name, name[::-1]]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)

    def start(self, *identities: str, expires: datetime | None = None) -> int:
        """A broker with a certificate for these names; its port."""
        port = free_port()
        here = self.directory / str(port)
        here.mkdir()
        certificate = self.authority.issue_cert(*identities, not_after=expires)
        certificate.private_key_pem.write_to_path(here / "key.pem")
        for blob in certificate.cert_chain_pems:
            blob.write_to_path(here / "cert.pem", append=True)
        (here / "mosquitto.conf").write_text(
            f"listener {port} 127.0.0.1\n"
            f"certfile {here}/cert.pem\nkeyfile {here}/key.pem\n"
            f"allow_anonymous false\npassword_file {self.directory}/passwords\n"
            f"acl_file {self.directory}/acl\n"
            f"user {pwd.getpwuid(os.getuid()).pw_name}\nlog_dest none\n"
        )
        binary = str(find_mosquitto())
        self.processes.append(subprocess.Popen([binary, "-c", str(here / "mosquitto.conf")]))
        await_listening("127.0.0.1", port, PATIENCE_S)
        return port

    def address(self, user: str, port: int) -> BrokerAddress:
        tls = Tls(ca_file=self.directory / "ca.pem")
        return BrokerAddress(host="localhost", port=port, username=user, password=user[::-1], tls=tls)

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecureBroker]:
    made = SecureBroker(tmp_path_factory.mktemp("secure"))
    yield made
    made.close()


@pytest.fixture(scope="module")
def port(broker: SecureBroker) -> int:
    return broker.start("localhost")


class Member:
    """Somebody at the broker, with what came."""

    def __init__(self, address: BrokerAddress, *subscriptions: str) -> None:
        self.heard: asyncio.Queue[tuple[str, bytes]] = asyncio.Queue()
        self.session = MqttSession(
            address,
            client_id=f"test-{id(self)}",
            subscriptions=subscriptions,
            on_message=lambda topic, payload, _: self.heard.put_nowait((topic, payload)),
        )


@contextlib.asynccontextmanager
async def joined(address: BrokerAddress, *subscriptions: str) -> AsyncIterator[Member]:
    member = Member(address, *subscriptions)
    task = asyncio.create_task(member.session.run())
    try:
        await member.session.wait_connected(PATIENCE_S)
        yield member
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def problem_of(address: BrokerAddress, *subscriptions: str) -> str:
    """What is said of a connection that does not come about."""
    member = Member(address, *subscriptions)
    task = asyncio.create_task(member.session.run())
    try:
        with pytest.raises(Unreachable) as caught:
            await member.session.wait_connected(2.0)
        assert not task.done(), "it goes on trying"
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    return str(caught.value)


READS = {
    USERS.coordinator: (T.node_signal(), T.node_state(), T.request, T.events, T.cluster_state),
    "host-a": (T.node_command("host-a"), T.chaos("host-a"), T.node_state("host-a")),
    "grafana": (T.cluster_state, T.node_state(), T.events),
    "alice": (T.cluster_state, T.events, T.reply("me")),
}
WRITES = [
    ("host-a", T.node_signal("host-a"), USERS.coordinator),
    ("host-a", T.node_state("host-a"), "grafana"),
    ("host-a", T.events, "alice"),
    (USERS.coordinator, T.node_command("host-a"), "host-a"),
    (USERS.coordinator, T.cluster_state, "grafana"),
    (USERS.coordinator, T.reply("me"), "alice"),
    ("alice", T.request, USERS.coordinator),
    ("mallory", T.chaos("host-a"), "host-a"),
]
DENIED = [
    ("host-b", T.node_signal("host-a"), USERS.coordinator),
    ("host-b", T.node_state("host-a"), USERS.coordinator),
    ("host-b", T.node_command("host-a"), "host-a"),
    ("host-b", T.request, USERS.coordinator),
    ("host-b", T.cluster_state, USERS.coordinator),
    ("grafana", T.request, USERS.coordinator),
    ("grafana", T.events, USERS.coordinator),
    ("alice", T.chaos("host-a"), "host-a"),
    ("alice", T.node_command("host-a"), "host-a"),
    ("mallory", T.cluster_state, USERS.coordinator),
]


def test_everybody_may_do_their_part_and_nothing_else(broker: SecureBroker, port: int) -> None:
    async def scene() -> None:
        async with contextlib.AsyncExitStack() as stack:
            readers = {
                name: await stack.enter_async_context(joined(broker.address(name, port), *topics))
                for name, topics in READS.items()
            }
            for denied in (True, False):
                # What is denied goes first: if it arrived, it would stand before what is allowed.
                for writer, topic, _ in DENIED if denied else WRITES:
                    async with joined(broker.address(writer, port)) as member:
                        member.session.publish(topic, b"denied" if denied else f"by {writer}".encode())
                        await member.session.flush(PATIENCE_S)
            for writer, topic, reader in WRITES:
                heard: tuple[str, bytes] | None = None
                while heard != (topic, f"by {writer}".encode()):
                    heard = await asyncio.wait_for(readers[reader].heard.get(), PATIENCE_S)
                    assert heard[1] != b"denied", (heard[0], reader)

    asyncio.run(scene())


def test_a_node_with_another_nodes_credentials_says_so(
    broker: SecureBroker, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """mosquitto tells nobody that it drops what they say: who does not hear himself suspects it."""
    monkeypatch.setattr("ftd.mqtt.session.ECHO_S", 1.0)
    topic = T.node_state("host-a")

    async def unheard(user: str) -> bool:
        session = MqttSession(
            broker.address(user, port),
            client_id=f"test-{user}",
            subscriptions=(topic,),
            will=Will(topic=topic, payload=b"gone"),
            on_message=lambda *_: None,
            on_connected=lambda: session.publish(topic, b"here", retain=True),
        )
        with capture_logs() as said:
            task = asyncio.create_task(session.run())
            await session.wait_connected(PATIENCE_S)
            await asyncio.sleep(1.5)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return "unheard" in [entry["event"] for entry in said]

    assert asyncio.run(unheard("host-b"))
    assert not asyncio.run(unheard("host-a"))


@pytest.mark.parametrize(("user", "password"), [("host-a", "wrong"), ("nobody", "x"), (None, None)])
def test_who_cannot_prove_who_he_is_stays_out(
    broker: SecureBroker, port: int, user: str | None, password: str | None
) -> None:
    address = replace(broker.address("host-a", port), username=user, password=password)
    assert "authori" in asyncio.run(problem_of(address)).lower()


def test_a_broker_that_is_somebody_else_is_not_believed(broker: SecureBroker, port: int) -> None:
    async def scene() -> None:
        there = broker.address("host-a", port)
        wrong_name = broker.start("other.example")
        assert "use the name" in await problem_of(replace(there, port=wrong_name))
        expired = broker.start("localhost", expires=datetime.now(UTC) - timedelta(days=1))
        assert "renew the broker's certificate" in await problem_of(replace(there, port=expired))
        assert "broker.ca_file" in await problem_of(replace(there, tls=Tls()))

    asyncio.run(scene())


@pytest.mark.parametrize("names", [["a", "a"], ["coordinator"], ["a b"], ["+"]])
def test_names_that_cannot_be_users_are_refused(names: list[str]) -> None:
    with pytest.raises(ConfigurationError, match="user"):
        Users(nodes=names)
