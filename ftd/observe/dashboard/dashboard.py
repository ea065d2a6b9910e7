"""The dashboard as the coordinator has it: told what is published, it never stands in the way.

Nothing here may cost the cluster anything: a bug is logged, a port that is taken means no page, and without a
browser that watches, an event costs the memory of its line and a state costs nothing.
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
from ftd.observe.dashboard.trend import MOST_POINTS
from ftd.transport.wire.public import EventMessage

_log = structlog.get_logger("ftd.observe.dashboard")
_REMEMBERED_EVENTS = 1_000


class EventHistory(Protocol):
    """The events and steps that ``ftd.coordinator.journal.Journal`` keeps."""

    def events(self, *, after: int, limit: int, newest: bool) -> tuple[list[dict[str, Any]], int]: ...

    def sampled_steps(self, most: int) -> tuple[list[dict[str, Any]], int]: ...


class Dashboard:
    """``await start(journal, state)``, then ``on_event`` and ``on_state``; ``await close()``."""

    def __init__(self, place: DashboardAddress | None, *, cluster: str) -> None:
        """:param place: ``None``: there is none."""
        self._server: DashboardServer | None = None
        self._news_at = time.monotonic()
        if place is not None:
            self._model = DashboardModel()
            self._feed = DeltaFeed(self._model.take_delta, secrets.token_hex(4), quiet_s=self._quiet_s)
            self._server = DashboardServer(place, self._model, self._feed, cluster=cluster)

    async def start(self, journal: EventHistory, state: Mapping[str, Any]) -> None:
        """Remember what the journal does, then serve.

        :raises ConfigurationError: not where the configuration says.
        """
        if self._server is None:
            return
        rows, _ = journal.events(after=0, limit=_REMEMBERED_EVENTS, newest=True)
        steps, stride = journal.sampled_steps(MOST_POINTS // 2)
        try:
            self._model.restore([msgspec.convert(row, EventMessage) for row in rows], steps, stride)
        except Exception:
            _log.exception("restore")
        self.on_state(state)
        await self._server.start()

    async def close(self) -> None:
        """Nobody is served any more."""
        if self._server is not None:
            await self._server.close()

    def on_broker_message(self) -> None:
        """The broker brought something, whatever it is: what is shown is of now."""
        self._news_at = time.monotonic()

    def on_event(self, message: EventMessage, own: bool) -> None:
        """Something was published. :param own: by the coordinator."""
        if self._server is None:
            return
        try:
            self._model.on_event(message, own=own)
            self._feed.changed()
        except Exception:
            _log.exception("event", shown=message.event)

    def on_state(self, state: Mapping[str, Any]) -> None:
        """The cluster's state was published."""
        if self._server is None:
            return
        try:
            self._model.on_state(state)
            self._feed.changed()
        except Exception:
            _log.exception("state")

    def _quiet_s(self) -> float:
        return time.monotonic() - self._news_at
