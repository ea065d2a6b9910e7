"""Checks ``[dashboard]``: where the coordinator serves its dashboard, and who may see it."""

import ipaddress
import re
from dataclasses import dataclass
from pathlib import Path

import msgspec

from ftd.config.secrets import secret_or_file
from ftd.errors import ConfigurationError, IncompleteError
from ftd.transport.address import is_host

DEFAULT_HOST, DEFAULT_PORT = "127.0.0.1", 9650
MIN_TOKEN_LENGTH = 16
"""Characters of a token that cannot be guessed."""
TOKEN = re.compile(r"[A-Za-z0-9._~+/=-]+", re.ASCII)
"""Characters that an HTTP header may have after ``Bearer`` (RFC 6750)."""
_LISTEN = re.compile(r"(?:\[(?P<v6>[0-9a-fA-F:.]+)\]|(?P<name>[^:\[\]\s]+)):(?P<port>[0-9]{1,5})", re.ASCII)


class DashboardTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``[dashboard]``: the coordinator's web page."""

    listen: str | None = None
    """Address host:port; addresses beyond loopback need a token; "" serves no page. Default: 127.0.0.1:9650, if
    it is free.
    """
    token: str | None = None
    """Token that a browser is asked for, at least 16 characters. Prefer ``token_file``."""
    token_file: str | None = None
    """File with the token, which others must not be able to read; relative to ftd.toml."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DashboardAddress:
    """Address and access of the dashboard; ``token`` is ``None`` only on loopback, where every user of this host
    may look.
    """

    host: str
    port: int
    token: str | None
    configured: bool
    """Whether the configuration names the address; if so, failing to bind it is an error."""


def dashboard_address(table: DashboardTable, directory: Path) -> DashboardAddress | None:
    """Return where to serve the dashboard; ``None`` if it is turned off.

    :raises ConfigurationError: the address or the token is invalid, or strangers could see the page.
    """
    if table.listen == "":
        return None
    host, port = _address(table.listen) if table.listen is not None else (DEFAULT_HOST, DEFAULT_PORT)
    token, field = _token(table, directory)
    if token is None and not is_loopback(host):
        raise IncompleteError(
            f"everybody on the network could see a dashboard on {host}",
            field=field,
            remedy=f'write token_file = "dashboard-token" to require a token, or listen = "{DEFAULT_HOST}:{port}"',
        )
    return DashboardAddress(host=host, port=port, token=token, configured=table.listen is not None)


def is_loopback(host: str) -> bool:
    """Return whether only processes of this host can reach an address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _address(listen: str) -> tuple[str, int]:
    found = _LISTEN.fullmatch(listen)
    if found is None or int(found["port"]) > 65535 or not is_host(found["v6"] or found["name"]):
        raise ConfigurationError(
            f"{listen!r} is not of the form host:port",
            field="dashboard.listen",
            remedy=f'write for example "{DEFAULT_HOST}:{DEFAULT_PORT}" or "[::1]:{DEFAULT_PORT}", or "" for no page',
        )
    return found["v6"] or found["name"], int(found["port"])


def _token(table: DashboardTable, directory: Path) -> tuple[str | None, str]:
    """Return the token, and the field that it is (or would be) from."""
    token, field = secret_or_file(table.token, table.token_file, "dashboard.token", directory)
    if token is None:
        return None, "dashboard.token_file"
    if len(token) < MIN_TOKEN_LENGTH or not TOKEN.fullmatch(token):
        raise ConfigurationError(
            f"the token must have at least {MIN_TOKEN_LENGTH} characters, all of A-Z a-z 0-9 . _ ~ + / = -",
            field=field,
            remedy="generate one with: head -c 24 /dev/urandom | base64",
        )
    return token, field
