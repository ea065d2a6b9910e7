"""Real trainers, controlled message by message: numerics of heterogeneous pipelines and of every kind of
recovery.
"""

import signal
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from statemachine.messages import trainer as p
from statemachine.messages.common import PeerSuspected, Quiesce, ReplicaDigests
from statemachine.messages.values import Vote
from tests.helpers.harness import Cluster, TrainerHandle, pipeline
from tests.helpers.pipelines import LAYERS, THREE_AND_ONE, TWO_AND_TWO, finish, losses_of, replicas_agree
from tests.helpers.reference import load, reference_run
from tests.helpers.runtime_support import data_for, gpt_data, script
from tests.helpers.waiting import until


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster() as cluster:
        yield cluster


def data(steps: int = 5, **changes: object) -> p.TrainingData:
    return gpt_data(steps=steps, global_batch=16, microbatch_rows=4, clip_gradient_norm=1.0, **changes)


def start(cluster: Cluster, count: int, job: p.TrainingData) -> list[TrainerHandle]:
    trainers = cluster.fork(count)
    cluster.prepare(trainers, job)
    for report in cluster.quiesce(trainers):
        assert (report.committed_step, report.ready_step, report.vote) == (0, None, None)
        assert report.held == tuple(range(LAYERS))
    return trainers


SPLIT_ROWS = (pipeline((0, 2, [0, 1, 2]), (2, 4, [3, 4]), first_microbatch=0, microbatches=4),)
ALONE = (pipeline((0, 4, [0]), first_microbatch=0, microbatches=4),)


def test_a_trainer_that_reads_samples_reports_it(cluster: Cluster, tmp_path: Path) -> None:
    text = """
    import time

    class Slow(Rows):
        def __getitem__(self, index):
            time.sleep(0.05)
            return super().__getitem__(index)

    def build():
        return Training(layers=[nn.Linear(3, 1)], loss=functional.mse_loss, optimizer=sgd, dataset=Slow())
    """
    script(tmp_path, text)
    [trainer] = cluster.fork(1)
    cluster.prepare([trainer], data_for("mine.py:build", tmp_path))
    cluster.quiesce([trainer])
    cluster.resume([trainer], (pipeline((0, 1, [0]), first_microbatch=0, microbatches=4),), step=0)
    until(lambda: trainer.last_beat is not None and trainer.last_beat.reading)
    finish([trainer])


def test_trainers_that_created_different_models_take_no_step(cluster: Cluster, tmp_path: Path) -> None:
    text = """
    import os

    def build():
        layers = [nn.Linear(3, 4), nn.Linear(4, 1)]
        nn.init.constant_(layers[1].bias, os.getpid())
        return Training(layers=layers, loss=functional.mse_loss, optimizer=sgd, dataset=Rows())
    """
    script(tmp_path, text)
    job = data_for("mine.py:build", tmp_path)
    trainers = cluster.fork(2)
    cluster.prepare(trainers, job)
    cluster.quiesce(trainers)
    whole = [pipeline((0, 2, [n]), first_microbatch=2 * n, microbatches=2) for n in range(2)]
    cluster.resume(trainers, tuple(whole), step=0)
    for trainer in trainers:
        assert "began with different parameters of layer 1" in trainer.take(p.Raised).detail
    finish(trainers)


@pytest.mark.parametrize(
    ("pipelines", "ranks"), [(THREE_AND_ONE, 4), (TWO_AND_TWO, 4), (SPLIT_ROWS, 5), (ALONE, 1)]
)
def test_losses_do_not_depend_on_the_layout(
    cluster: Cluster, pipelines: tuple[p.WorldPipeline, ...], ranks: int
) -> None:
    job = data(steps=4, arguments={"dropout": 0.1})
    expected, _ = reference_run(load(job), job, 4)
    trainers = start(cluster, ranks, job)
    cluster.resume(trainers, pipelines, step=0)
    assert all(r.bytes_moved == 0 for r in cluster.resumed(trainers))
    for trainer in trainers:
        votes = [trainer.take(p.TrainerStepped, step=step).vote for step in range(1, 5)]
        assert [vote.loss for vote in votes] == pytest.approx(expected, rel=1e-9)
        warm_up = [3e-3 * step / 20 for step in range(1, 5)]
        assert [vote.learning_rate for vote in votes] == pytest.approx(warm_up)
    replicas_agree(trainers)
    finish(trainers)


def target_of(reports: Sequence[p.TrainerQuiesced]) -> tuple[int, Vote | None]:
    """Apply the coordinator's rule: the newest step that any rank committed, which all others can reach."""
    best = max(reports, key=lambda r: r.committed_step)
    for report in reports:
        assert best.committed_step in (report.committed_step, report.ready_step)
    return best.committed_step, best.vote


def moves(layers: Sequence[int], source: int, target: int) -> list[p.TransferData]:
    return [p.TransferData(layer=layer, source=source, target=target) for layer in layers]


def test_kills_and_joins_do_not_change_the_losses(cluster: Cluster) -> None:
    """There are two kills and two joins in 24 steps, anywhere within a step."""
    steps = 24
    job = data(steps=steps)
    expected, _ = reference_run(load(job), job, steps)
    trainers = start(cluster, 4, job)
    cluster.resume(trainers, TWO_AND_TWO, step=0)
    seen: dict[int, float] = {}

    def watch(trainer: TrainerHandle, last: int) -> None:
        while min(last, steps) not in seen:
            stepped = trainer.take(p.TrainerStepped)
            seen[stepped.step] = stepped.vote.loss

    watch(trainers[0], 3)
    for kill_after in (5, 13):
        watch(trainers[0], kill_after)
        trainers[3].kill()
        survivors = trainers[:3]
        step, vote = target_of(cluster.quiesce(survivors))
        if vote is not None:
            seen[step] = vote.loss
        transfers = moves([1], 0, 2) + moves([2, 3], 1, 2)
        left = (
            pipeline((0, 2, [0]), (2, 4, [1]), first_microbatch=1, microbatches=3),
            pipeline((0, 4, [2]), first_microbatch=0, microbatches=1),
        )
        cluster.resume(survivors, left, step, vote, transfers)
        moved = [r.bytes_moved for r in cluster.resumed(survivors)]
        assert moved[:2] == [0, 0] and moved[2] > 0
        watch(survivors[0], step + 2)

        joiner = cluster.fork(1)
        cluster.prepare(joiner, job)
        reports = cluster.quiesce([*survivors, *joiner], mode="boundary")
        step, vote = target_of(reports[:3])
        assert vote is not None and {r.committed_step for r in reports[:3]} == {step}
        assert all(r.ready_step is None for r in reports)
        assert (reports[3].committed_step, reports[3].held) == (0, (0, 1, 2, 3))
        seen[step] = vote.loss
        trainers = [*survivors, *joiner]
        cluster.resume(trainers, TWO_AND_TWO, step, vote, moves([1, 2, 3], 2, 3))
        assert cluster.resumed(trainers)[3].bytes_moved > 0
        watch(trainers[0], step + 2)
    watch(trainers[0], steps)
    seen |= trainers[0].losses()
    replicas_agree(trainers)
    assert [seen[step] for step in sorted(seen)] == pytest.approx(
        [expected[step - 1] for step in sorted(seen)], rel=1e-9
    )
    assert steps in seen and len(seen) >= steps - 2
    finish(trainers)


def test_failures_during_a_recovery(cluster: Cluster) -> None:
    """One rank dies. While the others form a group, a second one hangs and never comes; then a third is killed
    in its steps.
    """
    job = data(steps=1000)
    expected, _ = reference_run(load(job), job, 12)
    trainers = start(cluster, 4, job)
    three_replicas = (
        pipeline((0, 2, [0]), (2, 4, [1]), first_microbatch=0, microbatches=2),
        pipeline((0, 4, [2]), first_microbatch=2, microbatches=1),
        pipeline((0, 4, [3]), first_microbatch=3, microbatches=1),
    )
    cluster.resume(trainers, three_replicas, step=0)
    trainers[0].take(p.TrainerStepped, step=2)
    trainers[3].kill()
    trainers[2].kill(signal.SIGSTOP)
    first_two = trainers[:2]
    step, vote = target_of(cluster.quiesce(first_two))
    left = (
        pipeline((0, 2, [0]), (2, 4, [1]), first_microbatch=0, microbatches=3),
        pipeline((0, 4, [2]), first_microbatch=3, microbatches=1),
    )
    cluster.resume(trainers[:3], left, step, vote)
    time.sleep(0.1)  # Forming: rank 2 is stopped and does not come.
    reports = cluster.quiesce(first_two)
    assert target_of(reports) == (step, vote)
    assert all(report.ready_step is None for report in reports)
    assert [report.held for report in reports] == [(0, 1), (2, 3)]
    alone = (pipeline((0, 2, [0]), (2, 4, [1]), first_microbatch=0, microbatches=4),)
    cluster.resume(first_two, alone, step, vote)
    cluster.resumed(first_two)
    assert losses_of(first_two[0], step + 1, step + 3) == pytest.approx(expected[step : step + 3], rel=1e-9)
    trainers[2].kill()
    finish(trainers)


def test_a_neighbour_hints_at_a_dead_peer_and_survives(cluster: Cluster) -> None:
    job = data(steps=100_000)
    trainers = start(cluster, 2, job)
    cluster.resume(trainers, (pipeline((0, 2, [0]), (2, 4, [1]), first_microbatch=0, microbatches=4),), 0)
    trainers[0].take(p.TrainerStepped)
    trainers[1].kill()
    hint = trainers[0].take(PeerSuspected)
    assert hint.generation == cluster.generation and hint.detail
    (report,) = cluster.quiesce(trainers[:1])
    assert report.committed_step > 0 and report.held == (0, 1)
    finish(trainers)


def test_state_moves_between_all_ranks_at_once(cluster: Cluster) -> None:
    """Every rank is a source and a target: two pipelines swap their halves, and the reported holdings are
    right.
    """
    job = data(steps=6)
    expected, _ = reference_run(load(job), job, 6)
    trainers = start(cluster, 2, job)
    one = (pipeline((0, 2, [0]), (2, 4, [1]), first_microbatch=0, microbatches=4),)
    cluster.resume(trainers, one, step=0)
    cluster.resumed(trainers)
    trainers[0].take(p.TrainerStepped, step=1)
    reports = cluster.quiesce(trainers, mode="boundary")
    step, vote = target_of(reports)
    assert [r.held for r in reports] == [(0, 1), (2, 3)]
    swapped = (pipeline((0, 2, [1]), (2, 4, [0]), first_microbatch=0, microbatches=4),)
    cluster.resume(trainers, swapped, step, vote, moves([0, 1], 0, 1) + moves([2, 3], 1, 0))
    assert all(r.bytes_moved > 0 for r in cluster.resumed(trainers))
    if step < 6:
        assert losses_of(trainers[0], step + 1, 6) == pytest.approx(expected[step:], rel=1e-9)
    replicas_agree(trainers)
    reports = cluster.quiesce(trainers, mode="boundary")
    # If all steps were done before the swap, no commit came after it, and both still hold what they had.
    held = [(2, 3), (0, 1)] if step < 6 else [(0, 1, 2, 3)] * 2
    assert [(r.committed_step, r.held) for r in reports] == [(6, one) for one in held]
    cluster.resume(trainers, swapped, 6, reports[0].vote)
    cluster.resumed(trainers)
    replicas_agree(trainers)
    finish(trainers)


def test_idle_trainers_and_superseded_instructions(cluster: Cluster) -> None:
    job = data(steps=1000)
    trainers = start(cluster, 2, job)
    busy, idle = trainers
    busy.send(cluster.resume_frame(0, 1, ALONE, 0))
    idle.send(cluster.resume_frame(-1, 1, ALONE, 0))
    busy.take(p.TrainerStepped, step=2)
    stale = cluster.resume_frame(0, 1, ALONE, 0)
    idle.send(Quiesce(generation=cluster.generation + 1, mode="abort"))
    idle.send(stale)  # It belongs to the previous generation and is ignored.
    cluster.generation += 1
    assert idle.take(p.TrainerQuiesced).held == (0, 1, 2, 3)
    cluster.generation += 1
    for mode in ("boundary", "abort"):
        busy.send(Quiesce(generation=cluster.generation, mode=mode))
        cluster.generation += 1
    cluster.generation -= 1
    report = busy.take(p.TrainerQuiesced, generation=cluster.generation)
    assert report.committed_step >= 2 and report.ready_step is None
    # The idle rank was absent meanwhile: its state is outdated, so it must receive everything.
    for rank, trainer in enumerate((idle, busy)):
        split = (pipeline((0, 2, [0]), (2, 4, [1]), first_microbatch=0, microbatches=4),)
        transfers = moves([0, 1], 1, 0)
        trainer.send(cluster.resume_frame(rank, 2, split, report.committed_step, report.vote, transfers))
    cluster.resumed((idle, busy))
    assert idle.take(p.TrainerStepped).step == report.committed_step + 1
    finish(trainers)


def test_computing_is_timed_without_waiting(cluster: Cluster) -> None:
    """One of two stages becomes 20 times slower: its own time shows that, the other's does not, and losses
    stay right.
    """
    job = data(steps=16)
    expected, _ = reference_run(load(job), job, 16)
    trainers = start(cluster, 2, job)
    stages = (pipeline((0, 2, [0]), (2, 4, [1]), first_microbatch=0, microbatches=4),)
    cluster.resume(trainers, stages, step=0)
    first, second = trainers
    before = [second.take(p.TrainerStepped, step=step) for step in range(1, 5)]
    second.send(p.Slow(factor=20.0))
    waiting = [first.take(p.TrainerStepped, step=step) for step in range(1, 17)]
    slow = [second.take(p.TrainerStepped, step=step) for step in range(7, 17)]
    assert [frame.vote.loss for frame in waiting] == pytest.approx(expected, rel=1e-9)
    assert all(0 < frame.microbatch_ms <= 1e3 * frame.step_s for frame in (*before, *waiting, *slow))
    slow_ms = statistics.median(frame.microbatch_ms for frame in slow)
    assert slow_ms > 4 * statistics.median(frame.microbatch_ms for frame in before)
    # The comparison uses the same steps because both stages share the machine with other work.
    assert slow_ms > 2 * statistics.median(frame.microbatch_ms for frame in waiting[6:])
    finish(trainers)


def test_copies_are_compared_and_a_flipped_bit_is_found(cluster: Cluster) -> None:
    job = data(steps=9, compare_replicas_every=2)
    trainers = start(cluster, 4, job)
    cluster.resume(trainers, TWO_AND_TWO, step=0)
    copies = [{trainer.device: trainer.take(ReplicaDigests, step=2) for trainer in trainers}]
    trainers[3].send(p.FlipBit())
    copies += [{trainer.device: trainer.take(ReplicaDigests, step=8) for trainer in trainers}]
    finish(trainers)
    for step, by_device in zip((2, 8), copies, strict=True):
        found: dict[int, set[int]] = {}
        for report in by_device.values():
            for layer, digest in report.digests.items():
                found.setdefault(layer, set()).add(digest)
        assert sorted(found) == list(range(LAYERS))
        differing = [layer for layer, digests in found.items() if len(digests) > 1]
        assert differing == ([] if step == 2 else [1])
