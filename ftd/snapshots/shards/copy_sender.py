"""Sending this node's snapshot to its replica peer: straight from the arena, at a bounded rate.

After a broken connection the manifest is offered again, and the transfer resumes where it stopped. A peer
that rejects the copy, breaks the contract or stalls causes a ``PeerError`` that names it.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from urllib.parse import quote

import aiohttp
import structlog

from ftd.errors import PeerError
from ftd.snapshots.shards.arenas import ArenaSnapshot, NodeArenas
from ftd.snapshots.shards.client import STALL_S, ShardClient
from ftd.snapshots.shards.protocol import AsyncRateLimiter, CopyProgress
from ftd.snapshots.shards.sources import SnapshotSource, check_status
from storage.errors import CorruptDataError
from storage.manifest import SnapshotPart, decode_record, encode_record

log = structlog.get_logger("ftd.node")

_MOST_ANSWER_BYTES = 1024 * 1024
_MOST_REASON_BYTES = 500
_TRIES = 2
"""Number of attempts: bytes that arrive corrupt are sent once more."""


class CopySender:
    """The sender of the snapshots of ``owner``, which is this node.

    :param rate: rate limit that other senders of this node share.
    """

    def __init__(
        self,
        client: ShardClient,
        arenas: NodeArenas,
        *,
        owner: str,
        rate: AsyncRateLimiter,
        stall_s: float = STALL_S,
    ) -> None:
        self._client, self._arenas = client, arenas
        self._owner, self._rate, self._stall_s = owner, rate, stall_s

    async def send(self, held: Sequence[ArenaSnapshot], to: SnapshotSource) -> int:
        """Send all devices' manifests and parts, and return their bytes once ``to`` has committed them.

        :raises PeerError: the peer does not hold them; the error says why.
        :raises OSError: they cannot be read here.
        """
        for one in held:
            await self._send(one, to)
        return sum(one.manifest.size_bytes for one in held)

    async def _send(self, held: ArenaSnapshot, to: SnapshotSource) -> None:
        # An error of this node's own memory must not look like a broken connection, which is repeated.
        memory = {part.name: self._arenas.view(held, part) for part in held.manifest.parts}
        problem = ""
        for _ in range(_TRIES):
            problem = await self._client.retry(to, lambda: self._attempt(held, memory, to))
            if not problem:
                return
            log.warning("send_copy_failed", to=to.node, step=held.manifest.step, reason=problem)
        raise PeerError(f"{to} received bytes that differ from what was sent: {problem}")

    async def _attempt(
        self, held: ArenaSnapshot, memory: Mapping[str, memoryview], to: SnapshotSource
    ) -> str:
        """Offer, send what is missing, and commit; return what arrived corrupt, in words."""
        manifest, session = held.manifest, self._client.session
        path = (
            f"/v1/{quote(manifest.job_id, safe='')}/{manifest.step}/copies/{quote(self._owner)}/{held.device}"
        )
        async with session.put(
            self._client.url(to, path), data=encode_record(manifest), allow_redirects=False
        ) as response:
            received = await self._received(to, response)
        for part in manifest.parts:
            first = received.get(part.name)
            if first is None or not 0 <= first <= part.size_bytes:
                raise PeerError(f"{to} claims to have {first} bytes of {part.name}")
            if first < part.size_bytes:
                await self._send_part(
                    memory[part.name][first:], part, first, to, f"{path}/{quote(part.name)}"
                )
        async with session.post(self._client.url(to, path), allow_redirects=False) as response:
            if response.status == 422:
                return await _reason(response)
            await _check(to, response, 204)
        return ""

    async def _send_part(
        self, memory: memoryview, part: SnapshotPart, first: int, to: SnapshotSource, path: str
    ) -> None:
        headers = {
            "Content-Length": str(len(memory)),
            "Content-Range": f"bytes {first}-{part.size_bytes - 1}/{part.size_bytes}",
            "Content-Type": "application/octet-stream",
        }
        async with asyncio.timeout(self._stall_s) as limit:
            body = self._flow(memory, limit)
            async with self._client.session.put(
                self._client.url(to, path), data=body, headers=headers, allow_redirects=False
            ) as response:
                await self._received(to, response)

    async def _flow(self, memory: memoryview, limit: asyncio.Timeout) -> AsyncIterator[memoryview]:
        """Yield the bytes at the allowed rate.

        :param limit: timeout that is extended whenever a chunk was sent.
        """
        loop, size = asyncio.get_running_loop(), self._rate.chunk_bytes
        for first in range(0, len(memory), size):
            limit.reschedule(None)
            await self._rate.acquire(min(size, len(memory) - first))
            limit.reschedule(loop.time() + self._stall_s)
            yield memory[first : first + size]
        limit.reschedule(loop.time() + self._stall_s)

    async def _received(self, to: SnapshotSource, response: aiohttp.ClientResponse) -> dict[str, int]:
        await _check(to, response, 200)
        try:
            return decode_record(await _body(response, _MOST_ANSWER_BYTES), CopyProgress, str(to)).received
        except CorruptDataError as error:
            raise PeerError(f"{to} sent a malformed answer: {error}") from None


async def _check(to: SnapshotSource, response: aiohttp.ClientResponse, wanted: int) -> None:
    """:raises PeerError: the peer rejects the copy; the message has the peer's reason."""
    if response.status == 408:
        raise aiohttp.ClientPayloadError("the bytes did not arrive in time")
    if response.status in (404, 405):
        raise PeerError(f"{to} holds no copies")
    if response.status in (409, 507):
        raise PeerError(f"{to} rejects the copy: {await _reason(response)}")
    check_status(to, response.status, wanted)


async def _reason(response: aiohttp.ClientResponse) -> str:
    text = await _body(response, _MOST_REASON_BYTES)
    return "".join(c if c.isprintable() else "?" for c in text.decode("utf-8", "replace"))


async def _body(response: aiohttp.ClientResponse, most_bytes: int) -> bytes:
    """Return the body, cut off after ``most_bytes``."""
    body = bytearray()
    while len(body) < most_bytes and (chunk := await response.content.readany()):
        body += chunk
    return bytes(body[:most_bytes])
