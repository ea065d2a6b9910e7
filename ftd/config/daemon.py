"""Reads and checks ``ftd.toml`` and the environment: one configuration for the coordinator and the nodes of a
cluster.

Each daemon uses the part that concerns it. ``FTD_NODE_DEVICES=8`` stands for ``devices = 8`` under
``[node]``. ``FTD_CLUSTER``, ``FTD_SECRET`` and ``FTD_SECRET_FILE`` are the keys without a table, and
``FTD_BROKER`` is ``broker.url``, which commands read as well. A variable that begins with the prefix of a
table but names no key is an error: a misspelled setting that is silently ignored is worse than a daemon that
does not start.
"""

import contextlib
import copy
import dataclasses
import ipaddress
import os
import socket
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, get_origin

import msgspec

from ftd.config.daemon_file import (
    SECRETS,
    VARIABLE_PREFIX,
    BrokerTable,
    CoordinatorTable,
    DaemonFile,
    DaemonKey,
    NodeTable,
    daemon_keys,
    environment_variable,
)
from ftd.config.dashboard import DashboardAddress, dashboard_address
from ftd.config.error_collector import ErrorCollector
from ftd.config.metrics import MetricsAddress, metrics_address
from ftd.config.secrets import require_private, secret_or_file
from ftd.config.shard_tls import ShardTls, shard_tls
from ftd.config.validation import (
    keep_valid_fields,
    problem_words,
    read_toml,
    require_memory,
    require_name,
    require_positive,
    suggest_name,
)
from ftd.errors import ConfigurationError, IncompleteError
from ftd.transport.address import (
    HIDDEN,
    BrokerAddress,
    Tls,
    hide_password,
    is_host,
    parse_broker,
    user_runtime_dir,
)
from ftd.transport.tls import tls_context
from statemachine.hardware import DEFAULT_LIMITS, HardwareLimits
from statemachine.timing import Timing


def _require_host(host: str, field: str) -> None:
    is_address = False
    with contextlib.suppress(ValueError):
        is_address = ipaddress.ip_address(host) is not None
    # Brackets, a port or a scheme are no part of a host.
    if host and not is_address and (not is_host(host) or set("[]:/ ") & set(host)):
        raise ConfigurationError(
            f"{host!r} is not a valid host", field=field, remedy="write a host name or an IP address"
        )


def _require_port(port: int, field: str) -> None:
    if not 0 <= port <= 65535:
        raise ConfigurationError(f"{port} is not a valid port", field=field, remedy="write 0 to 65535")


def _require_peers(peers: tuple[str, ...], field: str) -> None:
    for peer in peers:
        host, _, port = peer.rpartition(":")
        if not is_host(host.strip("[]")) or not port.isdecimal() or not 0 < int(port) <= 65535:
            raise ConfigurationError(
                f"{peer!r} is not of the form host:port",
                field=field,
                remedy='write node.host and node.snapshot_port of the other host, for example ["host-b:7130"]',
            )


def _require_count(value: float, field: str) -> None:
    if not 0 <= value < float("inf"):
        problem = f"{value} is negative" if value < 0 else f"{value} is not allowed"
        raise ConfigurationError(problem, field=field, remedy="write 0 or more")


def _require_share(value: float, field: str) -> None:
    if not 0 <= value <= 1:
        raise ConfigurationError(f"{value} is not a share", field=field, remedy="write 0 to 1, such as 0.25")


_REQUIRED: dict[Callable[[Any, str], None], tuple[str, ...]] = {
    require_name: ("cluster", "coordinator.name", "node.name"),
    _require_host: ("node.host", "node.metrics_host", "coordinator.metrics_host"),
    _require_port: ("node.rendezvous_port", "node.snapshot_port"),
    require_memory: ("node.device_memory_mib", "node.snapshot_limit_mib"),
    require_positive: (
        "node.devices",
        "node.snapshot_rate_mib_s",
        "node.checkpoint_rate_mib_s",
        "node.scrub_rate_mib_s",
        "quarantine.window_s",
        "health.limit_s",
    ),
    _require_count: (
        "coordinator.expected_nodes",
        "quarantine.failures",
        "health.every_s",
        "health.min_others",
    ),
    _require_share: ("quarantine.max_share", "health.min_speed", "health.min_link_speed"),
    _require_peers: ("node.snapshot_peers",),
}
"""Checks of single values, with the keys that they apply to."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DaemonConfig:
    """Checked content of ``ftd.toml``, with defaults filled in and absolute paths."""

    cluster: str
    broker: BrokerAddress
    node: str
    devices: int
    host: str
    rendezvous_port: int
    chaos: bool
    runtime_dir: Path
    preload: tuple[str, ...]
    compile_cache_dir: Path
    snapshot_dir: Path
    """This node's own directory below the configured ``node.snapshot_dir``."""
    snapshot_limit_bytes: int | None
    snapshot_port: int
    snapshot_rate_bytes_s: float | None
    snapshot_tls: ShardTls | None
    checkpoint_rate_bytes_s: float | None
    device_memory_bytes: int | None
    """Memory of each device that a job may use; ``None``: all of it."""
    scrub_rate_bytes_s: float
    snapshot_peers: tuple[str, ...]
    node_metrics: MetricsAddress | None
    coordinator: str
    """Name of this coordinator among those of the cluster."""
    priority: int
    expected_nodes: int
    state_dir: Path
    coordinator_metrics: MetricsAddress | None
    dashboard: DashboardAddress | None
    secret: str | None
    hardware: HardwareLimits = DEFAULT_LIMITS
    timing: Timing = dataclasses.field(default_factory=Timing)

    @property
    def listening_host(self) -> str:
        """Address to listen on: loopback stays loopback, and any other host means all interfaces, since its name
        may not be bindable here (NAT, DNS).
        """
        if self.is_on_loopback:
            return self.host
        return "::" if ":" in self.host else "0.0.0.0"

    @property
    def is_on_loopback(self) -> bool:
        """Whether other hosts cannot reach this node, because its host is a loopback address."""
        return self.host in ("127.0.0.1", "::1", "localhost")

    def require_secret(self) -> str:
        """Return the cluster's secret.

        :raises ConfigurationError: there is none; a node must not admit strangers to its rendezvous.
        """
        if not self.secret:
            raise IncompleteError(
                "a node needs the cluster's shared secret",
                field="secret",
                remedy='add secret_file = "secret" to ftd.toml; the file has the same content on every node',
            )
        return self.secret


def load_daemon_config(path: Path | None, *, environment: Mapping[str, str] = os.environ) -> DaemonConfig:
    """Read and check ``ftd.toml`` and the environment, which takes precedence. Without a file, defaults apply.

    :raises ConfigurationError: a value is wrong; the error names each field that is wrong, and the remedy.
    """
    config, collector = examine_daemon_config(path, environment=environment)
    collector.raise_any()
    return config


def examine_daemon_config(
    path: Path | None, *, environment: Mapping[str, str] = os.environ
) -> tuple[DaemonConfig, ErrorCollector]:
    """Return the configuration together with its errors; wrong values are replaced by defaults."""
    config, collector, _, _ = _read(path, environment)
    return config, collector


def _read(
    path: Path | None, environment: Mapping[str, str]
) -> tuple[DaemonConfig, ErrorCollector, dict[str, Any], dict[str, str]]:
    """Return the configuration, its errors, the keys that were given, and the variable of each key that the
    environment sets.
    """
    origins: dict[str, str] = {}
    collector = ErrorCollector(path.name if path else "ftd.toml", origins)
    written: dict[str, Any] = collector.value_or(lambda: read_toml(path) if path else {}, {})
    if path is not None:
        with collector.collect():
            _require_private_secrets(written, path)
    data = _overridden(written, environment, origins, collector)
    directory = path.resolve().parent if path else Path.cwd()
    return _checked(data, directory, collector), collector, data, origins


def _require_private_secrets(written: dict[str, Any], path: Path) -> None:
    """Check that others cannot read a file that contains a secret.

    :raises ConfigurationError: the file contains a secret, and everybody on this host can read it.
    """
    for name in SECRETS:
        table, _, key = name.rpartition(".")
        inner = written.get(table) if table else written
        if isinstance(inner, dict) and key in inner:
            require_private(path, name)
    broker = written.get("broker")
    url = broker.get("url") if isinstance(broker, dict) else None
    if isinstance(url, str) and hide_password(url) != url:
        require_private(path, "broker.url")


def parse_daemon_config(data: dict[str, Any], *, directory: Path, where: str = "ftd.toml") -> DaemonConfig:
    """Return the checked configuration of ``ftd.toml``'s content; relative paths start at ``directory``.

    :raises ConfigurationError: a value is wrong; the error names each field that is wrong, and the remedy.
    """
    collector = ErrorCollector(where)
    config = _checked(data, directory, collector)
    collector.raise_any()
    return config


def _checked(data: dict[str, Any], directory: Path, collector: ErrorCollector) -> DaemonConfig:
    """Return the configuration of ``data``; wrong values become errors and are replaced by defaults."""
    file = msgspec.convert(keep_valid_fields(data, DaemonFile, collector), DaemonFile)
    file = _with_valid_values(file, collector)
    if file.node.snapshot_port and file.node.snapshot_port == file.node.rendezvous_port:
        collector.reject(
            f"{file.node.snapshot_port} is the value of node.rendezvous_port, too",
            field="node.snapshot_port",
            remedy="choose another port, or 0 for any free one",
        )
    broker = _broker(file.broker, directory, collector)
    host = socket.gethostname().split(".")[0]
    node = file.node.name if file.node.name is not None else host
    runtime, snapshots = file.node.runtime_dir, file.node.snapshot_dir
    own = Path() if runtime else collector.value_or(user_runtime_dir, Path("/tmp"))
    state = file.coordinator.state_dir
    tls_files = (file.node.snapshot_tls_cert, file.node.snapshot_tls_key, file.node.snapshot_tls_ca)
    return DaemonConfig(
        cluster=file.cluster,
        broker=broker,
        node=node,
        devices=file.node.devices,
        host=file.node.host or local_address_toward(broker),
        rendezvous_port=file.node.rendezvous_port,
        chaos=file.node.chaos,
        runtime_dir=(directory / runtime) if runtime else own / file.cluster / node,
        preload=file.node.preload,
        compile_cache_dir=(directory / file.node.compile_cache_dir)
        if file.node.compile_cache_dir
        else collector.value_or(_default_compile_cache_dir, Path("/tmp")),
        snapshot_dir=((directory / snapshots) if snapshots else _default_snapshot_dir())
        / f"{file.cluster}-{node}",
        snapshot_limit_bytes=_bytes_of(file.node.snapshot_limit_mib),
        snapshot_port=file.node.snapshot_port,
        snapshot_tls=collector.value_or(lambda: shard_tls(*tls_files, directory), None),
        snapshot_rate_bytes_s=_bytes_of(file.node.snapshot_rate_mib_s),
        checkpoint_rate_bytes_s=_bytes_of(file.node.checkpoint_rate_mib_s),
        device_memory_bytes=None
        if file.node.device_memory_mib is None
        else int(file.node.device_memory_mib * (1 << 20)),
        scrub_rate_bytes_s=float(file.node.scrub_rate_mib_s << 20),
        snapshot_peers=file.node.snapshot_peers,
        node_metrics=collector.value_or(lambda: _metrics("node", file.node, directory), None),
        coordinator=file.coordinator.name if file.coordinator.name is not None else host,
        priority=file.coordinator.priority,
        expected_nodes=file.coordinator.expected_nodes,
        state_dir=(directory / state)
        if state
        else collector.value_or(lambda: _default_state_dir(file.cluster), Path("/tmp")),
        coordinator_metrics=collector.value_or(
            lambda: _metrics("coordinator", file.coordinator, directory), None
        ),
        dashboard=collector.value_or(lambda: dashboard_address(file.dashboard, directory), None),
        secret=collector.value_or(
            lambda: secret_or_file(file.secret, file.secret_file, "secret", directory)[0], None
        ),
        hardware=HardwareLimits(quarantine=file.quarantine, health=file.health),
        timing=_timing(file.timing, collector),
    )


def _with_valid_values(file: DaemonFile, collector: ErrorCollector) -> DaemonFile:
    """Return the file with defaults in place of values that are wrong by themselves."""
    for require, fields in _REQUIRED.items():
        for field in fields:
            table, _, key = field.rpartition(".")
            owner = getattr(file, table) if table else file
            if (value := getattr(owner, key)) is None:
                continue
            try:
                require(value, field)
            except ConfigurationError as error:
                collector.add(error)
                default = next(f.default for f in msgspec.structs.fields(owner) if f.name == key)
                valid = msgspec.structs.replace(owner, **{key: default})
                file = msgspec.structs.replace(file, **{table: valid}) if table else valid
    return file


def _metrics(name: str, table: NodeTable | CoordinatorTable, directory: Path) -> MetricsAddress | None:
    return metrics_address(name, table.metrics_host, table.metrics_port, table.metrics_token_file, directory)


def _bytes_of(mebibytes: int | None) -> int | None:
    return None if mebibytes is None else mebibytes << 20


def _broker(table: BrokerTable, directory: Path, collector: ErrorCollector) -> BrokerAddress:
    password = collector.value_or(lambda: _password(table, directory), None)
    broker = collector.value_or(lambda: parse_broker(table.url), None)
    if broker is None:
        return BrokerAddress(host="localhost")
    if table.username is not None:
        broker = dataclasses.replace(broker, username=table.username, password=password)
    return dataclasses.replace(
        broker, tls=collector.value_or(lambda: _tls(broker, table, directory), broker.tls)
    )


def _password(table: BrokerTable, directory: Path) -> str | None:
    password, field = secret_or_file(table.password, table.password_file, "broker.password", directory)
    if table.username is None and password is not None:
        raise IncompleteError("the password has no username", field=field, remedy="add broker.username")
    return password


def _tls(broker: BrokerAddress, table: BrokerTable, directory: Path) -> Tls | None:
    paths = {name: getattr(table, name) for name in ("ca_file", "cert_file", "key_file")}
    given = {name: directory / path for name, path in paths.items() if path is not None}
    if broker.tls is None and given:
        field, remedy = f"broker.{min(given)}", 'write url = "mqtts://host:8883"'
        raise IncompleteError("it has no effect without TLS", field=field, remedy=remedy)
    if broker.tls is None:
        return None
    if (table.cert_file is None) != (table.key_file is None):
        raise IncompleteError(
            "a certificate and its key go together",
            field="broker.cert_file",
            remedy="write both cert_file and key_file",
        )
    tls = Tls(**given)
    tls_context(tls)  # Reports unusable files now instead of at the first connection.
    return tls


def local_address_toward(broker: BrokerAddress) -> str:
    """Return the local address of the route to the broker: the address where others most likely reach this host.

    Connecting a datagram socket sends nothing. Without a route (offline, unknown name), only loopback works.
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


def _default_snapshot_dir() -> Path:
    """Return a directory in shared memory if there is any; it survives the end of the login session."""
    shared = Path("/dev/shm")
    return (shared if shared.is_dir() else Path("/tmp")) / f"ftd-{os.getuid()}"


def _default_compile_cache_dir() -> Path:
    """Return the user's cache directory; all nodes of this host share it, which torch allows."""
    base = os.environ.get("STATE_DIRECTORY") or os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else _home("node.compile_cache_dir") / ".cache") / "ftd" / "compiled"


def _default_state_dir(cluster: str) -> Path:
    base = os.environ.get("STATE_DIRECTORY") or os.environ.get("XDG_STATE_HOME")
    return (Path(base) if base else _home("coordinator.state_dir") / ".local" / "state") / "ftd" / cluster


def _home(field: str) -> Path:
    """Return the user's home directory.

    :param field: key whose default is below it.
    :raises ConfigurationError: the user has none, as in a container without an entry for the user.
    """
    try:
        return Path.home()
    except RuntimeError:
        raise ConfigurationError(
            "this user has no home directory for the default", field=field, remedy="set it, or set $HOME"
        ) from None


def _timing(overrides: dict[str, int | float], collector: ErrorCollector) -> Timing:
    known = {field.name: field for field in dataclasses.fields(Timing)}
    values: dict[str, Any] = {}
    for name, value in overrides.items():
        field = f"timing.{name}"
        with collector.collect():
            if name not in known:
                remedy = suggest_name(name, list(known))
                raise ConfigurationError("unknown field", field=field, remedy=remedy)
            require_positive(value, field)
            whole = isinstance(known[name].default, int)
            if whole and not float(value).is_integer():
                raise ConfigurationError(
                    f"{value} is not a whole number", field=field, remedy="write a number without a fraction"
                )
            values[name] = int(value) if whole else float(value)
    try:
        return Timing(**values)
    except ValueError as error:
        problem = str(error).removeprefix("timing: ")
        collector.add(ConfigurationError(problem, field="timing"))
        return Timing()


def _overridden(
    data: Mapping[str, Any],
    environment: Mapping[str, str],
    origins: dict[str, str],
    collector: ErrorCollector,
) -> dict[str, Any]:
    """Return the content of ``ftd.toml`` with the values of the environment in place of its own.

    :param origins: receives the variable of each key that the environment sets.
    :param collector: receives variables that name no key, and values of the wrong type.
    """
    result: dict[str, Any] = copy.deepcopy(dict(data))
    for variable, key in _given_variables(environment, collector):
        table, _, name = key.rpartition(".")
        place = result.setdefault(table, {}) if table else result
        try:
            value = _value(environment[variable], daemon_keys()[key].kind, variable)
        except ConfigurationError as error:
            collector.add_invalid_key(error, key)
            continue
        if isinstance(place, dict):  # Otherwise the file has an error there, which is reported anyway.
            place[name] = value
            origins[key] = variable
    return result


def _given_variables(environment: Mapping[str, str], collector: ErrorCollector) -> Iterator[tuple[str, str]]:
    """Yield each variable of the environment that sets a key, together with the key."""
    variables = {environment_variable(key): key for key in daemon_keys()}
    tables = {key.partition(".")[0] for key in daemon_keys() if "." in key}
    for variable in sorted(environment):
        if variable in variables:
            yield variable, variables[variable]
            continue
        for table in tables:
            if variable.startswith(f"{VARIABLE_PREFIX}{table.upper()}_"):
                remedy = suggest_name(variable, list(variables))
                error = ConfigurationError("no such setting", field=f"${variable}", remedy=remedy)
                collector.add_invalid_key(error, f"{table}.{variable}")


def _value(text: str, kind: Any, variable: str) -> Any:
    """Return the text as a value of the key's type; TOML's rules for values apply afterwards.

    The items of a list are separated by commas; an empty text is an empty list.
    """
    if get_origin(kind) is tuple:
        return [item.strip() for item in text.split(",") if item.strip()]
    try:
        return msgspec.convert(text, kind, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigurationError(f"{text!r}: {problem_words(str(error))}", field=f"${variable}") from None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EffectiveSetting:
    """Value of a key as a daemon would use it, and where the value comes from."""

    key: DaemonKey
    shown: Any
    """The value, or a placeholder for a secret; ``None`` if it is not set."""
    origin: str
    """Name of the file, a variable (``$FTD_…``), or ``default``."""


def list_effective_settings(
    path: Path | None, environment: Mapping[str, str] = os.environ
) -> list[EffectiveSetting]:
    """Return the settings of all keys, in the order of the file.

    :raises ConfigurationError: the configuration is wrong.
    """
    _, collector, data, variables = _read(path, environment)
    collector.raise_any()
    return [_setting(key, data, variables, path) for key in daemon_keys().values()]


def _setting(
    key: DaemonKey, data: Mapping[str, Any], variables: Mapping[str, str], path: Path | None
) -> EffectiveSetting:
    table, _, name = key.name.rpartition(".")
    place = data.get(table, {}) if table else data
    given = name in place
    value = place[name] if given else key.default
    if key.name == "broker.url":
        value = hide_password(value)
    if key.name in variables:
        origin = f"${variables[key.name]}"
    else:
        origin = path.name if given and path is not None else "default"
    return EffectiveSetting(
        key=key, shown=HIDDEN if key.secret and value is not None else value, origin=origin
    )
