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
        self.max_send_s = 0.0
        """The longest extra time that sending a copy takes."""

    def perform(self, effect: SendSnapshotCopy | RetainSnapshotCopies | RemoveSnapshots) -> None:
        node, world = self._node, self._node.world
        match effect:
            case SendSnapshotCopy():
                sending_s = world.between(0.01, 0.8) + (
                    world.between(0.0, self.max_send_s) if self.max_send_s else 0.0
                )
                world.call_later(sending_s, self._send, effect, node.life)
            case RetainSnapshotCopies():
                node.arena.keep_copies(effect.order.step)
                if effect.order.restore is not None:
                    self._scrubber.watch(effect.order.restore)
                node.report_copies()
            case RemoveSnapshots():
                node.arena.remove(effect.job_id)
                self._scrubber.retained = None

    def _send(self, effect: SendSnapshotCopy, life: int) -> None:
        """Send the copy. The daemon reports it after the replica peer does, and may die in between."""
        node, world = self._node, self._node.world
        if node.life != life:
            return
        key = HeldSnapshot(job_id=effect.job_id, step=effect.step, generation=effect.generation)
        peer = node.hosts[effect.replica_peer.node]
        reached = peer.up and not peer.frozen and node.reaches(peer)
        ids: dict[str, Any] = {"cause": effect.cause, "generation": effect.generation, "step": effect.step}
        if not reached or not node.arena.is_intact(key) or world.chance(node.step_timing.no_room_probability):
            failure = SnapshotFailed(
                generation=effect.generation, step=effect.step, detail="the replica peer cannot take it"
            )
            node.feed(SnapshotCopyFailed(at=world.now, cause=effect.cause, failure=failure))
            return
        peer.arena.receive(SimSnapshotCopy(key=copy_of(key, node.name), layers=node.arena.layers(key)))
        peer.report_copies()
        world.call_later(world.between(0.0, 0.1), self._sent, ids, life)

    def _sent(self, ids: dict[str, Any], life: int) -> None:
        if self._node.life == life:
            self._node.feed(SnapshotCopyCommitted(at=self._node.world.now, size_bytes=100, **ids))
