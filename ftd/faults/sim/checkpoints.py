"""The access of a simulated coordinator to the checkpoint store, which may be full, unavailable, or hang."""

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
from statemachine.messages.values import CheckpointRecord, Job

EXPORT_S = 0.5
"""The duration of an export."""


class SimCheckpoints:
    """The checkpoint port of one process (``ftd.coordinator.ports``)."""

    def __init__(
        self, world: World, store: SimCheckpointStore, loop: ProcessLoop, feed: Feed, driver: Driver
    ) -> None:
        self._world, self._store, self._loop, self._feed, self._now = world, store, loop, feed, driver.now

    def commit(self, effect: CommitCheckpoint) -> None:
        self._loop.call_later(self._world.between(0.001, 0.2), self._commit, effect)

    def abandon(self, effect: AbandonCheckpoint) -> None:
        self._loop.call_later(self._world.between(0.2, 0.3), self._abandon, effect)

    def export(self, effect: ExportCheckpoint) -> None:
        self._loop.call_later(EXPORT_S, self._export, effect)

    def find(self, effect: FindCheckpoint) -> None:
        self._loop.call_later(self._world.between(0.001, 0.2), self._find, effect)

    def find_initial(self, job: Job, then: Callable[[CheckpointRecord | None, str], None]) -> None:
        """Answer with the newest checkpoint. Simulated users choose where to start themselves."""
        self._loop.call_soon(then, self._store.newest(), "")

    def _commit(self, effect: CommitCheckpoint) -> None:
        """Commit a checkpoint. A coordinator that dies then has committed or has not, and mostly does not
        learn which.
        """
        world, store = self._world, self._store
        if store.hangs_for_s:
            self._loop.call_later(store.hangs_for_s, self._commit, effect)
            return
        ids: dict[str, Any] = {"cause": effect.cause, "attempt": effect.attempt, "step": effect.step}
        if store.unavailable or world.chance(store.write_failure_probability):
            self._feed(CheckpointCommitFailed(at=self._now(), detail="full", **ids))
            return
        pruned = store.commit(effect)
        self._loop.call_later(
            world.between(0.0, 0.2),
            lambda: self._feed(CheckpointCommitted(at=self._now(), pruned=pruned, **ids)),
        )

    def _abandon(self, effect: AbandonCheckpoint) -> None:
        store = self._store
        if store.hangs_for_s:
            # After the commit that hangs.
            self._loop.call_later(store.hangs_for_s + 0.1, self._abandon, effect)
        else:
            store.abandon(effect)

    def _export(self, effect: ExportCheckpoint) -> None:
        """Export a checkpoint. If the coordinator dies before that, the next one exports it."""
        job, store = effect.job, self._store
        at: dict[str, Any] = {"at": self._now(), "cause": effect.cause}
        step = effect.step
        if store.unavailable or step not in store.checkpoints:
            self._feed(ExportFailed(**at, job_id=job.job_id, step=step, detail="gone"))
            return
        directory = job.checkpoint.huggingface_directory
        self._feed(
            ExportCompleted(
                **at, job_id=job.job_id, step=step, directory=directory, size_bytes=1, took_s=EXPORT_S
            )
        )

    def _find(self, effect: FindCheckpoint) -> None:
        store, now = self._store, self._now()
        if store.hangs_for_s:
            self._loop.call_later(store.hangs_for_s, self._find, effect)
        else:
            self._feed(store.find(effect, now))
