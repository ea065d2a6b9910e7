"""Work that runs in parallel with a device's computation, on a device that is late at random
(``tests.helpers.late_device``).

The same tests must fail with an injected bug: a missing ordering between streams, or a missing wait.
"""

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from runtime.groups.communicator import CommunicationAborted
from runtime.script.copier import ScriptCapture, SnapshotCopier
from runtime.script.tensor_image import CopyRange, CopyUnit
from runtime.side_stream import SideStreams
from runtime.snapshots.movers import DeviceMover
from runtime.zero.sharded_optimizer import ShardedOptimization
from statemachine.messages import trainer as p
from storage.arena import Slot
from storage.layerstate import LayerHeader
from tests.helpers.fleet import Fleet
from tests.helpers.harness import pipeline
from tests.helpers.late_device import GARBAGE, LateEvent, LateRuntime
from tests.helpers.late_fleet import TURNED, TWO, LateFleet, job, snapshot_with_replicas
from tests.helpers.late_mistakes import Buggy, Impatient, Unawaited, Unordered
from tests.helpers.snapshots import decoded, kept
from tests.helpers.snapshots import stage as stage_layers
from tests.helpers.staged import results_are_right, staged_world


@pytest.fixture
def late() -> Iterator[LateRuntime]:
    runtime = LateRuntime(late=(0.5, 0.005))
    yield runtime
    runtime.end()


# --- the double itself --------------------------------------------------------------------------------


def test_a_host_that_reads_without_waiting_reads_garbage(late: LateRuntime) -> None:
    gate, own = Gate(late), late.stream()
    with late.on(own):
        own.wait(gate)
        ones = torch.ones(4)
        total = (ones * 2).sum()
        made = late.event()
        made.record()
        assert not made.done()
        assert ones.view(torch.uint8).numpy()[0] == GARBAGE
        gate.reached.set()
        assert total.item() == 8.0, "item waits for the stream that computes"
        assert late.values(ones) == [1.0] * 4
    assert made.done()


class Gate(LateEvent):
    """An event that a test completes."""

    def __init__(self, runtime: LateRuntime) -> None:
        super().__init__(runtime)
        self.reached = threading.Event()


def test_a_stream_that_reads_what_another_has_not_computed_reads_garbage(late: LateRuntime) -> None:
    gate, one, other = Gate(late), late.stream(), late.stream()
    with late.on(one):
        one.wait(gate)
        ones = torch.ones(4)
        made = late.event()
        made.record()
    with late.on(other):
        early = ones.clone()
        other.synchronize()
        other.wait(made)
        right = ones.clone()
    gate.reached.set()
    with late.on(other):
        assert late.values(right) == [1.0] * 4
        assert late.values(early) != [1.0] * 4


def test_training_is_the_same_late_or_not(late: LateRuntime) -> None:
    def train() -> list[float]:
        torch.manual_seed(1)
        layers = [torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Dropout(0.1), torch.nn.Linear(16, 4)]
        model = torch.nn.Sequential(*layers)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        losses = []
        for _ in range(3):
            loss = torch.nn.functional.cross_entropy(model(torch.randn(5, 8)), torch.tensor([0, 1, 2, 3, 0]))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    plain = train()
    with late.computing():
        assert train() == plain


# --- the communicator -----------------------------------------------------------------------------------


def test_tensors_sent_through_host_memory_arrive_as_they_were_computed() -> None:
    assert results_are_right(lambda rank: LateRuntime(rank, late=(0.5, 0.004)), times=5)


@pytest.mark.parametrize("mistake", [Unordered, Unawaited])
def test_a_missing_ordering_or_wait_in_the_communicator_is_found(mistake: type) -> None:
    assert not results_are_right(lambda _: Buggy(mistake), times=3)


def test_a_sum_that_arrives_after_an_abort_is_not_taken_for_the_result() -> None:
    """The target still has the rank's own term then, and a vote with it would be another one than elsewhere."""
    with staged_world(2, LateRuntime) as (one, _):
        with one._runtime.computing():
            pending = one.all_reduce(torch.ones(4), one.world)
        while not one._handlers:
            time.sleep(0.001)
        (asked,) = one._handlers
        one.abort()
        one._finish(asked, None)
        with pytest.raises(CommunicationAborted):
            one.wait(pending)


def test_an_abort_frees_a_rank_that_waits_for_a_peer_of_its_device() -> None:
    with staged_world(2, LateRuntime) as (one, _):
        with one._runtime.computing():
            pending = one.receive(torch.zeros(4), 1, "state")
            threading.Timer(0.05, one.abort).start()
            with pytest.raises(CommunicationAborted):
                one.wait(pending)
        one.close()


# --- a copier's side stream --------------------------------------------------------------------------


def copied(runtime: LateRuntime) -> bool:
    """Return whether snapshots of a tensor that changes in each step are from the step that they name."""
    found: dict[int, np.ndarray[Any, Any]] = {}

    def complete(step: int, slot: Slot, *_: object) -> None:
        found[step] = slot.view[:4096].copy()

    copier = SnapshotCopier(
        open_slot=lambda size: Slot(0, np.zeros(size, dtype=np.uint8)),
        complete=complete,
        failed=lambda step, error: pytest.fail(f"step {step}: {error}"),
        streams=SideStreams(lambda _: runtime),
    )
    with runtime.computing():
        state = torch.zeros(4096, dtype=torch.uint8)
        for step in range(1, 6):
            state.add_(1)
            copier.begin(
                ScriptCapture(
                    step=step,
                    rank=0,
                    units=[
                        CopyUnit(n * 1024, 1024, (CopyRange(0, n * 1024, n * 1024, 1024),)) for n in range(4)
                    ],
                    shared_units=0,
                    sources=[state],
                    body_bytes=4096,
                    header=lambda: b"header",
                    layout={},
                    devices={runtime.device},
                )
            )
            copier.finish()
        copier.close()
    runtime.synchronize()
    return all((found[step] == step).all() for step in range(1, 6))


def test_each_snapshot_of_a_script_is_from_one_step(late: LateRuntime) -> None:
    assert copied(late)


@pytest.mark.parametrize("mistake", [Unordered, Impatient])
def test_a_missing_ordering_or_wait_in_the_copier_is_found(mistake: type) -> None:
    runtime = Buggy(mistake)
    assert not copied(runtime)
    runtime.end()


# --- the engine ------------------------------------------------------------------------------------------


def trained(job: p.TrainingData, arenas: Path, make: Callable[[int], LateRuntime]) -> bool:
    """Run steps under one layout, a snapshot, a move of layers to another layout, and more steps.

    :returns: whether losses, norms and parameters equal those of a CPU, and the snapshot is from its step.
    """
    with Fleet(job, 3) as plain:
        plain.enter(plain.engines, TWO)
        plain.steps(2)
        packed = plain.packed()
        plain.steps(2)
        plain.enter(plain.engines, TURNED)
        plain.steps(2)
        votes, digests = plain.votes, [engine.compute_digests() for engine in plain.engines]
    with LateFleet(job, arenas, make) as fleet:
        fleet.enter(fleet.engines, TWO)
        fleet.steps(1)
        fleet.hold_s = 1.0
        fleet.steps(1)
        fleet.hold_s = 0.02
        fleet.each(lambda rank, engine: engine.begin_snapshot(1))
        fleet.steps(2)
        fleet.enter(fleet.engines, TURNED)
        fleet.steps(1)
        fleet.hold_s = 1.0
        fleet.steps(1)
        found = fleet.each(lambda rank, engine: engine.compute_digests())
        fleet.close_snapshots()
        for engine in fleet.engines:
            runtime = engine.model.runtime
            runtime.synchronize()
    layers = {}
    for parts in kept(arenas, 2).values():
        layers |= decoded(parts, (), 0)
    same_votes = all(
        (fleet.votes[step].loss, fleet.votes[step].weight) == (vote.loss, vote.weight)
        and fleet.votes[step].gradient_norm == pytest.approx(vote.gradient_norm, rel=1e-12)
        for step, vote in votes.items()
    )
    return same_votes and found == digests and layers == packed


def test_losses_transfers_and_snapshots_equal_those_of_a_cpu(tmp_path: Path) -> None:
    assert trained(job(tmp_path), tmp_path, LateRuntime)


SHARDED = (
    pipeline((0, 4, [0, 1]), first_microbatch=0, microbatches=3, sharded=True),
    pipeline((0, 4, [2]), first_microbatch=3, microbatches=1),
)
SHARDED_TURNED = (
    pipeline((0, 4, [0]), first_microbatch=0, microbatches=1),
    pipeline((0, 4, [1, 2]), first_microbatch=1, microbatches=3, sharded=True),
)


@pytest.mark.parametrize(
    ("changes", "protection", "pipelines"),
    [
        ({"zero1": True}, "aor", (TWO, TURNED)),
        ({"zero1": True, "within_node": "shard"}, "none", (SHARDED, SHARDED_TURNED)),
    ],
    ids=["zero1 with replicas", "shards with zero1"],
)
def test_parts_and_shards_equal_those_of_a_cpu(
    changes: dict[str, Any], protection: str, pipelines: tuple[Any, Any], tmp_path: Path
) -> None:
    def run(fleet: Fleet) -> tuple[list[float], list[dict[int, str]]]:
        with fleet:
            fleet.nodes, fleet.protection = (), protection
            for layout in pipelines:
                fleet.enter(fleet.engines, layout)
                fleet.steps(2)
            digests = fleet.each(lambda rank, engine: engine.compute_digests())
            if isinstance(fleet, LateFleet):
                fleet.close_snapshots()
        return [fleet.losses[step] for step in range(1, 5)], digests

    training = msgspec.structs.replace(job(tmp_path), **changes)
    assert run(LateFleet(training, tmp_path, LateRuntime)) == run(Fleet(training, 3))


def test_replicas_in_a_snapshot_are_from_its_step(tmp_path: Path) -> None:
    with Fleet(job(tmp_path), 3) as plain:
        plain.enter(plain.engines, TWO)
        plain.steps(2)
        whole = plain.packed()
    training = msgspec.structs.replace(job(tmp_path), zero1=True)
    found = snapshot_with_replicas(LateFleet(training, tmp_path, LateRuntime), tmp_path)
    assert found == [whole] * 4


def test_state_in_replicas_is_described_as_its_owner_keeps_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The replica itself is in host memory, but a rank that restores from it keeps the state on its device."""
    device = torch.device("cuda")
    monkeypatch.setattr(ShardedOptimization, "device_of_state", lambda *_, **__: device)
    training = msgspec.structs.replace(job(tmp_path), zero1=True)
    owned, *others = snapshot_with_replicas(LateFleet(training, tmp_path, LateRuntime), tmp_path)
    assert others == [owned] * 3
    headers = [msgspec.msgpack.decode(header, type=LayerHeader) for header, _ in owned.values()]
    state = [entry for header in headers for entry in header.entries if entry.role == "optimizer"]
    assert state and not any(entry.on_host for entry in state)


@pytest.mark.parametrize("zero1", [False, True], ids=["plain", "zero1"])
def test_restored_shards_equal_those_of_a_cpu(tmp_path: Path, zero1: bool) -> None:
    training = msgspec.structs.replace(job(tmp_path), zero1=zero1, within_node="shard")
    with Fleet(job(tmp_path), 1) as fleet:
        fleet.enter(fleet.engines, (pipeline((0, 4, [0]), first_microbatch=0, microbatches=4),))
        fleet.steps(2)
        stage_layers(fleet.packed(), tmp_path)

    def run(fleet: Fleet) -> tuple[list[float], list[dict[int, str]]]:
        with fleet:
            fleet.nodes, fleet.protection = (), "none"
            fleet.restore, fleet.restore_step = str(tmp_path), 2
            fleet.enter(fleet.engines, SHARDED)
            fleet.steps(2)
            digests = fleet.each(lambda rank, engine: engine.compute_digests())
            if isinstance(fleet, LateFleet):
                fleet.close_snapshots()
        return [fleet.losses[step] for step in (3, 4)], digests

    assert run(LateFleet(training, tmp_path, LateRuntime)) == run(Fleet(training, 3))


def without_a_wait(patch: pytest.MonkeyPatch) -> None:
    """Inject a bug: a unit of a snapshot counts as copied when its copies were requested."""
    patch.setattr(DeviceMover, "finish", lambda self: None)


def without_a_read_s_wait(patch: pytest.MonkeyPatch) -> None:
    """Inject a bug: parameters are read while they are still being updated."""
    patch.setattr(LateRuntime, "to_host", lambda self, tensor: tensor.detach().clone())


@pytest.mark.parametrize("plant", [without_a_wait, without_a_read_s_wait])
def test_a_bug_in_the_engine_is_found(
    plant: Callable[[pytest.MonkeyPatch], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    try:
        right = trained(job(tmp_path), tmp_path, LateRuntime)
    except (RuntimeError, ValueError, AssertionError):
        return  # Lengths, digests or shapes that are read are garbage.
    assert not right
