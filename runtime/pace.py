"""How far the main thread is, for those who watch it from other threads.

The control thread sends ``progress`` and ``waiting`` with every beat. Waiting for peers is not a hang of
this trainer; standing still without waiting is. All waits of the training loop pass through ``wait``: it
is the one place where a stage is idle (a pipeline bubble), which is where time is accounted, and where
other work may be done.
"""

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from runtime.communicator import Communicator, Pending


class Pace:
    """Written by the main thread, read by the control thread; single attributes need no lock."""

    def __init__(self) -> None:
        self.progress = 0
        self.waiting = False
        self.bubble_s = 0.0
        """Waited for peers since the owner last set it to zero."""
        self.slowness = 1.0
        """Chaos: computing takes so many times as long."""
        self.window: threading.Event | None = None
        """Set while ``waiting``, for who has work for such times."""
        self._sleep_s = 0.0

    def request_sleep(self, seconds: float) -> None:
        """Chaos: have the main thread stand still at its next operation."""
        self._sleep_s = seconds

    def tick(self) -> None:
        """The main thread begins another operation."""
        self.progress += 1
        if self._sleep_s > 0:
            sleep_s, self._sleep_s = self._sleep_s, 0.0
            time.sleep(sleep_s)

    @contextmanager
    def idle(self) -> Iterator[None]:
        """Nothing to do but wait for others."""
        self.waiting = True
        if self.window is not None:
            self.window.set()
        started = time.monotonic()
        try:
            yield
        finally:
            self.bubble_s += time.monotonic() - started
            self.waiting = False
            if self.window is not None:
                self.window.clear()
            self.progress += 1

    def wait(self, communicator: Communicator, pending: Pending) -> None:
        """``communicator.wait``, as idle time where it has to wait."""
        if pending.done:
            communicator.wait(pending)
            return
        with self.idle():
            communicator.wait(pending)

    def wait_any(self, communicator: Communicator, pendings: Sequence[Pending]) -> None:
        with self.idle():
            communicator.wait_any(pendings)
