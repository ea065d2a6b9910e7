"""The cluster that a command is meant for.

A command looks, in this order: its options, the environment (``FTD_BROKER``, ``FTD_CLUSTER``), its
``--config``, and the file that a running ``ftd local`` leaves under the user's runtime directory.
"""

import json
import os
from pathlib import Path

from ftd.config.address import (
    DEFAULT_CLUSTER,
    BrokerAddress,
    ClusterAddress,
    parse_broker,
    user_runtime_dir,
)
from ftd.config.daemon import load_daemon_config
from ftd.config.reading import require_name
from ftd.errors import ConfigurationError


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
        loaded = load_daemon_config(config)
        name, address = loaded.cluster, loaded.broker_address()
    elif broker is None and "FTD_BROKER" in os.environ:
        address = parse_broker(os.environ["FTD_BROKER"], "$FTD_BROKER")
    elif broker is None and (found := _read_local_file()) is not None:
        name, address = os.environ.get("FTD_CLUSTER") or found.cluster, found.broker
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
