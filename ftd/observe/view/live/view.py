"""The live view of a run: a picture on a terminal, plain lines in a pipe or in CI.

Fed by the driver's thread (``on_state``, ``on_event``) and drawn by rich's refresh thread; one lock
keeps a drawing from seeing half of an update.
"""

import time
from collections.abc import Mapping
from threading import Lock
from types import TracebackType
from typing import Any, Self

from rich.console import Console, RenderableType
from rich.live import Live

from ftd.observe.view.lines import plain_event
from ftd.observe.view.live.frame import LiveFrame
from ftd.observe.view.text import QUIET_EVENTS

PROGRESS_EVERY_S = 2.0
"""In plain mode: at most one progress line in this time."""


class LiveView:
    """Shows a running job; use as a context manager, or ``start`` and ``stop``.

    :param total_steps: steps of the job, until a state tells it; ``None`` when not known.
    """

    def __init__(self, console: Console, total_steps: int | None = None, *, lines: bool = True) -> None:
        """:param lines: where the console is no terminal, by itself; false: frames alone, to who asks."""
        self._console = console
        self._lines = lines and not console.is_terminal
        self._picture = LiveFrame(total_steps)
        self._lock = Lock()
        self._live: Live | None = None
        self._last_progress_s = -PROGRESS_EVERY_S
        self._last_news = (-1, "")
        self._heard_s = time.monotonic()

    def start(self) -> None:
        """Begin to draw. On a console that is no terminal nothing happens until there is news."""
        if self._console.is_terminal and self._live is None:
            self._live = Live(
                console=self._console,
                get_renderable=self.frame,
                refresh_per_second=8,
                vertical_overflow="crop",
            )
            self._live.start()

    def stop(self) -> None:
        """Draw once more and leave the last picture on the terminal."""
        if self._live is not None:
            self._live.stop()
            self._live = None
        else:
            self._progress_line(force=True)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def on_state(self, state: Mapping[str, Any]) -> None:
        """The cluster's public state has changed."""
        self._heard_s = time.monotonic()
        with self._lock:
            self._picture.see_state(state)
        self._progress_line()

    def on_event(self, event: Mapping[str, Any]) -> None:
        """Something happened (the event's JSON envelope)."""
        self._heard_s = time.monotonic()
        with self._lock:
            self._picture.see_event(event)
        if self._lines and event.get("event") not in QUIET_EVENTS:
            self._plain(plain_event(event))
        self._progress_line()

    def on_broker(self, there: bool) -> None:
        """The connection to the broker was made, or broke."""
        with self._lock:
            self._picture.see_broker(there=there)

    def replay_event(self, event: Mapping[str, Any]) -> None:
        """Something that happened before the view began: drawn, but no news."""
        with self._lock:
            self._picture.see_event(event)

    def frame(self) -> RenderableType:
        """The picture as it is at this moment, in the console's size."""
        with self._lock:
            quiet_s = time.monotonic() - self._heard_s
            return self._picture.draw(*self._console.size, quiet_s=quiet_s)

    def _plain(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def _progress_line(self, *, force: bool = False) -> None:
        if not self._lines:
            return
        now_s = time.monotonic()
        news = self._picture.news
        if news == self._last_news or (not force and now_s - self._last_progress_s < PROGRESS_EVERY_S):
            return
        self._last_progress_s = now_s
        self._last_news = news
        self._plain(self._picture.progress_line())
