"""A simulated daemon's scrubber: it reads the host's shards of a snapshot, and repairs changed bits."""

from collections.abc import Iterable
from random import Random

from ftd.faults.sim.arena import is_unrecoverable
from ftd.faults.sim.host import SimHost
from statemachine.agent.events import SnapshotCorrupted, SnapshotRepaired
from statemachine.messages.values import HeldSnapshot, Restore

_READING_S = (0.02, 0.6)
"""The time until a held snapshot is read, and the time that a repair takes."""
_PERIOD_S = 4.0


class SimScrubber:
    """The scrubber of one daemon's own shards, as ``ftd.snapshots.scrub``."""

    def __init__(self, node: SimHost) -> None:
        self._node = node
        self.retained: Restore | None = None
        self._rng = Random(f"scrub {node.world.seed} {node.name}")  # A generator of its own: see ``drawing``.
        self._watch = 0
        self._after_rollback = False
        """Whether the current snapshot came with a rollback, which names the nodes that held something at that
        time.
        """

    def watch(self, retained: Restore, *, at_once: bool = False) -> None:
        before, self.retained = self.retained, retained
        if at_once or before is None or _key(before) != _key(retained):
            self._after_rollback = at_once
            self._watch += 1
            self._schedule(0.0)

    def _schedule(self, pause_s: float) -> None:
        node = self._node
        node.world.call_later(pause_s + self._rng.uniform(*_READING_S), self._read, node.life, self._watch)

    def _here(self, life: int, watch: int) -> Restore | None:
        node = self._node
        return self.retained if node.up and node.life == life and self._watch == watch else None

    def _read(self, life: int, watch: int) -> None:
        node, retained = self._node, self._here(life, watch)
        if retained is None:
            return
        if any(shard.corrupt for shard in node.arena.parts(_key(retained)).values()):
            node.world.call_later(self._rng.uniform(*_READING_S), self._repair, life, watch)
        else:
            self._schedule(_PERIOD_S)

    def _repair(self, life: int, watch: int) -> None:
        """Repair the shards from what other nodes hold now."""
        node, retained = self._node, self._here(life, watch)
        if retained is None:
            return
        if node.frozen:
            node.world.call_later(0.5, self._repair, life, watch)
            return
        shards = node.arena.parts(_key(retained)).values()
        if any(shard.corrupt for shard in shards):
            if repairable(retained, node, retained.sources):
                for shard in shards:
                    shard.corrupt = False
                node.feed(SnapshotRepaired(at=node.world.now, cause="scrub", step=retained.step))
            else:
                if not self._after_rollback and repairable(retained, node, node.hosts):
                    what = f"its shard of step {retained.step}"
                    node.oracle.violated(f"{node.name} cannot repair {what}, but others hold what it takes")
                node.feed(SnapshotCorrupted(at=node.world.now, cause="scrub", step=retained.step))
        self._schedule(_PERIOD_S)


def repairable(retained: Restore, node: SimHost, names: Iterable[str]) -> bool:
    """Return whether ``names`` hold what it takes to rebuild this node's shards of all its groups."""
    nodes = node.hosts
    others = [n for name in names if (n := nodes[name]) is not node and n.up and not n.frozen]
    there = {other.name for other in others if other.arena.is_intact(_key(retained))}
    for group in retained.groups:
        if node.name not in group.owners:
            continue
        owner = group.owners[0]
        copied = (
            {owner}
            if any(n.name == group.replica_peer and n.arena.copy(_key(retained), owner) for n in others)
            else set()
        )
        if is_unrecoverable(group, there, copied):
            return False
    return True


def _key(retained: Restore) -> HeldSnapshot:
    return HeldSnapshot(job_id=retained.job_id, step=retained.step, generation=retained.generation)
