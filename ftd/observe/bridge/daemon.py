"""Listens to a cluster's events and offers those that the filters let through to the courier."""

import asyncio
import signal
import time
from collections.abc import Sequence

import structlog

from ftd.errors import WireError
from ftd.observe.bridge.alert import alert_body
from ftd.observe.bridge.filters import EventFilter
from ftd.observe.bridge.webhook import WebhookOptions, WebhookSender
from ftd.transport.address import ClusterAddress
from ftd.transport.mqtt.session import MqttSession
from ftd.transport.wire.duplicates import DuplicateFilter
from ftd.transport.wire.public import EventMessage, decode_json
from ftd.transport.wire.topics import Topics

_log = structlog.get_logger("ftd.observe.bridge")

CONNECT_S = 10.0


class Bridge:
    """See the module. SIGTERM and SIGINT end ``run``."""

    def __init__(
        self,
        address: ClusterAddress,
        filters: Sequence[EventFilter],
        options: WebhookOptions,
        finish_s: float,
    ) -> None:
        """``filters``: one that lets an event through is enough; without any, all are handed on.

        :raises ConfigurationError: the dead-letter file cannot be written to.
        """
        self._cluster = address.cluster
        self._filters = filters or [EventFilter()]
        self._courier = WebhookSender(options)
        self._finish_s = finish_s
        self._repeats = DuplicateFilter()
        self._lost_at: float | None = None
        self._session = MqttSession(
            address.broker,
            client_id=f"ftd-bridge-{time.time_ns():x}",
            subscriptions=[Topics(cluster=address.cluster).events],
            on_message=self._on_message,
            on_connected=self._on_connected,
            on_lost=self._on_lost,
        )

    async def run(self) -> int:
        """Until a signal comes; how many alerts ended in the dead-letter file.

        :raises Unreachable: the broker does not answer at the beginning.
        """
        stop = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        listening = asyncio.create_task(self._session.run())
        bringing = asyncio.create_task(self._courier.run())
        try:
            await self._session.wait_connected(CONNECT_S)
            _log.info("bridging", cluster=self._cluster)
            stopped = asyncio.ensure_future(stop.wait())
            await asyncio.wait([stopped, bringing], return_when=asyncio.FIRST_COMPLETED)
            if bringing.done():
                await (
                    bringing
                )  # It ends by itself only with a bug of ours: said, and started anew by systemd.
        finally:
            listening.cancel()
            await asyncio.gather(listening, return_exceptions=True)
            await self._courier.finish(bringing, self._finish_s)
        _log.info("ended", delivered=self._courier.delivered, dead_letters=self._courier.letters.count)
        return self._courier.letters.count

    def _on_message(self, _topic: str, payload: bytes, _retained: bool) -> None:
        try:
            event: EventMessage = decode_json(payload, EventMessage)
        except WireError as error:
            _log.warning("no_event", problem=str(error))
            return
        if not self._repeats.is_new(event.id):
            return
        if any(one.matches(event) for one in self._filters):
            self._courier.offer(alert_body(event, self._cluster))

    def _on_lost(self) -> None:
        self._lost_at = time.monotonic()

    def _on_connected(self) -> None:
        if self._lost_at is not None:
            away_s, self._lost_at = time.monotonic() - self._lost_at, None
            _log.warning(
                "gap",
                away_s=round(away_s, 1),
                remedy="what was told meanwhile is in the coordinator's journal (ftd events)",
            )
