"""Back from a snapshot in own memory, part by part: what a node does for its trainers, and a trainer itself.

The node puts the layers together, verifies them, and writes them into files in memory; a trainer maps these
and copies. CPU time, so that a busy machine counts little; fresh pages count as the machine gives them.

    python -m benchmarks.staging [--mib 512] [--repeats 5]
"""

import asyncio
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from benchmarks.checkpoints import LAYERS, MIB, Chunk
from benchmarks.common import Result, Summary, command_line, main
from benchmarks.persisting import JOB, STEP, TOKEN, write_snapshot
from ftd.node.arenas import Arenas
from ftd.node.restore import Restorer
from ftd.node.shard_client import ShardClient
from ftd.node.staging import Put, staged_in
from statemachine.values import Restore, SnapshotGroup
from storage.manifest import digest_of


def cpu_s(work: Callable[[], object]) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began


async def restored(root: Path, group: SnapshotGroup, put: Put) -> None:
    restore = Restore(job_id=JOB, step=STEP, generation=1, groups=(group,), sources={})
    async with ShardClient(TOKEN) as client:
        arenas = Arenas(root / "n0", devices=1)
        await Restorer(restore=restore, node="n0", arenas=arenas, client=client, tell=print).run(
            range(LAYERS), put
        )


async def nowhere(*_: object) -> None:
    """For what it takes to put layers together alone."""


def mapped(stage: Path, tensors: list[Chunk]) -> None:
    for number, tensor in enumerate(tensors):
        tensor[:] = np.memmap(stage / f"layer-{number}.payload", dtype=np.uint8, mode="c")


def measure(root: Path, mib: int, repeats: int) -> Result:
    payloads = [
        np.random.default_rng(layer).integers(0, 256, mib * MIB // LAYERS, dtype=np.uint8)
        for layer in range(LAYERS)
    ]
    group, stage = write_snapshot(root, ("n0",), payloads), root / "stage"
    stage.mkdir()
    work: dict[str, Callable[[], object]] = {
        "one memcpy": lambda: [payload.copy() for payload in payloads],
        "one pass of digests": lambda: [digest_of(payload) for payload in payloads],
        "node: put together and verified": lambda: asyncio.run(restored(root, group, nowhere)),
        "node: and written for the trainer": lambda: asyncio.run(restored(root, group, staged_in(stage))),
        "trainer: mapped and copied": lambda: mapped(stage, payloads),
    }
    found: dict[str, list[float]] = {name: [] for name in work}
    for _ in range(repeats):
        for name, one in work.items():
            found[name].append(cpu_s(one) * 1024 / mib)
    result = Result(
        name="staging",
        what=f"{mib} MiB in {LAYERS} layers back from own memory",
        columns=("part", "CPU ms for each GiB (min / median / max)"),
    )
    result.rows = [
        (name, str(Summary(values=tuple(1e3 * s for s in times)))) for name, times in found.items()
    ]
    result.data = {"cpu_s_per_gib": found}
    result.notes.append("one memcpy: into memory that is made for it")
    return result


if __name__ == "__main__":
    parser = command_line(__doc__)
    parser.add_argument("--mib", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="ftd-staging-") as directory:
        outcome = measure(Path(directory), options.mib, options.repeats)
    main(outcome, options.out)
