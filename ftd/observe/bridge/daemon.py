"""The bridge daemon: receives a cluster's events and sends those that match a filter to the webhook."""

import asyncio
import signal
import time
from collections.abc import Sequence

import structlog

from ftd.errors import WireError
from ftd.observe.bridge.alert import build_alert
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
    """The daemon of ``ftd bridge``; SIGTERM, SIGINT and a closed terminal end ``run``."""

    def __init__(
        self,
        address: ClusterAddress,
        filters: Sequence[EventFilter],
        options: WebhookOptions,
        finish_s: float,
    ) -> None:
        """:param filters: an event is sent if any filter matches; without filters all events are sent.
        :raises ConfigurationError: the dead-letter file cannot be written.
        """
        self._cluster = address.cluster
        self._filters = filters or [EventFilter()]
        self._sender = WebhookSender(options)
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
        """Run until a signal arrives, and return how many alerts ended in the dead-letter file.

        :raises Unreachable: the broker does not answer at the start.
        """
        stop = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:  # As nohup has it for SIGHUP.
                asyncio.get_running_loop().add_signal_handler(number, stop.set)
        receiving = asyncio.create_task(self._session.run())
        delivering = asyncio.create_task(self._sender.run())
        stopped = asyncio.ensure_future(stop.wait())
        connecting = asyncio.ensure_future(self._session.wait_connected(CONNECT_S))
        try:
            await asyncio.wait([stopped, connecting], return_when=asyncio.FIRST_COMPLETED)
            if connecting.done():
                await connecting
                _log.info("bridge_started", cluster=self._cluster)
                await asyncio.wait([stopped, delivering], return_when=asyncio.FIRST_COMPLETED)
            if delivering.done():
                # It ends by itself only through a bug; raise it, so that systemd restarts the bridge.
                await delivering
        finally:
            for task in (receiving, connecting):
                task.cancel()
            await asyncio.gather(receiving, connecting, return_exceptions=True)
            await self._sender.finish(delivering, self._finish_s)
        _log.info(
            "bridge_ended", delivered=self._sender.delivered, dead_letters=self._sender.dead_letter_file.count
        )
        return self._sender.dead_letter_file.count

    def _on_message(self, _topic: str, payload: bytes, _retained: bool) -> None:
        try:
            event: EventMessage = decode_json(payload, EventMessage)
        except WireError as error:
            _log.warning("malformed_event", problem=str(error))
            return
        if not self._repeats.is_new(event.id):
            return
        if any(one.matches(event) for one in self._filters):
            self._sender.enqueue(build_alert(event, self._cluster))

    def _on_lost(self) -> None:
        self._lost_at = time.monotonic()

    def _on_connected(self) -> None:
        if self._lost_at is not None:
            away_s, self._lost_at = time.monotonic() - self._lost_at, None
            _log.warning(
                "events_missed",
                away_s=round(away_s, 1),
                remedy="read the events of that time from the coordinator's journal (ftd events)",
            )
