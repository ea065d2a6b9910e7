"""The reader of scenario files: TOML that is checked and turned into the values of
``ftd.faults.chaos.values``. See docs/how-to/chaos.md.

A field that would have no effect is an error, because whoever wrote it expects something else. The error
for an unknown field suggests the nearest known one.
"""

import math
import re
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal, cast

import msgspec

from ftd.config.error_collector import ErrorCollector
from ftd.config.validation import convert, read_toml, require_name, require_one_of
from ftd.errors import ConfigurationError
from ftd.faults.chaos import values as v
from ftd.faults.chaos.expectations import ExpectTable, parse_expectations
from ftd.transport.wire.catalogue import EVENTS
from ftd.transport.wire.public import BadDevice, NodeFault
from statemachine.timing import Timing

_TRIGGERS = ("at_step", "after_s", "on_event", "in_phase", "after_fault")
_TARGETS = ("node", "nodes", "role", "random")
_TRAINER_FAULTS = ("stop", "hang", "raise", "slow", "flip", "corrupt")
"""Faults that target the trainers by default; the others target the node."""
_FIELD_OWNERS: dict[str, tuple[str, ...]] = {
    "target": ("kill", "stop"),
    "device": ("kill", "bad_device", *_TRAINER_FAULTS),
    "for_s": ("stop", "hang", "slow", "bad_device", "disconnect", "lossy", "fill_memory", "fill_disk", "cut"),
    "factor": ("slow",),
    "size_mib": ("fill_memory", "fill_disk"),
    "drop": ("lossy",),
    "duplicate": ("lossy",),
    "late_s": ("lossy",),
    "how": ("bad_device",),
}
_OWN_FIELDS = (
    "delay_s", "device", "for_s", "factor", "size_mib", "drop", "duplicate", "late_s", "how", "restart_after_s",
)  # fmt: skip
"""Fields that a table and its fault have in common; the fault's default counts where the table has none."""
_ROLES = re.compile(
    r"(?P<part>coordinator|broker)|(?P<plain>rank 0|spare)|pipeline (?P<whole>\d+)"
    r"|(?P<end>first stage|last stage)(?: of pipeline (?P<of>\d+))?"
    r"|(?P<owner>owner|owners) of layer (?P<layer>\d+)(?: in pipeline (?P<inside>\d+))?"
)
_ROLE_REMEDY = (
    "coordinator, broker, rank 0, first stage, last stage of pipeline 1, pipeline 1, owner of layer 3, "
    "owner of layer 3 in pipeline 1, owners of layer 3, spare"
)


class FaultTable(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    do: str
    id: str | None = None
    at_step: int | None = None
    after_s: float | None = None
    on_event: str | None = None
    in_phase: str | None = None
    after_fault: str | None = None
    occurrence: int | None = None
    delay_s: float | None = None
    node: str | None = None
    nodes: tuple[str, ...] | None = None
    role: str | None = None
    random: int | None = None
    target: Literal["node", "trainer"] | None = None
    device: int | None = None
    for_s: float | None = None
    factor: float | None = None
    size_mib: int | None = None
    drop: float | None = None
    duplicate: float | None = None
    late_s: float | None = None
    how: BadDevice | None = None
    restart_after_s: float | None = None
    expect: ExpectTable = ExpectTable()


class ScenarioTable(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    fault: list[dict[str, Any]]
    name: str | None = None
    purpose: str = ""
    seed: int = 0
    steps_after: int = 3
    limit_s: float = 300.0
    expect: ExpectTable = ExpectTable()
    cluster: v.ClusterSetup | None = None


def load_scenario(path: Path) -> v.Scenario:
    """Read and check a scenario file.

    :raises ConfigurationError: the file cannot be read or a value is wrong; the error names the file, the
        fault and the field, and says what would work.
    """
    return parse_scenario(read_toml(path), path.name, directory=path.resolve().parent)


def parse_scenario(data: dict[str, Any], origin: str, *, directory: Path = Path()) -> v.Scenario:
    """Check a table that was read already.

    :param origin: the name to use in error messages.
    :param directory: the directory that relative paths start from.
    """
    table = convert(data, ScenarioTable, where=origin)
    mistakes = ErrorCollector()
    for name in ("steps_after", "limit_s"):
        with mistakes.collect():
            require_at_least(0, getattr(table, name), f"{origin}: {name}")
    faults: list[v.Fault] = []
    for number, entry in enumerate(table.fault, 1):
        with mistakes.collect():
            faults.append(_fault(entry, f"fault {number}", origin))
    mistakes.raise_any()
    _check_ids(tuple(faults), origin)
    return v.Scenario(
        name=table.name or origin.removesuffix(".toml"),
        purpose=table.purpose,
        seed=table.seed,
        faults=tuple(faults),
        expect=parse_expectations(table.expect, f"{origin}: expect"),
        steps_after=table.steps_after,
        limit_s=table.limit_s,
        cluster=None if table.cluster is None else _cluster(table.cluster, f"{origin}: cluster", directory),
    )


def require_at_least(least: float, value: float | None, field: str) -> None:
    """:raises ConfigurationError: ``value`` is below ``least`` or not a number."""
    if value is not None and not value >= least:
        problem = f"{value:g} is negative" if value < 0 and least == 0 else f"{value:g} is below {least:g}"
        raise ConfigurationError(problem, field=field, remedy=f"{least:g} or more")


# --- a fault -----------------------------------------------------------------------------------------


def _fault(entry: dict[str, Any], number: str, origin: str) -> v.Fault:
    where = f"{origin}: {number}"
    table = convert(entry, FaultTable, where=where)
    require_one_of(table.do, v.FAULTS, f"{where}: do")
    trigger = _trigger(table, where)
    target = _target(table, where)
    _reject_idle_fields(table, target, where)
    _check_numbers(table, where)
    own: dict[str, Any] = {name: value for name in _OWN_FIELDS if (value := getattr(table, name)) is not None}
    return v.Fault(
        id=table.id or number,
        trigger=trigger,
        do=cast(NodeFault | v.LocalFault, table.do),
        target=target,
        process="node" if isinstance(target, v.CentralService) else _process(table),
        expect=parse_expectations(table.expect, f"{where}: expect"),
        **own,
    )


def _trigger(table: FaultTable, where: str) -> v.Trigger:
    given = [name for name in _TRIGGERS if getattr(table, name) is not None]
    if len(given) != 1:
        found = " and ".join(given) if given else "none of them"
        raise ConfigurationError(
            f"{where}: give exactly one of {', '.join(_TRIGGERS)} to say when; found {found}"
        )
    occurrence = 1 if table.occurrence is None else table.occurrence
    if table.occurrence is not None and given[0] not in ("on_event", "in_phase"):
        raise ConfigurationError(f"{where}: occurrence belongs to on_event and in_phase, not to {given[0]}")
    _require(occurrence >= 1, f"{where}: occurrence is {occurrence}; the first one is number 1")
    if table.at_step is not None:
        _require(table.at_step >= 1, f"{where}: at_step is {table.at_step}; the first committed step is 1")
        return v.AtStep(step=table.at_step)
    if table.after_s is not None:
        _require(table.after_s >= 0, f"{where}: after_s is {table.after_s:g}; it must not be negative")
        _require(table.delay_s is None, f"{where}: delay_s adds to another trigger; make after_s larger")
        return v.AfterTime(delay_s=table.after_s)
    if table.after_fault is not None:
        return v.AfterFault(fault=table.after_fault)
    if table.in_phase is not None:
        require_one_of(table.in_phase, v.PHASES, f"{where}: in_phase")
        return v.InPhase(phase=cast(v.Phase, table.in_phase), occurrence=occurrence)
    require_one_of(table.on_event or "", EVENTS, f"{where}: on_event")
    return v.OnEvent(event=table.on_event or "", occurrence=occurrence)


def _target(table: FaultTable, where: str) -> v.Target:
    given = [name for name in _TARGETS if getattr(table, name) is not None]
    if len(given) > 1:
        raise ConfigurationError(f"{where}: give {' or '.join(given)}, not both")
    if not given:
        raise ConfigurationError(f'{where}: {table.do} needs a target, for example node = "node-1"')
    if table.role is not None:
        return _role(table.role, table.do, where)
    if table.random is not None:
        _require(table.random >= 1, f"{where}: random is {table.random}; it is how many nodes to draw")
        _require(table.do != "start", f"{where}: start needs names; only running nodes can be drawn")
        return v.RandomNodes(count=table.random)
    names = (table.node,) if table.node is not None else (table.nodes or ())
    _require(bool(names), f'{where}: nodes is empty; for example nodes = ["node-1"]')
    _require(len(set(names)) == len(names), f"{where}: nodes names one node twice")
    for name in names:
        require_name(name, f"{where}: node")
    return v.NamedNodes(names=tuple(names))


def _role(role: str, do: str, where: str) -> v.Target:
    match = _ROLES.fullmatch(role)
    if match is None:
        raise ConfigurationError(
            f"{role!r} is not a role", field=f"{where}: role", remedy=f"such as {_ROLE_REMEDY}"
        )
    _require(do != "start", f"{where}: start needs names; a role belongs to a node that is running")
    if match["part"]:
        _require(
            do in v.SERVICE_FAULTS,
            f"{where}: {do} cannot be done to the {role}; {' and '.join(v.SERVICE_FAULTS)} can",
        )
        return v.CentralService(service=cast(v.Service, role))
    if match["owner"]:
        _require(
            match["owner"] == "owner" or match["inside"] is None,
            f"{where}: owners are in all pipelines; for one of them write owner",
        )
        place = cast(v.RolePosition, match["owner"])
        return v.PlanRole(position=place, pipeline=int(match["inside"] or 0), layer=int(match["layer"]))
    if match["end"]:
        return v.PlanRole(position=cast(v.RolePosition, match["end"]), pipeline=int(match["of"] or 0))
    if match["whole"]:
        return v.PlanRole(position="pipeline", pipeline=int(match["whole"]))
    return v.PlanRole(position=cast(v.RolePosition, role))


def _process(table: FaultTable) -> v.Process:
    if table.target is not None:
        return table.target
    return "trainer" if table.do in _TRAINER_FAULTS else "node"


def _reject_idle_fields(table: FaultTable, target: v.Target, where: str) -> None:
    """Reject fields that would have no effect, because whoever wrote them expects something else."""
    central = isinstance(target, v.CentralService)
    for name, owners in _FIELD_OWNERS.items():
        if getattr(table, name) is None:
            continue
        if table.do not in owners or (name in ("target", "device") and central):
            raise ConfigurationError(
                f"{where}: {name} has no effect on {table.do}{f' of {target}' if central else ''}; "
                f"it belongs to {', '.join(owners)}"
            )
    if table.device is not None and table.do == "kill" and _process(table) == "node":
        raise ConfigurationError(
            f'{where}: device has no effect on kill of a whole node; it belongs to target = "trainer"'
        )
    if table.restart_after_s is not None and not (central and table.do == "kill"):
        raise ConfigurationError(
            f"{where}: restart_after_s has no effect on {table.do}; it belongs to kill of the "
            "coordinator or the broker; a node is started again by start"
        )
    if table.do == "lossy" and not (table.drop or table.duplicate or table.late_s):
        raise ConfigurationError(f"{where}: lossy needs drop, duplicate or late_s")
    if table.do == "stop" and central and table.for_s is None:
        raise ConfigurationError(f"{where}: stop of the {table.role} needs for_s: nothing else continues it")


def _check_numbers(table: FaultTable, where: str) -> None:
    for name in ("restart_after_s", "delay_s", "late_s"):
        require_at_least(0, getattr(table, name), f"{where}: {name}")
    if table.for_s is not None and not 0 < table.for_s < math.inf:
        raise ConfigurationError(
            f"{table.for_s:g} is not a duration", field=f"{where}: for_s", remedy="write seconds above 0"
        )
    for name in ("drop", "duplicate"):
        value = getattr(table, name)
        if value is not None and not 0 <= value <= 1:
            raise ConfigurationError(f"{value:g}; a probability is 0 to 1", field=f"{where}: {name}")
    require_at_least(1, table.size_mib, f"{where}: size_mib")
    if table.factor is not None and table.factor < 1:
        raise ConfigurationError(
            f"{table.factor:g}; 1 is normal speed, 3 takes three times as long", field=f"{where}: factor"
        )
    if table.device is not None and table.device < 0:
        raise ConfigurationError(f"{table.device}; devices are numbered from 0", field=f"{where}: device")


def _check_ids(faults: tuple[v.Fault, ...], origin: str) -> None:
    seen: list[str] = []
    for number, fault in enumerate(faults, 1):
        where = f"{origin}: fault {number}"
        _require(fault.id not in seen, f"{where}: two faults have the id {fault.id!r}")
        if isinstance(fault.trigger, v.AfterFault):
            others = seen or ["none: the first fault needs another trigger"]
            require_one_of(fault.trigger.fault, others, f"{where}: after_fault")
        seen.append(fault.id)


# --- the cluster ---------------------------------------------------------------------------------------


def _cluster(table: v.ClusterSetup, where: str, directory: Path) -> v.ClusterSetup:
    for name in ("nodes", "coordinators", "devices_per_node", "steps", "memory_mib", "disk_mib"):
        require_at_least(1, getattr(table, name), f"{where}.{name}")
    if table.network and table.broker != "mosquitto":
        raise ConfigurationError(
            f"network needs a broker that other hosts reach, not {table.broker}",
            field=f"{where}.broker",
            remedy='write "mosquitto"',
        )
    known = [field.name for field in fields(Timing)]
    for name, value in table.timing.items():
        require_one_of(name, known, f"{where}.timing")
        require_at_least(0, value, f"{where}.timing.{name}")
    return msgspec.structs.replace(table, job=str(directory / table.job))


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise ConfigurationError(message)
