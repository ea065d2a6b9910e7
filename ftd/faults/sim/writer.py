"""A simulated daemon's part of a persistent checkpoint: one layer after the other, and then the answer."""

from typing import TYPE_CHECKING, Any

from statemachine.agent.events import PersistEnded
from statemachine.effects import PersistLayers, StopPersisting
from statemachine.messages.cluster import LayersPersisted, Persist, PersistFailed
from statemachine.messages.values import LayerOnDisk

if TYPE_CHECKING:
    from ftd.faults.sim.node import SimNode


class SimWriter:
    """One daemon's."""

    def __init__(self, node: "SimNode") -> None:
        self._node = node
        self.order: Persist | None = None
        """What is being written."""

    def perform(self, effect: PersistLayers | StopPersisting) -> None:
        match effect:
            case PersistLayers():
                self.order = effect.order
                world = self._node.world
                world.at(world.between(0.02, 0.5), self._write, effect, ())
            case StopPersisting():
                self.order = None

    def stopped(self) -> None:
        """The daemon is gone."""
        self.order = None

    def _write(self, effect: PersistLayers, files: tuple[LayerOnDisk, ...]) -> None:
        node, order, world = self._node, effect.order, self._node.world
        if self.order is not order:
            return
        if node.frozen or node.invariants.place.hangs_s:
            world.at(0.5, self._write, effect, files)
            return
        place = node.invariants.place
        of: dict[str, Any] = {"job_id": order.job_id, "attempt": order.attempt, "step": order.record.step}
        if len(files) == len(order.layers):
            self.order = None
            self._answer(effect, LayersPersisted(**of, layers=files, took_s=1.0))
            return
        file = place.write(node, order, order.layers[len(files)])
        if file is None or world.chance(place.full):
            self.order = None
            self._answer(effect, PersistFailed(**of, detail="no room, or nothing to write"))
            return
        world.at(world.between(0.02, 0.6), self._write, effect, (*files, file))

    def _answer(self, effect: PersistLayers, answer: LayersPersisted | PersistFailed) -> None:
        node = self._node
        node.feed(PersistEnded(at=node.world.now, cause=effect.cause, answer=answer))
