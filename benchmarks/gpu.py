"""Performance of ftd on a GPU: training, snapshots, the link to the host, XOR, recovery and restoring.

    python -m benchmarks.gpu                        # the first GPU
    python -m benchmarks.gpu --parts train,link     # some parts
    python -m benchmarks.gpu --device cpu --tiny    # a tiny model without a GPU, to test the code

It writes benchmarks/results/gpu/<GPU>.json and .txt, from these parts:

* ``train``: tokens per second and MFU (Chowdhery et al., PaLM, appendix B) of a llama of about 1.1 billion
  parameters in bfloat16, each block compiled, with full activation checkpointing: one stage of the engine,
  then a plain PyTorch loop with the same model, batches and optimizer.
* ``snapshot``: seconds of a step with a snapshot after each step and with none, in alternating rounds.
* ``link``: copies from the device to pinned host memory and back, against the PCIe bandwidth in one
  direction as nvidia-smi reports it.
* ``xor``: parity of three tensors made on the device and copied to host memory, in bytes read.
* ``kill``: recovery by phase after a node is killed in a small job of three nodes that share the device
  through gloo.
* ``restore``: loading of layers with their optimizer's state from shared memory into the device.

The files are written after each part. A part that fails is noted, and the others are measured. Without a GPU
it ends with exit code 3, unless you give ``--device cpu``.
"""

import asyncio
import gc
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

from benchmarks.clusters import REPOSITORY, run_local
from benchmarks.common import RESULTS, Result, Summary, command_line, milliseconds
from benchmarks.engines import enter_alone, keep_snapshots
from benchmarks.peers.llama_loop import Text, compile_blocks, make_model, make_optimizer
from benchmarks.recovery import faults_of, measured_recoveries, phase_rows
from ftd import sample_indices
from ftd.snapshots.restoring.staging import StagingDirectory
from runtime.device import DeviceRuntime, device_runtime
from runtime.engine.engine import Engine
from runtime.engine.staged_state import StagedStateLoader
from runtime.monitoring.progress import ProgressMonitor
from runtime.profiling.utilisation import peak_flops
from runtime.script.tensor_image import Source
from runtime.side_stream import SideStreams
from runtime.snapshots.movers import DeviceMover, Mover
from statemachine.messages.common import SnapshotFailed
from statemachine.messages.trainer import ShardWritten, SnapshotReport, TrainingData

PARTS = ("link", "xor", "train", "snapshot", "kill", "restore")
NO_GPU_EXIT = 3
SKIPPED = 2
"""Number of steps at the beginning of a measurement that do not count: they compile and touch memory first."""
MIB = 1024 * 1024
_LANE_GB_S = {1: 0.25, 2: 0.5, 3: 0.985, 4: 1.969, 5: 3.938, 6: 7.563}
"""Bandwidth of one PCIe lane in one direction, GB/s, by generation (PCI-SIG)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """Sizes of a llama and its batches."""

    hidden: int
    layers: int
    vocabulary: int
    length: int
    global_batch: int
    microbatch: int
    steps: int
    copied_mib: int
    compiled: bool

    @property
    def arguments(self) -> dict[str, int]:
        """Arguments of the job's training function."""
        return {
            "hidden": self.hidden,
            "layers": self.layers,
            "vocabulary": self.vocabulary,
            "length": self.length,
        }


BILLION = Size(
    hidden=2048,
    layers=20,
    vocabulary=32000,
    length=2048,
    global_batch=16,
    microbatch=4,
    steps=10,
    copied_mib=1024,
    compiled=True,
)
TINY = Size(
    hidden=64, layers=2, vocabulary=256, length=32, global_batch=4, microbatch=2, steps=2, copied_mib=4, compiled=False
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """Device, sizes and directory of a measurement."""

    device: torch.device
    size: Size
    runtime: DeviceRuntime
    memory: Path
    """Directory in a memory file system."""

    def data(self, **changes: Any) -> TrainingData:
        """Return a trainer's data, with ``changes``."""
        size = self.size
        fields: dict[str, Any] = {
            "function": "llama.py:build",
            "path": str(REPOSITORY / "benchmarks/jobs"),
            "seed": 1,
            "steps": 1_000_000,
            "global_batch": size.global_batch,
            "microbatch_rows": size.microbatch,
            "clip_gradient_norm": 1.0,
            "activation_checkpointing": "full",
            "precision": "bfloat16",
            "compile": size.compiled,
            "device": self.device.type,
            "arguments": size.arguments,
        }
        return TrainingData(**(fields | changes))

    def free(self) -> None:
        """Release the memory of objects that nothing refers to any more."""
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def seconds(self, work: Callable[[], object]) -> float:
        """Return the seconds that the device takes for ``work``."""
        self.runtime.synchronize()
        started = time.perf_counter()
        work()
        self.runtime.synchronize()
        return time.perf_counter() - started


@contextmanager
def training(bench: Bench, reports: list[SnapshotReport] | None = None) -> Iterator[Engine]:
    """Make an engine that trains all layers alone, and close it at the end.

    :param reports: list for the snapshots' reports; without it no snapshots are taken.
    """
    engine = Engine(bench.data(), bench.device, ProgressMonitor())
    engine.warm_up()
    if reports is not None:
        keep_snapshots(engine, bench.memory / "arena", reports)
    enter_alone(engine, recompute="full")
    try:
        yield engine
    finally:
        if engine.snapshots is not None:
            engine.snapshots.close()
        engine.close()


def steps_s(bench: Bench, engine: Engine, count: int, *, snaps: bool = False) -> list[float]:
    """Return the seconds of each of ``count`` steps."""

    def step() -> None:
        engine.step(lambda: False, lambda: snaps)
        if snaps:
            engine.begin_snapshot(1)

    return [bench.seconds(step) for _ in range(count)]


def plain_steps_s(bench: Bench, count: int) -> list[float]:
    """Return the seconds of each of ``count`` steps of a plain loop over the same microbatches."""
    size, data = bench.size, bench.data()
    torch.manual_seed(data.seed)
    model = make_model(size.hidden, size.layers, size.vocabulary).train().to(bench.device)
    model.config.use_cache = False  # type: ignore[union-attr]
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})  # type: ignore[operator]
    if size.compiled:
        compile_blocks(model)
    optimizer = make_optimizer(list(model.parameters()), 3e-4)
    text = Text(size.length)
    microbatches = size.global_batch // size.microbatch

    def batch(indices: list[int]) -> dict[str, Tensor]:
        return {k: v.to(bench.device) for k, v in default_collate([text[i] for i in indices]).items()}

    def step(number: int) -> None:
        indices = sample_indices(len(text), size.global_batch, data.seed, number)
        total = torch.zeros((), device=bench.device)
        optimizer.zero_grad()
        for start in range(0, size.global_batch, size.microbatch):
            with torch.autocast(bench.device.type, torch.bfloat16):
                loss = model(**batch(list(indices[start : start + size.microbatch]))).loss / microbatches
            loss.backward()
            total += loss.detach()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        float(total)

    return [bench.seconds(lambda n=n: step(n)) for n in range(1, count + 1)]  # type: ignore[misc]


def flops_per_token(size: Size, parameters: int) -> float:
    """Return the operations that the model needs for a token, forward and backward, without recomputation
    (PaLM, appendix B).
    """
    return 6.0 * parameters + 12.0 * size.layers * size.hidden * size.length


def train(bench: Bench, result: Result) -> None:
    """Measure tokens per second and MFU, of ftd and of a plain loop."""
    size = bench.size
    count = size.steps + SKIPPED
    with training(bench) as engine:
        layers = range(engine.model.layer_count)
        parameters = sum(p.numel() for _, p in engine.model.named_parameters(layers))
        ours_s = steps_s(bench, engine, count)[SKIPPED:]
    del engine
    bench.free()
    plain_s = plain_steps_s(bench, count)[SKIPPED:]
    tokens = size.global_batch * size.length
    peak = peak_flops(bench.data(), bench.device)
    result.data["train"] = {"parameters": parameters, "ours_s": ours_s, "plain_s": plain_s, "tokens": tokens}
    result.notes.append(f"train: {parameters / 1e6:.0f} million parameters, {tokens} tokens in a step")
    for who, taken in (("ftd", ours_s), ("plain loop", plain_s)):
        rate = tokens / statistics.median(taken)
        shown = f"{rate:,.0f} tokens/s"
        if peak is not None:
            mfu = rate * flops_per_token(size, parameters) / peak
            shown += f", MFU {mfu:.1%}"
            result.data["train"][f"mfu {who}"] = mfu
        result.rows.append((f"train, {who}", milliseconds(taken), shown))


def snapshot(bench: Bench, result: Result) -> None:
    """Measure steps with a snapshot after each and with none, in turns."""
    reports: list[SnapshotReport] = []
    taken: dict[bool, list[float]] = {False: [], True: []}
    with training(bench, reports) as engine:
        steps_s(bench, engine, SKIPPED)
        steps_s(bench, engine, SKIPPED, snaps=True)
        for _ in range(2):
            for snaps in (False, True):
                # The first step of a round still waits for work that the previous round started.
                taken[snaps] += steps_s(bench, engine, bench.size.steps + 1, snaps=snaps)[1:]
    failed = [report.detail for report in reports if isinstance(report, SnapshotFailed)]
    if failed:
        raise RuntimeError(f"a snapshot failed: {failed[0]}")
    done = [report for report in reports if isinstance(report, ShardWritten)]
    more = statistics.median(taken[True]) / statistics.median(taken[False]) - 1
    stall_s = tuple(1e3 * report.stall_s for report in done)
    result.rows.append(("step without snapshots", milliseconds(taken[False]), ""))
    result.rows.append(("step with a snapshot each", milliseconds(taken[True]), f"{more:+.1%}"))
    result.rows.append(("snapshot: stall of training", str(Summary(values=stall_s)), ""))
    result.data["snapshot"] = {
        "without_s": taken[False],
        "with_s": taken[True],
        "stall_s": [report.stall_s for report in done],
        "copy_s": [report.copy_s for report in done],
        "bytes": done[-1].size_bytes,
    }


def link(bench: Bench, result: Result) -> None:
    """Measure copies between the device and pinned host memory."""
    count = bench.size.copied_mib * MIB
    there = torch.zeros(count, dtype=torch.uint8, device=bench.device)
    here = bench.runtime.pinned(count, torch.uint8)
    peak = link_peak_gb_s()
    for name, target, source in (("device to host", here, there), ("host to device", there, here)):
        rates = [
            count / bench.seconds(lambda t=target, s=source: t.copy_(s, non_blocking=True)) / 1e9  # type: ignore[misc]
            for _ in range(6)
        ][1:]
        share = "" if peak is None else f"{statistics.median(rates) / peak:.0%} of PCIe's {peak:.1f} GB/s"
        result.rows.append((f"{name}, GB/s", str(Summary(values=tuple(rates))), share))
        result.data[f"link, {name}"] = {"gb_s": rates, "peak_gb_s": peak}


def link_peak_gb_s() -> float | None:
    """Return the PCIe bandwidth of this GPU in one direction, GB/s, if nvidia-smi reports it."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    query = "--query-gpu=pcie.link.gen.max,pcie.link.width.max"
    done = subprocess.run(
        [program, query, "--format=csv,noheader"], capture_output=True, text=True, check=False
    )
    found = re.match(r"\s*(\d+)\s*,\s*(\d+)", done.stdout)
    return _LANE_GB_S.get(int(found[1]), 0.0) * int(found[2]) or None if found else None


def xor(bench: Bench, result: Result) -> None:
    """Measure the parity of three tensors as snapshots make it: only the result crosses the link."""
    count = bench.size.copied_mib * MIB // 4
    sources = [torch.full((count,), n, dtype=torch.uint8, device=bench.device) for n in (1, 2, 4)]
    target = bench.runtime.pinned(count, torch.uint8).numpy()
    streams = SideStreams(lambda _: bench.runtime)
    streams.begin({bench.device})
    if bench.runtime.is_async:
        mover: Mover = DeviceMover(bench.device, streams)
        given: list[Source] = list(sources)
    else:
        mover, given = Mover(), [source.numpy() for source in sources]

    def work() -> None:
        mover.xor(target, given)
        mover.finish()

    rates = [3 * count / bench.seconds(work) / 1e9 for _ in range(6)][1:]
    if not np.array_equal(target[:MIB], np.full(MIB, 7, dtype=np.uint8)[: len(target[:MIB])]):
        raise RuntimeError("the parity is wrong")
    streams.close()
    result.rows.append(("XOR of three, GB/s read", str(Summary(values=tuple(rates))), ""))
    result.data["xor"] = {"gb_s": rates}


def kill(bench: Bench, result: Result) -> None:
    """Measure the time from the kill of a node to the next committed step, by phase."""
    # A killed node needs several seconds for its device's context before it takes part again.
    times, apart, nodes = (1, 20, 3) if bench.size is TINY else (5, 150, 3)
    with tempfile.TemporaryDirectory(prefix="ftd-bench-") as directory:
        name = "tiny.toml" if bench.size is TINY else "llama.toml"
        job = Path(directory) / name
        text = (REPOSITORY / "benchmarks/jobs" / name).read_text()
        text = re.sub(r'function = "(?!/)', f'function = "{REPOSITORY}/benchmarks/jobs/', text)
        job.write_text(text.replace("[training]\n", f'[training]\ndevice = "{bench.device.type}"\n'))
        faults = faults_of("kill", times, nodes, apart)
        # Nodes that share a device slow each other's health checks down.
        report = run_local(
            job,
            nodes=nodes,
            steps=(times + 1) * apart,
            faults=faults,
            environment={"FTD_HEALTH_MIN_SPEED": "0"},
        )
    recoveries = measured_recoveries(report, "kill")
    result.rows += [(f"kill, {phase}", taken_ms, "") for phase, taken_ms in phase_rows(recoveries)]
    result.data["kill"] = {"recoveries": recoveries}


def restore(bench: Bench, result: Result) -> None:
    """Measure loading layers with their optimizer's state from shared memory, as after a rollback."""
    staged = bench.memory / "staged"
    staged.mkdir()
    with training(bench) as engine:
        engine.step(lambda: False)
        layers, size_bytes = range(engine.model.layer_count), 0
        for layer in layers:
            header, payload = engine.states.pack(layer)
            here = bench.runtime.to_host(payload)
            size_bytes += here.numel()
            asyncio.run(StagingDirectory(staged).put(layer, header, here.numpy()))

        def take() -> None:
            with StagedStateLoader(staged, engine.states, lambda: None) as state:
                for layer in layers:
                    state.load_layer(layer)
                state.verify()

        rates = [size_bytes / bench.seconds(take) / 1e9 for _ in range(4)][1:]
    shutil.rmtree(staged)
    result.rows.append(("restore, GB/s", str(Summary(values=tuple(rates))), f"{size_bytes / 1e9:.2f} GB"))
    result.data["restore"] = {"gb_s": rates, "bytes": size_bytes}


def describe(device: torch.device) -> dict[str, Any]:
    """Return the device on which the figures were measured, and its host."""
    if device.type == "cpu":
        return {"device": "cpu"}
    properties = torch.cuda.get_device_properties(device)
    return {
        "device": torch.cuda.get_device_name(device),
        "memory_gib": round(properties.total_memory / 2**30, 1),
        "devices": torch.cuda.device_count(),
        "cuda": torch.version.cuda,
        "host": os.uname().nodename,
    }


def run() -> int:
    parser = command_line(__doc__)
    parser.add_argument("--parts", default=",".join(PARTS), help=f"of {', '.join(PARTS)}")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument(
        "--tiny", action="store_true", help="a tiny model and few repetitions, to test the code"
    )
    given = parser.parse_args()
    if unknown := set(given.parts.split(",")) - set(PARTS):
        parser.error(f"unknown parts: {', '.join(sorted(unknown))}; write some of {', '.join(PARTS)}")
    if given.device == "cuda" and not torch.cuda.is_available():
        sys.stderr.write(
            "There is no GPU that torch can use, so nothing was measured. Run this on a host with one (see nvidia-smi "
            "and docs/how-to/gpu.md); --device cpu --tiny runs the same code without useful figures.\n"
        )
        return NO_GPU_EXIT
    device = torch.device(given.device, 0) if given.device == "cuda" else torch.device("cpu")
    where = describe(device)
    size = TINY if given.tiny else BILLION
    result = Result(
        name="gpu",
        what=f"ftd on {where['device']}; milliseconds unless another unit is given (min / median / max)",
        columns=("what", "measured", "in other words"),
    )
    result.data["where"] = where
    name = (
        re.sub(r"[^A-Za-z0-9]+", "-", f"{where['device']}{'-tiny' if given.tiny else ''}").strip("-").lower()
    )
    out = given.out or RESULTS / "gpu" / f"{name}.json"
    failed = False
    with tempfile.TemporaryDirectory(prefix="ftd-bench-", dir="/dev/shm") as memory:
        bench = Bench(device=device, size=size, runtime=device_runtime(device), memory=Path(memory))
        for part in PARTS:
            if part not in given.parts.split(","):
                continue
            try:
                MEASURE[part](bench, result)
            except RuntimeError as error:
                result.notes.append(f"{part} failed: {error}")
                failed = True
            bench.free()
            save(result, where, out)
    return max(result.finish(out), failed)


def save(result: Result, where: dict[str, Any], out: Path) -> None:
    """Write what was measured so far, as JSON and as text."""
    result.save(out)
    table = [f"{result.what}\n{json.dumps(where)}\n"]
    table += [f"{what:36} {measured:>32}  {words}".rstrip() for what, measured, words in result.rows]
    out.with_suffix(".txt").write_text("\n".join([*table, *result.notes]) + "\n")


MEASURE: dict[str, Callable[[Bench, Result], None]] = {
    "train": train,
    "snapshot": snapshot,
    "link": link,
    "xor": xor,
    "kill": kill,
    "restore": restore,
}

if __name__ == "__main__":
    sys.exit(run())
