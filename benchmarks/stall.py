"""Snapshots of the engine: the rate at which shards are made, and their effect on training.

* making shards in an arena out of a model's scattered tensors, in the units that training is interrupted
  by: copies against one memcpy of as many bytes, XORs of the codes against the same XOR in numpy, on warm
  memory, one thread each, in turn, in the environment that trainers have (minimum / median / maximum);
* an engine that trains alone (no bubbles: the hardest case, as all copies run in parallel with computing),
  in alternating rounds with a snapshot after every step, with none, and with a parallel thread in each step
  that copies as many other bytes, which is the cost of any copy on this machine: step time, and the time
  that the main thread is blocked, against one memcpy of the shard.

    python -m benchmarks.stall [--mib 256] [--rounds 8]
"""

import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch

from benchmarks.common import Limit, Result, Summary, command_line, main
from benchmarks.engines import enter_alone, keep_snapshots
from benchmarks.linear import training_data, write_script
from runtime.engine.engine import Engine
from runtime.monitoring.progress import ProgressMonitor
from runtime.snapshots.movers import Mover
from runtime.snapshots.schedule import CopySchedule
from runtime.snapshots.shard_units import ShardUnit, SnapshotBucket, shard_units, source_of
from runtime.streaming_stores import streaming_environment
from statemachine.messages.trainer import ShardWritten, SnapshotReport
from storage.arena import Arena, Bytes
from storage.codes import make_code
from storage.pages import collapse_pages
from storage.shards import ShardLayout

MIB = 1024 * 1024
TIMES = 9
"""Number of measurements of each rate."""
STEPS = 5
"""Number of steps of one round; the first does not count."""


def rates(
    read_bytes: int, here: Callable[[], object], plain: Callable[[], object]
) -> tuple[Summary, Summary]:
    """Measure both in turn and return their rates in GB/s of ``read_bytes``; the first run of each does not count."""
    taken: tuple[list[float], list[float]] = [], []
    for number in range(TIMES + 1):
        for work, seconds in zip((here, plain), taken, strict=True):
            started = time.perf_counter()
            work()
            if number:
                seconds.append(time.perf_counter() - started)
    one, other = (Summary(values=tuple(read_bytes / s / 1e9 for s in seconds)) for seconds in taken)
    return one, other


def write_all(units: Sequence[ShardUnit], slot: Bytes) -> None:
    for unit in units:
        unit.write(slot)


def plain_work(read_bytes: int, sources: int) -> Callable[[], object]:
    """Return one memcpy, or the XOR of ``sources`` arrays, in plain numpy on warm memory (huge pages, as numpy
    asks).
    """
    words = [np.full(read_bytes // sources // 8, number, dtype=np.uint64) for number in range(sources)]
    target = np.zeros_like(words[0])

    def work() -> None:
        if len(words) == 1:
            target[:] = words[0]
            return
        np.bitwise_xor(words[0], words[1], out=target)
        for word in words[2:]:
            np.bitwise_xor(target, word, out=target)

    return work


def shards(result: Result, mib: int, directory: Path) -> None:
    """Measure how fast one thread makes one owner's shard in an arena, in bytes read, against plain numpy."""
    tensors = [torch.rand(1024, 1024) for _ in range(mib // 4)]
    for number, (scheme, owners) in enumerate((("none", 1), ("aec", 3), ("aec", 4), ("aec2", 4))):
        bucket = SnapshotBucket(Mover())
        for tensor in tensors:
            bucket.add(source_of(tensor), 4 * MIB)
        collapse_pages(bucket.host_ranges())
        layout = ShardLayout(code=make_code(scheme, owners), bucket_bytes=bucket.size_bytes)
        arena = Arena.open(directory / f"arena-{number}")
        slot = arena.begin(layout.shard_bytes(0)).view
        parity = scheme != "none"
        units = [
            u
            for u in shard_units(layout, 0, bucket, 0, CopySchedule().unit_bytes)
            if (len(u.starts) > 1) == parity
        ]
        read_bytes = sum(unit.read_bytes for unit in units)
        sources = max(len(unit.starts) for unit in units)
        plain = plain_work(read_bytes, sources)
        rate, reference = rates(read_bytes, partial(write_all, units, slot), plain)
        arena.remove()
        part = rate.median / reference.median
        what = f"{scheme}, {owners} owners: XOR of {sources}" if parity else "copy"
        result.rows.append((what, str(rate), str(reference), f"{part:.0%}"))
        result.data[f"{scheme}-{owners}"] = {"rate_gb_s": rate.values, "plain_gb_s": reference.values}
        least = {"none": 0.8, "aec": 0.7, "aec2": 0.35}[scheme]
        result.limits.append(
            Limit(name=f"{what}, part of numpy's", measured=part, limit=least, at_least=True)
        )


def alone(mib: int, directory: Path, arena: Path, reports: list[SnapshotReport]) -> Engine:
    """Return an engine that trains a model of about ``mib`` MiB of state alone and takes snapshots."""
    layers = max(2, mib // 12)
    write_script(directory)
    data = training_data(directory, layers, global_batch=256, microbatch_rows=128)
    engine = Engine(data, torch.device("cpu"), ProgressMonitor())
    keep_snapshots(engine, arena, reports)
    enter_alone(engine)
    engine.step(lambda: False)
    return engine


def steps_of(
    engine: Engine, *, snaps: bool = False, other_work: Callable[[], object] = lambda: None
) -> list[float]:
    """Return the seconds of the steps of one round, with a snapshot after each or with none.

    :param other_work: runs in a parallel thread during each step.
    """
    writer = engine.snapshots
    assert writer is not None
    steps_s = []
    for step in range(STEPS):
        started = time.perf_counter()
        thread = threading.Thread(target=other_work)
        thread.start()
        if engine.step(lambda: False, lambda: snaps).snapshot_requested:
            writer.retain(engine.committed_step - 1)
            engine.begin_snapshot(1)
        if step:
            steps_s.append(time.perf_counter() - started)
        thread.join()
    writer.finish()
    return steps_s


def training(result: Result, mib: int, rounds: int, directory: Path, arena: Path) -> None:
    """Train in rounds with and without snapshots; add notes and limits."""
    reports: list[SnapshotReport] = []
    engine = alone(mib, directory, arena, reports)
    steps_of(engine, snaps=True)
    written = [report for report in reports if isinstance(report, ShardWritten)]
    one, other = (np.ones(written[-1].size_bytes, dtype=np.uint8) for _ in range(2))
    steps_s: dict[str, list[float]] = {"without": [], "with": [], "with a parallel plain copy": []}
    for _ in range(rounds):
        steps_s["without"] += steps_of(engine)
        steps_s["with"] += steps_of(engine, snaps=True)
        steps_s["with a parallel plain copy"] += steps_of(engine, other_work=lambda: np.copyto(other, one))
    assert engine.snapshots is not None
    engine.snapshots.close()
    snapped = [report for report in reports if isinstance(report, ShardWritten)]
    size_bytes = snapped[-1].size_bytes
    memcpy, _ = rates(size_bytes, lambda: np.copyto(other, one), lambda: None)
    memcpy_s = size_bytes / memcpy.median / 1e9
    stall_s = statistics.median(report.stall_s for report in snapped)
    worst_s = max(report.stall_s for report in snapped)
    copy_s = statistics.median(report.copy_s for report in snapped)
    without_s, with_s, copying_s = map(statistics.median, steps_s.values())
    figures = {
        "state": f"{size_bytes / MIB:.0f} MiB in {engine.model.layer_count} layers",
        "copying and digests, in parallel with computing": f"{size_bytes / copy_s / 1e9:.1f} GB/s",
        "stall, median / worst": f"{1e3 * stall_s:.1f} / {1e3 * worst_s:.1f} ms",
        "one memcpy of it": f"{1e3 * memcpy_s:.1f} ms",
        "step without / with / with a parallel plain copy": f"{1e3 * without_s:.0f} / {1e3 * with_s:.0f} / "
        f"{1e3 * copying_s:.0f} ms, the latter {copying_s / without_s:.3f} times the first",
    }
    result.notes += [f"{name}: {value}" for name, value in figures.items()]
    result.data["training"] = {
        "size_bytes": size_bytes,
        "copy_s": copy_s,
        "stall_s": [report.stall_s for report in snapped],
        "memcpy_s": memcpy_s,
        "steps_s": steps_s,
    }
    result.limits += [
        Limit(name="stall, median, in memcpys of the shard", measured=stall_s / memcpy_s, limit=1),
        Limit(name="step with over step without", measured=with_s / without_s, limit=1.02),
    ]


def run() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--mib", type=int, default=256, help="MiB of state")
    parser.add_argument("--rounds", type=int, default=8, help="rounds of each kind")
    arguments = parser.parse_args()
    if wanted := streaming_environment(os.environ):
        # A node starts its trainers in the same way; the C library reads this environment only at its
        # start.
        os.execve(
            sys.executable, [sys.executable, "-m", "benchmarks.stall", *sys.argv[1:]], os.environ | wanted
        )
    torch.set_num_threads(1)
    result = Result(
        name="stall",
        what="Snapshots of the engine",
        columns=("making a shard, GB/s", "here", "plain numpy", ""),
    )
    with (
        tempfile.TemporaryDirectory() as directory,
        tempfile.TemporaryDirectory(dir="/dev/shm", prefix="ftd-stall-") as arena,
    ):
        shards(result, arguments.mib, Path(arena))
        training(result, arguments.mib, arguments.rounds, Path(directory), Path(arena))
    main(result, arguments.out)


if __name__ == "__main__":
    run()
