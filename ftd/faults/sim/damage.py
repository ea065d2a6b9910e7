"""Bits that change in what a host keeps of a snapshot: the fault, the reading that finds it, the repair."""

from collections.abc import Callable, Iterable
from random import Random
from typing import TYPE_CHECKING

from ftd.faults.sim.arena import lacking
from statemachine.agent.events import SnapshotSpoiled
from statemachine.messages.values import HeldSnapshot, Restore

if TYPE_CHECKING:
    from ftd.faults.sim.node import SimNode
    from ftd.faults.sim.run import Simulation

_READING_S = (0.02, 0.6)
"""Until a kept snapshot is read; and from what was found to what was made again."""
_PERIOD_S = 4.0


class SimScrubber:
    """One daemon's: as ``ftd.snapshots.scrub``, of own shards."""

    def __init__(self, node: "SimNode") -> None:
        self._node = node
        self.kept: Restore | None = None
        self._rng = Random(f"scrub {node.world.seed} {node.name}")  # of its own: see ``draw``
        self._watch = 0
        self._gone_back = False
        """It was told with a rollback, with those who held something then."""

    def watch(self, kept: Restore, *, at_once: bool = False) -> None:
        before, self.kept = self.kept, kept
        if at_once or before is None or _key(before) != _key(kept):
            self._gone_back = at_once
            self._watch += 1
            self._again(0.0)

    def _again(self, pause_s: float) -> None:
        node = self._node
        node.world.at(pause_s + self._rng.uniform(*_READING_S), self._read, node.life, self._watch)

    def _here(self, life: int, watch: int) -> Restore | None:
        node = self._node
        return self.kept if node.up and node.life == life and self._watch == watch else None

    def _read(self, life: int, watch: int) -> None:
        node, kept = self._node, self._here(life, watch)
        if kept is None:
            return
        if any(shard.damaged for shard in node.arena.parts(_key(kept)).values()):
            node.world.at(self._rng.uniform(*_READING_S), self._repair, life, watch)
        else:
            self._again(_PERIOD_S)

    def _repair(self, life: int, watch: int) -> None:
        """Out of what others keep, as it is now."""
        node, kept = self._node, self._here(life, watch)
        if kept is None:
            return
        if node.frozen:
            node.world.at(0.5, self._repair, life, watch)
            return
        shards = node.arena.parts(_key(kept)).values()
        if any(shard.damaged for shard in shards):
            if repairable(kept, node, kept.sources):
                for shard in shards:
                    shard.damaged = False
            else:
                if not self._gone_back and repairable(kept, node, node.invariants.nodes):
                    what = f"its part of step {kept.step}"
                    node.invariants.broken(f"{node.name} cannot repair {what}, and others hold what it takes")
                node.feed(SnapshotSpoiled(at=node.world.now, cause="scrub", step=kept.step))
        self._again(_PERIOD_S)


def repairable(kept: Restore, node: "SimNode", names: Iterable[str]) -> bool:
    """Have ``names`` what makes this node's shards of all its groups again?"""
    nodes = node.invariants.nodes
    others = [n for name in names if (n := nodes[name]) is not node and n.up and not n.frozen]
    there = {other.name for other in others if other.arena.sound(_key(kept))}
    for group in kept.groups:
        if node.name not in group.owners:
            continue
        owner = group.owners[0]
        copied = (
            {owner}
            if any(n.name == group.buddy and n.arena.copy(_key(kept), owner) for n in others)
            else set()
        )
        if lacking(group, there, copied):
            return False
    return True


def _key(kept: Restore) -> HeldSnapshot:
    return HeldSnapshot(job_id=kept.job_id, step=kept.step, generation=kept.generation)


# --- the fault -----------------------------------------------------------------------------------


def damage_shard(sim: "Simulation") -> None:
    """A bit of what one node keeps of the newest complete snapshot is not what was written."""
    _damage(sim, 1)


def damage_shards(sim: "Simulation") -> None:
    """Of several nodes: beyond what some protections withstand."""
    _damage(sim, 3)


def _damage(sim: "Simulation", count: int) -> None:
    newest = sim.invariants.newest
    if newest is None:
        return
    key = sim.invariants.key_of(newest)
    holders = [node for node in sim.nodes.values() if node.arena.holds(key)]
    for node in sim.world.rng.sample(holders, min(count, len(holders))):
        sim.log(f"damage {node.name}'s part of the snapshot of step {key.step}")
        for shard in node.arena.parts(key).values():
            shard.damaged = True


def draw(sim: "Simulation") -> "list[tuple[str, Callable[[Simulation], None], int]]":
    """Behind a snapshot, or when everybody is about to go back to it."""
    rng = Random(f"damage {sim.world.seed}")  # of its own, so that the other draws are as they were
    if sim.snapshot.every_steps < 1 or rng.random() < 0.5:
        return []
    moments = ("SnapshotCompleted", "SnapshotCompleted", "GenerationStarted", "Quiesced", "RolledBack")
    faults = (damage_shard, damage_shard, damage_shards)
    return [(rng.choice(moments), rng.choice(faults), rng.randrange(3)) for _ in range(rng.randrange(1, 4))]
