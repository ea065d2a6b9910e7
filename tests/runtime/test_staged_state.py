"""A trainer loads layers that its node staged: the exact bytes, from any number of ranges, and none that have
changed.
"""

import random
import threading
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from runtime.engine.staged_state import StagedStateLoader, StagingCorruptedError
from runtime.layers.state import StateError
from storage.manifest import SnapshotManifest, SnapshotPart, record_digest, write_record
from storage.staged import BorrowedSnapshot, PayloadChunk, StagedLayer, read_staged, write_staged
from tests.helpers.late_device import LateEvent, LateRuntime
from tests.helpers.late_mistakes import Buggy, Unawaited
from tests.helpers.layer_states import Trainer

BLOCK_BYTES = 512


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("storage.manifest.BLOCK_BYTES", BLOCK_BYTES)
    monkeypatch.setattr("runtime.engine.staged_state.BLOCK_BYTES", BLOCK_BYTES)


def stage(directory: Path, layer: int, header: bytes, payload: bytes, seed: int) -> list[PayloadChunk]:
    """Stage a layer cut anywhere: some ranges are in the record, some in a file, some in a slot among other
    bytes.
    """
    chance = random.Random(seed)
    before, after = chance.randbytes(chance.randrange(1000)), chance.randbytes(chance.randrange(1000))
    slot, own = directory / f"slot-{layer}", directory / f"bytes-{layer}"
    slot.write_bytes(bytes(100) + before + payload + after)
    own.write_bytes(before + payload)
    part = SnapshotPart.from_bytes("group-0/shard", 100, before + payload + after)
    manifest = SnapshotManifest(job_id="job", step=3, generation=1, slot=0, parts=(part,), layout={})
    write_record(directory / f"step-{layer}.json", manifest)
    cuts = sorted({0, len(payload), *(chance.randrange(len(payload) + 1) for _ in range(9))})
    chunks = []
    for first, end in pairwise(cuts):
        at, size = len(before) + first, end - first
        match chance.randrange(3):
            case 0:
                chunks.append(PayloadChunk(size_bytes=size, data=payload[first:end]))
            case 1:
                chunks.append(PayloadChunk(size_bytes=size, path=str(own), offset=at))
            case _:
                cut = part.slice_blocks(at, at + size)
                chunks.append(PayloadChunk(size_bytes=size, path=str(slot), offset=100 + at, part=cut))
    snapshot = BorrowedSnapshot(
        manifest=str(directory / f"step-{layer}.json"), digest=record_digest(manifest)
    )
    staged = StagedLayer(header=header, chunks=tuple(chunks), borrowed=(snapshot,))
    write_staged(directory, layer, staged)
    assert read_staged(directory, layer) == staged
    return chunks


def flip(chunk: PayloadChunk, position: int) -> None:
    data = bytearray(Path(chunk.path).read_bytes())
    data[chunk.offset + position] ^= 4
    Path(chunk.path).write_bytes(data)


@pytest.mark.parametrize("seed", range(6))
def test_the_exact_state_is_loaded_from_any_ranges(tmp_path: Path, seed: int) -> None:
    old, new = Trainer(), Trainer()
    for step in (1, 2):
        old.step(step)
    for layer in old.layers:
        header, payload = old.states.pack(layer)
        stage(tmp_path, layer, header, payload.numpy().tobytes(), seed)
    new.model.drop(new.layers)
    ticks: list[None] = []
    with StagedStateLoader(tmp_path, new.states, lambda: ticks.append(None)) as staged:
        for layer in new.layers:
            staged.load_layer(layer)
        staged.verify()
    assert ticks and new.model.held_layers == set(new.layers)
    assert new.digests() == old.digests()
    assert [old.step(step) for step in (3, 4)] == [new.step(step) for step in (3, 4)]


@pytest.mark.parametrize("hasty", [False, True])
def test_a_device_that_is_late_gets_the_exact_state(tmp_path: Path, hasty: bool) -> None:
    """Memory that the device still reads is not overwritten. A loader that did not wait would be noticed."""
    layers = range(3)  # The fourth would load the first one's tied weight again.
    old = Trainer()
    old.step(1)
    for layer in layers:
        header, payload = old.states.pack(layer)
        stage(tmp_path, layer, header, payload.numpy().tobytes(), layer)
    runtime = Buggy(Unawaited) if hasty else LateRuntime(late=(1.0, 0.002))
    gate = LateEvent(runtime)
    with runtime.computing():
        new = Trainer(runtime=runtime)
        if hasty:
            gate.reached = threading.Event()
            runtime.default.wait(gate)
        with StagedStateLoader(tmp_path, new.states, lambda: None) as staged:
            for layer in layers:
                staged.load_layer(layer)
            staged.verify()
        gate.reached.set()
        runtime.synchronize()
    runtime.end()
    pairs = [
        pair
        for layer in layers
        for pair in zip(old.states.changing_tensors(layer), new.states.changing_tensors(layer), strict=True)
    ]
    assert all(torch.equal(*pair) for pair in pairs) == (not hasty)


def test_existing_memory_is_reused_and_serves_one_tensor_only(tmp_path: Path) -> None:
    old, new = Trainer(), Trainer()
    for trainer in (old, new):
        trainer.step(1)
    old.step(2)
    for layer in old.layers:
        header, payload = old.states.pack(layer)
        stage(tmp_path, layer, header, payload.numpy().tobytes(), layer)

    def memory() -> dict[tuple[str, str], int]:
        return {
            (name, key): value.data_ptr()
            for name, parameter in new.model.named_parameters(new.layers)
            for key, value in [("", parameter), *new.optimization.parameter_state(name).items()]
            if isinstance(value, torch.Tensor)
        }

    name = new.model.named_parameters([1])[0][0]
    state = new.optimization.parameter_state(name)
    shared = state["exp_avg"]
    new.optimization.set_parameter_state(name, {**state, "exp_avg_sq": shared})
    before = memory()
    with StagedStateLoader(tmp_path, new.states, lambda: None) as staged:
        for layer in new.layers:
            staged.load_layer(layer)
        staged.verify()
    after = memory()
    assert {which for which in before if before[which] != after[which]} == {(name, "exp_avg_sq")}
    assert new.digests() == old.digests()
    assert [old.step(step) for step in (3, 4)] == [new.step(step) for step in (3, 4)]


def test_borrowed_memory_that_changed_is_not_loaded(tmp_path: Path) -> None:
    source, target = Trainer(), Trainer()
    header, payload = source.states.pack(1)
    data = payload.numpy().tobytes()
    chunks = stage(tmp_path, 1, header, data, 3)
    borrowed = next(chunk for chunk in chunks if chunk.part is not None)
    for position in (0, borrowed.size_bytes // 2, borrowed.size_bytes - 1):
        flip(borrowed, position)
        with StagedStateLoader(tmp_path, target.states, lambda: None) as staged:
            with pytest.raises(StagingCorruptedError, match="layer 1: its digest does not match") as caught:
                staged.load_layer(1)
                staged.verify()
            assert caught.value.part == "group-0/shard"
        flip(borrowed, position)
    with StagedStateLoader(tmp_path, target.states, lambda: None) as staged:
        staged.load_layer(1)
        (tmp_path / "step-1.json").unlink()
        with pytest.raises(StagingCorruptedError, match="missing or was replaced"):
            staged.verify()
        write_record(
            tmp_path / "step-1.json",
            SnapshotManifest(job_id="job", step=4, generation=1, slot=0, parts=(), layout={}),
        )
        with pytest.raises(StagingCorruptedError, match="missing or was replaced"):
            staged.verify()


def test_missing_or_malformed_state_is_corrupt_and_a_different_model_is_reported(tmp_path: Path) -> None:
    source, target = Trainer(), Trainer()
    header, payload = source.states.pack(1)
    chunks = stage(tmp_path, 1, header, payload.numpy().tobytes(), 3)

    def problem(error: type[Exception] = StagingCorruptedError, layer: int = 1) -> str:
        with StagedStateLoader(tmp_path, target.states, lambda: None) as staged:
            with pytest.raises(error) as caught:
                staged.load_layer(layer)
            return str(caught.value)

    assert "No such file" in problem(layer=2)
    path = Path(next(chunk.path for chunk in chunks if chunk.path))
    whole = path.read_bytes()
    path.write_bytes(whole[:150])
    assert "has only 150 bytes" in problem()
    path.write_bytes(whole)
    short = StagedLayer(header=header, chunks=tuple(chunks[:-1]))
    write_staged(tmp_path, 1, short)
    assert "was found instead of layer 1" in problem(StateError)
    (tmp_path / "layer-1.staged").write_bytes(b"\x93")
    assert "malformed" in problem()


def test_a_tensor_whose_bytes_are_not_in_order_is_filled_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is filled through staging memory, like a tensor on a device."""
    old, new = Trainer(), Trainer()
    old.step(1)
    header, payload = old.states.pack(2)
    stage(tmp_path, 2, header, payload.numpy().tobytes(), 5)
    monkeypatch.setattr("runtime.engine.staged_state._memory", lambda tensor, runtime: None)
    with StagedStateLoader(tmp_path, new.states, lambda: None) as staged:
        staged.load_layer(2)
        staged.verify()
    assert new.states.digest(2) == old.states.digest(2)
    packed, _ = new.states.pack(2)
    assert packed == header
    assert np.array_equal(new.states.pack(2)[1].numpy(), payload.numpy())


def test_a_share_is_read_without_the_rest_of_its_layer(tmp_path: Path) -> None:
    """A device that has elements of a layer verifies the blocks that contain them, and reads no others."""
    source, target = Trainer(), Trainer()
    header, payload = source.states.pack(1)
    data = payload.numpy().tobytes()
    part = SnapshotPart.from_bytes("group-0/shard", 0, data)
    slot = tmp_path / "slot"
    slot.write_bytes(data)
    whole = PayloadChunk(size_bytes=len(data), path=str(slot), offset=0, part=part.slice_blocks(0, len(data)))
    write_staged(tmp_path, 1, StagedLayer(header=header, chunks=(whole,)))
    first, last = 3 * BLOCK_BYTES + 8, 4 * BLOCK_BYTES + 24
    share = torch.empty(last - first, dtype=torch.uint8)

    def read() -> bool:
        share.zero_()
        with StagedStateLoader(
            tmp_path, target.states, lambda: None, share=lambda _: [(first, share)]
        ) as staged:
            staged.load_layer(1)
            staged.verify()
        return share.numpy().tobytes() == data[first:last]

    assert len(data) > 6 * BLOCK_BYTES and read()
    for position in (0, first - 9 - BLOCK_BYTES, 5 * BLOCK_BYTES, len(data) - 1):
        flip(whole, position)
    assert read()
    flip(whole, 5 * BLOCK_BYTES - 1)
    with pytest.raises(StagingCorruptedError, match="layer 1: its digest does not match"):
        read()
