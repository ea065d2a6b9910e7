"""The HTTP server of ``/metrics``: it accepts only GET, checks a bearer token if one is configured, and limits
everything.

Each connection serves one request. Connections that last longer than ``LIFETIME_S`` are cut off, and beyond
``MAX_CONNECTIONS`` at a time new ones are closed at once.
"""

import hmac
import time

import structlog
from aiohttp import web
from aiohttp.typedefs import Handler
from prometheus_client import CollectorRegistry, Counter, exposition
from prometheus_client.openmetrics import exposition as openmetrics

from ftd.config.metrics import MetricsAddress
from ftd.errors import ConfigurationError
from ftd.transport.http_server import BoundedHttpServer
from ftd.transport.rate_limited_log import RateLimitedLog

log = structlog.get_logger("ftd.observe.metrics")

MAX_CONNECTIONS = 32
LIFETIME_S = 10.0
FRESH_S = 0.1
"""A rendered answer is reused for this long, so that frequent scrapes cost the daemon nothing."""
_HEADER_BYTES = 4096
_PLAIN = "text/plain; version=0.0.4; charset=utf-8"


class MetricsServer:
    """Server of one registry: ``await start()``, then ``await close()``, which is also valid without
    ``start``.
    """

    def __init__(self, address: MetricsAddress, registry: CollectorRegistry) -> None:
        self._address, self._registry = address, registry
        self._authorization = None if address.token is None else f"Bearer {address.token}".encode()
        self._rejected = Counter(
            "ftd_metrics_unauthorised",
            "Requests for metrics without the token or with a wrong one.",
            registry=registry,
        )
        self._unauthorised_log = RateLimitedLog(log, "unauthorised")
        self._rendered: dict[bool, tuple[float, bytes]] = {}
        app = web.Application(middlewares=[self._guard])
        app.router.add_get("/metrics", self._metrics, allow_head=False)
        self._http_server = BoundedHttpServer(
            app,
            self._unauthorised_log,
            max_connections=MAX_CONNECTIONS,
            header_bytes=_HEADER_BYTES,
            admission_timeout_s=LIFETIME_S,
        )

    async def start(self) -> None:
        """Start to serve.

        :raises ConfigurationError: the address cannot be bound.
        """
        try:
            await self._http_server.start(self._address.host, self._address.port)
        except OSError as error:
            await self.close()
            raise ConfigurationError(
                f"metrics cannot be served on {self._address.host}:{self._address.port}: {error.strerror}",
                field=self._address.field,
                remedy="is another daemon using it? choose another port, or 0 for no metrics",
            ) from error
        log.info(
            "serving", host=self._address.host, port=self._address.port, token=self._address.token is not None
        )

    async def close(self) -> None:
        """Close the server and its connections."""
        await self._http_server.close()

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Compare the token, in constant time, before anything else of a request is looked at."""
        given = request.headers.get("Authorization", "").encode("utf-8", "surrogateescape")
        if self._authorization is not None and not hmac.compare_digest(given, self._authorization):
            self._rejected.inc()
            self._unauthorised_log.warn(peer=request.remote)
            answer: web.StreamResponse = web.Response(status=401, headers={"WWW-Authenticate": "Bearer"})
        else:
            try:
                answer = await handler(request)
            except web.HTTPException as rejection:
                answer = web.Response(status=rejection.status, text=rejection.reason)
        answer.force_close()
        return answer

    async def _metrics(self, request: web.Request) -> web.StreamResponse:
        wanted = "application/openmetrics-text" in request.headers.get("Accept", "")
        text = openmetrics if wanted else exposition
        at, body = self._rendered.get(wanted, (-FRESH_S, b""))
        if time.monotonic() - at > FRESH_S:
            body = text.generate_latest(self._registry)
            self._rendered[wanted] = (time.monotonic(), body)
        kind = openmetrics.CONTENT_TYPE_LATEST if wanted else _PLAIN
        return web.Response(body=body, headers={"Content-Type": kind})
