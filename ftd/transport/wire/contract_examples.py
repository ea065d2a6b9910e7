"""An example of every message, for the contract. A test compares each with its model."""

from typing import Any

from ftd.transport.wire.catalogue import severity_of

Json = dict[str, Any]

_AT = "2026-05-04T12:00:05.003Z"
_ASK: Json = {"request": "5f1c09aa77d0e1b2", "reply": "client-1a2b3c4d5e6f", "schema": 2}
_STAGE: Json = {
    "first_layer": 0, "end_layer": 8, "devices": ["node-3/0"], "recompute": "none", "within": "replicate",
    "replicas": 1,
}  # fmt: skip
_PIPELINES: list[Json] = [{"stages": [_STAGE], "microbatches": 8}]
_RECOVERY: Json = {
    "cause": "node_lost", "nodes": ["node-2"], "detected_how": "last_will", "detected_at": 1005.003,
    "began_at": 1005.0, "measured_from": "fault", "detected_ms": 3.0, "waited_ms": 0.0,
    "quiesce_ms": 25.0, "plan_ms": 4.0, "state_ms": 31.0, "resume_ms": 190.0, "total_ms": 253.0,
    "rolled_back_steps": 0, "recomputed_steps": 1, "tier": "live_replica", "bytes_moved": 3145728,
    "method": "simple", "reason": "the pipeline of node-2 goes on with the node that is left of it",
    "generation": 2, "generations_tried": 1, "step": 40, "pipelines_before": _PIPELINES,
    "pipelines_after": _PIPELINES,
}  # fmt: skip
_BACK: Json = {
    "from_step": 47,
    "to_step": 40,
    "undone_steps": 7,
    "tier": "decoded",
    "sources": ["node-0", "node-1"],
}
_FAILED: Json = {
    "cause": "raised",
    "evidence": [
        {
            "cause": "raised",
            "ago_s": 12.5,
            "step": 41,
            "generation": 2,
            "detail": "OSError: Input/output error",
        },
    ],
}
_SLOW: Json = {"speed": 0.25, "previous_speed": 1.0, "microbatch_ms": [41.5]}

DETAILS: dict[str, Json] = {
    "JobSubmitted": {"name": "gpt", "steps": 150, "job": "gpt-5c1f09aa", "global_batch": 32},
    "StepCommitted": {
        "loss": 2.6112, "gradient_norm": 0.91, "skipped": False, "step_s": 0.1, "samples_per_s": 320.0,
        "learning_rate": 0.0003, "weight": 8192.0, "tokens_per_s": 81920.0, "loss_scale": 1.0,
        "metrics": {"accuracy": 0.41}, "mfu": 0.43,
    },
    "Evaluated": {"loss": 2.7, "weight": 65536.0, "metrics": {"accuracy": 0.4}, "took_s": 1.2},
    "JobFinished": {"checksum": "9f2c6a1e0b7d4c35"},
    "UpdateSkipped": {
        "loss": None, "steps": 1, "value": "output", "layer": 3,
        "layer_name": "model.layers.2 (LlamaDecoderLayer)", "nodes": ["node-1"],
    },
    "LossSpiked": {"loss": 9.31, "threshold": 4.2, "batch": 57, "skipped": True},
    "ReplicasDiverged": {
        "layer": 3, "digests": ["07be11d4", "9f2c6a1e"], "layers": [3], "nodes": ["node-0", "node-1", "node-2"],
        "minority": ["node-2"], "agreed_step": 100,
    },
    "NodeJoined": {"devices": 1, "host": "10.0.0.3", "incarnation": 17200003},
    "NodeLost": {"how": "last_will", "detected_at": 1005.003, "fault_at": 1005.0, "incarnation": 17200003,
                 "host": "10.0.0.3", "log": "journalctl -u ftd-node.service"},
    "TrainerLost": {"device": 0, "cause": "exited", "fault_at": None, "error": "killed by SIGKILL",
        "host": "10.0.0.3", "log": "journalctl -u ftd-node.service", "detail": "killed by SIGKILL",
    },
    "TrainerStarted": {"device": 0, "pid": 4711, "daemon_pid": 4702},
    "StragglerDetected": _SLOW,
    "StragglerRecovered": {"speed": 1.0, "previous_speed": 0.25, "microbatch_ms": [10.2]},
    "NodeQuarantined": {**_FAILED, "readmit": "ftd readmit node-2"},
    "QuarantineSkipped": _FAILED,
    "NodeReadmitted": {"by": "user", "cause": "raised"},
    "HealthCheckPassed": {"cause": "wrong_device"},
    "NodeRemoved": {"incarnation": 17200003},
    "NodeRejected": {"incarnation": 17200009},
    "NodeFenced": {"incarnation": 17200003},
    "GenerationStarted": {"mode": "abort", "why": "node-2 is lost", "recovery_cause": "node_lost"},
    "Quiesced": {"decision": "redo", "in_flight": True},
    "PlanChosen": {
        "method": "simple", "reason": "the pipeline of node-2 goes on with the node that is left of it",
        "pipelines": _PIPELINES, "transfers": 4, "transfer_bytes": 3145728, "from_replicas": [],
        "estimated_iteration_s": 0.12, "idle_nodes": [],
        "considered": [{
            "method": "simple", "sizes": [1], "iteration_s": 0.12, "transfer_bytes": 3145728,
            "transfer_s": 0.01, "expected_iteration_s": 0.12,
        }],
    },
    "ReplanSkipped": {"nodes": ["node-1"], "saved_s": 0.001, "step_s": 0.1},
    "ClusterPaused": {"needed": 2, "present": 1},
    "TrainingResumed": {"bytes_moved": 3145728, "rendezvous_s": 0.02, "state_s": 0.03},
    "RecoveryCompleted": {"recovery": _RECOVERY},
    "ChaosInjected": {
        "fault": "kill", "at": 1005.0, "target": "node", "device": None, "for_s": None,
    },
    "ChaosRejected": {"fault": "kill"},
    "LoggingFailed": {"sink": "tensorboard", "detail": "OSError: [Errno 28] No space left on device"},
    "MessageIgnored": {"why": "a Stepped of an older generation", "count": 3},
    "MessageRejected": {"topic": "ftd/v2/ftd/request", "why": "malformed JSON message", "suppressed": 4},
    "SnapshotCompleted": {
        "protection": "aec", "replica_peers": {}, "unprotected": [], "size_bytes": 48200192, "copy_s": 0.11,
        "stall_s": 0.002, "took_s": 0.14,
    },
    "SnapshotAbandoned": {"last_complete_step": 30},
    "SnapshotIntervalChosen": {
        "every_steps": 20, "before": 10, "by": "measurement", "step_s": 0.1, "cost_s": 0.004,
        "horizon_s": 3600.0, "lost_share": 0.002,
    },
    "ProtectionChanged": {"protection": "aec", "before": None, "by": "user"},
    "SnapshotsUnavailable": {"device": 0},
    "ShardCorrupted": {"owner": "node-1", "job": "gpt-5c1f09aa", "step": 40, "part": "shard-0"},
    "ShardRepaired": {
        "owner": "node-1", "job": "gpt-5c1f09aa", "step": 40, "part": "group-0/shard", "sources": ["node-2"],
        "size_bytes": 1048576,
    },
    "OptimizerReplicaDiverged": {"layer": 3},
    "RolledBack": _BACK,
    "JobResumed": {
        **_BACK, "from_step": 0, "to_step": 50, "undone_steps": -50, "tier": "persistent", "sources": [],
    },
    "RestoreFailed": {"bad": ["node-1"]},
    "CheckpointStarted": {"url": "/checkpoints/gpt", "layers": {"node-0": 4, "node-1": 4}},
    "CheckpointCompleted": {"size_bytes": 36150144, "took_s": 1.4, "pruned": [20]},
    "CheckpointIntervalChosen": {
        "every_steps": 1100, "before": 1, "step_s": 0.1, "cost_s": 0.03, "write_s": 1.4,
        "failure_horizon_s": 22000.0, "loss_horizon_s": 220000.0, "lost_share": 0.0005,
    },
    "CheckpointAbandoned": {"last_complete_step": 50},
    "CheckpointExported": {
        "directory": "/exports/gpt/step-000000000050", "size_bytes": 12050048, "took_s": 0.9,
    },
    "CheckpointExportFailed": {"directory": "/exports/gpt"},
    "CheckpointSkipped": {"url": "/checkpoints/gpt"},
    "LeaderLost": {"leader": "host-a", "term": 3, "how": "last_will", "detected_at": 1005.003},
    "LeaderElected": {"leader": "host-b", "term": 4, "took_s": 0.012},
    "StandbyIneligible": {"coordinator": "host-c", "why": "the journal has schema 2, and this program reads 1"},
    "TakeoverRejected": {"coordinator": "host-c", "why": "the journal has schema 2, and this program reads 1"},
}  # fmt: skip
"""Examples of the details of events that have any."""


def envelope(event: str, details: Json) -> Json:
    """Return an event as it is published."""
    return {
        "schema": 2,
        "event": event,
        "id": "e-0f1e2d3c4b5a6978",
        "severity": severity_of(event),
        "node": "node-2" if event.startswith(("Node", "Trainer", "Straggler", "Chaos")) else None,
        "generation": 1,
        "step": 40,
        "reason": "a sentence for people",
        "at": _AT,
        "monotonic": 1005.003,
        "cause": "c-00042-a1b2",
        "source": "coordinator",
        "details": details,
    }


EXAMPLES: dict[str, Json] = {
    "ClusterState": {
        "schema": 2, "version": "0.1.0", "coordinator": 1720000000123, "leader": "host-a", "term": 3,
        "standbys": ["host-b"], "ineligible": {}, "at": _AT, "phase": "RUNNING",
        "generation": 3, "step": 90, "loss": 2.6112, "step_s": 0.1, "samples_per_s": 320.0, "waiting_for": "",
        "startup": {
            "stage": "measuring", "number": 3, "stages": 7, "done": 2, "total": 10, "node": "node-0", "share": 0.314,
            "text": "node-0 is measuring layer 3 of 10",
        },
        "pause_limited": False, "outcome": "", "planning": None,
        "snapshot": {
            "step": 80, "generation": 3, "at": _AT, "size_bytes": 48200192, "protection": "aec", "owners": 4,
            "present": 4, "missing": [],
        },
        "snapshot_policy": {
            "every_steps": 10, "auto_interval": False, "protection": "aec", "auto_protection": False,
        },
        "checkpoint": {"url": "/checkpoints/gpt", "step": 50, "size_bytes": 36150144, "writing_step": None},
        "job": {"id": "gpt-5c1f09aa", "name": "gpt", "steps": 150, "global_batch": 32},
        "pipelines": _PIPELINES,
        "nodes": {
            "node-3": {
                "state": "HEALTHY", "incarnation": 17200001, "devices": 1, "host": "10.0.0.1",
                "in_plan": True, "draining": False, "drain_waits": "", "step": 90, "speed": 1.0,
            },
        },
    },
    "ClusterUnreachable": {
        "schema": 2, "phase": "UNREACHABLE", "reason": "the coordinator's connection broke", "nodes": {},
    },
    "NodeState": {
        "schema": 2, "node": "node-2", "incarnation": 17200003, "state": "OFFLINE", "generation": 3,
        "step": 90, "reason": "the connection to the broker broke", "at": _AT, "devices": 1,
        "host": "10.0.0.3", "graceful": False,
    },
    "Answer": {
        "schema": 2, "request": "5f1c09aa77d0e1b2", "accepted": True, "data": None,
        "detail": "node-2 leaves at the next step boundary: the other nodes have a plan without it",
        "outcome": "leaving",
    },
    "SubmitRequest": {
        **_ASK, "do": "submit",
        "job": {
            "name": "gpt", "steps": 150, "policy": {"global_batch": 32, "microbatch_rows": 4},
            "training": {"function": "/srv/gpt.py:build", "seed": 1},
        },
    },
    "StopRequest": {**_ASK, "do": "stop", "job": "gpt"},
    "DrainRequest": {**_ASK, "do": "drain", "node": "node-2"},
    "ReadmitRequest": {**_ASK, "do": "readmit", "node": "node-2"},
    "SnapshotRequest": {**_ASK, "do": "snapshot", "now": True},
    "StatusRequest": {**_ASK, "do": "status"},
    "HistoryRequest": {**_ASK, "do": "history", "what": "events", "after": 0, "limit": 200, "newest": False},
    "ChaosRequest": {**_ASK, "do": "kill", "target": "trainer", "device": 0},
    "TraceRequest": {**_ASK, "device": 0, "first_step": 0, "steps": 5, "within_s": 60.0},
}  # fmt: skip
