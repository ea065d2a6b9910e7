"""A connection to a snapshot server that receives bytes straight into the memory they are wanted in.

HTTP/1.1, with TLS or without it, one request after the other. What aiohttp's client receives lies in a
buffer of its own, then in a bytes object, then where it is wanted; here the system, or TLS, writes it there.
Nobody is believed: an answer's head is bounded, what it says is checked before a byte of its body is taken,
no byte goes behind the memory's end, and stalls are bounded.
"""

import asyncio
import re
import ssl
from collections.abc import Mapping
from typing import Protocol, Self, cast

from yarl import URL

from ftd.snapshots.shards.protocol import StallDetector

MOST_HEAD_BYTES = 8192
_STATUS = re.compile(r"HTTP/1\.[01] (\d{3})(?: .*)?", re.ASCII)
_NAME = re.compile(r"[!#-'*+.^_`|~0-9A-Za-z-]+", re.ASCII)
_MOST_AT_ONCE_BYTES = 1024 * 1024
"""The event loop does nothing else meanwhile."""


class ResponseSink(Protocol):
    """What is asked for, and where it goes."""

    def answered(self, status: int, headers: Mapping[str, str]) -> None:
        """:param headers: named in small letters. :raises Exception: it is not to be received."""

    def rest(self) -> memoryview:
        """Where the next bytes go; empty: all are there."""

    def took(self, size_bytes: int) -> None:
        """So many went there."""


class ShardConnection(asyncio.BufferedProtocol):
    """``await Connection.to(url)``, then ``await get(…)`` any number of times while ``alive``; ``close()``.

    :param stall_s: no news for so long is a stall, and next to nothing is one, too.
    """

    def __init__(self, stall_s: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._stall_s = stall_s
        self._head = bytearray(MOST_HEAD_BYTES)
        self._filled = 0
        self._transport: asyncio.Transport | None = None
        self._sink: ResponseSink | None = None
        self._done: asyncio.Future[None] | None = None
        self._body = False
        """The head has come, is as it should be, and bytes are missing."""
        self._last = False
        """The other side closes behind this answer."""

    @classmethod
    async def to(cls, url: URL, *, stall_s: float, tls: ssl.SSLContext | None) -> Self:
        """:raises OSError: it cannot be reached, or TLS says no."""
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
        """At once; nothing is written into anybody's memory from now on."""
        self._sink = None
        if self._transport is not None:
            self._transport.abort()
            self._transport = None

    async def get(self, url: URL, headers: Mapping[str, str], sink: ResponseSink) -> None:
        """Fill what ``sink`` has room for with the answer. Whatever goes wrong, the connection is closed.

        :raises OSError: the connection broke, or it stalled.
        :raises ValueError: what came is no answer. Whatever ``sink.answered`` raises is raised, too.
        """
        if self._transport is None:
            raise ConnectionResetError("it was closed")
        lines = [f"GET {url.raw_path} HTTP/1.1", f"Host: {url.host_port_subcomponent}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        if not all(line.isprintable() for line in lines):
            self.close()
            raise ValueError("what it sent before cannot be asked for in one line")
        done = self._loop.create_future()
        self._sink, self._done = sink, done
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
            self._sink, self._done = None, None
            self._watching.cancel()
        if self._last:
            self.close()

    # --- what the event loop calls ---------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by its class.

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._fail(exc if isinstance(exc, OSError) else ConnectionResetError("it ended early"))

    def get_buffer(self, sizehint: int) -> memoryview:
        # uvloop asks for it once more behind an answer's last byte.
        if self._body and self._sink is not None:
            return self._sink.rest()[:_MOST_AT_ONCE_BYTES]
        return memoryview(self._head)[self._filled :]

    def buffer_updated(self, nbytes: int) -> None:
        sink = self._sink
        if sink is None or self._done is None or self._done.done():
            self.close()  # Nobody asked for it.
            return
        try:
            if self._body:
                sink.took(nbytes)
                self._meter.note(nbytes)
            else:
                self._filled += nbytes
                self._read_head(sink)
            self._heard_at = self._loop.time()
        except Exception as error:
            self._fail(error)
            return
        if self._body and not len(sink.rest()):
            self._sink, self._body, self._filled = None, False, 0
            self._done.set_result(None)

    # --- one answer ------------------------------------------------------------------------------

    def _read_head(self, sink: ResponseSink) -> None:
        """As far as it is here, and what there is of the body behind it."""
        end = self._head.find(b"\r\n\r\n", 0, self._filled)
        if end < 0:
            if self._filled == MOST_HEAD_BYTES or not b"HTTP/1.".startswith(self._head[:7][: self._filled]):
                raise ValueError("it does not begin as an answer of HTTP/1.1 does")
            return
        status, headers = _parsed(self._head[:end].decode("latin-1"))
        self._last = headers.get("connection", "").lower() == "close"
        sink.answered(status, headers)
        beyond = memoryview(self._head)[end + 4 : self._filled]
        while beyond:
            place = sink.rest()[: len(beyond)]
            if not place:
                raise ValueError("more came than was asked for")
            place[:] = beyond[: len(place)]
            sink.took(len(place))
            beyond = beyond[len(place) :]
        self._body, self._meter = True, StallDetector(self._stall_s)

    def _watch(self) -> None:
        left_s = self._heard_at + self._stall_s - self._loop.time()
        if left_s <= 0:
            self._fail(TimeoutError(f"nothing came for {self._stall_s:g} s"))
        else:
            self._watching = self._loop.call_later(left_s, self._watch)

    def _fail(self, error: Exception) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(error)
            self.close()


def _parsed(head: str) -> tuple[int, dict[str, str]]:
    """:raises ValueError: it is no head of an answer."""
    first, *lines = head.split("\r\n")
    match = _STATUS.fullmatch(first)
    if match is None:
        raise ValueError("it does not begin as an answer of HTTP/1.1 does")
    headers: dict[str, str] = {}
    for line in lines:
        name, colon, value = line.partition(":")
        if not colon or not _NAME.fullmatch(name) or name.lower() in headers:
            raise ValueError(f"a header that is none, or comes twice: {line[:80]!r}")
        headers[name.lower()] = value.strip(" \t")
    return int(match[1]), headers
