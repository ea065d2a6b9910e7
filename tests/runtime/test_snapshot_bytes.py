"""Tests that arenas hold exactly the state of their step, after every loss that the code covers."""

import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch

from runtime.engine.engine import Engine
from runtime.groups.communicator import SoloCommunicator
from runtime.monitoring.progress import ProgressMonitor
from runtime.snapshots.schedule import StepTimes
from runtime.snapshots.shard_units import ShardUnit
from statemachine.messages import trainer as p
from statemachine.messages.common import SnapshotFailed
from statemachine.messages.values import Vote
from storage.arena import Arena
from storage.manifest import PartDigester
from storage.shards import Bytes
from tests.helpers.harness import pipeline
from tests.helpers.runtime_support import data_for, gpt_data, script
from tests.helpers.snapshot_runs import SEVERAL, UNEQUAL, Rank, run
from tests.helpers.snapshots import Kept, decoded, kept, losses_within

MINE = """
    class Turned(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.rand(5, 3).t())
        def forward(self, x):
            return x @ self.weight

    def build():
        frozen = nn.Linear(5, 5)
        frozen.weight.requires_grad_(False)
        layers = [Turned(), nn.BatchNorm1d(5), frozen, nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 1)]
        return Training(
            layers=layers, loss=functional.mse_loss, dataset=Rows(),
            optimizer=lambda named: torch.optim.AdamW([p for _, p in named], lr=1e-2),
            scheduler=lambda o: torch.optim.lr_scheduler.StepLR(o, 2),
        )
"""


def gpt(directory: Path) -> p.TrainingData:
    return gpt_data(steps=10)


def mine(directory: Path) -> p.TrainingData:
    """Return a job with buffers that differ between replicas, a parameter with gaps, a frozen one, and a
    schedule.
    """
    return data_for("mine.py:build", script(directory, MINE).parent, steps=10, precision="float32")


TWO = (
    pipeline((0, 2, [0]), (2, 6, [1]), first_microbatch=0, microbatches=1),
    pipeline((0, 3, [2]), (3, 6, [3]), first_microbatch=1, microbatches=3),
)
FOUR = tuple(pipeline((0, 4, [n]), first_microbatch=n, microbatches=1) for n in range(4))


Job = Callable[[Path], p.TrainingData]


@pytest.mark.parametrize(
    ("job", "pipelines", "scheme", "losses"),
    [
        (gpt, UNEQUAL, "aec", 1 + 3),
        (gpt, UNEQUAL, "aec+arc:1", 1 + 3 + 3),
        (gpt, SEVERAL, "aec", 1 + 2),
        (gpt, FOUR, "aec2", 1 + 4 + 6),
        (gpt, FOUR, "none", 1),
        (mine, TWO, "aec", 1 + 2),
    ],
)
def test_every_covered_loss_gives_the_exact_bytes(
    tmp_path: Path, job: Job, pipelines: tuple[p.WorldPipeline, ...], scheme: str, losses: int
) -> None:
    ranks = run(job(tmp_path), pipelines, scheme, tmp_path)
    groups = kept(tmp_path, 2)
    end = max(stage.end_layer for one in pipelines for stage in one.stages)
    assert sorted(layer for first, last in groups for layer in range(first, last)) == list(range(end))
    checked = 0
    for (first, last), parts in groups.items():
        names = parts[0].group.owners
        assert sorted(parts) == list(range(len(pipelines)))
        assert all(part.group.owners == names for part in parts.values())
        some = losses_within(parts)
        assert len(some) == losses
        for lost in some:
            for owner in set(parts) - set(lost):
                rank = ranks[int(names[owner].removeprefix("node-"))]
                for layer, found in decoded(parts, lost, owner).items():
                    assert first <= layer < last
                    assert found == rank.packed[layer], f"layer {layer} without {lost}"
                    checked += 1
    assert checked >= end * losses
    for rank in ranks:
        (snapped,) = rank.reports
        assert isinstance(snapped, p.ShardWritten)
        assert snapped.size_bytes > 0 and snapped.copy_s > 0 and snapped.stall_s > 0


@pytest.mark.parametrize("job", [gpt, mine])
def test_the_next_step_waits_for_a_slow_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, job: Job
) -> None:
    """The snapshot contains nothing of the next step, however late it is copied."""
    make = ShardUnit.write
    alone = Alone(job(tmp_path), tmp_path / "arena")
    engine = alone.rank.engine

    def late(unit: ShardUnit, slot: Bytes, digests: PartDigester | None = None) -> None:
        writer = engine.snapshots
        # The main thread has not begun the capture yet.
        while writer is not None and writer._capture is not None:
            time.sleep(0.01)
        time.sleep(0.3)
        make(unit, slot, digests)

    alone.snap()
    alone.steps()
    monkeypatch.setattr(ShardUnit, "write", late)
    alone.snap()
    packed = {layer: engine.states.pack(layer) for layer in sorted(engine.owned_layers)}
    engine.step(lambda: False)
    assert alone.steps() == [1, 2]
    snapped = alone.rank.reports[-1]
    assert isinstance(snapped, p.ShardWritten) and snapped.stall_s > 0.1
    arena = Arena.open(tmp_path / "arena")
    newest = arena.snapshots[0]
    (group,) = newest.layout["groups"]
    parts = {0: Kept(arena, newest, group)}
    for layer, (header, payload) in decoded(parts, (), 0).items():
        assert (header, payload) == (packed[layer][0], packed[layer][1].numpy().tobytes())
    alone.close()


FROZEN = """
    def build():
        frozen = nn.Linear(1200, 1200)
        frozen.requires_grad_(False)
        layers = [nn.Linear(3, 1200), frozen, nn.Linear(1200, 1)]
        return Training(
            layers=layers, loss=functional.mse_loss, dataset=Rows(),
            optimizer=lambda named: torch.optim.AdamW([p for _, p in named], lr=1e-2),
        )
"""
MIB = 1024 * 1024


@pytest.mark.parametrize("damaged", [False, True])
def test_frozen_parameters_are_copied_once_into_a_slot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damaged: bool
) -> None:
    data = data_for("mine.py:build", script(tmp_path, FROZEN).parent, steps=10, precision="float32")
    alone = Alone(data, tmp_path / "arena")
    engine = alone.rank.engine
    assert engine.snapshots is not None
    make, copied = ShardUnit.write, [0]

    def counted(unit: ShardUnit, slot: Bytes, digests: PartDigester | None = None) -> None:
        copied[-1] += unit.size_bytes
        make(unit, slot, digests)

    monkeypatch.setattr(ShardUnit, "write", counted)
    for step in range(1, 6):
        alone.snap()
        packed = {layer: engine.states.pack(layer) for layer in sorted(engine.owned_layers)}
        engine.snapshots.finish()
        assert step in alone.steps()
        engine.snapshots.retain(step)
        assert alone.steps() == [step]
        arena = Arena.open(tmp_path / "arena")
        (newest,) = arena.snapshots
        if damaged and step == 4:
            assert arena.find_corrupt(newest) == ("group-0/shard",), (
                "what was damaged before does not count as sound"
            )
            break
        (group,) = newest.layout["groups"]
        for layer, (header, payload) in decoded({0: Kept(arena, newest, group)}, (), 0).items():
            assert (header, payload) == (packed[layer][0], packed[layer][1].numpy().tobytes())
        if damaged and step == 2:
            # The byte is in a block of the frozen weight; this slot is written again two steps later.
            shard = newest.part("group-0/shard")
            arena.view(newest, shard)[2 * MIB + 5] ^= 1
        copied.append(0)
    frozen = 1200 * 1200 * 4 // MIB - 1
    assert copied[0] == copied[1] > frozen * MIB
    assert copied[2] == copied[3] <= copied[0] - frozen * MIB
    alone.close()


def test_buffers_are_each_replicas_own(tmp_path: Path) -> None:
    run(mine(tmp_path), TWO, "aec", tmp_path)
    groups = kept(tmp_path, 2)
    differ = [
        layer.layer
        for parts in groups.values()
        for layer in parts[0].image.layers
        if layer.buffers != parts[1].image.layer(layer.layer).buffers
    ]
    assert differ == [1, 3]


class Alone:
    """One engine with all layers, which takes as many snapshots as a test wants."""

    def __init__(self, data: p.TrainingData, arena: Path) -> None:
        self.rank = Rank(data, arena)
        self.arena = arena
        layers = self.rank.engine.model.layer_count
        world = p.WorldData(
            pipelines=(pipeline((0, layers, [0]), first_microbatch=0, microbatches=4),),
            transfers=(),
            hosts=("127.0.0.1",),
        )
        self.resume = p.ResumeRank(
            generation=1,
            step=0,
            vote=None,
            rank=0,
            world=world,
            rendezvous_host="",
            rendezvous_port=0,
            token="",
            nodes=("a",),
        )
        self.rank.engine.commit_or_discard(0, None)
        self.rank.engine.enter(self.resume, SoloCommunicator())

    def snap(self, generation: int = 1) -> None:
        assert self.rank.engine.step(lambda: False, lambda: True).snapshot_requested
        self.rank.engine.begin_snapshot(generation)

    def steps(self) -> list[int]:
        """Return the steps in the arena when the writer has done all its tasks."""
        writer = self.rank.engine.snapshots
        assert writer is not None
        with writer._changed:
            assert writer._changed.wait_for(lambda: not writer._tasks, 60.0)
        return sorted(manifest.step for manifest in Arena.open(self.arena).snapshots)

    def close(self) -> None:
        assert self.rank.engine.snapshots is not None
        self.rank.engine.snapshots.close()


def test_the_snapshot_that_is_complete_everywhere_survives_abandoned_ones(tmp_path: Path) -> None:
    alone = Alone(gpt_data(), tmp_path)
    writer = alone.rank.engine.snapshots
    assert writer is not None
    alone.snap()
    assert alone.steps() == [1]
    writer.retain(1)
    alone.snap()
    assert alone.steps() == [1, 2]
    alone.snap()
    assert alone.steps() == [1, 2, 3], "2 may be complete everywhere by now"
    alone.snap()
    assert alone.steps() == [1, 3, 4], "2 was abandoned: 3 was requested after it"
    writer.retain(4)
    assert alone.steps() == [4]
    alone.close()


def test_a_pinned_snapshot_stays_until_it_is_unpinned(tmp_path: Path) -> None:
    alone = Alone(gpt_data(), tmp_path)
    writer = alone.rank.engine.snapshots
    assert writer is not None
    alone.snap()
    writer.retain(1, pinned=1)
    alone.snap()
    writer.retain(2, pinned=1)
    assert alone.steps() == [1, 2]
    alone.snap()
    assert alone.steps() == [1, 2, 3]
    writer.retain(3, pinned=1)
    alone.snap()
    assert alone.steps() == [1, 3, 4]
    alone.snap()
    assert alone.steps() == [1, 3, 4], "4 may be complete everywhere by now: 5 has no room"
    alone.snap()
    assert alone.steps() == [1, 3, 6], "4 was abandoned: 6 was requested after it"
    writer.retain(6)
    assert alone.steps() == [6]
    alone.close()


def test_snapshots_of_undone_steps_are_released(tmp_path: Path) -> None:
    alone = Alone(gpt_data(), tmp_path)
    for _ in range(3):
        alone.snap()
    engine = alone.rank.engine
    engine.commit_or_discard(2, Vote(loss=1.0, gradient_norm=1.0), lineage=2)
    assert engine.complete_layers == set() and engine.lineage == 2 and engine.committed_step == 2
    alone.close()
    again = Alone(gpt_data(), tmp_path)
    assert again.steps() == [], "it begins at step 0: all of them are of another past"
    again.close()


def test_a_new_process_retains_its_jobs_snapshots_corrupt_or_not(tmp_path: Path) -> None:
    """Readers verify it, and the node repairs the byte; the slot is not written again."""
    alone = Alone(gpt_data(), tmp_path)
    alone.snap()
    alone.snap()
    assert alone.steps() == [1, 2]
    alone.close()
    arena = Arena.open(tmp_path)
    newest = arena.snapshots[0]
    part = newest.part("group-0/shard")
    arena.view(newest, part)[part.size_bytes // 2] ^= 1
    arena.close()
    again = Rank(gpt_data(), tmp_path)
    assert [m.step for m in Arena.open(tmp_path).snapshots] == [2, 1]
    assert again.engine.snapshots is not None
    again.engine.snapshots.close()
    other = Rank(gpt_data(), tmp_path, job_id="another")
    assert Arena.open(tmp_path).snapshots == ()
    assert other.engine.snapshots is not None
    other.engine.snapshots.close()


def test_a_failed_copy_is_reported_and_training_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(unit: ShardUnit, slot: object, digests: object = None) -> None:
        raise OSError("the memory is gone")

    alone = Alone(gpt_data(), tmp_path)
    alone.snap()
    assert alone.steps() == [1]
    with monkeypatch.context() as patch:
        patch.setattr(ShardUnit, "write", broken)
        alone.snap()
        alone.steps()
    alone.snap()
    assert alone.steps() == [1, 3]
    alone.close()
    said = [(type(r).__name__, r.step) for r in alone.rank.reports]
    assert said == [("ShardWritten", 1), ("SnapshotFailed", 2), ("ShardWritten", 3)]
    failed = alone.rank.reports[1]
    assert isinstance(failed, SnapshotFailed) and failed.detail == "OSError: the memory is gone"


def test_bubbles_are_used_where_they_suffice(tmp_path: Path) -> None:
    """The main thread waits for peers for as long as it computes, so nothing is copied while it computes."""
    alone = Alone(gpt_data(), tmp_path)
    alone.snap()
    alone.steps()
    writer = alone.rank.engine.snapshots
    assert writer is not None
    for _ in range(8):
        writer.record_step(StepTimes(step_s=4.0, waits_s=2.0, sync_s=0.0))
    alone.snap()
    threading.Event().wait(0.1)
    assert alone.rank.reports[-1].step == 1, "no bubble so far"
    with alone.rank.engine.monitor.idle():
        alone.steps()
    assert alone.steps() == [1, 2]
    snapped = alone.rank.reports[-1]
    assert isinstance(snapped, p.ShardWritten) and snapped.step == 2
    read = sum(part.size_bytes for m in Arena.open(tmp_path).snapshots for part in m.parts if m.step == 2)
    assert 0 < snapped.idle_bytes <= read
    alone.close()


def test_no_arena_no_thread_no_memory(tmp_path: Path) -> None:
    threads = threading.active_count()
    with torch.random.fork_rng(devices=[]):
        engine = Engine(gpt_data(), torch.device("cpu"), ProgressMonitor())
    assert engine.snapshots is None and engine.monitor.peer_wait is None
    assert threading.active_count() == threads
    assert msgspec.structs.asdict(p.PrepareJob(job_id="j", training=gpt_data(), profile=False))["arena"] == ""
