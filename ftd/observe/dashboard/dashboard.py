"""The dashboard's interface to the coordinator.

The dashboard must never disturb the cluster: a bug is logged, a port in use means that there is no page,
and while no page is open an event costs only the memory of its entry, and a state nothing.
"""

import secrets
import time
from collections.abc import Mapping
from typing import Any, Protocol

import msgspec
import structlog

from ftd.config.dashboard import DashboardAddress
from ftd.observe.dashboard.feed import DeltaFeed
from ftd.observe.dashboard.model import DashboardModel
from ftd.observe.dashboard.server import DashboardServer
from ftd.observe.dashboard.trend import MAX_POINTS
from ftd.transport.wire.public import EventMessage

_log = structlog.get_logger("ftd.observe.dashboard")
_REMEMBERED_EVENTS = 1_000


class EventHistory(Protocol):
    """The events and steps that ``ftd.coordinator.journal.Journal`` keeps."""

    def events(self, *, after: int, limit: int, newest: bool) -> tuple[list[dict[str, Any]], int]: ...

    def sampled_steps(self, most: int) -> tuple[list[dict[str, Any]], int]: ...


class Dashboard:
    """A coordinator's dashboard: ``await start(journal, state)``, then ``on_event`` and ``on_state``, then
    ``await close()``.
    """

    def __init__(self, address: DashboardAddress, *, cluster: str) -> None:
        self._last_message_at = time.monotonic()
        self._model = DashboardModel()
        self._feed = DeltaFeed(self._model.take_delta, secrets.token_hex(4), quiet_s=self._quiet_s)
        self._server = DashboardServer(address, self._model, self._feed, cluster=cluster)

    async def start(self, journal: EventHistory, state: Mapping[str, Any]) -> None:
        """Load the journal's newest events and steps, then serve.

        :raises ConfigurationError: the configured address cannot be bound.
        """
        rows, _ = journal.events(after=0, limit=_REMEMBERED_EVENTS, newest=True)
        steps, stride = journal.sampled_steps(MAX_POINTS // 2)
        try:
            self._model.restore([msgspec.convert(row, EventMessage) for row in rows], steps, stride)
        except Exception:
            _log.exception("restore_failed")
        self.on_state(state)
        await self._server.start()

    async def close(self) -> None:
        """Close the server and its connections."""
        await self._server.close()

    def on_broker_message(self) -> None:
        """Record that the broker delivered any message, so the state shown is current."""
        self._last_message_at = time.monotonic()

    def on_event(self, message: EventMessage, own: bool) -> None:
        """Add a published event.
        :param own: whether the coordinator published it.
        """
        try:
            self._model.on_event(message, own=own)
            self._feed.changed()
        except Exception:
            _log.exception("event_failed", shown=message.event)

    def on_state(self, state: Mapping[str, Any]) -> None:
        """Replace the cluster's public state."""
        try:
            self._model.on_state(state)
            self._feed.changed()
        except Exception:
            _log.exception("state_failed")

    def _quiet_s(self) -> float:
        return time.monotonic() - self._last_message_at
