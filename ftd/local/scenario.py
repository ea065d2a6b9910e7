"""A chaos scenario: which fault happens when. Read from TOML, checked, plain values afterwards.

Example::

    [[fault]]
    at_step = 20            # or after_s = 3.0, or on_event = "PlanChosen" (with occurrence = 2)
    do = "kill"             # kill | term | stop | hang | slow | flip | disconnect, or by ftd local alone:
                            # start | kill_coordinator | kill_broker
    nodes = ["node-2"]      # or node = "node-2"
    target = "node"         # kill, stop: the whole "node" (daemon and trainers) or one "trainer"
    device = 0              # with target = "trainer", for hang, slow, flip; left out: all of the node's
    for_s = 2.0             # hang, slow, disconnect, stop: how long
    factor = 3.0            # slow: computing takes so many times as long
    restart_after_s = 0.5   # kill_coordinator, kill_broker: how long it stays away

``start``, ``kill_coordinator`` and ``kill_broker`` need the processes in hand, so only ``ftd local`` does
them; the others travel over MQTT and work against any cluster whose nodes allow chaos.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import msgspec

from ftd.config.reading import convert, read_toml, require_name
from ftd.errors import ConfigurationError

NodeFault = Literal["kill", "term", "stop", "hang", "slow", "flip", "disconnect"]
"""Faults that a node does to itself when it is asked over MQTT."""
LocalFault = Literal["start", "kill_coordinator", "kill_broker"]
"""Faults of ``ftd local`` alone."""
Target = Literal["node", "trainer"]

NODE_FAULTS: tuple[str, ...] = get_args(NodeFault)
LOCAL_FAULTS: tuple[str, ...] = get_args(LocalFault)
_TIMED_FAULTS = ("stop", "hang", "slow", "disconnect")
_TARGETED_FAULTS = ("kill", "stop")
_TRIGGERS = ("at_step", "after_s", "on_event")


@dataclass(frozen=True, slots=True, kw_only=True)
class AtStep:
    """Fires when ``step`` or a later one is committed."""

    step: int

    def __str__(self) -> str:
        return f"at step {self.step}"


@dataclass(frozen=True, slots=True, kw_only=True)
class AfterTime:
    """Fires ``delay_s`` after the scenario began."""

    delay_s: float

    def __str__(self) -> str:
        return f"after {self.delay_s:g} s"


@dataclass(frozen=True, slots=True, kw_only=True)
class OnEvent:
    """Fires at the ``occurrence``-th event of this name since the scenario began."""

    event: str
    occurrence: int

    def __str__(self) -> str:
        times = f" number {self.occurrence}" if self.occurrence > 1 else ""
        return f"on {self.event}{times}"


Trigger = AtStep | AfterTime | OnEvent


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One line of a scenario; with several ``nodes`` it strikes them at the same moment."""

    trigger: Trigger
    do: NodeFault | LocalFault
    nodes: tuple[str, ...] = ()
    target: Target = "node"
    device: int | None = None
    """``None``: every trainer of the node."""
    for_s: float | None = None
    """``None``: for ever (stop, slow), or the fault's own default (hang, disconnect)."""
    factor: float | None = None
    restart_after_s: float = 0.0

    def __str__(self) -> str:
        what = f"{self.do} {', '.join(self.nodes)}".strip()
        if self.target == "trainer":
            what += " (trainers)" if self.device is None else f" (trainer {self.device})"
        return f"{self.trigger}: {what}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    faults: tuple[Fault, ...] = ()

    @property
    def local_faults(self) -> tuple[Fault, ...]:
        """Those that only ``ftd local`` can do."""
        return tuple(f for f in self.faults if f.do in LOCAL_FAULTS)


class _FaultTable(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    do: NodeFault | LocalFault
    at_step: int | None = None
    after_s: float | None = None
    on_event: str | None = None
    occurrence: int | None = None
    node: str | None = None
    nodes: tuple[str, ...] | None = None
    target: Target | None = None
    device: int | None = None
    for_s: float | None = None
    factor: float | None = None
    restart_after_s: float | None = None


class _ScenarioTable(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    fault: list[dict[str, Any]]


def load_scenario(path: Path) -> Scenario:
    """Read and check a scenario file.

    :raises ConfigurationError: it cannot be read, or a fault makes no sense; names the file, the fault and
        the field, and says what would work.
    """
    return parse_scenario(read_toml(path), path.name)


def parse_scenario(data: dict[str, Any], origin: str) -> Scenario:
    """The same for a table already read; ``origin`` stands in error messages."""
    entries = convert(data, _ScenarioTable, where=origin).fault
    return Scenario(faults=tuple(_fault(entry, f"{origin}: fault {n}") for n, entry in enumerate(entries, 1)))


def _fault(entry: dict[str, Any], where: str) -> Fault:
    table = convert(entry, _FaultTable, where=where)
    trigger = _trigger(table, where)
    nodes = _nodes(table, where)
    _refuse_idle_fields(table, where)
    for name, value in (("for_s", table.for_s), ("restart_after_s", table.restart_after_s)):
        if value is not None and value < 0:
            raise ConfigurationError(f"{value:g} is negative", field=f"{where}: {name}")
    if table.factor is not None and table.factor < 1:
        raise ConfigurationError(
            f"{table.factor:g}; 1 is as quick as it is, 3 takes three times as long", field=f"{where}: factor"
        )
    if table.device is not None and table.device < 0:
        raise ConfigurationError(f"{table.device}; devices are numbered from 0", field=f"{where}: device")
    return Fault(
        trigger=trigger,
        do=table.do,
        nodes=nodes,
        target=_target(table),
        device=table.device,
        for_s=table.for_s,
        factor=table.factor,
        restart_after_s=table.restart_after_s or 0.0,
    )


def _trigger(table: _FaultTable, where: str) -> Trigger:
    given = [name for name in _TRIGGERS if getattr(table, name) is not None]
    if len(given) != 1:
        found = " and ".join(given) if given else "none of them"
        raise ConfigurationError(
            f"{where}: give exactly one of at_step, after_s, on_event to say when; found {found}"
        )
    if table.occurrence is not None and table.on_event is None:
        raise ConfigurationError(f"{where}: occurrence belongs to on_event, not to {given[0]}")
    if table.at_step is not None:
        _require(table.at_step >= 1, f"{where}: at_step is {table.at_step}; the first committed step is 1")
        return AtStep(step=table.at_step)
    if table.after_s is not None:
        _require(table.after_s >= 0, f"{where}: after_s is {table.after_s:g}; it must not be negative")
        return AfterTime(delay_s=table.after_s)
    occurrence = 1 if table.occurrence is None else table.occurrence
    _require(occurrence >= 1, f"{where}: occurrence is {occurrence}; the first one is number 1")
    return OnEvent(event=table.on_event or "", occurrence=occurrence)


def _nodes(table: _FaultTable, where: str) -> tuple[str, ...]:
    if table.node is not None and table.nodes is not None:
        raise ConfigurationError(f"{where}: give node or nodes, not both")
    nodes = (table.node,) if table.node is not None else (table.nodes or ())
    if table.do in ("kill_coordinator", "kill_broker"):
        _require(not nodes, f"{where}: {table.do} strikes no node; remove node")
    else:
        _require(bool(nodes), f'{where}: {table.do} needs a node, for example node = "node-1"')
    _require(len(set(nodes)) == len(nodes), f"{where}: nodes names one node twice")
    for node in nodes:
        require_name(node, f"{where}: node")
    return tuple(nodes)


def _target(table: _FaultTable) -> Target:
    if table.target is not None:
        return table.target
    return "trainer" if table.do in ("stop", "hang", "slow", "flip") else "node"


def _refuse_idle_fields(table: _FaultTable, where: str) -> None:
    """A field that would have no effect is a misunderstanding; say so instead of ignoring it."""
    rules: tuple[tuple[str, Callable[[], bool], str], ...] = (
        ("target", lambda: table.do in _TARGETED_FAULTS, "kill and stop"),
        (
            "device",
            lambda: table.do in ("kill", "stop", "hang", "slow", "flip") and _target(table) == "trainer",
            'hang, slow and flip, and to kill and stop with target = "trainer"',
        ),
        ("for_s", lambda: table.do in _TIMED_FAULTS, "stop, hang, slow and disconnect"),
        ("factor", lambda: table.do == "slow", "slow"),
        ("restart_after_s", lambda: table.do.startswith("kill_"), "kill_coordinator and kill_broker"),
    )
    for name, applies, owners in rules:
        if getattr(table, name) is not None and not applies():
            raise ConfigurationError(f"{where}: {name} has no effect on {table.do}; it belongs to {owners}")


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise ConfigurationError(message)
