"""ZeRO-1 in real processes: with replicas, the loss of a node undoes nothing; without, all roll back to a
snapshot.
"""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from ftd.config.job import load_job_data
from ftd.transport.wire.public import JobData
from tests.helpers.playground import FROZEN, RELATIVE, Playground, Run, write_job

Reference = Callable[[int], list[float]]


def sharded_job(
    directory: Path,
    protection: str,
    every_steps: int,
    *,
    delay_s: float = 0.005,
    failures: int = 3,
    two_node_replicas: bool = False,
    **options: str,
) -> JobData:
    """Return a job with four pipelines of one node each: every node has a quarter of the optimizer's state."""
    path = write_job(
        directory, failures=failures, delay_s=delay_s, two_node_replicas=two_node_replicas, **options
    )
    text = path.read_text().replace("[training]\n", "[training]\nzero1 = true\n")
    table = f'[snapshot]\nevery_steps = {every_steps}\nprotection = "{protection}"\n'
    path.write_text(text + table)
    return load_job_data(path)


def check_losses(run: Run, reference: Reference) -> None:
    """Check that each committed step has the loss of an undisturbed run without ZeRO-1, however often it was
    committed.
    """
    commits = run.named("StepCommitted")
    expected = reference(max(run.losses))
    assert sorted(run.losses) == list(range(1, len(run.losses) + 1))
    assert [e["details"]["loss"] for e in commits] == pytest.approx(
        [expected[e["step"] - 1] for e in commits], rel=RELATIVE
    )


def test_with_replicas_a_lost_node_undoes_nothing(
    ground: Playground, tmp_path: Path, reference: Reference
) -> None:
    run = ground.submit(sharded_job(tmp_path, "aor", every_steps=0, delay_s=0.02))
    ground.until_step(10)
    ground.inject(do="kill", node="node-1")
    lost = ground.until_recovery("node_lost")
    assert (lost["tier"], lost["rolled_back_steps"]) == ("replica", 0)
    (chosen,) = [e for e in run.named("PlanChosen") if e["details"]["from_replicas"]]
    assert chosen["generation"] == lost["generation"]
    ground.further()
    ground.inject(do="start", node="node-1")
    ground.until(lambda: len(ground.state["pipelines"]) == 4, "it is back")
    ground.further()
    check_losses(ground.stop_job(), reference)
    assert not run.named("RolledBack") and not run.named("OptimizerReplicaDiverged")


def test_without_replicas_all_nodes_roll_back_to_the_snapshot(
    ground: Playground, tmp_path: Path, reference: Reference
) -> None:
    run = ground.submit(sharded_job(tmp_path, "none", every_steps=5))
    ground.until_event("SnapshotCompleted", times=2)
    ground.inject(do="kill", node="node-1", target="trainer")
    details = ground.until_event("RolledBack")["details"]
    assert details["tier"] == "memory" and 0 < details["to_step"] <= details["from_step"]
    ground.until_step(details["from_step"] + 5)
    ground.until_event("SnapshotCompleted", times=3)
    check_losses(ground.stop_job(), reference)
    assert not run.named("ShardCorrupted")


@pytest.mark.parametrize(
    ("losses", "options"),
    [("reference", {}), ("frozen_reference", {"within_node": "shard", "arguments": FROZEN})],
    ids=["replicas", "frozen-shards"],
)
def test_replicas_in_snapshots_make_up_for_a_lost_host(
    ground: Playground, tmp_path: Path, request: pytest.FixtureRequest, losses: str, options: dict[str, str]
) -> None:
    run = ground.submit(sharded_job(tmp_path, "arc:1+aor", every_steps=5, **options))
    ground.until_event("SnapshotCompleted", times=2)
    ground.play(
        {"after_s": 0, "do": "kill", "node": "node-1"},
        {"after_s": 0, "do": "kill", "nodes": ["node-0", "node-2", "node-3"], "target": "trainer"},
    )
    details = ground.until_event("RolledBack")["details"]
    assert details["tier"] == "decoded"
    ground.until_step(details["from_step"] + 5)
    check_losses(ground.stop_job(), request.getfixturevalue(losses))
    assert not run.named("ShardCorrupted")


def test_the_last_pipeline_s_state_is_at_its_replica_peers(
    ground: Playground, tmp_path: Path, reference: Reference
) -> None:
    """With one pipeline each part is a whole layer, in one node's memory and copied to another's."""
    spare = ["node-2", "node-3"]
    ground.inject(do="kill", nodes=spare)
    ground.until(
        lambda: all(ground.state["nodes"][name]["state"] == "OFFLINE" for name in spare), "two nodes are left"
    )
    run = ground.submit(sharded_job(tmp_path, "aor+buddy", every_steps=5, two_node_replicas=True, failures=0))
    completed = ground.until_event("SnapshotCompleted", times=2)
    assert completed["details"]["replica_peers"] == {"node-0": "node-1", "node-1": "node-0"}
    ground.until(lambda: len(ground.state["pipelines"]) == 1, "one pipeline in the state")
    ground.inject(do="kill", node="node-1")
    [memory] = ground.snapshot_directory.glob("*node-1")
    shutil.rmtree(memory)
    ground.inject(do="start", node="node-2")
    details = ground.until_event("RolledBack")["details"]
    assert details["tier"] == "buddy" and details["sources"] == ["node-0"]
    ground.until_step(details["from_step"] + 5)
    ground.until_event("SnapshotCompleted", times=3)
    check_losses(ground.stop_job(), reference)
    assert not run.named("ShardCorrupted") and not run.named("OptimizerReplicaDiverged")
