"""A simulated daemon's orders about snapshots: its own part sent to its buddy, what it keeps, what may go."""

from typing import Any

from ftd.faults.sim.arena import Copy
from ftd.faults.sim.host import SimHost
from ftd.faults.sim.scrubber import SimScrubber
from statemachine.agent.events import CopyCommitted, CopyFailed
from statemachine.cluster.snapshots.buddies import copy_of
from statemachine.effects import KeepCopies, RemoveSnapshots, SendCopy
from statemachine.messages.common import SnapshotFailed
from statemachine.messages.values import HeldSnapshot


class SimCopies:
    """One daemon's."""

    def __init__(self, node: SimHost, scrubber: SimScrubber) -> None:
        self._node, self._scrubber = node, scrubber
        self.sends_s = 0.0
        """So much longer a copy may take, at most."""

    def perform(self, effect: SendCopy | KeepCopies | RemoveSnapshots) -> None:
        node, world = self._node, self._node.world
        match effect:
            case SendCopy():
                sending_s = world.between(0.01, 0.8) + (
                    world.between(0.0, self.sends_s) if self.sends_s else 0.0
                )
                world.at(sending_s, self._send, effect, node.life)
            case KeepCopies():
                node.arena.keep_copies(effect.order.step)
                if effect.order.restore is not None:
                    self._scrubber.watch(effect.order.restore)
                node.tell_copies()
            case RemoveSnapshots():
                node.arena.remove(effect.job_id)
                self._scrubber.kept = None

    def _send(self, effect: SendCopy, life: int) -> None:
        """The daemon's word follows the buddy's, and may come to nothing in between."""
        node, world = self._node, self._node.world
        if node.life != life:
            return
        key = HeldSnapshot(job_id=effect.job_id, step=effect.step, generation=effect.generation)
        buddy = node.hosts[effect.buddy.node]
        reached = buddy.up and not buddy.frozen and node.reaches(buddy)
        said: dict[str, Any] = {"cause": effect.cause, "generation": effect.generation, "step": effect.step}
        if not reached or not node.arena.sound(key) or world.chance(node.pace.full):
            failure = SnapshotFailed(
                generation=effect.generation, step=effect.step, detail="the buddy cannot take it"
            )
            node.feed(CopyFailed(at=world.now, cause=effect.cause, failure=failure))
            return
        buddy.arena.receive(Copy(key=copy_of(key, node.name), layers=node.arena.layers(key)))
        buddy.tell_copies()
        world.at(world.between(0.0, 0.1), self._sent, said, life)

    def _sent(self, said: dict[str, Any], life: int) -> None:
        if self._node.life == life:
            self._node.feed(CopyCommitted(at=self._node.world.now, size_bytes=100, **said))
