"""The clusters that ``ftd local`` runs under this user: each has a name, and a file by which commands find it.

The file is ``local-NAME.json`` in the user's runtime directory. It counts while the process that wrote it runs; the
next ``ftd local`` removes the files of processes that have ended.
"""

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

import msgspec

from ftd.config.reading import require_name
from ftd.errors import ConfigurationError
from ftd.transport.address import DEFAULT_CLUSTER, ClusterAddress, parse_broker, user_runtime_dir

_PREFIX = "local-"


class LocalCluster(msgspec.Struct, frozen=True, kw_only=True):
    """Content of the file of a local cluster."""

    cluster: str
    """Name of the cluster."""
    job: str
    """Path of the job file."""
    pid: int
    """Process of ``ftd local``."""
    started: int
    """Start time of that process in clock ticks since boot: a later process of the same pid has another one."""
    broker: str | None = None
    """URL of the broker; ``None`` while the cluster starts or ends."""

    @property
    def address(self) -> ClusterAddress:
        """:raises ConfigurationError: the file has no broker, or one that makes no sense."""
        return ClusterAddress(
            broker=parse_broker(self.broker or "", str(_file(self.cluster))), cluster=self.cluster
        )

    def __str__(self) -> str:
        return f"{self.cluster} ({self.job}, process {self.pid})"


class Announcement:
    """The name of a local cluster, and its file while a ``claimed`` block runs."""

    def __init__(self, content: LocalCluster) -> None:
        self._content = content

    @property
    def cluster(self) -> str:
        """Name of the cluster."""
        return self._content.cluster

    @contextlib.contextmanager
    def reachable(self, broker_url: str) -> Iterator[None]:
        """Let commands find the cluster at this broker while the block runs."""
        _write(msgspec.structs.replace(self._content, broker=broker_url))
        try:
            yield
        finally:
            _write(self._content)


@contextlib.contextmanager
def claimed(name: str | None, job: Path) -> Iterator[Announcement]:
    """Reserve a name for a cluster of this process; the name is free again after the block.

    :param name: the wanted name; ``None``: ``ftd``, or ``ftd-2`` and so on where clusters of these names are running.
    :raises ConfigurationError: a running cluster has the wanted name, or it is not a valid name.
    """
    if name is not None:
        require_name(name, "--cluster")
    with _exclusive():
        running = {cluster.cluster: cluster for cluster in _running(remove=True)}
        if name in running:
            raise ConfigurationError(
                f"a local cluster of this name is running: {running[name]}",
                field="--cluster",
                remedy="choose another name, or leave --cluster out",
            )
        number = 1
        while name is None or name in running:
            name = DEFAULT_CLUSTER if number == 1 else f"{DEFAULT_CLUSTER}-{number}"
            number += 1
        content = LocalCluster(
            cluster=name, job=str(job), pid=os.getpid(), started=_start_time(os.getpid()) or 0
        )
        _write(content)
    try:
        yield Announcement(content)
    finally:
        _file(name).unlink(missing_ok=True)


def reachable_clusters() -> list[LocalCluster]:
    """Return the local clusters that are running and have a broker, sorted by name."""
    return [cluster for cluster in _running() if cluster.broker is not None]


def _running(*, remove: bool = False) -> list[LocalCluster]:
    """Return the clusters whose processes run. :param remove: remove the files of the others."""
    found = []
    for path in user_runtime_dir().glob(f"{_PREFIX}*.json"):
        try:
            cluster = msgspec.json.decode(path.read_bytes(), type=LocalCluster)
        except (OSError, msgspec.DecodeError):
            cluster = None
        if cluster is not None and _start_time(cluster.pid) == cluster.started:
            found.append(cluster)
        elif remove:
            path.unlink(missing_ok=True)
    return sorted(found, key=lambda cluster: cluster.cluster)


def _start_time(pid: int) -> int | None:
    """Return the start time of a process in clock ticks since boot; ``None`` when it has ended (proc(5), ``stat``)."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if state in "ZX" else int(fields[18])


def _file(name: str) -> Path:
    return user_runtime_dir() / f"{_PREFIX}{name}.json"


def _write(content: LocalCluster) -> None:
    """Replace the file of the cluster; a reader sees the old or the new content."""
    path = _file(content.cluster)
    partial = path.with_suffix(f".{os.getpid()}")
    partial.write_bytes(msgspec.json.encode(content))
    partial.replace(path)


@contextlib.contextmanager
def _exclusive() -> Iterator[None]:
    """Let no other process of this user claim a name meanwhile."""
    descriptor = os.open(user_runtime_dir(), os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
