"""Addresses of brokers and clusters, and the runtime directory of this user's processes."""

import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import unquote, urlsplit

from ftd.errors import ConfigurationError

DEFAULT_CLUSTER = "ftd"
DEFAULT_PORT = 1883
DEFAULT_TLS_PORT = 8883
HIDDEN = "(hidden)"
"""Text shown instead of a secret."""
_CREDENTIALS = re.compile(r"\A(?P<scheme>(?:\w+:)?//)?+(?P<user>[^:@]*):(?P<password>.*)@", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tls:
    """Certificates for a TLS connection to a broker; paths of PEM files."""

    ca_file: Path | None = None
    """Certificate authorities to trust; ``None``: the system's."""
    cert_file: Path | None = None
    key_file: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerAddress:
    host: str
    port: int = DEFAULT_PORT
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    tls: Tls | None = None
    """``None``: the connection is not encrypted."""

    @property
    def url(self) -> str:
        """The address for people and for ``local.json``, without the password."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'mqtts' if self.tls else 'mqtt'}://{host}:{self.port}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterAddress:
    """The address that a client needs to reach a cluster."""

    broker: BrokerAddress
    cluster: str = DEFAULT_CLUSTER


def parse_broker(url: str, where: str = "broker.url") -> BrokerAddress:
    """Parse ``mqtt://[user:password@]host[:port]``; ``mqtts`` is TLS, with the system's authorities.

    :param where: name of the field for error messages.
    :raises ConfigurationError: the URL has another scheme, no host, or an impossible port.
    """
    remedy = "write mqtt://host:port, or mqtts://host:port for TLS"
    shown = hide_password(url)
    credentials = _CREDENTIALS.match(url)
    if credentials is not None and set("/?#") & set(credentials["password"]):
        remedy = "write / ? # of a password as %2F %3F %23, or keep the password in broker.password_file"
        raise ConfigurationError(f"{shown!r} is no broker address", field=where, remedy=remedy)
    try:
        parts = urlsplit(url if "//" in url else f"mqtt://{url}")
        port = parts.port
        if port == 0:
            raise ValueError("nobody listens on port 0")
    except ValueError as error:
        # The error may quote a part of the password.
        problem = f"{url!r}: {error}" if shown == url else f"{shown!r} is no broker address"
        raise ConfigurationError(problem, field=where, remedy=remedy) from None
    host, known = parts.hostname or "", parts.scheme in ("mqtt", "mqtts")
    if not known or not is_host(host) or parts.path.strip("/") or parts.query or parts.fragment:
        raise ConfigurationError(f"{shown!r} is no broker address", field=where, remedy=remedy)
    secure = parts.scheme == "mqtts"
    return BrokerAddress(
        host=host,
        port=port or (DEFAULT_TLS_PORT if secure else DEFAULT_PORT),
        username=unquote(parts.username) if parts.username else None,
        password=unquote(parts.password) if parts.password else None,
        tls=Tls() if secure else None,
    )


def hide_password(url: str) -> str:
    """Return the URL of a broker with a placeholder for its password, if it has one."""
    return _CREDENTIALS.sub(rf"\g<scheme>\g<user>:{HIDDEN}@", url, count=1)


def is_host(name: str) -> bool:
    """Return whether the name can be looked up: ``socket`` raises no ``OSError`` for what cannot be a host's
    name.
    """
    try:
        return bool(name.encode("idna"))
    except UnicodeError:
        return False


def user_runtime_dir() -> Path:
    """Return a directory of this user that does not outlive the session: ``$XDG_RUNTIME_DIR/ftd``, or one in
    /tmp.

    :raises ConfigurationError: it cannot be made, or /tmp/ftd-<uid> belongs to somebody else.
    """
    base = os.environ.get("XDG_RUNTIME_DIR")
    path = Path(base) / "ftd" if base else Path(f"/tmp/ftd-{os.getuid()}")
    problem = ""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        if path.stat().st_uid != os.getuid():
            problem = "belongs to another user"
    except OSError as error:
        problem = f"cannot be made: {error.strerror}"
    if problem:
        raise ConfigurationError(
            f"{path} {problem}", field="$XDG_RUNTIME_DIR", remedy="set it to a directory of yours"
        )
    return path
