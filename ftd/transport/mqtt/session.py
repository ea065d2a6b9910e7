"""An MQTT connection that reconnects by itself; all daemons and commands use it.

``run`` connects, subscribes, delivers messages, and starts again when the connection breaks. Publishing
never blocks and never raises. While there is no connection a message is dropped, or queued if the caller
asks for it (``queue_offline=True``); state that others rely on is published again in ``on_connected``.

Only clean sessions are used. What a broker would hold for an absent client is out of date when the client
returns; the protocol above (Hello, RequestHello, retained state) reconciles instead.
"""

import asyncio
import contextlib
import random
import socket
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import aiomqtt
import structlog
from aiomqtt.exceptions import MqttConnectError
from paho.mqtt.reasoncodes import ReasonCode

from ftd.errors import ConfigurationError, UnreachableError
from ftd.transport.address import BrokerAddress
from ftd.transport.mqtt.fast_path import FastPathSocket
from ftd.transport.mqtt.size_limit import LEAST_BYTES, SizeLimit
from ftd.transport.tls import describe_tls_error, tls_context

_log = structlog.get_logger("ftd.transport.mqtt")

KEEP_ALIVE_S = 5
"""MQTT keep-alive. Only a vanished host needs it: a closed socket is noticed at once, and nodes have
heartbeats.
"""
FIRST_RETRY_S = 0.05
LAST_RETRY_S = 1.0
CONNECT_S = 3.0
"""Timeout for the connection, and for each acknowledgement until the session can be used."""
LEAVE_S = 3.0
"""Time for the broker to read the DISCONNECT."""
MAX_PENDING = 10_000
MAX_SENDING = 1024
"""Most messages that wait for the broker's acknowledgement at the same time; further ones wait to be sent."""
_MAX_PACKET_ID = 65_535
_REFUSED = 0x80
"""Least code in a SUBACK that is a failure."""
READ_INTERVAL_S = 0.2
ECHO_S = 5.0
"""Time after which a client with a last will should have received its own state, which it publishes when it
connects. If it has not, an ACL forbids it, which mosquitto does not report.
"""

# Without TCP_NODELAY small packets wait up to 40 ms for the peer's delayed acknowledgement.
_SOCKET_OPTIONS = ((socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),)


@dataclass(frozen=True, slots=True, kw_only=True)
class Will:
    """The message that the broker publishes, retained, when this client ends without a DISCONNECT."""

    topic: str
    payload: bytes


_CONNECTION_ERRORS = (aiomqtt.MqttError, OSError, ConfigurationError, RuntimeError)
"""Errors that end a connection. ``ConfigurationError`` occurs while a certificate is being renewed, ``RuntimeError``
if this host has no thread left in which to connect.
"""

PendingMessage = tuple[str, bytes, bool, Callable[[], None]]
"""Topic, payload, whether to retain it, and the callback for when it is done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Outgoing:
    topic: str
    payload: bytes
    retain: bool
    qos: int
    queue_offline: bool
    on_done: Callable[[], None]


def ignore(*_: object) -> None:
    """Do nothing, in place of a callback that is not needed."""


class MqttSession:
    """A session that reconnects; see the module.

    Callbacks run on the event loop and must not block. Their order is: ``on_connected`` when all
    subscriptions are acknowledged, then messages (retained ones first), then ``on_lost``; then
    ``on_connected`` again.
    """

    def __init__(
        self,
        broker: BrokerAddress,
        *,
        client_id: str,
        subscriptions: Sequence[str] = (),
        unacknowledged: Sequence[str] = (),
        will: Will | None = None,
        on_message: Callable[[str, bytes, bool], None],
        on_connected: Callable[[], None] = ignore,
        on_lost: Callable[[], None] = ignore,
        on_acknowledged: Callable[[float], None] = ignore,
        size_limit: SizeLimit | None = None,
    ) -> None:
        """Prepare the session; ``run`` connects it.

        :param client_id: must be unique at the broker; a daemon's is its name and incarnation.
        :param unacknowledged: further subscriptions, at QoS 0 from the broker to this client. A clean
            session loses nothing by that: TCP delivers everything while the connection holds. If a client
            does not read in time, mosquitto drops messages beyond ``max_queued_messages`` at QoS 1, too.
        :param on_message: receives topic, payload and whether it was retained.
        :param on_acknowledged: receives the seconds that the broker took to acknowledge a message.
        :param size_limit: what other sessions at this broker found out about its limit.
        """
        self.broker = broker
        self.client_id = client_id
        self._subscriptions = (
            *((topic, 1) for topic in subscriptions),
            *((topic, 0) for topic in unacknowledged),
        )
        self._will = will
        self._on_message = on_message
        self._on_connected = on_connected
        self._on_lost = on_lost
        self._on_acknowledged = on_acknowledged
        self._size_limit = size_limit or SizeLimit()
        self._unreturned: dict[tuple[str, bytes], asyncio.TimerHandle | None] = {}
        """Large messages that should come back, until they do, and the timers of those that are acknowledged."""
        self._fast_path: FastPathSocket | None = None
        """The socket of the present connection; ``None`` without one."""
        self._up = asyncio.Event()
        self.problem = "no answer yet"
        """Description of the last error."""
        self._queued: deque[_Outgoing] = deque(maxlen=MAX_PENDING)
        self._waiting: deque[_Outgoing] = deque()
        self._sending: dict[int, tuple[_Outgoing, float]] = {}
        """Messages that were sent and not acknowledged, in the order of the calls."""
        self._packet_id = 0
        self._idle = asyncio.Event()
        """Event that is set while nothing waits to be sent or to be acknowledged."""
        self._idle.set()
        self._early: deque[tuple[str, bytes, bool]] | None = deque()
        """Messages that arrived before ``on_connected`` was called. After the DISCONNECT messages are dropped."""
        self._silent_until = 0.0
        self._received_own = False

    @property
    def connected(self) -> bool:
        return self._fast_path is not None

    async def run(self) -> None:
        """Stay connected until cancelled; then disconnect cleanly, so that the last will is not sent."""
        retry_s = FIRST_RETRY_S
        while True:
            await asyncio.sleep(max(0.0, self._silent_until - asyncio.get_running_loop().time()))
            try:
                was_up = await self._connect_and_serve()
            except _CONNECTION_ERRORS as error:
                was_up = False
                self._note_problem(error)
            retry_s = FIRST_RETRY_S if was_up else min(2 * retry_s, LAST_RETRY_S)
            await asyncio.sleep(retry_s * random.uniform(0.5, 1.0))

    async def run_once(self) -> None:
        """Hold one connection, from its first to its last byte. It also returns if the connection cannot be
        made.
        """
        try:
            await self._connect_and_serve()
        except _CONNECTION_ERRORS as error:
            self._note_problem(error)

    def refuses(self, size: int) -> bool:
        """Return whether the broker refuses messages of this size, as far as is known; they are not sent."""
        return self._size_limit.refuses(size)

    def take_pending(self) -> list[PendingMessage]:
        """Return and clear the messages that wait for the next connection, to be sent by another session."""
        queued = [
            (message.topic, message.payload, message.retain, message.on_done) for message in self._queued
        ]
        self._queued.clear()
        return queued

    async def wait_connected(self, timeout_s: float) -> None:
        """Wait for a connection.

        :raises UnreachableError: no connection was made within ``timeout_s``; the message names the last
            error.
        """
        try:
            await asyncio.wait_for(self._up.wait(), timeout_s)
        except TimeoutError:
            remedy = "(is it running, and are the address, mqtt:// or mqtts://, and the credentials right?)"
            problem = self.problem if self.problem.endswith(")") else f"{self.problem} {remedy}"
            raise UnreachableError(
                f"the MQTT broker at {self.broker.url} does not answer: {problem}"
            ) from None

    def publish(
        self,
        topic: str,
        payload: bytes,
        *,
        retain: bool = False,
        qos: int = 1,
        queue_offline: bool = False,
        on_done: Callable[[], None] = ignore,
    ) -> None:
        """Send a message, in the order of the calls. Large ones are sent at QoS 1, so that a broker that refuses them
        is recognised.

        :param queue_offline: send it after the next connection if there is none now.
        :param on_done: called once the broker has acknowledged it, or if it can never be sent.
        """
        if len(payload) >= LEAST_BYTES:
            qos = 1
        message = _Outgoing(
            topic=topic, payload=payload, retain=retain, qos=qos, queue_offline=queue_offline, on_done=on_done
        )
        if self._fast_path is None:
            if queue_offline:
                self._queued.append(message)
        elif self._waiting or len(self._sending) >= MAX_SENDING:
            self._waiting.append(message)
        else:
            self._send(self._fast_path, message)

    async def flush(self, timeout_s: float = 1.0) -> None:
        """Wait until all published messages are acknowledged, or for ``timeout_s``."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), timeout_s)

    def interrupt(self, for_s: float = 0.0) -> None:
        """Break the connection without a DISCONNECT, and stay away for ``for_s`` (for fault injection and
        tests).
        """
        self._silent_until = asyncio.get_running_loop().time() + for_s
        if self._fast_path is not None:
            self._fast_path.abort()

    async def _connect_and_serve(self) -> bool:
        """Hold one connection, from its first to its last byte; return whether it could be used."""
        client = self._new_client()
        guard: asyncio.Task[None] | None = None
        echo: asyncio.TimerHandle | None = None
        up = left = False
        self._early = deque()
        try:
            async with client:
                fast_path = self._install_fast_path(client)
                guard = asyncio.create_task(_read_regularly(client))
                try:
                    if self._subscriptions:
                        codes = await client.subscribe(list(self._subscriptions))
                        self._log_refused(codes)
                    self._fast_path = fast_path
                    up, self._received_own = True, False
                    if self._will is not None and self._receives(self._will.topic):
                        loop = asyncio.get_running_loop()
                        echo = loop.call_later(ECHO_S, self._log_missing_echo, self._will.topic)
                    self._on_up()
                    async for _ in client.messages:
                        pass  # Never: see ``_install_fast_path``. The loop waits for the end of the connection.
                except asyncio.CancelledError:
                    left = True
                    await self._disconnect(client, fast_path)
                    raise
        except (aiomqtt.MqttError, OSError) as error:
            if left:  # aiomqtt's error about the end must not replace the cancellation.
                raise asyncio.CancelledError from None
            if not up:
                raise
            self._note_problem(error)
            self._on_down()
        finally:
            client._disconnected.add_done_callback(_retrieve)
            self._fast_path = None
            self._up.clear()
            if guard is not None:
                guard.cancel()
            for timer in (echo, *self._unreturned.values()):
                if timer is not None:
                    timer.cancel()
            self._unreturned.clear()
        return up

    async def _disconnect(self, client: aiomqtt.Client, fast_path: FastPathSocket) -> None:
        """Disconnect, and wait up to ``LEAVE_S`` until the broker has read that and closes the connection.

        If the socket were closed first, the broker's next send would break the connection for it. If it
        then read the DISCONNECT, it would already have published the last will, over the last state that
        was retained.
        """
        self._fast_path, self._early = None, deque(maxlen=0)
        fast_path.disconnect()
        _, frozen = await asyncio.wait([client._disconnected], timeout=LEAVE_S)
        if frozen:
            fast_path.abort()

    def _receives(self, topic: str) -> bool:
        """Return whether a message on this topic comes back, with an acknowledgement."""
        all_of_kind = f"{topic.rpartition('/')[0]}/+"
        return not {(topic, 1), (all_of_kind, 1)}.isdisjoint(self._subscriptions)

    def _log_refused(self, codes: Sequence[int | ReasonCode]) -> None:
        """Log the subscriptions that the broker refused; it accepts the others of the same packet."""
        for (topic, _), code in zip(self._subscriptions, codes, strict=False):
            if (code if isinstance(code, int) else code.value) >= _REFUSED:
                user = self.broker.username or "(anonymous)"
                remedy = "does the broker's ACL allow this user to read this topic (ftd acl)?"
                _log.error(
                    "subscription_refused", broker=self.broker.url, topic=topic, user=user, remedy=remedy
                )

    def _log_missing_echo(self, topic: str) -> None:
        if not self._received_own:
            user = self.broker.username or "(anonymous)"
            remedy = "is this another user's password, or does the broker's ACL lack this client (ftd acl)?"
            _log.error(
                "own_message_not_received", broker=self.broker.url, topic=topic, user=user, remedy=remedy
            )

    def _install_fast_path(self, client: aiomqtt.Client) -> FastPathSocket:
        """Make messages bypass paho and aiomqtt from here on. The broker has acknowledged the connection, and
        sends nothing more before we subscribe, so what comes next is the beginning of a packet.

        :raises ConfigurationError: this version of paho keeps its socket elsewhere.
        """
        sock = client._client.socket()
        if sock is None:
            raise aiomqtt.MqttError("the connection broke at once")
        client._client._sock = fast_path = FastPathSocket(sock, self._deliver, self._note_acknowledged)
        if client._client.socket() is not fast_path:
            remedy = "install the version that ftd was made for: pip install paho-mqtt==2.2.0"
            raise ConfigurationError(
                "this version of paho-mqtt is not supported", field="paho-mqtt", remedy=remedy
            )
        return fast_path

    def _deliver(self, topic: str, payload: bytes, retained: bool) -> None:
        if self._early is not None:
            self._early.append((topic, payload, retained))
            return
        if self._will is not None and topic == self._will.topic:
            self._received_own = True
        if len(payload) >= LEAST_BYTES and not retained:
            self._size_limit.note_returned(len(payload))
            if (missing := self._unreturned.pop((topic, payload), None)) is not None:
                missing.cancel()
        try:
            self._on_message(topic, payload, retained)
        except Exception:
            # One message must not cost the connection; an exception here is a bug of ours.
            _log.exception("delivery_failed", topic=topic, size_bytes=len(payload))

    def _new_client(self) -> aiomqtt.Client:
        will = self._will
        client = aiomqtt.Client(
            self.broker.host,
            self.broker.port,
            username=self.broker.username,
            password=self.broker.password,
            identifier=self.client_id,
            clean_session=True,
            keepalive=KEEP_ALIVE_S,
            timeout=CONNECT_S,
            will=aiomqtt.Will(will.topic, will.payload, qos=1, retain=True) if will else None,
            socket_options=_SOCKET_OPTIONS,
            tls_context=tls_context(self.broker.tls) if self.broker.tls else None,
        )
        client._client.connect_timeout = CONNECT_S
        return client

    def _on_up(self) -> None:
        _log.info("connected", broker=self.broker.url)
        self.problem = "lost"
        self._up.set()
        self._on_connected()
        queued = list(self._queued)
        self._queued.clear()
        for message in queued:
            topic, payload, retain, on_done = message.topic, message.payload, message.retain, message.on_done
            self.publish(topic, payload, retain=retain, qos=message.qos, queue_offline=True, on_done=on_done)
        early, self._early = self._early or (), None
        for arrived in early:
            self._deliver(*arrived)

    def _on_down(self) -> None:
        self._fast_path = None
        self._up.clear()
        largest = max(
            (message for message, _ in self._sending.values()), key=lambda one: len(one.payload), default=None
        )
        self._size_limit.note_end(*(("", 0) if largest is None else (largest.topic, len(largest.payload))))
        # Missing acknowledgements will not come any more. QoS 1 allows messages to be sent twice.
        unacknowledged = (*(message for message, _ in self._sending.values()), *self._waiting)
        self._queued.extend(message for message in unacknowledged if message.queue_offline)
        self._sending.clear()
        self._waiting.clear()
        self._idle.set()
        self._on_lost()

    def _note_problem(self, error: BaseException) -> None:
        problem = describe_tls_error(error)
        if problem != self.problem:
            remedy = f"retrying{_connection_hint(error, self.broker)}"
            _log.warning("not_connected", broker=self.broker.url, problem=problem, remedy=remedy)
        self.problem = problem

    def _send(self, fast_path: FastPathSocket, message: _Outgoing) -> None:
        if self.refuses(len(message.payload)):
            self._size_limit.log_refused(message.topic, len(message.payload))
            message.on_done()
            return
        number = 0
        if message.qos > 0:
            # The subscriptions' packet identifiers were acknowledged before anything is published.
            number = self._packet_id = self._packet_id % _MAX_PACKET_ID + 1
        try:
            fast_path.publish(message.topic, message.payload, retain=message.retain, number=number)
        except ValueError as error:
            _log.error("unpublishable", topic=message.topic, problem=str(error))
            message.on_done()
            return
        if number:
            self._sending[number] = message, time.monotonic()
            self._idle.clear()
            if len(message.payload) >= LEAST_BYTES and self._receives(message.topic):
                self._unreturned[message.topic, message.payload] = None

    def _note_acknowledged(self, number: int) -> None:
        sent = self._sending.pop(number, None)
        if sent is None:
            return
        while self._waiting and len(self._sending) < MAX_SENDING and self._fast_path is not None:
            self._send(self._fast_path, self._waiting.popleft())
        if not self._sending:
            self._idle.set()
        topic, payload = key = sent[0].topic, sent[0].payload
        self._size_limit.note_acknowledged(len(payload))
        if key in self._unreturned and self._unreturned[key] is None:
            timer = asyncio.get_running_loop().call_later(ECHO_S, self._note_missing, topic, payload)
            self._unreturned[key] = timer
        try:
            sent[0].on_done()
            self._on_acknowledged(time.monotonic() - sent[1])
        except Exception:
            _log.exception("acknowledgement_failed", topic=topic)

    def _note_missing(self, topic: str, payload: bytes) -> None:
        del self._unreturned[topic, payload]
        self._size_limit.note_missing(topic, len(payload))


def _connection_hint(error: BaseException, broker: BrokerAddress) -> str:
    """Return a hint to append to the error; empty if the error explains itself."""
    origin = error.__cause__ or error.__context__ or error
    if isinstance(error, MqttConnectError):
        known = f"the user {broker.username} with this password" if broker.username else "anonymous clients"
        return f"; does the broker accept {known}?"
    if isinstance(origin, ConnectionRefusedError):
        return "; is the broker running there, and is broker.url right?"
    if isinstance(origin, socket.gaierror):
        return "; is the name in broker.url right, and does this host's DNS know it?"
    return ""


def _retrieve(ended: "asyncio.Future[None]") -> None:
    """Retrieve the error of a connection, which ``_note_problem`` logs; asyncio need not log it again."""
    if not ended.cancelled():
        ended.exception()


async def _read_regularly(client: aiomqtt.Client) -> None:
    """Notice a reset connection that the event loop does not report.

    libuv turns a socket's POLLERR into an error of the poll handle, and uvloop then closes the handle
    without informing its reader (seen in about 1 of 20 kills of a broker). Until the keep-alive expired, 7
    s later, the connection would look alive and silent. A read of a healthy connection costs microseconds.
    """
    while True:
        await asyncio.sleep(READ_INTERVAL_S)
        client._client.loop_read()
        while isinstance(fast_path := client._client.socket(), FastPathSocket) and fast_path.pending():
            client._client.loop_read()
