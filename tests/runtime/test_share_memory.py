"""A device of a sharded stage gets its own elements of each layer and nothing else: in a rollback, and when state
moves to another number of devices.

The last layer of the model is as large as all others together, so a device that held it whole would be noticed.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from runtime.layers.state import DTYPES, PayloadTarget
from runtime.zero.sharding import ShardedState
from statemachine.messages import trainer as p
from storage.layerstate import LayerHeader, decode_header
from tests.helpers.allocated_bytes import AllocatedBytes
from tests.helpers.fleet import Fleet
from tests.helpers.harness import pipeline
from tests.helpers.reference import load, reference_losses
from tests.helpers.runtime_support import data_for, script
from tests.helpers.snapshots import stage

LAYERS = 4
SAVED_STEP = 2
STEPS = 3
LOPSIDED = """
def build():
    return Training(
        layers=[
            nn.Linear(3, 128),
            nn.Linear(128, 128),
            nn.Linear(128, 128),
            nn.Sequential(nn.Linear(128, 256), nn.Tanh(), nn.Linear(256, 1)),
        ],
        loss=functional.mse_loss,
        optimizer=lambda named: torch.optim.Adam([p for _, p in named], lr=1e-2),
        dataset=Rows(),
    )
"""
PARAMETER_BYTES = 8 * (3 * 128 + 128 + 2 * (128 * 128 + 128) + 128 * 256 + 256 + 256 + 1)
GRADIENT_BYTES = PARAMETER_BYTES
MOMENT_BYTES = 2 * PARAMETER_BYTES
LARGEST_MOMENT_BYTES = 2 * 8 * (128 * 256 + 256 + 256 + 1)
CHUNK_BYTES = 2048
SLACK_BYTES = 16 * CHUNK_BYTES
"""Chunks of state on their way, and small tensors."""


@pytest.fixture
def job(tmp_path: Path) -> p.TrainingData:
    script(tmp_path, LOPSIDED)
    return data_for("mine.py:build", tmp_path, within_node="shard")


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runtime.layers.transfer.CHUNK_BYTES", CHUNK_BYTES)
    monkeypatch.setattr("runtime.layers.transfer.WINDOW_BYTES", 4 * CHUNK_BYTES)
    monkeypatch.setattr("runtime.zero.gather.CHUNK_BYTES", CHUNK_BYTES)


def stages(*devices: int) -> tuple[p.WorldPipeline, ...]:
    """Return a plan of pipelines that have one stage each, on these numbers of devices."""
    share, plan, first = 4 // len(devices), [], 0
    for number, count in enumerate(devices):
        stage = 0, LAYERS, range(first, first + count)
        plan.append(pipeline(stage, first_microbatch=number * share, microbatches=share, sharded=True))
        first += count
    return tuple(plan)


class MeasuredFleet(Fleet):
    """A fleet that counts the bytes that each rank allocates while it enters a generation, restoring included."""

    def __init__(self, job: p.TrainingData, count: int) -> None:
        self.peaks: dict[int, int] = {}
        """Peaks by rank of the last ``enter``."""
        super().__init__(job, count, protection="none")

    def _enter(self, rank: int, *given: Any) -> None:
        with AllocatedBytes() as allocated:
            super()._enter(rank, *given)
        self.peaks[rank] = allocated.peak

    def expect_reference(self) -> None:
        """Check that the loss of the last step is that of one process."""
        expected = reference_losses(load(self.job), self.job, STEPS)
        assert self.losses[STEPS] == pytest.approx(expected[-1], rel=1e-9)


def save(job: p.TrainingData, devices: int, directory: Path) -> dict[tuple[str, str], Tensor]:
    """Train on some devices, and stage the layers as a node does.

    :returns: all elements of each parameter, and of each key of the optimizer's state for it.
    """
    with Fleet(job, devices) as fleet:
        fleet.enter(fleet.engines, stages(devices))
        fleet.steps(SAVED_STEP)
        if devices > 1:
            fleet.enter([*fleet.engines, *fleet.join(1)], stages(devices, 1))
        whole = fleet.engines[-1].states
        packed = [whole.pack(layer) for layer in range(LAYERS)]
    saved = {}
    for layer, (header, payload) in enumerate(packed):
        stage({layer: (header, payload.numpy().tobytes())}, directory)
        for entry in decode_header(header, layer, payload.numel()).entries:
            data = payload[entry.offset : entry.offset + entry.size_bytes]
            saved[entry.name, entry.key] = data.view(DTYPES[entry.dtype])
    return saved


def expect_saved(fleet: Fleet, saved: dict[tuple[str, str], Tensor]) -> None:
    """Check that the devices hold exactly what was saved."""
    for engine in fleet.engines:
        assert engine.sharding is not None and engine.sharding.states.held
        for part in engine.sharding.states.held:
            for one in part.slices:
                own = slice(one.slice.start, one.slice.end)
                value = engine.sharding.optimization.value_of(one.slice)
                assert torch.equal(value, saved[one.slice.name, ""].view(-1)[own])
                for key in ("exp_avg", "exp_avg_sq"):
                    state = one.state[key]
                    assert isinstance(state, Tensor)
                    assert torch.equal(state, saved[one.slice.name, key].view(-1)[own])
                assert one.state["step"] == SAVED_STEP


def restore(fleet: MeasuredFleet, directory: Path, *devices: int) -> None:
    fleet.restore, fleet.restore_step = str(directory), SAVED_STEP
    assert fleet.enter(fleet.engines, stages(*devices)) == SAVED_STEP
    fleet.restore = ""


@pytest.mark.parametrize("zero1", [False, True], ids=["plain", "zero1"])
@pytest.mark.parametrize(("before", "after"), [(2, 4), (4, 2), (1, 2)])
def test_a_rollback_takes_the_memory_of_the_share(
    job: p.TrainingData, tmp_path: Path, before: int, after: int, zero1: bool
) -> None:
    """The devices train before, so they have state that the rollback releases."""
    saved = save(job, before, tmp_path)
    with MeasuredFleet(msgspec.structs.replace(job, zero1=zero1), after) as fleet:
        fleet.enter(fleet.engines, stages(after))
        fleet.steps(1)
        restore(fleet, tmp_path, after)
        share = (PARAMETER_BYTES + MOMENT_BYTES + GRADIENT_BYTES) / after
        for peak in fleet.peaks.values():
            assert share - SLACK_BYTES <= peak <= share + SLACK_BYTES, (fleet.peaks, share)
        expect_saved(fleet, saved)
        fleet.steps(1)
        fleet.expect_reference()


@pytest.mark.parametrize("devices", [1, 2])
def test_a_rollback_takes_the_memory_of_the_optimizer_s_parts_under_zero1(
    job: p.TrainingData, tmp_path: Path, devices: int
) -> None:
    saved = save(job, 1, tmp_path)
    with MeasuredFleet(msgspec.structs.replace(job, zero1=True), 2 * devices) as fleet:
        restore(fleet, tmp_path, devices, devices)
        share = (PARAMETER_BYTES + MOMENT_BYTES / 2 + GRADIENT_BYTES) / devices
        assert all(peak <= share + SLACK_BYTES for peak in fleet.peaks.values()), (fleet.peaks, share)
        expect_saved(fleet, saved)
        fleet.steps(1)
        fleet.expect_reference()


def test_a_device_that_makes_room_for_a_whole_layer_is_noticed(
    job: p.TrainingData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = ShardedState.restore

    def whole_first(self: ShardedState, *given: Any) -> Callable[[LayerHeader], list[PayloadTarget]]:
        hold = original(self, *given)

        def hold_whole_first(header: LayerHeader) -> list[PayloadTarget]:
            whole = torch.empty(header.size_bytes, dtype=torch.uint8)
            targets = hold(header)
            del whole
            return targets

        return hold_whole_first

    monkeypatch.setattr(ShardedState, "restore", whole_first)
    save(job, 1, tmp_path)
    with MeasuredFleet(job, 2) as fleet:
        restore(fleet, tmp_path, 2)
        share = (PARAMETER_BYTES + MOMENT_BYTES + GRADIENT_BYTES) / 2
        assert all(peak > share + SLACK_BYTES for peak in fleet.peaks.values()), (fleet.peaks, share)


@pytest.mark.parametrize(
    ("before", "after"), [((2,), (4,)), ((4,), (2, 2)), ((1,), (2,))], ids=["2 to 4", "4 to 2", "1 to 2"]
)
def test_a_device_receives_its_share_and_no_more(
    job: p.TrainingData, before: tuple[int, ...], after: tuple[int, ...]
) -> None:
    """A device puts one layer at a time together from what it had and what it received of the optimizer's state."""
    with MeasuredFleet(job, sum(before)) as fleet:
        fleet.enter(fleet.engines, stages(*before))
        fleet.steps(STEPS - 1)
        fleet.enter([*fleet.engines, *fleet.join(sum(after) - sum(before))], stages(*after))
        share = (PARAMETER_BYTES + MOMENT_BYTES + GRADIENT_BYTES) / after[0]
        allowed = share + LARGEST_MOMENT_BYTES / after[0] + SLACK_BYTES
        assert all(peak <= allowed for peak in fleet.peaks.values()), (fleet.peaks, allowed)
        fleet.steps(1)
        fleet.expect_reference()


@pytest.mark.parametrize("devices", [1, 2])
def test_a_device_that_sends_state_needs_memory_for_chunks_of_it(job: p.TrainingData, devices: int) -> None:
    with MeasuredFleet(job, devices) as fleet:
        fleet.enter(fleet.engines, stages(devices))
        fleet.steps(STEPS - 1)
        fleet.enter([*fleet.engines, *fleet.join(devices)], stages(devices, devices))
        allowed = GRADIENT_BYTES / devices + SLACK_BYTES
        assert all(fleet.peaks[rank] <= allowed for rank in range(devices)), (fleet.peaks, allowed)
        fleet.steps(1)
        fleet.expect_reference()
