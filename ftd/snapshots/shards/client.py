"""The client that reads other nodes' snapshots: ranges of parts, received straight into their final memory.

It reads several ranges at a time from several nodes, and resumes a broken stream at the byte where it
stopped. It trusts no node: it checks lengths, ranges and digests, and bounds stalls. A node that breaks the
contract causes a ``PeerError`` that names it.
"""

import asyncio
import ssl
import time
from collections.abc import Awaitable, Callable, Iterable
from types import TracebackType
from typing import Self, TypeVar
from urllib.parse import quote

import aiohttp
import structlog
from yarl import URL

from ftd.errors import PeerError
from ftd.snapshots.shards.connection import BlockTransfer, ShardConnection, corrupt_answer_error, verify
from ftd.snapshots.shards.protocol import WANT_DIGEST_HEADER, NodeManifest, StallDetector
from ftd.snapshots.shards.sources import PartLocation, RangeRequest, SnapshotSource, SourceBusy, check_status
from ftd.tasks import run_all
from ftd.transport.tls import TlsFields, describe_tls_error
from storage.errors import CorruptDataError
from storage.manifest import BLOCK_BYTES as VERIFIED_BYTES
from storage.manifest import MAX_BYTES, check_parts, decode_record, digest_of

log = structlog.get_logger("ftd.node")

BLOCK_BYTES = 64 * 1024 * 1024
"""Size of one request."""
MAX_STREAMS = 8
"""Number of streams at once, each from another node."""
STALL_S = 10.0
_ATTEMPTS = 6
"""Number of times that the connection for one block may break or fail."""
_PAUSE_S = 0.1
_BUSY_S = 60.0
"""Time after which a request to a busy node fails."""
_TLS_FIELDS = TlsFields(
    name="the host of [node] on that node", ca="node.snapshot_tls_ca", certificate="that node's certificate"
)
_MOST_ANSWER_BYTES = 4 * 1024 * 1024

T = TypeVar("T")


class ShardClient:
    """The client; use it as ``async with ShardClient(token) as client``.

    :param stall_s: a connection without data for this long has stalled.
    :param tls: context to verify servers with; ``None`` for plain HTTP.
    """

    def __init__(
        self,
        token: str,
        *,
        stall_s: float = STALL_S,
        block_bytes: int = BLOCK_BYTES,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._headers = {"Authorization": f"Bearer {token}", "Accept-Encoding": "identity"}
        self._tls = tls
        self._stall_s = stall_s
        self._block_bytes = block_bytes
        self._streams = asyncio.Semaphore(MAX_STREAMS)
        self._address_locks: dict[str, asyncio.Lock] = {}
        self._connections: dict[str, ShardConnection] = {}
        """Idle connections by address."""

    async def __aenter__(self) -> Self:
        self.session = aiohttp.ClientSession(
            headers=self._headers,
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=self._stall_s, sock_read=self._stall_s),
            connector=aiohttp.TCPConnector(limit=0, ssl=self._tls or True),
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
            max_line_size=4096,
            max_field_size=4096,
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for connection in self._connections.values():
            connection.close()
        await self.session.close()

    def url(self, source: SnapshotSource, path: str) -> URL:
        """Return the URL of a path on the source.

        :raises ValueError: see ``SnapshotSource.url``.
        """
        return source.url(path, secure=self._tls is not None)

    async def manifest(self, source: SnapshotSource, job_id: str, step: int) -> NodeManifest:
        """Return what ``source`` holds of a snapshot, verified just now: perhaps nothing.

        :raises PeerError: the source cannot be reached, or its answer is malformed.
        """
        body = await self.retry(source, lambda: self._read_manifest(source, _path(job_id, step)))
        if body is None:
            return NodeManifest(manifests=())
        try:
            found = decode_record(body, NodeManifest, str(source))
            for manifest in found.manifests:
                check_parts(manifest, 1 << 62)
        except CorruptDataError as error:
            raise PeerError(f"{source} sent a manifest that cannot be used: {error}") from None
        if any((m.job_id, m.step) != (job_id, step) for m in found.manifests):
            raise PeerError(f"{source} sent another snapshot's manifest")
        return found

    async def fetch(self, wanted: Iterable[RangeRequest]) -> None:
        """Fetch all ranges, or raise an error. After an error the contents of the memory are undefined.

        :raises PeerError: a location does not provide its range; the error names it.
        """
        await run_all([self._fetch_one(one) for one in wanted])

    async def _fetch_one(self, wanted: RangeRequest) -> None:
        try:
            await self._fetch_verified(wanted)
        except PeerError as error:
            log.warning("fetch_failed", part=wanted.location.part.name, reason=str(error))
            raise

    async def _fetch_verified(self, wanted: RangeRequest) -> None:
        location, part, size = wanted.location, wanted.location.part, len(wanted.into)
        if wanted.first < 0 or wanted.first + size > part.size_bytes:
            raise PeerError(f"{location.source} has {part.size_bytes} bytes of {part.name}")
        if part.in_blocks:
            await self._fetch_range(wanted)
        elif size == part.size_bytes:
            await run_all(self._fetch_block(block) for block in self._blocks(location, 0, wanted.into))
            if not await asyncio.to_thread(part.is_intact, wanted.into):
                raise corrupt_answer_error(location)
        else:
            blocks = self._blocks(location, wanted.first, wanted.into)
            await run_all(self._fetch_hashed(block) for block in blocks)

    def _blocks(self, location: PartLocation, first: int, into: memoryview) -> list[BlockTransfer]:
        step = self._block_bytes
        if location.part.in_blocks:  # Whole blocks, since each request is verified by itself.
            step = max(step // VERIFIED_BYTES, 1) * VERIFIED_BYTES
        return [
            BlockTransfer(location, first + done, into[done : done + step])
            for done in range(0, len(into), step)
        ]

    async def _fetch_range(self, wanted: RangeRequest) -> None:
        """Fetch the blocks that cover the range: inner ones straight into place, those at the edges into
        memory of their own. Each is verified while later ones arrive.
        """
        location, first, end = wanted.location, wanted.first, wanted.first + len(wanted.into)
        part = location.part
        numbers = part.blocks_covering(first, end)
        edges = [n for n in numbers if part.block(n)[0] < first or part.block(n)[1] > end]
        edge_blocks = {n: memoryview(bytearray(part.block(n)[1] - part.block(n)[0])) for n in edges}
        requests = [BlockTransfer(location, part.block(n)[0], memory) for n, memory in edge_blocks.items()]
        if inner := [n for n in numbers if n not in edge_blocks]:
            low, high = part.block(inner[0])[0], part.block(inner[-1])[1]
            requests += self._blocks(location, low, wanted.into[low - first : high - first])
        await run_all(one for request in requests for one in (self._fetch_block(request), verify(request)))
        for n, memory in edge_blocks.items():
            start, stop = part.block(n)
            low, high = max(first, start), min(end, stop)
            wanted.into[low - first : high - first] = memory[low - start : high - start]

    async def _fetch_hashed(self, block: BlockTransfer) -> None:
        """Fetch a block of a part that has no digests of its blocks."""
        block.hashed = True
        await self._fetch_block(block)
        if await asyncio.to_thread(digest_of, block.into) != block.digest:
            raise PeerError(
                f"{block.location.source} sent bytes of {block.location.part.name} that do not match its digest"
            )

    async def _fetch_block(self, block: BlockTransfer) -> None:
        # One request at a time to each node: concurrent ones would only share its bandwidth.
        lock = self._address_locks.setdefault(block.location.source.address, asyncio.Lock())
        async with lock, self._streams:
            await self.retry(block.location.source, lambda: self._receive(block))

    async def request(self, method: str, address: str, path: str, body: bytes, timeout_s: float) -> bytes:
        """Send a short request once and return the answer.

        :raises PeerError: there is no answer, or the request was rejected; the error says why.
        """
        source = SnapshotSource(node=address, address=address)
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        try:
            async with self.session.request(
                method, self.url(source, path), data=body, timeout=timeout, allow_redirects=False
            ) as response:
                answer = bytearray()
                async for chunk in response.content.iter_any():
                    answer += chunk
                    if len(answer) > _MOST_ANSWER_BYTES:
                        raise PeerError(f"{source} sent more than {_MOST_ANSWER_BYTES} bytes")
                if response.status == 409:
                    raise PeerError(answer.decode(errors="replace")[:500])
                check_status(source, response.status, 200)
                return bytes(answer)
        except SourceBusy:
            raise PeerError(f"{source} is busy") from None
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise PeerError(f"{source}: {describe_error(error)}") from None

    # --- one request -----------------------------------------------------------------------------

    async def retry(self, source: SnapshotSource, attempt: Callable[[], Awaitable[T]]) -> T:
        """Repeat an attempt while the connection is at fault. An error of the node itself is final.

        :raises PeerError: the node is at fault, or the connection broke too often.
        """
        busy_until = time.monotonic() + _BUSY_S
        broken = 0
        while True:
            try:
                return await attempt()
            except SourceBusy:
                if time.monotonic() > busy_until:
                    raise PeerError(f"{source} was busy for {_BUSY_S:g} s") from None
            except (aiohttp.ClientSSLError, ssl.SSLCertVerificationError) as error:
                inner = getattr(error, "certificate_error", getattr(error, "os_error", error))
                raise PeerError(f"{source}: {describe_tls_error(inner, _TLS_FIELDS)}") from None
            except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, OSError) as error:
                broken += 1  # TimeoutError is an OSError.
                if broken == _ATTEMPTS:
                    raise PeerError(f"{source}: {describe_error(error)}, {broken} times") from None
            except (aiohttp.ClientError, ValueError) as error:
                raise PeerError(f"{source} sent a malformed answer: {describe_error(error)}") from None
            await asyncio.sleep(_PAUSE_S * max(1, broken))

    async def _read_manifest(self, source: SnapshotSource, path: str) -> bytes | None:
        async with self.session.get(self.url(source, path), allow_redirects=False) as response:
            if response.status == 404:
                return None
            check_status(source, response.status, 200)
            body = bytearray()
            meter = StallDetector(self._stall_s)
            async for chunk in response.content.iter_any():
                body += chunk
                meter.record(len(chunk))
                if len(body) > MAX_BYTES:
                    raise PeerError(f"{source} sent a manifest of more than {MAX_BYTES} bytes")
            return bytes(body)

    async def _receive(self, block: BlockTransfer) -> None:
        """Request and receive what is missing of a block. Call it again after the connection broke."""
        source, part = block.location.source, block.location.part
        first, last = block.first + block.received, block.first + len(block.into) - 1
        if first > last:
            return
        headers = self._headers | {"Range": f"bytes={first}-{last}", "If-Match": f'"{part.digest}"'}
        if block.hashed:
            headers[WANT_DIGEST_HEADER] = "xxh3"
        url = self.url(source, f"{_path(block.location.job_id, block.location.step)}/{quote(part.name)}")
        connection = self._connections.pop(source.address, None)
        if connection is None or not connection.alive:
            connection = await ShardConnection.connect(url, stall_s=self._stall_s, tls=self._tls)
        await connection.get(url, headers, block)
        if connection.alive:
            self._connections[source.address] = connection


def _path(job_id: str, step: int) -> str:
    return f"/v1/{quote(job_id, safe='')}/{step}"


def describe_error(error: BaseException) -> str:
    return str(error).strip() or type(error).__name__
