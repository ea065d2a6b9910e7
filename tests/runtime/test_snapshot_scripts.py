"""The example scripts as users run them, killed with SIGKILL: the losses are those of unkilled ones."""

import contextlib
import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from runtime.snapshot_place import default_directory

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


def script(file: str, name: str, steps: int, pause_s: float, *, ranks: int = 0) -> subprocess.Popen[str]:
    command = [sys.executable]
    if ranks:
        command += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        command += ["--max-restarts", "3", "--monitor-interval", "0.1"]
    command += [str(SCRIPTS / file), "--name", name, "--steps", str(steps), "--pause-s", str(pause_s)]
    return subprocess.Popen(
        command, cwd=ROOT, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def read_until(process: subprocess.Popen[str], pattern: str) -> list[str]:
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if re.search(pattern, line):
            return lines
    raise AssertionError("".join(lines))


def finished(process: subprocess.Popen[str]) -> list[str]:
    out, _ = process.communicate(timeout=100)
    assert process.returncode == 0, out
    return out.splitlines(keepends=True)


def losses(lines: list[str]) -> dict[tuple[str, ...], str]:
    """(rank and) step → loss; each step once, or with the same loss."""
    found: dict[tuple[str, ...], str] = {}
    for *key, loss in (m.split() for m in re.findall(r"(?:\d+ )?\d+ \d+\.\d{9}", "".join(lines))):
        assert found.setdefault(tuple(key), loss) == loss, key
    return found


def killed_and_whole(file: str, name: str) -> tuple[list[str], dict[tuple[str, ...], str]]:
    """What a run prints that is killed, and the losses of one that is not."""
    lines: list[str] = []
    process = script(file, name, 15, 0.05)
    lines += read_until(process, "^6 ")
    process.send_signal(signal.SIGKILL)
    lines += process.communicate()[0].splitlines(keepends=True)
    lines += finished(script(file, name, 15, 0))
    return lines, losses(finished(script(file, name, 15, 0)))


def test_a_plain_loop_that_is_killed_goes_on_with_the_same_losses(name: str) -> None:
    lines, whole = killed_and_whole("plain_loop.py", name)
    resumed = [int(m) for m in re.findall(r"goes on behind step (\d+)", "".join(lines))]
    # The step in whose copy it was killed may be lost, and no other.
    assert len(resumed) == 1 and 5 <= resumed[0] <= 9
    assert losses(lines) == whole and len(whole) == 15
    assert not (default_directory() / name).exists()


def test_a_hugging_face_trainer_that_is_killed_goes_on_with_the_same_losses(name: str) -> None:
    if importlib.util.find_spec("transformers") is None:
        pytest.skip("transformers is not installed: pip install 'ftd[hf]'")
    lines, whole = killed_and_whole("hf_trainer.py", name)
    resumed = [int(m) for m in re.findall(r"goes on behind step (\d+)", "".join(lines))]
    assert len(resumed) == 2 and resumed[0] == 0 and resumed[1] >= 5
    found, first = losses(lines), resumed[1] + 1
    # What the Trainer logs first is divided by the number of steps since step 0.
    assert float(found.pop((str(first),))) * first == pytest.approx(float(whole.pop((str(first),))), rel=1e-6)
    assert found == whole and len(whole) == 14


def test_torchrun_restarts_ddp_and_all_ranks_go_on_behind_the_same_step(name: str) -> None:
    process = script("ddp.py", name, 30, 0.05, ranks=2)
    try:
        lines = read_until(process, "^1 8 ")
        (pid,) = re.findall(r"# rank 1 is process (\d+)", "".join(lines))
        os.kill(int(pid), signal.SIGKILL)
        lines += finished(process)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
    resumed = [int(step) for step in re.findall(r"goes on behind step (\d+)", "".join(lines))]
    assert len(resumed) == 4 and resumed[:2] == [0, 0]
    assert resumed[2] == resumed[3] >= 7
    whole = losses(finished(script("ddp.py", name, 30, 0, ranks=2)))
    assert losses(lines) == whole and len(whole) == 60


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


def test_killed_at_any_moment_the_last_complete_snapshot_is_there_and_right(tmp_path: Path) -> None:
    """Every element must be the step's number: bytes of two steps in one snapshot would show."""
    import torch

    from ftd import Snapshotter

    place = Path(f"/dev/shm/ftd-test-kill-{os.getpid()}")
    model = torch.nn.Linear(1024, 2048, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
    try:
        for trial in range(3):
            victim = subprocess.Popen(
                [sys.executable, "-c", VICTIM, str(place)],
                cwd=ROOT, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True,
            )  # fmt: skip
            lines = read_until(victim, r"^\d+ \d+")
            time.sleep(0.05 + 0.0137 * trial)
            victim.kill()
            lines += victim.communicate()[0].splitlines()
            told = [line.split() for line in lines if re.fullmatch(r"\d+ \d+\s*", line)]
            snapshots = Snapshotter("job", directory=place, model=model, optimizer=optimizer)
            step = snapshots.restore()
            assert step is not None and step >= int(told[-1][1])
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
        print(f"step {number} {total:.12f} behind {start}", flush=True)
dist.barrier()
snapshots.close()
dist.destroy_process_group()
"""


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[tuple[Path, Path]]:
    place = Path(f"/dev/shm/ftd-test-ranks-{os.getpid()}")
    (tmp_path / "ranks.py").write_text(RANKS)
    yield tmp_path / "ranks.py", place
    shutil.rmtree(place, ignore_errors=True)


def two_ranks(file: Path, mode: str, place: Path) -> str:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, str(file), mode, str(place)],
        cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, check=False, timeout=100,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_all_ranks_restore_the_newest_step_that_each_of_them_has(ranks: tuple[Path, Path]) -> None:
    file, place = ranks
    two_ranks(file, "lagging", place)
    held = {p.parent.name: p.name for p in sorted(place.glob("job/rank-*/step-*.json"))}
    assert held["rank-0"].endswith("3.json") and held["rank-1"].endswith("2.json")
    assert len(list(place.glob("job/rank-0/step-*.json"))) == 2  # step 2 is kept for rank 1
    again = two_ranks(file, "all", place)
    assert "step 3 " in again and "behind 2" in again
    assert all(len(list(p.glob("step-*5.json"))) == 1 for p in place.glob("job/rank-*"))


def test_fsdp2_shards_come_back(ranks: tuple[Path, Path]) -> None:
    file, place = ranks
    first = two_ranks(file, "sharded", place)
    second = two_ranks(file, "sharded-again", place)  # other weights, until they are restored
    assert "behind 3" in second
    totals = [(int(a), float(b)) for a, b in re.findall(r"step (\d+) (\S+)", first + second)]
    assert totals == [(n, pytest.approx(total, rel=1e-6)) for n, total in enumerate(whole_model(6), 1)]


def whole_model(steps: int) -> list[float]:
    """The same training without shards."""
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
