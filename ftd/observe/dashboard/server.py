"""The HTTP side of the dashboard: read-only, a token where one is configured, all of it bounded."""

import asyncio
import gzip
import time
from collections.abc import Awaitable, Callable

import structlog
from aiohttp import web

from ftd.config.dashboard import DashboardAddress
from ftd.errors import ConfigurationError
from ftd.observe.dashboard.access import HEADERS, Access
from ftd.observe.dashboard.assets import PLOTLY, Asset, Plotly, pages
from ftd.observe.dashboard.feed import DeltaFeed, PositionExpiredError
from ftd.observe.dashboard.model import DashboardModel
from ftd.transport.http_server import BoundedHttpServer
from ftd.transport.rate_limited_log import RateLimitedLog
from ftd.transport.wire.public import encode_json, timestamp

_log = structlog.get_logger("ftd.observe.dashboard")

MOST_PAGES = 64
"""Streams at a time; more would be a mistake, or malice."""
MOST_CONNECTIONS = 256
SILENCE_S = 10.0
"""A connection that was not let in by then is closed."""
WRITE_S = 10.0
"""A page that takes no bytes for so long is dropped."""
WRONG_TOKEN_S = 1.0
_FRESH_S = 0.5
"""So long a document is given again: many pages that come back at once cost one."""
_HEADER_BYTES = 8192
_FORM_BYTES = 2048

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class DashboardServer:
    """``await start()``; ``await close()``, also where it was never started."""

    def __init__(
        self,
        place: DashboardAddress,
        model: DashboardModel,
        feed: DeltaFeed,
        *,
        cluster: str,
        silence_s: float = SILENCE_S,
    ) -> None:
        self._place, self._model, self._feed, self._cluster = place, model, feed, cluster
        self._silence_s = silence_s
        self._access = Access(place, cluster)
        self._plotly = Plotly()
        self._document: tuple[float, bytes] = (-_FRESH_S, b"")
        self._making = asyncio.Lock()
        self._doorway: BoundedHttpServer | None = None

    @property
    def port(self) -> int:
        """Where it listens; 0: it does not."""
        return self._doorway.port if self._doorway is not None else 0

    async def start(self) -> None:
        """Without the port, and where nobody named it, there is no page: a page must not keep a cluster down.

        :raises ConfigurationError: the address that the configuration names cannot be had.
        """
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
        self._doorway = BoundedHttpServer(
            app,
            RateLimitedLog(_log, "no_http"),
            max_connections=MOST_CONNECTIONS,
            header_bytes=_HEADER_BYTES,
            admission_timeout_s=self._silence_s,
            keepalive_timeout=15.0,
        )
        place = self._place
        try:
            await self._doorway.start(place.host, place.port)
        except OSError as error:
            await self.close()
            problem = f"the dashboard cannot be served on {place.host}:{place.port}: {error.strerror}"
            if place.configured:
                raise ConfigurationError(
                    problem,
                    field="dashboard.listen",
                    remedy='is something else there? choose another port, or "" for no dashboard',
                ) from error
            _log.warning("not_served", problem=problem, remedy="set dashboard.listen to another address")
            return
        _log.info("serving", url=f"http://{_bracketed(place.host)}:{self.port}/", token=self._access.asks)

    async def close(self) -> None:
        """Nobody is served any more."""
        self._feed.close()
        if self._doorway is not None:
            await self._doorway.close()
        self._doorway = None

    # --- who is let in ---------------------------------------------------------------------------------

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Nothing of a request is looked at before it was let in, but the form that asks to be."""
        if handler != self._login and not self._access.allows(request):
            answer: web.StreamResponse = self._refused(request)
        else:
            if handler != self._login:
                assert self._doorway is not None, "it came through it"
                self._doorway.admit(request.protocol)
            try:
                answer = await handler(request)
            except web.HTTPException as refusal:
                answer = web.Response(status=refusal.status, text=refusal.reason)
            except ConnectionError:
                raise
            except Exception:
                _log.exception("request", path=request.path)
                answer = web.Response(status=500, text="a bug; the coordinator's log says more")
        if not answer.prepared:
            answer.headers.update(HEADERS)
            answer.headers.setdefault("Cache-Control", "no-store")
        return answer

    def _refused(self, request: web.Request) -> web.Response:
        if not self._access.asks:
            return web.Response(status=403, text="ask for this page under the name of this host\n")
        answer = (
            _packed(pages()["login.html"], status=401)
            if request.path == "/"
            else web.Response(status=401, text="a token is wanted\n")
        )
        answer.headers["WWW-Authenticate"] = "Bearer"
        answer.force_close()
        return answer

    async def _login(self, request: web.Request) -> web.StreamResponse:
        """The form's token for a cookie. A wrong one takes a second, so that trying does not pay."""
        if request.content_type != "application/x-www-form-urlencoded":
            raise web.HTTPUnsupportedMediaType
        token = (await request.post()).get("token")
        if isinstance(token, str) and self._access.opens(token):
            answer = web.Response(status=303, headers={"Location": "./"})
            self._access.admit(answer, secure=request.headers.get("X-Forwarded-Proto") == "https")
            return answer
        await asyncio.sleep(WRONG_TOKEN_S)
        answer = web.Response(status=303, headers={"Location": "./#wrong"})
        answer.force_close()
        return answer

    # --- what is served --------------------------------------------------------------------------------

    async def _page(self, request: web.Request) -> web.StreamResponse:
        return _cached(request, pages()["index.html"])

    async def _file(self, request: web.Request) -> web.StreamResponse:
        asset = pages().get(request.match_info["name"])
        if asset is None:
            raise web.HTTPNotFound
        return _cached(request, asset)

    async def _library(self, request: web.Request) -> web.StreamResponse:
        try:
            answer = _packed(await self._plotly.get())
        except OSError as error:
            _log.error("no_plotly", problem=str(error))
            raise web.HTTPNotFound from None
        answer.headers["Cache-Control"] = "private, max-age=31536000, immutable"
        return answer

    async def _now(self, request: web.Request) -> web.StreamResponse:
        """Everything, and the position in the stream that it is of."""
        async with self._making:
            at, body = self._document
            if time.monotonic() - at > _FRESH_S:
                position = self._feed.catch_up()
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
        """Those before number ``before``."""
        before = request.query.get("before", "")
        if not before.isdecimal() or len(before) > 15:
            raise web.HTTPBadRequest
        plain = encode_json(self._model.events_before(int(before)))
        return _json(await asyncio.to_thread(gzip.compress, plain, 1))

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        """Deltas behind a position, as server-sent events; a ``beat`` now and then; or ``reload``."""
        if self._feed.pages >= MOST_PAGES:
            raise web.HTTPServiceUnavailable
        answer = web.StreamResponse(
            headers={**HEADERS, "Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        )
        answer.content_type = "text/event-stream"
        await answer.prepare(request)
        position = request.headers.get("Last-Event-ID") or request.query.get("after", "")
        try:
            await _sent(answer, b"retry: 1000\n\n")
            async for frame in self._feed.stream_from(position):
                await _sent(answer, frame)
        except PositionExpiredError:
            await _sent(answer, b"event: reload\ndata: {}\n\n")
        except (TimeoutError, ConnectionError):
            if request.transport is not None:
                request.transport.abort()
        return answer


async def _sent(answer: web.StreamResponse, frame: bytes) -> None:
    """:raises TimeoutError: the page does not take it."""
    async with asyncio.timeout(WRITE_S):
        await answer.write(frame)


def _cached(request: web.Request, asset: Asset) -> web.Response:
    """The browser asks each time whether it still has the right one: a newer ftd is seen at once."""
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


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
