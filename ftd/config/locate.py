"""Where running things are found: runtime directories, and the cluster that a command is meant for.

A command looks, in this order: its options, its ``--config``, the environment (``FTD_BROKER``,
``FTD_CLUSTER``), and the file that a running ``ftd local`` leaves under the user's runtime directory.
"""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

from ftd.config.reading import require_name
from ftd.errors import ConfigurationError

DEFAULT_CLUSTER = "ftd"
DEFAULT_PORT = 1883


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerAddress:
    host: str
    port: int = DEFAULT_PORT
    username: str | None = None
    password: str | None = None

    @property
    def url(self) -> str:
        """For people and for ``local.json``; without the password."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"mqtt://{host}:{self.port}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterAddress:
    """What a client needs to talk to a cluster."""

    broker: BrokerAddress
    cluster: str = DEFAULT_CLUSTER


def parse_broker(url: str, field: str = "broker.url") -> BrokerAddress:
    """``mqtt://[user:password@]host[:port]`` as an address.

    :raises ConfigurationError: another scheme, no host, an impossible port.
    """
    remedy = "write mqtt://host:port"
    try:
        parts = urlsplit(url if "//" in url else f"mqtt://{url}")
        port = parts.port or DEFAULT_PORT
    except ValueError as error:
        raise ConfigurationError(f"{url!r}: {error}", field=field, remedy=remedy) from None
    if parts.scheme != "mqtt" or not parts.hostname or parts.path.strip("/") or parts.query:
        raise ConfigurationError(f"{url!r} is no broker address", field=field, remedy=remedy)
    return BrokerAddress(
        host=parts.hostname,
        port=port,
        username=unquote(parts.username) if parts.username else None,
        password=unquote(parts.password) if parts.password else None,
    )


def user_runtime_dir() -> Path:
    """A directory of this user's that does not outlive the session: ``$XDG_RUNTIME_DIR/ftd`` or in /tmp.

    :raises ConfigurationError: /tmp/ftd-<uid> exists and belongs to somebody else.
    """
    base = os.environ.get("XDG_RUNTIME_DIR")
    path = Path(base) / "ftd" if base else Path(f"/tmp/ftd-{os.getuid()}")
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    if path.stat().st_uid != os.getuid():
        raise ConfigurationError(
            f"{path} belongs to another user",
            field="XDG_RUNTIME_DIR",
            remedy="set it to a directory of yours",
        )
    return path


def local_file() -> Path:
    """Written by ``ftd local`` while it runs: ``{"broker": url, "cluster": name, "pid": pid}``."""
    return user_runtime_dir() / "local.json"


def find_cluster(
    broker: str | None = None, cluster: str | None = None, config: Path | None = None
) -> ClusterAddress:
    """The cluster that a command is meant for (see the module's order).

    :raises ConfigurationError: nothing says where the broker is, or what does is wrong.
    """
    name: str | None = None
    address: BrokerAddress | None = None
    if config is not None:
        from ftd.config.daemon import load_daemon_config

        loaded = load_daemon_config(config)
        name, address = loaded.cluster, loaded.broker_address()
    elif broker is None and "FTD_BROKER" in os.environ:
        address = parse_broker(os.environ["FTD_BROKER"], "FTD_BROKER")
    elif broker is None and (found := _read_local_file()) is not None:
        name, address = found.cluster, found.broker
    if broker is not None:
        address = parse_broker(broker, "--broker")
    name = cluster or name or os.environ.get("FTD_CLUSTER") or DEFAULT_CLUSTER
    require_name(name, "--cluster" if cluster else "FTD_CLUSTER")
    if address is None:
        raise ConfigurationError(
            "no cluster to talk to: no ftd local is running here",
            remedy="give --broker mqtt://host:port or --config ftd.toml, or set FTD_BROKER",
        )
    return ClusterAddress(broker=address, cluster=name)


def _read_local_file() -> ClusterAddress | None:
    """The running ``ftd local``, or None; a file that a killed one left behind does not count."""
    path = local_file()
    try:
        found = json.loads(path.read_text())
        os.kill(int(found["pid"]), 0)
        return ClusterAddress(broker=parse_broker(found["broker"], str(path)), cluster=found["cluster"])
    except PermissionError:
        return None
    except (OSError, ValueError, KeyError, TypeError):
        return None
