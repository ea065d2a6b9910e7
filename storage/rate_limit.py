"""Rate limit and cancellation of transfers to or from a disk or a network."""

import threading
import time

CREDIT_S = 0.25
"""Largest delay that a transfer may make up for; a busy machine may delay a thread for this long."""


class RateLimiter:
    """A rate limit that several threads share; it can also cancel them.

    :param bytes_per_s: rate in bytes per second; ``None`` for no limit.
    """

    def __init__(self, bytes_per_s: float | None = None) -> None:
        if bytes_per_s is not None and not bytes_per_s > 0:
            raise ValueError(f"bytes_per_s is {bytes_per_s}; it must be positive, or None for no limit")
        self._bytes_per_s = bytes_per_s
        self._stopped = threading.Event()
        self._lock = threading.Lock()
        self._due_s = time.monotonic()

    def cancel(self) -> None:
        """Stop all threads before their next chunk, including those that wait. Any thread may call it."""
        self._stopped.set()

    @property
    def cancelled(self) -> bool:
        return self._stopped.is_set()

    def acquire(self, size_bytes: int) -> bool:
        """Wait until ``size_bytes`` more bytes fit the rate. Return false if the transfer was cancelled."""
        wait_s = 0.0
        if self._bytes_per_s is not None:
            with self._lock:
                now_s = time.monotonic()
                self._due_s = max(self._due_s, now_s - CREDIT_S) + size_bytes / self._bytes_per_s
                wait_s = self._due_s - now_s
        return not (self._stopped.wait(wait_s) if wait_s > 0 else self._stopped.is_set())
