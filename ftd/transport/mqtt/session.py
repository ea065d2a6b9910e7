"""One MQTT connection that comes back by itself: daemons and commands all talk through this.

``run`` connects, subscribes, delivers messages, and begins again when the connection breaks. Publishing
never blocks and never raises: while the broker is away a message is dropped, or kept when the caller asked
for it (``queue_offline=True``), and state that others rely on is published again in ``on_connected``.

Only clean sessions are used. What the broker would keep for an absent client is stale by the time that it
returns; the protocol above (Hello, Inquiry, retained state) reconciles instead.
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

from ftd.errors import ConfigurationError, UnreachableError
from ftd.transport.address import BrokerAddress
from ftd.transport.mqtt.connection_hints import connection_hint
from ftd.transport.mqtt.fast_path import FastPathSocket
from ftd.transport.tls import describe_tls_error, tls_context

_log = structlog.get_logger("ftd.transport.mqtt")

KEEP_ALIVE_S = 5
"""Only a vanished host needs it: a closed socket is noticed at once, and liveness has its own heartbeats."""
FIRST_RETRY_S = 0.05
LAST_RETRY_S = 1.0
CONNECT_S = 3.0
"""For the connection itself and for each acknowledgement on the way to a usable session."""
LEAVE_S = 3.0
"""For the broker to read the goodbye."""
MAX_PENDING = 10_000
MAX_SENDING = 1024
"""Messages that wait for the broker's acknowledgement at once; further ones wait for their turn."""
_NUMBERS = 65_535
READ_ANYWAY_S = 0.2
ECHO_S = 5.0
"""Whoever has a last will publishes its state on connecting, and hears it: unless an ACL is in the way, of
which mosquitto tells nobody."""

# Small packets wait up to 40 ms for the peer's delayed acknowledgement without TCP_NODELAY.
_SOCKET_OPTIONS = ((socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),)


@dataclass(frozen=True, slots=True, kw_only=True)
class Will:
    """What the broker publishes, retained, when this client dies without a goodbye."""

    topic: str
    payload: bytes


_UNABLE = (aiomqtt.MqttError, OSError, ConfigurationError)
"""The last: a certificate that is being renewed while this session begins again."""

PendingMessage = tuple[str, bytes, bool, Callable[[], None]]
"""Topic, payload, whether it is to be retained, whom to tell that the broker has it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Outgoing:
    topic: str
    payload: bytes
    retain: bool
    qos: int
    keep: bool
    there: Callable[[], None]


def _ignore(*_: float) -> None:
    return None


class MqttSession:
    """See the module.

    Callbacks run on the event loop and must not block. Order: ``on_connected`` when all subscriptions are
    acknowledged, then messages (retained ones first), then ``on_lost``; and again.
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
        on_connected: Callable[[], None] = _ignore,
        on_lost: Callable[[], None] = _ignore,
        on_acknowledged: Callable[[float], None] = _ignore,
    ) -> None:
        """``unacknowledged``: further subscriptions, at QoS 0 from the broker to us. A clean session loses
        nothing by that: TCP brings everything for as long as the connection holds; and of what a client does
        not read in time mosquitto drops at QoS 1, too, what is beyond ``max_queued_messages``, and sooner.
        ``on_message`` gets (topic, payload, retained). ``client_id`` must be unique at the broker: a daemon's
        is its name and incarnation. ``on_acknowledged`` gets the seconds that the broker took for a message.
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
        self._shortcut: FastPathSocket | None = None
        """While connected."""
        self._up = asyncio.Event()
        self._problem = "no answer yet"
        self._kept: deque[_Outgoing] = deque(maxlen=MAX_PENDING)
        self._waiting: deque[_Outgoing] = deque()
        self._sending: dict[int, tuple[_Outgoing, float]] = {}
        """In the order of the calls: left then, and not acknowledged."""
        self._number = 0
        self._told = asyncio.Event()
        """Nothing is to be sent, and nothing to be acknowledged."""
        self._told.set()
        self._held: deque[tuple[str, bytes, bool]] | None = deque()
        """What comes before ``on_connected`` was told. Behind the goodbye nothing is held, nor delivered."""
        self._silent_until = 0.0
        self._heard_itself = False

    @property
    def connected(self) -> bool:
        return self._shortcut is not None

    @property
    def problem(self) -> str:
        """What was wrong last, in words."""
        return self._problem

    async def run(self) -> None:
        """Stay connected until cancelled; then say goodbye, so that the last will is not sent."""
        retry_s = FIRST_RETRY_S
        while True:
            await asyncio.sleep(max(0.0, self._silent_until - asyncio.get_running_loop().time()))
            try:
                was_up = await self._connect_and_serve()
            except _UNABLE as error:
                was_up = False
                self._note_problem(error)
            retry_s = FIRST_RETRY_S if was_up else min(2 * retry_s, LAST_RETRY_S)
            await asyncio.sleep(retry_s * random.uniform(0.5, 1.0))

    async def run_once(self) -> None:
        """One connection from its first to its last byte; also over when it cannot be had."""
        try:
            await self._connect_and_serve()
        except _UNABLE as error:
            self._note_problem(error)

    def take_pending(self) -> list[PendingMessage]:
        """What was to be sent after the next connect, for who sends it by another session."""
        kept = [(message.topic, message.payload, message.retain, message.there) for message in self._kept]
        self._kept.clear()
        return kept

    async def wait_connected(self, timeout_s: float) -> None:
        """:raises Unreachable: not within ``timeout_s``; says what was wrong at the last attempt."""
        try:
            await asyncio.wait_for(self._up.wait(), timeout_s)
        except TimeoutError:
            remedy = "(is it running, and are the address, mqtt:// or mqtts://, and the credentials right?)"
            told = self._problem if self._problem.endswith(")") else f"{self._problem} {remedy}"
            raise UnreachableError(f"the MQTT broker at {self.broker.url} does not answer: {told}") from None

    def publish(
        self,
        topic: str,
        payload: bytes,
        *,
        retain: bool = False,
        qos: int = 1,
        queue_offline: bool = False,
        on_done: Callable[[], None] = _ignore,
    ) -> None:
        """Send in the order of the calls. ``queue_offline``: send it after the next connect if there is none now.
        ``on_done`` is called once the broker has acknowledged it, or where it can never be sent."""
        message = _Outgoing(
            topic=topic, payload=payload, retain=retain, qos=qos, keep=queue_offline, there=on_done
        )
        if self._shortcut is None:
            if queue_offline:
                self._kept.append(message)
        elif self._waiting or len(self._sending) >= MAX_SENDING:
            self._waiting.append(message)
        else:
            self._send(self._shortcut, message)

    async def flush(self, timeout_s: float = 1.0) -> None:
        """Wait until what was published is acknowledged, or for ``timeout_s``."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._told.wait(), timeout_s)

    def interrupt(self, for_s: float = 0.0) -> None:
        """Break the connection without a goodbye and stay away for ``for_s`` (chaos, tests)."""
        self._silent_until = asyncio.get_running_loop().time() + for_s
        if self._shortcut is not None:
            self._shortcut.abort()

    async def _connect_and_serve(self) -> bool:
        """One connection from first to last byte; true when it had been usable."""
        client = self._new_client()
        guard: asyncio.Task[None] | None = None
        echo: asyncio.TimerHandle | None = None
        up = left = False
        self._held = deque()
        try:
            async with client:
                shortcut = self._take_shortcut(client)
                guard = asyncio.create_task(_read_now_and_then(client))
                try:
                    if self._subscriptions:
                        await client.subscribe(list(self._subscriptions))
                    self._shortcut = shortcut
                    up, self._heard_itself = True, False
                    if self._will is not None and (self._will.topic, 1) in self._subscriptions:
                        loop = asyncio.get_running_loop()
                        echo = loop.call_later(ECHO_S, self._miss_echo, self._will.topic)
                    self._announce_up()
                    async for _ in client.messages:
                        pass  # Never: see ``_take_shortcut``. This waits for the end of the connection.
                except asyncio.CancelledError:
                    left = True
                    await self._say_goodbye(client, shortcut)
                    raise
        except (aiomqtt.MqttError, OSError) as error:
            if left:  # aiomqtt's word for how that ended must not stand for the cancellation.
                raise asyncio.CancelledError from None
            if not up:
                raise
            self._note_problem(error)
            self._announce_lost()
        finally:
            client._disconnected.add_done_callback(_retrieve)
            self._shortcut = None
            self._up.clear()
            if guard is not None:
                guard.cancel()
            if echo is not None:
                echo.cancel()
        return up

    async def _say_goodbye(self, client: aiomqtt.Client, shortcut: FastPathSocket) -> None:
        """Leave, and stay until the broker has read it and closes, for ``LEAVE_S``.

        What it still sends to a socket that was closed breaks the connection for it; if it reads the goodbye
        behind that, it has told the last will already: behind the last state, which was retained until then.
        """
        self._shortcut, self._held = None, deque(maxlen=0)
        shortcut.disconnect()
        _, frozen = await asyncio.wait([client._disconnected], timeout=LEAVE_S)
        if frozen:
            shortcut.abort()

    def _miss_echo(self, topic: str) -> None:
        if not self._heard_itself:
            user = self.broker.username or "(anonymous)"
            remedy = "is this another one's password, or does the broker's ACL not know us (ftd acl)?"
            _log.error("unheard", broker=self.broker.url, topic=topic, user=user, remedy=remedy)

    def _take_shortcut(self, client: aiomqtt.Client) -> FastPathSocket:
        """From here on messages go past paho and aiomqtt. The broker says that we are connected, and nothing
        more before we subscribe: what comes next is the beginning of a packet.

        :raises ConfigurationError: paho keeps its socket elsewhere.
        """
        sock = client._client.socket()
        if sock is None:
            raise aiomqtt.MqttError("the connection broke at once")
        client._client._sock = shortcut = FastPathSocket(sock, self._deliver, self._note_acknowledged)
        if client._client.socket() is not shortcut:
            remedy = "install the version that ftd was made for: pip install paho-mqtt==2.2.0"
            raise ConfigurationError("this paho-mqtt is another one", field="paho-mqtt", remedy=remedy)
        return shortcut

    def _deliver(self, topic: str, payload: bytes, retained: bool) -> None:
        if self._held is not None:
            self._held.append((topic, payload, retained))
            return
        if self._will is not None and topic == self._will.topic:
            self._heard_itself = True
        try:
            self._on_message(topic, payload, retained)
        except Exception:
            # One message must not cost the connection; that this happened at all is a bug of ours.
            _log.exception("deliver", topic=topic, size_bytes=len(payload))

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

    def _announce_up(self) -> None:
        _log.info("connected", broker=self.broker.url)
        self._problem = "lost"
        self._up.set()
        self._on_connected()
        kept = list(self._kept)
        self._kept.clear()
        for message in kept:
            topic, payload, retain, there = message.topic, message.payload, message.retain, message.there
            self.publish(topic, payload, retain=retain, qos=message.qos, queue_offline=True, on_done=there)
        held, self._held = self._held or (), None
        for arrived in held:
            self._deliver(*arrived)

    def _announce_lost(self) -> None:
        self._shortcut = None
        self._up.clear()
        # An acknowledgement that has not come never will. Twice is what QoS 1 allows.
        unheard = (*(message for message, _ in self._sending.values()), *self._waiting)
        self._kept.extend(message for message in unheard if message.keep)
        self._sending.clear()
        self._waiting.clear()
        self._told.set()
        self._on_lost()

    def _note_problem(self, error: BaseException) -> None:
        problem = describe_tls_error(error)
        if problem != self._problem:
            remedy = f"trying on{connection_hint(error, self.broker)}"
            _log.warning("not_connected", broker=self.broker.url, problem=problem, remedy=remedy)
        self._problem = problem

    def _send(self, shortcut: FastPathSocket, message: _Outgoing) -> None:
        number = 0
        if message.qos > 0:
            # Those of subscriptions were acknowledged before anything is published.
            number = self._number = self._number % _NUMBERS + 1
        try:
            shortcut.publish(message.topic, message.payload, retain=message.retain, number=number)
        except ValueError as error:
            _log.error("unpublishable", topic=message.topic, problem=str(error))
            message.there()
            return
        if number:
            self._sending[number] = message, time.monotonic()
            self._told.clear()

    def _note_acknowledged(self, number: int) -> None:
        sent = self._sending.pop(number, None)
        if sent is None:
            return
        while self._waiting and len(self._sending) < MAX_SENDING and self._shortcut is not None:
            self._send(self._shortcut, self._waiting.popleft())
        if not self._sending:
            self._told.set()
        try:
            sent[0].there()
            self._on_acknowledged(time.monotonic() - sent[1])
        except Exception:
            _log.exception("acknowledged", topic=sent[0].topic)


def _retrieve(ended: "asyncio.Future[None]") -> None:
    """How a connection ended is said by ``_note_problem``; asyncio need not say it again."""
    if not ended.cancelled():
        ended.exception()


async def _read_now_and_then(client: aiomqtt.Client) -> None:
    """Notice a reset connection that the event loop does not report.

    libuv turns a socket's POLLERR into an error of the poll handle, upon which uvloop closes the handle
    without telling its reader (seen in about 1 of 20 kills of a broker): until the keep-alive ran out, 7 s
    later, the connection would look alive, and silent. A read of a sound connection costs microseconds.
    """
    while True:
        await asyncio.sleep(READ_ANYWAY_S)
        client._client.loop_read()
        while isinstance(shortcut := client._client.socket(), FastPathSocket) and shortcut.pending():
            client._client.loop_read()
