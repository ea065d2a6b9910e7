"""Warnings that must not fill the log, such as those about strangers: each is counted, and few are logged."""

import time
from typing import Any

PERIOD_S = 60.0


class RateLimitedLog:
    """Warnings of one kind, logged at most once in ``PERIOD_S``.

    :param log: logger that receives ``event`` as a warning.
    """

    def __init__(self, log: Any, event: str) -> None:
        self._log, self._event = log, event
        self._logged_at = -PERIOD_S
        self.count = 0
        """Occurrences since the daemon's start."""

    def warn(self, **fields: object) -> None:
        """Count an occurrence, and log it with ``fields`` if no other was logged recently."""
        self.count += 1
        now = time.monotonic()
        if now - self._logged_at >= PERIOD_S:
            self._logged_at = now
            self._log.warning(self._event, so_far=self.count, **fields)
