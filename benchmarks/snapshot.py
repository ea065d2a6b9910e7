"""Snapshots of a plain script: how long training stands still, what a kill costs, how quickly it loads.

For a model with Adam's state of 1 GiB and of 4 GiB (1024 × 1024 matrices), in one run and on one thread, as a
core must be left for the copy:

* stall: the time that a call blocks the training thread, when there is a forward pass until the next update
  (*there is time*), and when the update comes at once (*no time*: the call and the wait together); against
  one memcpy of the same bytes, torch.save, DCP save and DCP async_save into /dev/shm;
* iteration time with a snapshot in every iteration against none, in alternating rounds, of a step that takes
  3.5 times as long as the copy (matrix products; the optimizer changes one matrix, so the step is computing);
* start: allocating and mapping the arena, with memory as it is found and right behind a touch of as many
  bytes. A virtual machine's host may take free memory back, and giving it again is its work, not ours;
* load: restore() with its digests, in the process that wrote and in new ones (which map the memory and
  make the optimizer's state), as scripts are started and with copies that pass the caches by
  (docs/snapshotter.md), and by decoding what one of three hosts kept, against torch.load and DCP load, from
  /dev/shm and from a disk whose pages were dropped;
* with ``--peer``, DLRover's in-memory checkpoint of the same state, in an environment that holds
  ``dlrover==0.6.1`` and torch;
* 20 kills at random moments of a process that takes one snapshot after another.

    python -m benchmarks.snapshot [--sizes 1 4] [--disk DIRECTORY] [--peer VENV]
"""

import contextlib
import json
import mmap
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

from benchmarks.common import RESULTS, Limit, Result, Summary, command_line, main
from ftd import Snapshotter
from runtime.filling import Filling, spans_of
from runtime.saved import NOTHING
from runtime.streaming import streaming_environment
from runtime.tensor_image import Image
from storage.codes import make_code
from storage.shards import ShardLayout, fetch_from, make_shard, restore

WIDTH = 1024
GIB = 1024**3
SHM = Path("/dev/shm")
STEP_PER_COPY = 3.5
LOADS = ("torch.load shm", "DCP load shm", "torch.load disk", "DCP load disk")
KILLS = 20
KILLED_WIDTH = 4096
LEAST_FREE_BYTES = 4.5
"""Of memory, for each byte of state: the state, two slots, a copy, and some."""


class Light(torch.optim.Optimizer):
    """Adam's state, and a step that changes one matrix of it."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__(parameters, {})
        for p in parameters:
            self.state[p] = {"exp_avg": torch.ones_like(p), "exp_avg_sq": torch.ones_like(p)}

    def step(self, closure: Any = None) -> None:
        first = self.param_groups[0]["params"][0]
        with torch.no_grad():
            first.add_(1e-3)


def timed(work: Callable[[], Any]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def state_of(gib: float) -> tuple[nn.Module, Light, list[Tensor]]:
    matrices = round(gib * GIB / (3 * 4 * WIDTH * WIDTH))
    model = nn.Module()
    model.layers = nn.ParameterList(nn.Parameter(torch.randn(WIDTH, WIDTH)) for _ in range(matrices))
    optimizer = Light(list(model.parameters()))
    tensors = [t for s in optimizer.state.values() for t in s.values()] + list(model.parameters())
    return model, optimizer, [t.detach() for t in tensors]


def memcpy_s(tensors: list[Tensor]) -> float:
    """One thread's, into memory that was touched; a part of the state again and again."""
    some = tensors[: max(1, len(tensors) // 4)]
    warm = [torch.ones_like(t) for t in some]

    def copy() -> None:
        for target, source in zip(warm, some, strict=True):
            target.copy_(source)

    return statistics.median(timed(copy) for _ in range(5)) * len(tensors) / len(some)


def memcpy_by_two_s(tensors: list[Tensor]) -> float:
    """As ``memcpy_s``, by two threads."""
    with ThreadPoolExecutor(2) as threads:
        return max(threads.map(memcpy_s, (tensors[::2], tensors[1::2])))


def first_touch_s(size_bytes: int) -> float:
    """Of memory on huge pages by one thread; for a moment that memory is at hand for whoever comes next."""
    with mmap.mmap(-1, max(1, size_bytes)) as memory:
        memory.madvise(mmap.MADV_HUGEPAGE)
        return timed(partial(np.frombuffer(memory, dtype=np.uint8).fill, 0))


def computing(seconds: float) -> Callable[[], None]:
    """Matrix products for about so long; the number is fixed beforehand."""
    a = torch.randn(512, 512)
    once = statistics.median(timed(lambda: [a @ a for _ in range(10)]) for _ in range(5)) / 10
    count = max(1, round(seconds / once))

    def compute() -> None:
        for _ in range(count):
            a @ a

    return compute


def measure_ours(
    model: nn.Module, optimizer: Light, tensors: list[Tensor], place: Path, *, rounds_wanted: int
) -> dict[str, Any]:
    memcpy, size = memcpy_s(tensors), sum(t.nbytes for t in tensors)
    found: dict[str, Any] = {"memcpy_s": memcpy, "memcpy_by_two_s": memcpy_by_two_s(tensors)}

    def start() -> Snapshotter:
        return Snapshotter("bench", directory=place, model=model, optimizer=optimizer)

    began = time.perf_counter()
    snapshots = start()
    found["start_s"] = time.perf_counter() - began
    snapshots.remove()
    found["touch_s"] = first_touch_s(2 * size)
    began = time.perf_counter()
    snapshots = start()
    found["start_touched_s"] = time.perf_counter() - began
    snapshots.restore()
    compute, step = computing(STEP_PER_COPY * memcpy), 0

    def iteration(*, taking: bool) -> float:
        nonlocal step
        step += 1
        began = time.perf_counter()
        compute()
        optimizer.step()
        if taking:
            snapshots.snapshot(step)
        return time.perf_counter() - began

    calls, after, hurried = [], [], []

    def hurry(number: int) -> None:
        snapshots.snapshot(number)
        optimizer.step()

    for _ in range(rounds_wanted):
        step += 1
        calls.append(timed(partial(snapshots.snapshot, step)))
        compute()
        after.append(timed(optimizer.step))
    found |= {"call_s": calls, "step_behind_s": after}
    for _ in range(4):
        snapshots.wait()
        step += 1
        hurried.append(timed(partial(hurry, step)))
    found["hurried_s"] = hurried
    snapshots.wait()
    rounds = []
    for _ in range(rounds_wanted):
        without = [iteration(taking=False) for _ in range(2)]
        taking = [iteration(taking=True) for _ in range(3)][1:]
        compute()
        snapshots.wait()
        rounds.append((statistics.median(without), statistics.median(taking)))
    found["rounds_s"] = rounds
    found["completed"] = snapshots.counts.completed
    found["load_s"] = [timed(snapshots.restore) for _ in range(5)]
    snapshots.close()
    gib = str(size / GIB)
    for name, options, environment in (
        ("found", (), {}),
        ("touched", ("--touch",), {}),
        ("streaming", ("--touch",), streaming_environment(os.environ)),
    ):
        line = itself("--load", str(place), "--measure", gib, *options, environment=environment)
        found[f"load_new_{name}_s"], *found[f"load_again_{name}_s"] = line
    shutil.rmtree(place / "bench")
    return found


def itself(*options: str, environment: Mapping[str, str] | None = None) -> Any:
    """What this script prints last when it is started so, which is JSON."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.snapshot", *options],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | dict(environment or {}),
    )
    return json.loads(done.stdout.splitlines()[-1])


def loaded_anew(place: Path, gib: float, *, touch: bool) -> list[float]:
    """``restore()`` in a process whose optimizer did not step yet, mapping and all; and again, four times."""
    torch.set_num_threads(1)
    model, optimizer, tensors = state_of(gib)
    size = sum(t.nbytes for t in tensors)
    del tensors
    optimizer.state.clear()
    snapshots = Snapshotter("bench", directory=place, model=model, optimizer=optimizer)
    if touch:
        first_touch_s(size)
    seconds = [timed(snapshots.restore) for _ in range(5)]
    snapshots.close()
    return seconds


def measure_decoding(tensors: list[Tensor]) -> list[float]:
    """What one of three hosts kept is made again out of the other two's segments and parity (aec)."""
    size = sum(t.nbytes for t in tensors)
    layout = ShardLayout(code=make_code("aec", 3), bucket_bytes=size)
    bucket = np.ones(size, dtype=np.uint8)
    shards = {owner: np.ones(layout.shard_bytes(owner), dtype=np.uint8) for owner in range(3)}
    for owner in range(3):
        make_shard(layout, owner, bucket, shards[owner])
    fetch = fetch_from({owner: shards[owner] for owner in (1, 2)})

    image = Image(known={})
    for tensor in tensors:
        image.add(tensor, "a tensor", at_once=False)
    assert image.own_bytes == size

    def load() -> None:
        restore(layout, frozenset({1, 2}), fetch, bucket)
        filling = Filling(entries=image.entries, images={False: bucket, True: NOTHING})
        for number, tensor in enumerate(tensors):
            filling.take(number, tensor, None)
        filling.verify(spans_of(bucket, shared=False))
        filling.finish()

    return [timed(load) for _ in range(3)]


def measure_dlrover(venv: Path, gib: float, rounds: int) -> dict[str, Any]:
    """What its worker prints; ``problem`` where it does not run."""
    done = subprocess.run(
        [venv / "bin/python", Path(__file__).parent / "peers/dlrover_worker.py",
         "--gib", str(gib), "--rounds", str(rounds)],
        capture_output=True, text=True, check=False, timeout=600, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"first_s"')]
    if not lines:
        return {"problem": (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]}
    found: dict[str, Any] = json.loads(lines[-1])
    return found


def measure_peers(model: nn.Module, optimizer: Light, disk: Path, *, repeats: int) -> dict[str, Any]:
    """Blocking and total seconds of saving; seconds of loading into the model and the optimizer."""
    parameters = dict(model.named_parameters())
    state = {"model": {k: p.detach() for k, p in parameters.items()}}
    state |= {str(i): dict(optimizer.state[p]) for i, p in enumerate(parameters.values())}
    found: dict[str, Any] = {}

    def load_into(file: Path) -> None:
        loaded = torch.load(file, weights_only=True)
        for name, table in state.items():
            for key, tensor in table.items():
                tensor.copy_(loaded[name][key])

    for where, place in (("shm", SHM), ("disk", disk)):
        folder = Path(tempfile.mkdtemp(dir=place))
        try:
            file, tree = folder / "state.pt", folder / "dcp"

            def read(work: Callable[[], Any], files: Callable[[], Iterable[Path]]) -> list[float]:
                seconds = []
                for _ in range(repeats):
                    for one in files():
                        drop(one)
                    seconds.append(timed(work))
                return seconds

            saves = [timed(partial(torch.save, state, file)) for _ in range(repeats if where == "shm" else 1)]
            found[f"torch.save {where}"] = saves
            found[f"torch.load {where}"] = read(partial(load_into, file), partial(iter, [file]))
            file.unlink()
            found[f"DCP save {where}"] = [timed(partial(dcp.save, state, checkpoint_id=tree, no_dist=True))]
            load = partial(dcp.load, state, checkpoint_id=tree, no_dist=True)
            found[f"DCP load {where}"] = read(load, tree.iterdir)
            shutil.rmtree(tree)
            if where == "shm":
                calls = []
                for number in range(repeats):
                    began = time.perf_counter()
                    future: Any = dcp.async_save(state, checkpoint_id=folder / f"a{number}", no_dist=True)
                    calls.append(time.perf_counter() - began)
                    future.result()
                    shutil.rmtree(folder / f"a{number}")
                found["DCP async_save shm"] = calls
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    return found


def drop(file: Path) -> None:
    """Write it out and let its pages go; in a memory file system that does nothing."""
    descriptor = os.open(file, os.O_RDONLY)
    with contextlib.suppress(OSError):
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


# --- kills ---------------------------------------------------------------------------------------


def in_child(work: Callable[[], bool]) -> int:
    """Fork, as importing torch takes seconds; the child's id. It ends with 0 when ``work`` says True."""
    child = os.fork()
    if child:
        return child
    try:
        os._exit(0 if work() else 1)
    finally:
        os._exit(2)


def victim(place: Path, told: int) -> bool:
    matrix = nn.Parameter(torch.zeros(KILLED_WIDTH, KILLED_WIDTH))
    optimizer = torch.optim.SGD([matrix], lr=1.0)
    model = nn.ParameterList([matrix])
    snapshots = Snapshotter("killed", directory=place, model=model, optimizer=optimizer)
    step = snapshots.restore() or 0
    while True:
        step += 1
        with snapshots.changing(), torch.no_grad():
            matrix.fill_(step)
        snapshots.snapshot(step)
        os.write(told, f"{snapshots.counts.completed_step or 0}\n".encode())


def right(place: Path, at_least: int) -> bool:
    matrix = nn.Parameter(torch.zeros(KILLED_WIDTH, KILLED_WIDTH))
    model, optimizer = nn.ParameterList([matrix]), torch.optim.SGD([matrix], lr=1.0)
    snapshots = Snapshotter("killed", directory=place, model=model, optimizer=optimizer)
    step = snapshots.restore()
    fine = step is not None and step >= at_least and bool((matrix == step).all())
    snapshots.close()
    return fine


def killed(place: Path, draw: random.Random) -> bool:
    reading, writing = os.pipe()
    child = in_child(lambda: victim(place, writing))
    os.close(writing)
    told = b""
    while not any(int(line) for line in told.split(b"\n")[:-1]):
        more = os.read(reading, 4096)
        if not more:
            raise RuntimeError("the victim ended before it was killed")
        told += more
    time.sleep(draw.uniform(0.01, 0.2))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    while more := os.read(reading, 65536):
        told += more
    os.close(reading)
    newest = max(int(line) for line in told.split(b"\n")[:-1] if line)
    checker = in_child(lambda: right(place, newest))
    return os.waitpid(checker, 0)[1] == 0


def kills() -> int:
    place, draw = Path(tempfile.mkdtemp(dir=SHM)), random.Random(4)
    try:
        return sum(killed(place, draw) for _ in range(KILLS))
    finally:
        shutil.rmtree(place, ignore_errors=True)


# --- together ------------------------------------------------------------------------------------


def measure(gib: float, disk: Path) -> dict[str, Any]:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    model, optimizer, tensors = state_of(gib)
    place = Path(tempfile.mkdtemp(dir=SHM))
    try:
        ours = measure_ours(model, optimizer, tensors, place, rounds_wanted=3 if gib > 2 else 6)
    finally:
        shutil.rmtree(place, ignore_errors=True)
    decoding = [] if gib > 2 else measure_decoding(tensors)
    peers = measure_peers(model, optimizer, disk, repeats=1 if gib > 2 else 3)
    return {"ours": ours, "decoding_s": decoding, "peers": peers}


def rows_of(result: Result, gib: float, found: dict[str, Any]) -> None:
    ours, peers = found["ours"], found["peers"]
    size, memcpy = f"{gib:g} GiB", ours["memcpy_s"]

    def row(what: str, seconds: list[float]) -> None:
        text = str(Summary(values=tuple(1e3 * s for s in seconds)))
        result.rows.append((f"{size}  {what}", text, f"{statistics.median(seconds) / memcpy:.2f}"))

    row("one memcpy, one thread", [memcpy])
    row("one memcpy, two threads", [ours["memcpy_by_two_s"]])
    row("start: allocate, touch, map", [ours["start_s"]])
    row("a touch of as many bytes, one thread", [ours["touch_s"]])
    row("start, behind that touch", [ours["start_touched_s"]])
    row("snapshot(), first call", ours["call_s"][:1])
    row("snapshot(), there is time", ours["call_s"][1:])
    row("optimizer.step() behind it", ours["step_behind_s"])
    row("snapshot() and step(), no time", ours["hurried_s"])
    for name in ("torch.save shm", "DCP save shm", "DCP async_save shm", "torch.save disk", "DCP save disk"):
        row(name, peers[name])
    dlrover = found.get("dlrover", {})
    if "save_s" in dlrover:
        row("DLRover to memory, first call", dlrover["first_s"])
        row("DLRover to memory", dlrover["save_s"])
    row("restore() from own memory, verified", ours["load_s"])
    row("… with copies that pass the caches by", ours["load_again_streaming_s"])
    row("restore() in a new process", [ours["load_new_found_s"]])
    row("… behind a touch of as many bytes", [ours["load_new_touched_s"]])
    row("… with copies that pass the caches by", [ours["load_new_streaming_s"]])
    if found["decoding_s"]:
        row("decoding a third, and into the tensors", found["decoding_s"])
    if "load_s" in dlrover:
        row("DLRover from memory", dlrover["load_s"])
    for name in LOADS:
        row(name, peers[name])
    rounds = ours["rounds_s"]
    over = [100 * (taking / without - 1) for without, taking in rounds]
    median = 100 * (statistics.median(t for _, t in rounds) / statistics.median(w for w, _ in rounds) - 1)
    result.rows.append(
        (f"{size}  iteration without", str(Summary(values=tuple(1e3 * w for w, _ in rounds))), "")
    )
    result.rows.append(
        (f"{size}  iteration, snapshot in each", str(Summary(values=tuple(1e3 * t for _, t in rounds))), "")
    )
    result.notes.append(
        f"{size}: over the iteration without, by rounds: {', '.join(f'{o:.1f}%' for o in over)}"
    )
    slowest = 1e3 * max(ours["call_s"])
    load = statistics.median(ours["load_s"])

    def limit(name: str, measured: float, bar: float, *, at_least: bool = False) -> None:
        result.limits.append(Limit(name=f"{size}: {name}", measured=measured, limit=bar, at_least=at_least))

    limit("longest snapshot() where there is time, ms, first call included", slowest, 5.0)
    limit("snapshot() and an immediate step, memcpys", statistics.median(ours["hurried_s"]) / memcpy, 1.0)
    limit("iteration time with a snapshot in each, % over none", median, 2.0)
    for peer in ("torch.load disk", "DCP load disk"):
        seconds = statistics.median(peers[peer])
        limit(f"restore() against {peer}, times", seconds / load, 12.36, at_least=True)
    against = {peer: statistics.median(peers[peer]) for peer in LOADS}
    streaming = statistics.median(ours["load_again_streaming_s"])
    result.notes.append(
        f"{size}: restore(), and with copies that pass the caches by, are so many times as quick as "
        + ", ".join(f"{peer}: {s / load:.1f}, {s / streaming:.1f}" for peer, s in against.items())
    )


def free_bytes() -> int:
    lines = Path("/proc/meminfo").read_text().splitlines()
    available = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    return min(available, shutil.disk_usage(SHM).free)


def run() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--sizes", type=float, nargs="+", default=[1, 4], help="GiB of state")
    parser.add_argument("--disk", type=Path, default=RESULTS, help="a directory on a disk")
    parser.add_argument("--peer", type=Path, help="virtual environment that holds DLRover: measure it too")
    parser.add_argument("--measure", type=float, help="GiB: measure in this process and print JSON")
    parser.add_argument("--load", type=Path, help="with --measure: what lies there, in this process")
    parser.add_argument("--touch", action="store_true", help="with --load: touch as much memory before")
    given = parser.parse_args()
    if given.load:
        print(json.dumps(loaded_anew(given.load, given.measure, touch=given.touch)))
        return
    given.disk.mkdir(parents=True, exist_ok=True)
    if given.measure:
        print(json.dumps(measure(given.measure, given.disk)))
        return
    result = Result(
        name="snapshot",
        what="Snapshots of a script's state in host memory: ms (min / median / max), and in memcpys",
        columns=("what", "ms", "memcpys"),
    )
    survived = kills()
    result.limits.append(
        Limit(name=f"right after a kill, of {KILLS}", measured=survived, limit=KILLS, at_least=True)
    )
    for gib in given.sizes:
        if free_bytes() < LEAST_FREE_BYTES * gib * GIB:
            result.notes.append(f"{gib:g} GiB: left out, {free_bytes() / GIB:.1f} GiB of memory are free")
            continue
        found = itself("--measure", str(gib), "--disk", str(given.disk))
        if given.peer is not None:
            found["dlrover"] = measure_dlrover(given.peer.absolute(), gib, 3 if gib > 2 else 6)
            if "problem" in found["dlrover"]:
                result.notes.append(f"{gib:g} GiB: DLRover did not run: {found['dlrover']['problem']}")
        result.data[f"{gib:g} GiB"] = found
        rows_of(result, gib, found)
    if given.peer is None:
        result.notes.append("DLRover's in-memory checkpoint: --peer VENV, an environment with dlrover==0.6.1")
    main(result, given.out)


if __name__ == "__main__":
    run()
