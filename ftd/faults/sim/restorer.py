"""A simulated daemon's restoring: it fetches the layers that a device needs from a snapshot or a checkpoint,
and passes them on to the trainer.
"""

from ftd.faults.sim.host import SimHost
from ftd.faults.sim.scrubber import SimScrubber
from ftd.faults.sim.trainers import SimTrainer
from planner.values import Device
from statemachine.agent.events import StagingFailed
from statemachine.cluster.rules import owned_layers
from statemachine.effects import ResumeTrainer
from statemachine.messages.cluster import RestoreFailed
from statemachine.messages.values import Restore

_ATTEMPTS = 6
_RETRY_S = 0.5


class SimRestorer:
    """The restorer of one daemon."""

    def __init__(self, node: SimHost, scrubber: SimScrubber) -> None:
        self._node, self._scrubber = node, scrubber
        self.max_read_s = 0.0
        """The longest extra time that a read takes."""

    def restore(self, trainer: SimTrainer, effect: ResumeTrainer) -> None:
        """Fetch what the device needs of a snapshot or checkpoint, then resume the trainer."""
        if effect.resume.restore is None or self._layers(trainer, effect) is None:
            trainer.resume(effect.resume)
        elif self.max_read_s:
            world = self._node.world
            world.call_later(world.up_to(self.max_read_s), self._read, trainer, effect, _ATTEMPTS)
        else:
            self._read(trainer, effect, _ATTEMPTS)

    def _layers(self, trainer: SimTrainer, effect: ResumeTrainer) -> frozenset[int] | None:
        device = Device(node=self._node.name, index=trainer.device)
        return owned_layers(effect.resume.plan).get(device)

    def _read(self, trainer: SimTrainer, effect: ResumeTrainer, attempts: int) -> None:
        node, resume = self._node, effect.resume
        restore, layers, store = resume.restore, self._layers(trainer, effect), node.checkpoint_store
        assert restore is not None, "there is something to read"
        assert layers is not None, "the device has a rank"
        if not node.up or node.agent.generation != resume.generation:
            return
        if restore.url and store.hangs_for_s:
            node.world.call_later(store.hangs_for_s, self._read, trainer, effect, attempts)
            return
        staged, bad = self._staged(restore, set(layers))
        if bad and attempts:
            node.world.call_later(_RETRY_S, self._read, trainer, effect, attempts - 1)
        elif bad or not staged:
            node.feed(
                StagingFailed(
                    at=node.world.now,
                    cause=effect.cause,
                    failure=RestoreFailed(
                        generation=resume.generation,
                        detail="it cannot be had",
                        bad=bad,
                        corrupt=bool(restore.url) and not store.unavailable,
                    ),
                )
            )
        else:
            trainer.do(trainer.resume, resume, staged)
            self._scrubber.watch(restore, at_once=True)

    def _staged(self, restore: Restore, layers: set[int]) -> tuple[dict[int, int], tuple[str, ...]]:
        node = self._node
        if restore.url:
            return node.checkpoint_store.read(restore, layers), ()
        return node.restore_layers(restore, layers)
