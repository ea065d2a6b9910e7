"""Fifty reconfigurations in one run: does the use of file descriptors, threads, shared memory or memory grow?

    python -m benchmarks.reconfigurations --times 25

Each time the trainer of one node is SIGKILLed, which reconfigures the others twice (without it, and with it
again). The benchmark monitors the coordinator, and the daemon and trainer of a node that no fault hits. It
compares a calm period before the first fault with one after the last fault. Threads that an abandoned gloo
operation still holds end within its timeout (30 s), so the second period is longer.
"""

import argparse
import json
import os
import statistics
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks.clusters import FTD, REPOSITORY, toml_table
from benchmarks.common import Limit, Result, command_line, main

CALM_BEFORE_STEPS = 60
APART_STEPS = 25
CALM_AFTER_STEPS = 500
SAMPLE_S = 0.5
WATCHED_NODE = "node-0"
GROWTH = {"fds": 0.0, "threads": 0.0, "memory_mib": 16.0}
"""Largest growth of each figure that still counts as noise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    at_s: float
    fds: int
    threads: int
    memory_mib: float


def sample(pid: int) -> Sample | None:
    """Return the resources that process ``pid`` holds now; ``None`` when it has ended."""
    try:
        fds = len(list(Path(f"/proc/{pid}/fd").iterdir()))
        status = dict(
            line.split(":\t", 1)
            for line in Path(f"/proc/{pid}/status").read_text().splitlines()
            if ":\t" in line
        )
    except (OSError, ValueError):
        return None
    memory = int(status["VmRSS"].split()[0]) / 1024
    return Sample(at_s=time.monotonic(), fds=fds, threads=int(status["Threads"]), memory_mib=memory)


def children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def watched(root: int) -> dict[str, int]:
    """Return name → pid of the processes to monitor, below ``ftd local``; empty until all of them have started."""
    found: dict[str, int] = {}
    for pid in children(root):
        command = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
        if "coordinator.toml" in command:
            found["coordinator"] = pid
        if f"{WATCHED_NODE}.toml" in command:
            found["daemon"] = pid
            zygotes = children(pid)
            trainers = children(zygotes[0]) if zygotes else []
            if trainers:
                found["trainer"] = trainers[0]
    return found if len(found) == 3 else {}


def shared_memory() -> int:
    return len(list(Path("/dev/shm").iterdir()))


def run(times: int, job: Path) -> tuple[dict[str, list[Sample]], list[int], dict[str, object]]:
    faults = [
        {"at_step": CALM_BEFORE_STEPS + n * APART_STEPS, "do": "kill", "node": "node-1", "target": "trainer"}
        for n in range(times)
    ]
    steps = CALM_BEFORE_STEPS + times * APART_STEPS + CALM_AFTER_STEPS
    samples: dict[str, list[Sample]] = {}
    shm = [shared_memory()]
    with tempfile.TemporaryDirectory(prefix="ftd-bench-") as directory:
        scenario, report = Path(directory) / "scenario.toml", Path(directory) / "report.json"
        scenario.write_text("\n".join(toml_table(fault) for fault in faults))
        process = subprocess.Popen(
            [FTD, "local", job, "--nodes", "3", "--steps", str(steps), "--broker", "mosquitto",
             "--chaos", scenario, "--report", report, "--no-view"],
            cwd=REPOSITORY, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.DEVNULL,
        )  # fmt: skip
        while process.poll() is None:
            for name, pid in watched(process.pid).items():
                taken = sample(pid)
                if taken is not None:
                    samples.setdefault(name, []).append(taken)
            time.sleep(SAMPLE_S)
        if process.returncode != 0:
            raise RuntimeError(f"ftd local ended with {process.returncode}")
        document = json.loads(report.read_text())
    shm.append(shared_memory())
    return samples, shm, document


def growth(samples: list[Sample], figure: str) -> tuple[float, float]:
    """Return medians of the calm periods: the second sixteenth of the run, and the last tenth."""
    values = [float(getattr(taken, figure)) for taken in samples]
    before = values[len(values) // 16 : len(values) // 8] or values[:1]
    return statistics.median(before), statistics.median(values[-len(values) // 10 :])


def measure(arguments: argparse.Namespace) -> Result:
    samples, shm, report = run(arguments.times, arguments.job)
    recoveries = report["recoveries"]
    assert isinstance(recoveries, list)
    result = Result(
        name="reconfigurations",
        what=f"{len(recoveries)} reconfigurations in one run: what each process holds before and after",
        columns=("process", "figure", "before", "after"),
    )
    for name, taken in sorted(samples.items()):
        for figure, allowed in GROWTH.items():
            before, after = growth(taken, figure)
            result.rows.append((name, figure, f"{before:.0f}", f"{after:.0f}"))
            result.limits.append(Limit(name=f"{name}: more {figure}", measured=after - before, limit=allowed))
    result.limits.append(Limit(name="files left in /dev/shm", measured=shm[1] - shm[0], limit=0))
    result.limits.append(
        Limit(name="reconfigurations", measured=len(recoveries), limit=2 * arguments.times, at_least=True)
    )
    result.data = {
        name: [(round(s.at_s, 1), s.fds, s.threads, round(s.memory_mib, 1)) for s in taken]
        for name, taken in samples.items()
    }
    return result


if __name__ == "__main__":
    parser = command_line(__doc__)
    parser.add_argument("--times", type=int, default=25, help="faults; each reconfigures twice")
    parser.add_argument("--job", type=Path, default=REPOSITORY / "benchmarks/jobs/tiny.toml")
    parsed = parser.parse_args()
    main(measure(parsed), parsed.out)
