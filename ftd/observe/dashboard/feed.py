"""Deltas for all pages: encoded once, and kept in one ring buffer that every page reads at its own pace.

A page is only a position in the ring, so a slow page costs no memory: if the ring has passed its position,
the page is dropped and comes back for the whole document. While no page is open, nothing is encoded.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable

import structlog

from ftd.observe.dashboard.entries import Json
from ftd.transport.wire.public import encode_json

_log = structlog.get_logger("ftd.observe.dashboard")

PERIOD_S = 0.2
"""Shortest time between two deltas."""
MAX_FRAMES = 256
MAX_BYTES = 4 * 1024 * 1024
MAX_DIGITS = 15
"""Number of digits of a position; Python rejects numbers of thousands of digits."""
HEARTBEAT_S = 2.0
"""Interval of heartbeats without deltas; a page that receives nothing for several intervals knows that its
connection is dead.
"""


class PositionExpiredError(Exception):
    """The ring no longer holds the deltas after this position: the page needs the document."""


class DeltaFeed:
    """The ring of deltas. Call ``changed`` when there may be something new, and ``stream_from`` for each page."""

    def __init__(
        self, take: Callable[[], Json | None], run: str, *, quiet_s: Callable[[], float] = lambda: 0.0
    ) -> None:
        """:param run: identifier of this process, so that positions of an earlier one are not valid here.
        :param quiet_s: returns the seconds since the broker's last message; sent to the pages in every
            frame.
        """
        self._take = take
        self._run = run
        self._quiet_s = quiet_s
        self._ring: deque[bytes] = deque()
        self._ring_bytes = 0
        self._position = 0
        """Position of the newest frame."""
        self._new_frame = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._sent_at = -PERIOD_S
        self._closed = False
        self.pages = 0

    @property
    def position(self) -> str:
        """Position of the newest frame in the form that pages send."""
        return f"{self._run}-{self._position}"

    def quiet_s(self) -> float:
        """Return the seconds since the broker's last message, to a tenth of a second."""
        return round(self._quiet_s(), 1)

    def changed(self) -> None:
        """Send a delta now, or ``PERIOD_S`` after the previous one; without pages, do nothing."""
        if self.pages == 0 or self._timer is not None or self._closed:
            return
        loop = asyncio.get_running_loop()
        wait_s = self._sent_at + PERIOD_S - loop.time()
        self._timer = loop.call_later(max(0.0, wait_s), self._send)

    def flush(self) -> str:
        """Put all changes into the ring and return the position after them, which belongs to a new document."""
        self._send()
        return self.position

    def close(self) -> None:
        """End the streams of all pages."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        self._wake()

    async def stream_from(self, position: str) -> AsyncIterator[bytes]:
        """Yield the frames after ``position``, and heartbeats in between, until the feed is closed.

        :raises PositionExpiredError: at the start, or later for a page that is too slow.
        """
        at = self._parse(position)
        self.pages += 1
        try:
            self.changed()
            while not self._closed:
                if at < self._position:
                    if at < self._oldest:
                        raise PositionExpiredError
                    frames = list(self._ring)[at - self._position :]
                    at = self._position
                    yield b"".join(frames)
                    continue
                new_frame = self._new_frame
                try:
                    await asyncio.wait_for(new_frame.wait(), HEARTBEAT_S)
                except TimeoutError:
                    yield b"event: heartbeat\ndata: %s\n\n" % encode_json({"quiet_s": self.quiet_s()})
        finally:
            self.pages -= 1

    def _parse(self, position: str) -> int:
        run, _, number = position.rpartition("-")
        if run != self._run or not number.isdecimal() or len(number) > MAX_DIGITS:
            raise PositionExpiredError
        if not self._oldest <= int(number) <= self._position:
            raise PositionExpiredError
        return int(number)

    @property
    def _oldest(self) -> int:
        return self._position - len(self._ring)

    def _send(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._sent_at = asyncio.get_running_loop().time()
        try:
            delta = self._take()
            if delta is None:
                return
            self._position += 1
            if self.pages == 0:
                self._ring.clear()  # No page is there to miss it.
                self._ring_bytes = 0
                return
            data = encode_json({**delta, "quiet_s": self.quiet_s()})
            frame = b"id: %s\ndata: %s\n\n" % (self.position.encode(), data)
        except Exception:
            _log.exception("delta_failed")
            return
        self._ring.append(frame)
        self._ring_bytes += len(frame)
        while len(self._ring) > MAX_FRAMES or (self._ring_bytes > MAX_BYTES and len(self._ring) > 1):
            self._ring_bytes -= len(self._ring.popleft())
        self._wake()

    def _wake(self) -> None:
        new_frame, self._new_frame = self._new_frame, asyncio.Event()
        new_frame.set()
