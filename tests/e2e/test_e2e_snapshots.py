"""Back to a snapshot in memory when no live replica is left: real processes, an unbroken run's losses."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from ftd.config.job import load_job_data
from ftd.wire.public import JobData
from tests.e2e.conftest import RELATIVE
from tests.e2e.playground import HOME, Json, Playground, Run, write_job

SameLosses = Callable[[Run], None]


@pytest.fixture
def same_losses(reference: Callable[[int], list[float]]) -> SameLosses:
    """Every step is there, with the loss of the undisturbed run each time that it was committed.

    Steps behind the snapshot are done again, possibly in another layout, which changes the order of sums.
    """

    def check(run: Run) -> None:
        steps = sorted(run.losses)
        assert steps == list(range(1, len(steps) + 1))
        expected = reference(len(steps))
        told = run.named("StepCommitted")
        assert [e["details"]["loss"] for e in told] == pytest.approx(
            [expected[e["step"] - 1] for e in told], rel=RELATIVE
        )
        rolled_back = run.named("RolledBack")
        again = sum(e["details"]["from_step"] - e["details"]["to_step"] for e in rolled_back)
        assert len(rolled_back) == 1 and len(told) - len(steps) <= again + len(run.recoveries)

    return check


def snapshot_job(directory: Path, protection: str = "aec", **options: object) -> JobData:
    path = write_job(directory, **options)  # type: ignore[arg-type]
    table = f'[snapshot]\nevery_steps = 5\nprotection = "{protection}"\n'
    path.write_text(path.read_text() + table)
    return load_job_data(path)


def until_rolled_back(ground: Playground) -> Json:
    """The event; training goes on behind it."""
    event = ground.until_event("RolledBack")
    details = event["details"]
    assert 0 < details["to_step"] <= details["from_step"]
    ground.until_step(details["from_step"] + 5)
    ground.until_event("SnapshotCompleted", times=3)
    return details


def test_all_trainers_killed_at_once_and_the_hosts_remember(
    ground: Playground, tmp_path: Path, same_losses: SameLosses
) -> None:
    run = ground.submit(snapshot_job(tmp_path, two_node_replicas=True))
    ground.until_event("SnapshotCompleted", times=2)
    ground.inject(do="kill", nodes=list(HOME), target="trainer")
    details = until_rolled_back(ground)
    assert details["tier"] == "memory"
    assert not run.named("NodeLost") and not run.named("ShardDamaged")
    same_losses(ground.stop_job())


@pytest.mark.parametrize("protection", ["aec", "arc:1"])
def test_one_host_lost_with_all_trainers_is_decoded(
    ground: Playground, tmp_path: Path, same_losses: SameLosses, protection: str
) -> None:
    ground.submit(snapshot_job(tmp_path, protection, failures=3))
    ground.until_event("SnapshotCompleted", times=2)
    ground.play(
        {"after_s": 0, "do": "kill", "node": "node-1"},
        {"after_s": 0, "do": "kill", "nodes": ["node-0", "node-2", "node-3"], "target": "trainer"},
    )
    details = until_rolled_back(ground)
    assert details["tier"] == "decoded"
    same_losses(ground.stop_job())


def test_all_hosts_restarted_find_their_memory_again(
    ground: Playground, tmp_path: Path, same_losses: SameLosses
) -> None:
    ground.submit(snapshot_job(tmp_path, two_node_replicas=True))
    ground.until_event("SnapshotCompleted", times=2)
    ground.inject(do="kill", nodes=list(HOME))
    ground.until(lambda: not any(map(ground.cluster.fleet.running, HOME)), "all daemons are dead")
    for name in HOME:
        ground.inject(do="start", node=name)
    details = until_rolled_back(ground)
    assert details["tier"] == "memory"
    same_losses(ground.stop_job())


def test_memory_is_given_back_when_the_job_ends(ground: Playground, tmp_path: Path) -> None:
    ground.submit(snapshot_job(tmp_path, failures=3))
    ground.until_event("SnapshotCompleted")
    memory = ground.snapshot_directory
    assert len(list(memory.glob("*/*/device-0/slot-*"))) >= len(HOME)
    ground.stop_job()
    ground.until(lambda: not list(memory.glob("*/*/device-0")), "the arenas are gone")


def test_the_only_owner_is_lost_with_its_memory_and_its_buddy_has_a_copy(
    ground: Playground, tmp_path: Path, same_losses: SameLosses
) -> None:
    spare = ["node-2", "node-3"]
    ground.inject(do="kill", nodes=spare)
    ground.until(
        lambda: all(ground.state["nodes"][name]["state"] == "OFFLINE" for name in spare), "two nodes are left"
    )
    run = ground.submit(snapshot_job(tmp_path, "aec+buddy", two_node_replicas=True, failures=0))
    completed = ground.until_event("SnapshotCompleted", times=2)
    assert completed["details"]["buddies"] == {"node-0": "node-1", "node-1": "node-0"}
    assert completed["details"]["unprotected"] == []
    assert len(ground.state["pipelines"]) == 1
    assert len(list(ground.snapshot_directory.glob("*/*/copy-0-*"))) == 2
    ground.inject(do="kill", node="node-1")
    [memory] = ground.snapshot_directory.glob("*node-1")
    shutil.rmtree(memory)
    ground.inject(do="start", node="node-2")
    details = until_rolled_back(ground)
    assert details["tier"] == "buddy" and details["sources"] == ["node-0"]
    assert not run.named("ShardDamaged")
    same_losses(ground.stop_job())
    ground.until(lambda: not list(ground.snapshot_directory.glob("*/*/copy-*")), "copies are gone, too")
