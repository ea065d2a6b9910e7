"""Messages of a large fictitious cluster, as the coordinator would publish them, for the dashboard's tests and
benchmark.
"""

import itertools
from datetime import UTC, datetime, timedelta
from typing import Any

from ftd.transport.wire.catalogue import severity_of
from ftd.transport.wire.public import EventMessage

Json = dict[str, Any]
BEGAN = datetime(2026, 5, 4, 12, tzinfo=UTC)
_NUMBERS = itertools.count(1)


def stamp(at_s: float) -> str:
    """Return an ISO-8601 time this many seconds after ``BEGAN``."""
    return (BEGAN + timedelta(seconds=at_s)).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def event(name: str, at_s: float = 0.0, /, **fields: Any) -> EventMessage:
    """Return an event of the coordinator; fields that the envelope lacks go into ``details``."""
    envelope = {
        "node": None,
        "generation": 1,
        "step": 0,
        "reason": f"because of {name}",
        "cause": "c-1",
        "source": "coordinator",
        "severity": severity_of(name),
    }
    given = {key: fields.pop(key) for key in envelope if key in fields}
    return EventMessage(
        event=name,
        at=stamp(at_s),
        monotonic=at_s,
        id=f"e-{next(_NUMBERS)}",
        details=fields,
        **{**envelope, **given},
    )


def committed(step: int, at_s: float, loss: float | None = 1.0, step_s: float = 1.0) -> EventMessage:
    """Return the event of one step with a batch of 32."""
    return event(
        "StepCommitted", at_s, step=step, loss=loss, gradient_norm=1.0, skipped=False, step_s=step_s,
        samples_per_s=32 / step_s,
    )  # fmt: skip


def pipelines_of(names: list[str], stages: int, layers: int) -> list[Json]:
    """Return as many pipelines of equal stages as ``names`` fill."""
    cuts = [layers * i // stages for i in range(stages + 1)]
    return [
        {
            "stages": [
                {"first_layer": cuts[i], "end_layer": cuts[i + 1], "devices": [f"{names[first + i]}/0"]}
                for i in range(stages)
            ],
            "microbatches": 4,
        }
        for first in range(0, len(names) - stages + 1, stages)
    ]


def state_of(names: list[str], *, stages: int = 2, layers: int = 8, lost: tuple[str, ...] = ()) -> Json:
    """Return the state of a cluster that trains on ``names``; lost nodes are OFFLINE and in no plan."""
    left = [name for name in names if name not in lost]
    node: Json = {
        "devices": 1,
        "host": "10.0.0.1",
        "incarnation": 1,
        "draining": False,
        "drain_waits": "",
        "step": 5,
        "speed": 1.0,
        "quarantine": None,
    }
    return {
        "schema": 1,
        "version": "0.1.0",
        "coordinator": 7,
        "at": stamp(0),
        "phase": "RUNNING",
        "generation": 1 + len(lost),
        "step": 5,
        "loss": 1.25,
        "step_s": 0.5,
        "samples_per_s": 64.0,
        "waiting_for": "",
        "outcome": "",
        "planning": None,
        "snapshot": None,
        "snapshot_policy": None,
        "checkpoint": None,
        "job": {"id": "gpt-1", "name": "gpt", "steps": 100_000, "global_batch": 32},
        "pipelines": pipelines_of(left, stages, layers),
        "nodes": {
            name: node | {"state": "OFFLINE" if name in lost else "HEALTHY", "in_plan": name not in lost}
            for name in names
        },
    }


def snapshot_of(owners: int, missing: tuple[str, ...] = (), protection: str = "aec") -> Json:
    """Return the newest snapshot as the state describes it."""
    return {
        "step": 4,
        "generation": 1,
        "at": stamp(0),
        "size_bytes": 48_200_192,
        "protection": protection,
        "owners": owners,
        "present": owners - len(missing),
        "missing": list(missing),
    }


def recovery(number: int, nodes: list[str], at_s: float, step: int = 5) -> list[EventMessage]:
    """Return all events of a recovery from a loss, with generation ``number``."""
    common: Json = {"generation": number, "cause": f"c-{number}", "step": step}
    losses = [
        event(
            "NodeLost", at_s, node=node, reason=f"the broker lost the session of {node}", how="last_will",
            detected_at=at_s, fault_at=at_s - 0.003, incarnation=1, **{**common, "generation": number - 1},
        )
        for node in nodes
    ]  # fmt: skip
    facts = {
        "cause": "node_lost", "nodes": nodes, "detected_how": "last_will", "detected_at": at_s,
        "began_at": at_s - 0.003, "measured_from": "fault", "detected_ms": 3.0, "waited_ms": 0.0,
        "quiesce_ms": 40.0, "plan_ms": 20.0, "state_ms": 50.0, "resume_ms": 250.0, "total_ms": 363.0,
        "rolled_back_steps": 0, "recomputed_steps": 1, "tier": "live_replica", "bytes_moved": 1_400_000,
        "method": "merge", "reason": "a pipeline that was left too small was merged with another",
        "generation": number, "generations_tried": 1, "step": step,
        "pipelines_before": [], "pipelines_after": [],
    }  # fmt: skip
    return [
        *losses,
        event("GenerationStarted", at_s + 0.001, mode="abort", why="node_lost", **common),
        event("Quiesced", at_s + 0.04, decision="redo", in_flight=True, **common),
        event("PlanChosen", at_s + 0.06, method="merge", pipelines=[], **common),
        event("TrainingResumed", at_s + 0.11, bytes_moved=1, rendezvous_s=0.1, state_s=0.1, **common),
        event("RecoveryCompleted", at_s + 0.36, recovery=facts, **common),
    ]
