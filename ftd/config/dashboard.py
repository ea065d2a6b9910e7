"""Where the coordinator serves its dashboard, and to whom."""

import ipaddress
import re
from dataclasses import dataclass
from pathlib import Path

import msgspec

from ftd.config.secrets import read_secret
from ftd.errors import ConfigurationError, IncompleteError
from ftd.transport.address import is_host

DEFAULT_HOST, DEFAULT_PORT = "127.0.0.1", 9650
MIN_TOKEN_LENGTH = 16
"""Characters: nobody is to find it by trying."""
_TOKEN = re.compile(r"[A-Za-z0-9._~+/=-]+", re.ASCII)
_LISTEN = re.compile(r"(?:\[(?P<v6>[0-9a-fA-F:.]+)\]|(?P<name>[^:\[\]\s]+)):(?P<port>[0-9]{1,5})", re.ASCII)


class DashboardTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``[dashboard]``: the coordinator's page to watch."""

    listen: str | None = None
    """host:port; beyond loopback only with a token. Left out: 127.0.0.1:9650, if it is free; "": no page."""
    token: str | None = None
    """What a browser is asked for; at least 16 characters. Better in a file."""
    token_file: str | None = None
    """The token in a file that others cannot read; relative to ftd.toml."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DashboardAddress:
    """``token`` is ``None`` on loopback alone, where everybody of this host may look."""

    host: str
    port: int
    token: str | None
    configured: bool
    """The configuration names the address: then not to have it is an error."""


def dashboard_address(table: DashboardTable, directory: Path) -> DashboardAddress | None:
    """``None``: there is no page.

    :raises ConfigurationError: no address, a token that cannot be used, or strangers could look.
    """
    if table.listen == "":
        return None
    host, port = _address(table.listen) if table.listen is not None else (DEFAULT_HOST, DEFAULT_PORT)
    token, field = _token(table, directory)
    if token is None and not is_loopback(host):
        raise IncompleteError(
            f"a dashboard on {host} could be watched by everybody on the network",
            field=field,
            remedy=f'token_file = "dashboard-token" asks for a token; or listen = "{DEFAULT_HOST}:{port}"',
        )
    return DashboardAddress(host=host, port=port, token=token, configured=table.listen is not None)


def is_loopback(host: str) -> bool:
    """Whether only processes of this host reach an address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _address(listen: str) -> tuple[str, int]:
    found = _LISTEN.fullmatch(listen)
    if found is None or int(found["port"]) > 65535 or not is_host(found["v6"] or found["name"]):
        raise ConfigurationError(
            f"{listen!r} is no host:port",
            field="dashboard.listen",
            remedy=f'for example "{DEFAULT_HOST}:{DEFAULT_PORT}" or "[::1]:{DEFAULT_PORT}"; "" for no page',
        )
    return found["v6"] or found["name"], int(found["port"])


def _token(table: DashboardTable, directory: Path) -> tuple[str | None, str]:
    """The token, and the field that it is (or would be) from."""
    if table.token is not None and table.token_file is not None:
        raise ConfigurationError(
            "both token and token_file", field="dashboard.token", remedy="keep one of them"
        )
    if table.token is not None:
        token, field = table.token, "dashboard.token"
    elif table.token_file is not None:
        field = "dashboard.token_file"
        token = read_secret(directory / table.token_file, field)
    else:
        return None, "dashboard.token_file"
    if len(token) < MIN_TOKEN_LENGTH or not _TOKEN.fullmatch(token):
        raise ConfigurationError(
            f"the token is to have at least {MIN_TOKEN_LENGTH} characters, of A-Z a-z 0-9 . _ ~ + / = -",
            field=field,
            remedy="head -c 24 /dev/urandom | base64 makes one",
        )
    return token, field
