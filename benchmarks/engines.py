"""Engines for benchmarks, without a cluster: one that trains alone, or one in each process of a group.

Groups of processes that train the same model in different ways run at the same time and take turns of a few
steps, so that they share the same conditions on the machine.
"""

import asyncio
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import Result, command_line, main, milliseconds
from benchmarks.linear import write_script
from ftd.node.rendezvous import RendezvousServer
from planner.values import Recompute
from runtime.allocator import give_back_memory
from runtime.engine.engine import Engine
from runtime.groups.backends import make_communicator
from runtime.groups.communicator import SoloCommunicator
from runtime.groups.store import Rendezvous
from runtime.snapshots.writer import SnapshotWriter, usable_hash_threads
from runtime.zero.parts import initial_holdings
from statemachine.messages.trainer import ResumeRank, SnapshotReport, WorldData, WorldPipeline, WorldStage

WIDTH = 1024
"""Input and output features of the linear layers that groups of processes train."""
PARAMETER_BYTES = WIDTH * (WIDTH + 1) * 4
"""Bytes of the parameters of one of these layers, in float32."""
MIB = 1024 * 1024
STEPS = 3
"""Number of steps of one turn."""
_TOKEN = "benchmark"


# --- alone ---------------------------------------------------------------------------------------


def enter_alone(engine: Engine, recompute: Recompute = "none") -> None:
    """Make an engine train all layers alone from now on."""
    data = engine.data
    stage = WorldStage(first_layer=0, end_layer=engine.model.layer_count, ranks=(0,), recompute=recompute)
    count = data.global_batch // data.microbatch_rows
    pipeline = WorldPipeline(stages=(stage,), first_microbatch=0, microbatches=count)
    world = WorldData(pipelines=(pipeline,), transfers=(), hosts=("127.0.0.1",))
    engine.commit_or_discard(0, None)
    engine.enter(
        ResumeRank(
            generation=1,
            step=0,
            vote=None,
            rank=0,
            world=world,
            rendezvous_host="",
            rendezvous_port=0,
            token="",
            nodes=("here",),
        ),
        SoloCommunicator(),
    )


def keep_snapshots(engine: Engine, directory: Path, reports: list[SnapshotReport]) -> None:
    """Make an engine take snapshots into an arena.

    :param reports: list to which the snapshots' reports are appended.
    """
    engine.snapshots = SnapshotWriter(
        job_id="benchmark",
        directory=directory,
        limit_bytes=None,
        states=engine.states,
        model=engine.model,
        sharding=engine.sharding,
        monitor=engine.monitor,
        report=reports.append,
        hash_threads=usable_hash_threads(devices=1),
    )


# --- one in each process -------------------------------------------------------------------------


def enter_group(
    engine: Engine, pipelines: tuple[WorldPipeline, ...], rank: int, port: int, protection: str = "none"
) -> None:
    """Make an engine train with the other processes of its group on this host.

    :param port: port of the rendezvous.
    """
    count = sum(len(stage.ranks) for pipeline in pipelines for stage in pipeline.stages)
    world = WorldData(pipelines=pipelines, transfers=(), hosts=("127.0.0.1",) * count)
    resume = ResumeRank(
        generation=1,
        step=0,
        vote=None,
        rank=rank,
        world=WorldData(
            pipelines=world.pipelines, transfers=(), hosts=world.hosts, held_parts=initial_holdings(world)
        ),
        rendezvous_host="127.0.0.1",
        rendezvous_port=port,
        token=_TOKEN,
        protection=protection,
    )
    rendezvous = Rendezvous(host="127.0.0.1", port=port, token=_TOKEN, generation=resume.generation)
    engine.commit_or_discard(0, None)
    engine.enter(resume, make_communicator("gloo", rendezvous, rank, world.hosts, engine.model.runtime))


def _run_member(make: Callable[[], Engine], more: Callable[[Engine], dict[str, Any]]) -> None:
    """Run one process of a group: make as many steps as each line on stdin asks for, and print their times as JSON.

    :param more: returns more fields to print after each turn; its time counts.
    """
    torch.set_num_threads(1)
    before_bytes = resident_bytes()
    engine = make()
    for line in sys.stdin:
        steps_s = []
        began_s = time.process_time()
        for _ in range(int(line)):
            started = time.perf_counter()
            engine.step(lambda: False)
            steps_s.append(time.perf_counter() - started)
        answer = more(engine)
        computed_s = (time.process_time() - began_s) / int(line)
        memory_bytes = resident_bytes() - before_bytes
        answer |= {"steps_s": steps_s, "computed_s": computed_s, "memory_bytes": memory_bytes}
        print(json.dumps(answer), flush=True)


def resident_bytes() -> int:
    """Return the resident bytes of this process after it has returned freed memory to the system."""
    give_back_memory()
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


class _Group:
    """Processes that train in one way."""

    def __init__(
        self, module: str, way: str, count: int, layers: int, rows: int, port: int, directory: str
    ) -> None:
        self._processes = [
            subprocess.Popen(
                [sys.executable, "-m", module, "--rank", str(rank), way]
                + [str(one) for one in (count, layers, rows, port)]
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
        answers = []
        for process in self._processes:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line:
                raise SystemExit(f"process {process.pid} ended; see above")
            answers.append(json.loads(line))
        return answers

    def close(self) -> None:
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.close()
        for process in self._processes:
            process.wait()


def _serve() -> RendezvousServer:
    """Start a rendezvous server; each way needs its own, as a server forms generations one after the other."""
    loop = asyncio.new_event_loop()
    server = RendezvousServer(_TOKEN)
    loop.run_until_complete(server.start())
    threading.Thread(target=loop.run_forever, daemon=True).start()
    return server


@dataclass(slots=True)
class Turns:
    """Measurements of the processes that train in one way."""

    steps_s: list[float] = field(default_factory=list)
    """Median step of the slowest process, seconds, for each turn."""
    computed_s: list[float] = field(default_factory=list)
    """CPU seconds of a step summed over all processes, for each turn."""
    last: list[dict[str, Any]] = field(default_factory=list)
    """Answers of all processes after the last turn."""

    @property
    def memory_bytes(self) -> list[int]:
        """Bytes by which each process has grown."""
        return [one["memory_bytes"] for one in self.last]

    def times_against(self, other: "Turns") -> tuple[str, str, str]:
        """Return cells of a table: milliseconds of a step, and ratios of step time and of CPU time to another way's."""
        return (
            milliseconds(self.steps_s),
            _ratios(self.steps_s, other.steps_s),
            _ratios(self.computed_s, other.computed_s),
        )


def _take_turns(
    module: str, ways: Sequence[str], *, count: int, layers: int, rows: int, rounds: int
) -> dict[str, Turns]:
    """Make one group of ``count`` processes for each way train in turns.

    :param module: module that each process runs, with ``--rank``, the rank, the way, ``count``, ``layers``,
        ``rows``, the port of the rendezvous and the directory of the script.
    """
    turns = {way: Turns() for way in ways}
    with tempfile.TemporaryDirectory() as directory:
        write_script(Path(directory))
        running = {way: _Group(module, way, count, layers, rows, _serve().port, directory) for way in ways}
        for group in running.values():
            group.steps(2)
        for number in range(rounds):
            first = number % len(ways)
            for way in (*ways[first:], *ways[:first]):
                answers, turn = running[way].steps(STEPS), turns[way]
                slowest = (max(times) for times in zip(*(one["steps_s"] for one in answers), strict=True))
                turn.steps_s.append(statistics.median(slowest))
                turn.computed_s.append(sum(one["computed_s"] for one in answers))
                turn.last = answers
        for group in running.values():
            group.close()
    return turns


def _ratios(mine_s: list[float], whole_s: list[float]) -> str:
    """Return minimum, median and maximum of the ratios of turns that follow each other."""
    found = [mine / whole for mine, whole in zip(mine_s, whole_s, strict=True)]
    return f"{min(found):.2f} / {statistics.median(found):.2f} / {max(found):.2f}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One process of a group, and the configuration of its training."""

    way: str
    rank: int
    count: int
    layers: int
    rows: int
    """Rows of a microbatch."""
    port: int
    """Port of the rendezvous."""
    directory: Path
    """Directory of the script (``benchmarks.linear``)."""


def compare_ways(
    result: Result,
    description: str | None,
    ways: Sequence[str],
    *,
    members: str,
    rows: int,
    make: Callable[[Member], Engine],
    more: Callable[[Engine], dict[str, Any]],
    show: Callable[[Result, dict[str, Turns], int, int], None],
) -> None:
    """Run a benchmark ``python -m benchmarks.<name of the result>`` that trains the same model in several ways.

    :param members: plural noun for the processes of a group; also the name of the option for their number.
    :param rows: default number of rows of a microbatch.
    :param make: makes the engine of one process.
    :param more: returns what a process reports after each turn in addition to times and memory.
    :param show: adds rows, notes and limits; gets the turns by way, the number of layers and that of
        members.
    """
    module = f"benchmarks.{result.name}"
    if sys.argv[1:2] == ["--rank"]:
        rank, way, count, layers, batch, port, directory = sys.argv[2:]
        member = Member(
            way=way,
            rank=int(rank),
            count=int(count),
            layers=int(layers),
            rows=int(batch),
            port=int(port),
            directory=Path(directory),
        )
        _run_member(lambda: make(member), more)
        return
    parser = command_line(description)
    parser.add_argument("--mib", type=int, default=64, help="MiB of parameters")
    parser.add_argument(f"--{members}", dest="count", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rows", type=int, default=rows, help="rows of a microbatch")
    given = parser.parse_args()
    count = max(2, given.mib * MIB // PARAMETER_BYTES)
    turns = _take_turns(module, ways, count=given.count, layers=count, rows=given.rows, rounds=given.rounds)
    result.data |= {
        "steps_s": {way: turn.steps_s for way, turn in turns.items()},
        "computed_s": {way: turn.computed_s for way, turn in turns.items()},
        "memory_bytes": {way: turn.memory_bytes for way, turn in turns.items()},
        "layers": count,
        members: given.count,
        "rows": given.rows,
    }
    result.notes.append(
        f"{count} layers, {count * PARAMETER_BYTES / MIB:.0f} MiB of parameters, AdamW, {given.count} {members}, "
        f"microbatches of {given.rows} rows, {given.rounds} turns of {STEPS} steps; "
        "ratios are of turns that follow each other"
    )
    show(result, turns, count, given.count)
    main(result, given.out)
