"""What strangers do is counted, and said in the log once, then now and then: they must not fill it."""

import time
from typing import Any

PERIOD_S = 60.0


class Complaints:
    """Of one kind, at one place.

    :param log: where ``event`` is said, as a warning.
    """

    def __init__(self, log: Any, event: str) -> None:
        self._log, self._event = log, event
        self._said_at = -PERIOD_S
        self.count = 0
        """Since the daemon's start."""

    def note(self, **fields: object) -> None:
        """It happened again; ``fields`` say what, of the one that is told."""
        self.count += 1
        now = time.monotonic()
        if now - self._said_at >= PERIOD_S:
            self._said_at = now
            self._log.warning(self._event, so_far=self.count, **fields)
