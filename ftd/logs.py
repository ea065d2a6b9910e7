"""Logging of the daemons: readable text on a terminal, JSON lines everywhere else."""

import errno
import json
import logging
import os
import stat
import sys
from pathlib import Path
from typing import Any

import msgspec
import structlog


def configure_logs(*, verbose: bool = False, **bound: object) -> None:
    """Send structlog's output to stderr; ``bound`` (daemon, node, incarnation) is added to every line."""
    level = logging.DEBUG if verbose else logging.INFO
    renderers: list[structlog.typing.Processor]
    if sys.stderr.isatty():
        renderers = [structlog.dev.ConsoleRenderer()]
    else:
        renderers = [structlog.processors.format_exc_info, structlog.processors.JSONRenderer(_one_line)]

    def bind(_logger: object, _method: str, line: structlog.typing.EventDict) -> structlog.typing.EventDict:
        # No context variables: callbacks of the broker's socket run in a context of their own.
        return {**bound, **line}

    structlog.configure(
        processors=[
            bind,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            *renderers,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
    logging.basicConfig(level=logging.WARNING, handlers=[_Forwarding()], force=True)


LOG_VARIABLE = "FTD_LOG_LOCATION"
"""Environment variable with which whoever started this process says where its log will be."""


def log_location() -> str:
    """Return the command or the file with which people read this process's log on its host; empty if there is
    none that lasts, as on a terminal.
    """
    if (given := os.environ.get(LOG_VARIABLE)) is not None:
        return given
    try:
        target = os.fstat(sys.stderr.fileno())
        if os.environ.get("JOURNAL_STREAM") == f"{target.st_dev}:{target.st_ino}":
            group = Path("/proc/self/cgroup").read_text().strip()
            user = "--user " if "/user.slice/" in group else ""
            return f"journalctl {user}-u {group.rpartition('/')[2]}"
        if stat.S_ISREG(target.st_mode):
            return str(Path(f"/proc/self/fd/{sys.stderr.fileno()}").readlink())
    except (OSError, ValueError):  # There is no such file, or stderr is none.
        return ""
    return ""


def _one_line(line: structlog.typing.EventDict, **_: Any) -> str:
    """Return the line as JSON. msgspec saves milliseconds over ``json`` on the plan of a thousand nodes."""
    try:
        return msgspec.json.format(msgspec.json.encode(line, enc_hook=str), indent=0).decode()
    except (ArithmeticError, TypeError, ValueError):  # msgspec rejects some numbers and strings.
        return json.dumps(line, default=str)


class _Forwarding(logging.Handler):
    """Handler that turns lines of the standard ``logging`` module (asyncio, aiohttp, paho) into lines of ours."""

    def emit(self, record: logging.LogRecord) -> None:
        structlog.get_logger(record.name).log(
            logging.DEBUG if _is_known(record) else record.levelno,
            "library_message",
            message=record.getMessage(),
            logger=record.name,
            exc_info=record.exc_info,
        )


def _is_known(record: logging.LogRecord) -> bool:
    """Return whether the line is about a broken broker connection, which ``ftd.transport.mqtt`` logs itself.

    These are the lines of its library, and those of uvloop that the handle is closed (see ``_read_regularly``
    there), or the socket that it is to wait for.
    """
    error, message = record.exc_info[1] if record.exc_info else None, record.getMessage()
    if record.name == "mqtt":
        return "on socket" in message
    closed = isinstance(error, OSError) and error.errno == errno.EBADF and "add_writer" in message
    return record.name == "asyncio" and (closed or "the handler is closed" in str(error))
