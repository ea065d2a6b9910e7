"""The MQTT session with both brokers: order, wills, retained state, outages, disconnecting."""

import asyncio
import gc
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import paho.mqtt.client
import pytest
import trustme
import uvloop

from ftd.errors import RequestRejected, UnreachableError
from ftd.transport.address import BrokerAddress, ClusterAddress, Tls
from ftd.transport.client import ClusterClient
from ftd.transport.mqtt.embedded import embedded_command
from ftd.transport.mqtt.fast_path import FastPathSocket
from ftd.transport.mqtt.mosquitto import free_port
from ftd.transport.mqtt.session import MAX_SENDING, MqttSession, Will
from ftd.transport.wire.public import StopRequest
from tests.helpers.brokers import RunningBroker
from tests.helpers.waiting import PATIENCE_S, until_async


class Listener:
    """A session that records what it receives, and runs during a ``with`` block."""

    def __init__(self, address: BrokerAddress, name: str, *topics: str, will: Will | None = None) -> None:
        self.heard: asyncio.Queue[tuple[str, bytes, bool]] = asyncio.Queue()
        self.ups = 0
        self.downs = 0
        self.session = MqttSession(
            address,
            client_id=name,
            subscriptions=topics,
            will=will,
            on_message=lambda *message: self.heard.put_nowait(message),
            on_connected=self._up,
            on_lost=self._down,
        )

    def _up(self) -> None:
        self.ups += 1

    def _down(self) -> None:
        self.downs += 1

    async def __aenter__(self) -> "Listener":
        self.task = asyncio.create_task(self.session.run())
        await self.session.wait_connected(PATIENCE_S)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)

    async def next(self) -> tuple[str, bytes, bool]:
        return await asyncio.wait_for(self.heard.get(), PATIENCE_S)

    async def silent(self) -> bool:
        await asyncio.sleep(0.2)
        return self.heard.empty()


def test_messages_arrive_once_and_in_order(broker: RunningBroker) -> None:
    async def scene() -> None:
        async with (
            Listener(broker.address, "a", "t/#") as a,
            Listener(broker.address, "b") as b,
        ):
            for index in range(500):
                b.session.publish("t/x", str(index).encode())
            got = [await a.next() for _ in range(500)]
            assert got == [("t/x", str(index).encode(), False) for index in range(500)]
            assert await a.silent()

    uvloop.run(scene())


def test_retained_state_is_delivered_to_later_subscribers(broker: RunningBroker) -> None:
    async def scene() -> None:
        async with Listener(broker.address, "b") as b:
            b.session.publish("s/one", b"1", retain=True)
            b.session.publish("s/two", b"2", retain=True)
            b.session.publish("s/one", b"3", retain=True)
            b.session.publish("s/gone", b"4", retain=True)
            b.session.publish("s/gone", b"", retain=True)
            await b.session.flush()
        async with Listener(broker.address, "a", "s/+") as a:
            got = sorted([await a.next(), await a.next()])
            assert got == [("s/one", b"3", True), ("s/two", b"2", True)]
            assert await a.silent()

    asyncio.run(scene())


def test_a_broken_connection_sends_the_will_and_a_goodbye_does_not(broker: RunningBroker) -> None:
    async def scene() -> None:
        async with Listener(broker.address, "a", "w/#") as a:
            async with Listener(broker.address, "b", will=Will(topic="w/b", payload=b"dead")) as b:
                b.session.interrupt()
                assert await a.next() == ("w/b", b"dead", False)
                await until_async(lambda: b.ups == 2)
                assert b.downs == 1
            assert await a.silent()
            async with Listener(broker.address, "late", "w/#") as late:
                assert await late.next() == ("w/b", b"dead", True)

    uvloop.run(scene())


def test_disconnecting_waits_until_the_broker_has_read_it(
    mosquitto: RunningBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the broker sent more to a closed socket, that would break the connection and publish the will."""
    monkeypatch.setattr("ftd.transport.mqtt.session.LEAVE_S", PATIENCE_S)

    async def scene() -> None:
        async with Listener(mosquitto.address, "a", "w/#") as a:
            async with Listener(mosquitto.address, "b", "w/#", will=Will(topic="w/b", payload=b"dead")) as b:
                assert mosquitto.process is not None
                mosquitto.process.send_signal(signal.SIGSTOP)
                try:
                    b.session.publish("w/b", b"bye", retain=True)
                    await b.session.flush(0.1)
                    b.task.cancel()
                    await asyncio.sleep(0.1)
                finally:
                    mosquitto.process.send_signal(signal.SIGCONT)
                await asyncio.wait([b.task], timeout=PATIENCE_S)  # A second cancellation would not wait.
            assert await a.next() == ("w/b", b"bye", False)
            assert await a.silent(), a.heard
            async with Listener(mosquitto.address, "late", "w/#") as late:
                assert await late.next() == ("w/b", b"bye", True)

    uvloop.run(scene())


def test_after_disconnecting_a_session_neither_closes_nor_sends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ftd.transport.mqtt.session.LEAVE_S", PATIENCE_S)
    message = b"\x32\x06\x00\x01t\x00\x01x"

    async def scene() -> None:
        left, close = asyncio.Event(), asyncio.Event()
        said: list[bytes] = []

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.read(1000)
            writer.write(b"\x20\x02\x00\x00")
            while not (await reader.read(1000)).endswith(b"\xe0\x00"):
                pass
            left.set()
            writer.write(message * 1000)
            await close.wait()
            writer.close()
            said.append(await reader.read())

        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        address = BrokerAddress(host="127.0.0.1", port=server.sockets[0].getsockname()[1])
        async with Listener(address, "a") as a:
            a.task.cancel()
            await asyncio.wait_for(left.wait(), PATIENCE_S)
            a.session.publish("t", b"too late", queue_offline=True)
            await asyncio.sleep(0.1)
            assert not a.task.done() and a.heard.empty()
            close.set()
            await asyncio.wait([a.task], timeout=PATIENCE_S)
            assert a.task.cancelled()
        await until_async(lambda: bool(said))
        assert b"too late" not in said[0]
        server.close()

    uvloop.run(scene())


@pytest.mark.parametrize("closes", [True, False])
def test_a_broker_that_reads_nothing_blocks_no_session(
    closes: bool, mosquitto: RunningBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More data than the kernel takes wait before it: the session ends all the same, and does not reconnect.
    aiomqtt raises another error for that end if the socket does not close.
    """
    monkeypatch.setattr("ftd.transport.mqtt.session.LEAVE_S", 0.1)
    if not closes:
        monkeypatch.setattr("ftd.transport.mqtt.fast_path.FastPathSocket.abort", lambda fast_path: None)
        monkeypatch.setattr("ftd.transport.mqtt.session.CONNECT_S", 1.0)

    async def scene() -> None:
        async with Listener(mosquitto.address, "b") as b:
            assert mosquitto.process is not None
            mosquitto.process.send_signal(signal.SIGSTOP)
            try:
                for _ in range(40):
                    b.session.publish("t", bytes(400_000))
                b.task.cancel()
                await asyncio.wait([b.task], timeout=PATIENCE_S)
                assert b.task.cancelled()
            finally:
                mosquitto.process.send_signal(signal.SIGCONT)

    uvloop.run(scene())


def test_an_interrupted_session_stays_away_for_as_long_as_asked(broker: RunningBroker) -> None:
    async def scene() -> None:
        async with Listener(broker.address, "b") as b:
            b.session.interrupt(0.5)
            begun = time.monotonic()
            await until_async(lambda: b.downs == 1)
            await until_async(lambda: b.ups == 2)
            assert time.monotonic() - begun >= 0.45

    asyncio.run(scene())


def test_subscriptions_are_restored_after_a_restart_of_the_broker(broker: RunningBroker) -> None:
    async def scene() -> None:
        async with (
            Listener(broker.address, "a", "t/#") as a,
            Listener(broker.address, "b") as b,
        ):
            broker.kill()
            await until_async(lambda: a.downs == 1 and b.downs == 1)
            assert not a.session.connected
            b.session.publish("t/dropped", b"")
            b.session.publish("t/kept", b"1", queue_offline=True)
            b.session.publish("t/kept", b"2", queue_offline=True)
            await asyncio.to_thread(broker.start)
            await until_async(lambda: a.ups == 2)
            await until_async(lambda: b.ups == 2)
            b.session.publish("t/now", b"", queue_offline=True)
            got: list[tuple[str, bytes, bool]] = []
            while not got or got[-1][0] != "t/now":
                got.append(await a.next())
            # Whether a is back before b's queued messages are sent is up to the broker; the order never
            # changes.
            kept = [payload for topic, payload, _ in got if topic == "t/kept"]
            assert kept in ([b"1", b"2"], [b"2"], [])
            assert "t/dropped" not in [topic for topic, _, _ in got]

    asyncio.run(scene())


def test_queued_messages_reach_a_listener_that_stayed_connected(broker: RunningBroker) -> None:
    async def scene() -> None:
        async with Listener(broker.address, "a", "t/#") as a, Listener(broker.address, "b") as b:
            b.session.interrupt(0.2)
            await until_async(lambda: b.downs == 1)
            for index in range(3):
                b.session.publish("t", str(index).encode(), queue_offline=True)
            b.session.publish("t", b"dropped")
            assert [(await a.next())[1] for _ in range(3)] == [b"0", b"1", b"2"]
            assert await a.silent()

    asyncio.run(scene())


def test_messages_in_flight_when_the_connection_broke_arrive_in_order(broker: RunningBroker) -> None:
    async def scene() -> None:
        async with Listener(broker.address, "a", "t/#") as a, Listener(broker.address, "b") as b:
            for index in range(300):
                b.session.publish("t", str(index).encode(), queue_offline=True)
            await asyncio.sleep(0)
            b.session.interrupt(0.1)
            got: list[int] = []
            while 299 not in got or not await a.silent():
                got.append(int((await a.next())[1]))
            assert sorted(set(got)) == list(range(300))
            # QoS 1 allows each unacknowledged message twice.
            assert sum(later <= earlier for earlier, later in pairwise(got)) <= 1

    asyncio.run(scene())


def test_nothing_is_delivered_before_the_session_is_up(broker: RunningBroker) -> None:
    async def scene() -> None:
        async with Listener(broker.address, "b") as b:
            for index in range(20):
                b.session.publish(f"t/{index}", b"x", retain=True)
            await b.session.flush()
        seen: list[str] = []
        session = MqttSession(
            broker.address,
            client_id="a",
            subscriptions=["t/#"],
            on_message=lambda topic, *_: seen.append(topic),
            on_connected=lambda: seen.append("up"),
        )
        task = asyncio.create_task(session.run())
        await until_async(lambda: len(seen) == 21)
        assert seen[0] == "up"
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(scene())


def test_a_callback_that_raises_does_not_cost_the_connection(broker: RunningBroker) -> None:
    async def scene() -> None:
        heard: list[bytes] = []

        def on_message(_topic: str, payload: bytes, _retained: bool) -> None:
            heard.append(payload)
            raise RuntimeError("a bug of ours")

        session = MqttSession(broker.address, client_id="a", subscriptions=["t"], on_message=on_message)
        task = asyncio.create_task(session.run())
        await session.wait_connected(PATIENCE_S)
        session.publish("t", b"1")
        session.publish("t", b"2")
        await until_async(lambda: heard == [b"1", b"2"])
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(scene())


def test_small_packets_are_not_delayed(broker: RunningBroker) -> None:
    async def scene() -> None:
        async with Listener(broker.address, "a") as a:
            assert a.session._fast_path is not None
            connection: Any = a.session._fast_path.inner
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)

    asyncio.run(scene())


def test_data_that_was_read_ahead_is_delivered_without_further_packets(broker: RunningBroker) -> None:
    """Small and large messages arrive at once; none waits for the next packet."""

    async def scene() -> None:
        async with Listener(broker.address, "a", "t/#") as a, Listener(broker.address, "b") as b:
            payloads = [b"%d " % index * (1 if index % 7 else 9000) for index in range(60)]
            for payload in payloads:
                b.session.publish("t/x", payload)
            assert [(await a.next())[1] for _ in payloads] == payloads

    uvloop.run(scene())


def test_unacknowledged_topics_are_delivered(broker: RunningBroker) -> None:
    async def scene() -> None:
        heard: list[bytes] = []
        session = MqttSession(
            broker.address,
            client_id="a",
            unacknowledged=("t",),
            on_message=lambda _, payload, __: heard.append(payload),
        )
        task = asyncio.create_task(session.run())
        await session.wait_connected(PATIENCE_S)
        async with Listener(broker.address, "b") as b:
            said = [b"%d" % index for index in range(1500)]
            for payload in said:
                b.session.publish("t", payload)
            await until_async(lambda: len(heard) >= len(said))
        assert heard == said
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(scene())


def test_received_messages_leave_no_garbage(mosquitto: RunningBroker) -> None:
    """A thousand heartbeats a second would otherwise make the garbage collector run continuously."""

    async def scene() -> None:
        async with Listener(mosquitto.address, "a", "t") as a, Listener(mosquitto.address, "b") as b:
            gc.collect()
            gc.disable()
            try:
                for _ in range(500):
                    b.session.publish("t", b"x")
                for _ in range(500):
                    await a.next()
                assert gc.collect() < 500
            finally:
                gc.enable()

    asyncio.run(scene())


def test_an_incompatible_paho_is_reported(broker: RunningBroker, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a version keeps its socket elsewhere, the session must not silently receive nothing."""
    pinned = (Path(__file__).parents[3] / "constraints.txt").read_text().splitlines()
    made_for = next(line for line in pinned if line.startswith("paho-mqtt=="))
    sockets = paho.mqtt.client.Client.socket

    def elsewhere(client: paho.mqtt.client.Client) -> Any:
        sock = sockets(client)
        return sock.inner if isinstance(sock, FastPathSocket) else sock

    async def scene() -> None:
        session = MqttSession(broker.address, client_id="a", on_message=lambda *_: None)
        task = asyncio.create_task(session.run())
        await until_async(lambda: f"pip install {made_for}" in session.problem)
        assert not session.connected
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    monkeypatch.setattr(paho.mqtt.client.Client, "socket", elsewhere)
    asyncio.run(scene())


def test_messages_bypass_paho(broker: RunningBroker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise each takes many times as long, and no other test would show it."""
    for way in ("publish", "_handle_publish", "_handle_pubackcomp"):
        monkeypatch.setattr(paho.mqtt.client.Client, way, lambda *_, **__: pytest.fail("through paho"))

    async def scene() -> None:
        taken: list[float] = []
        async with Listener(broker.address, "a", "t") as a, Listener(broker.address, "b") as b:
            b.session._on_acknowledged = taken.append
            for index in range(20):
                b.session.publish("t", str(index).encode(), qos=index % 2)
            assert [int((await a.next())[1]) for _ in range(20)] == list(range(20))
            await until_async(lambda: len(taken) == 10)

    asyncio.run(scene())


def test_an_invalid_message_affects_no_other(broker: RunningBroker) -> None:
    async def scene() -> None:
        async with Listener(broker.address, "a", "t/#") as a:
            for topic in ("", "t/+", "t/#", "t/\0", "t" * 70_000):
                a.session.publish(topic, b"never", queue_offline=True)
            a.session.publish("t/x", b"goes on")
            assert await a.next() == ("t/x", b"goes on", False)
            await a.session.flush(PATIENCE_S)

    asyncio.run(scene())


def test_more_than_may_wait_for_acknowledgements_is_sent_in_order(broker: RunningBroker) -> None:
    async def scene() -> None:
        async with Listener(broker.address, "a", "t") as a, Listener(broker.address, "b") as b:
            for index in range(2 * MAX_SENDING + 10):
                b.session.publish("t", str(index).encode(), qos=index % 3 != 0)
            assert len(b.session._sending) == MAX_SENDING
            got = [int((await a.next())[1]) for _ in range(2 * MAX_SENDING + 10)]
            assert got == list(range(2 * MAX_SENDING + 10))
            await b.session.flush(PATIENCE_S)
            assert not b.session._sending

    asyncio.run(scene())


def test_a_session_waits_for_a_broker_that_does_not_read(mosquitto: RunningBroker) -> None:
    """More data than the kernel takes arrive when the broker reads again, and the session continues."""

    async def scene() -> None:
        async with Listener(mosquitto.address, "a", "t") as a, Listener(mosquitto.address, "b") as b:
            assert mosquitto.process is not None
            mosquitto.process.send_signal(signal.SIGSTOP)
            try:
                for index in range(40):
                    b.session.publish("t", b"%02d" % index + bytes(400_000))
                await asyncio.sleep(0.05)
            finally:
                mosquitto.process.send_signal(signal.SIGCONT)
            assert [int((await a.next())[1][:2]) for _ in range(40)] == list(range(40))
            assert (a.downs, b.downs) == (0, 0)

    uvloop.run(scene())


def test_a_message_that_is_too_large_for_the_broker_is_dropped_after_two_attempts(
    mosquitto: RunningBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends each connection on which it is sent. Smaller messages that were sent with it arrive."""
    errors: list[dict[str, object]] = []
    monkeypatch.setattr(
        "ftd.transport.mqtt.size_limit._log.error", lambda event, **words: errors.append(words)
    )
    mosquitto.kill()
    mosquitto.options = "max_packet_size 20000\n"
    mosquitto.start()

    async def scene() -> None:
        async with Listener(mosquitto.address, "a", "t") as a, Listener(mosquitto.address, "b") as b:
            done: list[str] = []
            b.session.publish("t", bytes(30_000), queue_offline=True, on_done=lambda: done.append("large"))
            b.session.publish("t", b"small", queue_offline=True, on_done=lambda: done.append("small"))
            assert await a.next() == ("t", b"small", False)
            await until_async(lambda: done == ["large", "small"])
            assert (a.downs, b.downs) == (0, 2)
            b.session.publish("t", bytes(30_000), qos=0)
            b.session.publish("t", bytes(10_000))
            assert await a.next() == ("t", bytes(10_000), False)
            assert b.downs == 2 and b.session.refuses(30_000) and not b.session.refuses(10_000)
            mosquitto.kill()
            mosquitto.options = ""
            mosquitto.start()
            await until_async(lambda: a.ups == 2 and b.ups == 4)
            b.session.publish("t", bytes(30_000))
            assert await a.next() == ("t", bytes(30_000), False)

    asyncio.run(scene())
    [error] = errors
    assert (
        error["topic"] == "t" and error["size_bytes"] == 30_000 and "max_packet_size" in str(error["remedy"])
    )


def test_a_request_that_is_too_large_for_the_broker_is_rejected(mosquitto: RunningBroker) -> None:
    mosquitto.kill()
    mosquitto.options = "max_packet_size 20000\n"
    mosquitto.start()

    async def scene() -> None:
        async with ClusterClient(ClusterAddress(broker=mosquitto.address, cluster="t")) as client:
            request = StopRequest(**client.envelope(), job="x" * 30_000)
            with pytest.raises(RequestRejected, match="too large for the broker"):
                await client.request(request, timeout_s=PATIENCE_S)

    asyncio.run(scene())


def test_a_missing_broker_is_a_clear_error() -> None:
    async def scene() -> None:
        address = BrokerAddress(host="127.0.0.1", port=free_port())
        session = MqttSession(address, client_id="a", on_message=lambda *_: None)
        task = asyncio.create_task(session.run())
        await until_async(lambda: "refused" in session.problem)
        with pytest.raises(UnreachableError, match=rf"{address.url}.*refused.*is it running"):
            await session.wait_connected(0.3)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(scene())


def test_a_briefly_missing_certificate_does_not_end_a_session(tmp_path: Path) -> None:
    """The certificate is read for each connection, and may be half of a pair that is being renewed."""
    authority = tmp_path / "ca.pem"

    async def body() -> None:
        address = BrokerAddress(host="127.0.0.1", port=free_port(), tls=Tls(ca_file=authority))
        session = MqttSession(address, client_id="renewing", on_message=lambda *_: None)
        task = asyncio.create_task(session.run())
        await until_async(lambda: "ca.pem cannot be used" in session.problem)
        trustme.CA().cert_pem.write_to_path(authority)
        await until_async(lambda: "refused" in session.problem)
        assert not task.done()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(body())


def test_a_host_without_a_free_thread_does_not_end_a_session(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node whose session ended would stay away from the broker, and nobody would know why."""

    async def scene() -> None:
        def no_thread(*_: object) -> Any:
            raise RuntimeError("can't start new thread")

        monkeypatch.setattr(asyncio.get_running_loop(), "run_in_executor", no_thread)
        address = BrokerAddress(host="127.0.0.1", port=free_port())
        session = MqttSession(address, client_id="crowded", on_message=lambda *_: None)
        task = asyncio.create_task(session.run())
        await until_async(lambda: task.done() or "new thread" in session.problem)
        assert not task.done()
        monkeypatch.undo()
        await until_async(lambda: "refused" in session.problem)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(scene())


def test_a_server_that_is_no_broker_is_an_error_and_retried() -> None:
    async def scene() -> None:
        async def answer(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n" * 10)
            writer.close()

        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        session = MqttSession(
            BrokerAddress(host="127.0.0.1", port=port), client_id="a", on_message=lambda *_: None
        )
        task = asyncio.create_task(session.run())
        with pytest.raises(UnreachableError):
            await session.wait_connected(0.5)
        assert not task.done()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        server.close()

    asyncio.run(scene())


@pytest.mark.parametrize(
    ("codes", "complaints"),
    [
        (b"\x01\x01\x00", [("own_message_not_received", "c/peer/7")]),
        (b"\x01\x80\x80", [("subscription_refused", "c/peer/+"), ("subscription_refused", "c/events")]),
    ],
)
def test_rights_that_the_broker_refuses_are_logged(
    codes: bytes, complaints: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A coordinator subscribes to its own presence with those of all others, and waits for it to come back."""
    logged: list[tuple[str, str]] = []
    monkeypatch.setattr("ftd.transport.mqtt.session.ECHO_S", 0.2)
    monkeypatch.setattr(
        "ftd.transport.mqtt.session._log.error", lambda name, *, topic, **_: logged.append((name, topic))
    )

    async def scene() -> None:
        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.read(1000)
            writer.write(b"\x20\x02\x00\x00")
            subscribe = await reader.read(1000)
            writer.write(bytes((0x90, 2 + len(codes))) + subscribe[2:4] + codes)
            while await reader.read(1000):
                pass
            writer.close()

        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        session = MqttSession(
            BrokerAddress(host="127.0.0.1", port=server.sockets[0].getsockname()[1]),
            client_id="a",
            subscriptions=("c/leader", "c/peer/+"),
            unacknowledged=("c/events",),
            will=Will(topic="c/peer/7", payload=b"gone"),
            on_message=lambda *_: None,
        )
        task = asyncio.create_task(session.run())
        await until_async(lambda: len(logged) >= len(complaints))
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        server.close()

    asyncio.run(scene())
    assert logged[: len(complaints)] == complaints


# --- what amqtt gets wrong by itself (ftd.transport.mqtt.embedded) -------------------------------------------


def test_embedded_sends_nobody_retained_messages_of_others(
    start_broker: Callable[[str], RunningBroker],
) -> None:
    broker = start_broker("embedded")

    async def scene() -> None:
        async with Listener(broker.address, "a", "s/#") as a:
            a.session.publish("s/x", b"1", retain=True)
            await a.next()
            async with Listener(broker.address, "b", "other") as b:
                assert await b.silent()

    asyncio.run(scene())


def test_embedded_ends_the_old_connection_of_an_id(
    start_broker: Callable[[str], RunningBroker],
) -> None:
    broker = start_broker("embedded")

    async def scene() -> None:
        async with (
            Listener(broker.address, "watcher", "w/#") as watcher,
            Listener(broker.address, "twin", "t", will=Will(topic="w/1", payload=b"first is gone")) as first,
        ):
            first.session._silent_until = asyncio.get_running_loop().time() + 60
            async with Listener(broker.address, "twin", "t") as second:
                assert (await watcher.next())[1] == b"first is gone"
                await until_async(lambda: first.downs == 1)
                second.session.publish("t", b"still here")
                assert (await second.next())[1] == b"still here"

    asyncio.run(scene())


def test_embedded_declares_a_frozen_client_dead(start_broker: Callable[[str], RunningBroker]) -> None:
    broker = start_broker("embedded")

    async def scene() -> None:
        async with Listener(broker.address, "watcher", "w/#") as watcher:
            # A CONNECT packet by hand: keep-alive 1 s, will "w/x" = "frozen"; nothing follows.
            variable = b"\x00\x04MQTT\x04" + bytes([0b00000110]) + (1).to_bytes(2, "big")
            parts = [b"x", b"w/x", b"frozen"]
            body = variable + b"".join(len(part).to_bytes(2, "big") + part for part in parts)
            reader, writer = await asyncio.open_connection("127.0.0.1", broker.port)
            writer.write(bytes([0x10, len(body)]) + body)
            assert (await reader.readexactly(4))[3] == 0
            assert await watcher.next() == ("w/x", b"frozen", False)
            writer.close()

    asyncio.run(scene())


def test_embedded_loses_nothing_while_others_subscribe(start_broker: Callable[[str], RunningBroker]) -> None:
    broker = start_broker("embedded")

    async def scene() -> None:
        async with Listener(broker.address, "a", "t") as a, Listener(broker.address, "b") as b:
            for index in range(20):
                b.session.publish("t", str(index).encode())
                async with Listener(broker.address, f"c{index}", f"own/{index}", "t"):
                    b.session.publish("t", b"-")
            got = [(await a.next())[1] for _ in range(40)]
            assert [item for item in got if item != b"-"] == [str(index).encode() for index in range(20)]

    asyncio.run(scene())


def test_a_port_in_use_is_reported(start_broker: Callable[[str], RunningBroker]) -> None:
    broker = start_broker("embedded")
    done = subprocess.run(
        embedded_command(Path("/nonexistent/ready"), broker.port),
        check=False,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 2
    assert f"cannot listen on 127.0.0.1:{broker.port}" in done.stderr
