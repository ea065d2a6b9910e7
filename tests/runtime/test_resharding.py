"""Resharding of scripts' snapshots: the arithmetic of boxes, and FSDP2 ranks that are killed and come back as
others.
"""

import re
import shutil
import socket
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from runtime.script.plain_state import SnapshotError, TensorRef
from runtime.script.registered import RegisteredObject
from runtime.script.resharding import ShardAssembler, changed_boxes
from runtime.script.saved import FORMAT, SavedSnapshot
from runtime.script.tensor_box import Box
from runtime.script.tensor_image import ImageEntry, align
from tests.helpers.forks import Forked, Zygote


@st.composite
def cut_twice(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Box], list[Box]]:
    """Draw a shape, and two ways to cut a tensor of this shape into a grid of boxes, some of them empty."""
    shape = tuple(draw(st.lists(st.integers(1, 7), min_size=1, max_size=3)))

    def boxes() -> list[Box]:
        lines = [[0, *sorted(draw(st.lists(st.integers(0, size), max_size=3))), size] for size in shape]
        return [
            Box(tuple(low for low, _ in cell), tuple(high - low for low, high in cell))
            for cell in product(*(list(pairwise(cuts)) for cuts in lines))
        ]

    return shape, boxes(), boxes()


def elements_of(box: Box) -> set[tuple[int, ...]]:
    return set(product(*(range(low, high) for low, high in zip(box.offsets, box.ends, strict=True))))


@given(cut_twice())
def test_the_common_box_has_the_elements_that_both_have(
    cut: tuple[tuple[int, ...], list[Box], list[Box]],
) -> None:
    _, before, now = cut
    for one, other in product(before[:6], now[:6]):
        common = one.common(other)
        found = elements_of(common) if common is not None else set()
        assert found == elements_of(one) & elements_of(other)
        assert common is None or common.elements == len(found)


def saved_rank(shape: tuple[int, ...], values: torch.Tensor, box: Box, *, first: bool) -> SavedSnapshot:
    """Return the snapshot of a rank that holds a box of a tensor, numbered as on no other rank."""
    part = values[Box.whole(shape).slices_of(box)].permute(tuple(reversed(range(len(shape)))))
    data = part.contiguous().numpy().tobytes()
    gap = align(len(data)) if first else 0
    entry = ImageEntry(
        dtype="float32",
        shape=box.sizes,
        order=tuple(reversed(range(len(shape)))),
        on_host=True,
        sharded=True,
        offset=0 if first else align(4),
        size_bytes=len(data),
        global_shape=shape,
        offsets=box.offsets,
    )
    number = ImageEntry(
        dtype="float32", shape=(), order=(), on_host=True, sharded=False, offset=gap, size_bytes=4
    )
    image = np.zeros(align(len(data)) + align(4), dtype=np.uint8)
    image[entry.offset : entry.offset + len(data)] = np.frombuffer(data, dtype=np.uint8)
    image[number.offset : number.offset + 4] = np.frombuffer(np.float32(7).tobytes(), dtype=np.uint8)
    state = {"weight": TensorRef(0 if first else 1), "count": TensorRef(1 if first else 0)}
    content = {"format": FORMAT, "objects": {"model": {"kind": "module", "state": state}}, "random": None}
    entries = [entry, number] if first else [number, entry]
    return SavedSnapshot(content=content, entries=entries, own=image, shared=image[:0])


@settings(deadline=None)
@given(cut_twice(), st.data())
def test_shards_of_any_cut_are_assembled_from_those_of_any_other(
    cut: tuple[tuple[int, ...], list[Box], list[Box]], data: st.DataObject
) -> None:
    shape, before, now = cut
    values = torch.arange(float(np.prod(shape))).reshape(shape)
    ranks = [saved_rank(shape, values, box, first=n % 2 == 0) for n, box in enumerate(before)]
    for wanted in now:
        sources = data.draw(st.permutations(ranks))
        base = sources[0]
        number = base.content["objects"]["model"]["state"]["weight"].index
        assembler = ShardAssembler(base, {number: wanted})
        for source in [*sources, sources[-1]]:  # the last one twice, as a replica
            assembler.add(source)
        assert not assembler.missing
        made = assembler.assembled()
        entry, count = made.entries[number], made.entries[1 - number]
        found = made.own[entry.offset : entry.offset + entry.size_bytes].tobytes()
        assert found == values[Box.whole(shape).slices_of(wanted)].contiguous().numpy().tobytes()
        assert made.own[count.offset : count.offset + 4].tobytes() == np.float32(7).tobytes()
        assert Box(entry.offsets or (), entry.shape) == wanted


def test_parts_that_are_lost_or_overlap_are_named() -> None:
    values = torch.arange(6.0)
    low, high = (saved_rank((6,), values, Box((n,), (3,)), first=True) for n in (0, 3))
    assembler = ShardAssembler(low, {0: Box((1,), (4,))})
    assembler.add(low)
    assert assembler.missing == ["model.weight"]
    assembler.add(high)
    assert assembler.missing == []
    with pytest.raises(SnapshotError, match=r"model\.weight: the parts of two ranks overlap"):
        assembler.add(saved_rank((6,), values, Box((2,), (3,)), first=True))


def test_a_sharded_tensor_of_another_object_needs_the_same_ranks() -> None:
    saved = saved_rank((6,), torch.arange(6.0), Box((0,), (3,)), first=True)
    module = RegisteredObject.of("model", nn.Linear(2, 2), guarded=False)
    theirs = {"model": replace(module, kind="object")}
    assert changed_boxes(theirs, saved, same_ranks=True) == {}
    with pytest.raises(SnapshotError, match=r"model\.weight is sharded, and belongs to no registered"):
        changed_boxes(theirs, saved, same_ranks=False)


SCRIPT = """
import os, sys, time, torch, torch.distributed as dist
from pathlib import Path
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from ftd import Snapshotter
place, mesh, last = Path(sys.argv[1]), tuple(map(int, sys.argv[2].split("x"))), int(sys.argv[3])
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(sum(mesh))
model = torch.nn.Sequential(torch.nn.Linear(6, 10), torch.nn.Tanh(), torch.nn.Linear(10, 3))
whole = init_device_mesh("cpu", mesh, mesh_dim_names=("replicas", "shards")[-len(mesh):])
fully_shard(model[2], mesh=whole)
fully_shard(model, mesh=whole)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.7)
progress = {"batches": 0}
snapshots = Snapshotter("job", directory=place, model=model, optimizer=optimizer, scheduler=scheduler,
                        progress=progress)
start = snapshots.restore() or 0
assert progress["batches"] == start
print(f"after {start}", flush=True)
for number in range(start + 1, last + 1):
    data = torch.Generator().manual_seed(number)
    optimizer.zero_grad()
    loss = model(torch.randn(5, 6, generator=data)).square().sum()
    loss.backward()
    optimizer.step()
    scheduler.step()
    progress["batches"] = number
    if rank == 0:
        print(f"step {number} {loss.item():.9f}", flush=True)
    snapshots.snapshot(number)
    snapshots.wait()
    time.sleep(0.05)
dist.barrier()
if "remove" in sys.argv:
    snapshots.remove()
snapshots.close()
dist.destroy_process_group()
"""


@pytest.fixture
def place() -> Iterator[Path]:
    path = Path(mkdtemp(prefix="ftd-reshard-", dir="/dev/shm"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


class Run:
    """The ranks of one mesh."""

    def __init__(self, zygote: Zygote, place: Path, folder: Path, mesh: str, last: int, *more: str) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
        count = int(np.prod([int(size) for size in mesh.split("x")]))
        where = {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        self.processes: list[Forked] = [
            zygote.start(
                SCRIPT, folder / f"{mesh}-{port}-{rank}", str(place), mesh, str(last), *more,
                RANK=str(rank), **where,
            )
            for rank in range(count)
        ]  # fmt: skip

    @property
    def text(self) -> str:
        return self.processes[0].text

    def kill_after(self, steps: int) -> "Run":
        """Kill all ranks once this number of steps is done, and return."""
        while len(re.findall(r"^step", self.text, re.MULTILINE)) < steps:
            assert all(process.alive for process in self.processes), "".join(p.text for p in self.processes)
            time.sleep(0.005)
        for process in self.processes:
            process.kill()
        return self

    def finish(self) -> "Run":
        codes = [process.wait() for process in self.processes]
        assert not any(codes), "".join(process.text for process in self.processes)
        return self

    @property
    def restored(self) -> int:
        return int(re.findall(r"^after (\d+)", self.text, re.MULTILINE)[0])

    @property
    def losses(self) -> dict[int, float]:
        return {int(step): float(loss) for step, loss in re.findall(r"^step (\d+) (\S+)$", self.text, re.M)}


def losses_of_one_process(steps: int) -> dict[int, float]:
    torch.manual_seed(4)
    model = nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.7)
    losses: dict[int, float] = {}
    for number in range(1, steps + 1):
        data = torch.Generator().manual_seed(number)
        optimizer.zero_grad()
        loss: Any = model(torch.randn(5, 6, generator=data)).square().sum()
        loss.backward()
        optimizer.step()
        scheduler.step()
        losses[number] = loss.item()
    return losses


@pytest.mark.processes
def test_fsdp2_is_killed_and_restored_on_other_meshes_with_the_same_losses(
    place: Path, tmp_path: Path
) -> None:
    zygote = Zygote()
    runs: list[Run] = []
    try:
        for mesh in ("4", "3", "6", "2x2"):
            runs.append(Run(zygote, place, tmp_path, mesh, 100).kill_after(4))
            held = {path.parent.name for path in place.glob("job/*/step-*.json")}
            assert len(held) >= len(runs[-1].processes)
            assert [path.name for path in sorted(place.glob("job/rank-*"))] == [
                f"rank-{rank}" for rank in range(len(runs[-1].processes))
            ], "what former ranks left is removed"
        # Under HSDP another rank has the same shards, so the memory of one may be lost.
        shutil.rmtree(place / "job" / "rank-1")
        last = max(runs[-1].losses) + 2
        runs.append(Run(zygote, place, tmp_path, "2", last, "remove").finish())
    finally:
        for run in runs:
            for process in run.processes:
                process.kill()
        zygote.close()
    whole = losses_of_one_process(last)
    for before, after in pairwise(runs):
        # All ranks had completed the step before the newest one that was printed.
        assert max(before.losses) - 1 <= after.restored <= max(before.losses)
    for run in runs:
        assert run.losses == {step: pytest.approx(whole[step], rel=1e-5) for step in run.losses}
    assert not (place / "job").exists()
