"""Declares ``ftd.toml``: tables, keys, types, defaults and descriptions; generates the reference page and the
schema.

Every field has a default except ``secret``, which nodes need; ``examples/ftd.toml`` is a commented sample.
The descriptions are the docstrings after the fields, taken from the source, so that the documentation cannot
differ from what is read.
"""

import dataclasses
import json
from functools import cache
from typing import Any

import msgspec

from ftd.config.dashboard import DashboardTable
from ftd.config.metrics import LOOPBACK
from ftd.config.validation import field_descriptions, struct_of
from ftd.transport.address import DEFAULT_CLUSTER
from statemachine.hardware import HealthLimits, QuarantineLimits
from statemachine.timing import Timing

VARIABLE_PREFIX = "FTD_"
"""Prefix of the environment variables that set keys."""
_BROKER_URL = "FTD_BROKER"
"""Environment variable that sets ``broker.url``."""
SECRETS = frozenset({"secret", "broker.password", "dashboard.token"})
"""Keys whose values are never shown."""


class BrokerTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``[broker]``: the MQTT broker that all daemons of the cluster connect to."""

    url: str = "mqtt://127.0.0.1:1883"
    """Address of the broker, for example ``mqtts://host:8883`` for TLS."""
    username: str | None = None
    """User name at the broker. Default: anonymous."""
    password: str | None = None
    """Password at the broker. Prefer ``password_file`` or the environment."""
    password_file: str | None = None
    """File with the password, which others must not be able to read; relative to ftd.toml."""
    ca_file: str | None = None
    """Certificates (PEM) of the trusted authorities for ``mqtts``. Default: those of the system."""
    cert_file: str | None = None
    """Certificate (PEM) of this client for ``mqtts``, if the broker requires one."""
    key_file: str | None = None
    """Private key of ``cert_file``, in a file that others must not be able to read."""


class NodeTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``[node]``: the node of this host."""

    name: str | None = None
    """Name of the node, unique in the cluster and the same after a restart. Default: the name of the host."""
    devices: int = 1
    """Number of trainers to run: one per GPU, or per simulated device on a CPU."""
    host: str | None = None
    """Address where the other nodes reach this one. Default: this host's address on the route to the broker."""
    rendezvous_port: int = 0
    """Port where trainers of this and other nodes meet; 0 takes a free one. Set it if a firewall needs a fixed
    port.
    """
    chaos: bool = False
    """Whether to accept the faults that ``ftd chaos`` injects. Set it only for tests."""
    runtime_dir: str | None = None
    """Directory for sockets and logs of the trainers. Default: the user's runtime directory."""
    preload: tuple[str, ...] = ("transformers",)
    """Modules that jobs import, loaded once for all trainers before jobs arrive. Modules that are not installed
    are skipped.
    """
    compile_cache_dir: str | None = None
    """Directory where torch.compile's output is kept for restarts, joins and later jobs; trainers execute it.
    Default: ``~/.cache/ftd/compiled``.
    """
    snapshot_dir: str | None = None
    """Directory for snapshots in a memory file system; they outlive trainers and this daemon. Default: a
    directory in ``/dev/shm``.
    """
    snapshot_limit_mib: int | None = None
    """Memory for the snapshots of all devices together, in MiB. Default: all that the file system has. A snapshot
    agent (``--snapshots-only``) takes no copy and no parity that would exceed it together with the snapshots of
    the scripts on its host.
    """
    device_memory_mib: float | None = None
    """Memory of each device that a job may use on this node, in MiB. Default: all that the device has; unlimited
    on CPUs. A node with less than a job's plan assumes builds nothing and says so.
    """
    snapshot_port: int = 0
    """Port where other nodes read this node's snapshots; 0 takes a free one. Set it if a firewall needs a fixed
    port.
    """
    snapshot_rate_mib_s: int | None = None
    """Largest rate at which snapshots and their copies are sent to other nodes, in MiB/s. Default: no limit."""
    snapshot_tls_cert: str | None = None
    """Certificate (PEM) presented to nodes that read or send snapshots. If it is set, it must be set on every
    node: all of them then use TLS.
    """
    snapshot_tls_key: str | None = None
    """Private key of that certificate, in a file that others must not be able to read."""
    snapshot_tls_ca: str | None = None
    """Authorities (PEM) that must have signed the certificates of the other nodes."""
    checkpoint_rate_mib_s: int | None = None
    """Largest rate at which persistent checkpoints are written, in MiB/s. Default: no limit."""
    scrub_rate_mib_s: int = 256
    """Largest rate at which held snapshots are read to find bits that changed in memory, in MiB/s."""
    snapshot_peers: tuple[str, ...] = ()
    """Other snapshot agents (host:port) to copy scripts' snapshots to if their ranks run on too few hosts."""
    metrics_port: int = 0
    """Port where Prometheus reads /metrics; 0 serves no metrics."""
    metrics_host: str = LOOPBACK
    """Address that metrics are served on; addresses beyond loopback need a token."""
    metrics_token_file: str | None = None
    """File with the bearer token that Prometheus must present, which others must not be able to read."""


class CoordinatorTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``[coordinator]``: a coordinator on this host."""

    name: str | None = None
    """Name of this coordinator, unique among those of the cluster. Default: the name of the host."""
    priority: int = 0
    """Rank among coordinators that could take over: the one with the highest priority does."""
    expected_nodes: int = 0
    """Number of nodes that the cluster is to have. While fewer are ready and there is no job, the cluster's state
    counts them. 0: unknown.
    """
    state_dir: str | None = None
    """Directory of the journal; without the journal, a restarted coordinator knows no job. Default:
    ``~/.local/state/ftd`` and the cluster's name.
    """
    metrics_port: int = 0
    """Port where Prometheus reads /metrics; 0 serves no metrics."""
    metrics_host: str = LOOPBACK
    """Address that metrics are served on; addresses beyond loopback need a token."""
    metrics_token_file: str | None = None
    """File with the bearer token that Prometheus must present, which others must not be able to read."""


class DaemonFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Content of the file as written."""

    cluster: str = DEFAULT_CLUSTER
    """Name of the cluster, and third level of every topic; several clusters can share a broker."""
    secret: str | None = None
    """Secret shared by all nodes; trainers must present it at the rendezvous."""
    secret_file: str | None = None
    """File with the secret, which others must not be able to read; relative to ftd.toml."""
    broker: BrokerTable = BrokerTable()
    node: NodeTable = NodeTable()
    coordinator: CoordinatorTable = CoordinatorTable()
    dashboard: DashboardTable = DashboardTable()
    quarantine: QuarantineLimits = QuarantineLimits()
    health: HealthLimits = HealthLimits()
    timing: dict[str, int | float] = {}
    """Overrides of fields of ``statemachine.timing.Timing``."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DaemonKey:
    """One key of the file; ``name`` is dotted, for example ``node.devices``."""

    name: str
    kind: Any
    """Type as declared in the class."""
    default: Any
    meaning: str
    secret: bool
    """Whether the value is never shown."""


@cache
def daemon_keys() -> dict[str, DaemonKey]:
    """Return all keys by name, in the order of the file."""
    found: dict[str, DaemonKey] = {}
    for field in msgspec.structs.fields(DaemonFile):
        if (table := struct_of(field.type)) is not None:
            meanings = field_descriptions(table)
            for inner in msgspec.structs.fields(table):
                _add(found, f"{field.name}.{inner.name}", inner.type, inner.default, meanings)
        elif field.name != "timing":
            _add(found, field.name, field.type, field.default, field_descriptions(DaemonFile))
    meanings = field_descriptions(Timing)
    for limit in dataclasses.fields(Timing):
        _add(found, f"timing.{limit.name}", type(limit.default), limit.default, meanings)
    return found


def daemon_schema() -> dict[str, Any]:
    """Return the JSON Schema (2020-12) of the file, for editors."""
    made: dict[str, Any] = msgspec.json.schema(DaemonFile)
    definitions = made["$defs"]
    tables = {
        field.name: struct.__name__
        for field in msgspec.structs.fields(DaemonFile)
        if (struct := struct_of(field.type)) is not None
    }
    definitions["Timing"] = {
        "type": "object",
        "title": "Timing",
        "description": "Periods and limits, in seconds unless a field counts something.",
        "properties": {},
        "additionalProperties": False,
    }
    definitions["DaemonFile"]["properties"]["timing"] = {"$ref": "#/$defs/Timing"}
    for key in daemon_keys().values():
        table, _, name = key.name.rpartition(".")
        owner = "Timing" if table == "timing" else tables.get(table, "DaemonFile")
        entry = definitions[owner]["properties"].setdefault(name, _of_limit(key))
        if key.meaning:
            entry["description"] = key.meaning
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "ftd.toml",
        **{name: value for name, value in made.items() if name != "$defs"},
        "$defs": definitions,
    }


def render_daemon_reference() -> str:
    """Return the part of docs/reference/keys.md about ``ftd.toml``: every key with its default, variable and
    description.
    """
    lines = [
        "# All keys of ftd.toml",
        "",
        "`ftd config reference` generates this page from the code; [configuration](configuration.md) has examples.",
        "Write a key under the heading of its table (`[node]`). A variable of the environment takes precedence.",
    ]
    table: str | None = None
    for key in daemon_keys().values():
        owner, _, name = key.name.rpartition(".")
        if owner != table:
            table = owner
            title = f"## `[{owner}]`" if owner else "## Top level"
            lines += ["", title, "", "| key | default | variable | description |", "|---|---|---|---|"]
        default = "–" if key.default is None else f"`{json.dumps(key.default)}`"
        meaning = key.meaning.replace("``", "`").replace("|", "\\|")
        lines.append(f"| `{name}` | {default} | `{environment_variable(key.name)}` | {meaning} |")
    return "\n".join(lines) + "\n"


def _of_limit(key: DaemonKey) -> dict[str, Any]:
    kind = "integer" if key.kind is int else "number"
    return {"type": kind, "exclusiveMinimum": 0, "default": key.default}


def _add(found: dict[str, DaemonKey], name: str, kind: Any, default: Any, meanings: dict[str, str]) -> None:
    found[name] = DaemonKey(
        name=name,
        kind=kind,
        default=default,
        meaning=meanings.get(name.rpartition(".")[2], ""),
        secret=name in SECRETS,
    )


def environment_variable(key: str) -> str:
    """Return the variable of a key: ``node.devices`` → ``FTD_NODE_DEVICES``."""
    return _BROKER_URL if key == "broker.url" else VARIABLE_PREFIX + key.replace(".", "_").upper()
