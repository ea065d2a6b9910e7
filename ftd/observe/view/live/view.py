"""The live view of a run: an updated display on a terminal, plain lines in a pipe or in CI.

The driver's thread passes states and events in, and rich's refresh thread draws. A lock keeps a frame from
showing half of an update.
"""

import time
from collections.abc import Mapping
from threading import Lock
from typing import Any, Self

from rich.console import Console, RenderableType
from rich.live import Live

from ftd.observe.view.lines import plain_event
from ftd.observe.view.live.frame import LiveFrame
from ftd.observe.view.text import QUIET_EVENTS

PROGRESS_EVERY_S = 2.0
"""Shortest time between two progress lines in plain mode."""


class LiveView:
    """Display of a running job; use it as a context manager.

    :param total_steps: steps of the job until a state contains them; ``None`` if unknown.
    """

    def __init__(self, console: Console, total_steps: int | None = None, *, lines: bool = True) -> None:
        """:param lines: whether to print plain lines if the console is no terminal. Without them, only
        ``frame`` shows something.
        """
        self._console = console
        self._lines = lines and not console.is_terminal
        self._frame = LiveFrame(total_steps)
        self._lock = Lock()
        self._live: Live | None = None
        self._last_progress_s = -PROGRESS_EVERY_S
        self._last_key = (-1, "")
        self._last_message_s = time.monotonic()

    def __enter__(self) -> Self:
        """Start to draw. Without a terminal, nothing is printed until something happens."""
        if self._console.is_terminal:
            self._live = Live(
                console=self._console,
                get_renderable=self.frame,
                refresh_per_second=8,
                vertical_overflow="crop",
            )
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Draw once more and leave the last frame on the terminal."""
        if self._live is not None:
            self._live.stop()
            self._live = None
        else:
            self._progress_line(force=True)

    def on_state(self, state: Mapping[str, Any]) -> None:
        """Replace the cluster's public state."""
        self._last_message_s = time.monotonic()
        with self._lock:
            self._frame.on_state(state)
        self._progress_line()

    def on_event(self, event: Mapping[str, Any]) -> None:
        """Add an event (its JSON envelope)."""
        self._last_message_s = time.monotonic()
        with self._lock:
            self._frame.on_event(event)
        if self._lines and event.get("event") not in QUIET_EVENTS:
            self._plain(plain_event(event))
        self._progress_line()

    def on_broker(self, connected: bool) -> None:
        """Record that the connection to the broker was made or lost."""
        with self._lock:
            self._frame.on_broker(connected=connected)

    def replay_event(self, event: Mapping[str, Any]) -> None:
        """Add an event from before the view began: it is drawn but not printed as a line."""
        with self._lock:
            self._frame.on_event(event)

    def frame(self) -> RenderableType:
        """Return the current frame in the console's size."""
        with self._lock:
            quiet_s = time.monotonic() - self._last_message_s
            return self._frame.draw(*self._console.size, quiet_s=quiet_s)

    def _plain(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def _progress_line(self, *, force: bool = False) -> None:
        if not self._lines or not self._frame.has_state:
            return
        now_s = time.monotonic()
        key = self._frame.progress_key
        if key == self._last_key or (not force and now_s - self._last_progress_s < PROGRESS_EVERY_S):
            return
        self._last_progress_s = now_s
        self._last_key = key
        self._plain(self._frame.progress_line())
