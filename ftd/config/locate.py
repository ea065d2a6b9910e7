"""The cluster that a command is meant for.

A command looks, in this order: its options, the environment (``FTD_BROKER``, ``FTD_CLUSTER``), its ``--config``, and
the clusters that ``ftd local`` runs under the same user. Where several of these run, ``--cluster`` must say which.
"""

import os
from pathlib import Path

from ftd.config.daemon import load_daemon_config
from ftd.config.local_clusters import reachable_clusters
from ftd.config.reading import require_name
from ftd.errors import ConfigurationError
from ftd.transport.address import DEFAULT_CLUSTER, ClusterAddress, parse_broker


def find_cluster(
    broker: str | None = None, cluster: str | None = None, config: Path | None = None
) -> ClusterAddress:
    """Return the cluster that a command is meant for (see the module's order).

    :raises ConfigurationError: nothing says where the broker is, or what does is wrong; or several local clusters run
        and nothing says which one is meant.
    """
    wanted = cluster or os.environ.get("FTD_CLUSTER")
    if wanted:
        require_name(wanted, "--cluster" if cluster else "FTD_CLUSTER")
    loaded = None if config is None else load_daemon_config(config)
    if broker is not None:
        address = parse_broker(broker, "--broker")
    elif loaded is not None:
        address = loaded.broker_address()
    elif "FTD_BROKER" in os.environ:
        address = parse_broker(os.environ["FTD_BROKER"], "$FTD_BROKER")
    else:
        return _local_cluster(wanted, "--cluster" if cluster else "FTD_CLUSTER")
    name = cluster or (loaded.cluster if loaded is not None else wanted)
    return ClusterAddress(broker=address, cluster=name or DEFAULT_CLUSTER)


def _local_cluster(wanted: str | None, field: str) -> ClusterAddress:
    """Return the local cluster of the wanted name, or the only one that is running."""
    running = reachable_clusters()
    if not running:
        raise ConfigurationError(
            "no cluster to talk to: no ftd local is running here",
            remedy="give --broker mqtt://host:port or --config ftd.toml, or set FTD_BROKER",
        )
    chosen = [found for found in running if wanted in (None, found.cluster)]
    if len(chosen) == 1:
        return chosen[0].address
    known = ", ".join(map(str, running))
    if not chosen:
        raise ConfigurationError(
            f"no local cluster is named {wanted!r}",
            field=field,
            remedy=f"running here: {known}; or give --broker mqtt://host:port",
        )
    raise ConfigurationError(
        f"several local clusters are running: {known}",
        field="--cluster",
        remedy="say which one is meant: --cluster NAME",
    )
