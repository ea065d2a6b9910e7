"""A simulated daemon's part of a persistent checkpoint: it writes one layer after the other, and then reports."""

from typing import Any

from ftd.faults.sim.host import SimHost
from statemachine.agent.events import PersistEnded
from statemachine.effects import PersistLayers, StopPersisting
from statemachine.messages.cluster import LayersPersisted, Persist, PersistFailed
from statemachine.messages.values import LayerFile, Restore


class SimWriter:
    """The checkpoint writer of one daemon."""

    def __init__(self, node: SimHost) -> None:
        self._node = node

    def perform(self, effect: PersistLayers | StopPersisting) -> None:
        match effect:
            case PersistLayers():
                self._node.arena.persisting = effect.order
                world = self._node.world
                world.call_later(world.between(0.02, 0.5), self._write, effect, ())
            case StopPersisting():
                self._node.arena.persisting = None

    def stopped(self) -> None:
        """Stop writing, since the daemon is gone."""
        self._node.arena.persisting = None

    def _write(self, effect: PersistLayers, files: tuple[LayerFile, ...]) -> None:
        node, order, world = self._node, effect.order, self._node.world
        if self._node.arena.persisting is not order:
            return
        if node.frozen or node.checkpoint_store.hangs_for_s:
            world.call_later(0.5, self._write, effect, files)
            return
        store = node.checkpoint_store
        of: dict[str, Any] = {"job_id": order.job_id, "attempt": order.attempt, "step": order.record.step}
        if len(files) == len(order.layers):
            self._node.arena.persisting = None
            self._answer(effect, LayersPersisted(**of, layers=files, took_s=1.0))
            return
        file = self._file(order, order.layers[len(files)])
        if file is None or world.chance(store.write_failure_probability):
            self._node.arena.persisting = None
            self._answer(effect, PersistFailed(**of, detail="no room, or nothing to write"))
            return
        world.call_later(world.between(0.02, 0.6), self._write, effect, (*files, file))

    def _file(self, order: Persist, layer: int) -> LayerFile | None:
        """Write a layer from what the nodes' memory holds now. Return ``None`` if it cannot be read or
        written.
        """
        store, record = self._node.checkpoint_store, order.record
        if store.unavailable:
            return None
        parts = Restore(
            job_id=order.job_id,
            step=record.step,
            generation=record.generation,
            groups=record.groups,
            sources=order.sources,
        )
        found, bad = self._node.restore_layers(parts, {layer})
        return None if bad or layer not in found else store.write(order, layer, found[layer])

    def _answer(self, effect: PersistLayers, answer: LayersPersisted | PersistFailed) -> None:
        node = self._node
        node.feed(PersistEnded(at=node.world.now, cause=effect.cause, answer=answer))
