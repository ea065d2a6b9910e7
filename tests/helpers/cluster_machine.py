"""Cluster machines in a given phase, and their effects."""

import json
from typing import Any

from statemachine.cluster.machine import ClusterMachine
from statemachine.effects import (
    EmitEvent,
)
from statemachine.timing import Timing
from tests.helpers.transcripts import Coordination


def sent(s: Coordination, kind: type[Any]) -> dict[str, Any]:
    """Return the commands of this kind among the last effects, by node."""
    return {e.node: e.command for e in s.commands(kind)}


def events(s: Coordination) -> list[str]:
    return [event.name for event in s.all(EmitEvent)]


def restarted(s: Coordination) -> Coordination:
    """Return the same cluster after SIGKILL of the coordinator, restored from its journal."""
    journal = json.loads(json.dumps(s.machine.durable_state()))
    machine, effects = ClusterMachine.restore(Timing(), journal, s.now, "restart")
    other = Coordination(machine)
    other.now, other.incarnations = s.now, s.incarnations
    other.took(effects)
    return other


def running(nodes: int = 4, steps: int = 10, **job_values: Any) -> Coordination:
    s = Coordination()
    s.running(nodes, steps, **job_values)
    return s
