"""Tests of the example scripts as users run them, killed with SIGKILL: the losses are those of uninterrupted
runs.

Only one test uses torchrun itself; the other processes are forked to keep the tests quick.
"""

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from runtime.script.rank_arena import default_directory
from tests.helpers.forks import Forked, Zygote

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "examples" / "scripts"
ENVIRONMENT = os.environ | {
    "PYTHONPATH": str(ROOT),
    "OMP_NUM_THREADS": "1",
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
}


@pytest.fixture
def name() -> Iterator[str]:
    job = f"test-{os.getpid()}"
    yield job
    shutil.rmtree(default_directory() / job, ignore_errors=True)


LIBRARIES = """
import importlib.util, sys
import accelerate, pytorch_lightning, transformers, transformers.trainer

# The package's own module imports Triton's kernels, which only an environment with CUDA has.
sys.modules["torchtitan"] = importlib.util.module_from_spec(importlib.util.find_spec("torchtitan"))
import torchtitan.components.checkpoint
"""


@pytest.fixture(scope="module")
def zygote() -> Iterator[Zygote]:
    made = Zygote(LIBRARIES)
    yield made
    made.close()


def code_of(file: str) -> str:
    return f"import runpy; runpy.run_path({str(SCRIPTS / file)!r}, run_name='__main__')"


def started(zygote: Zygote, code: str, folder: Path, *arguments: object, ranks: int = 0) -> list[Forked]:
    """Start one process, or several that find each other like torchrun's workers."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    given = [str(argument) for argument in arguments]
    if not ranks:
        return [zygote.start(code, folder / f"out-{port}", *given)]
    where = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return [
        zygote.start(code, folder / f"out-{port}-{rank}", *given, RANK=str(rank), **where)
        for rank in range(ranks)
    ]


def finished(processes: list[Forked]) -> list[str]:
    codes = [process.wait() for process in processes]
    text = "".join(process.text for process in processes)
    assert not any(codes), text
    return text.splitlines(keepends=True)


def killed_when(process: Forked, pattern: str, after_s: float = 0.0) -> list[str]:
    """Kill the process when it prints the pattern, and return its output until then."""
    while not re.search(pattern, process.text, re.MULTILINE):
        assert process.alive, process.text
        time.sleep(0.002)
    time.sleep(after_s)
    process.kill()
    return process.text.splitlines(keepends=True)


def read_until(said: Path, process: subprocess.Popen[bytes], pattern: str) -> str:
    while not re.search(pattern, said.read_text(), re.MULTILINE):
        assert process.poll() is None, said.read_text()
        time.sleep(0.005)
    return said.read_text()


def losses(lines: list[str]) -> dict[tuple[str, ...], str]:
    """Return the loss by (rank and) step; a step that is printed twice must have the same loss."""
    found: dict[tuple[str, ...], str] = {}
    for *key, loss in (m.split() for m in re.findall(r"(?:\d+ )?\d+ \d+\.\d{9}", "".join(lines))):
        assert found.setdefault(tuple(key), loss) == loss, key
    return found


def killed_and_whole(
    zygote: Zygote, file: str, name: str, folder: Path
) -> tuple[list[str], dict[tuple[str, ...], str]]:
    """Return the output of a killed and resumed run, and the losses of an uninterrupted one."""

    def run(pause_s: float) -> list[Forked]:
        return started(zygote, code_of(file), folder, "--name", name, "--steps", 15, "--pause-s", pause_s)

    lines = killed_when(run(0.05)[0], "^6 ")
    lines += finished(run(0))
    return lines, losses(finished(run(0)))


def test_a_killed_plain_loop_continues_with_the_same_losses(
    zygote: Zygote, name: str, tmp_path: Path
) -> None:
    lines, whole = killed_and_whole(zygote, "plain_loop.py", name, tmp_path)
    resumed = [int(m) for m in re.findall(r"resumes after step (\d+)", "".join(lines))]
    # Only the step in whose copy it was killed may be lost.
    assert len(resumed) == 1 and 5 <= resumed[0] <= 9
    assert losses(lines) == whole and len(whole) == 15
    assert not (default_directory() / name).exists()


def killed_at_any_step_and_whole(
    zygote: Zygote, code: str, name: str, folder: Path, *length: object
) -> tuple[dict[tuple[str, ...], str], dict[tuple[str, ...], str]]:
    """Return the losses of a run that was killed and resumed, and those of an uninterrupted one.

    The run is killed in its second epoch, and the resumed one does not begin from the first step.
    """

    def run(pause_s: float) -> list[Forked]:
        return started(zygote, code, folder, "--name", name, *length, "--pause-s", pause_s)

    lines = killed_when(run(0.05)[0], "^8 ")
    resumed = finished(run(0))
    assert min(int(step) for (step,) in losses(resumed)) >= 7
    assert not (default_directory() / name).exists()
    return losses(lines + resumed), losses(finished(run(0)))


@pytest.mark.parametrize(
    ("file", "length"),
    [
        ("hf_trainer.py", ("--steps", 13)),
        ("lightning_trainer.py", ("--steps", 13)),
        ("accelerate_loop.py", ("--epochs", 3)),
    ],
)
def test_a_killed_script_that_one_line_protects_continues_with_the_same_losses(
    zygote: Zygote, name: str, tmp_path: Path, file: str, length: tuple[object, ...]
) -> None:
    """Epochs have 5 steps, so the order of samples and the position within an epoch must be restored."""
    found, whole = killed_at_any_step_and_whole(zygote, code_of(file), name, tmp_path, *length)
    assert found == whole and len(whole) in (13, 15)


def test_ddp_over_a_protected_loader_continues_with_the_same_losses(
    zygote: Zygote, name: str, tmp_path: Path
) -> None:
    def run(pause_s: float) -> list[Forked]:
        arguments = ("--name", name, "--epochs", 3, "--pause-s", pause_s)
        return started(zygote, code_of("ddp_loader.py"), tmp_path, *arguments, ranks=2)

    ranks = run(0.05)
    lines = killed_when(ranks[1], "^1 8 ")
    ranks[0].kill()
    lines += ranks[0].text.splitlines(keepends=True)
    resumed = finished(run(0))
    assert min(int(step) for _, step in losses(resumed)) >= 7
    whole = losses(finished(run(0)))
    assert losses(lines + resumed) == whole and len(whole) == 30


def test_ddp_over_a_protected_loader_skips_the_used_samples_on_another_number_of_ranks(
    zygote: Zygote, name: str, tmp_path: Path
) -> None:
    """An epoch has 5 batches of each of two ranks, or 10 of one."""
    arguments = ("--name", name, "--epochs", 3, "--pause-s")
    ranks = started(zygote, code_of("ddp_loader.py"), tmp_path, *arguments, 0.05, ranks=2)
    killed_when(ranks[1], "^1 8 ")
    ranks[0].kill()
    alone = losses(finished(started(zygote, code_of("ddp_loader.py"), tmp_path, *arguments, 0, ranks=1)))
    restored = min(int(step) for _, step in alone) - 1
    assert 7 <= restored <= 9
    assert len(alone) == (10 - 2 * (restored - 5)) + 10


TITAN = """
import sys, time, torch, torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import IterableDataset
from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.dataloader import ParallelAwareDataloader
from torchtitan.components.lr_scheduler import LRSchedulersContainer
from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.config import Checkpoint
from ftd import protect

given = dict(zip(sys.argv[1::2], sys.argv[2::2]))

class Points(IterableDataset):
    number = 0
    def __iter__(self):
        while True:
            self.number += 1
            yield torch.randn(8, generator=torch.Generator().manual_seed(2 * self.number + dist.get_rank()))
    def state_dict(self):
        return {"number": self.number}
    def load_state_dict(self, state):
        self.number = state["number"]

class Trainer:
    # The parts, and the calls of the checkpointer, are those of torchtitan.train.Trainer.
    def __init__(self):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(8, 10), nn.Tanh(), nn.Linear(10, 1))
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
        self.model, self.step = model, 0
        self.dataloader = ParallelAwareDataloader(Points(), dist.get_rank(), 2, batch_size=4)
        self.optimizers = OptimizersContainer([model], torch.optim.AdamW, {"lr": 1e-2})
        self.lr_schedulers = LRSchedulersContainer(self.optimizers, lambda step: 0.9**step)
        self.checkpointer = CheckpointManager(
            self.dataloader, [model], self.optimizers, self.lr_schedulers, {"train_state": self},
            Checkpoint(enable=True, interval=100, folder=given["--folder"]), None,
        )
    def state_dict(self):
        return {"step": self.step}
    def load_state_dict(self, state):
        self.step = state["step"]
    def train(self, steps):
        self.checkpointer.load(step=-1)
        batches = iter(self.dataloader)
        while self.step < steps:
            self.step += 1
            points = next(batches)
            self.optimizers.zero_grad()
            loss = (self.model(points)[:, 0] - points.sin().sum(dim=1)).square().mean()
            loss.backward()
            self.optimizers.step()
            self.lr_schedulers.step()
            print(f"{dist.get_rank()} {self.step} {loss.item():.9f}", flush=True)
            self.checkpointer.save(self.step, last_step=self.step == steps)
            time.sleep(float(given["--pause-s"]))

dist.init_process_group("gloo")
trainer = Trainer()
protect(trainer.checkpointer, given["--name"])
trainer.train(12)
trainer.checkpointer.close()
dist.destroy_process_group()
"""
"""A trainer of torchtitan's components on processors: torchtitan's own needs an accelerator."""


def test_torchtitan_s_checkpoint_manager_restores_fsdp2_from_memory(
    zygote: Zygote, name: str, tmp_path: Path
) -> None:
    def run(folder: str, pause_s: float) -> list[Forked]:
        arguments = ("--name", name, "--folder", tmp_path / folder, "--pause-s", pause_s)
        return started(zygote, TITAN, tmp_path, *arguments, ranks=2)

    ranks = run("killed", 0.05)
    lines = killed_when(ranks[1], "^1 8 ")
    ranks[0].kill()
    lines += ranks[0].text.splitlines(keepends=True)
    assert not list((tmp_path / "killed").glob("step-*"))
    resumed = finished(run("killed", 0))
    assert min(int(step) for _, step in losses(resumed)) >= 7
    assert (tmp_path / "killed" / "step-12" / ".metadata").exists()
    whole = losses(finished(run("whole", 0)))
    assert losses(lines + resumed) == whole and len(whole) == 24


def test_torchrun_restarts_ddp_and_all_ranks_continue_after_the_same_step(
    zygote: Zygote, name: str, tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["--max-restarts", "3", "--monitor-interval", "0.1", str(SCRIPTS / "ddp.py")]
    said = tmp_path / "said"
    with said.open("wb") as file:
        process = subprocess.Popen(
            [*command, "--name", name, "--steps", "20", "--pause-s", "0.05"],
            cwd=ROOT, env=ENVIRONMENT, stdout=file, stderr=subprocess.STDOUT,
        )  # fmt: skip
    try:
        # Two ranks print, so their lines may be mixed.
        (pid,) = re.findall(
            r"# rank 1 is process (\d+)", read_until(said, process, r"(?:^|\.\d{9})1 8 \d+\.\d{9}")
        )
        os.kill(int(pid), signal.SIGKILL)
        assert process.wait(240) == 0, said.read_text()
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
    lines = said.read_text().splitlines(keepends=True)
    resumed = [int(step) for step in re.findall(r"resumes after step (\d+)", said.read_text())]
    assert len(resumed) == 4 and resumed[:2] == [0, 0]
    assert resumed[2] == resumed[3] >= 7
    arguments = ("--name", name, "--steps", 20, "--pause-s", 0)
    whole = losses(finished(started(zygote, code_of("ddp.py"), tmp_path, *arguments, ranks=2)))
    assert losses(lines) == whole and len(whole) == 40


VICTIM = """
import sys, torch
from pathlib import Path
from ftd import Snapshotter
model = torch.nn.Linear(1024, 2048, bias=False)
optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
with torch.no_grad():
    model.weight.zero_()
snapshots = Snapshotter("job", directory=Path(sys.argv[1]), model=model, optimizer=optimizer)
step = snapshots.restore() or 0
for number in range(step + 1, 100_000):
    with snapshots.changing(), torch.no_grad():
        model.weight.fill_(number)
    snapshots.snapshot(number)
    print(number, snapshots.counts.completed_step, flush=True)
"""


def test_a_kill_at_any_moment_leaves_the_last_complete_snapshot_intact(
    zygote: Zygote, tmp_path: Path
) -> None:
    """Every element must be the step's number, so that bytes of two steps in one snapshot would be detected."""
    import torch

    from ftd import Snapshotter

    place = Path(f"/dev/shm/ftd-test-kill-{os.getpid()}")
    model = torch.nn.Linear(1024, 2048, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
    try:
        for trial in range(3):
            (victim,) = started(zygote, VICTIM, tmp_path, place)
            lines = killed_when(victim, r"^\d+ \d+\n", 0.05 + 0.0137 * trial)
            printed = [line.split() for line in lines if re.fullmatch(r"\d+ \d+\n", line)]
            snapshots = Snapshotter("job", directory=place, model=model, optimizer=optimizer)
            step = snapshots.restore()
            assert step is not None and step >= int(printed[-1][1])
            assert bool((model.weight == step).all())
            snapshots.close()
    finally:
        shutil.rmtree(place, ignore_errors=True)


RANKS = """
import os, sys, torch, torch.distributed as dist
from pathlib import Path
from ftd import Snapshotter
mode, place = sys.argv[1], Path(sys.argv[2])
dist.init_process_group("gloo")
rank = dist.get_rank()
if mode.startswith("sharded"):
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.device_mesh import init_device_mesh
    torch.manual_seed(1 if mode == "sharded" else 2)
    model = torch.nn.Sequential(torch.nn.Linear(6, 10), torch.nn.Tanh(), torch.nn.Linear(10, 3))
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
else:
    model = torch.nn.Linear(4, 4)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
snapshots = Snapshotter("job", directory=place, model=model, optimizer=optimizer)
start = snapshots.restore() or 0
def step(number):
    torch.manual_seed(number)
    optimizer.zero_grad()
    model(torch.randn(5, 6 if "sharded" in mode else 4)).square().sum().backward()
    optimizer.step()
    whole = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
    return sum(p.detach().double().abs().sum().item() for p in whole)
for number in range(start + 1, start + 4):
    total = step(number)
    if mode != "lagging" or rank == 0 or number < start + 3:
        snapshots.snapshot(number)
        snapshots.wait()
    if rank == 0:
        print(f"step {number} {total:.12f} after {start}", flush=True)
dist.barrier()
snapshots.close()
dist.destroy_process_group()
"""


@pytest.fixture
def place() -> Iterator[Path]:
    path = Path(f"/dev/shm/ftd-test-ranks-{os.getpid()}")
    yield path
    shutil.rmtree(path, ignore_errors=True)


def two_ranks(zygote: Zygote, folder: Path, mode: str, place: Path) -> str:
    return "".join(finished(started(zygote, RANKS, folder, mode, place, ranks=2)))


def test_all_ranks_restore_the_newest_step_that_each_of_them_has(
    zygote: Zygote, tmp_path: Path, place: Path
) -> None:
    two_ranks(zygote, tmp_path, "lagging", place)
    held = {p.parent.name: p.name for p in sorted(place.glob("job/rank-*/step-*.json"))}
    assert held["rank-0"].endswith("3.json") and held["rank-1"].endswith("2.json")
    assert len(list(place.glob("job/rank-0/step-*.json"))) == 2  # step 2 is kept for rank 1
    again = two_ranks(zygote, tmp_path, "all", place)
    assert "step 3 " in again and "after 2" in again
    assert all(len(list(p.glob("step-*5.json"))) == 1 for p in place.glob("job/rank-*"))


def test_fsdp2_shards_come_back(zygote: Zygote, tmp_path: Path, place: Path) -> None:
    first = two_ranks(zygote, tmp_path, "sharded", place)
    second = two_ranks(zygote, tmp_path, "sharded-again", place)  # other weights, until they are restored
    assert "after 3" in second
    totals = [(int(a), float(b)) for a, b in re.findall(r"^step (\d+) (\S+)", first + second, re.M)]
    assert totals == [(n, pytest.approx(total, rel=1e-6)) for n, total in enumerate(whole_model(6), 1)]


def whole_model(steps: int) -> list[float]:
    """Return the losses of the same training without sharding."""
    import torch

    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(6, 10), torch.nn.Tanh(), torch.nn.Linear(10, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    totals = []
    for number in range(1, steps + 1):
        torch.manual_seed(number)
        optimizer.zero_grad()
        model(torch.randn(5, 6)).square().sum().backward()
        optimizer.step()
        totals.append(sum(p.detach().double().abs().sum().item() for p in model.parameters()))
    return totals
