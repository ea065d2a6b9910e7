"""Rates of persistent checkpoints against the disk itself: writing, verifying and reading layer by layer.

    python -m benchmarks.checkpoints --directory /checkpoints --mebibytes 512

The disk's own speed is that of a plain loop over the same number of files (4 MiB at a time, fsync at the
end of each), as ``dd conv=fsync`` would do it. It alternates with ftd in the same run. Before each reading,
the pages of the files are dropped from the page cache. CPU seconds are those of this process, including
time in the kernel.
"""

import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from benchmarks.common import Limit, Result, command_line, main
from storage.checkpoint import CheckpointStore
from storage.layerstate import LayerHeader, TensorEntry

LAYERS = 16
ROUNDS = 5
MIB = 1024 * 1024
PIECE_BYTES = 4 * MIB
LEAST = 0.7
"""Smallest allowed share of the disk's own speed: ftd also computes digests of what it writes and reads."""

Chunk = np.ndarray[Any, np.dtype[np.uint8]]


def layer_header(layer: int, size_bytes: int) -> bytes:
    entry = TensorEntry(
        name=f"{layer}.weight",
        role="parameter",
        key="",
        dtype="float32",
        shape=(size_bytes // 4,),
        on_host=False,
        offset=0,
        size_bytes=size_bytes,
    )
    header = LayerHeader(
        format=1, layer=layer, entries=(entry,), scalars={}, schedule={}, size_bytes=size_bytes
    )
    return msgspec.msgpack.encode(header)


def write_plainly(directory: Path, payloads: list[Chunk]) -> None:
    directory.mkdir(exist_ok=True)
    for number, payload in enumerate(payloads):
        with (directory / f"{number}.bin").open("wb", buffering=0) as file:
            for start in range(0, len(payload), PIECE_BYTES):
                file.write(payload[start : start + PIECE_BYTES].data)
            os.fsync(file.fileno())


def read_plainly(directory: Path) -> None:
    for path in sorted(directory.glob("*.bin")):
        buffer = np.empty(path.stat().st_size, dtype=np.uint8).data
        with path.open("rb", buffering=0) as file:
            start = 0
            while count := file.readinto(buffer[start : start + PIECE_BYTES]):
                start += count


def write_checkpoint(store: CheckpointStore, step: int, payloads: list[Chunk]) -> None:
    draft = store.begin(step)
    files = [
        store.write_layer(draft, layer, layer_header(layer, len(payload)), [payload])
        for layer, payload in enumerate(payloads)
    ]
    store.commit(
        draft, files, job="benchmark", job_id="1", vote=None, written_at=time.time(), ftd_version="0"
    )


def read_checkpoint(store: CheckpointStore, step: int) -> None:
    checkpoint = store.open(step)
    for layer in range(LAYERS):
        checkpoint.read_layer(layer)


def verify_checkpoint(store: CheckpointStore, step: int) -> None:
    assert store.open(step).verify() == ()


def drop_pages(directory: Path) -> None:
    for path in directory.rglob("*.bin"):
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def timed(work: Callable[[], None]) -> tuple[float, float]:
    """Return the wall-clock and the CPU seconds of ``work``."""
    cpu, wall = time.process_time(), time.perf_counter()
    work()
    return time.perf_counter() - wall, time.process_time() - cpu


def measure(root: Path, size_bytes: int) -> dict[str, list[tuple[float, float]]]:
    payloads = [
        np.random.default_rng(layer).integers(0, 256, size_bytes // LAYERS, dtype=np.uint8)
        for layer in range(LAYERS)
    ]
    store = CheckpointStore.at(str(root / "kept"), create=True)
    plain = root / "plain"
    work: dict[str, Callable[[int], Callable[[], None]]] = {
        "write, the disk": lambda step: lambda: write_plainly(plain, payloads),
        "write, ftd": lambda step: lambda: write_checkpoint(store, step, payloads),
        "read, the disk": lambda step: lambda: read_plainly(plain),
        "read, ftd": lambda step: lambda: read_checkpoint(store, step),
        "verify, ftd": lambda step: lambda: verify_checkpoint(store, step),
    }
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in work}
    for step in range(ROUNDS + 1):
        for name in sorted(
            work, key=lambda name: (not name.startswith("write"), step % 2 == ("ftd" in name))
        ):
            # Each writer runs after the same number of bytes was removed, so memory and disk blocks are
            # reused.
            if name.startswith("write"):
                shutil.rmtree(plain if name == "write, the disk" else root / "kept", ignore_errors=True)
                store.location.create()
            else:
                drop_pages(root)
            seconds = timed(work[name](step))
            if step:
                found[name].append(seconds)
    return found


def run(root: Path, mebibytes: int) -> Result:
    found = measure(root, mebibytes * MIB)
    gib = mebibytes / 1024
    result = Result(
        name="checkpoints",
        what=f"A checkpoint of {mebibytes} MiB in {LAYERS} layers, on {root}",
        columns=("", "MiB/s, median", "worst", "best", "CPU s per GiB"),
    )
    speed: dict[str, float] = {}
    for name, times in found.items():
        rates = [mebibytes / wall for wall, _ in times]
        speed[name] = statistics.median(rates)
        cpu = statistics.median(cpu for _, cpu in times) / gib
        figures = (speed[name], min(rates), max(rates))
        result.rows.append((name, *(f"{rate:.0f}" for rate in figures), f"{cpu:.2f}"))
        result.data[name] = {"mib_per_s": rates, "cpu_s_per_gib": cpu}
    for name in ("write, ftd", "read, ftd", "verify, ftd"):
        base = "write, the disk" if name.startswith("write") else "read, the disk"
        result.limits.append(
            Limit(
                name=f"{name}: share of the disk's speed",
                measured=speed[name] / speed[base],
                limit=LEAST,
                at_least=True,
            )
        )
    result.notes.append(f"{ROUNDS} rounds in turn; written means fsynced; read from dropped pages")
    return result


if __name__ == "__main__":
    parser = command_line(__doc__)
    parser.add_argument(
        "--directory", type=Path, help="on the disk to be measured; default: the temporary one"
    )
    parser.add_argument("--mebibytes", type=int, default=512)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.directory, prefix="ftd-checkpoints-") as directory:
        outcome = run(Path(directory), options.mebibytes)
    main(outcome, options.out)
