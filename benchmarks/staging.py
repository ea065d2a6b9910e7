"""Restoring from a snapshot in memory: the work of a node for its trainers, and of a trainer, in each tier.

The state is a model of linear layers with Adam's state; its snapshot is in the memory of one, two or three
nodes. One of them restores it: from its own memory alone (borrowed by the trainer, or copied by the node
where the trainer found it corrupt), with half of it from another node's snapshot server, and with a third
decoded because that node is lost; into the memory of a new trainer, and into the tensors of one that rolls
back. The node is this process. The trainer and the other node are separate processes; the trainer is
started as the zygote is. The references are one memcpy of the same bytes, and torch.load and DCP load of as
many bytes from /dev/shm and from a disk whose pages were dropped.

CPU time depends little on other processes; the cost of new pages depends on the machine.

    python -m benchmarks.staging [--mib 512] [--repeats 5] [--disk DIRECTORY]
"""

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import uvloop

from benchmarks.checkpoints import MIB, Chunk, timed
from benchmarks.common import RESULTS, Limit, Result, Summary, command_line, main, milliseconds
from benchmarks.linear import training_data, write_script
from benchmarks.persisting import JOB, STEP, TOKEN, child, write_snapshot
from benchmarks.script_peers import LOADS, measure_peers
from ftd.snapshots.restoring.restore import Restorer
from ftd.snapshots.restoring.staging import StagingDirectory
from ftd.snapshots.shards.arenas import NodeArenas
from ftd.snapshots.shards.client import ShardClient
from runtime.engine.staged_state import StagedStateLoader
from runtime.layers.model import Model
from runtime.layers.optimizer import Optimization
from runtime.layers.state import LayerStates
from runtime.streaming_stores import streaming_environment
from runtime.training import load_training
from statemachine.messages.values import Restore, SnapshotGroup
from storage.manifest import SnapshotPart

LAYER_MIB = 12.01
"""Size of a layer with its optimizer's state."""
NODES = ("n0", "n1", "n2")
TIMES = 12.36
"""Required ratio of the time to load from a disk to the time to restore, as the paper reports it."""


class Held:
    """State of the model that a trainer holds, with Adam's state."""

    def __init__(self, directory: Path, layers: int) -> None:
        write_script(directory)
        data = training_data(directory, layers, global_batch=4, microbatch_rows=4)
        self.layers = range(layers)
        self.model = Model(load_training(data), data)
        self.states = LayerStates(self.model, Optimization(self.model))

    def step(self) -> None:
        """Make one step, so that the optimizer has a state."""
        for _, parameter in self.model.named_parameters(self.layers):
            parameter.grad = torch.rand_like(parameter)
        self.states._optimization.step(self.layers)

    def restore(self, stage: Path, *, fresh: bool) -> None:
        """Restore as ``Engine.restore`` does.

        :param fresh: restore into new memory, as a new process does; otherwise into the held tensors.
        """
        if fresh:
            self.model.drop(self.layers)
        with StagedStateLoader(stage, self.states, lambda: None) as staged:
            for layer in self.layers:
                staged.load_layer(layer)
            staged.verify()

    def digests(self) -> list[str]:
        return [self.states.digest(layer) for layer in self.layers]


def serve_trainer(directory: Path, layers: int) -> None:
    """Restore each directory read from stdin into new memory, then into the held tensors; print each
    ``Answer`` as JSON.
    """
    torch.set_num_threads(1)
    held = Held(directory, layers)
    for line in sys.stdin:
        for fresh in (True, False):
            seconds = timed(partial(held.restore, Path(line.strip()), fresh=fresh))
            print(json.dumps((seconds, held.digests())), flush=True)


Answer = tuple[tuple[float, float], list[str]]
"""Wall-clock and CPU seconds, and a digest of each layer."""


@contextmanager
def trainer(directory: Path, layers: int) -> Iterator[Callable[[Path], tuple[Answer, Answer]]]:
    command = [sys.executable, "-m", "benchmarks.staging"]
    command += ["--trainer", str(directory), "--layers", str(layers)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | streaming_environment(os.environ)
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        orders, answers = process.stdin, process.stdout

        def restore(stage: Path) -> tuple[Answer, Answer]:
            orders.write(f"{stage}\n")
            orders.flush()
            return json.loads(answers.readline()), json.loads(answers.readline())

        try:
            yield restore
        finally:
            process.kill()


class Scene:
    """Snapshot whose owners are below ``root``; ``n0`` restores it, and ``n1`` serves if ``port`` is given."""

    def __init__(
        self, root: Path, group: SnapshotGroup, layers: int, *, lends: bool = True, port: int = 0
    ) -> None:
        self._root, self._layers, self._lends = root, layers, lends
        sources = {"n1": f"127.0.0.1:{port}"} if port else {}
        self._restore = Restore(job_id=JOB, step=STEP, generation=1, groups=(group,), sources=sources)

    def staged(self, stage: Path) -> None:
        """Stage the snapshot, as the node does for its trainer."""
        uvloop.run(self._staged(stage))

    async def _staged(self, stage: Path) -> None:
        async with ShardClient(TOKEN) as client:
            await Restorer(
                restore=self._restore,
                node="n0",
                arenas=NodeArenas(self._root / "n0", devices=1),
                client=client,
                report_corruption=lambda *details: print(*details, file=sys.stderr),
            ).run(range(self._layers), StagingDirectory(stage, borrows=self._lends))


def measure_ours(root: Path, mib: int, repeats: int) -> dict[str, list[tuple[float, float]]]:
    """Return the wall-clock and the CPU seconds for each GiB, by name of the part."""
    layers = max(1, round(mib / LAYER_MIB))
    held = Held(root, layers)
    held.step()
    packed = [held.states.pack(layer) for layer in held.layers]
    headers, payloads = [header for header, _ in packed], [payload.numpy() for _, payload in packed]
    gib, digests = sum(map(len, payloads)) / 1024 / MIB, held.digests()
    groups = {
        count: write_snapshot(
            root / f"of-{count}",
            tuple(f"n{i}" for i in range(count)),
            payloads,
            scheme=scheme,
            headers=headers,
        )
        for count, scheme in ((1, "none"), (2, "none"), (3, "aec"))
    }
    found: dict[str, list[tuple[float, float]]] = {}

    def note(name: str, seconds: tuple[float, float]) -> None:
        found.setdefault(name, []).append((seconds[0] / gib, seconds[1] / gib))

    warm = [np.ones_like(payload) for payload in payloads]
    parts = [SnapshotPart.from_bytes("part", 0, payload) for payload in payloads]
    with child("--serve", str(root / "of-2/n1")) as two, child("--serve", str(root / "of-3/n1")) as three:
        ports = []
        for one in (two, three):
            assert one.stdout is not None
            ports.append(int(one.stdout.readline()))
        scenes = {
            "own memory": Scene(root / "of-1", groups[1], layers),
            "own memory, copied by the node": Scene(root / "of-1", groups[1], layers, lends=False),
            "half from another node": Scene(root / "of-2", groups[2], layers, port=ports[0]),
            "a third decoded": Scene(root / "of-3", groups[3], layers, port=ports[1]),
        }
        with trainer(root, layers) as restore:
            for _ in range(repeats + 1):
                note("one memcpy", timed(partial(_copy, warm, payloads)))
                note("one pass of digests", timed(partial(_verify, parts, payloads)))
                for name, scene in scenes.items():
                    stage = Path(tempfile.mkdtemp(dir=root))
                    node = timed(partial(scene.staged, stage))
                    note(f"{name}: node", node)
                    for memory, (seconds, there) in zip(("new", "held"), restore(stage), strict=True):
                        assert there == digests, f"{name}: other bytes came back"
                        note(f"{name}: trainer, {memory}", seconds)
                        note(f"{name}, {memory}", (node[0] + seconds[0], node[1] + seconds[1]))
                    shutil.rmtree(stage)
    return {name: times[1:] for name, times in found.items()}


def _copy(targets: list[Chunk], sources: list[Chunk]) -> None:
    for target, source in zip(targets, sources, strict=True):
        target[:] = source


def _verify(parts: list[SnapshotPart], payloads: list[Chunk]) -> None:
    assert all(p.are_ranges_intact(data, [range(len(data))]) for p, data in zip(parts, payloads, strict=True))


def run(root: Path, mib: int, repeats: int, disk: Path | None) -> Result:
    ours = measure_ours(root, mib, repeats)
    result = Result(
        name="staging",
        what=f"{mib} MiB of layers back from a snapshot: ms for each GiB (min / median / max)",
        columns=("part", "wall", "CPU"),
    )
    for name, times in ours.items():
        columns = (Summary(values=tuple(1e3 * one[kind] for one in times)) for kind in (0, 1))
        result.rows.append((name, *map(str, columns)))
    result.data["s_per_gib"] = ours
    if disk is not None:
        peers = measure_peers(mib / 1024, disk, max(2, repeats // 2))
        rates = {name: [s * 1024 / mib for s in peers[name]] for name in LOADS}
        for name, seconds in rates.items():
            result.rows.append((name, milliseconds(seconds), ""))
        result.data["peers_s_per_gib"] = rates
        for tier in ("own memory, new", "own memory, held", "a third decoded, held"):
            wall = statistics.median(wall for wall, _ in ours[tier])
            for peer in ("torch.load disk", "DCP load disk"):
                faster = statistics.median(rates[peer]) / wall
                name = f"{tier} against {peer}, times"
                result.limits.append(Limit(name=name, measured=faster, limit=TIMES, at_least=True))
    result.notes.append("one memcpy: into existing memory, like that of a trainer that holds the layers")
    return result


def parse() -> Any:
    parser = command_line(__doc__)
    parser.add_argument("--mib", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--disk", type=Path, default=RESULTS, help="a directory on a disk")
    parser.add_argument("--no-peers", action="store_true", help="leave torch.load and DCP out")
    parser.add_argument("--trainer", type=Path, help="the trainer's process: its model is written there")
    parser.add_argument("--layers", type=int, help="with --trainer")
    return parser.parse_args()


if __name__ == "__main__":
    options = parse()
    if options.trainer is not None:
        serve_trainer(options.trainer, options.layers)
    else:
        torch.set_num_threads(1)
        options.disk.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="ftd-staging-") as directory:
            disk = None if options.no_peers else options.disk
            outcome = run(Path(directory), options.mib, options.repeats, disk)
        main(outcome, options.out)
