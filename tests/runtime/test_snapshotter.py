"""Tests of Snapshotter: a restored state is exactly the saved one, and no restorable snapshot is lost."""

import contextlib
import errno
import fcntl
import gc
import itertools
import logging
import os
import random
import re
import shutil
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

import runtime.script.contents
import runtime.script.copier
import runtime.script.rank_arena
from ftd import SnapshotError, Snapshotter
from runtime.script.plain_state import TensorRef, encode, freeze, rebuild, thaw
from runtime.script.protection import find_restorable, rank_layout_of
from runtime.script.saved import EMPTY
from runtime.script.tensor_filler import TensorFiller, verified_spans
from runtime.script.tensor_image import (
    UNIT_BYTES,
    TensorImage,
    cut_units,
    dimension_order,
    memory_bytes,
    whole_image,
)
from runtime.wire.snapshot_agent_protocol import HeldRankSnapshot
from storage.errors import ArenaFullError
from storage.manifest import FORMAT, checked_body, with_digest

SHM = Path("/dev/shm")
NUMBERS = itertools.count()


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    path = SHM / f"ftd-test-snapshotter-{os.getpid()}-{next(NUMBERS)}"
    monkeypatch.setattr(runtime.script.rank_arena, "_LOCK_S", 0.2)
    yield path
    shutil.rmtree(path, ignore_errors=True)


class Script:
    """A model with everything that changes: weights, running statistics, momenta, a schedule, random numbers."""

    def __init__(self, place: Path, *, seed: int = 1, width: int = 64, name: str = "job") -> None:
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        self.model = nn.Sequential(
            nn.Linear(8, width), nn.BatchNorm1d(width), nn.Dropout(0.3), nn.Linear(width, 1)
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, [3, 5, 5])
        self.progress: dict[str, Any] = {"samples": 0, "drawn": []}
        self.snapshots = Snapshotter(
            name,
            directory=place,
            model=self.model,
            optimizer=self.optimizer,
            scheduler=self.scheduler,
            progress=self.progress,
        )

    def step(self) -> float:
        points = torch.randn(16, 8)
        self.optimizer.zero_grad()
        loss = functional.mse_loss(self.model(points), points.sum(dim=1, keepdim=True))
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        self.progress["samples"] += 16
        self.progress["drawn"].append((random.random(), float(np.random.rand())))
        return loss.item()

    def run(self, first: int, last: int) -> list[float]:
        losses = []
        for step in range(first, last + 1):
            losses.append(self.step())
            self.snapshots.snapshot(step)
        return losses

    def leave(self) -> None:
        self.snapshots.close()


def slot_file(place: Path, number: int = 0) -> Path:
    return place / "job" / "rank-0" / f"slot-{number}"


def corrupt_byte(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)
        file.seek(offset)
        file.write(bytes([byte[0] ^ 1]))


# --- what comes back -----------------------------------------------------------------------------


def test_an_interrupted_run_continues_as_an_uninterrupted_one(
    place: Path, caplog: pytest.LogCaptureFixture
) -> None:
    whole = Script(place, name="whole")
    losses, drawn = whole.run(1, 12), whole.progress["drawn"]
    whole.leave()
    first = Script(place)
    assert first.snapshots.restore() is None
    begun = first.run(1, 7)
    first.leave()
    second = Script(place, seed=99)
    assert caplog.messages == []
    assert second.snapshots.restore() == 7
    assert "training continues after step 7" in caplog.text
    assert second.progress["samples"] == 7 * 16
    assert begun + second.run(8, 12) == losses
    assert second.progress["drawn"] == drawn
    assert second.scheduler.get_last_lr() == whole.scheduler.get_last_lr()
    assert all(
        torch.equal(a, b)
        for a, b in zip(whole.model.state_dict().values(), second.model.state_dict().values(), strict=True)
    )
    second.leave()


def test_restoring_fills_the_tensors_that_others_hold(place: Path) -> None:
    script = Script(place)
    script.run(1, 2)
    script.snapshots.wait()
    weight, momentum = script.model[0].weight, script.optimizer.state[script.model[0].weight]["exp_avg"]
    expected = weight.detach().clone(), momentum.clone()
    script.step()
    assert not torch.equal(weight, expected[0])
    assert script.snapshots.restore() == 2
    assert script.model[0].weight is weight and torch.equal(weight, expected[0])
    assert script.optimizer.state[weight]["exp_avg"] is momentum and torch.equal(momentum, expected[1])
    script.leave()


def test_a_snapshot_is_of_its_step_even_if_the_copy_ends_in_the_next(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copier is blocked until the optimizer steps: the step must wait, and then help."""
    script = Script(place)
    script.run(1, 2)
    script.snapshots.wait()
    parameters = [p.detach().clone() for p in script.model.parameters()]
    gate, slot = threading.Event(), script.snapshots._arena.acquire_slot
    script.snapshots._copier.open_slot = lambda size: (gate.wait(60), slot(size))[1]
    script.snapshots.snapshot(3)
    seen: list[bool] = []
    script.optimizer.register_step_pre_hook(lambda *_: seen.append(gate.is_set()))
    threading.Timer(0.2, gate.set).start()
    script.step()
    assert seen == [True]
    assert script.snapshots.counts.stall_s > 0
    assert script.snapshots.restore() == 3
    assert all(torch.equal(a, b) for a, b in zip(parameters, script.model.parameters(), strict=True))
    script.leave()


def test_manual_changes_wait_for_the_copy(place: Path) -> None:
    """``changing`` guards tensors; tensors that no optimizer owns are copied at once."""
    averaged, frozen = nn.Linear(4, 4), nn.Linear(4, 4)
    snapshots = Snapshotter("job", directory=place, averaged=averaged)
    snapshots.register("frozen", frozen, guarded=True)
    before = averaged.weight.detach().clone(), frozen.weight.detach().clone()
    gate, slot = threading.Event(), snapshots._arena.acquire_slot
    snapshots._copier.open_slot = lambda size: (gate.wait(60), slot(size))[1]
    snapshots.snapshot(1)
    with torch.no_grad():
        averaged.weight.add_(1)
    threading.Timer(0.1, gate.set).start()
    with snapshots.changing(), torch.no_grad():
        frozen.weight.add_(1)
    assert snapshots.restore() == 1
    assert torch.equal(averaged.weight, before[0]) and torch.equal(frozen.weight, before[1])
    snapshots.close()


def test_unusual_models_and_optimizers_are_restored(place: Path) -> None:
    """The cases are tied weights, channels last, views with gaps, other types, a module with extra state, and
    LBFGS.
    """

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)
            self.two.weight = self.one.weight
            self.conv = nn.Conv2d(3, 5, 3).to(memory_format=torch.channels_last)
            self.register_buffer("gaps", torch.arange(12.0).reshape(3, 4)[:, ::2])
            self.register_buffer("nothing", torch.empty(0, 3))
            self.register_buffer("brain", torch.randn(5).to(torch.bfloat16))
            self.register_buffer("waves", torch.randn(2, 2, dtype=torch.complex64))
            self.note = "first"

        def get_extra_state(self) -> dict[str, str]:
            return {"note": self.note}

        def set_extra_state(self, state: dict[str, str]) -> None:
            self.note = state["note"]

    torch.manual_seed(3)
    model, points = Odd(), torch.randn(8, 4)
    optimizer = torch.optim.LBFGS(list(model.one.parameters()), max_iter=3)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = functional.mse_loss(model.two(model.one(points)), points)
        loss.backward()
        return loss

    optimizer.step(closure)
    snapshots = Snapshotter("job", directory=place, model=model, optimizer=optimizer)
    model.note = "second"
    snapshots.snapshot(1)
    snapshots.wait()
    expected = {k: v.clone() for k, v in model.state_dict().items() if isinstance(v, Tensor)}
    direction = optimizer.state[model.one.weight]["d"].clone()
    model.note = "third"
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.mul_(3)
    optimizer.state.clear()
    assert snapshots.restore() == 1
    assert model.note == "second"
    assert all(torch.equal(model.state_dict()[k], v) for k, v in expected.items())
    assert torch.equal(optimizer.state[model.one.weight]["d"], direction)
    assert model.two.weight is model.one.weight
    snapshots.close()


def test_views_that_begin_at_the_same_address_are_restored_each_with_its_own_values(place: Path) -> None:
    square, waves = torch.arange(9.0).reshape(3, 3), torch.tensor([1 + 2j, 3 - 4j])
    views = {
        "row": square[0],
        "column": square[:, 0],
        "diagonal": square.diagonal(),
        "repeated": square[0, 0].expand(3),
        "waves": waves,
        "conjugate": waves.conj(),
        "same row": square[0],
    }
    expected = {name: view.tolist() for name, view in views.items()}
    snapshots = Snapshotter("job", directory=place, views=views)
    snapshots.snapshot(1)
    snapshots.close()
    restored: dict[str, Any] = {}
    snapshots = Snapshotter("job", directory=place, views=restored)
    assert snapshots.restore() == 1
    snapshots.close()
    assert {name: view.tolist() for name, view in restored.items()} == expected
    assert restored["row"] is not restored["column"]


def test_extra_state_of_another_size_is_given_to_its_module(place: Path) -> None:
    class Growing(nn.Linear):
        history = b""

        def get_extra_state(self) -> Any:
            return torch.tensor(list(self.history), dtype=torch.uint8) if self.history else None

        def set_extra_state(self, state: Any) -> None:
            self.history = b"" if state is None else bytes(state.tolist())

    module = Growing(2, 1)
    snapshots = Snapshotter("job", directory=place, model=nn.Sequential(module))
    for step, history in enumerate((b"", b"grown")):
        module.history = history
        snapshots.snapshot(step)
        snapshots.wait()
        for other in (b"", b"longer than before"):
            module.history = other
            assert snapshots.restore() == step
            assert module.history == history
    snapshots.close()


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
def test_a_sharded_optimizers_state_is_restored(place: Path) -> None:
    """A ``ZeroRedundancyOptimizer`` keeps its state in an optimizer within it."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    def script() -> tuple[Any, Snapshotter]:
        model = nn.Linear(4, 2)
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-2)
        snapshots = Snapshotter("job", directory=place, model=model, optimizer=optimizer)
        snapshots.restore()
        return optimizer, snapshots

    optimizer, snapshots = script()
    for step in (1, 2):
        for parameter in optimizer.param_groups[0]["params"]:
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
        snapshots.snapshot(step)
    snapshots.close()
    before = list(optimizer.optim.state.values())
    optimizer, snapshots = script()
    restored = list(optimizer.optim.state.values())
    snapshots.close()
    assert [float(state["step"]) for state in restored] == [2.0, 2.0]
    assert all(torch.equal(a["exp_avg_sq"], b["exp_avg_sq"]) for a, b in zip(before, restored, strict=True))


def test_what_an_optimizer_keeps_under_keys_of_its_own_is_restored(place: Path) -> None:
    class Counting(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            kept: dict[Any, Any] = self.state
            kept["calls"] = kept.get("calls", 0) + 1
            kept["mean"] = {"norm": torch.full((2,), float(kept["calls"]))}
            return super().step(closure)

    def script() -> tuple[Any, Snapshotter]:
        model = nn.Linear(2, 1)
        optimizer = Counting(model.parameters(), lr=0.1, momentum=0.9)
        snapshots = Snapshotter("job", directory=place, model=model, optimizer=optimizer)
        snapshots.restore()
        return optimizer, snapshots

    optimizer, snapshots = script()
    for step in (1, 2, 3):
        optimizer.param_groups[0]["params"][0].grad = torch.ones(1, 2)
        optimizer.step()
        snapshots.snapshot(step)
    snapshots.wait()
    optimizer.state["later"] = 1
    assert snapshots.restore() == 3
    assert "later" not in optimizer.state
    snapshots.close()
    optimizer, snapshots = script()
    snapshots.close()
    assert optimizer.state["calls"] == 3
    assert torch.equal(optimizer.state["mean"]["norm"], torch.full((2,), 3.0))
    assert torch.equal(optimizer.state[optimizer.param_groups[0]["params"][0]]["momentum_buffer"],
                       torch.full((1, 2), 2.71))  # fmt: skip


class Lookahead(torch.optim.Optimizer):
    """Slow weights in a state of its own, as the packages write it: without its base class's constructor."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.param_groups, self.defaults = optimizer.param_groups, optimizer.defaults
        self.state = defaultdict(dict)
        for group in self.param_groups:
            group["calls"] = 0
            for parameter in group["params"]:
                self.state[parameter]["slow"] = parameter.detach().clone()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.optimizer.step()
        for group in self.param_groups:
            group["calls"] += 1
            if group["calls"] % 2 == 0:
                for parameter in group["params"]:
                    parameter.copy_(self.state[parameter]["slow"].lerp_(parameter, 0.5))

    def state_dict(self) -> dict[str, Any]:
        return {"slow": self.state, "base": self.optimizer.state_dict()}


class Sharpness(torch.optim.Optimizer):
    """A step in two halves (SAM); the optimizer of the second one is missing in its ``state_dict()``."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})
        self.base = torch.optim.AdamW(self.param_groups, lr=0.1)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def climb(self) -> None:
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["old"] = parameter.detach().clone()
            parameter.add_(parameter.grad, alpha=0.1)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.climb()
        for parameter in self.param_groups[0]["params"]:
            parameter.copy_(self.state[parameter]["old"])
        self.base.step()


class Warmup(torch.optim.Optimizer):
    """A number in an attribute; parameters and their states are those of the optimizer within."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self.calls = optimizer, 0
        self.param_groups, self.state, self.defaults = optimizer.param_groups, optimizer.state, {}

    def step(self, closure: Any = None) -> None:
        self.calls += 1
        self.param_groups[0]["lr"] = 0.01 * self.calls
        self.optimizer.step()

    def state_dict(self) -> dict[str, Any]:
        return {"calls": self.calls, **self.optimizer.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.calls = state_dict.pop("calls")
        self.optimizer.load_state_dict(state_dict)
        self.param_groups, self.state = self.optimizer.param_groups, self.optimizer.state


class Passing(torch.optim.Optimizer):
    """Nothing of its own, not even what its base class makes."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def step(self, closure: Any = None) -> None:
        self.optimizer.step()


class Chained(torch.optim.Optimizer):
    """One optimizer for each parameter."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})
        self.chain = [torch.optim.AdamW([one], lr=0.1) for one in self.param_groups[0]["params"]]

    def step(self, closure: Any = None) -> None:
        for one in self.chain:
            one.step()


@pytest.mark.parametrize(
    "make",
    [
        lambda parameters: Lookahead(torch.optim.AdamW(parameters, lr=0.1)),
        Sharpness,
        lambda parameters: Warmup(torch.optim.AdamW(parameters, lr=0.1)),
        lambda parameters: Passing(torch.optim.AdamW(parameters, lr=0.1)),
        Chained,
        lambda parameters: Lookahead(Sharpness(parameters)),
    ],
    ids=["Lookahead", "SAM", "Warmup", "nothing", "list", "nested"],
)
def test_an_optimizer_with_others_in_it_is_restored_with_their_states(
    place: Path, make: Callable[[Any], torch.optim.Optimizer]
) -> None:
    def run(name: str, first: int, last: int) -> Tensor:
        torch.manual_seed(4)
        model = nn.Linear(4, 3)
        optimizer = make(model.parameters())
        snapshots = Snapshotter(name, directory=place, model=model, optimizer=optimizer)
        assert (snapshots.restore() or 0) == first - 1
        for step in range(first, last + 1):
            model.zero_grad()
            model(torch.randn(5, 4)).square().mean().backward()
            optimizer.step()
            snapshots.snapshot(step)
        snapshots.close()
        return model.weight.detach().clone()

    expected = run("whole", 1, 7)
    run("job", 1, 4)
    assert torch.equal(run("job", 5, 7), expected)


def test_what_an_optimizer_changes_outside_of_its_step_is_not_in_a_snapshot_that_was_begun(
    place: Path,
) -> None:
    model = nn.Linear(4, 3)
    optimizer = Sharpness(model.parameters())
    snapshots = Snapshotter("job", directory=place, model=model, optimizer=optimizer)
    before = model.weight.detach().clone()
    model(torch.ones(1, 4)).sum().backward()
    gate, slot = threading.Event(), snapshots._arena.acquire_slot
    snapshots._copier.open_slot = lambda size: (gate.wait(60), slot(size))[1]
    snapshots.snapshot(1)
    optimizer.climb()
    gate.set()
    assert snapshots.restore() == 1
    assert torch.equal(model.weight, before)
    snapshots.close()


@pytest.mark.usefixtures("one_rank")
def test_a_lost_ranks_shard_in_plain_data_is_not_replaced_by_another_ranks(place: Path) -> None:
    """HSDP may restore without the memory of a rank, whose parameters another rank has, too."""
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

    part = distribute_tensor(torch.arange(4.0), init_device_mesh("cpu", (1,)), [Shard(0)])
    snapshots = Snapshotter("job", directory=place, average={"part": part})
    snapshots.snapshot(1)
    snapshots.wait()
    (manifest,) = snapshots._arena.arena.snapshots
    layout = rank_layout_of(manifest)
    assert layout is not None
    held = HeldRankSnapshot(address="", generation=manifest.generation, step=1, layout=layout)
    (found,), _ = find_restorable([held], 1)
    assert not isinstance(snapshots._find_bytes(found, None, 0), str)
    lost = snapshots._find_bytes(found, None, 1)
    snapshots.close()
    assert lost == "average.part is sharded, and belongs to no registered module or optimizer"


def test_plain_data_survives_a_round_trip() -> None:
    tensor = torch.arange(3)
    value = {
        "numbers": [1, -5, 2**80, 1.5, True, None, np.float32(0.5), np.int64(7)],
        "text": ("ä", b"\0\1", (1, (2,))),
        3: {"nested": [tensor]},
        (1, "pair"): "key",
        "counter": Counter({5: 2}),
        "array": np.arange(6, dtype=np.int16).reshape(2, 3),
        "empty": [{}, [], ()],
    }
    thawed = thaw(encode(freeze(value, "value", lambda t, where: 0)))
    back = rebuild(thawed, value, lambda number, old: old if old is not None else torch.zeros(1))
    assert back[3]["nested"][0] is tensor
    assert (back.pop("array") == value.pop("array")).all()
    assert back == value and isinstance(back["text"], tuple) and isinstance(back["counter"], Counter)
    assert isinstance(thawed[3]["nested"][0], TensorRef)


def test_what_is_in_registered_data_is_restored_in_place(place: Path) -> None:
    """Scripts hold the lists, dicts and arrays that they put into it under names of their own."""

    def made() -> dict[str, Any]:
        row: list[float] = []
        return {
            "losses": [],
            "seen": defaultdict(int),
            "sums": np.zeros(2),
            "rows": [[1.0], [2.0]],
            "two": [row, row],
        }

    data = made()
    with contextlib.closing(Snapshotter("job", directory=place, data=data)) as snapshots:
        data["losses"].append({"step": 1})
        data["seen"]["cat"] += 1
        data["sums"] += 3
        data["rows"].append([3.0])
        data["two"] = [[1.0], [2.0]]
        snapshots.snapshot(1)
    restored = made()
    losses, seen, sums, rows = (restored[key] for key in ("losses", "seen", "sums", "rows"))
    with contextlib.closing(Snapshotter("job", directory=place, data=restored)) as snapshots:
        assert snapshots.restore() == 1
    seen["dog"] += 1
    assert (losses, dict(seen), sums.tolist()) == ([{"step": 1}], {"cat": 1, "dog": 1}, [3.0, 3.0])
    assert rows == [[1.0], [2.0], [3.0]]
    assert restored["two"] == [[1.0], [2.0]]  # They were one list when the script began, and are two now.
    assert restored["losses"] is losses and restored["seen"] is seen and restored["sums"] is sums


@pytest.mark.parametrize(
    "kind", [np.float64, np.float32, np.float16, np.int64, np.uint8, np.bool_, np.complex64]
)
def test_a_number_of_numpy_keeps_its_type(kind: type[np.generic]) -> None:
    """Another type would round in another way in the computations that follow."""
    thawed = thaw(encode(freeze({"best": kind(1)}, "it", lambda tensor, where: 0)))
    assert type(thawed["best"]) is kind and thawed["best"] == 1


def test_text_and_bytes_of_subclasses_are_saved(place: Path) -> None:
    plain = {"torch": torch.__version__, "name": np.str_("a"), "data": np.bytes_(b"b")}
    assert thaw(encode(freeze(plain, "it", lambda tensor, where: 0))) == plain
    with contextlib.closing(Snapshotter("job", directory=place, plain=dict(plain))) as snapshots:
        snapshots.snapshot(1)
    restored: dict[str, Any] = {}
    with contextlib.closing(Snapshotter("job", directory=place, plain=restored)) as snapshots:
        assert snapshots.restore() == 1
    assert restored == plain


def test_own_generators_are_restored(place: Path) -> None:
    def made(seed: int) -> dict[str, Any]:
        return {
            "torch_one": torch.Generator().manual_seed(seed),
            "numpy_one": np.random.default_rng(seed),
            "older": np.random.RandomState(seed),
            "python_one": random.Random(seed),
        }

    def drawn(one: dict[str, Any]) -> list[float]:
        first = torch.rand(1, generator=one["torch_one"]).item()
        return [first, one["numpy_one"].random(), one["older"].rand(), one["python_one"].random()]

    theirs = made(1)
    snapshots = Snapshotter("job", directory=place, **theirs)
    drawn(theirs)
    snapshots.snapshot(1)
    snapshots.close()
    expected, again = drawn(theirs), made(2)
    snapshots = Snapshotter("job", directory=place, **again)
    assert snapshots.restore() == 1
    assert drawn(again) == expected
    snapshots.close()


def test_the_units_of_an_image_are_its_bytes_each_once() -> None:
    sizes = [3, 0, UNIT_BYTES + 5, 64, 3 * UNIT_BYTES]
    ranges, end = [], 0
    for number, size in enumerate(sizes):
        ranges.append((number, end, size))
        end += size + 13
    end -= 13
    units = cut_units(ranges, whole_image(end))
    assert [u.offset for u in units] == [i * UNIT_BYTES for i in range(len(units))]
    assert sum(u.size_bytes for u in units) == end
    seen = Counter[int]()
    for unit in units:
        for piece in unit.ranges:
            assert unit.offset <= piece.offset <= unit.offset + unit.size_bytes - piece.size_bytes
            assert piece.offset - piece.start == ranges[piece.entry][1]
            seen[piece.entry] += piece.size_bytes
    assert {number: size for number, size in enumerate(sizes) if size} == seen


@pytest.mark.parametrize("shape", [(), (0, 2), (5,), (2, 3, 4), (1, 4, 1)])
def test_a_tensor_is_restored_in_any_order_of_dimensions(shape: tuple[int, ...]) -> None:
    values = torch.randn(shape, dtype=torch.float64)
    turned = values.permute(tuple(reversed(range(values.dim()))))
    for tensor in (values, turned):
        image = TensorImage(known={})
        image.add(tensor, "it")
        flat = memory_bytes(tensor, dimension_order(tensor))
        assert flat is not None
        for old in (torch.zeros_like(tensor), torch.zeros_like(tensor).contiguous(), None):
            filler = TensorFiller(entries=image.entries, images={False: flat.numpy(), True: EMPTY})
            filled = filler.target_for(0, old, None)
            assert old is None or filled is old
            assert filler.verify(verified_spans(flat.numpy(), shared=False)) == ()
            filler.finish()
            assert torch.equal(filled, tensor)


# --- memory --------------------------------------------------------------------------------------


def test_everything_is_allocated_at_start_optimizer_state_included(place: Path) -> None:
    script = Script(place, width=4096)
    before = {f: f.stat().st_size for f in (place / "job" / "rank-0").glob("slot-*")}
    script.run(1, 6)
    script.snapshots.wait()
    assert len(before) == 2
    assert {f: f.stat().st_size for f in (place / "job" / "rank-0").glob("slot-*")} == before
    assert script.snapshots.counts.completed == 6
    script.leave()


def test_many_snapshots_keep_no_object_of_the_script_alive(place: Path) -> None:
    state: dict[str, Any] = {"fresh": torch.zeros(1000)}
    snapshots = Snapshotter("job", directory=place, state=state)
    for step in range(1, 30):
        state["fresh"] = torch.full((1000,), float(step))
        snapshots.snapshot(step)
    snapshots.wait()
    gc.collect()
    alive = [t for t in gc.get_objects() if isinstance(t, Tensor) and t.shape == (1000,)]
    assert len(alive) < 6
    assert snapshots.restore() == 29 and state["fresh"][0] == 29
    snapshots.close()


def test_too_little_memory_is_reported_at_start_with_both_numbers(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = shutil.disk_usage
    monkeypatch.setattr(shutil, "disk_usage", lambda path: real(path)._replace(free=1_000_000))
    with pytest.raises(ArenaFullError, match=r"two snapshots .* need \d+ bytes .* are free: make") as caught:
        Script(place, width=65536)
    assert caught.value.needed_bytes > 2 * 65536 * 9 * 4 * 3
    assert caught.value.free_bytes == 1_000_000
    assert not (place / "job").exists(), "nothing remains"
    monkeypatch.undo()
    monkeypatch.setattr(runtime.script.rank_arena, "_LOCK_S", 0.2)
    kept = Script(place)  # its lock was given back
    kept.snapshots.snapshot(1)
    kept.leave()
    monkeypatch.setattr(shutil, "disk_usage", lambda path: real(path)._replace(free=1_000_000))
    with pytest.raises(ArenaFullError):
        Script(place, width=65536)
    monkeypatch.undo()
    assert Script(place).snapshots.restore() == 1, "what a former run kept stays"


@pytest.mark.parametrize("limit_bytes", ["1GB", 0, float("nan")])
def test_a_limit_that_is_not_a_number_of_bytes_is_rejected(place: Path, limit_bytes: Any) -> None:
    with pytest.raises(SnapshotError, match="limit_bytes must be a number of bytes above 0, not "):
        Snapshotter("job", directory=place, limit_bytes=limit_bytes, state={})


@pytest.mark.parametrize("step", ["5", None, 1.5, -1, 2**63])
def test_a_step_that_is_not_a_number_is_rejected(place: Path, step: Any) -> None:
    script = Script(place)
    with pytest.raises(SnapshotError, match=r"snapshot: step must be the whole number .*, not "):
        script.snapshots.snapshot(step)
    script.snapshots.snapshot(np.int64(5))
    script.leave()


def test_a_protection_that_scripts_cannot_use_is_not_offered(place: Path) -> None:
    for protection in ("raid", "aor"):
        with pytest.raises(
            SnapshotError, match=f"'{protection}' is not a protection scheme; use none"
        ) as caught:
            Snapshotter("job", directory=place, protection=protection, state={})
        assert "aor" not in str(caught.value).partition("there are")[2]
    with pytest.raises(SnapshotError, match="protection: None must be a string"):
        Snapshotter("job", directory=place, protection=None, state={})  # type: ignore[arg-type]


def test_a_script_does_not_start_over_while_its_snapshot_agent_does_not_answer(place: Path) -> None:
    """Without an agent, a script keeps its snapshots in a directory of its own, which is empty here."""

    def script(directory: Path, protection: str) -> Snapshotter:
        socket = place / "snapshot-agent.sock"
        model = nn.Linear(2, 1)
        return Snapshotter(
            "job", directory=directory, protection=protection, snapshot_agent=socket, model=model
        )

    snapshots = script(place / "own", "buddy")
    assert snapshots.restore() is None  # There has been no agent yet.
    snapshots.remove()
    snapshots = script(place / "node.scripts", "none")
    snapshots.snapshot(1)
    snapshots.close()
    snapshots = script(place / "own", "buddy")
    with pytest.raises(SnapshotError, match=r"node\.scripts/job holds snapshots .* start it again"):
        snapshots.restore()
    assert snapshots.restore(missing="fresh") is None
    snapshots.snapshot(1)
    snapshots.close()


def test_a_limit_in_bytes_is_respected(place: Path) -> None:
    with pytest.raises(ArenaFullError, match="limit of 1000000 bytes"):
        Snapshotter("job", directory=place, limit_bytes=1_000_000, model=nn.Linear(1000, 1000))


def test_memory_that_is_full_in_the_middle_stops_snapshots_and_not_training(
    place: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    script = Script(place)
    script.run(1, 3)
    script.snapshots.wait()

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched, caplog.at_level(logging.WARNING):
        patched.setattr("storage.arena.write_record", full)  # the manifest has no room
        script.run(4, 4)
        script.snapshots.wait()
        patched.undo()
        patched.setattr(os, "posix_fallocate", full)
        script.progress["large"] = "x" * 3_000_000  # the slot must grow and cannot
        script.run(5, 5)
        script.snapshots.wait()
    assert script.snapshots.counts.failed == 2
    assert "no snapshot of step 4, training goes on" in caplog.text
    assert "no snapshot of step 5" in caplog.text and "bytes" in caplog.text
    script.leave()
    again = Script(place, seed=5)
    assert again.snapshots.restore() == 3
    again.run(4, 5)
    again.snapshots.wait()
    assert again.snapshots.counts.completed_step == 5
    again.leave()


def test_a_failure_in_the_copier_releases_waiting_threads(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = Script(place)
    script.run(1, 1)
    script.snapshots.wait()
    with monkeypatch.context() as patched:
        patched.setattr(runtime.script.copier, "digest_of", lambda data: 1 / 0)
        script.run(2, 4)
        script.snapshots.wait()
    assert script.snapshots.counts.failed == 3
    assert script.snapshots.restore() == 1
    script.leave()


def test_a_unit_that_cannot_be_copied_stops_neither_the_step_nor_the_next_snapshot(place: Path) -> None:
    script = Script(place)
    script.run(1, 1)
    script.snapshots.wait()
    capture = script.snapshots._contents.capture(2)
    capture.sources[0] = np.zeros(3, dtype=np.uint8)  # shorter than the image's tensor
    script.snapshots._copier.begin(capture)
    script.step()
    script.snapshots.wait()
    assert script.snapshots.counts.failed == 1
    script.run(3, 3)
    assert script.snapshots.restore() == 3
    script.leave()


@pytest.mark.parametrize("end", [KeyboardInterrupt, SystemExit])
def test_an_interrupted_step_that_helped_loses_only_that_snapshot(
    place: Path, end: type[BaseException], caplog: pytest.LogCaptureFixture
) -> None:
    """After Ctrl-C in the middle of a copy, the bytes are not the step's, and no thread waits for them
    forever.
    """

    class InterruptingSource(np.ndarray):  # type: ignore[type-arg]
        """A source that interrupts the training thread when it is about to copy."""

        def __getitem__(self, key: Any) -> Any:
            if threading.current_thread() is threading.main_thread():
                raise end
            assert gate.wait(60)
            return super().__getitem__(key)

    model = nn.Linear(1024, 3 * UNIT_BYTES // 4096, bias=False)  # three units, for both threads
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    snapshots = Snapshotter("job", directory=place, model=model, optimizer=optimizer)
    snapshots.snapshot(1)
    snapshots.wait()
    gate, capture = threading.Event(), snapshots._contents.capture(2)
    capture.sources[:] = [source.view(InterruptingSource) for source in capture.sources]
    snapshots._copier.begin(capture)
    with pytest.raises(end):
        optimizer.step()
    gate.set()
    snapshots.wait()
    assert snapshots.counts.failed == 1 and f"to its end: {end.__name__}" in caplog.text
    assert snapshots.restore() == 1
    snapshots.snapshot(3)
    assert snapshots.restore() == 3
    snapshots.close()


def test_a_forked_child_leaves_its_parents_snapshots_alone(place: Path) -> None:
    """A child may step and end, even while the parent's copy is in progress."""
    script = Script(place)
    script.run(1, 2)
    script.snapshots.wait()
    gate, slot = threading.Event(), script.snapshots._arena.acquire_slot
    script.snapshots._copier.open_slot = lambda size: (gate.wait(60), slot(size))[1]
    script.snapshots.snapshot(3)
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            script.optimizer.step()
            script.snapshots.wait()
            with pytest.raises(SnapshotError, match="make a new Snapshotter here"):
                script.snapshots.snapshot(4)
            script.snapshots.remove()
            script.snapshots.close()
            os._exit(0)
        os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    gate.set()
    script.run(4, 5)
    assert script.snapshots.restore() == 5
    script.leave()


def test_a_closed_snapshotter_rejects_calls(place: Path) -> None:
    script = Script(place)
    script.run(1, 1)
    script.leave()
    for use in (lambda: script.snapshots.snapshot(2), script.snapshots.restore):
        with pytest.raises(SnapshotError, match="is closed: make a new one"):
            use()
    with pytest.raises(SnapshotError, match="is closed"):
        script.snapshots.register("more", {"epoch": 1})
    script.step()
    script.snapshots.wait()
    again = Script(place)
    assert again.snapshots.restore() == 1
    again.snapshots.remove()


# --- damage and strangers ------------------------------------------------------------------------


def two_complete(place: Path) -> Script:
    """Return a script whose steps 3 and 4 are complete in two slots."""
    script = Script(place)
    script.run(1, 3)
    script.snapshots.wait()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(script.snapshots._arena.arena.__class__, "release", lambda self, steps: None)
        script.run(4, 4)
        script.snapshots.wait()
    return script


@pytest.mark.parametrize("part", ["rank-0/own-00000", "rank-0/header"])
def test_a_flipped_bit_is_noticed_and_the_older_one_taken(
    place: Path, part: str, caplog: pytest.LogCaptureFixture
) -> None:
    script = two_complete(place)
    newest = script.snapshots._arena.arena.snapshots[0]
    script.leave()
    assert newest.step == 4
    corrupt_byte(slot_file(place, newest.slot), newest.part(part).offset + 77)
    again = Script(place, seed=8)
    with caplog.at_level(logging.WARNING):
        assert again.snapshots.restore() == 3
    assert "the snapshot of step 4 is skipped" in caplog.text and "corrupt" in caplog.text
    assert again.progress["samples"] == 3 * 16
    again.run(4, 5)
    again.leave()


@pytest.mark.parametrize("part", ["rank-0/own-00000", "rank-0/header"])
def test_corrupt_bytes_of_another_rank_are_named(place: Path, part: str) -> None:
    """After the number of ranks has changed, a rank reads bytes from the directories of the former ranks."""
    script = two_complete(place)
    newest = script.snapshots._arena.arena.snapshots[0]
    script.leave()
    corrupt_byte(slot_file(place, newest.slot), newest.part(part).offset)
    layout = rank_layout_of(newest)
    assert layout is not None
    held = HeldRankSnapshot(address="", generation=newest.generation, step=newest.step, layout=layout)
    (found,), _ = find_restorable([held], 1)
    again = Script(place, seed=8)
    assert again.snapshots._find_bytes(found, None, 0) == f"corrupt parts: {part}"
    assert again.snapshots._blocked_by == ""  # An older one may be taken.
    again.leave()


def test_a_manifest_that_was_cut_short_is_noticed(place: Path, caplog: pytest.LogCaptureFixture) -> None:
    script = two_complete(place)
    script.leave()
    manifest = place / "job" / "rank-0" / "step-000000000004.json"
    manifest.write_bytes(manifest.read_bytes()[:-20])
    again = Script(place)
    with caplog.at_level(logging.WARNING):
        assert again.snapshots.restore() == 3
    assert "truncated" in caplog.text
    again.leave()


def test_a_snapshot_in_a_newer_versions_format_is_named_and_kept_until_it_is_to_be_replaced(
    place: Path,
) -> None:
    script = two_complete(place)
    script.leave()
    for path in (place / "job" / "rank-0").glob("step-*.json"):
        record = msgspec.json.decode(checked_body(path.read_bytes(), ""))
        path.write_bytes(with_digest(msgspec.json.encode(record | {"format": FORMAT + 1, "more": []})))
    before = {path.name: path.read_bytes() for path in (place / "job" / "rank-0").iterdir()}
    for _ in range(2):
        again = Script(place)
        with pytest.raises(SnapshotError, match=r"call restore\(\) first"):
            again.snapshots.snapshot(5)
        with pytest.raises(SnapshotError, match=r"step-000000000003.json is of a newer version of ftd"):
            again.snapshots.restore()
        with pytest.raises(SnapshotError, match="would be lost"):
            again.snapshots.snapshot(5)
        again.leave()
    assert {path.name: path.read_bytes() for path in (place / "job" / "rank-0").iterdir()} == before
    again = Script(place)
    assert again.snapshots.restore(missing="fresh") is None
    again.run(1, 1)
    again.leave()
    assert [path.name for path in (place / "job" / "rank-0").glob("step-*")] == ["step-000000000001.json"]


def test_corrupt_snapshots_alone_are_no_first_start(place: Path) -> None:
    """A restart must not start over in silence, not even a second one."""
    script = two_complete(place)
    script.leave()
    for manifest in (place / "job" / "rank-0").glob("step-*.json"):
        manifest.write_bytes(manifest.read_bytes()[:-20])
    for _ in range(2):
        again = Script(place)
        with pytest.raises(SnapshotError, match=r"none of them can be restored: .* is truncated"):
            again.snapshots.restore()
        again.leave()
    again = Script(place)
    with pytest.raises(SnapshotError, match="missing must be 'raise' or 'fresh', not 'none'"):
        again.snapshots.restore(missing="none")  # type: ignore[arg-type]
    assert again.snapshots.restore(missing="fresh") is None
    again.run(1, 1)
    again.leave()


def test_another_models_snapshot_is_rejected_and_replaced_only_on_request(
    place: Path, caplog: pytest.LogCaptureFixture
) -> None:
    script = Script(place)
    script.run(1, 2)
    script.leave()
    other = Script(place, width=32)
    weight = other.model[0].weight.detach().clone()
    why = "0.weight is float32 [64, 8] in the snapshot and float32 [32, 8] here"
    with pytest.raises(SnapshotError, match=re.escape(why)):
        other.snapshots.restore()
    assert torch.equal(other.model[0].weight, weight)
    other.step()
    with pytest.raises(SnapshotError, match="was not restored and would be lost"):
        other.snapshots.snapshot(1)
    other.leave()
    again = Script(place, seed=2)
    assert again.snapshots.restore() == 2
    again.leave()
    other = Script(place, width=32)
    with caplog.at_level(logging.WARNING):
        assert other.snapshots.restore(missing="fresh") is None
    assert f"training starts over, and its first snapshot replaces what is there: step 2: model: {why}" in (
        caplog.text
    )
    other.run(1, 1)
    other.leave()
    again = Script(place, width=32)
    assert again.snapshots.restore() == 1
    again.leave()


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda m: (m[:3], torch.optim.AdamW), "model: 3.bias, 3.weight: only there"),
        (lambda m: (nn.Sequential(*m, nn.Linear(1, 1)), torch.optim.AdamW), "4.bias, 4.weight: only here"),
        (
            lambda m: (m, torch.optim.SGD),
            "optimizer: it belongs to another optimizer: its groups have amsgrad, ",
        ),
    ],
)
def test_changes_between_two_runs_are_named(
    place: Path, change: Callable[[nn.Sequential], tuple[nn.Module, type]], why: str
) -> None:
    script = Script(place)
    script.snapshots.remove()
    first = Snapshotter("job", directory=place, optimizer=script.optimizer, model=script.model)
    script.step()
    first.snapshot(1)
    first.close()
    model, kind = change(script.model)
    optimizer = kind(model.parameters(), lr=1.0)
    again = Snapshotter("job", directory=place, optimizer=optimizer, model=model)
    with pytest.raises(SnapshotError, match=re.escape(why)):
        again.restore()
    assert optimizer.param_groups[0]["lr"] == 1.0
    again.close()


def test_groups_and_shapes_of_an_optimizer_are_named(place: Path) -> None:
    """Parameters are named by number if no module that knows their names was registered."""

    def kept(*groups: list[int]) -> Snapshotter:
        made = [{"params": [nn.Parameter(torch.ones(size)) for size in sizes]} for sizes in groups]
        return Snapshotter("job", directory=place, optimizer=torch.optim.SGD(made, lr=0.1))

    first = kept([2, 3], [4])
    first.snapshot(1)
    first.close()
    for groups, why in (
        ([[2, 3, 4]], "it has 2 parameter groups in the snapshot and 1 here"),
        ([[2, 3], [4, 5]], "group 1 has 1 parameters in the snapshot and 2 here"),
        ([[2, 7], [4]], r"parameter 1 of group 0 is [3] in the snapshot and [7] here"),
    ):
        again = kept(*groups)
        with pytest.raises(SnapshotError, match=re.escape(why)):
            again.restore()
        again.close()


@pytest.mark.parametrize(
    ("later", "message"),
    [
        ({"format": 99, "entries": [{"dtype": "float32", "pages": 7}]}, "it has format 99, and this version reads"),
        ({"format": 99, "entries": [], "objects": msgspec.msgpack.Ext(77, b"")}, "cannot read its header: an unk"),
    ],
)  # fmt: skip
def test_a_later_versions_snapshot_is_named_and_kept(
    place: Path, later: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def encode_later(content: Any) -> bytes:
        return encode(content | later if isinstance(content, dict) else content)

    with monkeypatch.context() as patched:
        patched.setattr(runtime.script.contents, "encode", encode_later)
        script = Script(place)
        script.run(1, 1)
        script.leave()
    again = Script(place)
    with pytest.raises(SnapshotError, match=message):
        again.snapshots.restore()
    with pytest.raises(SnapshotError, match="would be lost"):
        again.snapshots.snapshot(2)
    again.leave()


def test_another_jobs_snapshot_is_rejected(place: Path) -> None:
    script = Script(place, name="theirs")
    script.run(1, 2)
    script.leave()
    shutil.move(place / "theirs", place / "job")
    again = Script(place)
    with pytest.raises(SnapshotError, match="it belongs to job 'theirs'"):
        again.snapshots.restore()
    again.leave()


def test_other_things_are_registered_now(place: Path) -> None:
    script = Script(place)
    script.run(1, 2)
    script.leave()
    snapshots = Snapshotter("job", directory=place, model=script.model)
    with pytest.raises(SnapshotError, match="it holds model, optimizer, progress, scheduler, and model are"):
        snapshots.restore()
    snapshots.close()


def test_an_earlier_runs_state_is_not_overwritten_before_it_is_restored_or_removed(place: Path) -> None:
    script = Script(place)
    script.run(1, 2)
    script.leave()
    again = Script(place)
    with pytest.raises(SnapshotError, match=r"step 2: call restore\(\) first, or remove\(\)"):
        again.snapshots.snapshot(1)
    again.snapshots.remove()
    assert not (place / "job").exists()
    second = Script(place)
    second.run(1, 1)
    second.leave()


# --- bad use -------------------------------------------------------------------------------------


def test_steps_must_grow(place: Path) -> None:
    script = Script(place)
    script.run(1, 5)
    for step in (5, 4):
        with pytest.raises(SnapshotError, match=f"step {step} after step 5: steps must increase"):
            script.snapshots.snapshot(step)
    script.leave()
    again = Script(place)
    assert again.snapshots.restore() == 5
    with pytest.raises(SnapshotError, match="step 3 after step 5"):
        again.snapshots.snapshot(3)
    again.snapshots.snapshot(6)
    again.leave()


@pytest.mark.parametrize("name", ["", ".", "..", "../up", "a/b", "/etc", "a\0b", "-x", "x" * 101, "é", 3])
def test_a_name_that_is_a_path_is_rejected(place: Path, name: Any) -> None:
    with pytest.raises(SnapshotError, match="cannot be the name of a job"):
        Snapshotter(name, directory=place)
    assert not place.exists()


def test_a_name_is_registered_once(place: Path) -> None:
    snapshots = Snapshotter("job", directory=place, state={"a": 1})
    with pytest.raises(SnapshotError, match="'state' is registered already"):
        snapshots.register("state", {"b": 2})
    snapshots.close()


def test_a_job_that_starts_while_another_one_is_removed_waits_for_it_and_has_its_own_lock(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = Snapshotter("job", directory=place, state={"number": 1})
    directory = place / "job" / "rank-0"
    unlock = runtime.script.rank_arena._unlock
    left: list[bool] = []

    def unlock_and_look(*lock: Any) -> None:
        left.append(directory.exists())
        unlock(*lock)

    with monkeypatch.context() as patched:
        patched.setattr(runtime.script.rank_arena, "_unlock", unlock_and_look)
        first.remove()
    assert left == [False], "nothing disappears after the lock was released"

    take = fcntl.lockf
    taken: list[Any] = []

    def take_when_removed(file: Any, operation: int) -> None:
        """Take the lock that a process releases which has just removed its directory."""
        if not taken:
            shutil.rmtree(directory)
        taken.append(file)
        take(file, operation)

    with monkeypatch.context() as patched:
        patched.setattr(fcntl, "lockf", take_when_removed)
        second = Snapshotter("job", directory=place, state={"number": 2})
    assert len(taken) == 2 and (directory / "lock").exists()
    second.snapshot(1)
    second.close()
    third = Snapshotter("job", directory=place, state={"number": 3})
    assert third.restore() == 1
    third.remove()
    assert not directory.exists()


def test_a_job_is_open_once(place: Path) -> None:
    snapshots = Snapshotter("job", directory=place)
    with pytest.raises(SnapshotError, match="in use by another Snapshotter of this process"):
        Snapshotter("job", directory=place)
    child = os.fork()
    if child == 0:
        runtime.script.rank_arena._open_arenas.clear()
        with contextlib.suppress(SnapshotError):
            Snapshotter("job", directory=place)
            os._exit(1)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    snapshots.close()


CYCLE: dict[str, Any] = {"a": [1]}
CYCLE["a"].append(CYCLE)


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"a": [1, {"b": object()}]}, r"state\['a'\]\[1\]\['b'\] is a object"),
        ({"f": lambda: 1}, "is a function"),
        ({"s": {1, 2}}, "is a set"),
        ({"x": np.array([object()])}, "is a ndarray"),
        ({"sparse": torch.eye(2).to_sparse()}, "only dense tensors"),
        ({"meta": torch.empty(2, device="meta")}, "only dense tensors"),
        ({"nested": torch.nested.nested_tensor([torch.ones(2)])}, "is a nested torch.strided tensor on cpu"),
        (5, r"register .* \{'epoch': 3\}"),
        (torch.optim.SGD, "state is a type: register a module, an optimizer"),
        (CYCLE, "state contains itself, or is nested too deeply"),
    ],
)
def test_values_that_cannot_be_saved_are_named_at_registration(place: Path, state: Any, message: str) -> None:
    snapshots = Snapshotter("job", directory=place)
    with pytest.raises(SnapshotError, match=message):
        snapshots.register("state", state)
    snapshots.register("state", {"fine": 1})  # the name is free
    snapshots.close()


def test_a_lazy_module_is_to_be_called_first(place: Path) -> None:
    snapshots = Snapshotter("job", directory=place)
    with pytest.raises(SnapshotError, match=r"lazy\['weight'\] has no shape yet: call the lazy module once"):
        snapshots.register("lazy", nn.LazyLinear(2))
    snapshots.close()
    gc.collect()  # No code can read the shape of such a parameter.


def test_a_value_that_becomes_unsavable_costs_a_snapshot_and_not_the_run(
    place: Path, caplog: pytest.LogCaptureFixture
) -> None:
    script = Script(place)
    script.run(1, 2)
    script.progress["odd"] = object()
    with caplog.at_level(logging.WARNING):
        script.run(3, 3)
    assert "no snapshot of step 3, training goes on: progress['odd'] is a object" in caplog.text
    del script.progress["odd"]
    script.run(4, 4)
    script.snapshots.wait()
    assert script.snapshots.counts.completed_step == 4 and script.snapshots.counts.failed == 1
    script.leave()


def test_a_state_dict_that_raises_costs_a_snapshot_and_not_the_run(
    place: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Sampler:
        closed = False

        def state_dict(self) -> dict[str, int]:
            if self.closed:
                raise KeyError("position")
            return {"position": 1}

        def load_state_dict(self, state: dict[str, int]) -> None: ...

    sampler = Sampler()
    script = Script(place)
    script.snapshots.register("sampler", sampler)
    script.run(1, 2)
    sampler.closed = True
    with caplog.at_level(logging.WARNING):
        script.run(3, 3)
    assert "no snapshot of step 3, training goes on: KeyError: 'position'" in caplog.text
    sampler.closed = False
    script.run(4, 4)
    script.snapshots.wait()
    assert script.snapshots.counts.completed_step == 4 and script.snapshots.counts.failed == 1
    script.leave()


def test_a_rank_of_several_must_be_able_to_ask_the_others(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    snapshots = Snapshotter("job", directory=place)
    with pytest.raises(SnapshotError, match=r"rank 1 of 2.* after init_process_group"):
        snapshots.restore()
    snapshots.close()


def test_the_default_place_is_ones_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(runtime.script.rank_arena, "SHARED_MEMORY", tmp_path)
    (tmp_path / f"ftd-{os.getuid()}").symlink_to("/")
    with pytest.raises(SnapshotError, match="pass directory="):
        Snapshotter("job")
    monkeypatch.setattr(runtime.script.rank_arena, "SHARED_MEMORY", tmp_path / "none")
    with pytest.raises(SnapshotError, match="there is no"):
        Snapshotter("job")


def test_a_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    occupied = tmp_path / "a-file"
    occupied.write_text("")
    with pytest.raises(SnapshotError, match="Not a directory: pass directory="):
        Snapshotter("job", directory=occupied, state={})
