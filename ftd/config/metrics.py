"""Where a daemon serves ``/metrics``, and to whom."""

import re
from dataclasses import dataclass
from pathlib import Path

from ftd.config.dashboard import is_loopback
from ftd.config.secrets import read_secret
from ftd.errors import ConfigurationError, IncompleteError

LOOPBACK = "127.0.0.1"
_TOKEN = re.compile(r"[A-Za-z0-9._~+/=-]+", re.ASCII)
"""What an HTTP header may carry behind ``Bearer`` (RFC 6750)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsAddress:
    """``token`` is ``None`` on loopback alone, where everybody of this host may read."""

    host: str
    port: int
    token: str | None
    field: str
    """The key that named the port, for what cannot be known before it is bound."""


def metrics_address(
    table: str, host: str, port: int, token_file: str | None, directory: Path
) -> MetricsAddress | None:
    """``None``: nothing is served.

    :param table: ``node`` or ``coordinator``.
    :raises ConfigurationError: the port is none, the token cannot be used, or strangers could read.
    """
    if not 0 <= port <= 65535:
        raise ConfigurationError(
            f"{port} is no port", field=f"{table}.metrics_port", remedy="1 to 65535, or 0 for none"
        )
    if port == 0:
        return None
    field = f"{table}.metrics_token_file"
    if token_file is None and not is_loopback(host):
        raise IncompleteError(
            f"metrics on {host} could be read by everybody on the network",
            field=field,
            remedy=f'name a file with a bearer token, or leave out metrics_host (default "{LOOPBACK}")',
        )
    token = None if token_file is None else read_secret(directory / token_file, field)
    if token is not None and not _TOKEN.fullmatch(token):
        raise ConfigurationError(
            "the token has characters that a bearer token cannot have",
            field=field,
            remedy="head -c 24 /dev/urandom | base64 makes one",
        )
    return MetricsAddress(host=host, port=port, token=token, field=f"{table}.metrics_port")
