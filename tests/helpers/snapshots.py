"""Reads snapshots with nothing but their arenas: finds, checks, decodes and stages them."""

import asyncio
from collections.abc import Iterator, Sequence
from itertools import combinations
from pathlib import Path

import msgspec
import numpy as np

from ftd.snapshots.restoring.staging import StagingDirectory
from statemachine.messages.values import Vote
from storage.arena import Arena
from storage.codes import make_code
from storage.image import GroupImage, assemble_payload
from storage.manifest import SnapshotManifest
from storage.partimage import LayerPart, ShardedImage, assemble_from_parts
from storage.shards import Bytes, ShardLayout, decode_bucket

Layers = dict[int, tuple[bytes, bytes]]
"""Layer → header and payload, as ``LayerStates.pack`` makes them."""


class Kept:
    """One owner's part of a group."""

    def __init__(self, arena: Arena, manifest: SnapshotManifest, group: dict[str, object]) -> None:
        name = f"group-{group['first_layer']}"
        self.group = msgspec.convert(group, Described)
        self.shard: Bytes = arena.view(manifest, manifest.part(f"{name}/shard"))
        small = arena.view(manifest, manifest.part(f"{name}/small")).tobytes()
        self.image = GroupImage.from_bytes(small)
        self.arena = arena


class Described(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    first_layer: int
    end_layer: int
    owners: tuple[str, ...]
    owner: int
    scheme: str
    bucket_bytes: int


def kept(arenas: Path, step: int) -> dict[tuple[int, int], dict[int, Kept]]:
    """Return the checked parts of each group's owners, by the owner's number."""
    found: dict[tuple[int, int], dict[int, Kept]] = {}
    for arena, manifest in checked(arenas, step):
        for group in manifest.layout["groups"]:
            part = Kept(arena, manifest, group)
            place = part.group.first_layer, part.group.end_layer
            assert part.group.owner not in found.setdefault(place, {})
            found[place][part.group.owner] = part
    return found


def checked(arenas: Path, step: int) -> Iterator[tuple[Arena, SnapshotManifest]]:
    """Yield the snapshots of a step in all devices' arenas, by device, which must be intact."""
    for directory in sorted(arenas.glob("device-*")):
        arena = Arena.open(directory)
        assert not arena.problems
        for manifest in arena.snapshots:
            if manifest.step == step:
                assert arena.find_corrupt(manifest) == ()
                yield arena, manifest


def vote_of(arenas: Path, step: int) -> Vote:
    votes = {
        msgspec.json.encode(manifest.layout["vote"])
        for directory in arenas.glob("device-*")
        for manifest in Arena.open(directory).snapshots
        if manifest.step == step
    }
    (vote,) = votes
    return msgspec.json.decode(vote, type=Vote)


def decoded(parts: dict[int, Kept], lost: Sequence[int], small_of: int) -> Layers:
    """Return the layers of one group, decoded without the parts of the owners ``lost``."""
    group = parts[small_of].group
    code = make_code(group.scheme, len(group.owners))
    layout = ShardLayout(code=code, bucket_bytes=group.bucket_bytes)
    there = {owner: part.shard for owner, part in parts.items() if owner not in lost}
    bucket = np.empty(group.bucket_bytes, dtype=np.uint8)
    decode_bucket(layout, frozenset(there), lambda owner, at, size: there[owner][at : at + size], bucket)
    return {
        image.layer: (
            image.header,
            assemble_payload(image, bucket[image.offset : image.offset + image.size_bytes]).tobytes(),
        )
        for image in parts[small_of].image.layers
    }


def losses_within(parts: dict[int, Kept]) -> list[tuple[int, ...]]:
    """Return every set of owners whose loss the group's code must survive."""
    group = next(iter(parts.values())).group
    guarantee = make_code(group.scheme, len(group.owners)).guarantee
    owners = range(len(group.owners))
    return [lost for count in range(guarantee + 1) for lost in combinations(owners, count)]


def stage(layers: Layers, directory: Path) -> None:
    """Stage layers as a node does before it sends Resume."""
    directory.mkdir(exist_ok=True)
    target = StagingDirectory(directory)
    for layer, (header, payload) in layers.items():
        asyncio.run(target.put(layer, header, np.frombuffer(payload, dtype=np.uint8)))


class KeptParts:
    """Data that one device saved of a group: its own parts of the layers, and replicas of another owner's."""

    def __init__(self, device: int, arena: Arena, manifest: SnapshotManifest, name: str) -> None:
        names = {part.name for part in manifest.parts}
        self.device = device
        self.image = ShardedImage.from_bytes(arena.view(manifest, manifest.part(f"{name}/small")).tobytes())
        self.bytes = {
            kind == "replica": arena.view(manifest, manifest.part(f"{name}/{kind}"))
            for kind in ("shard", "replica")
            if f"{name}/{kind}" in names
        }


def kept_parts(arenas: Path, step: int) -> list[KeptParts]:
    """Return the checked parts that each device saved of each group."""
    return [
        KeptParts(device, arena, manifest, name)
        for device, (arena, manifest) in enumerate(checked(arenas, step))
        for name in sorted({part.name.rpartition("/")[0] for part in manifest.parts} - {""})
    ]


def assembled(kept: Sequence[KeptParts], lost: int | None) -> Layers:
    """Return all layers, without what the device ``lost`` saved, and with replicas only of what it saved."""
    wholes = {whole.layer: whole for one in kept for whole in one.image.layers}
    parts: dict[int, list[tuple[LayerPart, Bytes]]] = {layer: [] for layer in wholes}
    everything = [(one, held, layer) for one in kept for held in one.image.held for layer in held.layers]
    owners = {
        (layer.layer, held.start, held.end, held.of): one.device
        for one, held, layer in everything
        if not held.replica
    }
    for one, held, layer in everything:
        owner = owners[layer.layer, held.start, held.end, held.of]
        if one.device != lost and held.replica == (owner == lost):
            begin = held.offset + layer.offset
            data = one.bytes[held.replica][begin : begin + layer.size_bytes]
            parts[layer.layer].append((layer, data))
    whole = {layer: assemble_from_parts(wholes[layer], parts[layer]) for layer in wholes}
    return {layer: (header, bytes(payload)) for layer, (header, payload) in whole.items()}
