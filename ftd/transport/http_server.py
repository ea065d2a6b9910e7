"""An aiohttp server with limits: on the number of connections, the size of headers, and the time until a
client is admitted.

A client that is not admitted in time is disconnected, whatever it does meanwhile. What is not HTTP is
logged at a limited rate.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import structlog
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from ftd.errors import ConfigurationError
from ftd.transport.rate_limited_log import RateLimitedLog

_log = structlog.get_logger("ftd.http")


def abort_connection(connection: web.RequestHandler) -> None:
    """Close a connection at once, without sending what is waiting."""
    if connection.transport is not None:
        connection.transport.abort()


def close_connection(connection: web.RequestHandler) -> None:
    """Close a connection after sending what is waiting."""
    if connection.transport is not None:
        connection.transport.close()


class BoundedHttpServer:
    """A server with limits. ``await start()`` opens it; ``await close()`` also works if it never started."""

    def __init__(
        self,
        app: web.Application,
        log: RateLimitedLog,
        *,
        max_connections: int,
        header_bytes: int,
        admission_timeout_s: float,
        end_connection: Callable[[web.RequestHandler], None] = abort_connection,
        count_pending: bool = False,
        **options: Any,
    ) -> None:
        """Prepare the server.

        :param admission_timeout_s: a connection is ended if ``admit`` is not called for it within this
            time.
        :param end_connection: ends a connection that was not admitted.
        :param count_pending: whether to count connections that aiohttp does not count yet (TLS
            handshakes), too.
        :param options: further options of ``web.AppRunner``.
        """
        self._max_connections, self._admission_timeout_s, self._end_connection = (
            max_connections,
            admission_timeout_s,
            end_connection,
        )
        self._count_pending = count_pending
        self._pending: dict[asyncio.BaseProtocol, asyncio.TimerHandle] = {}
        self._server: asyncio.Server | None = None
        self._runner = web.AppRunner(
            app,
            access_log=None,
            handle_signals=False,
            shutdown_timeout=0.0,
            logger=_http_logger(log),
            max_line_size=header_bytes,
            max_field_size=header_bytes,
            **options,
        )

    @property
    def port(self) -> int:
        """The port; 0: the server does not listen."""
        return self._server.sockets[0].getsockname()[1] if self._server is not None else 0

    async def start(self, host: str, port: int, **listening: Any) -> None:
        """Listen.

        :raises OSError: the address cannot be bound.
        """
        await self._runner.setup()
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(self._accept, host, port, **listening)

    async def close(self) -> None:
        """Close the server and all connections."""
        if self._server is not None:
            self._server.close()
        for timer in self._pending.values():
            timer.cancel()
        await self._runner.cleanup()
        self._server = None

    def admit(self, connection: asyncio.BaseProtocol) -> None:
        """Let a connection stay without a time limit."""
        if (timer := self._pending.pop(connection, None)) is not None:
            timer.cancel()

    def _accept(self) -> asyncio.BaseProtocol:
        server = self._runner.server
        pending = len(self._pending) if self._count_pending else 0
        if server is None or max(len(server.connections), pending) >= self._max_connections:
            return _RejectedConnection()
        connection = server()
        loop = asyncio.get_running_loop()
        self._pending[connection] = loop.call_later(self._admission_timeout_s, self._end_pending, connection)
        return connection

    def _end_pending(self, connection: web.RequestHandler) -> None:
        del self._pending[connection]
        self._end_connection(connection)


class _RejectedConnection(asyncio.Protocol):
    """A connection beyond the limit, which is closed at once."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.close()


async def listen(start: Awaitable[None], port: int, *, field: str) -> None:
    """Start a server.

    :param field: key of the configuration that sets the port.
    :raises ConfigurationError: the port cannot be used.
    """
    try:
        await start
    except OSError as error:
        raise ConfigurationError(
            f"cannot listen on port {port}: {error.strerror}",
            field=field,
            remedy="stop the daemon that uses it, or choose another port (0 takes any free one)",
        ) from error


def _http_logger(warnings: RateLimitedLog) -> logging.Logger:
    """Return a logger for an aiohttp server that reports what is not HTTP in this log, without a traceback."""
    log = logging.Logger("ftd.http", logging.WARNING)
    log.addHandler(_Handler(warnings))
    return log


class _Handler(logging.Handler):
    def __init__(self, warnings: RateLimitedLog) -> None:
        super().__init__()
        self._warnings = warnings

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, HttpProcessingError | ConnectionError):
            lines = str(error).splitlines() or [type(error).__name__]
            self._warnings.warn(reason=" ".join(lines[:2])[:200])
        else:
            _log.error("http", problem=record.getMessage(), exc_info=record.exc_info)
