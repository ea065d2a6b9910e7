"""A snapshot while it is being taken: its contents and its progress."""

import time
from collections.abc import Iterable
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field

import msgspec
import numpy as np
from torch import Tensor

from runtime.device import DeviceRuntime
from runtime.layers.state import LayerStates
from runtime.script.tensor_image import Bytes
from runtime.snapshots.groups import LayerGroup
from runtime.snapshots.movers import Mover
from runtime.snapshots.shard_units import ShardUnit, SnapshotBucket, shard_units, source_of
from statemachine.messages.values import Vote
from storage.codes import Code
from storage.image import GroupImage, LayerImage
from storage.layerstate import padded_size
from storage.manifest import BLOCK_BYTES, PartDigester, SnapshotPart, digests_of_blocks
from storage.shards import ShardLayout


@dataclass(slots=True, eq=False)
class TrainerCapture:
    """A snapshot of this rank while it is being taken. The writer's lock guards the fields that change.

    The slot holds the shards of all groups, and then the small parts twice: they are not protected by a
    code, so they are repaired from their twin. Any thread may copy the units that make up the shards; the
    small parts were copied at the beginning.
    """

    generation: int
    step: int
    vote: Vote
    unit_bytes: int
    """Maximum number of bytes read for one unit."""
    units: list[ShardUnit] = field(default_factory=list)
    shards: list[tuple[str, int, int]] = field(default_factory=list)
    """Name, offset in the slot, and size in bytes of each shard."""
    digests: dict[int, PartDigester] = field(default_factory=dict)
    """Digests by a shard's offset, as far as they were computed while copying; only the copier's thread
    computes them.
    """
    hashed: dict[int, "Future[list[str]]"] = field(default_factory=dict)
    """Digests of runs of whole blocks, which a pool computes, by the offset of the first block."""
    small: list[tuple[str, bytes]] = field(default_factory=list)
    groups: list[dict[str, object]] = field(default_factory=list)
    """Description of the groups, for the manifest."""
    frozen: dict[int, frozenset[int]] = field(default_factory=dict)
    """Numbers of a shard's blocks that training does not change, by the shard's offset; only shards that have
    any.
    """
    previous: dict[int, SnapshotPart] = field(default_factory=dict)
    """Shards that the slot held before, by offset; their frozen blocks are not copied again."""
    slot: Bytes | None = None
    taken: int = 0
    copied: int = 0
    left_bytes: int = 0
    """Bytes that remain to be read."""
    hurried: bool = False
    """Whether a thread waits for it, so that copying is not limited to bubbles."""
    waiting: bool = False
    """Whether the main thread waits for it, so that its stall is not known yet."""
    error: Exception | None = None
    """Reason why the snapshot was abandoned."""
    started_s: float = field(default_factory=time.monotonic)
    copy_s: float = 0.0
    stall_s: float = 0.0
    idle_bytes: int = 0

    def add(self, group: LayerGroup, states: LayerStates, mover: Mover) -> None:
        """Add what this rank saves of the group, from the current state."""
        bucket = SnapshotBucket(mover)
        images = tuple(_image_of(layer, states, bucket) for layer in group.layers)
        self.add_shard(f"{group.name}/shard", group.code, group.owner, bucket)
        small = GroupImage(bucket_bytes=bucket.size_bytes, layers=images).to_bytes()
        self.describe(group, bucket.size_bytes, small)

    def add_shard(self, name: str, code: Code, owner: int, bucket: SnapshotBucket) -> None:
        """Add an owner's shard of a bucket, and record which of its blocks training does not change."""
        layout, offset = ShardLayout(code=code, bucket_bytes=bucket.size_bytes), self.shards_bytes
        self.shards.append((name, offset, layout.shard_bytes(owner)))
        frozen: set[int] = set()
        for unit in shard_units(layout, owner, bucket, offset, self.unit_bytes):
            self.units.append(unit)
            if unit.frozen:
                first = unit.offset - offset
                frozen.update(range(first // BLOCK_BYTES, -(-(first + unit.size_bytes) // BLOCK_BYTES)))
        if frozen:
            self.frozen[offset] = frozenset(frozen)

    def skip_frozen(self, parts: Iterable[SnapshotPart]) -> None:
        """Skip the frozen blocks that the slot already holds.

        :param parts: complete parts of the same generation that the slot held.
        """
        shards = set(self.shards)
        self.previous = {
            part.offset: part
            for part in parts
            if (part.name, part.offset, part.size_bytes) in shards
            and part.blocks
            and part.offset in self.frozen
        }
        self.units = [
            unit for unit in self.units if not (unit.frozen and self._shard_of(unit) in self.previous)
        ]
        self.left_bytes = sum(unit.read_bytes for unit in self.units)

    def _shard_of(self, unit: ShardUnit) -> int:
        return max(offset for _, offset, _ in self.shards if offset <= unit.offset)

    def describe(self, group: LayerGroup, bucket_bytes: int, small: bytes) -> None:
        """Add a group's small part, and describe the group for the manifest.

        :param bucket_bytes: size of the bucket that its owners share, or of this rank's own parts.
        """
        self.small.append((f"{group.name}/small", small))
        self.groups.append(
            {
                "first_layer": group.first_layer,
                "end_layer": group.end_layer,
                "owners": group.owners,
                "owner": group.owner,
                "scheme": group.scheme,
                "bucket_bytes": bucket_bytes,
            }
            | ({"parted": True, "device": group.device} if group.parted else {})
        )
        self.left_bytes = sum(unit.read_bytes for unit in self.units)

    def host_ranges(self) -> set[tuple[int, int]]:
        """Return address and size of all tensors in host memory."""
        return {found for bucket in {u.bucket for u in self.units} for found in bucket.host_ranges()}

    @property
    def shards_bytes(self) -> int:
        return self.shards[-1][1] + self.shards[-1][2] if self.shards else 0

    @property
    def size_bytes(self) -> int:
        return self.shards_bytes + 2 * sum(len(data) for _, data in self.small)

    @property
    def age_s(self) -> float:
        return time.monotonic() - self.started_s

    @property
    def failed(self) -> bool:
        return self.error is not None

    @property
    def done(self) -> bool:
        """Whether the state may change."""
        return self.failed or self.copied == len(self.units)

    def digests_at(self, unit: ShardUnit) -> PartDigester | None:
        """Return the digests of the unit's shard if the unit's bytes are the next to be hashed."""
        offset = self._shard_of(unit)
        digests = self.digests.setdefault(offset, PartDigester())
        return digests if offset + digests.size_bytes == unit.offset else None

    def layout(self) -> dict[str, object]:
        """Return the layout for the manifest."""
        return {"groups": self.groups, "vote": msgspec.to_builtins(self.vote)}

    def hash_unit(self, unit: ShardUnit, pool: Executor) -> None:
        """Let a pool hash the whole blocks of a unit that was copied."""
        assert self.slot is not None
        offset = self._shard_of(unit)
        first = -(-(unit.offset - offset) // BLOCK_BYTES) * BLOCK_BYTES + offset
        end = (unit.offset + unit.size_bytes - offset) // BLOCK_BYTES * BLOCK_BYTES + offset
        if first < end:
            self.hashed[first] = pool.submit(digests_of_blocks, self.slot[first:end])

    def parts(self) -> tuple[SnapshotPart, ...]:
        """Write the small parts after the shards, compute the missing digests, and return all parts. The
        shards must be complete.
        """
        assert self.slot is not None
        ranges = list(self.shards)
        end = self.shards_bytes
        for name, data in [*self.small, *((f"{name}-twin", data) for name, data in self.small)]:
            self.slot[end : end + len(data)] = np.frombuffer(data, dtype=np.uint8)
            ranges.append((name, end, len(data)))
            end += len(data)
        parts = []
        for name, offset, size in ranges:
            digests = self.digests.get(offset) or PartDigester()
            self._take_rest(digests, offset, size)
            parts.append(digests.part(name, offset))
        return tuple(parts)

    def _take_rest(self, digests: PartDigester, offset: int, size: int) -> None:
        """Add the remaining digests of a part; those of frozen blocks are reused.

        A frozen block that was corrupted after it was copied is therefore detected.
        """
        assert self.slot is not None
        there = self.previous.get(offset)
        while (left := size - digests.size_bytes) > 0:
            at = offset + digests.size_bytes
            number, within = divmod(digests.size_bytes, BLOCK_BYTES)
            # A part of one block has no digests of blocks.
            if (run := self.hashed.get(at)) is not None and size > BLOCK_BYTES:
                digests.add_blocks(run.result())
            elif there is not None and not within and left >= BLOCK_BYTES and number in self.frozen[offset]:
                digests.add_blocks([there.digest_of_block(number)])
            else:
                digests.update(self.slot[at : at + min(left, BLOCK_BYTES - within)])


def _image_of(layer: int, states: LayerStates, bucket: SnapshotBucket) -> LayerImage:
    """Add the layer's bytes to the bucket, and copy its buffers now, since the next forward pass changes them."""
    header, tensors = states.describe(layer)
    begin = bucket.size_bytes
    still = states.frozen_parameters(layer)
    buffers: list[Tensor] = []
    for entry, tensor in zip(header.entries, tensors, strict=True):
        if entry.role == "buffer":
            buffers.append(tensor)
        else:
            frozen = entry.role == "parameter" and entry.name in still
            source = source_of(tensor, states.runtime)
            bucket.add(source, padded_size(entry.size_bytes), frozen=frozen)
    return LayerImage(
        layer=layer,
        offset=begin,
        size_bytes=bucket.size_bytes - begin,
        header=msgspec.msgpack.encode(header),
        buffers=padded_bytes(buffers, states.runtime),
    )


def padded_bytes(buffers: Iterable[Tensor], runtime: DeviceRuntime) -> bytes:
    """Return the buffers' bytes one after the other, padded, after the device has computed them."""
    made = [np.asarray(source_of(runtime.to_host(tensor))).tobytes() for tensor in buffers]
    return b"".join(data.ljust(padded_size(len(data)), b"\0") for data in made)
