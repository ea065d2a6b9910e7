"""What a simulated coordinator does at the place of checkpoints, which may be full, closed, or hang."""

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from ftd.faults.sim.world import World
from statemachine.cluster.machine import ClusterEvent
from statemachine.effects import AbandonCheckpoint, CommitCheckpoint, ExportCheckpoint, FindCheckpoint
from statemachine.events import (
    CheckpointExported,
    CheckpointExportFailed,
    CheckpointFailed,
    CheckpointWritten,
)

if TYPE_CHECKING:
    from ftd.faults.sim.invariants import Invariants

EXPORT_S = 0.5
"""An export takes this long."""


class CheckpointWork(ABC):
    """A part of ``SimCoordinator``."""

    world: World
    invariants: "Invariants"
    _life: int

    @abstractmethod
    def feed(self, event: ClusterEvent) -> None:
        """To the machine."""

    def _commit(self, effect: CommitCheckpoint, life: int) -> None:
        """A coordinator that dies has committed or has not, and mostly does not hear of it."""
        if life != self._life:
            return
        world, place = self.world, self.invariants.place
        if place.hangs_s:
            world.at(place.hangs_s, self._commit, effect, life)
            return
        if place.closed or world.chance(place.full):
            failed = CheckpointFailed(
                at=world.now, cause=effect.cause, attempt=effect.attempt, step=effect.step, detail="full"
            )
            self.feed(failed)
            return
        pruned = place.commit(effect)
        world.at(world.between(0.0, 0.2), self._committed, effect, pruned, life)

    def _committed(self, effect: CommitCheckpoint, pruned: tuple[int, ...], life: int) -> None:
        if life == self._life:
            written = CheckpointWritten(
                at=self.world.now,
                cause=effect.cause,
                attempt=effect.attempt,
                step=effect.step,
                pruned=pruned,
            )
            self.feed(written)

    def _abandon(self, effect: AbandonCheckpoint, life: int) -> None:
        place = self.invariants.place
        if life == self._life and place.hangs_s:
            self.world.at(place.hangs_s + 0.1, self._abandon, effect, life)  # Behind the commit that hangs.
        elif life == self._life:
            place.abandon(effect)

    def _export(self, effect: ExportCheckpoint, life: int) -> None:
        """What a coordinator exports that dies is exported by the next one."""
        if life != self._life:
            return
        job, kept = effect.job, self.invariants.place.kept
        at: dict[str, Any] = {"at": self.world.now, "cause": effect.cause}
        step = effect.step
        if self.invariants.place.closed or step not in kept:
            self.feed(CheckpointExportFailed(**at, job_id=job.job_id, step=step, detail="gone"))
            return
        directory = job.checkpoint.huggingface_directory
        done = CheckpointExported(
            **at, job_id=job.job_id, step=step, directory=directory, size_bytes=1, took_s=EXPORT_S
        )
        self.feed(done)

    def _find(self, effect: FindCheckpoint, life: int) -> None:
        place, now = self.invariants.place, self.world.now
        if life == self._life and place.hangs_s:
            self.world.at(place.hangs_s, self._find, effect, life)
        elif life == self._life:
            self.feed(place.refuses(effect, now) if place.closed else place.find(effect, now))
