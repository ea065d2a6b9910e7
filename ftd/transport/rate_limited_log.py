"""Warnings about strangers' behaviour, which must not fill the log: each is counted, and few are logged."""

import logging
import time
from typing import Any

import structlog
from aiohttp.http_exceptions import HttpProcessingError

_log = structlog.get_logger("ftd.http")

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


def http_logger(warnings: RateLimitedLog) -> logging.Logger:
    """Return a logger for an aiohttp server that reports what is not HTTP in this log, without a traceback."""
    log = logging.Logger("ftd.http", logging.WARNING)
    log.addHandler(_Handler(warnings))
    return log


class _Handler(logging.Handler):
    def __init__(self, warnings: RateLimitedLog) -> None:
        super().__init__()
        self._warnings = warnings

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, HttpProcessingError | ConnectionError):
            lines = str(error).splitlines() or [type(error).__name__]
            self._warnings.warn(reason=" ".join(lines[:2])[:200])
        else:
            _log.error("http", problem=record.getMessage(), exc_info=record.exc_info)
