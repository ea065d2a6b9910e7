"""What a host's memory keeps of snapshots, whoever of its processes dies; and restoring from it."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from statemachine.values import HeldSnapshot, Restore, SnapshotGroup
from storage.codes import make_code, recipe

if TYPE_CHECKING:
    from ftd.sim.invariants import Invariants
    from ftd.sim.node import SimNode


@dataclass(slots=True, kw_only=True)
class Shard:
    """One device's part of a snapshot."""

    key: HeldSnapshot
    layers: dict[int, int]
    """Version of each layer of its stage."""
    devices: frozenset[int]
    """Devices of this node that take part in the snapshot."""


@dataclass(slots=True, kw_only=True)
class SimArena:
    """All devices of one host: three slots each, as in ``storage.arena``, one of them for the kept one."""

    node: str
    invariants: "Invariants"
    kept: dict[int, int] = field(default_factory=dict)
    """Per device: the step that its living trainer was told to keep."""
    slots: dict[int, list[Shard]] = field(default_factory=dict)
    """Per device, the newest last."""

    def begin(self, device: int, key: HeldSnapshot) -> None:
        """Find a slot to write into: what is not kept goes, but for the newest."""
        here = self.slots.get(device, [])
        others = [s for s in here if s.key.step != self.kept.get(device, 0) and s.key.step != key.step]
        for shard in list(here):
            kept = shard.key.job_id == key.job_id and shard.key.step == self.kept.get(device, 0)
            if not kept and shard not in others[-1:]:
                self._drop(device, shard)

    def commit(self, device: int, shard: Shard) -> None:
        self.slots.setdefault(device, []).append(shard)
        if self.holds(shard.key):
            self.invariants.written(self.node, shard.key)

    def keep(self, device: int, step: int) -> None:
        self.kept[device] = step
        for shard in list(self.slots.get(device, [])):
            if shard.key.step < step:
                self._drop(device, shard)

    def _drop(self, device: int, shard: Shard) -> None:
        self.invariants.drops(self.node, shard.key)
        self.slots[device].remove(shard)

    def remove(self, job_id: str) -> None:
        for device, here in self.slots.items():
            self.slots[device] = [shard for shard in here if shard.key.job_id != job_id]

    def lost(self) -> None:
        """The host died."""
        self.slots.clear()
        self.kept.clear()

    def parts(self, key: HeldSnapshot) -> dict[int, Shard]:
        return {device: shard for device, here in self.slots.items() for shard in here if shard.key == key}

    def holds(self, key: HeldSnapshot) -> bool:
        parts = self.parts(key)
        return bool(parts) and all(shard.devices <= set(parts) for shard in parts.values())

    def snapshots(self) -> tuple[HeldSnapshot, ...]:
        keys = {shard.key for here in self.slots.values() for shard in here}
        return tuple(
            sorted((k for k in keys if self.holds(k)), key=lambda k: (k.job_id, k.generation, k.step))
        )

    def versions(self, key: HeldSnapshot, group: SnapshotGroup) -> dict[int, int]:
        layers = {n: v for shard in self.parts(key).values() for n, v in shard.layers.items()}
        return {
            layer: layers[layer] for layer in range(group.first_layer, group.end_layer) if layer in layers
        }


def lacking(group: SnapshotGroup, present: set[str]) -> bool:
    """Cannot be made from the shards of those present."""
    lost = frozenset(index for index, owner in enumerate(group.owners) if owner not in present)
    everybody = len(lost) == len(group.owners)
    return everybody or recipe(make_code(group.protection, len(group.owners)), lost) is None


def restored(
    restore: Restore, layers: set[int], nodes: dict[str, "SimNode"], invariants: "Invariants"
) -> tuple[dict[int, int], tuple[str, ...]]:
    """Version of each of these layers, as put together now; or the nodes whose shards cannot be had."""
    key = HeldSnapshot(job_id=restore.job_id, step=restore.step, generation=restore.generation)
    found: dict[int, int] = {}
    for group in restore.groups:
        wanted = layers & set(range(group.first_layer, group.end_layer))
        if not wanted:
            continue
        there = {
            name
            for name in restore.sources
            if nodes[name].up and not nodes[name].frozen and nodes[name].arena.holds(key)
        }
        if lacking(group, there):
            return {}, tuple(sorted(set(group.owners) & set(restore.sources) - there))
        shards = [nodes[name].arena.versions(key, group) for name in group.owners if name in there]
        invariants.restores(restore, group, shards)
        found.update({layer: shards[0][layer] for layer in wanted})
    return found, ()
