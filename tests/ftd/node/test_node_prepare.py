"""A node that has a trainer prepare for a job."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

from ftd.config.daemon import parse_daemon_config
from ftd.node.node import Node
from ftd.snapshots.service import SnapshotService
from planner.values import Policy
from statemachine.effects import PrepareTrainer
from statemachine.messages.trainer import PrepareJob
from statemachine.messages.values import Job, SnapshotPolicy


def test_a_trainer_prepares_although_the_memory_for_its_snapshots_cannot_be_used(tmp_path: Path) -> None:
    """It would wait forever otherwise, and so would the job."""
    sent: list[tuple[int, PrepareJob]] = []
    published: list[tuple[str, str, dict[str, Any]]] = []
    lock = tmp_path / "lock"
    failure = FileNotFoundError(2, "No such file or directory", str(lock))
    snapshots = SnapshotService(
        parse_daemon_config({"node": {"name": "n", "host": "127.0.0.1"}}, directory=tmp_path),
        Mock(acquire=Mock(side_effect=failure)),
        driver=Mock(),
        publish_event=lambda *event: published.append(event),
        trainers=Mock(),
    )
    node = SimpleNamespace(
        snapshots=snapshots,
        supervisor=SimpleNamespace(send=lambda device, frame: sent.append((device, frame))),
        _config=SimpleNamespace(device_memory_bytes=None),
    )
    training = {
        "function": "m.py:build", "path": "/", "seed": 1, "steps": 3, "global_batch": 8, "microbatch_rows": 4,
        "precision": "float64", "arguments": {},
    }  # fmt: skip
    job = Job(
        job_id="j",
        name="j",
        steps=3,
        policy=Policy(global_batch=8, microbatch_rows=4),
        training=training,
        snapshot=SnapshotPolicy(every_steps=1),
    )
    Node._prepare(cast(Node, node), PrepareTrainer(cause="c", device=1, job=job, profile=False))
    ((device, frame),) = sent
    assert (device, frame.job_id, frame.arena, frame.arena_limit_bytes) == (1, "j", "", None)
    why = f"{lock}: No such file or directory"
    assert published == [("SnapshotsUnavailable", why, {"device": 1})]
