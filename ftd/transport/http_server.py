"""An aiohttp application behind a door of its own: so many connections at a time, short headers, no patience.

Whoever is not let in within a while is parted with, whatever it does meanwhile; what is no HTTP is a
complaint.
"""

import asyncio
from collections.abc import Callable
from typing import Any

from aiohttp import web

from ftd.transport.rate_limited_log import RateLimitedLog, http_logger


def abort_connection(connection: web.RequestHandler) -> None:
    """At once, with what was not sent yet."""
    if connection.transport is not None:
        connection.transport.abort()


def close_connection(connection: web.RequestHandler) -> None:
    """When what is on its way has been sent."""
    if connection.transport is not None:
        connection.transport.close()


class BoundedHttpServer:
    """``await open()``; ``await close()``, also where it was never opened."""

    def __init__(
        self,
        app: web.Application,
        complaints: RateLimitedLog,
        *,
        max_connections: int,
        header_bytes: int,
        admission_timeout_s: float,
        end_connection: Callable[[web.RequestHandler], None] = abort_connection,
        count_pending: bool = False,
        **options: Any,
    ) -> None:
        """:param patience_s: so long a connection may take until ``admit``.
        :param count_pending: one that does not count as a connection yet (TLS) counts nevertheless.
        :param options: of ``web.AppRunner``, beyond those that all have.
        """
        self._most, self._patience_s, self._part_with = max_connections, admission_timeout_s, end_connection
        self._strangers_count = count_pending
        self._strangers: dict[asyncio.BaseProtocol, asyncio.TimerHandle] = {}
        self._server: asyncio.Server | None = None
        self._runner = web.AppRunner(
            app,
            access_log=None,
            handle_signals=False,
            shutdown_timeout=0.0,
            logger=http_logger(complaints),
            max_line_size=header_bytes,
            max_field_size=header_bytes,
            **options,
        )

    @property
    def port(self) -> int:
        """Where it listens; 0: it does not."""
        return self._server.sockets[0].getsockname()[1] if self._server is not None else 0

    async def start(self, host: str, port: int, **listening: Any) -> None:
        """:raises OSError: the address cannot be bound."""
        await self._runner.setup()
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(self._accept, host, port, **listening)

    async def close(self) -> None:
        """Nobody is served any more."""
        if self._server is not None:
            self._server.close()
        for timer in self._strangers.values():
            timer.cancel()
        await self._runner.cleanup()
        self._server = None

    def admit(self, connection: asyncio.BaseProtocol) -> None:
        """It may stay as long as it likes."""
        if (timer := self._strangers.pop(connection, None)) is not None:
            timer.cancel()

    def _accept(self) -> asyncio.BaseProtocol:
        server = self._runner.server
        strangers = len(self._strangers) if self._strangers_count else 0
        if server is None or max(len(server.connections), strangers) >= self._most:
            return _Turned()
        connection = server()
        loop = asyncio.get_running_loop()
        self._strangers[connection] = loop.call_later(self._patience_s, self._lose_patience, connection)
        return connection

    def _lose_patience(self, connection: web.RequestHandler) -> None:
        del self._strangers[connection]
        self._part_with(connection)


class _Turned(asyncio.Protocol):
    """Too many connections: this one is closed at once."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.close()
