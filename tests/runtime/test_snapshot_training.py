"""Tests of snapshots with real trainers: losses as without snapshots, kills in the middle, another layout
afterwards.
"""

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from statemachine.messages import trainer as p
from statemachine.messages.common import SnapshotFailed, SnapshotStarted
from storage.arena import Arena
from tests.helpers.harness import Cluster, TrainerHandle, pipeline
from tests.helpers.pipelines import THREE_AND_ONE, TWO_AND_TWO, finish, losses_of, replicas_agree
from tests.helpers.reference import load, reference_run
from tests.helpers.runtime_support import gpt_data
from tests.helpers.snapshots import Layers, decoded, kept, losses_within, stage, vote_of

SPLIT = (
    pipeline((0, 2, [0, 1]), (2, 4, [2]), first_microbatch=0, microbatches=3),
    pipeline((0, 4, [3]), first_microbatch=3, microbatches=1),
)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster() as cluster:
        yield cluster


def data(steps: int, **changes: Any) -> p.TrainingData:
    return gpt_data(steps=steps, global_batch=16, microbatch_rows=4, clip_gradient_norm=1.0, **changes)


def start(
    cluster: Cluster,
    job: p.TrainingData,
    pipelines: Sequence[p.WorldPipeline],
    arenas: Path,
    limit_bytes: int | None = None,
    **resume: Any,
) -> list[TrainerHandle]:
    trainers = cluster.fork(4)
    # The harness numbers devices consecutively; an arena belongs to a position, not to a process.
    for number, trainer in enumerate(trainers):
        trainer.device = number
    cluster.prepare(trainers, job, arenas=arenas, arena_limit_bytes=limit_bytes)
    cluster.quiesce(trainers)
    fields = {"step": 0, "vote": None, "nodes": ("a", "b", "c", "d"), "protection": "aec"} | resume
    cluster.resume(trainers, pipelines, **fields)
    return trainers


def snap(cluster: Cluster, trainers: Sequence[TrainerHandle], by: int = 0) -> int:
    """Request a snapshot, and return the step after which it is taken."""
    trainers[by].send(p.StartSnapshot(generation=cluster.generation))
    steps = {t.take(SnapshotStarted, generation=cluster.generation).step for t in trainers}
    (step,) = steps
    return step


def snapped(trainers: Sequence[TrainerHandle], step: int) -> list[p.ShardWritten]:
    return [trainer.take(p.ShardWritten, step=step) for trainer in trainers]


def without(arenas: Path, step: int, one_lost: bool) -> Layers:
    """Return all layers of the step, without reading one owner's arena of each group."""
    layers: Layers = {}
    for parts in kept(arenas, step).values():
        lost = max(losses_within(parts), key=len) if one_lost else ()
        layers |= decoded(parts, lost, min(set(parts) - set(lost)))
    return layers


@pytest.mark.parametrize("pipelines", [TWO_AND_TWO, SPLIT])
def test_losses_are_those_of_a_run_without(
    cluster: Cluster, tmp_path: Path, pipelines: tuple[p.WorldPipeline, ...]
) -> None:
    """Snapshots are taken repeatedly while training, and again in another layout that starts from what one
    loss leaves.
    """
    steps = 60
    job = data(steps=steps)
    expected, _ = reference_run(load(job), job, steps)
    trainers = start(cluster, job, pipelines, tmp_path)
    taken: list[int] = []
    for number in range(3):
        step = snap(cluster, trainers, by=number)
        assert all(report.size_bytes > 0 for report in snapped(trainers, step))
        for trainer in trainers:
            trainer.send(p.RetainLocalSnapshot(step=step))
        taken.append(step)
    last = taken[-1]
    assert taken == sorted(set(taken)) and last < steps - 2, "the machine is too slow for this test"
    plain = plain_losses(cluster, job, pipelines)
    assert losses_of(trainers[0], 1, steps) == plain
    assert plain == pytest.approx(expected, rel=1e-9)
    replicas_agree(trainers)
    finish(trainers)
    for arena in tmp_path.glob("device-*"):
        assert [m.step for m in Arena.open(arena).snapshots] in ([last], [])

    staging = tmp_path / "staging"
    stage(without(tmp_path, last, one_lost=True), staging)
    vote = vote_of(tmp_path, last)
    assert vote.loss == plain[last - 1]
    back = {"step": last, "vote": vote, "restore": str(staging), "lineage": 2}
    again = start(cluster, job, THREE_AND_ONE, tmp_path / "new", **back)
    assert all(report.bytes_moved == 0 for report in cluster.resumed(again))
    for trainer in again:
        assert losses_of(trainer, last + 1, steps) == pytest.approx(plain[last:], rel=1e-9)
    replicas_agree(again)
    # Trainers that have trained roll back as well, and drop their later steps.
    reports = cluster.quiesce(again, mode="boundary")
    assert {report.lineage for report in reports} == {2}
    cluster.resume(again, pipelines, last, vote, restore=str(staging), lineage=3)
    cluster.resumed(again)
    assert losses_of(again[0], last + 1, steps) == pytest.approx(plain[last:], rel=1e-9)
    finish(again)


def test_the_state_after_the_last_step_is_saved_when_all_steps_are_done(
    cluster: Cluster, tmp_path: Path
) -> None:
    """There is no vote any more: each trainer gets a request, and a job that starts from the snapshot has its
    state.
    """
    job = data(steps=3)
    trainers = start(cluster, job, SPLIT, tmp_path)
    losses = losses_of(trainers[0], 1, 3)
    digests = replicas_agree(trainers)
    for trainer in trainers:
        trainer.send(p.StartSnapshot(generation=cluster.generation - 1, last=True))  # of another generation
        trainer.send(p.StartSnapshot(generation=cluster.generation, last=True))
    begun = [trainer.take(SnapshotStarted, generation=cluster.generation).step for trainer in trainers]
    assert begun == [3, 3, 3, 3]
    assert all(report.size_bytes > 0 for report in snapped(trainers, 3))
    vote = vote_of(tmp_path, 3)
    assert vote.loss == losses[-1]
    finish(trainers)

    staging = tmp_path / "staging"
    stage(without(tmp_path, 3, one_lost=True), staging)
    back = {"step": 3, "vote": vote, "restore": str(staging), "lineage": 2}
    # Some trainers restore invalid state: they report it and get it once more, while the others wait.
    (staging / "layer-3.staged").rename(tmp_path / "layer-3.staged")
    again = start(cluster, job, THREE_AND_ONE, tmp_path / "new", **back)
    without_it = {r for one in THREE_AND_ONE for s in one.stages if s.end_layer == 4 for r in s.ranks}
    for rank in without_it:
        said = again[rank].take(p.StagingCorrupted, generation=cluster.generation)
        assert "layer 3" in said.detail and said.part == ""
    (tmp_path / "layer-3.staged").rename(staging / "layer-3.staged")
    for rank in without_it:
        frame = cluster.resume_frame(rank, 4, THREE_AND_ONE, step=3, vote=vote)
        fields = {"nodes": ("a", "b", "c", "d"), "protection": "aec"} | back
        again[rank].send(msgspec.structs.replace(frame, **fields))
    assert replicas_agree(again) == digests
    finish(again)


def plain_losses(cluster: Cluster, job: p.TrainingData, pipelines: Sequence[p.WorldPipeline]) -> list[float]:
    trainers = cluster.fork(4)
    cluster.prepare(trainers, job)
    cluster.quiesce(trainers)
    cluster.resume(trainers, pipelines, step=0)
    losses = losses_of(trainers[0], 1, job.steps)
    finish(trainers)
    return losses


def test_a_trainer_killed_in_the_middle_leaves_the_snapshot_before(cluster: Cluster, tmp_path: Path) -> None:
    """There is about a megabyte per device, so the copy takes about as long as the delivery of the signal."""
    job = data(steps=10_000, arguments={"width": 128, "heads": 4})
    for attempt in range(3):
        arenas = tmp_path / str(attempt)
        trainers = start(cluster, job, TWO_AND_TWO, arenas)
        first = snap(cluster, trainers)
        snapped(trainers, first)
        before = without(arenas, first, one_lost=False)
        second = snap(cluster, trainers)
        time.sleep(attempt * 0.002)
        for trainer in trainers:
            trainer.kill()
        for trainer in trainers:
            cluster.wait_exit(trainer.pid)
        held = {m.step for a in arenas.glob("device-*") for m in Arena.open(a).snapshots}
        assert held <= {first, second} and first in held
        assert without(arenas, first, one_lost=True) == before
        finish(trainers)
    # New processes find the snapshots, and continue from them.
    stage(before, tmp_path / "staging")
    vote = vote_of(arenas, first)
    again = start(
        cluster,
        job,
        TWO_AND_TWO,
        arenas,
        step=first,
        vote=vote,
        restore=str(tmp_path / "staging"),
        lineage=cluster.generation,
    )
    cluster.resumed(again)
    third = snap(cluster, again)
    snapped(again, third)
    assert without(arenas, third, one_lost=True).keys() == before.keys()
    finish(again)


def test_a_generation_that_ends_completes_its_snapshot(cluster: Cluster, tmp_path: Path) -> None:
    job = data(steps=10_000, arguments={"width": 128, "heads": 4})
    trainers = start(cluster, job, TWO_AND_TWO, tmp_path)
    generation = cluster.generation
    step = snap(cluster, trainers)
    reports = cluster.quiesce(trainers)
    assert {report.generation for report in snapped(trainers, step)} == {generation}
    assert all(report.committed_step >= step for report in reports)
    assert sorted(without(tmp_path, step, one_lost=True)) == [0, 1, 2, 3]
    # A request of the previous generation is ignored.
    best = max(reports, key=lambda report: report.committed_step)
    fields = {"nodes": ("a", "b", "c", "d"), "protection": "aec"}
    cluster.resume(trainers, TWO_AND_TWO, best.committed_step, best.vote, **fields)
    cluster.resumed(trainers)
    trainers[0].send(p.StartSnapshot(generation=generation))
    trainers[0].take(p.TrainerStepped, step=best.committed_step + 3)
    later = snap(cluster, trainers, by=1)
    assert later > best.committed_step + 2
    snapped(trainers, later)
    finish(trainers)


def test_too_little_memory_is_reported_and_training_continues(cluster: Cluster, tmp_path: Path) -> None:
    job = data(steps=40)
    expected, _ = reference_run(load(job), job, 40)
    trainers = start(cluster, job, TWO_AND_TWO, tmp_path, limit_bytes=8192)
    step = snap(cluster, trainers)
    for trainer in trainers:
        failed = trainer.take(SnapshotFailed, step=step)
        assert "8192 bytes leaves 8192" in failed.detail
    assert losses_of(trainers[0], 1, 40) == pytest.approx(expected, rel=1e-9)
    replicas_agree(trainers)
    assert all("the arena's limit" in trainer.output.decode() for trainer in trainers)
    finish(trainers)


def test_an_impossible_protection_is_reported_and_training_continues(
    cluster: Cluster, tmp_path: Path
) -> None:
    """Two-loss parity for more owners than it supports would be an example; here the scheme is unknown."""
    trainers = start(cluster, data(steps=40), TWO_AND_TWO, tmp_path, protection="aec3")
    step = snap(cluster, trainers)
    for trainer in trainers:
        assert "'aec3' is not a protection scheme" in trainer.take(SnapshotFailed, step=step).detail
    finish(trainers)


def test_without_an_arena_an_order_is_answered(cluster: Cluster) -> None:
    trainers = cluster.fork(1)
    cluster.prepare(trainers, data(steps=10_000))
    cluster.quiesce(trainers)
    alone = (pipeline((0, 4, [0]), first_microbatch=0, microbatches=4),)
    cluster.resume(trainers, alone, step=0)
    step = snap(cluster, trainers)
    failed = trainers[0].take(SnapshotFailed)
    assert (failed.step, failed.detail) == (step, "this trainer was given no memory for snapshots")
    trainers[0].take(p.TrainerStepped, step=step + 2)
    finish(trainers)
    assert msgspec.structs.asdict(failed)["generation"] == cluster.generation
