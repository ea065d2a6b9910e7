"""Snapshot streaming between two processes on loopback, against a raw socket that copies the same bytes.

One process runs a daemon's snapshot server, another its client. The client fetches the manifest, then all
of the part in blocks straight into memory, and verifies digests: as a whole part, and as a range of it
(whose blocks carry digests). The same run sends the same bytes through one plain TCP socket: sendall from
the same arena, recv_into the same memory.

    python -m benchmarks.shards [--gib 1] [--repeats 7]
"""

import argparse
import asyncio
import os
import shutil
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import uvloop

from benchmarks.common import Limit, Result, command_line, main
from ftd.snapshots.shards.arenas import NodeArenas
from ftd.snapshots.shards.client import ShardClient
from ftd.snapshots.shards.protocol import bearer_token
from ftd.snapshots.shards.server import ShardServer
from ftd.snapshots.shards.sources import PartLocation, RangeRequest, SnapshotSource
from storage.arena import Arena
from storage.manifest import SnapshotManifest, SnapshotPart, digest_of

TOKEN = bearer_token("benchmark")
JOB, STEP, PART = "job", 1, "group-0/shard"
RAW_BAR = 0.6
"""Smallest allowed share of the raw socket's rate."""


def arguments() -> argparse.Namespace:
    parser = command_line(__doc__)
    parser.add_argument("--gib", type=float, default=1.0, help="bytes to stream")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def write_snapshot(root: Path, size_bytes: int) -> SnapshotPart:
    arena = Arena.open(root / JOB / "device-0")
    slot = arena.begin(size_bytes)
    slot.view[:] = np.random.default_rng(1).integers(0, 256, size_bytes, dtype=np.uint8)
    part = SnapshotPart.from_bytes(PART, 0, slot.view)
    arena.commit(
        SnapshotManifest(
            job_id=JOB, step=STEP, generation=1, slot=slot.number, parts=(part,), layout={"groups": []}
        )
    )
    arena.close()
    return part


async def serve(root: Path) -> None:
    """Run the other process: a snapshot server, and a raw socket that sends the part to each client."""
    arenas = NodeArenas(root, devices=1)
    (held,) = arenas.find(JOB, STEP)
    memory = arenas.view(held, held.manifest.parts[0])

    def send_raw() -> None:
        while True:
            connection, _ = listening.accept()
            with connection:
                connection.sendall(memory)

    with socket.create_server(("127.0.0.1", 0)) as listening:
        server = ShardServer(arenas, TOKEN)
        await server.start()
        print(server.port, listening.getsockname()[1], flush=True)
        await asyncio.to_thread(send_raw)


def raw_copy(port: int, into: memoryview) -> float:
    began = time.perf_counter()
    with socket.create_connection(("127.0.0.1", port)) as connection:
        end = 0
        while count := connection.recv_into(into[end:]):
            end += count
    assert end == len(into), f"{end} bytes came"
    return time.perf_counter() - began


async def streamed(port: int, into: memoryview) -> float:
    source = SnapshotSource(node="other", address=f"127.0.0.1:{port}")
    async with ShardClient(TOKEN) as client:
        began = time.perf_counter()
        found = await client.manifest(source, JOB, STEP)
        assert not found.corrupt
        place = PartLocation(source=source, job_id=JOB, step=STEP, part=found.manifests[0].part(PART))
        await client.fetch([RangeRequest(location=place, first=0, into=into)])
        return time.perf_counter() - began


def measure(root: Path, size_bytes: int, repeats: int) -> Result:
    part = write_snapshot(root, size_bytes)
    target = np.zeros(size_bytes, dtype=np.uint8)
    command = [sys.executable, "-m", "benchmarks.shards", "--serve", str(root)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    rates: dict[str, list[float]] = {"raw socket": [], "whole part": [], "range of a part": []}
    try:
        port, raw_port = map(int, process.stdout.readline().split())
        for _ in range(repeats):
            target[:] = 0
            rates["raw socket"].append(size_bytes / raw_copy(raw_port, target.data) / 1e9)
            for name, size in (("whole part", size_bytes), ("range of a part", size_bytes - 64)):
                target[:] = 0
                rates[name].append(size / uvloop.run(streamed(port, target.data[:size])) / 1e9)
                assert size < size_bytes or digest_of(target) == part.digest
    finally:
        process.kill()
        process.wait()
    medians = {name: statistics.median(values) for name, values in rates.items()}
    return Result(
        name="shards",
        what=f"{size_bytes / 2**30:g} GiB between two processes on loopback, {repeats} times in turns",
        columns=("way", "GB/s min", "median", "max", "of the raw socket"),
        rows=[
            (
                name,
                *(f"{v:.2f}" for v in (min(values), medians[name], max(values))),
                f"{medians[name] / medians['raw socket']:.0%}",
            )
            for name, values in rates.items()
        ],
        limits=[
            Limit(
                name=f"{name}, share of a raw socket's rate",
                measured=medians[name] / medians["raw socket"],
                limit=RAW_BAR,
                at_least=True,
            )
            for name in ("whole part", "range of a part")
        ],
        data={"gb_s": rates, "size_bytes": size_bytes},
        notes=[
            "both: the manifest's way and the client's digests included",
            "raw socket: one connection, sendall from the same memory, recv_into the same memory, no digest",
        ],
    )


if __name__ == "__main__":
    options = arguments()
    if options.serve:
        uvloop.run(serve(options.serve))
    place = Path(f"/dev/shm/ftd-benchmark-{os.getpid()}")
    try:
        outcome = measure(place, int(options.gib * 2**30), options.repeats)
    finally:
        shutil.rmtree(place, ignore_errors=True)
    main(outcome, options.out)
