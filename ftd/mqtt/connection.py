"""One MQTT connection, from CONNECT to its end: an asyncio protocol over ``packets``.

Made for a coordinator that hears and tells a thousand nodes at once: a message costs microseconds and no
task, what arrives together is acknowledged with one write, and what is published within one turn of the
event loop leaves with one write.
"""

import asyncio
import os
import socket
import ssl
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

from ftd.config.address import BrokerAddress
from ftd.config.tls import tls_context
from ftd.mqtt.packets import (
    CONNACK,
    DISCONNECT_PACKET,
    MOST_NUMBER,
    PINGREQ_PACKET,
    PINGRESP,
    PUBACK,
    PUBLISH,
    SUBACK,
    MqttError,
    Splitter,
    connect_packet,
    puback_packet,
    publish_packet,
    published,
    refusal,
    subscribe_packet,
)

KEEP_ALIVE_S = 5
"""Only a vanished host needs it: a closed socket is noticed at once, and liveness has its own heartbeats."""
CONNECT_S = 3.0
"""For the connection itself and for each acknowledgement on the way to a usable session."""
MAX_UNACKNOWLEDGED = 20_000
"""Of messages of QoS 1; further ones wait. Below the 65,535 numbers that packets have."""
_SUBSCRIPTION = MOST_NUMBER


@dataclass(frozen=True, slots=True, kw_only=True)
class Outgoing:
    """A message on its way."""

    topic: str
    payload: bytes
    retain: bool
    qos: int
    keep: bool
    began: float


class Connection(asyncio.Protocol):
    """See the module. Made by ``open``; ``lost`` is done when it is over, with the reason where it broke."""

    def __init__(
        self,
        on_message: Callable[[str, bytes, bool], None],
        on_acknowledged: Callable[[float], None],
    ) -> None:
        self._on_message = on_message
        self._on_acknowledged = on_acknowledged
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._splitter = Splitter()
        self._answers: dict[int, asyncio.Future[bytes]] = {}
        """Awaited on the way to a usable session: kind of packet → its body."""
        self._out: list[bytes] = []
        self._number = 0
        self._unacknowledged: dict[int, Outgoing] = {}
        self._waiting: deque[Outgoing] = deque()
        self._drained: list[asyncio.Future[None]] = []
        self._heard_at = self._sent_at = self._loop.time()
        self._pinger: asyncio.TimerHandle | None = None
        self._over = False
        self.lost: asyncio.Future[None] = self._loop.create_future()

    @classmethod
    async def open(
        cls,
        broker: BrokerAddress,
        *,
        client_id: str,
        will: tuple[str, bytes] | None,
        on_message: Callable[[str, bytes, bool], None],
        on_acknowledged: Callable[[float], None],
    ) -> "Connection":
        """Connected and welcomed.

        :raises MqttError: the broker refuses us, or does not answer. :raises OSError: nobody is there.
        """
        context = tls_context(broker.tls) if broker.tls else None
        connection = cls(on_message, on_acknowledged)
        try:
            async with asyncio.timeout(CONNECT_S):
                await connection._loop.create_connection(
                    lambda: connection, broker.host, broker.port, ssl=context
                )
                connection._write(
                    connect_packet(
                        client_id,
                        keep_alive_s=KEEP_ALIVE_S,
                        will=will,
                        username=broker.username,
                        password=broker.password,
                    )
                )
                why = refusal(await connection._answer(CONNACK))
        except BaseException as error:
            connection.abort()
            if isinstance(error, TimeoutError):
                raise MqttError(f"no answer within {CONNECT_S:g} s") from None
            if isinstance(error, OSError):
                raise _plain(error) from None
            raise
        if why is not None:
            connection.abort()
            raise MqttError(f"refused: {why}")
        connection._watch()
        return connection

    async def subscribe(self, topics: Sequence[str]) -> None:
        """:raises MqttError: the broker does not acknowledge it. A topic that it denies us is only silent."""
        self._write(subscribe_packet(_SUBSCRIPTION, topics))
        try:
            async with asyncio.timeout(CONNECT_S):
                await self._answer(SUBACK)
        except TimeoutError:
            raise MqttError(f"subscriptions are not acknowledged within {CONNECT_S:g} s") from None

    def publish(self, message: Outgoing) -> None:
        """Send it, in the order of the calls; at QoS 1 it is kept until it is acknowledged."""
        if self._over:
            return
        if message.qos and (self._waiting or len(self._unacknowledged) >= MAX_UNACKNOWLEDGED):
            self._waiting.append(message)
            return
        number = 0
        if message.qos:
            number = self._next_number()
            self._unacknowledged[number] = message
        self._write(publish_packet(message.topic.encode(), message.payload, number, retain=message.retain))

    def unacknowledged(self) -> list[Outgoing]:
        """Oldest first."""
        return [*self._unacknowledged.values(), *self._waiting]

    async def flush(self, timeout_s: float) -> None:
        """Until everything is acknowledged, the connection broke, or the time is over."""
        if self._unacknowledged and not self._over:
            drained = self._loop.create_future()
            self._drained.append(drained)
            await asyncio.wait([drained], timeout=timeout_s)

    def close(self) -> None:
        """With a goodbye: the broker does not send the last will."""
        if self._transport is not None and not self._over:
            self._write(DISCONNECT_PACKET)
            self._send()
            self._transport.close()
        self._end(None)

    def abort(self) -> None:
        """Without one."""
        if self._transport is not None:
            self._transport.abort()
        self._end(None)

    # --- asyncio's side ----------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are no subclasses.
        handle = transport.get_extra_info("socket")
        if handle is not None:
            # Small packets wait up to 40 ms for the peer's delayed acknowledgement without it.
            handle.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def connection_lost(self, exc: Exception | None) -> None:
        self._end(MqttError("the broker closed the connection") if exc is None else _plain(exc))

    def data_received(self, data: bytes) -> None:
        """Hand on what is whole now, then acknowledge all of it."""
        self._heard_at = self._loop.time()
        try:
            acknowledged: list[bytes] = []
            for first, body in self._splitter.feed(data):
                if first & 0xF0 == PUBLISH:
                    topic, payload, retained, number = published(first, body)
                    if number:
                        acknowledged.append(puback_packet(number))
                    self._on_message(topic, payload, retained)
                elif first == PUBACK:
                    self._acknowledge(int.from_bytes(body[:2], "big"))
                elif (answer := self._answers.pop(first, None)) is not None:
                    if not answer.done():
                        answer.set_result(body)
                elif first != PINGRESP:
                    raise MqttError(f"what answers there does not speak MQTT (packet {first:#04x})")
            if acknowledged:
                self._write(b"".join(acknowledged))
        except MqttError as error:
            self._break(error)

    # --- within --------------------------------------------------------------------------------------

    async def _answer(self, kind: int) -> bytes:
        if self._over:
            raise MqttError("the broker closed the connection")
        answer: asyncio.Future[bytes] = self._loop.create_future()
        self._answers[kind] = answer
        return await answer

    def _next_number(self) -> int:
        while True:
            self._number = self._number % (_SUBSCRIPTION - 1) + 1
            if self._number not in self._unacknowledged:
                return self._number

    def _acknowledge(self, number: int) -> None:
        message = self._unacknowledged.pop(number, None)
        if message is None:
            return
        self._on_acknowledged(time.monotonic() - message.began)
        if self._waiting:
            following = list(self._waiting)
            self._waiting.clear()
            for other in following:
                self.publish(other)
        if not self._unacknowledged:
            self._release()

    def _release(self) -> None:
        drained, self._drained = self._drained, []
        for waiter in drained:
            if not waiter.done():
                waiter.set_result(None)

    def _write(self, data: bytes) -> None:
        """Collected until the end of this turn of the event loop."""
        if not self._out:
            self._loop.call_soon(self._send)
        self._out.append(data)

    def _send(self) -> None:
        if self._out and self._transport is not None and not self._over:
            self._sent_at = self._loop.time()
            self._transport.write(b"".join(self._out))
        self._out.clear()

    def _watch(self) -> None:
        """Ping where it is quiet; give up where nothing is heard any more."""
        now = self._loop.time()
        if now - self._heard_at > 2 * KEEP_ALIVE_S:
            self._break(MqttError(f"the broker is silent for {now - self._heard_at:.0f} s"))
            return
        if now - min(self._heard_at, self._sent_at) >= KEEP_ALIVE_S / 2:
            self._write(PINGREQ_PACKET)
        self._pinger = self._loop.call_later(KEEP_ALIVE_S / 4, self._watch)

    def _break(self, error: MqttError) -> None:
        if self._transport is not None:
            self._transport.abort()
        self._end(error)

    def _end(self, error: Exception | None) -> None:
        if self._over:
            return
        self._over = True
        if self._pinger is not None:
            self._pinger.cancel()
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(error or MqttError("the connection was closed"))
        self._release()
        if not self.lost.done():
            if error is None:
                self.lost.set_result(None)
            else:
                self.lost.set_exception(error)
                self.lost.exception()  # Also where nobody waits for it.


def _plain(error: Exception) -> Exception:
    """uvloop and asyncio word what the system says differently, and with addresses."""
    if not isinstance(error, OSError) or isinstance(error, ssl.SSLError | socket.gaierror) or not error.errno:
        return error
    return OSError(error.errno, os.strerror(error.errno))
