"""Logging of the daemons: for people on a terminal, JSON lines everywhere else."""

import json
import logging
import sys
from typing import Any

import msgspec
import structlog


def configure_logs(*, verbose: bool = False, **bound: object) -> None:
    """structlog to stderr; ``bound`` (daemon, node, incarnation) goes into every line."""
    level = logging.DEBUG if verbose else logging.INFO
    renderers: list[structlog.typing.Processor]
    if sys.stderr.isatty():
        renderers = [structlog.dev.ConsoleRenderer()]
    else:
        renderers = [structlog.processors.format_exc_info, structlog.processors.JSONRenderer(_one_line)]

    def bind(_logger: object, _method: str, line: structlog.typing.EventDict) -> structlog.typing.EventDict:
        # No context variables: what the broker's socket calls back has a context of its own.
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


def _one_line(line: structlog.typing.EventDict, **_: Any) -> str:
    """A plan for a thousand nodes is logged, too: a decision waits milliseconds less than for ``json``."""
    try:
        return msgspec.json.format(msgspec.json.encode(line, enc_hook=str), indent=0).decode()
    except (ArithmeticError, TypeError, ValueError):  # A number or a text that it does not write.
        return json.dumps(line, default=str)


class _Forwarding(logging.Handler):
    """What libraries (asyncio, aiohttp, paho) log through the standard module becomes a line like ours."""

    def emit(self, record: logging.LogRecord) -> None:
        structlog.get_logger(record.name).log(
            logging.DEBUG if _is_known(record) else record.levelno,
            "library",
            said=record.getMessage(),
            logger=record.name,
            exc_info=record.exc_info,
        )


def _is_known(record: logging.LogRecord) -> bool:
    """Of a broken connection to the broker, which ``ftd.transport.mqtt`` tells by itself: what its library says of it,
    and that uvloop has closed the handle (see ``_read_now_and_then`` there).
    """
    error = record.exc_info[1] if record.exc_info else None
    broken = record.name == "mqtt" and "on socket" in record.getMessage()
    return broken or (record.name == "asyncio" and "the handler is closed" in str(error))
