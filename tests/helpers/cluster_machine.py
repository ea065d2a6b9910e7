"""Cluster machines in a given phase, and their effects."""

import copy
import json
from typing import Any, TypeVar

from statemachine.cluster.machine import ClusterMachine
from statemachine.effects import (
    EmitEvent,
)
from statemachine.hardware import DEFAULT_LIMITS, HardwareLimits
from statemachine.timing import Timing
from tests.helpers.transcripts import Coordination

S = TypeVar("S", bound=Coordination)


def sent(s: Coordination, kind: type[Any]) -> dict[str, Any]:
    """Return the commands of this kind among the last effects, by node."""
    return {e.node: e.command for e in s.commands(kind)}


def events(s: Coordination) -> list[str]:
    return [event.name for event in s.all(EmitEvent)]


def restarted(s: S, hardware: HardwareLimits = DEFAULT_LIMITS) -> S:
    """Return the same cluster after SIGKILL of the coordinator, restored from its journal."""
    journal = json.loads(json.dumps(s.machine.durable_state()))
    other = copy.copy(s)
    other.machine, effects = ClusterMachine.restore(Timing(), journal, s.now, "restart", hardware)
    other.lines, other.due = [], {}
    other.took(effects)
    return other


def running(nodes: int = 4, steps: int = 10, **job_values: Any) -> Coordination:
    s = Coordination()
    s.running(nodes, steps, **job_values)
    return s
