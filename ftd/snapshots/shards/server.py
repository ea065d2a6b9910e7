"""The snapshot server of a node: other nodes read snapshots from its arenas, and send copies.

It uses aiohttp and streams straight from the arena's memory. All input is untrusted. Nothing of a request
is examined before its token was compared (in constant time). Jobs are looked up in a listing and parts in a
manifest, never joined to a path. Streams, connections and headers are bounded, and clients that do not read
or do not send a request are disconnected. A snapshot that is released in the middle of a stream does no
harm, since the reader verifies digests.
"""

import asyncio
import hmac
import re
import ssl
import time
from collections.abc import Awaitable, Callable, Iterable

import structlog
from aiohttp import web

from ftd.snapshots.shards.arenas import ArenaSnapshot, NodeArenas
from ftd.snapshots.shards.copies import CopyStore
from ftd.snapshots.shards.copy_server import CopyServer
from ftd.snapshots.shards.protocol import (
    DIGEST_HEADER,
    LINK_TEST_BYTES,
    WANT_DIGEST_HEADER,
    AsyncRateLimiter,
    NodeManifest,
)
from ftd.transport.http_server import BoundedHttpServer, close_connection
from ftd.transport.rate_limited_log import RateLimitedLog
from storage.manifest import SnapshotPart, digest_of, encode_record

log = structlog.get_logger("ftd.node")

MAX_STREAMS = 16
MAX_CONNECTIONS = 256
STALL_S = 20.0
"""A reader that accepts nothing for this long is disconnected."""
FIRST_REQUEST_TIMEOUT_S = 10.0
"""A connection without a valid request for this long is closed."""
_HEADER_BYTES = 4096
_LINGER_S = 1.0
"""Time for which the rest of a rejected body is read, so that its sender reads the reason."""
_VERIFIED_S = 2.0
"""Time for which verified parts are not read again: all nodes ask at the same time."""
_RANGE = re.compile(r"bytes=(\d{1,18})-(\d{1,18})", re.ASCII)
_STEP = re.compile(r"\d{1,12}", re.ASCII)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class ShardServer:
    """The server; call ``start``, then read ``port``, and ``close`` at the end.

    :param port: port to listen on; 0 takes a free one.
    :param rate_bytes_s: rate limit of all streams together that it sends.
    :param copies: holds received copies; ``None`` rejects copies.
    :param tls: context with this node's certificate; ``None`` for plain HTTP.
    :param routes: further routes, for clients with the token.
    """

    def __init__(
        self,
        arenas: NodeArenas,
        token: str,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        rate_bytes_s: float | None = None,
        max_streams: int = MAX_STREAMS,
        stall_s: float = STALL_S,
        greeting_s: float = FIRST_REQUEST_TIMEOUT_S,
        copies: CopyStore | None = None,
        tls: ssl.SSLContext | None = None,
        routes: Iterable[web.RouteDef] = (),
    ) -> None:
        self._arenas = arenas
        self._copies = None if copies is None else CopyServer(copies, stall_s=stall_s)
        self._authorization = f"Bearer {token}".encode()
        self._tls = tls
        self._host = host
        self.port = port
        self.rate = AsyncRateLimiter(rate_bytes_s)
        self._streams = asyncio.Semaphore(max_streams)
        self._stall_s = stall_s
        self._greeting_s = greeting_s
        self._routes = tuple(routes)
        self._verifying = asyncio.Lock()
        self._verified: tuple[float, tuple[ArenaSnapshot, ...], tuple[str, ...]] = (0.0, (), ())
        self._rejections = RateLimitedLog(log, "unauthorised")

    @property
    def unauthorized(self) -> int:
        """Number of requests without the token or with a wrong one."""
        return self._rejections.count

    async def start(self) -> None:
        """:raises OSError: the address cannot be bound."""
        app = web.Application(middlewares=[self._guard])
        app.router.add_routes(self._routes)
        app.router.add_get("/link/{size}", self._link, allow_head=False)
        app.router.add_get("/v1/{job}/{step}", self._manifest, allow_head=False)
        app.router.add_get("/v1/{job}/{step}/{part:.+}", self._part, allow_head=False)
        if self._copies is not None:
            self._copies.add_to(app)
        self._http_server = BoundedHttpServer(
            app,
            self._rejections,
            max_connections=MAX_CONNECTIONS,
            header_bytes=_HEADER_BYTES,
            admission_timeout_s=self._greeting_s,
            end_connection=close_connection,
            # A TLS handshake that is not complete counts as an unauthenticated connection.
            count_pending=True,
            lingering_time=_LINGER_S,
        )
        limit = self._greeting_s if self._tls is not None else None
        await self._http_server.start(self._host, self.port, ssl=self._tls, ssl_handshake_timeout=limit)
        self.port = self._http_server.port

    async def close(self) -> None:
        """Stop serving; running streams are cut."""
        await self._http_server.close()

    # --- authentication --------------------------------------------------------------------------

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        given = request.headers.get("Authorization", "").encode("utf-8", "surrogateescape")
        if not hmac.compare_digest(given, self._authorization):
            self._rejections.warn(peer=request.remote, path=request.path[:200])
            return web.Response(status=401, headers={"WWW-Authenticate": "Bearer", "Connection": "close"})
        self._http_server.admit(request.protocol)
        return await handler(request)

    # --- requests --------------------------------------------------------------------------------

    def _held(self, request: web.Request) -> tuple[ArenaSnapshot, ...]:
        """Return the snapshots that a request names.

        :raises web.HTTPException: 404, the same for malformed names and for missing snapshots.
        """
        job, step = request.match_info["job"], request.match_info["step"]
        held = self._arenas.find(job, int(step)) if _STEP.fullmatch(step) else ()
        if not held:
            raise web.HTTPNotFound(text="no such snapshot here")
        return held

    async def _manifest(self, request: web.Request) -> web.StreamResponse:
        held = self._held(request)
        async with self._verifying:
            at, verified, corrupt = self._verified
            # A corrupt part may have been repaired since.
            if verified != held or corrupt or time.monotonic() - at > _VERIFIED_S:
                corrupt = await asyncio.to_thread(self._arenas.find_corrupt, held)
                self._verified = time.monotonic(), held, corrupt
        answer = NodeManifest(manifests=tuple(one.manifest for one in held), corrupt=corrupt)
        return web.Response(body=encode_record(answer), content_type="application/octet-stream")

    async def _part(self, request: web.Request) -> web.StreamResponse:
        held, part = self._find_part(request)
        first, end = _range_of(request, part)
        if self._streams.locked():
            raise web.HTTPServiceUnavailable(headers={"Retry-After": "1"})
        async with self._streams:
            memory = self._arenas.view(held, part)[first:end]
            headers = {
                "Content-Type": "application/octet-stream",
                "Content-Length": str(end - first),
                "Content-Range": f"bytes {first}-{end - 1}/{part.size_bytes}",
            }
            if WANT_DIGEST_HEADER in request.headers:
                headers[DIGEST_HEADER] = await asyncio.to_thread(digest_of, memory)
                # The digest is computed; check that these were still the snapshot's bytes.
                if self._find_part(request) != (held, part):
                    raise web.HTTPNotFound(text="the snapshot was released")
            status = 206 if "Range" in request.headers else 200
            response = web.StreamResponse(status=status, headers=headers)
            await self._stream(request, response, memory)
            return response

    async def _link(self, request: web.Request) -> web.StreamResponse:
        """Send zeros, with which another node tests the link to this one."""
        size = request.match_info["size"]
        if not _STEP.fullmatch(size) or not 1 <= int(size) <= LINK_TEST_BYTES:
            raise web.HTTPNotFound(text=f"1 to {LINK_TEST_BYTES} bytes are sent")
        if self._streams.locked():
            raise web.HTTPServiceUnavailable(headers={"Retry-After": "1"})
        async with self._streams:
            response = web.StreamResponse(headers={"Content-Length": size})
            await self._stream(request, response, memoryview(bytes(int(size))))
            return response

    def _find_part(self, request: web.Request) -> tuple[ArenaSnapshot, SnapshotPart]:
        """Return the part that a request names.

        :raises web.HTTPException: 404 if it is missing, 412 if it belongs to another snapshot.
        """
        name, wanted = request.match_info["part"], request.headers.get("If-Match")
        # A copy of another generation may have a part of the same name.
        found = [
            (held, part) for held in self._held(request) for part in held.manifest.parts if part.name == name
        ]
        if not found:
            raise web.HTTPNotFound(text="no such part in this snapshot")
        for held, part in found:
            if wanted in (None, f'"{part.digest}"'):
                return held, part
        raise web.HTTPPreconditionFailed(text="this step has another snapshot now")

    async def _stream(self, request: web.Request, response: web.StreamResponse, memory: memoryview) -> None:
        size = self.rate.chunk_bytes
        await response.prepare(request)
        try:
            for first in range(0, len(memory), size):
                await self.rate.acquire(min(size, len(memory) - first))
                async with asyncio.timeout(self._stall_s):
                    await response.write(memory[first : first + size])
            async with asyncio.timeout(self._stall_s):
                await response.write_eof()
        except TimeoutError:
            log.warning("stalled_reader", peer=request.remote, path=request.path[:200])
            if request.transport is not None:
                request.transport.abort()


def _range_of(request: web.Request, part: SnapshotPart) -> tuple[int, int]:
    """Return the first byte of the range and the byte after the last.

    :raises web.HTTPException: 416: not a single range, or not within the part.
    """
    asked = request.headers.get("Range")
    if asked is None:
        return 0, part.size_bytes
    match = _RANGE.fullmatch(asked)
    first, last = (int(match[1]), int(match[2])) if match else (1, 0)
    if not first <= last < part.size_bytes:
        raise web.HTTPRequestRangeNotSatisfiable(headers={"Content-Range": f"bytes */{part.size_bytes}"})
    return first, last + 1
