"""The memory in which a simulated host holds snapshots. It survives the host's processes; restores read from
it.
"""

from dataclasses import dataclass, field

from ftd.faults.sim.oracle import Oracle
from statemachine.cluster.snapshots.replica_peers import copy_of
from statemachine.messages.cluster import Persist
from statemachine.messages.values import HeldSnapshot, SnapshotGroup
from storage.codes import make_code, solve_lost_cells


@dataclass(slots=True, kw_only=True)
class SimShard:
    """One device's shard of a snapshot."""

    key: HeldSnapshot
    layers: dict[int, int]
    """The state version of each layer of its stage."""
    devices: frozenset[int]
    """The devices of this node that take part in the snapshot."""
    corrupt: bool = False
    """Whether bits have changed, which every reader notices."""


@dataclass(slots=True, kw_only=True)
class SimSnapshotCopy:
    """A snapshot copy: everything that another node holds of a snapshot, received from this node in full."""

    key: HeldSnapshot
    """The snapshot, with its owner."""
    layers: dict[int, int]


@dataclass(slots=True, kw_only=True)
class SimArena:
    """The snapshot memory of one host: three slots per device, as in ``storage.arena``, one of which is for
    the retained snapshot.
    """

    node: str
    oracle: Oracle
    retained: dict[int, int] = field(default_factory=dict)
    """Step that the running trainer of each device was ordered to retain."""
    pinned: dict[int, int] = field(default_factory=dict)
    """Step that is being written to the disk, by device."""
    slots: dict[int, list[SimShard]] = field(default_factory=dict)
    """Shards of each device, the newest last."""
    retained_copies: int = 0
    """Step from which on this daemon was ordered to retain snapshot copies; 0 before the order."""
    copies: dict[str, list[SimSnapshotCopy]] = field(default_factory=dict)
    """Copies of each owner's snapshots, the newest last."""
    persisting: Persist | None = None
    """The order by which the daemon currently writes a part of a checkpoint from this memory."""

    def begin(self, device: int, key: HeldSnapshot) -> None:
        """Free a slot: drop everything that is not retained, except the newest snapshot."""
        here, retained_step, pinned = (
            self.slots.get(device, []),
            self.retained.get(device, 0),
            self.pinned.get(device, 0),
        )
        stays = {retained_step, pinned} - {0}
        others = [s for s in here if s.key.step not in stays and s.key.step != key.step]
        room = 2 - len(stays)
        spared = others[-room:] if room > 0 else []
        for shard in list(here):
            if not (shard.key.job_id == key.job_id and shard.key.step in stays) and shard not in spared:
                self._drop(device, shard)

    def commit(self, device: int, shard: SimShard) -> None:
        self.slots.setdefault(device, []).append(shard)
        if self.holds(shard.key):
            self.oracle.on_written(self.node, shard.key)

    def retain(self, device: int, step: int, pinned: int) -> None:
        self.retained[device], self.pinned[device] = step, pinned
        for shard in list(self.slots.get(device, [])):
            if shard.key.step < step and shard.key.step != pinned:
                self._drop(device, shard)

    def drop_after(self, device: int, after_step: int) -> None:
        """Drop what is later than ``after_step``, where a generation begins, since that was undone."""
        for shard in list(self.slots.get(device, [])):
            if shard.key.step > after_step:
                self._drop(device, shard)

    def _drop(self, device: int, shard: SimShard) -> None:
        self.oracle.check_dropped(self.node, shard.key, self.persisting)
        self.slots[device].remove(shard)

    # --- for others ------------------------------------------------------------------------------

    def receive(self, copy: SimSnapshotCopy) -> None:
        """Take a snapshot copy. There are three slots for each owner, too."""
        here = self.copies.setdefault(copy.key.owner, [])
        steps = sorted(old.key.step for old in here)
        retained_step = self.retained_copies if self.retained_copies in steps else steps[0] if steps else 0
        others = [old for old in here if old.key.step not in (retained_step, copy.key.step)]
        for old in list(here):
            if old.key.step == copy.key.step or (old in others and old not in others[-1:]):
                self._drop_copy(old)
        here.append(copy)
        self.oracle.on_written(self.node, copy.key)

    def keep_copies(self, step: int) -> None:
        self.retained_copies = step
        for copy in [copy for here in self.copies.values() for copy in here]:
            if copy.key.step < step:
                self._drop_copy(copy)

    def _drop_copy(self, copy: SimSnapshotCopy) -> None:
        self.oracle.check_dropped_copy(self.node, copy.key)
        self.copies[copy.key.owner].remove(copy)

    def copy(self, key: HeldSnapshot, owner: str) -> SimSnapshotCopy | None:
        wanted_key = copy_of(key, owner)
        return next((copy for copy in self.copies.get(owner, []) if copy.key == wanted_key), None)

    def copy_keys(self) -> tuple[HeldSnapshot, ...]:
        return tuple(copy.key for _, here in sorted(self.copies.items()) for copy in here)

    # --- all of it -------------------------------------------------------------------------------

    def remove(self, job_id: str) -> None:
        for device, here in self.slots.items():
            self.slots[device] = [shard for shard in here if shard.key.job_id != job_id]
        for owner, copies in self.copies.items():
            self.copies[owner] = [copy for copy in copies if copy.key.job_id != job_id]

    def remove_others(self, job_id: str) -> None:
        """Remove what other jobs left."""
        keys = {shard.key.job_id for here in self.slots.values() for shard in here}
        keys |= {copy.key.job_id for here in self.copies.values() for copy in here}
        for other in sorted(keys - {job_id}):
            self.remove(other)

    def clear(self) -> None:
        """Forget everything, since the host died."""
        self.slots.clear()
        self.retained.clear()
        self.copies.clear()
        self.retained_copies = 0
        self.pinned.clear()

    def parts(self, key: HeldSnapshot) -> dict[int, SimShard]:
        return {device: shard for device, here in self.slots.items() for shard in here if shard.key == key}

    def holds(self, key: HeldSnapshot) -> bool:
        parts = self.parts(key)
        return bool(parts) and all(shard.devices <= set(parts) for shard in parts.values())

    def is_intact(self, key: HeldSnapshot) -> bool:
        return self.holds(key) and not any(shard.corrupt for shard in self.parts(key).values())

    def snapshots(self) -> tuple[HeldSnapshot, ...]:
        keys = {shard.key for here in self.slots.values() for shard in here}
        own = sorted((k for k in keys if self.holds(k)), key=lambda k: (k.job_id, k.generation, k.step))
        return (*own, *self.copy_keys())

    def layers(self, key: HeldSnapshot) -> dict[int, int]:
        return {n: v for shard in self.parts(key).values() for n, v in shard.layers.items()}


def layers_of_group(layers: dict[int, int], group: SnapshotGroup) -> dict[int, int]:
    return {layer: layers[layer] for layer in range(group.first_layer, group.end_layer) if layer in layers}


def is_unrecoverable(group: SnapshotGroup, present: set[str], *, copied: bool) -> bool:
    """Return whether a group can be rebuilt neither from the shards of the nodes present nor from the copy of
    its first owner's shard, if there is one.
    """
    if copied:
        return False
    lost = frozenset(index for index, owner in enumerate(group.owners) if owner not in present)
    everybody = len(lost) == len(group.owners)
    if group.whole:
        return everybody
    return everybody or solve_lost_cells(make_code(group.protection, len(group.owners)), lost) is None
