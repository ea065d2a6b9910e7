"""Snapshots of a plain script: the training stall, the effect of kills and the time to load.

It measures a model with Adam's state of 1 GiB and of 4 GiB (1024 × 1024 matrices), in one run and on one
thread, as one core must be left for the copy:

* stall: the time that a call blocks the training thread, when there is a forward pass until the next update
  (*there is time*), and when the update comes at once (*no time*: the call and the wait together); against
  one memcpy of the same bytes, torch.save, DCP save and DCP async_save into /dev/shm;
* iteration time with a snapshot in every iteration against none, in alternating rounds, of a step that
  takes 3.5 times as long as the copy (matrix products; the optimizer changes one matrix, so the step is
  computing); and with a parallel thread that copies as many bytes, which is the cost of any copy on this
  machine;
* start: allocating and mapping the arena, with memory as it is found and right after a touch of as many
  bytes. A virtual machine's host may take free memory back; the time to give it again is not ftd's: on one
  with free page reporting a first touch after two seconds without use took 15 to 20 times the processor
  time of one at once;
* load: restore() with its digests, in the process that wrote and in new ones (which map the memory and make
  the optimizer's state), as scripts are started and with copies that bypass the caches
  (docs/tutorials/snapshotter.md), and by decoding the data of one of three hosts, against torch.load and
  DCP load, from /dev/shm and from a disk whose pages were dropped;
* with ``--peer``, DLRover's in-memory checkpoint of the same state, in an environment that holds
  ``dlrover==0.6.1`` and torch;
* 20 kills at random moments of a process that takes one snapshot after another.

    python -m benchmarks.snapshot [--sizes 1 4] [--disk DIRECTORY] [--peer VENV]
"""

import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import tempfile
import threading
import time
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import torch
from torch import nn

from benchmarks.common import RESULTS, Limit, Result, command_line, main, milliseconds
from benchmarks.script_peers import LOADS, SAVES, measure_dlrover, measure_peers
from benchmarks.script_state import (
    GIB,
    SHM,
    computing,
    die_first,
    first_touch_s,
    free_bytes,
    memcpy_by_two_s,
    memcpy_s,
    phase,
    plain_copy,
    state_of,
    timed,
)
from ftd import Snapshotter
from runtime.script.saved import EMPTY
from runtime.script.tensor_filler import TensorFiller, verified_spans
from runtime.script.tensor_image import TensorImage
from runtime.streaming_stores import streaming_environment
from storage.codes import make_code
from storage.shards import Bytes, ShardLayout, decode_bucket, make_shard

LEAST_FREE_BYTES = 4.5
"""Free memory needed for each byte of state: two slots, a new process's state, a touch of as much, and a margin."""
LARGE_GIB = 2
"""Size in GiB above which measurements are repeated less often."""
TIMES = 12.36
"""Required ratio of the time to load from a disk to the time to restore, as the paper reports it."""
KILLS = 20
WIDTH = 4096
NAME = "bench"
STEP_PER_COPY = 3.5
HURRIED = 4
LOAD_TIMES = 5


class Training:
    """Training loop that takes snapshots and measures its calls and iterations."""

    def __init__(
        self,
        snapshots: Snapshotter,
        optimizer: torch.optim.Optimizer,
        memcpy: float,
        other_work: Callable[[], object],
    ) -> None:
        """:param other_work: copies as many bytes as a snapshot has."""
        self._snapshots, self._optimizer, self._other_work = snapshots, optimizer, other_work
        self._compute = computing(STEP_PER_COPY * memcpy)
        self._step = 0

    def _iteration(self, *, taking: bool = False, other_work: Callable[[], object] = lambda: None) -> float:
        self._step += 1
        began = time.perf_counter()
        thread = threading.Thread(target=other_work)
        thread.start()
        self._compute()
        self._optimizer.step()
        if taking:
            self._snapshots.snapshot(self._step)
        thread.join()
        return time.perf_counter() - began

    def calls(self, rounds: int) -> dict[str, list[float]]:
        """Measure calls that have a forward pass until the next update, and the updates after them."""
        calls, steps = [], []
        for _ in range(rounds):
            self._step += 1
            calls.append(timed(partial(self._snapshots.snapshot, self._step)))
            self._compute()
            steps.append(timed(self._optimizer.step))
        return {"call_s": calls, "step_behind_s": steps}

    def hurried(self) -> list[float]:
        """Measure calls that an update follows at once."""

        def hurry() -> None:
            self._snapshots.snapshot(self._step)
            self._optimizer.step()

        seconds = []
        for _ in range(HURRIED):
            self._snapshots.wait()
            self._step += 1
            seconds.append(timed(hurry))
        self._snapshots.wait()
        return seconds

    def rounds(self, count: int) -> list[tuple[float, float, float]]:
        """Measure iterations without a snapshot, with one in each, and with a parallel plain copy in each."""
        rounds = []
        for _ in range(count):
            without = [self._iteration() for _ in range(2)]
            taking = [self._iteration(taking=True) for _ in range(3)][1:]
            self._compute()
            self._snapshots.wait()
            copying = [self._iteration(other_work=self._other_work) for _ in range(2)]
            rounds.append((mean(without), mean(taking), mean(copying)))
        return rounds


def measure_own(gib: float, place: Path, rounds: int) -> dict[str, Any]:
    """Measure all but restoring in new processes; a snapshot remains in ``place`` for these."""
    torch.set_num_threads(1)
    model, optimizer, tensors = state_of(gib)
    memcpy, size = memcpy_s(tensors), sum(t.nbytes for t in tensors)
    found: dict[str, Any] = {"memcpy_s": memcpy, "memcpy_by_two_s": memcpy_by_two_s(tensors)}

    def start() -> Snapshotter:
        return Snapshotter(NAME, directory=place, model=model, optimizer=optimizer)

    began = time.perf_counter()
    snapshots = start()
    found["start_s"] = time.perf_counter() - began
    snapshots.remove()
    found["touch_s"] = first_touch_s(2 * size)
    began = time.perf_counter()
    snapshots = start()
    found["start_touched_s"] = time.perf_counter() - began
    snapshots.restore()
    training = Training(snapshots, optimizer, memcpy, plain_copy(tensors))
    found |= training.calls(rounds)
    found["hurried_s"] = training.hurried()
    found["rounds_s"] = training.rounds(rounds)
    found["completed"] = snapshots.counts.completed
    found["load_s"] = [timed(snapshots.restore) for _ in range(LOAD_TIMES)]
    snapshots.close()
    return found


def measure_restoring(gib: float, place: Path, *, touch: bool) -> list[float]:
    """Measure ``restore()`` in a process whose optimizer has not stepped, including mapping, and four repetitions."""
    torch.set_num_threads(1)
    model, optimizer, tensors = state_of(gib)
    size = sum(t.nbytes for t in tensors)
    del tensors
    optimizer.state.clear()
    snapshots = Snapshotter(NAME, directory=place, model=model, optimizer=optimizer)
    if touch:
        first_touch_s(size)
    seconds = [timed(snapshots.restore) for _ in range(LOAD_TIMES)]
    snapshots.close()
    return seconds


def measure_decoding(gib: float) -> list[float]:
    """Measure decoding the state of one of three hosts from the other two's segments and parity (aec)."""
    torch.set_num_threads(1)
    _, _, tensors = state_of(gib)
    size = sum(t.nbytes for t in tensors)
    layout = ShardLayout(code=make_code("aec", 3), bucket_bytes=size)
    bucket = np.ones(size, dtype=np.uint8)
    shards = {owner: np.ones(layout.shard_bytes(owner), dtype=np.uint8) for owner in (1, 2)}
    for owner, shard in shards.items():
        make_shard(layout, owner, bucket, shard)

    def fetch(owner: int, offset: int, size: int) -> Bytes:
        return shards[owner][offset : offset + size]

    image = TensorImage(known={})
    for tensor in tensors:
        image.add(tensor, "a tensor")
    assert image.own_bytes == size

    def load() -> None:
        decode_bucket(layout, frozenset({1, 2}), fetch, bucket)
        filler = TensorFiller(entries=image.entries, images={False: bucket, True: EMPTY})
        for number, tensor in enumerate(tensors):
            filler.target_for(number, tensor, None)
        filler.verify(verified_spans(bucket, shared=False))
        filler.finish()

    return [timed(load) for _ in range(3)]


def kills() -> int:
    """Return after how many of ``KILLS`` the last completed snapshot is there and correct."""
    place, draw = Path(tempfile.mkdtemp(dir=SHM)), random.Random(4)
    try:
        return sum(_survived(place, draw) for _ in range(KILLS))
    finally:
        shutil.rmtree(place, ignore_errors=True)


def _survived(place: Path, draw: random.Random) -> bool:
    reading, writing = os.pipe()
    child = _forked(lambda: _victim(place, writing))
    os.close(writing)
    reported = b""
    while not any(int(line) for line in reported.split(b"\n")[:-1]):
        more = os.read(reading, 4096)
        if not more:
            raise RuntimeError("the victim ended before it was killed")
        reported += more
    time.sleep(draw.uniform(0.01, 0.2))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    while more := os.read(reading, 65536):
        reported += more
    os.close(reading)
    newest = max(int(line) for line in reported.split(b"\n")[:-1] if line)
    checker = _forked(lambda: _is_restored(place, newest))
    return os.waitpid(checker, 0)[1] == 0


def _forked(work: Callable[[], bool]) -> int:
    """Fork, as importing torch takes seconds; return the child's pid. It exits with 0 when ``work`` returns True."""
    child = os.fork()
    if child:
        return child
    try:
        os._exit(0 if work() else 1)
    finally:
        os._exit(2)


def _open(place: Path) -> tuple[nn.Parameter, Snapshotter]:
    matrix = nn.Parameter(torch.zeros(WIDTH, WIDTH))
    optimizer = torch.optim.SGD([matrix], lr=1.0)
    return matrix, Snapshotter(
        "killed", directory=place, model=nn.ParameterList([matrix]), optimizer=optimizer
    )


def _victim(place: Path, reports: int) -> bool:
    matrix, snapshots = _open(place)
    step = snapshots.restore() or 0
    while True:
        step += 1
        with snapshots.changing(), torch.no_grad():
            matrix.fill_(step)
        snapshots.snapshot(step)
        os.write(reports, f"{snapshots.counts.completed_step or 0}\n".encode())


def _is_restored(place: Path, at_least: int) -> bool:
    matrix, snapshots = _open(place)
    step = snapshots.restore()
    is_restored = step is not None and step >= at_least and bool((matrix == step).all())
    snapshots.close()
    return is_restored


def measure(gib: float, disk: Path, peer: Path | None) -> dict[str, Any]:
    """Measure every part in separate processes, one after the other."""
    large, size = gib > LARGE_GIB, str(gib)
    place = Path(tempfile.mkdtemp(dir=SHM))
    try:
        rounds = "7" if large else "9"
        ours = phase("--phase", "own", "--gib", size, "--place", str(place), "--repeats", rounds)
        for name, touch, environment in (
            ("found", False, {}),
            ("touched", True, {}),
            ("streaming", True, streaming_environment(os.environ)),
        ):
            which = "touched" if touch else "new"
            seconds = phase("--phase", which, "--gib", size, "--place", str(place), environment=environment)
            ours[f"load_new_{name}_s"], *ours[f"load_again_{name}_s"] = seconds
    finally:
        shutil.rmtree(place, ignore_errors=True)
    found = {"ours": ours, "decoding_s": phase("--phase", "decoding", "--gib", size)}
    repeats = "1" if large else "3"
    found["peers"] = phase("--phase", "peers", "--gib", size, "--place", str(disk), "--repeats", repeats)
    if peer is not None:
        found["dlrover"] = measure_dlrover(peer.absolute(), gib, 3 if large else 6)
    return found


def one_phase(given: Namespace) -> Any:
    """Measure one part in a process that ``measure`` started."""
    die_first()
    match given.phase:
        case "own":
            return measure_own(given.gib, given.place, given.repeats)
        case "new" | "touched":
            return measure_restoring(given.gib, given.place, touch=given.phase == "touched")
        case "decoding":
            return measure_decoding(given.gib)
        case _:
            return measure_peers(given.gib, given.place, given.repeats)


def add_results(result: Result, gib: float, found: dict[str, Any]) -> None:
    """Add rows, limits and notes of one size."""
    size = f"{gib:g} GiB"
    rows_of(result, size, found)
    over = iterations(result, size, found["ours"]["rounds_s"])
    limits_of(result, size, found, over)


def rows_of(result: Result, size: str, found: dict[str, Any]) -> None:
    ours, peers, dlrover = found["ours"], found["peers"], found.get("dlrover", {})
    table: list[tuple[str, list[float]]] = [
        ("one memcpy, one thread", [ours["memcpy_s"]]),
        ("one memcpy, two threads", [ours["memcpy_by_two_s"]]),
        ("start: allocate, touch, map", [ours["start_s"]]),
        ("a touch of as many bytes, one thread", [ours["touch_s"]]),
        ("start, after that touch", [ours["start_touched_s"]]),
        ("snapshot(), first call", ours["call_s"][:1]),
        ("snapshot(), there is time", ours["call_s"][1:]),
        ("optimizer.step() after it", ours["step_behind_s"]),
        ("snapshot() and step(), no time", ours["hurried_s"]),
        *((name, peers[name]) for name in SAVES),
        ("DLRover to memory, first call", dlrover.get("first_s", [])),
        ("DLRover to memory", dlrover.get("save_s", [])),
        ("restore() from own memory, verified", ours["load_s"]),
        ("… with copies that bypass the caches", ours["load_again_streaming_s"]),
        ("restore() in a new process", [ours["load_new_found_s"]]),
        ("… after a touch of as many bytes", [ours["load_new_touched_s"]]),
        ("… with copies that bypass the caches", [ours["load_new_streaming_s"]]),
        ("decoding a third, and into the tensors", found["decoding_s"]),
        ("DLRover from memory", dlrover.get("load_s", [])),
        *((name, peers[name]) for name in LOADS),
    ]
    for what, seconds in table:
        if seconds:
            memcpys = statistics.median(seconds) / ours["memcpy_s"]
            result.rows.append((f"{size}  {what}", milliseconds(seconds), f"{memcpys:.2f}"))
    if "problem" in dlrover:
        result.notes.append(f"{size}: DLRover did not run: {dlrover['problem']}")


def iterations(result: Result, size: str, rounds: list[tuple[float, float, float]]) -> float:
    """Add rows and a note; return by how many % an iteration with a snapshot takes longer."""
    without, *others = (list(kind) for kind in zip(*rounds, strict=True))
    over = []
    result.rows.append((f"{size}  iteration without", milliseconds(without), ""))
    for what, seconds in zip(("snapshot in each", "with a parallel plain copy"), others, strict=True):
        result.rows.append((f"{size}  iteration, {what}", milliseconds(seconds), ""))
        percent = [100 * (s / w - 1) for w, s in zip(without, seconds, strict=True)]
        over.append(statistics.median(percent))
        percentages = ", ".join(f"{p:.1f}%" for p in percent)
        result.notes.append(f"{size}: over the iteration without, {what}, by rounds: {percentages}")
    return over[0]


def limits_of(result: Result, size: str, found: dict[str, Any], over: float) -> None:
    ours = found["ours"]
    loads = {peer: statistics.median(found["peers"][peer]) for peer in LOADS}
    load, streaming = (statistics.median(ours[key]) for key in ("load_s", "load_again_streaming_s"))
    hurried = statistics.median(ours["hurried_s"]) / ours["memcpy_s"]

    def limit(name: str, measured: float, bar: float, *, at_least: bool = False) -> None:
        result.limits.append(Limit(name=f"{size}: {name}", measured=measured, limit=bar, at_least=at_least))

    slowest = 1e3 * max(ours["call_s"])
    limit("longest snapshot() where there is time, ms, first call included", slowest, 5.0)
    limit("snapshot() and an immediate step, memcpys", hurried, 1.0)
    limit("iteration time with a snapshot in each, % over none", over, 2.0)
    for peer in ("torch.load disk", "DCP load disk"):
        limit(f"restore() against {peer}, times", loads[peer] / load, TIMES, at_least=True)
    by_two = ours["memcpy_by_two_s"]
    result.notes.append(
        f"{size}: one memcpy by two threads, into existing memory, is faster than these by the factors "
        + ", ".join(f"{peer}: {s / by_two:.1f}" for peer, s in loads.items())
    )
    result.notes.append(
        f"{size}: restore(), and with copies that bypass the caches, are faster than these by the factors "
        + ", ".join(f"{peer}: {s / load:.1f}, {s / streaming:.1f}" for peer, s in loads.items())
    )


def run() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--sizes", type=float, nargs="+", default=[1, 4], help="GiB of state")
    parser.add_argument("--disk", type=Path, default=RESULTS, help="a directory on a disk")
    parser.add_argument("--peer", type=Path, help="virtual environment that holds DLRover: measure it too")
    phases = ("own", "new", "touched", "decoding", "peers")
    parser.add_argument("--phase", choices=phases, help="measure this in this process, and print JSON")
    parser.add_argument("--gib", type=float, help="with --phase: GiB of state")
    parser.add_argument("--place", type=Path, help="with --phase: where its files are")
    parser.add_argument("--repeats", type=int, default=3, help="with --phase: number of repetitions")
    given = parser.parse_args()
    if given.phase:
        print(json.dumps(one_phase(given)))
        return
    given.disk.mkdir(parents=True, exist_ok=True)
    result = Result(
        name="snapshot",
        what="Snapshots of a script's state in host memory: ms (min / median / max), and in memcpys",
        columns=("what", "ms", "memcpys"),
    )
    survived = kills()
    result.limits.append(
        Limit(name=f"correct after a kill, of {KILLS}", measured=survived, limit=KILLS, at_least=True)
    )
    for gib in given.sizes:
        if free_bytes() < LEAST_FREE_BYTES * gib * GIB:
            result.notes.append(f"{gib:g} GiB: left out, {free_bytes() / GIB:.1f} GiB of memory are free")
            continue
        try:
            found = measure(gib, given.disk, given.peer)
        except subprocess.CalledProcessError as error:
            result.notes.append(f"{gib:g} GiB: {error}")
            result.limits.append(Limit(name=f"{gib:g} GiB: parts that failed", measured=1, limit=0))
            continue
        result.data[f"{gib:g} GiB"] = found
        add_results(result, gib, found)
    if given.peer is None:
        result.notes.append("DLRover's in-memory checkpoint: --peer VENV, an environment with dlrover==0.6.1")
    main(result, given.out)


if __name__ == "__main__":
    run()
