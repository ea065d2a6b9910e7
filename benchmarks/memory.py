"""The most memory that each trainer has from the start of a job, measuring the model included, through some steps.

    python -m benchmarks.memory                        # a llama of about 200 million parameters on four nodes

A trainer is to have memory for its own stage, not for the model: parameters, gradients and the optimizer's state,
16 bytes for each parameter, and activations, which are not counted here. The job is planned for devices that hold a
little more than a quarter of the model, so that four nodes are one pipeline. The peak is what the kernel noted of
each process (``VmHWM``); what a trainer has before it knows of a job, which is code of Python, torch and
transformers, is its *base*.
"""

import argparse
import re
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.clusters import REPOSITORY, Report, run_local
from benchmarks.common import Limit, Result, command_line, main

JOBS = REPOSITORY / "benchmarks/jobs"
HIDDEN, LAYERS, VOCABULARY = 1024, 11, 32000
BYTES_PER_PARAMETER = 16
"""A parameter, its gradient, and two moments of Adam, in float32."""
DEVICE_MIB = 1400
NODES = 4
STEPS = 5
LIMIT = 1.35
_SAMPLE_S = 0.1


def parameters_of(first_layer: int, end_layer: int) -> int:
    """Return the number of parameters of a stage: embeddings are layer 0, norm and head the last layer."""
    block = 4 * HIDDEN**2 + 3 * HIDDEN * (HIDDEN * 8 // 3 // 64 * 64) + 2 * HIDDEN
    sizes = [VOCABULARY * HIDDEN, *[block] * LAYERS, HIDDEN + VOCABULARY * HIDDEN]
    return sum(sizes[first_layer:end_layer])


@dataclass(slots=True)
class Watched:
    """The memory of the trainers of one node."""

    base_mib: float = 0.0
    peak_mib: float = 0.0


@dataclass(slots=True)
class Watch:
    """Notes the peak of every trainer below this process, until it is stopped."""

    nodes: dict[str, Watched] = field(default_factory=dict)
    _stop: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        while not self._stop.wait(_SAMPLE_S):
            for status in Path("/proc").glob("[0-9]*/status"):
                try:
                    self._note(status.parent)
                except (OSError, ValueError):
                    continue  # It has ended.

    def stop(self) -> None:
        self._stop.set()

    def _note(self, process: Path) -> None:
        """Note a process that was forked by the zygote of a node."""
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
    """:raises ValueError: the process has no such number any more."""
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


def stages(report: Report) -> dict[str, int]:
    """Return the parameters of each node's stage."""
    return {
        device.partition("/")[0]: parameters_of(stage["first_layer"], stage["end_layer"])
        for pipeline in report["start"]["pipelines_after"]
        for stage in pipeline["stages"]
        for device in stage["devices"]
    }


def measure() -> Result:
    watch = Watch()
    watching = threading.Thread(target=watch.run, daemon=True)
    watching.start()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="ftd-memory-") as directory:
        report = run_local(job_file(Path(directory)), nodes=NODES, steps=STEPS, faults=[])
    watch.stop()
    watching.join()
    result = Result(
        name="memory",
        what=f"A llama of {parameters_of(0, LAYERS + 2) / 1e6:.0f} million parameters in one pipeline of {NODES} "
        f"nodes, {STEPS} steps, {time.monotonic() - began:.0f} s; MiB of each trainer",
        columns=("node", "base", "peak", "state of its stage", "(peak − base) / state"),
    )
    ratios = []
    for node, parameters in sorted(stages(report).items()):
        watched = watch.nodes[node]
        stage_mib = parameters * BYTES_PER_PARAMETER / 2**20
        ratio = (watched.peak_mib - watched.base_mib) / stage_mib
        ratios.append(ratio)
        result.rows.append(
            (node, f"{watched.base_mib:.0f}", f"{watched.peak_mib:.0f}", f"{stage_mib:.0f}", f"{ratio:.2f}")
        )
        result.data[node] = {
            "base_mib": watched.base_mib, "peak_mib": watched.peak_mib, "stage_mib": stage_mib, "ratio": ratio,
        }  # fmt: skip
    result.limits = [
        Limit(name="peak over the stage's state, worst", measured=max(ratios), limit=LIMIT),
    ]
    return result


def parse() -> argparse.Namespace:
    return command_line(__doc__).parse_args()


if __name__ == "__main__":
    main(measure(), parse().out)
