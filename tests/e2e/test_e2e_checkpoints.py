"""Persistent checkpoints of running jobs: written while the job trains, and read when no state in memory is
left.
"""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed import checkpoint as dcp
from typer.testing import CliRunner

from ftd.cli.main import app
from ftd.config.job import load_job_data
from ftd.transport.wire.public import JobData
from runtime.checkpoint_reader import FtdCheckpointReader
from storage.checkpoint import CheckpointStore
from tests.helpers.playground import FROZEN, HOME, RELATIVE, Json, Playground, Run, write_job
from tests.helpers.shared_cluster import SharedCluster
from tests.helpers.tiny import build

SameLosses = Callable[[Run], None]
Reference = Callable[[int], list[float]]


@pytest.fixture
def ground(shared: SharedCluster, request: pytest.FixtureRequest) -> Iterator[Playground]:
    """Lend a cluster of nodes with two devices and slow disks that does not wait long for hosts that never
    return.
    """
    environment, timing = {"FTD_NODE_CHECKPOINT_RATE_MIB_S": "1"}, {"lost_state_s": 0.5}
    with shared.lent(request.node, devices_per_node=2, environment=environment, timing=timing) as ground:
        yield ground


@pytest.fixture
def same_losses(reference: Callable[[int], list[float]]) -> SameLosses:
    """Return a check that every step since the first published one has the undisturbed run's loss, each time
    that it was committed.
    """

    return lambda run: check(run, reference)


def check(run: Run, reference: Reference) -> None:
    found = [(e["step"], e["details"]["loss"]) for e in run.named("StepCommitted")]
    steps = sorted({step for step, _ in found})
    assert steps == list(range(steps[0], steps[-1] + 1))
    expected = reference(steps[-1])
    assert [loss for _, loss in found] == pytest.approx(
        [expected[step - 1] for step, _ in found], rel=RELATIVE
    )


def checkpoint_job(
    directory: Path, *, zero1: bool = False, within: str = "auto", every: str = "10", **options: object
) -> JobData:
    """Return a job whose checkpoints are in ``directory / "kept"``.

    :param every: steps between two of them, in TOML.
    :param within: how the two devices of each stage share its work.
    """
    path = write_job(directory, within_node=within, **options)  # type: ignore[arg-type]
    text = path.read_text().replace("[training]\n", f"[training]\nzero1 = {str(zero1).lower()}\n")
    snapshot = f'[snapshot]\nevery_steps = 5\nprotection = "{"arc:1+aor" if zero1 else "aec"}"\n'
    path.write_text(text + snapshot + f'[checkpoint]\nurl = "kept"\nevery_steps = {every}\nkeep = 9\n')
    return load_job_data(path)


def verify(url: Path) -> Json:
    """Run ``ftd checkpoint verify``, which must find nothing wrong."""
    result = CliRunner().invoke(app, ["checkpoint", "verify", str(url), "--json"])
    assert result.exit_code == 0, result.output
    return json.loads(result.output)


def flip(url: Path, step: int) -> None:
    path = url / f"step-{step:012d}" / "layer-0002.bin"
    data = bytearray(path.read_bytes())
    data[100] ^= 4
    path.write_bytes(data)


def steps_in(url: Path) -> tuple[int, ...]:
    return CheckpointStore.at(str(url), job="tiny").steps()


def until_rolled_back(ground: Playground, run: Run, times: int = 1) -> Json:
    """Return the last of this number of rollbacks, after which training continues and writes checkpoints
    again.
    """
    details = ground.until_event("RolledBack", times=times)["details"]
    written = len(run.named("CheckpointCompleted"))
    ground.until_step(details["from_step"] + 5)
    ground.until_event("CheckpointCompleted", times=written + 1)
    assert len(run.named("RolledBack")) == times
    return details


def test_checkpoints_are_written_during_training_and_a_failing_location_costs_nothing(
    ground: Playground, tmp_path: Path, same_losses: SameLosses
) -> None:
    url = tmp_path / "kept"
    run = ground.submit(checkpoint_job(tmp_path, two_node_replicas=True))
    written = ground.until_event("CheckpointCompleted", times=2)
    found = verify(url)
    assert written["step"] in [one["step"] for one in found["checkpoints"]]
    model = nn.Sequential(*build().layers).double()
    before = model[3][0].weight.detach().clone()
    state = {"model": model.state_dict()}
    dcp.load(state, storage_reader=FtdCheckpointReader(str(url), step=written["step"]))
    assert not torch.equal(state["model"]["3.0.weight"], before)

    url.rename(tmp_path / "unmounted")
    given_up = ground.until_event("CheckpointAbandoned")
    assert "does not exist" in given_up["reason"], given_up
    ground.further()
    (tmp_path / "unmounted").rename(url)
    ground.until_event("CheckpointCompleted", times=len(run.named("CheckpointCompleted")) + 1)
    assert not run.named("RolledBack") and not run.named("TrainerLost")
    same_losses(ground.stop_job())
    verify(url)


def test_the_coordinator_is_killed_while_a_checkpoint_is_written(ground: Playground, tmp_path: Path) -> None:
    """Four disks of 1 MB/s each need more than a second for five megabytes, so the coordinator dies while they
    write. The next coordinator writes the next snapshot, and chooses the interval from what that costs.
    """
    url = tmp_path / "kept"
    run = ground.submit(checkpoint_job(tmp_path, failures=3, arguments="width = 192", every='"auto"'))
    ground.play({"on_event": "CheckpointStarted", "do": "kill", "role": "coordinator"})
    given_up = ground.until_event("CheckpointAbandoned")
    assert given_up["reason"] == "the coordinator was restarted"
    step = ground.until_event("CheckpointCompleted")["step"]
    assert step > given_up["step"]
    chosen = ground.until_event("CheckpointIntervalChosen")["details"]
    assert chosen["every_steps"] * chosen["step_s"] >= 10 * chosen["write_s"] > 10
    ground.until(lambda: ground.state["checkpoint"]["every_steps"] == chosen["every_steps"], "published")
    assert [one["step"] for one in verify(url)["checkpoints"]][-1] == step
    ground.until(lambda: not list(url.glob(f".step-*{given_up['step']}.*")), "what was begun is removed")
    assert not run.named("RolledBack") and not run.named("TrainerLost")
    ground.stop_job()
    verify(url)


def test_more_hosts_are_lost_than_the_protection_withstands(
    ground: Playground, tmp_path: Path, same_losses: SameLosses
) -> None:
    run = ground.submit(checkpoint_job(tmp_path, failures=3))
    ground.until_event("CheckpointCompleted")
    ground.play(
        {"after_s": 0, "do": "kill", "nodes": ["node-1", "node-2"]},
        {"after_s": 0, "do": "kill", "nodes": ["node-0", "node-3"], "target": "trainer"},
    )
    details = until_rolled_back(ground, run)
    assert details["tier"] == "persistent" and details["to_step"] <= details["from_step"]
    same_losses(ground.stop_job())


def test_a_stopped_job_continues_later_on_other_hosts_with_fewer_devices(
    ground: Playground, tmp_path: Path, same_losses: SameLosses
) -> None:
    """The first cluster has four nodes of two devices, each with half of the state; the second has three nodes
    of one. When the job finishes, it writes a checkpoint of its last step.
    """
    url = tmp_path / "kept"
    ground.submit(checkpoint_job(tmp_path, failures=3, within="shard"))
    ground.until_event("CheckpointCompleted", times=2)
    same_losses(ground.stop_job())
    newest = steps_in(url)[0]
    ground.inject(do="kill", nodes=list(HOME))
    single = ("single-0", "single-1", "single-2")
    for name in single:
        ground.on_loop(ground.cluster.start_node(name, devices=1))
    ground.until(lambda: ground.healthy == set(single), "nodes of one device, and no others")
    last = newest + 17
    run = ground.submit(checkpoint_job(tmp_path, steps=last))
    resumed = ground.until_event("JobResumed")
    assert (resumed["step"], resumed["details"]["tier"]) == (newest, "persistent")
    same_losses(ground.finish())
    assert (min(run.losses), max(run.losses)) == (newest + 1, last)
    assert steps_in(url)[0] == last

    # Another model with the same name and number of layers is rejected by name, and nothing there is
    # changed.
    kept = steps_in(url)
    ground.offer(checkpoint_job(tmp_path, steps=last + 50, arguments="width = 40"))
    reason = ground.until_event("JobFailed")["reason"]
    assert "checkpoint.url" in reason and "of (48, 48) float64" in reason and "(40, 40) float64" in reason
    assert "Traceback" not in reason and steps_in(url) == kept


def test_sharded_state_is_restored_without_shards_on_other_hosts(
    ground: Playground, tmp_path: Path, tied_reference: Reference
) -> None:
    """Four ranks hold a quarter of the optimizer's state each, and two layers share a weight: the checkpoint
    is like any other.
    """
    url = tmp_path / "kept"
    run = ground.submit(checkpoint_job(tmp_path, zero1=True, failures=3, arguments="tied = true"))
    written = ground.until_event("CheckpointCompleted", times=2)
    ground.until(lambda: len(ground.state["pipelines"]) == 4, "four pipelines in the state")
    assert not run.named("SnapshotAbandoned")
    check(ground.stop_job(), tied_reference)
    assert written["step"] in [one["step"] for one in verify(url)["checkpoints"]]
    model = nn.Sequential(*build(tied=True).layers).double()
    before = model[0][0].weight.detach().clone()
    state = {"model": model.state_dict()}
    del state["model"]["5.0.weight"]  # It is stored under the name of the first one.
    dcp.load(state, storage_reader=FtdCheckpointReader(str(url)))
    assert not torch.equal(state["model"]["0.0.weight"], before)

    for name in ("node-1", "node-3"):
        ground.inject(do="kill", node=name)
    newest = steps_in(url)[0]
    run = ground.submit(checkpoint_job(tmp_path, steps=newest + 12, arguments="tied = true"))
    resumed = ground.until_event("JobResumed")
    assert (resumed["step"], resumed["details"]["tier"]) == (newest, "persistent")
    ground.until(lambda: len(ground.state["pipelines"]) == 2, "two pipelines in the state")
    check(ground.finish(), tied_reference)
    assert (min(run.losses), max(run.losses)) == (newest + 1, newest + 12)


@pytest.mark.parametrize(
    ("within", "reference", "arguments"),
    [
        ("shard", "tied_reference", "tied = true"),
        ("shard", "frozen_reference", FROZEN),
        ("tensor", "tied_reference", "tied = true"),
    ],
    ids=["shard", "frozen-shard", "tensor"],
)
def test_parts_on_devices_are_rolled_back_to_and_restored_as_replicas(
    ground: Playground,
    tmp_path: Path,
    request: pytest.FixtureRequest,
    within: str,
    reference: str,
    arguments: str,
) -> None:
    """Each of the four nodes has all layers, in halves on its two devices: any single node is enough to roll
    back.
    """
    url, undisturbed = tmp_path / "kept", request.getfixturevalue(reference)
    job = checkpoint_job(tmp_path, within=within, failures=3, arguments=arguments)
    run = ground.submit(job)
    ground.until_event("CheckpointCompleted")
    stages = [stage for pipeline in ground.state["pipelines"] for stage in pipeline["stages"]]
    assert {(stage["within"], len(stage["devices"])) for stage in stages} == {(within, 2)}
    ground.play(
        {"after_s": 0, "do": "kill", "node": "node-1"},
        {"after_s": 0, "do": "kill", "nodes": ["node-0", "node-2", "node-3"], "target": "trainer"},
    )
    details = until_rolled_back(ground, run)
    assert details["tier"] == "memory"
    check(ground.stop_job(), undisturbed)

    ground.inject(do="kill", node="node-3")
    newest = steps_in(url)[0]
    run = ground.submit(checkpoint_job(tmp_path, steps=newest + 12, arguments=arguments))
    resumed = ground.until_event("JobResumed")
    assert (resumed["step"], resumed["details"]["tier"]) == (newest, "persistent")
    check(ground.finish(), undisturbed)
    assert (min(run.losses), max(run.losses)) == (newest + 1, newest + 12)


def test_other_hosts_restore_the_newest_intact_checkpoint_after_all_hosts_are_lost(
    ground: Playground, tmp_path: Path, same_losses: SameLosses
) -> None:
    url = tmp_path / "kept"
    run = ground.submit(checkpoint_job(tmp_path, two_node_replicas=True))
    ground.until_event("CheckpointCompleted", times=2)
    ground.inject(do="kill", nodes=list(HOME))
    ground.until(lambda: not any(map(ground.cluster.processes.running, HOME)), "all daemons are dead")
    for arenas in ground.snapshot_directory.iterdir():
        shutil.rmtree(arenas)
    ground.until_phase("PAUSED")
    newest, before, *_ = steps_in(url)
    flip(url, newest)
    for name in ("other-0", "other-1", "other-2"):
        ground.inject(do="start", node=name)
    details = until_rolled_back(ground, run, times=2)
    assert (details["tier"], details["to_step"]) == ("persistent", before)
    [skipped] = [event for event in run.named("CheckpointSkipped") if event["step"] == newest][:1]
    assert "layer-0002.bin" in skipped["reason"]
    same_losses(ground.stop_job())
