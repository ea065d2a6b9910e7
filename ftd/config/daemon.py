"""``ftd.toml``: one file for the coordinator and the nodes of a cluster; each reads what concerns it.

Every field has a default but ``secret`` (nodes need it); ``examples/ftd.toml`` is a commented sample.
"""

import dataclasses
import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from ftd.config.address import (
    DEFAULT_CLUSTER,
    BrokerAddress,
    Tls,
    is_host,
    parse_broker,
    user_runtime_dir,
)
from ftd.config.dashboard import DashboardPlace, DashboardTable, dashboard_place
from ftd.config.environment import overridden
from ftd.config.metrics import LOOPBACK, MetricsPlace, metrics_place
from ftd.config.reading import convert, nearest, read_toml, require_name, require_positive
from ftd.config.secrets import read_secret, require_private
from ftd.config.shard_tls import ShardTls, shard_tls
from ftd.config.tls import tls_context
from ftd.errors import ConfigurationError
from statemachine.timing import Timing


class BrokerTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``[broker]``: the MQTT broker that everybody of the cluster meets at."""

    url: str = "mqtt://127.0.0.1:1883"
    """``mqtts://host:8883`` for TLS."""
    username: str | None = None
    """Left out: anonymous."""
    password: str | None = None
    """Better in a file, or in the environment."""
    password_file: str | None = None
    """The password in a file that others cannot read; relative to ftd.toml."""
    ca_file: str | None = None
    """``mqtts``: certificates (PEM) of the authorities to believe; left out: those of the system."""
    cert_file: str | None = None
    """``mqtts``: this client's own certificate (PEM), where the broker asks for one."""
    key_file: str | None = None
    """The private key of ``cert_file``, in a file that others cannot read."""


class NodeTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``[node]``: this host."""

    name: str | None = None
    """Unique in the cluster, and the same after a restart; by default the host's name."""
    devices: int = 1
    """Trainers to run: one for each GPU, or simulated devices on a CPU."""
    host: str | None = None
    """Address under which the other nodes reach this one; by default that of the way to the broker."""
    rendezvous_port: int = 0
    """Where this node's trainers and those of others meet; 0 takes a free one, a firewall wants it fixed."""
    chaos: bool = False
    """Obey ``ftd chaos``: faults on demand. Off unless this is a test."""
    runtime_dir: str | None = None
    """Sockets and logs of the trainers."""
    snapshot_dir: str | None = None
    """Where snapshots are kept: in a memory file system. They outlive trainers and this daemon."""
    snapshot_limit_mib: int | None = None
    """Memory that they may take, of all devices together; left out: what the file system has."""
    snapshot_port: int = 0
    """Where other nodes read this one's snapshots; 0 takes a free one, a firewall wants it fixed."""
    snapshot_rate_mib_s: int | None = None
    """At most so much is sent to them in a second, copies too; left out: what the network gives."""
    snapshot_tls_cert: str | None = None
    """PEM: shown to other nodes that read or send snapshots; then they speak TLS, all of them."""
    snapshot_tls_key: str | None = None
    """Of that certificate, in a file that others cannot read."""
    snapshot_tls_ca: str | None = None
    """PEM: the authorities that other nodes' certificates are to be of."""
    checkpoint_rate_mib_s: int | None = None
    """At most so much is written to persistent checkpoints in a second; left out: what the place gives."""
    scrub_rate_mib_s: int = 256
    """At most so much of the kept snapshot is read in a second to find bits that changed in memory."""
    snapshot_peers: tuple[str, ...] = ()
    """host:port of keepers that scripts' snapshots are copied to where their ranks' hosts are too few."""
    metrics_port: int = 0
    """Prometheus reads /metrics here; 0: nothing is served."""
    metrics_host: str = LOOPBACK
    """Address to serve them on; beyond loopback only with a token."""
    metrics_token_file: str | None = None
    """A bearer token that Prometheus must show, in a file that others cannot read."""


class CoordinatorTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``[coordinator]``."""

    name: str | None = None
    """Who leads is told by this name; by default the host's."""
    priority: int = 0
    """Of several coordinators that could take over, the one with the greatest does."""
    state_dir: str | None = None
    """Holds the journal; without it a restarted coordinator knows no job."""
    metrics_port: int = 0
    """Prometheus reads /metrics here; 0: nothing is served."""
    metrics_host: str = LOOPBACK
    """Address to serve them on; beyond loopback only with a token."""
    metrics_token_file: str | None = None
    """A bearer token that Prometheus must show, in a file that others cannot read."""


class DaemonFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The file as written."""

    cluster: str = DEFAULT_CLUSTER
    """Clusters may share a broker; the name is the third level of every topic."""
    secret: str | None = None
    """Shared by all nodes: trainers show it when they meet (the rendezvous server asks)."""
    secret_file: str | None = None
    """The same in a file that others cannot read; relative to ftd.toml."""
    broker: BrokerTable = BrokerTable()
    node: NodeTable = NodeTable()
    coordinator: CoordinatorTable = CoordinatorTable()
    dashboard: DashboardTable = DashboardTable()
    timing: dict[str, int | float] = {}
    """Overrides of ``statemachine.timing.Timing``, field by field."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DaemonConfig:
    """``ftd.toml``, checked, defaults filled in, paths absolute."""

    cluster: str
    broker: BrokerAddress
    node: str
    devices: int
    host: str
    rendezvous_port: int
    chaos: bool
    runtime_dir: Path
    snapshot_dir: Path
    """This node's own, below what ``node.snapshot_dir`` says."""
    snapshot_limit_bytes: int | None
    snapshot_port: int
    snapshot_rate_bytes_s: float | None
    snapshot_tls: ShardTls | None
    checkpoint_rate_bytes_s: float | None
    scrub_rate_bytes_s: float
    snapshot_peers: tuple[str, ...]
    node_metrics: MetricsPlace | None
    coordinator: str
    """Its name among the coordinators of the cluster."""
    priority: int
    state_dir: Path
    coordinator_metrics: MetricsPlace | None
    dashboard: DashboardPlace | None
    secret: str | None
    timing: Timing = dataclasses.field(default_factory=Timing)

    def broker_address(self) -> BrokerAddress:
        return self.broker

    def require_secret(self) -> str:
        """:raises ConfigurationError: there is none; a node must not let strangers into its rendezvous."""
        if not self.secret:
            raise ConfigurationError(
                "a node needs the cluster's shared secret",
                field="secret",
                remedy='add secret_file = "secret" to ftd.toml, the same content on every node',
            )
        return self.secret


def load_daemon_config(path: Path | None, *, environment: Mapping[str, str] = os.environ) -> DaemonConfig:
    """Read and check ``ftd.toml``, and what the environment says instead; without a file, the defaults.

    :raises ConfigurationError: names the field and the remedy.
    """
    return load_with_origins(path, environment)[0]


def load_with_origins(
    path: Path | None, environment: Mapping[str, str]
) -> tuple[DaemonConfig, dict[str, Any], dict[str, str]]:
    """The configuration, the keys that were given for it, and for those of the environment the variable.

    :raises ConfigurationError: names the field and the remedy.
    """
    from ftd.config.reference import keys  # It describes the classes of this module.

    kinds = {key.name: key.kind for key in keys().values()}
    written = read_toml(path) if path else {}
    if path is not None:
        _require_kept(written, path)
    data, variables = overridden(written, environment, kinds)
    directory = path.resolve().parent if path else Path.cwd()
    config = daemon_config(data, directory=directory, where=path.name if path else "ftd.toml")
    return config, data, variables


def _require_kept(written: dict[str, Any], path: Path) -> None:
    """:raises ConfigurationError: a secret stands in the file itself, and everybody here can read it."""
    from ftd.config.reference import SECRETS

    for name in SECRETS:
        table, _, key = name.rpartition(".")
        inner = written.get(table) if table else written
        if isinstance(inner, dict) and key in inner:
            require_private(path, name)


def daemon_config(data: dict[str, Any], *, directory: Path, where: str = "ftd.toml") -> DaemonConfig:
    """``ftd.toml``'s content, checked; relative paths start at ``directory``."""
    file = convert(data, DaemonFile, where=where)
    broker = _broker(file.broker, directory)
    host = socket.gethostname().split(".")[0]
    node = file.node.name if file.node.name is not None else host
    coordinator = file.coordinator.name if file.coordinator.name is not None else host
    require_name(file.cluster, "cluster")
    require_name(coordinator, "coordinator.name")
    require_name(node, "node.name")
    require_positive(file.node.devices, "node.devices")
    for field in ("node.host", "node.metrics_host", "coordinator.metrics_host"):
        _require_host(file, field)
    _require_port(file.node.rendezvous_port, "node.rendezvous_port")
    _require_port(file.node.snapshot_port, "node.snapshot_port")
    for field in ("snapshot_limit_mib", "snapshot_rate_mib_s", "checkpoint_rate_mib_s", "scrub_rate_mib_s"):
        if (value := getattr(file.node, field)) is not None:
            require_positive(value, f"node.{field}")
    runtime, snapshots = file.node.runtime_dir, file.node.snapshot_dir
    state = file.coordinator.state_dir
    return DaemonConfig(
        cluster=file.cluster,
        broker=broker,
        node=node,
        devices=file.node.devices,
        host=file.node.host or way_to(broker),
        rendezvous_port=file.node.rendezvous_port,
        chaos=file.node.chaos,
        runtime_dir=(directory / runtime) if runtime else user_runtime_dir() / file.cluster / node,
        snapshot_dir=((directory / snapshots) if snapshots else _default_snapshot_dir())
        / f"{file.cluster}-{node}",
        snapshot_limit_bytes=_bytes_of(file.node.snapshot_limit_mib),
        snapshot_port=file.node.snapshot_port,
        snapshot_tls=shard_tls(
            file.node.snapshot_tls_cert,
            file.node.snapshot_tls_key,
            file.node.snapshot_tls_ca,
            directory,
        ),
        snapshot_rate_bytes_s=_bytes_of(file.node.snapshot_rate_mib_s),
        checkpoint_rate_bytes_s=_bytes_of(file.node.checkpoint_rate_mib_s),
        scrub_rate_bytes_s=float(file.node.scrub_rate_mib_s << 20),
        snapshot_peers=_peers(file.node.snapshot_peers),
        node_metrics=_metrics("node", file.node, directory),
        coordinator=coordinator,
        priority=file.coordinator.priority,
        state_dir=(directory / state) if state else _default_state_dir(file.cluster),
        coordinator_metrics=_metrics("coordinator", file.coordinator, directory),
        dashboard=dashboard_place(file.dashboard, directory),
        secret=_secret(file, directory),
        timing=_timing(file.timing),
    )


def _metrics(name: str, table: NodeTable | CoordinatorTable, directory: Path) -> MetricsPlace | None:
    return metrics_place(name, table.metrics_host, table.metrics_port, table.metrics_token_file, directory)


def _bytes_of(mebibytes: int | None) -> int | None:
    return None if mebibytes is None else mebibytes << 20


def _broker(table: BrokerTable, directory: Path) -> BrokerAddress:
    broker = parse_broker(table.url)
    password, field = table.password, "broker.password"
    if table.password_file is not None:
        if password is not None:
            raise ConfigurationError(
                "both password and password_file", field=field, remedy="keep one of them"
            )
        field = "broker.password_file"
        password = read_secret(directory / table.password_file, field)
    if table.username is not None:
        broker = dataclasses.replace(broker, username=table.username, password=password)
    elif password is not None:
        raise ConfigurationError("a password without a username", field=field, remedy="add both")
    paths = {name: getattr(table, name) for name in ("ca_file", "cert_file", "key_file")}
    if broker.tls is None:
        for name, path in paths.items():
            if path is not None:
                raise ConfigurationError(
                    "of no use without TLS", field=f"broker.{name}", remedy='write url = "mqtts://host:8883"'
                )
        return broker
    if (table.cert_file is None) != (table.key_file is None):
        raise ConfigurationError("a certificate and its key go together", field="broker.cert_file")
    tls = Tls(**{name: directory / path for name, path in paths.items() if path is not None})
    tls_context(tls)  # Now, and not at the first attempt to connect.
    return dataclasses.replace(broker, tls=tls)


def way_to(broker: BrokerAddress) -> str:
    """The local address of the route to the broker: what others most likely reach this host at.

    Connecting a datagram socket sends nothing. Without a route (offline, unknown name) loopback is the
    only address that works at all.
    """
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(
            broker.host, broker.port, type=socket.SOCK_DGRAM
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(target)
            return str(probe.getsockname()[0])
    except OSError:
        return "127.0.0.1"


def _require_host(file: DaemonFile, field: str) -> None:
    table, _, key = field.partition(".")
    host = getattr(getattr(file, table), key)
    if host and not is_host(host):
        raise ConfigurationError(f"{host!r} is no host", field=field, remedy="a name or an address")


def _require_port(port: int, field: str) -> None:
    if not 0 <= port <= 65535:
        raise ConfigurationError(f"{port} is no port", field=field, remedy="0 to 65535")


def _peers(peers: tuple[str, ...]) -> tuple[str, ...]:
    for peer in peers:
        host, _, port = peer.rpartition(":")
        if not is_host(host.strip("[]")) or not port.isdecimal() or not 0 < int(port) <= 65535:
            raise ConfigurationError(
                f"{peer!r} is no host:port",
                field="node.snapshot_peers",
                remedy='for example ["host-b:7130"], its node.host and node.snapshot_port',
            )
    return peers


def _default_snapshot_dir() -> Path:
    """In shared memory, where there is some; it stays when the session ends."""
    shared = Path("/dev/shm")
    return (shared if shared.is_dir() else Path("/tmp")) / f"ftd-{os.getuid()}"


def _default_state_dir(cluster: str) -> Path:
    base = os.environ.get("STATE_DIRECTORY") or os.environ.get("XDG_STATE_HOME")
    return (Path(base) if base else Path.home() / ".local" / "state") / "ftd" / cluster


def _secret(file: DaemonFile, directory: Path) -> str | None:
    if file.secret is not None and file.secret_file is not None:
        raise ConfigurationError("both secret and secret_file", field="secret", remedy="keep one of them")
    if file.secret_file is None:
        return file.secret
    return read_secret(directory / file.secret_file, "secret_file")


def _timing(overrides: dict[str, int | float]) -> Timing:
    known = {field.name: field for field in dataclasses.fields(Timing)}
    values: dict[str, Any] = {}
    for name, value in overrides.items():
        if name not in known:
            raise ConfigurationError(
                "unknown field", field=f"timing.{name}", remedy=nearest(name, list(known))
            )
        require_positive(value, f"timing.{name}")
        whole = isinstance(known[name].default, int)
        if whole and not float(value).is_integer():
            raise ConfigurationError(f"{value} is no whole number", field=f"timing.{name}")
        values[name] = int(value) if whole else float(value)
    try:
        return Timing(**values)
    except ValueError as error:
        raise ConfigurationError(str(error).removeprefix("timing: "), field="timing") from None
