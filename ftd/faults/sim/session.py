"""The sessions of a simulated process with the simulated broker."""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from ftd.errors import JournalError
from ftd.faults.sim.network import JOURNAL, LEADER, SimConnection, SimNetwork
from ftd.faults.sim.process import ProcessLoop
from ftd.transport.mqtt.session import MAX_PENDING, PendingMessage, Will, ignore
from ftd.transport.ports import OpenSession


class SimSession:
    """One session (``ftd.transport.ports.BrokerSession``)."""

    def __init__(
        self,
        loop: ProcessLoop,
        network: SimNetwork,
        host: str,
        note: Callable[[str, bytes], Any],
        saw: Callable[[bytes], None],
        *,
        client_id: str,
        subscriptions: Sequence[str] = (),
        unacknowledged: Sequence[str] = (),
        will: Will | None = None,
        on_message: Callable[[str, bytes, bool], None],
        on_connected: Callable[[], None] = ignore,
        on_lost: Callable[[], None] = ignore,
        on_acknowledged: Callable[[float], None] = ignore,
    ) -> None:
        """:param note: returns what the network passes on with a message, for the checks at the broker.
        :param saw: called with every journal that arrives.
        """
        self._loop, self._network, self._host, self._note, self._saw = loop, network, host, note, saw
        self._client_id, self._will = client_id, will
        self._subscriptions = (*subscriptions, *unacknowledged)
        self._on_message, self._on_connected, self._on_lost = on_message, on_connected, on_lost
        self._connection: SimConnection | None = None
        self._closed: asyncio.Future[None] | None = None
        self._pending: deque[PendingMessage] = deque(maxlen=MAX_PENDING)
        self._sending: dict[int, PendingMessage] = {}
        self._number = 0
        self._silent_until = 0.0
        self.problem = "no answer yet"

    @property
    def connected(self) -> bool:
        return self._connection is not None

    async def run(self) -> None:
        while True:
            await self.run_once()
            away_s = max(0.0, self._silent_until - self._loop.time())
            await asyncio.sleep(away_s + self._loop.world.between(0.05, 1.0))

    async def run_once(self) -> None:
        """Connect, serve until the connection ends, and report its end."""
        world, network = self._loop.world, self._network
        await asyncio.sleep(world.between(0.005, 0.05))
        if not network.reaches(self._host):
            self.problem = "the broker is out of reach"
            await asyncio.sleep(world.between(0.05, 1.0))
            return
        self._closed = self._loop.create_future()
        connection = SimConnection(
            self._host,
            self._client_id,
            self._subscriptions,
            self._will,
            receive=lambda *message: self._loop.enter(self._receive, *message),
            closed=lambda one: self._loop.enter(self._end, one),
            acknowledge=lambda one, there: self._loop.enter(self._acknowledge, one, there),
        )
        self._connection, self.problem = connection, "lost"
        network.connect(connection)
        self._on_connected()
        for topic, payload, retain, there in self.take_pending():
            self.publish(topic, payload, retain=retain, queue_offline=True, on_done=there)
        try:
            await self._closed
        except asyncio.CancelledError:
            self._connection = None
            if self._loop.alive:
                network.disconnect(connection)
            raise
        self._on_lost()

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
        """Publish, or queue the message for the next connection if there is none now and the caller asks for
        it.
        """
        if not self._loop.alive:
            return
        if (connection := self._connection) is None:
            if queue_offline:
                self._pending.append((topic, payload, retain, on_done))
            return
        acknowledged = None
        if qos and queue_offline:
            self._number += 1
            number = self._number
            self._sending[number] = (topic, payload, retain, on_done)

            def acknowledged() -> None:
                if (sent := self._sending.pop(number, None)) is not None:
                    sent[3]()

        self._network.publish(connection, topic, payload, retain, acknowledged, self._note(topic, payload))

    async def flush(self, timeout_s: float = 1.0) -> None:
        await asyncio.sleep(min(timeout_s, 0.01))

    def interrupt(self, for_s: float = 0.0) -> None:
        """Break the connection without a goodbye, and stay away for ``for_s``."""
        self._silent_until = self._loop.time() + for_s
        if (connection := self._connection) is not None:
            self._end(connection)
            self._network.abort(connection)

    def refuses(self, size: int) -> bool:
        return False

    def take_pending(self) -> list[PendingMessage]:
        pending, self._pending = list(self._pending), deque(maxlen=MAX_PENDING)
        return pending

    def _receive(self, connection: SimConnection, topic: str, payload: bytes, retained: bool) -> None:
        if connection is not self._connection:
            return
        if topic == JOURNAL:
            self._saw(payload)
        try:
            self._on_message(topic, payload, retained)
        except JournalError:
            return  # One bad message must not cost the connection; in production it is logged.

    def _acknowledge(self, connection: SimConnection, there: Callable[[], None]) -> None:
        if connection is self._connection:
            there()

    def _end(self, connection: SimConnection) -> None:
        if connection is not self._connection or self._closed is None:
            return
        self._connection = None
        # An acknowledgement that has not arrived never will. Sending twice is what QoS 1 allows.
        self._pending.extend(self._sending.values())
        self._sending.clear()
        if not self._closed.done():
            self._closed.set_result(None)


class SimTransport:
    """The broker as one process reaches it (``ftd.coordinator.ports.Transport``)."""

    leader_client_id = LEADER

    def __init__(
        self,
        loop: ProcessLoop,
        network: SimNetwork,
        host: str,
        *,
        note: Callable[[str, bytes], Any] = ignore,
        saw: Callable[[bytes], None] = ignore,
    ) -> None:
        self.session: OpenSession = partial(SimSession, loop, network, host, note, saw)
