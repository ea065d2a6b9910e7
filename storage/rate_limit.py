"""How fast bytes may go to or come from a disk or a network, and whether they may go on at all."""

import threading
import time

CREDIT_S = 0.25
"""Whoever comes so late, as a busy machine lets a thread wait, may make up for it."""


class RateLimiter:
    """Shared by the threads that move the bytes: together they keep to one rate.

    :param bytes_per_s: ``None`` for as fast as it goes.
    """

    def __init__(self, bytes_per_s: float | None = None) -> None:
        if bytes_per_s is not None and not bytes_per_s > 0:
            raise ValueError(f"bytes_per_s is {bytes_per_s}; it must be positive, or None for no limit")
        self._bytes_per_s = bytes_per_s
        self._stopped = threading.Event()
        self._lock = threading.Lock()
        self._due_s = time.monotonic()

    def cancel(self) -> None:
        """From any thread: whoever moves bytes stops before its next piece, also one that waits."""
        self._stopped.set()

    @property
    def cancelled(self) -> bool:
        return self._stopped.is_set()

    def passed(self, size_bytes: int) -> bool:
        """So many bytes were moved: wait until more may be. ``False``: cancelled."""
        wait_s = 0.0
        if self._bytes_per_s is not None:
            with self._lock:
                now_s = time.monotonic()
                self._due_s = max(self._due_s, now_s - CREDIT_S) + size_bytes / self._bytes_per_s
                wait_s = self._due_s - now_s
        return not (self._stopped.wait(wait_s) if wait_s > 0 else self._stopped.is_set())
