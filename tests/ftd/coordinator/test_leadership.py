"""Several coordinators at real brokers: one leads, and only its messages arrive."""

import asyncio
import contextlib
import signal
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

import ftd
from ftd.coordinator.leadership import Leadership, LeadershipCallbacks
from ftd.coordinator.ports import Observer, Program
from ftd.driver import SystemClock
from ftd.errors import JournalError
from ftd.transport.address import BrokerAddress
from ftd.transport.mqtt.session import MqttSession
from ftd.transport.mqtt.transport import MqttTransport
from ftd.transport.wire.coordinator_messages import JournalCopy, encode_copy
from ftd.transport.wire.topics import Topics
from statemachine.cluster.durable import durable
from statemachine.effects import EmitEvent
from statemachine.election.leadership import Leader, Peer
from statemachine.election.peer_knowledge import FORGOTTEN_TERMS
from statemachine.messages.values import PROTOCOL
from statemachine.timing import Timing
from tests.helpers.brokers import RunningBroker
from tests.helpers.waiting import PATIENCE_S, until_async

TOPICS = Topics(cluster="t")
TIMING = Timing(leader_heartbeat_s=0.1, leader_silence_s=2.0, election_s=0.2)
COMMAND = TOPICS.node_command("node-0")


class Coordinator:
    """A driver that records the callbacks of one coordinator and publishes for it."""

    def __init__(self, name: str, incarnation: int, broker: BrokerAddress) -> None:
        self.name = name
        self.state = b"nothing"
        self.begun: list[tuple[Leader, JournalCopy | None]] = []
        self.ended: list[Leader] = []
        self.events: list[str] = []
        self.connections = 0
        self.standbys_published: list[list[str]] = []
        """The standbys in each state of the cluster that was published because they changed."""
        self.copies: list[JournalCopy] = []
        self.full = False
        """Whether the coordinator's disk takes no journal."""
        transport = MqttTransport(broker, TOPICS.cluster)
        self.size_limit = transport.session.keywords["size_limit"]
        ports: Any = SimpleNamespace(
            transport=transport,
            program=Program(version=ftd.__version__, schema=durable.SCHEMA),
            clock=SystemClock(),
            observer=Observer(),
        )
        self.journal = SimpleNamespace(
            position=(0, 0), note_peer=lambda name: None, shared=False, peers=frozenset[str]()
        )
        takeover: Any = SimpleNamespace(journal=self.journal, check=lambda copy: "", save_copy=self._keep)
        self.leadership = Leadership(
            ports,
            TOPICS,
            Peer(name=name, incarnation=incarnation),
            TIMING,
            takeover=takeover,
            callbacks=LeadershipCallbacks(
                begin=lambda leader, copy: self.begun.append((leader, copy)),
                state=lambda: self.state,
                end=self.ended.append,
                emit=self._emit,
                publish_state=self._shown,
                on_message=lambda topic, payload, retained: None,
                on_connected=self._connected,
                on_lost=lambda: None,
                on_event=lambda payload: None,
                on_state=lambda state: None,
            ),
        )
        self.task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self.task = asyncio.ensure_future(self.leadership.run())

    async def end(self) -> None:
        if self.task is not None:
            self.task.cancel()
            await asyncio.gather(self.task, return_exceptions=True)

    def _emit(self, event: EmitEvent) -> None:
        self.events.append(event.name)

    def _keep(self, copy: JournalCopy) -> str:
        if self.full:
            raise JournalError("the disk is full")
        self.copies.append(copy)
        return ""

    def _shown(self) -> None:
        self.standbys_published.append(self.leadership.public_state()["standbys"])

    def _connected(self) -> None:
        self.connections += 1

    def say(self, word: bytes) -> None:
        """Journal a command, then send it to a node."""
        self.leadership.replicate(word, time.monotonic())
        self.leadership.publish(COMMAND, word)


class Proxy:
    """A proxy between a coordinator and its broker; ``cut`` stops all bytes and closes nothing."""

    def __init__(self, port: int) -> None:
        self._port, self._open = port, asyncio.Event()
        self._open.set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> BrokerAddress:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        return BrokerAddress(host="127.0.0.1", port=self._server.sockets[0].getsockname()[1])

    def cut(self) -> None:
        self._open.clear()

    def heal(self) -> None:
        self._open.set()

    async def close(self) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, out = await asyncio.open_connection("127.0.0.1", self._port)
        for task in (
            asyncio.ensure_future(self._pass(reader, out)),
            asyncio.ensure_future(self._pass(there, writer)),
        ):
            self._tasks.add(task)

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                await self._open.wait()
                writer.write(data)
                await writer.drain()
        await self._open.wait()
        writer.close()


@contextlib.asynccontextmanager
async def listener(broker: BrokerAddress) -> AsyncIterator[list[bytes]]:
    """Play a node that records its commands."""
    commands: list[bytes] = []
    session = MqttSession(
        broker,
        client_id="node",
        subscriptions=[COMMAND],
        on_message=lambda topic, payload, retained: commands.append(payload),
    )
    task = asyncio.ensure_future(session.run())
    await session.wait_connected(PATIENCE_S)
    yield commands
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(test)


def test_a_standby_continues_from_the_leaders_journal(broker: RunningBroker) -> None:
    async def play() -> None:
        anna, bert = (Coordinator(name, n, broker.address) for n, name in ((1, "anna"), (2, "bert")))
        async with listener(broker.address) as commands:
            anna.start()
            await until_async(lambda: anna.connections == 1, "anna leads")
            bert.start()
            await until_async(
                lambda: ["bert"] in anna.standbys_published, "anna publishes that bert is there"
            )
            for number in range(20):
                anna.say(b"%d" % number)
            await until_async(lambda: commands and commands[-1] == b"19", "the node receives anna's command")
            await anna.end()  # It sends no goodbye, as if it had been killed.
            anna.leadership._follower_session.session.interrupt()
            bert.leadership.machine.peers.pop(1, None)
            await until_async(lambda: bert.connections == 1, "bert leads")
            [(leader, copy)] = bert.begun
            assert copy is not None and copy.state == b"19" and copy.position == (1, 21)
            assert leader.term in (2, 1 + FORGOTTEN_TERMS) and bert.events == ["LeaderLost", "LeaderElected"]
            await bert.end()

    run(play())


def test_after_a_goodbye_nothing_says_that_somebody_leads(mosquitto: RunningBroker) -> None:
    """A heartbeat does not wait either, while the broker is slow."""
    received: list[tuple[str, bytes]] = []

    async def play() -> None:
        watching = MqttSession(
            mosquitto.address,
            client_id="watching",
            subscriptions=[TOPICS.cluster_state, TOPICS.leader_heartbeat],
            on_message=lambda topic, payload, retained: received.append((topic, payload)),
        )
        task = asyncio.ensure_future(watching.run())
        await watching.wait_connected(PATIENCE_S)
        anna = Coordinator("anna", 1, mosquitto.address)
        anna.start()
        await until_async(
            lambda: any(topic == TOPICS.leader_heartbeat for topic, _ in received), "anna leads"
        )
        assert mosquitto.process is not None
        mosquitto.process.send_signal(signal.SIGSTOP)
        leaving = asyncio.ensure_future(anna.leadership.leave(b"{}", PATIENCE_S))
        try:
            await asyncio.sleep(3 * TIMING.leader_heartbeat_s)
            anna.leadership.publish(TOPICS.cluster_state, b"leads", retain=True)
        finally:
            mosquitto.process.send_signal(signal.SIGCONT)
        await leaving
        await anna.end()
        await until_async(lambda: (TOPICS.cluster_state, b"{}") in received, "the goodbye is received")
        await asyncio.sleep(0.1)
        assert received[-1] == (TOPICS.cluster_state, b"{}")
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    run(play())


def test_a_disconnected_leader_cannot_publish_and_returns_as_a_follower(
    mosquitto: RunningBroker,
) -> None:
    async def play() -> None:
        proxy = Proxy(mosquitto.port)
        anna, bert = (
            Coordinator(name, n, address)
            for n, name, address in ((1, "anna", await proxy.start()), (2, "bert", mosquitto.address))
        )
        async with listener(mosquitto.address) as commands:
            anna.start()
            await until_async(lambda: anna.connections == 1, "anna leads")
            bert.start()
            await until_async(lambda: bert.copies, "bert keeps anna's journal")
            anna.say(b"anna")
            await until_async(lambda: commands == [b"anna"], "the node receives anna's command")
            proxy.cut()
            await asyncio.sleep(0)
            anna.say(b"anna, cut off")
            await until_async(lambda: bert.connections == 1, "bert leads")
            bert.say(b"bert")
            anna.say(b"anna, still cut off")
            proxy.heal()
            await until_async(lambda: anna.ended, "anna learns of bert")
            anna.say(b"anna, deposed")
            bert.say(b"bert again")
            await until_async(
                lambda: commands and commands[-1] == b"bert again", "the node receives bert's command"
            )
            assert commands == [b"anna", b"bert", b"bert again"]
            assert bert.begun[0][1] is not None and bert.begun[0][1].state == b"anna"
            assert anna.leadership.machine.leader == bert.leadership.machine.leader
            await asyncio.gather(anna.end(), bert.end())
        await proxy.close()

    run(play())


def test_a_leader_continues_after_the_broker_lost_everything(mosquitto: RunningBroker) -> None:
    async def play() -> None:
        anna, bert = (Coordinator(name, n, mosquitto.address) for n, name in ((1, "anna"), (2, "bert")))
        anna.start()
        await until_async(lambda: anna.connections == 1, "anna leads")
        bert.start()
        await until_async(lambda: bert.copies, "bert keeps anna's journal")
        mosquitto.kill()
        mosquitto.start()
        await until_async(lambda: anna.connections + bert.connections == 2, "somebody leads again")
        assert anna.connections == 2 and len(anna.begun) == 1 and not anna.ended
        await until_async(
            lambda: len(bert.copies) >= 2 and bert.copies[-1].term == 1 + FORGOTTEN_TERMS,
            "the journal is back",
        )
        await asyncio.gather(anna.end(), bert.end())

    run(play())


def test_a_coordinator_of_another_version_is_named_with_the_remedy(
    broker: RunningBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[dict[str, Any]] = []
    monkeypatch.setattr("ftd.coordinator.leadership._log.warning", lambda event, **words: said.append(words))

    async def play() -> None:
        anna, bert = (Coordinator(name, n, broker.address) for n, name in ((1, "anna"), (2, "bert")))
        bert.leadership._follower_session._version = "0.0.1"
        anna.start()
        await until_async(lambda: anna.connections == 1, "anna leads")
        bert.start()
        await until_async(lambda: len(said) >= 2, "each complains of the other one")
        await asyncio.gather(anna.end(), bert.end())

    run(play())
    assert {(words["peer"], words["there"] == "0.0.1") for words in said} >= {("anna", False), ("bert", True)}
    assert all("the same version" in words["remedy"] for words in said)


@pytest.mark.parametrize("kind", ["mosquitto", "embedded"])
def test_many_coordinators_that_start_at_once_agree(
    kind: str, start_broker: Callable[[str], RunningBroker], tmp_path: Path
) -> None:
    async def play() -> None:
        broker = start_broker(kind)
        all_of_them = [Coordinator(f"c{n}", n, broker.address) for n in range(1, 6)]
        for one in all_of_them:
            one.start()

        def agreed() -> bool:
            leading = [one for one in all_of_them if one.leadership.connected]
            return len(leading) == 1 and all(
                one.leadership.machine.leader == leading[0].leadership.machine.leader for one in all_of_them
            )

        await until_async(agreed, "one leads, and all know it")
        terms = [leader.term for one in all_of_them for leader, _ in one.begun]
        assert len(terms) == len(set(terms))
        await asyncio.gather(*(one.end() for one in all_of_them))

    run(play())


def test_a_leader_session_shows_the_position_of_the_journal(mosquitto: RunningBroker) -> None:
    """The other coordinators need the position to leave the lead to one with a newer journal."""
    seen: list[dict[str, Any]] = []

    async def play() -> None:
        watching = MqttSession(
            mosquitto.address,
            client_id="watching",
            subscriptions=[TOPICS.coordinator_peer()],
            on_message=lambda topic, payload, retained: seen.append(msgspec.json.decode(payload)),
        )
        task = asyncio.ensure_future(watching.run())
        await watching.wait_connected(PATIENCE_S)
        anna = Coordinator("anna", 1, mosquitto.address)
        anna.journal.position = (3, 7)
        anna.start()
        await until_async(lambda: anna.connections == 1, "anna leads")
        await until_async(lambda: len(seen) >= 2, "both sessions have shown anna")
        await anna.end()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    run(play())
    assert [message["position"] for message in seen if not message["departed"]] == [[3, 7], [3, 7]]


def test_a_coordinator_whose_disk_is_full_follows(broker: RunningBroker) -> None:
    """It reads the retained journal first, and cannot save it."""

    async def play() -> None:
        anna, bert = (Coordinator(name, n, broker.address) for n, name in ((1, "anna"), (2, "bert")))
        anna.start()
        await until_async(lambda: anna.connections == 1, "anna leads")
        bert.full = True
        bert.start()
        await until_async(
            lambda: bert.leadership.machine.leader is not None and ["bert"] in anna.standbys_published,
            "bert follows",
        )
        await until_async(lambda: bert.leadership._follower_session._began, "bert has read everything")
        await anna.leadership.leave(b"{}", PATIENCE_S)
        await anna.end()
        await until_async(lambda: bert.connections == 1, "bert leads")
        await bert.end()

    run(play())


@pytest.mark.parametrize("option", ["max_packet_size", "message_size_limit"])
def test_a_journal_that_the_broker_refuses_is_withheld_with_the_remedy(
    mosquitto: RunningBroker, monkeypatch: pytest.MonkeyPatch, option: str
) -> None:
    """Commands go on, and no standby begins from an older journal. A restarted broker may have a higher limit."""
    errors: list[dict[str, Any]] = []
    monkeypatch.setattr(
        "ftd.transport.mqtt.size_limit._log.error", lambda event, **words: errors.append(words)
    )
    monkeypatch.setattr("ftd.transport.mqtt.session.ECHO_S", 2.0)
    journals: list[bytes] = []

    async def play() -> None:
        mosquitto.kill()
        mosquitto.options = f"{option} 20000\n"
        mosquitto.start()
        reading = MqttSession(
            mosquitto.address,
            client_id="reading",
            subscriptions=[TOPICS.journal],
            on_message=lambda topic, payload, retained: journals.append(payload),
        )
        task = asyncio.ensure_future(reading.run())
        await reading.wait_connected(PATIENCE_S)
        anna = Coordinator("anna", 1, mosquitto.address)
        async with listener(mosquitto.address) as commands:
            anna.start()
            await until_async(lambda: anna.connections == 1, "anna leads")
            anna.state = b"x" * 30000  # The session that follows begins with this state.
            limit = anna.size_limit
            for _ in range(2):
                await until_async(lambda: anna.leadership.connected, "anna leads")
                anna.leadership.replicate(anna.state, time.monotonic())
                await until_async(
                    lambda: limit._ended or limit._dropped or limit._refused, "an attempt has failed"
                )
            await until_async(lambda: errors, "the refusal is logged")
            await until_async(lambda: anna.leadership.connected, "anna leads again")
            sessions = anna.connections
            anna.state = b"x" * 40000
            for number in range(20):
                anna.leadership.replicate(anna.state, time.monotonic())
                anna.leadership.publish(COMMAND, b"%d" % number)
            await until_async(lambda: commands and commands[-1] == b"19", "the node receives anna's commands")
            assert anna.connections == sessions <= 4 and len(errors) == 1
            assert option in errors[0]["remedy"] and 30000 < errors[0]["size_bytes"] < 30200
            await until_async(lambda: journals[-1:] == [b""], "the older journal is deleted")
            mosquitto.kill()
            mosquitto.options = ""
            mosquitto.start()
            await until_async(lambda: len(journals[-1]) > 40000, "the journal is there again")
            await anna.end()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    run(play())


def test_a_standby_whose_own_announcement_is_not_sent_back_keeps_the_newest_message_of_each_topic() -> None:
    """The broker's ACL may forbid it, and the leader publishes a journal with each step."""

    async def play() -> None:
        bert = Coordinator("bert", 2, BrokerAddress(host="127.0.0.1", port=1))
        follower = bert.leadership._follower_session
        for number in range(1, 101):
            copy = JournalCopy(
                term=1,
                serial=number,
                wall_s=0.0,
                monotonic_s=0.0,
                version=ftd.__version__,
                schema=durable.SCHEMA,
                protocol=PROTOCOL,
                state=b"",
                compressed=False,
            )
            follower._receive(TOPICS.cluster_state, b"{}", False)
            follower._receive(TOPICS.journal, encode_copy(copy), False)
            follower._receive(TOPICS.events, b"not kept", False)
        assert len(follower._retained) == 2
        follower._receive(TOPICS.coordinator_peer(2), b"", False)
        assert [copy.serial for copy in bert.copies] == [100]

    run(play())
