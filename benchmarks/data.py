"""Slow data sets: how much of 20 ms per sample do worker processes hide from the step?

Three engines train the same model alone, in alternating rounds in one process: on a data set whose samples
are available at once, on one that needs 20 ms for each and is read by the trainer itself, and on the same
with workers that prefetch. Every sample is a picture (600 KB as float32), so the time that a batch takes
from a worker to the trainer counts as well. By default a sample *waits* 20 ms, as for a network file
system; with ``--busy`` it computes, as a decoder does, which workers can hide only on cores that the
trainer leaves idle.

    python -m benchmarks.data [--workers 4] [--decode-ms 20] [--rounds 4] [--busy]
"""

import os
import statistics
import tempfile
import time
from pathlib import Path

import torch

from benchmarks.common import Limit, Result, Summary, command_line, main
from benchmarks.engines import enter_alone
from runtime.engine.engine import Engine
from runtime.monitoring.progress import ProgressMonitor
from statemachine.messages.trainer import TrainingData

STEPS = 6
"""Number of steps of a round; the first does not count, as the queue is full after a pause."""
GLOBAL_BATCH, MICROBATCH = 8, 4
SCRIPT = """
import time
import torch
from torch import nn
from torch.nn import functional
from runtime.training import Training

class Pictures:
    def __init__(self, decode_ms, busy):
        self.decode_ms, self.busy = decode_ms, busy

    def __len__(self): return 10_000

    def __getitem__(self, index):
        end = time.perf_counter() + self.decode_ms / 1000
        if not self.busy and self.decode_ms:
            time.sleep(self.decode_ms / 1000)
        while time.perf_counter() < end:
            pass
        return torch.full((3, 224, 224), index / 10_000), index % 10

def build(decode_ms: float, busy: bool):
    return Training(
        layers=[
            nn.Sequential(nn.Conv2d(3, 16, 3, stride=2), nn.ReLU(), nn.Conv2d(16, 32, 3, stride=2), nn.ReLU()),
            nn.Sequential(nn.Conv2d(32, 64, 3, stride=2), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()),
            nn.Linear(64, 10),
        ],
        loss=functional.cross_entropy, dataset=Pictures(decode_ms, busy),
        optimizer=lambda named: torch.optim.AdamW([p for _, p in named], lr=1e-4),
    )
"""


def alone(directory: Path, decode_ms: float, busy: bool, workers: int) -> Engine:
    """Return an engine that trains alone."""
    data = TrainingData(
        function="pictures.py:build",
        path=str(directory),
        seed=1,
        steps=1_000_000,
        global_batch=GLOBAL_BATCH,
        microbatch_rows=MICROBATCH,
        data_workers=workers,
        arguments={"decode_ms": decode_ms, "busy": busy},
    )
    engine = Engine(data, torch.device("cpu"), ProgressMonitor())
    enter_alone(engine)
    return engine


def steps_of(engine: Engine) -> list[float]:
    """Return the milliseconds of each step of one round."""
    steps_ms = []
    for number in range(STEPS):
        started = time.perf_counter()
        engine.step(lambda: False)
        if number:
            steps_ms.append(1e3 * (time.perf_counter() - started))
    return steps_ms


def run() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--workers", type=int, default=4, help="processes that read ahead")
    parser.add_argument("--decode-ms", type=float, default=20.0, help="time that a sample takes")
    parser.add_argument("--rounds", type=int, default=4, help="rounds of each kind")
    parser.add_argument("--busy", action="store_true", help="samples compute instead of waiting")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    kinds = {
        "no decode": (0.0, 0),
        "decode in the trainer": (arguments.decode_ms, 0),
        f"decode in {arguments.workers} workers": (arguments.decode_ms, arguments.workers),
    }
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "pictures.py").write_text(SCRIPT)
        engines = {
            kind: alone(Path(directory), decode_ms, arguments.busy, workers)
            for kind, (decode_ms, workers) in kinds.items()
        }
        steps_ms: dict[str, list[float]] = {kind: [] for kind in kinds}
        for engine in engines.values():
            steps_of(engine)
        for _ in range(arguments.rounds):
            for kind, engine in engines.items():
                steps_ms[kind] += steps_of(engine)
    what = "computes" if arguments.busy else "waits"
    result = Result(
        name="data",
        what=f"Steps of {GLOBAL_BATCH} samples, each of which {what} {arguments.decode_ms:g} ms",
        columns=("", "step, ms", "over no decode"),
    )
    without, slow, prefetched = (statistics.median(times) for times in steps_ms.values())
    for kind, times in steps_ms.items():
        ratio = statistics.median(times) / without
        result.rows.append((kind, str(Summary(values=tuple(times))), f"{ratio:.2f}"))
    result.data = {"steps_ms": steps_ms, "workers": arguments.workers, "busy": arguments.busy}
    hidden = (slow - prefetched) / (slow - without)
    result.notes.append(f"{hidden:.0%} of the decoding is hidden; {os.cpu_count()} cores")
    if not arguments.busy:  # With --busy, the result depends on the number of cores.
        result.limits.append(
            Limit(name="step with workers over step without decode", measured=prefetched / without, limit=1.1)
        )
    main(result, arguments.out)


if __name__ == "__main__":
    run()
