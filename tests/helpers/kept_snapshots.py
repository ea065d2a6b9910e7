"""Snapshots as trainers write them, and nodes that serve them."""

import asyncio
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace, TracebackType
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from ftd.snapshots.shards.arenas import NodeArenas
from ftd.snapshots.shards.copies import CopyStore
from ftd.snapshots.shards.protocol import bearer_token
from ftd.snapshots.shards.server import ShardServer
from ftd.snapshots.shards.sources import SnapshotSource
from statemachine.events import Event
from statemachine.messages.values import HeldSnapshot, SnapshotGroup
from storage.arena import Arena
from storage.codes import make_code
from storage.image import GroupImage, LayerImage
from storage.layerstate import HEADER_FORMAT, LayerHeader, TensorEntry
from storage.manifest import SnapshotManifest, SnapshotPart
from storage.shards import ShardLayout, make_shard
from storage.staged import read_staged

TOKEN = bearer_token("sesame")
JOB = "job-1"
Bytes = NDArray[np.uint8]


def recording_driver(take: Callable[[Event], None]) -> Any:
    """Return the part of a ``Driver`` that snapshots use. It hands on what it is fed."""
    return SimpleNamespace(feed=take, stamp=lambda: {"at": 1.0, "cause": "c"}, now=time.monotonic)


@contextmanager
def shared_directory() -> Iterator[Path]:
    """Yield a directory in memory, and remove it at the end."""
    with TemporaryDirectory(prefix="ftd-test-", dir="/dev/shm") as name:
        yield Path(name)


def write(
    root: Path,
    step: int,
    parts: Mapping[str, Bytes],
    *,
    generation: int = 1,
    layout: dict[str, Any] | None = None,
    device: int = 0,
) -> SnapshotManifest:
    """Write one device's snapshot into the arenas below ``root``."""
    arena = Arena.open(root / JOB / f"device-{device}")
    slot = arena.begin(max(1, sum(map(len, parts.values()))))
    made, end = [], 0
    for name, data in parts.items():
        slot.view[end : end + len(data)] = data
        made.append(SnapshotPart.from_bytes(name, end, data))
        end += len(data)
    manifest = SnapshotManifest(
        job_id=JOB,
        step=step,
        generation=generation,
        slot=slot.number,
        parts=tuple(made),
        layout=layout or {"groups": []},
    )
    arena.commit(manifest)
    arena.close()
    return manifest


def payload_of(directory: Path, layer: int) -> tuple[bytes, bytes, int]:
    """Return header and payload of a staged layer, verified as a trainer does it, and how many of its bytes
    are borrowed.
    """
    staged, payload, lent = read_staged(directory, layer), bytearray(), 0
    for piece in staged.chunks:
        file = Path(piece.path).read_bytes() if piece.path else piece.data
        payload += file[piece.offset : piece.offset + piece.size_bytes]
        if piece.part is not None:
            part, lent = piece.part, lent + piece.size_bytes
            first = piece.offset - part.offset
            assert part.in_blocks and 0 <= first <= first + piece.size_bytes <= part.size_bytes
            memory = file[part.offset : part.offset + part.size_bytes]
            assert part.are_ranges_intact(memory, [range(first, first + piece.size_bytes)])
    assert len(payload) == staged.size_bytes
    assert bool(lent) == bool(staged.borrowed) and all(one.is_present() for one in staged.borrowed)
    return staged.header, bytes(payload), lent


def held_keys(held: Iterable[HeldSnapshot]) -> list[tuple[int, int, str]]:
    """Return step, generation and owner of snapshots of the job."""
    assert all(one.job_id == JOB for one in held)
    return [(one.step, one.generation, one.owner) for one in held]


def flip(root: Path, step: int, part: str, device: int = 0, job: str = JOB) -> None:
    """Flip a bit of a snapshot in memory."""
    arena = Arena.open(root / job / f"device-{device}")
    manifest = next(m for m in arena.snapshots if m.step == step)
    arena.view(manifest, manifest.part(part))[3] ^= 16
    arena.close()


class Node(AbstractAsyncContextManager["Node"]):
    """A node that serves its arenas."""

    def __init__(self, name: str, root: Path, *, limit_bytes: int | None = None, **options: Any) -> None:
        self.name, self.root = name, root
        self.arenas = NodeArenas(root, devices=1, limit_bytes=limit_bytes)
        self.changes = 0
        self.copies = CopyStore(self.arenas, node=name, changed=self._changed)
        self.server = ShardServer(self.arenas, TOKEN, copies=self.copies, **options)

    def _changed(self) -> None:
        self.changes += 1

    async def __aenter__(self) -> "Node":
        await self.server.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.server.close()
        self.copies.end()
        self.arenas.close()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.server.port}"

    @property
    def source(self) -> SnapshotSource:
        return SnapshotSource(node=self.name, address=self.address)


# --- layers ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """A layer as ``runtime.layers.state`` packs it, and its parts in a snapshot."""

    header: bytes
    payload: Bytes
    shared: Bytes
    buffers: bytes


def make_layer(number: int, sizes: Sequence[int], buffer_bytes: int = 0) -> Layer:
    """Return a layer with tensors of these sizes, and a buffer after the first one if ``buffer_bytes`` is not
    0.
    """
    random = np.random.default_rng(number)
    entries, runs, end = [], [], 0
    kinds = [("parameter", size) for size in sizes]
    if buffer_bytes:
        kinds.insert(1, ("buffer", buffer_bytes))
    for index, (role, size) in enumerate(kinds):
        padded = size + -size % 16
        entries.append(
            TensorEntry(
                name=f"t{index}",
                role="buffer" if role == "buffer" else "parameter",
                key="",
                dtype="uint8",
                shape=(size,),
                on_host=True,
                offset=end,
                size_bytes=size,
            )
        )
        run = np.zeros(padded, dtype=np.uint8)
        run[:size] = random.integers(0, 256, size, dtype=np.uint8)
        runs.append((role, run))
        end += padded
    header = LayerHeader(
        format=HEADER_FORMAT, layer=number, entries=tuple(entries), scalars={}, schedule={}, size_bytes=end
    )
    empty = np.zeros(0, dtype=np.uint8)
    return Layer(
        header=msgspec.msgpack.encode(header),
        payload=np.concatenate([empty, *(run for _, run in runs)]),
        shared=np.concatenate([empty, *(run for role, run in runs if role != "buffer")]),
        buffers=b"".join(run.tobytes() for role, run in runs if role == "buffer"),
    )


def write_group(
    roots: Mapping[str, Path], group: SnapshotGroup, layers: Sequence[Layer], step: int, generation: int = 1
) -> None:
    """Write the snapshot of a group: every owner's part, each into its own arena."""
    bucket = np.concatenate([layer.shared for layer in layers])
    code = make_code(group.protection, len(group.owners))
    layout = ShardLayout(code=code, bucket_bytes=len(bucket))
    offsets = np.cumsum([0, *(len(layer.shared) for layer in layers)]).tolist()
    image = GroupImage(
        bucket_bytes=len(bucket),
        layers=tuple(
            LayerImage(
                layer=group.first_layer + index,
                offset=offsets[index],
                size_bytes=len(layer.shared),
                header=layer.header,
                buffers=layer.buffers,
            )
            for index, layer in enumerate(layers)
        ),
    )
    small = np.frombuffer(image.to_bytes(), dtype=np.uint8)
    for owner, node in enumerate(group.owners):
        shard = np.zeros(layout.shard_bytes(owner), dtype=np.uint8)
        make_shard(layout, owner, bucket, shard)
        described = {
            "first_layer": group.first_layer,
            "end_layer": group.end_layer,
            "owners": list(group.owners),
            "owner": owner,
            "scheme": group.protection,
            "bucket_bytes": len(bucket),
        }
        name = f"group-{group.first_layer}"
        write(
            roots[node],
            step,
            {f"{name}/shard": shard, f"{name}/small": small},
            generation=generation,
            layout={"groups": [described], "vote": None},
            device=group.first_layer,  # Each group has its own device, so that no manifest has two of them.
        )


def copy_to_buddy(root: Path, owner: str, buddy: str, device: int = 0) -> None:
    """Copy the owner's snapshot to ``buddy``, as if the owner had sent it."""
    there = root / buddy / JOB / f"copy-{device}-{owner}"
    there.parent.mkdir(parents=True, exist_ok=True)
    shutil.copytree(root / owner / JOB / f"device-{device}", there)


async def raw_request(port: int, text: str, *, token: str | None = TOKEN) -> bytes:
    """Send these lines to the server, and return up to 64 KiB of its answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    authorization = "" if token is None else f"Authorization: Bearer {token}\r\n"
    writer.write(f"{text}\r\nHost: test\r\nConnection: close\r\n{authorization}\r\n".encode())
    try:
        return await asyncio.wait_for(reader.read(65536), 60)
    finally:
        writer.close()
