"""A connection to a snapshot server that receives bytes straight into their final memory.

It speaks HTTP/1.1, with or without TLS, one request after the other. aiohttp's client copies received bytes
into a buffer of its own, then into a bytes object, then into place; here the operating system or TLS writes
them into place. The server is not trusted: the head of an answer is bounded and checked before a byte of
its body is accepted, nothing is written beyond the end of the memory, and stalls are bounded.
"""

import asyncio
import re
import ssl
from collections.abc import Mapping
from typing import Self, cast

from yarl import URL

from ftd.errors import PeerError
from ftd.snapshots.shards.protocol import DIGEST_HEADER, StallDetector
from ftd.snapshots.shards.sources import PartLocation, check_status
from storage.manifest import BLOCK_BYTES

MAX_HEAD_BYTES = 8192
_STATUS = re.compile(r"HTTP/1\.[01] (\d{3})(?: .*)?", re.ASCII)
_DIGEST = re.compile(r"[0-9a-f]{32}", re.ASCII)
_NAME = re.compile(r"[!#-'*+.^_`|~0-9A-Za-z-]+", re.ASCII)
_MOST_AT_ONCE_BYTES = 1024 * 1024
"""Largest number of bytes received at once, during which the event loop does nothing else."""


class BlockTransfer:
    """A requested block, and how much of it has arrived."""

    def __init__(self, place: PartLocation, first: int, into: memoryview) -> None:
        self.location, self.first, self.into = place, first, into
        self.received = 0
        self.progress = asyncio.Event()
        """Event that is set when more bytes can be verified than before."""
        self.hashed = False
        self.digest = ""
        """Digest of these bytes as the server computed it, if one was requested."""

    def check_head(self, status: int, headers: Mapping[str, str]) -> None:
        """Check the head of an answer.

        :param headers: values by name in lower case.
        :raises PeerError, SourceBusy: the answer is not acceptable.
        """
        source, part = self.location.source, self.location.part
        check_status(source, status, 206)
        first, last = self.first + self.received, self.first + len(self.into) - 1
        lengths = headers.get("content-length"), headers.get("content-range")
        if lengths != (str(last + 1 - first), f"bytes {first}-{last}/{part.size_bytes}"):
            raise PeerError(
                f"{source} answered bytes {first}-{last} with {lengths[1]} of length {lengths[0]}"
            )
        digest = headers.get(DIGEST_HEADER.lower(), "")
        if self.hashed and not _DIGEST.fullmatch(digest):
            raise PeerError(f"{source} sent no digest with the bytes")
        if not self.received:
            self.digest = digest

    def buffer(self) -> memoryview:
        """Return the memory for the next bytes; empty when all have arrived."""
        return self.into[self.received :]

    def advance(self, size_bytes: int) -> None:
        """Note that this number of bytes was written there."""
        before, self.received = self.received, self.received + size_bytes
        if before // BLOCK_BYTES < self.received // BLOCK_BYTES or self.received == len(self.into):
            self.progress.set()


async def verify(block: BlockTransfer) -> None:
    """Verify the manifest's blocks within ``block`` as they arrive, while they are in the cache.

    :raises PeerError: a block differs from what was written.
    """
    part, done = block.location.part, 0

    def sound(numbers: range) -> bool:
        runs = ((n, *part.block(n)) for n in numbers)
        return all(
            part.is_block_intact(n, block.into[low - block.first : high - block.first])
            for n, low, high in runs
        )

    while done < len(block.into):
        await block.progress.wait()
        block.progress.clear()
        end = block.received
        if end < len(block.into):
            end -= end % BLOCK_BYTES
        if end > done and not await asyncio.to_thread(
            sound, part.blocks_covering(block.first + done, block.first + end)
        ):
            raise corrupt_answer_error(block.location)
        done = end


def corrupt_answer_error(place: PartLocation) -> PeerError:
    return PeerError(f"{place.source} sent bytes that differ from what was written as {place.part.name}")


class ShardConnection(asyncio.BufferedProtocol):
    """A connection: ``await ShardConnection.connect(url)``, then ``get`` any number of times while ``alive``,
    then ``close``.

    :param stall_s: a connection without data, or with hardly any, for this long has stalled.
    """

    def __init__(self, stall_s: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._stall_s = stall_s
        self._head = bytearray(MAX_HEAD_BYTES)
        self._filled = 0
        self._transport: asyncio.Transport | None = None
        self._block: BlockTransfer | None = None
        self._done: asyncio.Future[None] | None = None
        self._body = False
        """Whether the head has arrived and was accepted, and bytes of the body are missing."""
        self._last = False
        """Whether the server closes the connection after this answer."""

    @classmethod
    async def connect(cls, url: URL, *, stall_s: float, tls: ssl.SSLContext | None) -> Self:
        """Open a connection.

        :raises OSError: the server cannot be reached, or TLS fails.
        """
        assert url.host is not None and url.port is not None
        limit = stall_s if tls is not None else None
        async with asyncio.timeout(stall_s):
            _, connection = await asyncio.get_running_loop().create_connection(
                lambda: cls(stall_s), url.host, url.port, ssl=tls, ssl_handshake_timeout=limit
            )
        return connection

    @property
    def alive(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    def close(self) -> None:
        """Close at once; nothing is written into anybody's memory from now on."""
        self._block = None
        if self._transport is not None:
            self._transport.abort()
            self._transport = None

    async def get(self, url: URL, headers: Mapping[str, str], block: BlockTransfer) -> None:
        """Fill the memory of ``block`` with the answer. On any error the connection is closed.

        What the block's check of the head raises is raised as well.

        :raises OSError: the connection broke, or it stalled.
        :raises ValueError: the answer is malformed.
        """
        if self._transport is None:
            raise ConnectionResetError("it was closed")
        lines = [f"GET {url.raw_path} HTTP/1.1", f"Host: {url.host_port_subcomponent}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        if not all(line.isprintable() for line in lines):
            self.close()
            raise ValueError("its earlier answer cannot be requested in one line")
        done = self._loop.create_future()
        self._block, self._done = block, done
        self._last = False
        self._heard_at = self._loop.time()
        self._watching = self._loop.call_later(self._stall_s, self._watch)
        self._transport.write("\r\n".join([*lines, "", ""]).encode("latin-1"))
        try:
            await done
        except BaseException:
            self.close()
            raise
        finally:
            self._block, self._done = None, None
            self._watching.cancel()
        if self._last:
            self.close()

    # --- callbacks of the event loop -------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(
            asyncio.Transport, transport
        )  # uvloop's transport is not an instance of that class.

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._fail(exc if isinstance(exc, OSError) else ConnectionResetError("it ended early"))

    def get_buffer(self, sizehint: int) -> memoryview:
        # uvloop calls this once more after an answer's last byte.
        if self._body and self._block is not None:
            return self._block.buffer()[:_MOST_AT_ONCE_BYTES]
        return memoryview(self._head)[self._filled :]

    def buffer_updated(self, nbytes: int) -> None:
        block = self._block
        if block is None or self._done is None or self._done.done():
            self.close()  # Unsolicited data.
            return
        try:
            if self._body:
                block.advance(nbytes)
                self._meter.record(nbytes)
            else:
                self._filled += nbytes
                self._read_head(block)
            self._heard_at = self._loop.time()
        except Exception as error:
            self._fail(error)
            return
        if self._body and not len(block.buffer()):
            self._block, self._body, self._filled = None, False, 0
            self._done.set_result(None)

    # --- one answer ------------------------------------------------------------------------------

    def _read_head(self, block: BlockTransfer) -> None:
        """Read the head as far as it has arrived, and the bytes of the body that follow it."""
        end = self._head.find(b"\r\n\r\n", 0, self._filled)
        if end < 0:
            if self._filled == MAX_HEAD_BYTES or not b"HTTP/1.".startswith(self._head[:7][: self._filled]):
                raise ValueError("it does not begin like an HTTP/1.1 answer")
            return
        status, headers = _parsed(self._head[:end].decode("latin-1"))
        self._last = headers.get("connection", "").lower() == "close"
        block.check_head(status, headers)
        beyond = memoryview(self._head)[end + 4 : self._filled]
        while beyond:
            place = block.buffer()[: len(beyond)]
            if not place:
                raise ValueError("more bytes arrived than were requested")
            place[:] = beyond[: len(place)]
            block.advance(len(place))
            beyond = beyond[len(place) :]
        self._body, self._meter = True, StallDetector(self._stall_s)

    def _watch(self) -> None:
        left_s = self._heard_at + self._stall_s - self._loop.time()
        if left_s <= 0:
            self._fail(TimeoutError(f"nothing arrived for {self._stall_s:g} s"))
        else:
            self._watching = self._loop.call_later(left_s, self._watch)

    def _fail(self, error: Exception) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(error)
            self.close()


def _parsed(head: str) -> tuple[int, dict[str, str]]:
    """Return status and headers.

    :raises ValueError: it is not the head of an answer.
    """
    first, *lines = head.split("\r\n")
    match = _STATUS.fullmatch(first)
    if match is None:
        raise ValueError("it does not begin like an HTTP/1.1 answer")
    headers: dict[str, str] = {}
    for line in lines:
        name, colon, value = line.partition(":")
        if not colon or not _NAME.fullmatch(name) or name.lower() in headers:
            raise ValueError(f"a malformed or repeated header: {line[:80]!r}")
        headers[name.lower()] = value.strip(" \t")
    return int(match[1]), headers
