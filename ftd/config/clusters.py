"""Finds the cluster that a command is meant for, and registers the clusters of ``ftd local``.

A command looks, in this order, at its options, the environment (``FTD_BROKER``, ``FTD_CLUSTER``), its
``--config``, and the clusters that ``ftd local`` runs under the same user. If several of these run,
``--cluster`` or the broker's address must say which one.

Each local cluster has a name and a file by which commands find it: ``local-NAME.json`` in the user's runtime
directory. A command waits for a cluster that starts. The file is valid while the process that wrote it
runs; the next ``ftd local`` removes the files of processes that have ended.
"""

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from ftd.config.daemon import load_daemon_config
from ftd.config.validation import require_name
from ftd.errors import ConfigurationError
from ftd.processes import start_time
from ftd.transport.address import (
    DEFAULT_CLUSTER,
    BrokerAddress,
    ClusterAddress,
    parse_broker,
    user_runtime_dir,
)
from storage.atomic import write_whole

_PREFIX = "local-"
_START_S = 20.0
"""Longest time for which a command waits for a cluster that starts."""
_START_PERIOD_S = 0.1


class LocalClusterRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Content of the file of a local cluster."""

    cluster: str
    """Name of the cluster."""
    job: str
    """Path of the job file."""
    pid: int
    """Process of ``ftd local``."""
    started: int
    """Start time of that process in clock ticks since boot; it tells the process from a later one with the same
    pid.
    """
    broker: str | None = None
    """URL of the broker; ``None`` until a coordinator answers there, and while the cluster stops."""

    @property
    def address(self) -> ClusterAddress:
        """Address of the cluster.

        :raises ConfigurationError: the file names no broker, or an invalid one.
        """
        return ClusterAddress(
            broker=parse_broker(self.broker or "", str(_file(self.cluster))), cluster=self.cluster
        )

    def __str__(self) -> str:
        return f"{self.cluster} ({self.job}, process {self.pid})"

    @contextlib.contextmanager
    def publish_broker(self, broker_url: str) -> Iterator[None]:
        """Let commands find the cluster of this process at a broker while the block runs."""
        _write(msgspec.structs.replace(self, broker=broker_url))
        try:
            yield
        finally:
            with contextlib.suppress(ConfigurationError):  # The file is removed when the cluster has ended.
                _write(self)


@contextlib.contextmanager
def register_cluster(name: str | None, job: Path) -> Iterator[LocalClusterRecord]:
    """Reserve a cluster name for this process until the block ends.

    :param name: wanted name; ``None`` chooses ``ftd``, or ``ftd-2`` and so on if those names are taken.
    :raises ConfigurationError: a running cluster has this name, or the name is invalid.
    """
    if name is not None:
        require_name(name, "--cluster")
    with _exclusive():
        running = {cluster.cluster: cluster for cluster in _running(remove=True)}
        if name in running:
            raise ConfigurationError(
                f"a local cluster with this name is already running: {running[name]}",
                field="--cluster",
                remedy="choose another name, or leave out --cluster",
            )
        number = 1
        while name is None or name in running:
            name = DEFAULT_CLUSTER if number == 1 else f"{DEFAULT_CLUSTER}-{number}"
            number += 1
        content = LocalClusterRecord(
            cluster=name, job=str(job), pid=os.getpid(), started=start_time(os.getpid()) or 0
        )
        _write(content)
    try:
        yield content
    finally:
        _file(name).unlink(missing_ok=True)


def reachable_clusters() -> list[LocalClusterRecord]:
    """Return the running local clusters that have a broker, sorted by name."""
    return [cluster for cluster in _running() if cluster.broker is not None]


def _running(*, remove: bool = False) -> list[LocalClusterRecord]:
    """Return the clusters whose processes run.

    :param remove: remove the files of the others.
    """
    found = []
    for path in user_runtime_dir().glob(f"{_PREFIX}*.json"):
        try:
            cluster = msgspec.json.decode(path.read_bytes(), type=LocalClusterRecord)
        except (OSError, msgspec.DecodeError):
            cluster = None
        if cluster is not None and start_time(cluster.pid) == cluster.started:
            found.append(cluster)
        elif remove:
            path.unlink(missing_ok=True)
    return sorted(found, key=lambda cluster: cluster.cluster)


def _file(name: str) -> Path:
    return user_runtime_dir() / f"{_PREFIX}{name}.json"


def _write(content: LocalClusterRecord) -> None:
    """Replace the file of the cluster.

    :raises ConfigurationError: it cannot be written.
    """
    path = _file(content.cluster)
    try:
        write_whole(path, msgspec.json.encode(content))
    except OSError as error:
        raise ConfigurationError(
            f"{path}, by which commands find the cluster, cannot be written: {error.strerror}",
            field="--cluster",
            remedy="free some space there, or set XDG_RUNTIME_DIR to another directory",
        ) from None


@contextlib.contextmanager
def _exclusive() -> Iterator[None]:
    """Keep other processes of this user from reserving a name during the block."""
    descriptor = os.open(user_runtime_dir(), os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def find_cluster(
    broker: str | None = None, cluster: str | None = None, config: Path | None = None
) -> ClusterAddress:
    """Return the cluster that a command is meant for (the module's docstring gives the order).

    :raises ConfigurationError: nothing says where the broker is, or it is wrong; or several local clusters
        run and nothing says which one is meant.
    """
    wanted = cluster or os.environ.get("FTD_CLUSTER")
    if wanted:
        require_name(wanted, "--cluster" if cluster else "FTD_CLUSTER")
    loaded = None if config is None else load_daemon_config(config)
    if broker is not None:
        address = parse_broker(broker, "--broker")
    elif loaded is not None:
        address = loaded.broker
    elif "FTD_BROKER" in os.environ:
        address = parse_broker(os.environ["FTD_BROKER"], "$FTD_BROKER")
    else:
        return _local_cluster(wanted, "--cluster" if cluster else "FTD_CLUSTER")
    name = cluster or (loaded.cluster if loaded is not None else wanted)
    return ClusterAddress(broker=address, cluster=name or _name_at(address))


def _name_at(broker: BrokerAddress) -> str:
    """Return the name of the only local cluster with this broker, or the default name."""
    names = [found.cluster for found in reachable_clusters() if found.broker == broker.url]
    return names[0] if len(names) == 1 else DEFAULT_CLUSTER


def _local_cluster(wanted: str | None, field: str) -> ClusterAddress:
    """Return the local cluster with the wanted name, or the only one that is running. One that starts is waited
    for.
    """
    deadline = time.monotonic() + _START_S
    while not (running := reachable_clusters()) and (starting := _running()):
        if time.monotonic() > deadline:
            raise ConfigurationError(
                f"a local cluster starts or ends, and has no broker: {', '.join(map(str, starting))}",
                remedy="try again when ftd local shows that it runs",
            )
        time.sleep(_START_PERIOD_S)
    if not running:
        raise ConfigurationError(
            "no cluster was given, and no ftd local is running on this host",
            remedy="give --broker mqtt://host:port or --config ftd.toml, or set FTD_BROKER",
        )
    chosen = [found for found in running if wanted in (None, found.cluster)]
    if len(chosen) == 1:
        return chosen[0].address
    known = ", ".join(map(str, running))
    if not chosen:
        raise ConfigurationError(
            f"no local cluster has the name {wanted!r}",
            field=field,
            remedy=f"running on this host: {known}; for other clusters give --broker mqtt://host:port",
        )
    raise ConfigurationError(
        f"several local clusters are running: {known}",
        field="--cluster",
        remedy="choose one with --cluster NAME",
    )
