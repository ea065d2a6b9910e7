"""Checks where a daemon serves ``/metrics``, and who may read it."""

from dataclasses import dataclass
from pathlib import Path

from ftd.config.dashboard import TOKEN, is_loopback
from ftd.config.secrets import read_secret
from ftd.errors import ConfigurationError, IncompleteError

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsAddress:
    """Address and access of ``/metrics``; ``token`` is ``None`` only on loopback, where every user of this host
    may read.
    """

    host: str
    port: int
    token: str | None
    field: str
    """Key that set the port, for errors that appear only when it is bound."""


def metrics_address(
    table: str, host: str, port: int, token_file: str | None, directory: Path
) -> MetricsAddress | None:
    """Return where to serve metrics; ``None`` if they are turned off.

    :param table: ``node`` or ``coordinator``.
    :raises ConfigurationError: the port or the token is invalid, or strangers could read the metrics.
    """
    if not 0 <= port <= 65535:
        raise ConfigurationError(
            f"{port} is not a valid port",
            field=f"{table}.metrics_port",
            remedy="write 1 to 65535, or 0 to serve no metrics",
        )
    if port == 0:
        return None
    field = f"{table}.metrics_token_file"
    if token_file is None and not is_loopback(host):
        raise IncompleteError(
            f"everybody on the network could read metrics on {host}",
            field=field,
            remedy=f'name a file with a bearer token, or remove metrics_host (default "{LOOPBACK}")',
        )
    token = None if token_file is None else read_secret(directory / token_file, field)
    if token is not None and not TOKEN.fullmatch(token):
        raise ConfigurationError(
            "the token has characters that are not allowed in a bearer token",
            field=field,
            remedy="generate one with: head -c 24 /dev/urandom | base64",
        )
    return MetricsAddress(host=host, port=port, token=token, field=f"{table}.metrics_port")
