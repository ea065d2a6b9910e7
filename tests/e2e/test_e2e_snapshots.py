"""Rollback to a snapshot in memory when no live replica is left: real processes, losses of an undisturbed run."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ftd.cli.main import app
from ftd.config.job import load_job_data
from ftd.errors import FtdError
from ftd.transport.wire.public import JobData
from storage.arena import Arena
from tests.helpers.playground import HOME, RELATIVE, Json, Playground, Run, write_job

SameLosses = Callable[[Run], None]


@pytest.fixture
def same_losses(reference: Callable[[int], list[float]]) -> SameLosses:
    """Return a check that every step is there, with the loss of the undisturbed run each time that it was
    committed.

    Steps after the snapshot are computed again, possibly in another layout, which changes the order of
    sums.
    """

    def check(run: Run) -> None:
        commits = run.named("StepCommitted")  # Read once, because more events may arrive.
        steps = sorted({e["step"] for e in commits})
        assert steps == list(range(1, len(steps) + 1))
        expected = reference(len(steps))
        assert [e["details"]["loss"] for e in commits] == pytest.approx(
            [expected[e["step"] - 1] for e in commits], rel=RELATIVE
        )
        rolled_back = run.named("RolledBack")
        again = sum(e["details"]["from_step"] - e["details"]["to_step"] for e in rolled_back)
        assert len(rolled_back) == 1 and len(commits) - len(steps) <= again + len(run.recoveries)

    return check


def snapshot_job(directory: Path, protection: str = "aec", **options: object) -> JobData:
    path = write_job(directory, **options)  # type: ignore[arg-type]
    table = f'[snapshot]\nevery_steps = 5\nprotection = "{protection}"\n'
    path.write_text(path.read_text() + table)
    return load_job_data(path)


def until_rolled_back(ground: Playground) -> Json:
    """Return the RolledBack event, after which training continues."""
    event = ground.until_event("RolledBack")
    details = event["details"]
    assert 0 < details["to_step"] <= details["from_step"]
    ground.until_step(details["from_step"] + 5)
    ground.until_event("SnapshotCompleted", times=3)
    return details


def test_all_trainers_killed_at_once_are_restored_from_host_memory(
    ground: Playground, tmp_path: Path, same_losses: SameLosses
) -> None:
    run = ground.submit(snapshot_job(tmp_path, two_node_replicas=True))
    ground.until_event("SnapshotCompleted", times=2)
    ground.inject(do="kill", nodes=list(HOME), target="trainer")
    details = until_rolled_back(ground)
    assert details["tier"] == "memory"
    assert not run.named("NodeLost") and not run.named("ShardCorrupted")
    same_losses(ground.stop_job())


@pytest.mark.parametrize(
    ("protection", "within"), [("aec", "replicate"), ("aec", "shard"), ("arc:1", "replicate")]
)
def test_one_host_lost_with_all_trainers_is_decoded(
    ground: Playground, tmp_path: Path, same_losses: SameLosses, protection: str, within: str
) -> None:
    """If the devices of a stage hold shards, every pipeline has all layers, and nothing needs decoding."""
    ground.submit(snapshot_job(tmp_path, protection, failures=3, within_node=within))
    ground.until_event("SnapshotCompleted", times=2)
    ground.play(
        {"after_s": 0, "do": "kill", "node": "node-1"},
        {"after_s": 0, "do": "kill", "nodes": ["node-0", "node-2", "node-3"], "target": "trainer"},
    )
    details = until_rolled_back(ground)
    assert details["tier"] == ("memory" if within == "shard" else "decoded")
    same_losses(ground.stop_job())


def test_all_hosts_restarted_find_their_memory_again(
    ground: Playground, tmp_path: Path, same_losses: SameLosses
) -> None:
    # With parity, the first hosts that are back could decode the parts of the others before they join.
    ground.submit(snapshot_job(tmp_path, "none", two_node_replicas=True))
    ground.until_event("SnapshotCompleted", times=2)
    ground.inject(do="kill", nodes=list(HOME))
    ground.until(lambda: not any(map(ground.cluster.processes.running, HOME)), "all daemons are dead")
    for name in HOME:
        ground.inject(do="start", node=name)
    details = until_rolled_back(ground)
    assert details["tier"] == "memory"
    same_losses(ground.stop_job())


def test_memory_is_freed_when_the_job_ends(ground: Playground, tmp_path: Path) -> None:
    ground.submit(snapshot_job(tmp_path, failures=3))
    ground.until_event("SnapshotCompleted")
    memory = ground.snapshot_directory
    assert len(list(memory.glob("*/*/device-0/slot-*"))) >= len(HOME)
    ground.stop_job()
    ground.until(lambda: not list(memory.glob("*/*/device-0")), "the arenas are gone")


def test_the_only_owner_is_lost_with_its_memory_and_its_replica_peer_has_a_copy(
    ground: Playground, tmp_path: Path, same_losses: SameLosses
) -> None:
    spare = ["node-2", "node-3"]
    ground.inject(do="kill", nodes=spare)
    ground.until(
        lambda: all(ground.state["nodes"][name]["state"] == "OFFLINE" for name in spare), "two nodes are left"
    )
    run = ground.submit(snapshot_job(tmp_path, "aec+buddy", two_node_replicas=True, failures=0))
    completed = ground.until_event("SnapshotCompleted", times=2)
    assert completed["details"]["replica_peers"] == {"node-0": "node-1", "node-1": "node-0"}
    assert completed["details"]["unprotected"] == []
    ground.until(lambda: len(ground.state["pipelines"]) == 1, "one pipeline in the state")
    assert len(list(ground.snapshot_directory.glob("*/*/copy-0-*"))) == 2
    ground.inject(do="kill", node="node-1")
    [memory] = ground.snapshot_directory.glob("*node-1")
    shutil.rmtree(memory)
    ground.inject(do="start", node="node-2")
    details = until_rolled_back(ground)
    assert details["tier"] == "buddy" and details["sources"] == ["node-0"]
    assert not run.named("ShardCorrupted")
    same_losses(ground.stop_job())
    ground.until(lambda: not list(ground.snapshot_directory.glob("*/*/copy-*")), "copies are gone, too")


def asked(ground: Playground, *arguments: str) -> str:
    """Return the output of ``ftd snapshot …``, or its error."""
    cluster = ground.cluster
    address = ["--broker", cluster.broker.url, "--cluster", cluster.options.cluster]
    result = CliRunner().invoke(app, ["snapshot", *arguments, *address])
    return str(result.exception) if isinstance(result.exception, FtdError) else result.stdout


def test_interval_and_protection_are_switched_on_a_running_job(
    ground: Playground, tmp_path: Path, same_losses: SameLosses
) -> None:
    data = snapshot_job(tmp_path, "auto", failures=3)
    run = ground.submit(data)
    ground.until_event("SnapshotCompleted")
    (chosen,) = run.named("ProtectionChanged")
    assert (chosen["details"]["protection"], chosen["details"]["by"]) == ("arc:3", "auto")
    assert "is not a protection scheme" in asked(ground, "protect", "raid")
    assert "is not an interval" in asked(ground, "every", "often")
    assert asked(ground, "every", "0") == "snapshots: none from now on; the newest stays\n"
    assert asked(ground, "protect", "aec2").startswith("protection: aec2, from the next step boundary on")
    switched = ground.until_recovery("protection_changed")
    assert (switched["recomputed_steps"], switched["bytes_moved"]) == (0, 0)
    assert "is complete in the memory of 4 nodes\n" in asked(ground, "now")
    ground.until(lambda: protections(run)[-1] == "aec2", "a snapshot with parity is complete")
    ground.inject(do="kill", role="coordinator", restart_after_s=0.1)
    ground.until_event("CoordinatorStarted")
    policy = {"every_steps": 0, "auto_interval": False, "protection": "aec2", "auto_protection": False}
    ground.until(lambda: ground.state.get("snapshot_policy") == policy, "the coordinator remembers")
    assert asked(ground, "every", "auto").startswith("snapshots: at an interval chosen from measurements")
    assert asked(ground, "every", "5") == "snapshots: every 5 steps\n"
    ground.inject(do="kill", nodes=list(HOME), target="trainer")
    assert until_rolled_back(ground)["tier"] == "memory"
    assert protections(run)[-1] == "aec2"
    same_losses(ground.stop_job())


def test_a_flipped_bit_is_repaired_while_the_job_trains_and_while_it_does_not(
    ground: Playground, tmp_path: Path, same_losses: SameLosses
) -> None:
    run = ground.submit(snapshot_job(tmp_path, two_node_replicas=True, delay_s=0.02))
    ground.until_event("SnapshotCompleted")
    asked(ground, "every", "0")  # The newest snapshot stays, so a rollback reads the flipped one.
    ground.until(lambda: ground.state["snapshot_policy"]["every_steps"] == 0, "no other one comes")
    ground.further()
    ground.inject(do="flip", nodes=["node-0", "node-1"])
    for node in ("node-0", "node-1"):
        damaged = ground.until_event("ShardCorrupted", node)["details"]
        repaired = ground.until_event("ShardRepaired", node)["details"]
        assert (repaired["owner"], repaired["part"]) == (node, damaged["part"])
        assert repaired["step"] == run.named("SnapshotCompleted")[-1]["step"]
    assert len(run.named("ShardCorrupted")) == 2, [event["reason"] for event in run.named("ShardCorrupted")]

    # Without trainers, the shard is decoded from the others and also written again. The bit flips just
    # before the trainers are killed, since the rollback may be over before a busy machine lets this thread
    # continue.
    [arena] = ground.snapshot_directory.glob("*node-2/*/device-0")
    kept = Arena.open(arena)
    [manifest] = kept.snapshots
    [shard, *_] = [part for part in manifest.parts if part.name.endswith("/shard")]
    kept.view(manifest, shard)[17] ^= 64
    ground.inject(do="kill", nodes=list(HOME), target="trainer")
    ground.until_event("ShardRepaired", "node-2")
    assert kept.find_corrupt(manifest) == ()
    asked(ground, "every", "5")
    assert until_rolled_back(ground)["tier"] == "memory"
    same_losses(ground.stop_job())


def protections(run: Run) -> list[str]:
    """Return the protections of the completed snapshots."""
    return [event["details"]["protection"] for event in run.named("SnapshotCompleted")]
