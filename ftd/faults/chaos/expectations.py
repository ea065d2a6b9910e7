"""The ``expect`` tables of a scenario, read and checked."""

from collections.abc import Collection
from typing import Any, Literal

import msgspec

from ftd.config.validation import require_name, require_one_of
from ftd.errors import ConfigurationError
from ftd.faults.chaos import values as v
from ftd.observe.view.text import CAUSE_WORDS
from ftd.transport.wire.catalogue import EVENTS
from statemachine.messages.values import ClusterPhase, NodeState

TIERS = ("none", "live_replica", "replica", "memory", "decoded", "buddy", "persistent")
RELATIVE = 1e-6
"""The default relative difference that losses may have: other layouts add numbers in another order."""


class ExpectTable(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    """The table ``[expect]`` of a scenario, or ``expect`` of one fault."""

    resumed_within_s: float | None = None
    lost_steps_max: int | None = None
    recomputed_steps_max: int | None = None
    tier: str | tuple[str, ...] = ()
    cause: str | tuple[str, ...] = ()
    recoveries_max: int | None = None
    events: tuple[str, ...] = ()
    no_events: tuple[str, ...] = ()
    nodes: dict[str, str] = {}
    phase: str | None = None
    finishes: bool = False
    same_losses: bool | float = False


def parse_expectations(table: ExpectTable, where: str) -> tuple[v.Expectation, ...]:
    """Return the expectations of a table, in the order of its fields.

    :raises ConfigurationError: an event, a state or a number is not possible.
    """
    found: list[v.Expectation] = []
    for name, kind in _LIMITS.items():
        value = getattr(table, name)
        if value is None:
            continue
        _require_at_least_0(value, f"{where}.{name}")
        found.append(kind(value))
    for name, known in _ALLOWED.items():
        given = getattr(table, name)
        allowed = (given,) if isinstance(given, str) else given
        for one in allowed:
            require_one_of(one, known, f"{where}.{name}")
        if allowed:
            found.append(v.RecoveryFrom(field=name, allowed=allowed))
    for name, kind in (("events", v.EventSeen), ("no_events", v.EventNotSeen)):
        for event in getattr(table, name):
            require_one_of(event, EVENTS, f"{where}.{name}")
            found.append(kind(event=event))
    return (*found, *_afterwards(table, where))


def _afterwards(table: ExpectTable, where: str) -> list[v.Expectation]:
    found: list[v.Expectation] = []
    for node, state in table.nodes.items():
        require_name(node, f"{where}.nodes")
        require_one_of(state, [str(one) for one in NodeState], f"{where}.nodes.{node}")
    if table.nodes:
        found.append(v.NodeStates(states=tuple(table.nodes.items())))
    if table.phase is not None:
        require_one_of(table.phase, [str(one) for one in ClusterPhase], f"{where}.phase")
        found.append(v.ClusterPhaseReached(phase=table.phase))
    if table.finishes:
        found.append(v.JobFinishes())
    if table.same_losses is not False:  # A difference of 0 is not False: the losses must be equal.
        relative = RELATIVE if table.same_losses is True else float(table.same_losses)
        _require_at_least_0(relative, f"{where}.same_losses")
        found.append(v.SameLosses(relative=relative))
    return found


def _require_at_least_0(value: float, field: str) -> None:
    if not value >= 0:
        problem = f"{value:g} is negative" if value < 0 else f"{value:g} is not a number of at least 0"
        raise ConfigurationError(problem, field=field, remedy="0 or more")


_ALLOWED: dict[Literal["tier", "cause"], Collection[str]] = {"tier": TIERS, "cause": CAUSE_WORDS}
_LIMITS: dict[str, Any] = {
    "resumed_within_s": lambda value: v.ResumedWithin(limit_s=value),
    "lost_steps_max": lambda value: v.StepsAtMost(field="rolled_back_steps", maximum=value),
    "recomputed_steps_max": lambda value: v.StepsAtMost(field="recomputed_steps", maximum=value),
    "recoveries_max": lambda value: v.RecoveryCount(maximum=value),
}
