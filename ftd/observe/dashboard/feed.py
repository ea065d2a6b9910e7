"""Deltas for all pages at once: encoded once, kept in one ring that every page reads at its own pace.

A page is a position in the ring and nothing else, so a slow one costs no memory: when the ring has gone past
it, it is dropped, and comes back for the whole document. Without a page nothing is encoded at all.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable

import structlog

from ftd.observe.dashboard.model import Json
from ftd.transport.wire.public import encode_json

_log = structlog.get_logger("ftd.observe.dashboard")

PERIOD_S = 0.2
"""Between two deltas."""
MOST_FRAMES = 256
MOST_BYTES = 4 * 1024 * 1024
BEAT_S = 2.0
"""A page that hears nothing for a few of these knows that the connection is dead."""


class PositionExpiredError(Exception):
    """What comes behind this position is not in the ring: the page needs the document."""


class DeltaFeed:
    """``changed()`` whenever there may be something new; ``set_job`` for each page."""

    def __init__(
        self,
        take: Callable[[], Json | None],
        run: str,
        *,
        quiet_s: Callable[[], float] = lambda: 0.0,
        period_s: float = PERIOD_S,
    ) -> None:
        """:param run: of this process alone, so that positions of an earlier one are not taken for ours.
        :param quiet_s: for so long the broker has brought nothing; pages are told with every frame."""
        self._take = take
        self._run = run
        self._quiet_s = quiet_s
        self._period_s = period_s
        self._ring: deque[bytes] = deque()
        self._ring_bytes = 0
        self._position = 0
        """Of the newest frame."""
        self._news = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._sent_at = -period_s
        self._closed = False
        self.pages = 0

    @property
    def position(self) -> str:
        """Of the newest frame, as a page names it."""
        return f"{self._run}-{self._position}"

    def quiet_s(self) -> float:
        """For so long the broker has brought nothing, to the tenth of a second."""
        return round(self._quiet_s(), 1)

    def changed(self) -> None:
        """Send what is new: now, or ``PERIOD_S`` after the last time. Nothing without pages."""
        if self.pages == 0 or self._timer is not None or self._closed:
            return
        loop = asyncio.get_running_loop()
        wait_s = self._sent_at + self._period_s - loop.time()
        self._timer = loop.call_later(max(0.0, wait_s), self._send)

    def catch_up(self) -> str:
        """Everything new is behind the position that is returned: what a document is of."""
        self._send()
        return self.position

    def close(self) -> None:
        """All pages are let go."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        self._wake()

    async def stream_from(self, position: str) -> AsyncIterator[bytes]:
        """Frames behind ``position``, and a beat where there are none; ends when the feed is closed.

        :raises Gone: at the beginning or, for a page that is too slow, later.
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
                news = self._news
                try:
                    await asyncio.wait_for(news.wait(), BEAT_S)
                except TimeoutError:
                    yield b"event: beat\ndata: %s\n\n" % encode_json({"quiet_s": self.quiet_s()})
        finally:
            self.pages -= 1

    def _parse(self, position: str) -> int:
        run, _, number = position.rpartition("-")
        if run != self._run or not number.isdecimal() or not self._oldest <= int(number) <= self._position:
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
                self._ring.clear()  # Nobody is there to miss it.
                self._ring_bytes = 0
                return
            told = encode_json({**delta, "quiet_s": self.quiet_s()})
            frame = b"id: %s\ndata: %s\n\n" % (self.position.encode(), told)
        except Exception:
            _log.exception("delta")
            return
        self._ring.append(frame)
        self._ring_bytes += len(frame)
        while len(self._ring) > MOST_FRAMES or (self._ring_bytes > MOST_BYTES and len(self._ring) > 1):
            self._ring_bytes -= len(self._ring.popleft())
        self._wake()

    def _wake(self) -> None:
        news, self._news = self._news, asyncio.Event()
        news.set()
