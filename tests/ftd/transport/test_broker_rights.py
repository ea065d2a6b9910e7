"""A real mosquitto with TLS, passwords and the ACL of ``ftd acl``: who may connect, publish and subscribe."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from ftd.errors import ConfigurationError, UnreachableError
from ftd.transport.address import BrokerAddress, Tls
from ftd.transport.mqtt.acl import Users
from ftd.transport.mqtt.session import MqttSession, Will
from ftd.transport.wire.topics import Topics
from tests.helpers.secure_broker import USERS, SecureBroker, needs_mosquitto
from tests.helpers.waiting import PATIENCE_S

pytestmark = needs_mosquitto

T = Topics(cluster="lab")


class BrokerClient:
    """A client of the broker that records its messages."""

    def __init__(self, address: BrokerAddress, *subscriptions: str) -> None:
        self.received: asyncio.Queue[tuple[str, bytes]] = asyncio.Queue()
        self.session = MqttSession(
            address,
            client_id=f"test-{id(self)}",
            subscriptions=subscriptions,
            on_message=lambda topic, payload, _: self.received.put_nowait((topic, payload)),
        )


@contextlib.asynccontextmanager
async def joined(address: BrokerAddress, *subscriptions: str) -> AsyncIterator[BrokerClient]:
    member = BrokerClient(address, *subscriptions)
    task = asyncio.create_task(member.session.run())
    try:
        await member.session.wait_connected(PATIENCE_S)
        yield member
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def problem_of(address: BrokerAddress, *subscriptions: str) -> str:
    """Return the error of a connection that is not made."""
    member = BrokerClient(address, *subscriptions)
    untried = member.session.problem
    task = asyncio.create_task(member.session.run())
    try:
        async with asyncio.timeout(PATIENCE_S):
            while member.session.problem == untried:  # noqa: ASYNC110  # it is reported to callers that wait too long
                await asyncio.sleep(0.02)
        with pytest.raises(UnreachableError) as caught:
            await member.session.wait_connected(0.5)
        assert not task.done(), "it goes on trying"
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    return str(caught.value)


READS = {
    USERS.coordinator: (T.node_signal(), T.node_state(), T.request, T.events, T.cluster_state, T.command),
    "host-a": (
        T.node_command("host-a"),
        T.command,
        T.chaos("host-a"),
        T.trace("host-a"),
        T.node_state("host-a"),
    ),
    "grafana": (T.cluster_state, T.node_state(), T.events),
    "alice": (T.cluster_state, T.events, T.reply("me")),
}
WRITES = [
    ("host-a", T.node_signal("host-a"), USERS.coordinator),
    ("host-a", T.node_state("host-a"), "grafana"),
    ("host-a", T.events, "alice"),
    (USERS.coordinator, T.node_command("host-a"), "host-a"),
    (USERS.coordinator, T.command, "host-a"),
    (USERS.coordinator, T.node_state("host-a"), "host-a"),
    (USERS.coordinator, T.cluster_state, "grafana"),
    (USERS.coordinator, T.reply("me"), "alice"),
    ("alice", T.request, USERS.coordinator),
    ("alice", T.trace("host-a"), "host-a"),
    ("mallory", T.chaos("host-a"), "host-a"),
]
DENIED = [
    ("host-b", T.node_signal("host-a"), USERS.coordinator),
    ("host-b", T.node_state("host-a"), USERS.coordinator),
    ("host-b", T.node_command("host-a"), "host-a"),
    ("host-a", T.command, "host-a"),
    ("host-b", T.command, USERS.coordinator),
    ("host-b", T.request, USERS.coordinator),
    ("host-b", T.cluster_state, USERS.coordinator),
    ("grafana", T.request, USERS.coordinator),
    ("grafana", T.events, USERS.coordinator),
    ("alice", T.chaos("host-a"), "host-a"),
    ("alice", T.node_command("host-a"), "host-a"),
    ("alice", T.command, "host-a"),
    ("mallory", T.command, "host-a"),
    ("mallory", T.cluster_state, USERS.coordinator),
]


def test_each_role_may_do_its_part_and_nothing_else(secure: SecureBroker, port: int) -> None:
    async def scene() -> None:
        async with contextlib.AsyncExitStack() as stack:
            readers = {
                name: await stack.enter_async_context(joined(secure.address(name, port), *topics))
                for name, topics in READS.items()
            }
            for denied in (True, False):
                # Forbidden messages go first: if they arrived, they would come before the permitted ones.
                for writer, topic, _ in DENIED if denied else WRITES:
                    async with joined(secure.address(writer, port)) as member:
                        member.session.publish(topic, b"denied" if denied else f"by {writer}".encode())
                        await member.session.flush(PATIENCE_S)
            for writer, topic, reader in WRITES:
                received: tuple[str, bytes] | None = None
                while received != (topic, f"by {writer}".encode()):
                    received = await asyncio.wait_for(readers[reader].received.get(), PATIENCE_S)
                    assert received[1] != b"denied", (received[0], reader)

    asyncio.run(scene())


def test_a_node_with_another_nodes_credentials_says_so(
    secure: SecureBroker, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """mosquitto drops messages silently: a client that does not receive its own message suspects that."""
    monkeypatch.setattr("ftd.transport.mqtt.session.ECHO_S", 0.5)
    complaints: list[str] = []
    monkeypatch.setattr("ftd.transport.mqtt.session._log.error", lambda event, **_: complaints.append(event))
    topic = T.node_state("host-a")

    async def unheard(user: str) -> bool:
        session = MqttSession(
            secure.address(user, port),
            client_id=f"test-{user}",
            subscriptions=(topic,),
            will=Will(topic=topic, payload=b"gone"),
            on_message=lambda *_: echoes.append(1),
            on_connected=lambda: session.publish(topic, b"here", retain=True),
        )
        echoes: list[int] = []
        complaints.clear()
        task = asyncio.create_task(session.run())
        await session.wait_connected(PATIENCE_S)
        async with asyncio.timeout(PATIENCE_S):
            while not complaints and not echoes:  # noqa: ASYNC110  # one of them comes
                await asyncio.sleep(0.02)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        if echoes:
            session._log_missing_echo(topic)  # This happens when its time is over.
        assert len(complaints) + len(echoes) == 1
        return complaints == ["own_message_not_received"]

    assert asyncio.run(unheard("host-b"))
    monkeypatch.setattr("ftd.transport.mqtt.session.ECHO_S", PATIENCE_S)
    assert not asyncio.run(unheard("host-a"))


@pytest.mark.parametrize(("user", "password"), [("host-a", "wrong"), ("nobody", "x"), (None, None)])
def test_a_client_without_valid_credentials_is_rejected(
    secure: SecureBroker, port: int, user: str | None, password: str | None
) -> None:
    address = replace(secure.address("host-a", port), username=user, password=password)
    assert "authori" in asyncio.run(problem_of(address)).lower()


def test_a_broker_with_a_wrong_certificate_is_rejected(secure: SecureBroker, port: int) -> None:
    async def scene() -> None:
        there = secure.address("host-a", port)
        wrong_name = secure.start("other.example")
        assert "use the name" in await problem_of(replace(there, port=wrong_name))
        expired = secure.start("localhost", expires=datetime.now(UTC) - timedelta(days=1))
        assert "renew the broker's certificate" in await problem_of(replace(there, port=expired))
        assert "broker.ca_file" in await problem_of(replace(there, tls=Tls()))

    asyncio.run(scene())


@pytest.mark.parametrize("names", [["a", "a"], ["coordinator"], ["a b"], ["+"]])
def test_names_that_cannot_be_users_are_rejected(names: list[str]) -> None:
    with pytest.raises(ConfigurationError, match="user"):
        Users(nodes=names)
