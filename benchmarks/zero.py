"""ZeRO-1 and AOR: what they save in memory, and what they cost in time.

One process for each owner of the same model, which is trained in three ways: everybody with the whole
optimizer state, with parts of it (zero1), and with parts and replicas of them on the host (aor). All of them
live at the same time and take turns of a few steps, so that they meet the same machine. Memory is what a
process has grown by (resident, free memory given back) from before its model was made until behind its steps.
Time is that of the slowest owner, and what all threads of all owners computed together, which other work on
the machine changes less.

On gloo a reduction is no cheaper than an all-reduce, and under ZeRO-1 gradients are all-reduced here anyway
(every owner must be able to roll forward), so gathering parameters comes on top: memory is saved, not time.

    python -m benchmarks.zero [--mib 64] [--owners 2] [--rounds 5]
"""

import asyncio
import ctypes
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import Limit, Result, Summary, command_line, main
from benchmarks.linear import SCRIPT
from ftd.node.rendezvous import RendezvousServer
from runtime.engine.engine import Engine
from runtime.groups.backends import make_communicator
from runtime.groups.store import Rendezvous
from runtime.watch.pace import Pace
from runtime.wire.protocol import PipelineData, Resume, StageData, TrainingData, WorldData
from runtime.zero.parts import everything

MIB = 1024 * 1024
WIDTH = 1024
WAYS = ("whole", "zero1", "aor")
STEPS = 3
"""Of one turn."""
TOKEN = "benchmark"


# --- an owner ------------------------------------------------------------------------------------


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def make(way: str, rank: int, owners: int, layers: int, rows: int, port: int, directory: str) -> Engine:
    engine = Engine(
        TrainingData(
            function="linear.py:build",
            path=directory,
            seed=1,
            steps=1_000_000,
            global_batch=rows * owners,
            microbatch_rows=rows,
            zero1=way != "whole",
            arguments={"layers": layers},
        ),
        torch.device("cpu"),
        Pace(),
    )
    world = WorldData(
        pipelines=tuple(
            PipelineData(
                stages=(StageData(first_layer=0, end_layer=layers, ranks=(number,)),),
                first_microbatch=number,
                microbatches=1,
            )
            for number in range(owners)
        ),
        transfers=(),
        hosts=("127.0.0.1",) * owners,
    )
    resume = Resume(
        generation=1,
        step=0,
        vote=None,
        rank=rank,
        world=WorldData(
            pipelines=world.pipelines, transfers=(), hosts=world.hosts, held_parts=everything(world)
        ),
        rendezvous_host="127.0.0.1",
        rendezvous_port=port,
        token=TOKEN,
        protection="aor" if way == "aor" else "none",
    )
    rendezvous = Rendezvous(host="127.0.0.1", port=port, token=TOKEN, generation=resume.generation)
    engine.settle(0, None)
    engine.enter(resume, make_communicator("gloo", rendezvous, rank, world.hosts, torch.device("cpu")))
    return engine


def work(way: str, rank: str, owners: str, layers: str, rows: str, port: str, directory: str) -> None:
    """Make as many steps as each line on stdin says, and say how long each took."""
    torch.set_num_threads(1)
    before_bytes = resident_bytes()
    engine = make(way, int(rank), int(owners), int(layers), int(rows), int(port), directory)
    for line in sys.stdin:
        taken_s = []
        begun_s = time.process_time()
        for _ in range(int(line)):
            started = time.perf_counter()
            engine.step(lambda: False)
            taken_s.append(time.perf_counter() - started)
        if engine.sharding is not None:
            engine.sharding.parts()
        computed_s = (time.process_time() - begun_s) / int(line)
        ctypes.CDLL("libc.so.6").malloc_trim(0)
        memory_bytes = resident_bytes() - before_bytes
        said = {"steps_s": taken_s, "computed_s": computed_s, "memory_bytes": memory_bytes}
        print(json.dumps(said), flush=True)


# --- all of them ---------------------------------------------------------------------------------


class Owners:
    """The processes that train in one way."""

    def __init__(self, way: str, count: int, layers: int, rows: int, port: int, directory: str) -> None:
        self._processes = [
            subprocess.Popen(
                [sys.executable, "-m", "benchmarks.zero", "--owner", way]
                + [str(one) for one in (rank, count, layers, rows, port)]
                + [directory],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(count)
        ]

    def steps(self, count: int) -> list[dict[str, Any]]:
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(f"{count}\n")
            process.stdin.flush()
        said = []
        for process in self._processes:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line:
                raise SystemExit(f"process {process.pid} ended; see above")
            said.append(json.loads(line))
        return said

    def close(self) -> None:
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.close()
        for process in self._processes:
            process.wait()


def serve() -> RendezvousServer:
    """One for each way: a server forms one generation after the other."""
    loop = asyncio.new_event_loop()
    server = RendezvousServer(TOKEN)
    loop.run_until_complete(server.start())
    threading.Thread(target=loop.run_forever, daemon=True).start()
    return server


def compare(result: Result, mib: int, owners: int, rounds: int, rows: int) -> None:
    parameter_bytes = WIDTH * (WIDTH + 1) * 4
    layers = max(2, mib * MIB // parameter_bytes)
    steps_s: dict[str, list[float]] = {way: [] for way in WAYS}
    computed_s: dict[str, list[float]] = {way: [] for way in WAYS}
    memory_bytes: dict[str, list[int]] = {}
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "linear.py").write_text(SCRIPT)
        running = {way: Owners(way, owners, layers, rows, serve().port, directory) for way in WAYS}
        for group in running.values():
            group.steps(2)
        for number in range(rounds):
            for way in WAYS[number % 3 :] + WAYS[: number % 3]:
                said = running[way].steps(STEPS)
                slowest = (max(times) for times in zip(*(one["steps_s"] for one in said), strict=True))
                steps_s[way].append(statistics.median(slowest))
                computed_s[way].append(sum(one["computed_s"] for one in said))
                memory_bytes[way] = [one["memory_bytes"] for one in said]
        for group in running.values():
            group.close()
    for way in WAYS:
        memory = max(memory_bytes[way]) / MIB
        result.rows.append(
            (
                way,
                f"{memory:.0f} MiB",
                f"{memory * MIB / max(memory_bytes['whole']):.2f}",
                str(Summary(values=tuple(1e3 * s for s in steps_s[way]))),
                ratios(steps_s[way], steps_s["whole"]),
                ratios(computed_s[way], computed_s["whole"]),
            )
        )
    result.data |= {
        "steps_s": steps_s,
        "computed_s": computed_s,
        "memory_bytes": memory_bytes,
        "layers": layers,
        "owners": owners,
    }
    result.notes.append(
        f"{layers} layers, {layers * parameter_bytes / MIB:.0f} MiB of parameters, AdamW, {owners} owners, "
        f"{rounds} turns of {STEPS} steps; the ratio is of neighbouring turns"
    )
    saved = (max(memory_bytes["whole"]) - max(memory_bytes["zero1"])) / (layers * parameter_bytes)
    expected = 2 * (owners - 1) / owners
    result.notes.append(
        f"zero1 saves {saved:.2f} times the parameters; its optimizer state alone would be {expected:.2f}"
    )
    result.limits.append(
        Limit(
            name="saved, of the optimizer state of others",
            measured=saved / expected,
            limit=0.8,
            at_least=True,
        )
    )


def ratios(mine_s: list[float], whole_s: list[float]) -> str:
    """Of neighbouring turns."""
    found = [mine / whole for mine, whole in zip(mine_s, whole_s, strict=True)]
    return f"{min(found):.2f} / {statistics.median(found):.2f} / {max(found):.2f}"


def run() -> None:
    if sys.argv[1:2] == ["--owner"]:
        work(*sys.argv[2:])
        return
    parser = command_line(__doc__)
    parser.add_argument("--mib", type=int, default=64, help="of parameters")
    parser.add_argument("--owners", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rows", type=int, default=64, help="of each owner's microbatch")
    arguments = parser.parse_args()
    result = Result(
        name="zero",
        what="Optimizer state in parts, and their replicas",
        columns=(
            "",
            "memory of an owner",
            "of whole",
            "step, ms: min / median / max",
            "of whole",
            "computing, of whole",
        ),
    )
    compare(result, arguments.mib, arguments.owners, arguments.rounds, arguments.rows)
    main(result, arguments.out)


if __name__ == "__main__":
    run()
