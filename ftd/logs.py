"""Logging of the daemons: for people on a terminal, JSON lines everywhere else."""

import logging
import sys

import structlog


def configure_logs(*, verbose: bool = False, **bound: object) -> None:
    """structlog to stderr; ``bound`` (daemon, node, incarnation) goes into every line."""
    level = logging.DEBUG if verbose else logging.INFO
    renderers: list[structlog.typing.Processor]
    if sys.stderr.isatty():
        renderers = [structlog.dev.ConsoleRenderer()]
    else:
        renderers = [structlog.processors.format_exc_info, structlog.processors.JSONRenderer(default=str)]
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            *renderers,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
    structlog.contextvars.bind_contextvars(**bound)
    # Libraries (paho through aiomqtt) log through the standard module.
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
