"""Peak memory of each trainer from the start of a job, including the measurement of the model, through a few steps.

    python -m benchmarks.memory                        # a llama of about 200 million parameters, four nodes

A trainer should need memory for its own stage, not for the whole model: what the plan states for its
parameters, gradients, optimizer state (16 bytes for each parameter), and the activations of the
microbatches in flight, as a profile made here measures them. The job is planned for devices that hold a
little more than a quarter of the model, so that four nodes form one pipeline. The peak is the kernel's
figure for each process (``VmHWM``). The memory of a trainer before it knows of a job, which is code of
Python, torch and transformers, is its *base*. The run has no reconfigurations.
"""

import argparse
import re
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from benchmarks.clusters import REPOSITORY, Report, run_local
from benchmarks.common import Limit, Result, command_line, main
from ftd.config.job import load_job_data
from planner.stages.memory import MemoryModel, StageMemory
from planner.values import ModelProfile, Policy
from runtime.layers.model import Model
from runtime.profiling.layer_profile import profile_model as measure_model
from runtime.training import load_training
from statemachine.messages.trainer import TrainingData

JOBS = REPOSITORY / "benchmarks/jobs"
HIDDEN, LAYERS, VOCABULARY = 1024, 11, 32000
DEVICE_MIB = 1400
NODES = 4
STEPS = 5
LIMIT = 1.35
PLAN_LIMIT = 0.15
"""Largest allowed relative error of the plan."""
_SAMPLE_S = 0.1


def parameters_of(first_layer: int, end_layer: int) -> int:
    """Return the number of parameters of a stage: embeddings are layer 0, norm and head the last layer."""
    block = 4 * HIDDEN**2 + 3 * HIDDEN * (HIDDEN * 8 // 3 // 64 * 64) + 2 * HIDDEN
    sizes = [VOCABULARY * HIDDEN, *[block] * LAYERS, HIDDEN + VOCABULARY * HIDDEN]
    return sum(sizes[first_layer:end_layer])


@dataclass(slots=True)
class Watched:
    """Memory of the trainers of one node, in MiB."""

    base_mib: float = 0.0
    peak_mib: float = 0.0


@dataclass(slots=True)
class Watch:
    """Monitor that records the peak of every trainer below this process until it is stopped."""

    nodes: dict[str, Watched] = field(default_factory=dict)
    _stop: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        while not self._stop.wait(_SAMPLE_S):
            for status in Path("/proc").glob("[0-9]*/status"):
                try:
                    self._record(status.parent)
                except (OSError, ValueError):
                    continue  # The process has ended.

    def stop(self) -> None:
        self._stop.set()

    def _record(self, process: Path) -> None:
        """Record a process that the zygote of a node has forked."""
        if b"runtime.process.zygote" not in (process / "cmdline").read_bytes():
            return
        parent = Path("/proc") / _number(process, "PPid")
        node = re.search(rb"(node-\d+)", (parent / "cmdline").read_bytes())
        if node is not None:
            watched = self.nodes.setdefault(node[1].decode(), Watched())
            watched.base_mib = max(watched.base_mib, int(_number(process, "VmRSS")) / 1024)
            return
        if b"runtime.process.zygote" not in (parent / "cmdline").read_bytes():
            return
        node = re.search(rb"(node-\d+)", (Path("/proc") / _number(parent, "PPid") / "cmdline").read_bytes())
        if node is not None:
            watched = self.nodes.setdefault(node[1].decode(), Watched())
            watched.peak_mib = max(watched.peak_mib, int(_number(process, "VmHWM")) / 1024)


def _number(process: Path, name: str) -> str:
    """Return a number from the status of a process.

    :raises ValueError: the status has no such number, as the process is ending.
    """
    found = re.search(rf"^{name}:\s+(\d+)", (process / "status").read_text(), re.MULTILINE)
    if found is None:
        raise ValueError(name)
    return found[1]


def job_file(directory: Path) -> Path:
    text = (JOBS / "llama.toml").read_text()
    text = text.replace("llama.py:build", f"{JOBS}/llama.py:build").replace("failures = 1", "failures = 0")
    text = text.replace(
        "seed = 1",
        f"seed = 1\narguments = {{ hidden = {HIDDEN}, layers = {LAYERS}, vocabulary = {VOCABULARY} }}",
    )
    path = directory / "llama.toml"
    path.write_text(f"{text}\n[planner]\ndevice_memory_mib = {DEVICE_MIB}\n")
    return path


def planned(report: Report, job: Path) -> dict[str, StageMemory]:
    """Return the memory that the plan states for each node's device, from a profile that is made now."""
    submitted = load_job_data(job)
    training = msgspec.convert(submitted.training, TrainingData)
    model = Model(load_training(training), training, verified=True)
    measured = measure_model(model, training, devices_per_node=1, progress=lambda _done, _all: None)
    profile = msgspec.convert(msgspec.to_builtins(measured.profile), ModelProfile)
    policy = submitted.policy
    memory = MemoryModel(
        profile, Policy(global_batch=policy.global_batch, microbatch_rows=policy.microbatch_rows)
    )
    [pipeline] = report["start"]["pipelines_after"]
    found = {}
    for number, stage in enumerate(pipeline["stages"]):
        [device] = stage["devices"]
        found[device.partition("/")[0]] = memory.breakdown(
            stage["first_layer"],
            stage["end_layer"],
            1,
            len(pipeline["stages"]) - 1 - number,
            "none",
        )
    return found


def measure() -> Result:
    watch = Watch()
    watching = threading.Thread(target=watch.run, daemon=True)
    watching.start()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="ftd-memory-") as directory:
        job = job_file(Path(directory))
        report = run_local(job, nodes=NODES, steps=STEPS, faults=[])
        took_s = time.monotonic() - began
        watch.stop()
        watching.join()
        plan = planned(report, job)
    result = Result(
        name="memory",
        what=f"A llama of {parameters_of(0, LAYERS + 2) / 1e6:.0f} million parameters in one pipeline of {NODES} "
        f"nodes, {STEPS} steps, {took_s:.0f} s; MiB of each trainer",
        columns=("node", "base", "peak", "state of its stage", "activations", "(peak − base) / planned"),
    )
    ratios = []
    for node, needed in sorted(plan.items()):
        watched = watch.nodes[node]
        activations_mib, planned_mib = needed.activations / 2**20, needed.total / 2**20
        ratio = (watched.peak_mib - watched.base_mib) / planned_mib
        ratios.append(ratio)
        result.rows.append(
            (
                node, f"{watched.base_mib:.0f}", f"{watched.peak_mib:.0f}", f"{planned_mib - activations_mib:.0f}",
                f"{activations_mib:.0f}", f"{ratio:.2f}",
            )
        )  # fmt: skip
        result.data[node] = {
            "base_mib": watched.base_mib, "peak_mib": watched.peak_mib, "planned_mib": planned_mib,
            "activations_mib": activations_mib, "ratio": ratio,
        }  # fmt: skip
    error = max(abs(ratio - 1) for ratio in ratios)
    result.limits = [
        Limit(name="peak over the stage's state and activations, worst", measured=max(ratios), limit=LIMIT),
        Limit(name="error of the plan, worst", measured=error, limit=PLAN_LIMIT),
    ]
    return result


def parse() -> argparse.Namespace:
    return command_line(__doc__).parse_args()


if __name__ == "__main__":
    main(measure(), parse().out)
