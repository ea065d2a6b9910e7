"""Overhead of the engine while nothing fails, against a plain loop and against torch DDP.

    python -m benchmarks.overhead --rounds 3

All of them train with the same model, data, microbatches and optimizer. Rounds alternate, so that a slow
minute of a shared machine affects both sides; a figure is the median step of a round without its first
steps.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from itertools import pairwise
from pathlib import Path

import msgspec

from benchmarks.clusters import REPOSITORY, run_local
from benchmarks.common import Limit, Result, Summary, command_line, main
from benchmarks.peers.torchft import free_port
from ftd.config.job import load_job

SKIP_STEPS = 10


def yardstick_ms(training: Path, steps: int, ranks: int) -> float:
    """Return the median milliseconds of a step of the plain loop (one rank) or of torch DDP (several ranks)."""
    port = free_port()
    workers = [
        subprocess.Popen(
            [sys.executable, "-m", "benchmarks.peers.loop_worker", "--training", training,
             "--steps", str(steps), "--rank", str(rank), "--ranks", str(ranks), "--port", str(port)],
            cwd=REPOSITORY, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE, text=True,
        )
        for rank in range(ranks)
    ]  # fmt: skip
    printed = [worker.communicate(timeout=600)[0] for worker in workers]
    if any(worker.returncode for worker in workers):
        raise RuntimeError("a worker of the plain loop failed; its error is above")
    moments = [float(line.split()[2]) for line in printed[0].splitlines() if line.startswith("STEP ")]
    steps_s = [after - before for before, after in pairwise(moments[SKIP_STEPS:])]
    return statistics.median(steps_s) * 1e3


def ftd_ms(job: Path, steps: int, nodes: int) -> float:
    """Return the median milliseconds from commit to commit of ``ftd local`` on ``nodes`` one-device nodes."""
    report = run_local(job, nodes=nodes, steps=steps, faults=[])
    return 1e3 * statistics.median(
        float(step["step_s"]) for step in report["steps"][SKIP_STEPS:] if step["step_s"]
    )


def measure(arguments: argparse.Namespace) -> Result:
    measured: dict[str, list[float]] = {"plain": [], "ftd-1": [], "ddp-2": [], "ftd-2": []}
    with tempfile.TemporaryDirectory(prefix="ftd-bench-") as directory:
        training = Path(directory) / "training.json"
        training.write_bytes(msgspec.json.encode(load_job(arguments.job).training))
        for _ in range(arguments.rounds):
            measured["plain"].append(yardstick_ms(training, arguments.steps, 1))
            measured["ftd-1"].append(ftd_ms(arguments.job, arguments.steps, 1))
            measured["ddp-2"].append(yardstick_ms(training, arguments.steps, 2))
            measured["ftd-2"].append(ftd_ms(arguments.job, arguments.steps, 2))
    names = {
        "plain": "plain loop, one process",
        "ftd-1": "ftd, one node, one stage",
        "ddp-2": "torch DDP, two processes",
        "ftd-2": "ftd, two one-stage pipelines",
    }
    result = Result(
        name="overhead",
        what=f"Milliseconds of a step, {arguments.rounds} rounds (min / median / max of the rounds)",
        columns=("what", "ms a step", "against"),
    )
    ratios = {
        "ftd-1": paired_ratio(measured["ftd-1"], measured["plain"]),
        "ftd-2": paired_ratio(measured["ftd-2"], measured["ddp-2"]),
    }
    for key, name in names.items():
        against = f"{ratios[key]:.3f} × the row above" if key in ratios else ""
        result.rows.append((name, str(Summary(values=tuple(measured[key]))), against))
    result.data = {"step_ms": measured, "ratios": ratios}
    result.limits = [
        Limit(
            name="step of DDP, ms", measured=statistics.median(measured["ddp-2"]), limit=100, at_least=True
        ),
        Limit(name="two one-stage pipelines / DDP", measured=ratios["ftd-2"], limit=1.10),
    ]
    return result


def paired_ratio(ours: list[float], theirs: list[float]) -> float:
    """Return the median of the ratios of the rounds."""
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))


if __name__ == "__main__":
    parser = command_line(__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--job", type=Path, default=REPOSITORY / "benchmarks/jobs/steady.toml")
    parsed = parser.parse_args()
    main(measure(parsed), parsed.out)
