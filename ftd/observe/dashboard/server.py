"""The HTTP server of the dashboard: read-only, with a token if one is configured, and all resources bounded."""

import asyncio
import gzip
import time

import structlog
from aiohttp import web
from aiohttp.typedefs import Handler

from ftd.config.dashboard import DashboardAddress
from ftd.errors import ConfigurationError
from ftd.observe.dashboard.access import HEADERS, DashboardAccess
from ftd.observe.dashboard.assets import PLOTLY, Asset, load_pages, load_plotly
from ftd.observe.dashboard.feed import DeltaFeed, PositionExpiredError
from ftd.observe.dashboard.model import DashboardModel
from ftd.transport.http_server import BoundedHttpServer
from ftd.transport.rate_limited_log import RateLimitedLog
from ftd.transport.wire.public import encode_json, timestamp

_log = structlog.get_logger("ftd.observe.dashboard")

MAX_PAGES = 64
"""Largest number of open streams; more would be a mistake or an attack."""
MAX_CONNECTIONS = 256
SILENCE_S = 10.0
"""A connection that was not admitted within this time is closed."""
WRITE_S = 10.0
"""A page that does not accept bytes for this long is dropped."""
WRONG_TOKEN_S = 1.0
_FRESH_S = 0.5
"""A rendered document is reused for this long, so that many pages that return at once cost one."""
_HEADER_BYTES = 8192
_FORM_BYTES = 2048


class DashboardServer:
    """Server of one dashboard: ``await start()``, then ``await close()``, which is also valid without
    ``start``.
    """

    def __init__(
        self, address: DashboardAddress, model: DashboardModel, feed: DeltaFeed, *, cluster: str
    ) -> None:
        self._address, self._model, self._feed, self._cluster = address, model, feed, cluster
        self._access = DashboardAccess(address, cluster)
        self._compressing = asyncio.Lock()
        self._document: tuple[float, bytes] = (-_FRESH_S, b"")
        self._encoding = asyncio.Lock()
        app = web.Application(middlewares=[self._guard], client_max_size=_FORM_BYTES)
        for path, handler in {
            "/": self._page,
            "/now": self._now,
            "/stream": self._stream,
            "/events": self._events,
            "/page/{name}": self._file,
            f"/{PLOTLY}": self._library,
        }.items():
            app.router.add_get(path, handler, allow_head=False)
        app.router.add_post("/login", self._login)
        self._http_server = BoundedHttpServer(
            app,
            RateLimitedLog(_log, "malformed_request"),
            max_connections=MAX_CONNECTIONS,
            header_bytes=_HEADER_BYTES,
            admission_timeout_s=SILENCE_S,
            keepalive_timeout=15.0,
        )

    @property
    def port(self) -> int:
        """Port on which it listens; 0 if it does not."""
        return self._http_server.port

    async def start(self) -> None:
        """Start to serve. If the default port is in use, there is no page, because a page must not keep a
        cluster down.

        :raises ConfigurationError: the configured address cannot be bound.
        """
        address = self._address
        try:
            await self._http_server.start(address.host, address.port)
        except OSError as error:
            await self.close()
            problem = f"the dashboard cannot be served on {address.host}:{address.port}: {error.strerror}"
            if address.configured:
                raise ConfigurationError(
                    problem,
                    field="dashboard.listen",
                    remedy='is another program using it? choose another port, or "" for no dashboard',
                ) from error
            _log.warning("not_served", problem=problem, remedy="set dashboard.listen to another address")
            return
        host = f"[{address.host}]" if ":" in address.host else address.host
        _log.info("serving", url=f"http://{host}:{self.port}/", token=self._access.requires_token)

    async def close(self) -> None:
        """Close the server and its connections."""
        self._feed.close()
        await self._http_server.close()

    # --- access --------------------------------------------------------------------------------------

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Check a request's access before anything else of it is looked at; only the login form is exempt."""
        if handler != self._login and not self._access.allows(request):
            answer: web.StreamResponse = self._reject(request)
        else:
            if handler != self._login:
                self._http_server.admit(request.protocol)
            try:
                answer = await handler(request)
            except web.HTTPException as rejection:
                answer = web.Response(status=rejection.status, text=rejection.reason)
            except ConnectionError:
                raise
            except Exception:
                _log.exception("request_failed", path=request.path)
                answer = web.Response(status=500, text="internal error; see the coordinator's log")
        if not answer.prepared:
            answer.headers.update(HEADERS)
            answer.headers.setdefault("Cache-Control", "no-store")
        return answer

    def _reject(self, request: web.Request) -> web.Response:
        if not self._access.requires_token:
            return web.Response(status=403, text="open this page under the name of this host\n")
        answer = (
            _packed(load_pages()["login.html"], status=401)
            if request.path == "/"
            else web.Response(status=401, text="a token is required\n")
        )
        answer.headers["WWW-Authenticate"] = "Bearer"
        answer.force_close()
        return answer

    async def _login(self, request: web.Request) -> web.StreamResponse:
        """Exchange the form's token for a cookie. A wrong token is answered after a second, to slow down
        guessing.
        """
        if request.content_type != "application/x-www-form-urlencoded":
            raise web.HTTPUnsupportedMediaType
        token = (await request.post()).get("token")
        if isinstance(token, str) and self._access.is_token(token):
            answer = web.Response(status=303, headers={"Location": "./"})
            self._access.set_cookie(answer, secure=request.headers.get("X-Forwarded-Proto") == "https")
            return answer
        await asyncio.sleep(WRONG_TOKEN_S)
        answer = web.Response(status=303, headers={"Location": "./#wrong"})
        answer.force_close()
        return answer

    # --- content -------------------------------------------------------------------------------------

    async def _page(self, request: web.Request) -> web.StreamResponse:
        return _cached(request, load_pages()["index.html"])

    async def _file(self, request: web.Request) -> web.StreamResponse:
        asset = load_pages().get(request.match_info["name"])
        if asset is None:
            raise web.HTTPNotFound
        return _cached(request, asset)

    async def _library(self, request: web.Request) -> web.StreamResponse:
        try:
            async with self._compressing:  # The first browser that asks has it compressed, for all of them.
                answer = _packed(await asyncio.to_thread(load_plotly))
        except OSError as error:
            _log.error("plotly_missing", problem=str(error))
            raise web.HTTPNotFound from None
        answer.headers["Cache-Control"] = "private, max-age=31536000, immutable"
        return answer

    async def _now(self, request: web.Request) -> web.StreamResponse:
        """Return the document and its position in the stream."""
        async with self._encoding:
            at, body = self._document
            if time.monotonic() - at > _FRESH_S:
                position = self._feed.flush()
                head = {
                    "position": position,
                    "run": position.rpartition("-")[0],
                    "cluster": self._cluster,
                    "plotly": PLOTLY,
                    "at": timestamp(),
                    "quiet_s": self._feed.quiet_s(),
                }
                plain = encode_json({**head, **self._model.document()})
                body = await asyncio.to_thread(gzip.compress, plain, 1)
                self._document = (time.monotonic(), body)
        return _json(body)

    async def _events(self, request: web.Request) -> web.StreamResponse:
        """Return a page of events before number ``before``."""
        before = request.query.get("before", "")
        if not before.isdecimal() or len(before) > 15:
            raise web.HTTPBadRequest
        plain = encode_json(self._model.events_before(int(before)))
        return _json(await asyncio.to_thread(gzip.compress, plain, 1))

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        """Send the deltas after a position as server-sent events, with a ``heartbeat`` now and then; or ``reload``."""
        if self._feed.pages >= MAX_PAGES:
            raise web.HTTPServiceUnavailable
        answer = web.StreamResponse(
            headers={**HEADERS, "Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        )
        answer.content_type = "text/event-stream"
        await answer.prepare(request)
        position = request.headers.get("Last-Event-ID") or request.query.get("after", "")
        try:
            await _sent(answer, b"retry: 1000\n\n")
            try:
                async for frame in self._feed.stream_from(position):
                    await _sent(answer, frame)
            except PositionExpiredError:
                await _sent(answer, b"event: reload\ndata: {}\n\n")
        except (TimeoutError, ConnectionError):
            if request.transport is not None:
                request.transport.abort()
        return answer


async def _sent(answer: web.StreamResponse, frame: bytes) -> None:
    """Send a frame.
    :raises TimeoutError: the page does not accept it.
    """
    async with asyncio.timeout(WRITE_S):
        await answer.write(frame)


def _cached(request: web.Request, asset: Asset) -> web.Response:
    """Return an asset that browsers must revalidate each time, so that a newer version of ftd shows at once."""
    headers = {"ETag": asset.tag, "Cache-Control": "private, no-cache"}
    if request.headers.get("If-None-Match") == asset.tag:
        return web.Response(status=304, headers=headers)
    answer = _packed(asset)
    answer.headers.update(headers)
    return answer


def _packed(asset: Asset, status: int = 200) -> web.Response:
    answer = web.Response(status=status, body=asset.packed, content_type=asset.kind, charset="utf-8")
    answer.headers["Content-Encoding"] = "gzip"
    return answer


def _json(packed: bytes) -> web.Response:
    answer = web.Response(body=packed, content_type="application/json")
    answer.headers["Content-Encoding"] = "gzip"
    return answer
