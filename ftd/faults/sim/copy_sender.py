"""A simulated daemon's handling of orders about snapshots: it sends its shard to its replica peer, and retains
or removes snapshots.
"""

from typing import Any

from ftd.faults.sim.arena import SimSnapshotCopy
from ftd.faults.sim.host import SimHost
from ftd.faults.sim.scrubber import SimScrubber
from statemachine.agent.events import SnapshotCopyCommitted, SnapshotCopyFailed
from statemachine.cluster.snapshots.replica_peers import copy_of
from statemachine.effects import RemoveSnapshots, RetainSnapshotCopies, SendSnapshotCopy
from statemachine.messages.common import SnapshotFailed
from statemachine.messages.values import HeldSnapshot


class SimCopySender:
    """The copy sender of one daemon."""

    def __init__(self, node: SimHost, scrubber: SimScrubber) -> None:
        self._node, self._scrubber = node, scrubber
        self.sends_s = 0.0
        """The longest extra time that sending a copy takes."""

    def perform(self, effect: SendSnapshotCopy | RetainSnapshotCopies | RemoveSnapshots) -> None:
        node, world = self._node, self._node.world
        match effect:
            case SendSnapshotCopy():
                sending_s = world.between(0.01, 0.8) + (
                    world.between(0.0, self.sends_s) if self.sends_s else 0.0
                )
                world.call_later(sending_s, self._send, effect, node.life)
            case RetainSnapshotCopies():
                node.arena.keep_copies(effect.order.step)
                if effect.order.restore is not None:
                    self._scrubber.watch(effect.order.restore)
                node.report_copies()
            case RemoveSnapshots():
                node.arena.remove(effect.job_id)
                self._scrubber.kept = None

    def _send(self, effect: SendSnapshotCopy, life: int) -> None:
        """Send the copy. The daemon reports it after the replica peer does, and may die in between."""
        node, world = self._node, self._node.world
        if node.life != life:
            return
        key = HeldSnapshot(job_id=effect.job_id, step=effect.step, generation=effect.generation)
        buddy = node.hosts[effect.replica_peer.node]
        reached = buddy.up and not buddy.frozen and node.reaches(buddy)
        said: dict[str, Any] = {"cause": effect.cause, "generation": effect.generation, "step": effect.step}
        if not reached or not node.arena.sound(key) or world.chance(node.pace.full):
            failure = SnapshotFailed(
                generation=effect.generation, step=effect.step, detail="the buddy cannot take it"
            )
            node.feed(SnapshotCopyFailed(at=world.now, cause=effect.cause, failure=failure))
            return
        buddy.arena.receive(SimSnapshotCopy(key=copy_of(key, node.name), layers=node.arena.layers(key)))
        buddy.report_copies()
        world.call_later(world.between(0.0, 0.1), self._sent, said, life)

    def _sent(self, said: dict[str, Any], life: int) -> None:
        if self._node.life == life:
            self._node.feed(SnapshotCopyCommitted(at=self._node.world.now, size_bytes=100, **said))
