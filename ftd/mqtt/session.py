"""One MQTT connection that comes back by itself: daemons and commands all talk through this.

``run`` connects, subscribes, delivers messages, and begins again when the connection breaks. Publishing
never blocks and never raises: while the broker is away a message is dropped, or kept when the caller asked
for it (``keep=True``), and state that others rely on is published again in ``on_connected``.

Only clean sessions are used. What the broker would keep for an absent client is stale by the time that it
returns; the protocol above (Hello, Inquiry, retained state) reconciles instead.
"""

import asyncio
import random
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import structlog

from ftd.config.address import BrokerAddress
from ftd.config.tls import explained
from ftd.errors import Unreachable
from ftd.mqtt.connection import Connection, Outgoing
from ftd.mqtt.packets import MqttError

_log = structlog.get_logger("ftd.mqtt")

FIRST_RETRY_S = 0.05
LAST_RETRY_S = 1.0
MAX_KEPT = 10_000
ECHO_S = 5.0
"""Whoever has a last will publishes its state on connecting, and hears it: unless an ACL is in the way, of
which mosquitto tells nobody."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Will:
    """What the broker publishes, retained, when this client dies without a goodbye."""

    topic: str
    payload: bytes


Kept = tuple[str, bytes, bool]
"""Topic, payload, whether it is to be retained."""


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
        will: Will | None = None,
        on_message: Callable[[str, bytes, bool], None],
        on_connected: Callable[[], None] = _ignore,
        on_lost: Callable[[], None] = _ignore,
        on_acknowledged: Callable[[float], None] = _ignore,
    ) -> None:
        """``on_message`` gets (topic, payload, retained). ``client_id`` must be unique at the broker: a
        daemon's is its name and incarnation. ``on_acknowledged`` gets the seconds that the broker took for
        a message."""
        self.broker = broker
        self.client_id = client_id
        self._subscriptions = tuple(subscriptions)
        self._will = will
        self._on_message = on_message
        self._on_connected = on_connected
        self._on_lost = on_lost
        self._on_acknowledged = on_acknowledged
        self._connection: Connection | None = None
        self._up = asyncio.Event()
        self._problem = "not tried yet"
        self._kept: deque[Outgoing] = deque(maxlen=MAX_KEPT)
        self._early: list[tuple[str, bytes, bool]] | None = None
        """What came with the acknowledgement of subscriptions, before ``on_connected`` was told."""
        self._silent_until = 0.0
        self._heard_itself = False

    @property
    def connected(self) -> bool:
        return self._connection is not None

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
            except (MqttError, OSError) as error:
                was_up = False
                self._note_problem(error)
            retry_s = FIRST_RETRY_S if was_up else min(2 * retry_s, LAST_RETRY_S)
            await asyncio.sleep(retry_s * random.uniform(0.5, 1.0))

    async def run_once(self) -> None:
        """One connection from its first to its last byte; also over when it cannot be had."""
        try:
            await self._connect_and_serve()
        except (MqttError, OSError) as error:
            self._note_problem(error)

    def take_kept(self) -> list[Kept]:
        """What was to be sent after the next connect, for who sends it by another session."""
        kept = [(message.topic, message.payload, message.retain) for message in self._kept]
        self._kept.clear()
        return kept

    async def wait_connected(self, timeout_s: float) -> None:
        """:raises Unreachable: not within ``timeout_s``; says what was wrong at the last attempt."""
        try:
            await asyncio.wait_for(self._up.wait(), timeout_s)
        except TimeoutError:
            raise Unreachable(
                f"the MQTT broker at {self.broker.url} does not answer: {self._problem} "
                "(is it running, and are the address and the credentials right?)"
            ) from None

    def publish(
        self, topic: str, payload: bytes, *, retain: bool = False, qos: int = 1, keep: bool = False
    ) -> None:
        """Send in the order of the calls. ``keep``: send it after the next connect if there is none now."""
        message = Outgoing(
            topic=topic, payload=payload, retain=retain, qos=qos, keep=keep, began=time.monotonic()
        )
        if self._connection is not None:
            self._connection.publish(message)
        elif keep:
            self._kept.append(message)

    async def flush(self, timeout_s: float = 1.0) -> None:
        """Wait until what was published is acknowledged, or for ``timeout_s``."""
        if self._connection is not None:
            await self._connection.flush(timeout_s)

    def interrupt(self, for_s: float = 0.0) -> None:
        """Break the connection without a goodbye and stay away for ``for_s`` (chaos, tests)."""
        self._silent_until = asyncio.get_running_loop().time() + for_s
        if self._connection is not None:
            self._connection.abort()

    async def _connect_and_serve(self) -> bool:
        """One connection from first to last byte; true when it had been usable."""
        connection = await Connection.open(
            self.broker,
            client_id=self.client_id,
            will=(self._will.topic, self._will.payload) if self._will is not None else None,
            on_message=self._deliver,
            on_acknowledged=self._on_acknowledged,
        )
        echo: asyncio.TimerHandle | None = None
        up = False
        try:
            self._early = []
            if self._subscriptions:
                await connection.subscribe(self._subscriptions)
            self._connection = connection
            up, self._heard_itself = True, False
            if self._will is not None and self._will.topic in self._subscriptions:
                echo = asyncio.get_running_loop().call_later(ECHO_S, self._miss_echo, self._will.topic)
            self._announce_up()
            await connection.lost
        except (MqttError, OSError) as error:
            if not up:
                raise
            self._note_problem(error)
        finally:
            self._connection = None
            self._up.clear()
            connection.close()
            if echo is not None:
                echo.cancel()
        self._announce_lost(connection)
        return True

    def _miss_echo(self, topic: str) -> None:
        if not self._heard_itself:
            user = self.broker.username or "(anonymous)"
            remedy = "is this another one's password, or does the broker's ACL not know us (ftd acl)?"
            _log.error("unheard", broker=self.broker.url, topic=topic, user=user, remedy=remedy)

    def _deliver(self, topic: str, payload: bytes, retained: bool) -> None:
        if self._early is not None:
            self._early.append((topic, payload, retained))
            return
        if self._will is not None and topic == self._will.topic:
            self._heard_itself = True
        try:
            self._on_message(topic, payload, retained)
        except Exception:
            # One message must not cost the connection; that this happened at all is a bug of ours.
            _log.exception("deliver", topic=topic, size_bytes=len(payload))

    def _announce_up(self) -> None:
        _log.info("connected", broker=self.broker.url)
        self._problem = "lost"
        self._up.set()
        self._on_connected()
        kept = list(self._kept)
        self._kept.clear()
        for message in kept:
            self.publish(message.topic, message.payload, retain=message.retain, qos=message.qos, keep=True)
        early, self._early = self._early or [], None
        for arrived in early:
            self._deliver(*arrived)

    def _announce_lost(self, connection: Connection) -> None:
        # An acknowledgement that has not come never will. Twice is what QoS 1 allows.
        self._kept.extend(message for message in connection.unacknowledged() if message.keep)
        self._on_lost()

    def _note_problem(self, error: BaseException) -> None:
        problem = explained(error)
        if problem != self._problem:
            _log.warning("not_connected", broker=self.broker.url, problem=problem, remedy="trying on")
        self._problem = problem
