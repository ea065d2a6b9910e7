"""What strangers do is counted, and said in the log once, then now and then: they must not fill it."""

import logging
import time
from typing import Any

import structlog
from aiohttp.http_exceptions import HttpProcessingError

_log = structlog.get_logger("ftd.http")

PERIOD_S = 60.0


class RateLimitedLog:
    """Of one kind, at one place.

    :param log: where ``event`` is said, as a warning.
    """

    def __init__(self, log: Any, event: str) -> None:
        self._log, self._event = log, event
        self._said_at = -PERIOD_S
        self.count = 0
        """Since the daemon's start."""

    def warn(self, **fields: object) -> None:
        """It happened again; ``fields`` say what, of the one that is told."""
        self.count += 1
        now = time.monotonic()
        if now - self._said_at >= PERIOD_S:
            self._said_at = now
            self._log.warning(self._event, so_far=self.count, **fields)


def http_logger(complaints: RateLimitedLog) -> logging.Logger:
    """For an aiohttp server: what a stranger sends that is no HTTP is a complaint, no traceback."""
    log = logging.Logger("ftd.http", logging.WARNING)
    log.addHandler(_Handler(complaints))
    return log


class _Handler(logging.Handler):
    def __init__(self, complaints: RateLimitedLog) -> None:
        super().__init__()
        self._complaints = complaints

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, HttpProcessingError | ConnectionError):
            lines = str(error).splitlines() or [type(error).__name__]
            self._complaints.warn(reason=" ".join(lines[:2])[:200])
        else:
            _log.error("http", problem=record.getMessage(), exc_info=record.exc_info)
