"""Rate at which a node writes its share of a persistent checkpoint from memory, and its effect on training.

    python -m benchmarks.persisting --directory /checkpoints --mebibytes 512

Writing: all layers of a snapshot, from the node's own arena, or half of each layer from the snapshot server
of another node (a separate process), against a plain loop over the same number of files (4 MiB at a time,
fsync at the end of each), alternating in one run.

Training: a process with one thread trains a small model all the time, while this process writes the
snapshot in every second round, at a bounded rate and then without a limit. Step times are medians of all
rounds of a kind.
"""

import asyncio
import itertools
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from benchmarks.checkpoints import LAYERS, LEAST, MIB, ROUNDS, Chunk, layer_header, timed, write_plainly
from benchmarks.common import Limit, Result, command_line, main
from ftd.snapshots.persist import CheckpointWriter, Persister
from ftd.snapshots.shards.arenas import NodeArenas
from ftd.snapshots.shards.protocol import bearer_token
from ftd.snapshots.shards.server import ShardServer
from statemachine.agent.events import PersistEnded
from statemachine.events import Event
from statemachine.messages.cluster import LayersPersisted, Persist
from statemachine.messages.values import Snapshot, SnapshotGroup, Vote
from storage.arena import Arena
from storage.codes import make_code
from storage.image import GroupImage, LayerImage
from storage.manifest import SnapshotManifest, SnapshotPart
from storage.shards import ShardLayout, make_shard

TOKEN = bearer_token("benchmark")
JOB, STEP = "job", 1
BOUNDED_MIB_S = 100
"""Rate of writing that a user may grant to checkpoints."""
LEAST_S = 2.0
"""Shortest round of the training measurement, seconds; it must contain several steps."""
MOST_SLOWER = 1.1
"""Largest allowed ratio of the step time while persisting at that rate to the step time without."""


def write_snapshot(
    root: Path,
    owners: tuple[str, ...],
    payloads: list[Chunk],
    *,
    scheme: str = "none",
    headers: Sequence[bytes] = (),
) -> SnapshotGroup:
    """Write one group of all layers, each owner's shard in its own arena below ``root``, and return the group."""
    group = SnapshotGroup(first_layer=0, end_layer=len(payloads), owners=owners, protection=scheme)
    bucket = np.concatenate(payloads)
    layout = ShardLayout(code=make_code(scheme, len(owners)), bucket_bytes=len(bucket))
    offsets = [0, *itertools.accumulate(map(len, payloads))]
    image = GroupImage(
        bucket_bytes=len(bucket),
        layers=tuple(
            LayerImage(
                layer=n,
                offset=offsets[n],
                size_bytes=len(payload),
                header=headers[n] if headers else layer_header(n, len(payload)),
                buffers=b"",
            )
            for n, payload in enumerate(payloads)
        ),
    ).to_bytes()
    for owner, node in enumerate(owners):
        size = layout.shard_bytes(owner)
        arena = Arena.open(root / node / JOB / "device-0")
        slot = arena.begin(size + len(image))
        make_shard(layout, owner, bucket, slot.view[:size])
        slot.view[size:] = np.frombuffer(image, dtype=np.uint8)
        described = {
            "first_layer": 0,
            "end_layer": len(payloads),
            "owners": list(owners),
            "owner": owner,
            "scheme": scheme,
            "bucket_bytes": len(bucket),
        }
        arena.commit(
            SnapshotManifest(
                job_id=JOB,
                step=STEP,
                generation=1,
                slot=slot.number,
                parts=(
                    SnapshotPart.from_bytes("group-0/shard", 0, slot.view[:size]),
                    SnapshotPart.from_bytes("group-0/small", size, slot.view[size:]),
                ),
                layout={"groups": [described]},
            )
        )
        arena.close()
    return group


class Persisting:
    """Node ``n0``, which writes a whole snapshot to persistent storage."""

    def __init__(self, root: Path, url: Path, group: SnapshotGroup, sources: dict[str, str]) -> None:
        self._arenas = NodeArenas(root / "n0", devices=1)
        self._url = url
        self._group, self._sources = group, sources
        self._attempts = itertools.count()

    def write(self, rate_bytes_s: float | None = None) -> None:
        asyncio.run(self._write(rate_bytes_s))

    async def _write(self, rate_bytes_s: float | None) -> None:
        done: asyncio.Future[Event] = asyncio.get_running_loop().create_future()
        driver: Any = SimpleNamespace(
            feed=done.set_result, stamp=lambda: {"at": 0.0, "cause": ""}, now=time.monotonic
        )
        persister = Persister(
            writing=CheckpointWriter(node="n0", arenas=self._arenas, token=TOKEN),
            rate_bytes_s=rate_bytes_s,
            driver=driver,
            report_corruption=lambda job, step: lambda *details: print(*details, file=sys.stderr),
        )
        persister.set_description(JOB, b"")
        vote = Vote(loss=0.0, gradient_norm=0.0)
        persister.begin(
            Persist(
                job_id=JOB,
                job_name=JOB,
                url=str(self._url),
                attempt=f"a{next(self._attempts)}",
                record=Snapshot(step=STEP, generation=1, vote=vote, groups=(self._group,)),
                layers=tuple(range(self._group.end_layer)),
                sources=self._sources,
            )
        )
        event = await done
        await persister.close()
        assert isinstance(event, PersistEnded) and isinstance(event.answer, LayersPersisted), event


@contextmanager
def child(*arguments: str) -> Iterator["subprocess.Popen[str]"]:
    command = [sys.executable, "-m", "benchmarks.persisting", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


async def serve(root: Path) -> None:
    server = ShardServer(NodeArenas(root, devices=1), TOKEN)
    await server.start()
    print(server.port, flush=True)
    await asyncio.Event().wait()


def train() -> None:
    """Train until the process is killed; print a line for each step: its end and its duration, in seconds."""
    import torch
    from torch import nn

    torch.set_num_threads(1)
    model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(8)))
    optimizer = torch.optim.AdamW(model.parameters())
    rows = torch.rand(256, 512)
    while True:
        began = time.monotonic()
        optimizer.zero_grad()
        model(rows).square().mean().backward()
        optimizer.step()
        now = time.monotonic()
        print(now, now - began, flush=True)


def measure_writing(result: Result, root: Path, memory: Path, mebibytes: int, payloads: list[Chunk]) -> None:
    """Add rows and limits of the rates of writing."""
    plain, kept = root / "plain", root / "kept"
    own = Persisting(memory / "own", kept, write_snapshot(memory / "own", ("n0",), payloads), {})
    group = write_snapshot(memory / "shared", ("n0", "n1"), payloads)
    with child("--serve", str(memory / "shared" / "n1")) as peer:
        assert peer.stdout is not None
        sources = {"n1": f"127.0.0.1:{int(peer.stdout.readline())}"}
        shared = Persisting(memory / "shared", kept, group, sources)
        work: dict[str, Callable[[], None]] = {
            "the disk": lambda: write_plainly(plain, payloads),
            "own memory": own.write,
            "half from a peer": shared.write,
        }
        found: dict[str, list[tuple[float, float]]] = {name: [] for name in work}
        for number in range(ROUNDS + 1):
            for name in sorted(work, reverse=number % 2 == 1):
                # Each writer runs after the same number of bytes was removed, so memory and disk blocks are
                # reused.
                shutil.rmtree(plain if name == "the disk" else kept, ignore_errors=True)
                kept.mkdir(exist_ok=True)
                seconds = timed(work[name])
                if number:
                    found[name].append(seconds)
    disk = statistics.median(mebibytes / wall for wall, _ in found["the disk"])
    for name, times in found.items():
        rates = [mebibytes / wall for wall, _ in times]
        cpu = statistics.median(cpu for _, cpu in times) / (mebibytes / 1024)
        rate = statistics.median(rates)
        figures = (f"{rate:.0f}", f"{min(rates):.0f}", f"{max(rates):.0f}", f"{cpu:.2f}")
        result.rows.append((f"write, {name}", *figures))
        result.data[name] = {"mib_per_s": rates, "cpu_s_per_gib": cpu}
    own_rate = statistics.median(mebibytes / wall for wall, _ in found["own memory"])
    result.limits.append(
        Limit(
            name="from own memory: share of the disk's speed",
            measured=own_rate / disk,
            limit=LEAST,
            at_least=True,
        )
    )


def measure_training(result: Result, root: Path, memory: Path, mebibytes: int, payloads: list[Chunk]) -> None:
    """Add notes and limits of the step times of training."""
    kept = root / "kept"
    persisting = Persisting(memory / "own", kept, write_snapshot(memory / "own", ("n0",), payloads), {})
    for rate_mib_s in (BOUNDED_MIB_S, None):
        spans: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
        with child("--train") as trainer:
            assert trainer.stdout is not None
            for _ in range(20):
                trainer.stdout.readline()
            for number in range(2 * ROUNDS):
                began = time.monotonic()
                while number % 2 and time.monotonic() < began + LEAST_S:
                    shutil.rmtree(kept, ignore_errors=True)
                    kept.mkdir()
                    persisting.write(None if rate_mib_s is None else rate_mib_s * MIB)
                if not number % 2:
                    time.sleep(max(LEAST_S, min(5.0, mebibytes / (rate_mib_s or 5 * BOUNDED_MIB_S))))
                spans[number % 2 == 1].append((began, time.monotonic()))
            trainer.kill()
            steps = [tuple(map(float, line.split())) for line in trainer.stdout if line.endswith("\n")]
        median = {
            kind: statistics.median(
                step_s for end, step_s in steps if any(a <= end - step_s and end <= b for a, b in spans[kind])
            )
            for kind in (True, False)
        }
        rate = "as fast as it goes" if rate_mib_s is None else f"at {rate_mib_s} MiB/s"
        result.notes.append(
            f"a training step alone / while this process persists {rate}: "
            f"{1e3 * median[False]:.1f} / {1e3 * median[True]:.1f} ms"
        )
        result.data[f"step, {rate}"] = {"alone_s": median[False], "together_s": median[True]}
        if rate_mib_s is not None:
            ratio = median[True] / median[False]
            result.limits.append(
                Limit(name=f"step while persisting {rate}", measured=ratio, limit=MOST_SLOWER)
            )


def run(root: Path, memory: Path, mebibytes: int) -> Result:
    payloads = [
        np.random.default_rng(layer).integers(0, 256, mebibytes * MIB // LAYERS, dtype=np.uint8)
        for layer in range(LAYERS)
    ]
    result = Result(
        name="persisting",
        what=f"A snapshot of {mebibytes} MiB in {LAYERS} layers written to {root}",
        columns=("", "MiB/s, median", "worst", "best", "CPU s per GiB"),
    )
    measure_writing(result, root, memory, mebibytes, payloads)
    measure_training(result, root, memory, mebibytes, payloads)
    result.notes.append(f"{ROUNDS} rounds of each kind in turn; written means fsynced")
    return result


if __name__ == "__main__":
    parser = command_line(__doc__)
    parser.add_argument(
        "--directory", type=Path, help="on the disk to be measured; default: the temporary one"
    )
    parser.add_argument("--mebibytes", type=int, default=512)
    parser.add_argument("--serve", type=Path, help="the peer's process: serve the snapshots there")
    parser.add_argument("--train", action="store_true", help="the training process")
    options = parser.parse_args()
    if options.serve is not None:
        asyncio.run(serve(options.serve))
    elif options.train:
        train()
    else:
        with (
            tempfile.TemporaryDirectory(dir=options.directory, prefix="ftd-persisting-") as directory,
            tempfile.TemporaryDirectory(dir="/dev/shm", prefix="ftd-persisting-") as arenas,
        ):
            outcome = run(Path(directory), Path(arenas), options.mebibytes)
        main(outcome, options.out)
