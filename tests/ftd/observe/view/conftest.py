"""A small run as the broker publishes it: 4 nodes, node-2 is killed at step 40, and node-4 joins at step 80."""

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

Json = dict[str, Any]
START = datetime(2026, 5, 4, 12, 0, 0, tzinfo=UTC)
LAYERS = 8


def pipeline(microbatches: int, *stages: tuple[int, int, str]) -> Json:
    return {
        "stages": [{"first_layer": a, "end_layer": b, "devices": [f"{node}/0"]} for a, b, node in stages],
        "microbatches": microbatches,
    }


FOUR = [
    pipeline(4, (0, 4, "node-0"), (4, 8, "node-1")),
    pipeline(4, (0, 4, "node-2"), (4, 8, "node-3")),
]
THREE = [pipeline(5, (0, 4, "node-0"), (4, 8, "node-1")), pipeline(3, (0, 8, "node-3"))]
FIVE = [
    pipeline(5, (0, 3, "node-0"), (3, 6, "node-1"), (6, 8, "node-4")),
    pipeline(3, (0, 8, "node-3")),
]


def make_event(name: str, monotonic: float, **fields: Any) -> Json:
    return {
        "schema": 1,
        "event": name,
        "node": fields.get("node"),
        "generation": fields.get("generation"),
        "step": fields.get("step"),
        "reason": fields.get("reason", ""),
        "at": (START + timedelta(seconds=monotonic - 1000.0)).isoformat(),
        "monotonic": monotonic,
        "cause": fields.get("cause", f"c{monotonic}"),
        "details": fields.get("details", {}),
    }


def make_recovery(cause: str, generation: int, step: int, **fields: Any) -> Json:
    recovery: Json = {
        "cause": cause,
        "nodes": [],
        "detected_how": None,
        "detected_at": 1000.0,
        "began_at": fields.get("detected_at", 1000.0),
        "measured_from": "detection",
        "detected_ms": None,
        "waited_ms": 0.0,
        "quiesce_ms": 10.0,
        "plan_ms": 2.0,
        "state_ms": 0.0,
        "resume_ms": 120.0,
        "total_ms": 132.0,
        "rolled_back_steps": 0,
        "recomputed_steps": 0,
        "tier": "none",
        "bytes_moved": 0,
        "method": "initial",
        "reason": "4 nodes: two pipelines of two stages",
        "generation": generation,
        "generations_tried": 1,
        "step": step,
        "pipelines_before": [],
        "pipelines_after": FOUR,
    }
    return recovery | fields


def commit(step: int, monotonic: float, generation: int) -> Json:
    details = {
        "loss": 5.5 * 0.985**step + 1.2,
        "gradient_norm": 0.9,
        "skipped": False,
        "step_s": 0.1,
        "samples_per_s": 320.0,
    }
    return make_event("StepCommitted", monotonic, generation=generation, step=step, details=details)


def _kill_of_node_2() -> list[Json]:
    """Return the events of a kill at 1005.0, detected 3 ms later, with the next commit 0.25 s after the
    detection.
    """
    lost = make_recovery(
        "node_lost",
        2,
        40,
        nodes=["node-2"],
        detected_how="last_will",
        detected_at=1005.003,
        began_at=1005.0,
        measured_from="fault",
        detected_ms=3.0,
        quiesce_ms=25.0,
        plan_ms=4.0,
        state_ms=31.0,
        resume_ms=190.0,
        total_ms=253.0,
        recomputed_steps=1,
        tier="live_replica",
        bytes_moved=3 * 1024 * 1024,
        method="simple",
        reason="3 of 4 nodes are left: node-3 takes all layers of the second pipeline",
        pipelines_before=FOUR,
        pipelines_after=THREE,
    )
    details = {"fault": "kill", "at": 1005.0, "target": "node", "device": None}
    return [
        make_event("ChaosInjected", 1005.001, node="node-2", reason="SIGKILL", details=details),
        make_event(
            "NodeLost",
            1005.003,
            node="node-2",
            generation=1,
            cause="will-2",
            reason="its connection to the broker broke",
            details={"how": "last_will", "detected_at": 1005.003, "fault_at": 1005.0},
        ),
        make_event(
            "GenerationStarted",
            1005.004,
            generation=2,
            cause="will-2",
            reason="node-2 was lost",
            details={"mode": "abort", "why": "node_lost"},
        ),
        make_event(
            "Quiesced",
            1005.03,
            generation=2,
            step=40,
            reason="nobody is past the vote of step 41: it is done again",
            details={"decision": "redo", "in_flight": True},
        ),
        make_event(
            "PlanChosen",
            1005.034,
            generation=2,
            reason=lost["reason"],
            details={"method": "simple", "pipelines": THREE, "transfers": 4, "transfer_bytes": 3145728},
        ),
        make_event("TrainingResumed", 1005.065, generation=2, reason="all planned nodes met"),
        make_event(
            "RecoveryCompleted",
            1005.253,
            generation=2,
            step=41,
            reason="step 41 is committed",
            details={"recovery": lost},
        ),
    ]


def _join_of_node_4() -> list[Json]:
    joined = make_recovery(
        "node_joined",
        3,
        80,
        nodes=["node-4"],
        detected_how=None,
        detected_at=1010.0,
        quiesce_ms=60.0,
        plan_ms=3.0,
        state_ms=42.0,
        resume_ms=130.0,
        total_ms=235.0,
        tier="live_replica",
        bytes_moved=2 * 1024 * 1024,
        method="best",
        reason="node-4 takes two layers of the first pipeline",
        pipelines_before=THREE,
        pipelines_after=FIVE,
    )
    return [
        make_event("NodeJoined", 1009.0, node="node-4", reason="said hello", details={"devices": 1}),
        make_event("RecoveryCompleted", 1010.235, generation=3, step=81, details={"recovery": joined}),
    ]


@pytest.fixture
def run_events() -> list[Json]:
    """Return all events of the run in the broker's order."""
    start = make_recovery("start", 1, 0, detected_at=1000.2)
    events = [
        make_event("JobSubmitted", 1000.0, reason="gpt: 120 steps", details={"name": "gpt", "steps": 120}),
        make_event("NodeJoined", 1000.05, node="node-2", reason="said hello", details={"devices": 1}),
        commit(1, 1000.33, 1),
        make_event("RecoveryCompleted", 1000.34, generation=1, step=1, details={"recovery": start}),
    ]
    events += [commit(s, 1000.33 + s * 0.1, 1) for s in range(2, 41)]
    events += _kill_of_node_2()
    events += [commit(s, 1005.253 + (s - 41) * 0.1, 2) for s in range(41, 81)]
    events += _join_of_node_4()
    events += [commit(s, 1010.235 + (s - 81) * 0.1, 3) for s in range(81, 121)]
    checksum = {"checksum": "ab" * 32}
    events.append(make_event("JobFinished", 1015.0, step=120, reason="all steps are done", details=checksum))
    return events


@pytest.fixture
def state() -> Json:
    """Return the cluster's state at step 90, after node-4 has joined."""

    def node(state: str, *, in_plan: bool) -> Json:
        return {
            "state": state,
            "incarnation": 7,
            "devices": 1,
            "host": "127.0.0.1",
            "in_plan": in_plan,
            "draining": False,
            "drain_waits": "",
            "step": 90,
        }

    nodes = {f"node-{i}": node("HEALTHY", in_plan=True) for i in (0, 1, 3, 4)}
    nodes["node-2"] = node("OFFLINE", in_plan=False)
    return {
        "schema": 1,
        "coordinator": 99,
        "phase": "RUNNING",
        "generation": 3,
        "step": 90,
        "loss": 2.6112,
        "step_s": 0.1,
        "samples_per_s": 320.0,
        "waiting_for": None,
        "job": {"id": "gpt-1", "name": "gpt", "steps": 120, "global_batch": 32},
        "pipelines": FIVE,
        "nodes": nodes,
    }


@pytest.fixture
def event() -> Callable[..., Json]:
    return make_event


@pytest.fixture
def recovery() -> Callable[..., Json]:
    return make_recovery


@pytest.fixture
def committed() -> Callable[..., Json]:
    return commit
