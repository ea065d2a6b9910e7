"""``ftd.toml`` as it is written: tables, keys, types, defaults and meanings, and the pages and the schema made of them.

Every field has a default but ``secret`` (nodes need it); ``examples/ftd.toml`` is a commented sample. The meanings are
the docstrings after the fields, taken from the source: what is shown, checked and written into the schema cannot
differ from what is read.
"""

import dataclasses
import json
from functools import cache
from typing import Any

import msgspec

from ftd.config.dashboard import DashboardTable
from ftd.config.metrics import LOOPBACK
from ftd.config.validation import field_descriptions
from ftd.transport.address import DEFAULT_CLUSTER
from statemachine.timing import Timing

VARIABLE_PREFIX = "FTD_"
"""Prefix of the variables of the environment that replace keys."""
_BROKER_URL = "FTD_BROKER"
"""Variable that replaces ``broker.url``."""
SECRETS = frozenset({"secret", "broker.password", "dashboard.token"})
"""Keys whose values are never shown."""


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
    preload: tuple[str, ...] = ("transformers",)
    """Modules that jobs import, loaded once for all trainers, before jobs come; left out where not installed."""
    compile_cache_dir: str | None = None
    """What torch.compile made is kept here for restarts, joins and later jobs; trainers execute it."""
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
class DaemonKey:
    """One key. ``name`` is dotted: ``node.devices``."""

    name: str
    kind: Any
    """Its type, as written in the class."""
    default: Any
    meaning: str
    secret: bool
    """Its value is never shown."""


@cache
def daemon_keys() -> dict[str, DaemonKey]:
    """All of them, in the order of the file."""
    found: dict[str, DaemonKey] = {}
    for field in msgspec.structs.fields(DaemonFile):
        if isinstance(field.type, type) and issubclass(field.type, msgspec.Struct):
            meanings = field_descriptions(field.type)
            for inner in msgspec.structs.fields(field.type):
                _add(found, f"{field.name}.{inner.name}", inner.type, inner.default, meanings)
        elif field.name != "timing":
            _add(found, field.name, field.type, field.default, field_descriptions(DaemonFile))
    meanings = field_descriptions(Timing)
    for limit in dataclasses.fields(Timing):
        _add(found, f"timing.{limit.name}", type(limit.default), limit.default, meanings)
    return found


def daemon_schema() -> dict[str, Any]:
    """JSON Schema (2020-12) of the file, for editors."""
    made: dict[str, Any] = msgspec.json.schema(DaemonFile)
    definitions = made["$defs"]
    tables = {field.name: field.type.__name__ for field in _tables()}
    definitions["Timing"] = {
        "type": "object",
        "title": "Timing",
        "description": "Periods and limits; seconds unless a field counts something.",
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
    """docs/reference/keys.md: every key, its default, its variable, what it means."""
    lines = [
        "# All keys of ftd.toml",
        "",
        "Made of the schema by `ftd config reference`; [configuration](configuration.md) shows them at work.",
        "A key stands under its table's name (`[node]`); a variable of the environment wins over it.",
    ]
    table: str | None = None
    for key in daemon_keys().values():
        owner, _, name = key.name.rpartition(".")
        if owner != table:
            table = owner
            title = f"## `[{owner}]`" if owner else "## At the top"
            lines += ["", title, "", "| key | default | variable | meaning |", "|---|---|---|---|"]
        default = "–" if key.default is None else f"`{json.dumps(key.default)}`"
        meaning = key.meaning.replace("``", "`").replace("|", "\\|")
        lines.append(f"| `{name}` | {default} | `{environment_variable(key.name)}` | {meaning} |")
    return "\n".join(lines) + "\n"


def _of_limit(key: DaemonKey) -> dict[str, Any]:
    kind = "integer" if key.kind is int else "number"
    return {"type": kind, "exclusiveMinimum": 0, "default": key.default}


def _tables() -> list[Any]:
    return [
        field
        for field in msgspec.structs.fields(DaemonFile)
        if isinstance(field.type, type) and issubclass(field.type, msgspec.Struct)
    ]


def _add(found: dict[str, DaemonKey], name: str, kind: Any, default: Any, meanings: dict[str, str]) -> None:
    found[name] = DaemonKey(
        name=name,
        kind=kind,
        default=default,
        meaning=meanings.get(name.rpartition(".")[2], ""),
        secret=name in SECRETS,
    )


def environment_variable(key: str) -> str:
    """``node.devices`` → ``FTD_NODE_DEVICES``."""
    return _BROKER_URL if key == "broker.url" else VARIABLE_PREFIX + key.replace(".", "_").upper()
