"""What a simulated coordinator does at the place of checkpoints, which may be full, closed, or hang."""

from collections.abc import Callable
from typing import Any

from ftd.coordinator.ports import Feed
from ftd.driver import Driver
from ftd.faults.sim.checkpoint_store import SimCheckpointStore
from ftd.faults.sim.process import ProcessLoop
from ftd.faults.sim.world import World
from statemachine.effects import AbandonCheckpoint, CommitCheckpoint, ExportCheckpoint, FindCheckpoint
from statemachine.events import (
    CheckpointCommitFailed,
    CheckpointCommitted,
    ExportCompleted,
    ExportFailed,
)
from statemachine.messages.values import Checkpoint, Job

EXPORT_S = 0.5
"""An export takes this long."""


class SimCheckpoints:
    """One process's (``ftd.coordinator.ports.CheckpointOperations``)."""

    def __init__(
        self, world: World, place: SimCheckpointStore, loop: ProcessLoop, feed: Feed, driver: Driver
    ) -> None:
        self._world, self._place, self._loop, self._feed, self._now = world, place, loop, feed, driver.now

    def commit(self, effect: CommitCheckpoint) -> None:
        self._loop.call_later(self._world.between(0.001, 0.2), self._commit, effect)

    def abandon(self, effect: AbandonCheckpoint) -> None:
        self._loop.call_later(self._world.between(0.2, 0.3), self._abandon, effect)

    def export(self, effect: ExportCheckpoint) -> None:
        self._loop.call_later(EXPORT_S, self._export, effect)

    def find(self, effect: FindCheckpoint) -> None:
        self._loop.call_later(self._world.between(0.001, 0.2), self._find, effect)

    def find_initial(self, job: Job, then: Callable[[Checkpoint | None, str], None]) -> None:
        """Simulated users look it up themselves."""
        self._loop.call_soon(then, self._place.newest(), "")

    def _commit(self, effect: CommitCheckpoint) -> None:
        """A coordinator that dies has committed or has not, and mostly does not hear of it."""
        world, place = self._world, self._place
        if place.hangs_s:
            self._loop.call_later(place.hangs_s, self._commit, effect)
            return
        said: dict[str, Any] = {"cause": effect.cause, "attempt": effect.attempt, "step": effect.step}
        if place.closed or world.chance(place.full):
            self._feed(CheckpointCommitFailed(at=self._now(), detail="full", **said))
            return
        pruned = place.commit(effect)
        self._loop.call_later(
            world.between(0.0, 0.2),
            lambda: self._feed(CheckpointCommitted(at=self._now(), pruned=pruned, **said)),
        )

    def _abandon(self, effect: AbandonCheckpoint) -> None:
        place = self._place
        if place.hangs_s:
            self._loop.call_later(place.hangs_s + 0.1, self._abandon, effect)  # Behind the commit that hangs.
        else:
            place.abandon(effect)

    def _export(self, effect: ExportCheckpoint) -> None:
        """What a coordinator exports that dies is exported by the next one."""
        job, place = effect.job, self._place
        at: dict[str, Any] = {"at": self._now(), "cause": effect.cause}
        step = effect.step
        if place.closed or step not in place.kept:
            self._feed(ExportFailed(**at, job_id=job.job_id, step=step, detail="gone"))
            return
        directory = job.checkpoint.huggingface_directory
        self._feed(
            ExportCompleted(
                **at, job_id=job.job_id, step=step, directory=directory, size_bytes=1, took_s=EXPORT_S
            )
        )

    def _find(self, effect: FindCheckpoint) -> None:
        place, now = self._place, self._now()
        if place.hangs_s:
            self._loop.call_later(place.hangs_s, self._find, effect)
        else:
            self._feed(place.refuses(effect, now) if place.closed else place.find(effect, now))
