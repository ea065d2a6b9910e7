"""The snapshot service of a node's daemon: arenas, snapshot server, copies, checkpoints and staging of layers.

Trainers write into the arenas. The agent machine decides when, and which snapshots count. This module
provides the arenas of the job, lets other nodes read them, stages layers for a rollback
(``ftd.snapshots.trainer_staging``) and writes persistent checkpoints (``ftd.snapshots.persist``).
"""

import asyncio
from pathlib import Path
from typing import Any

import structlog

from ftd.config.daemon import DaemonConfig
from ftd.driver import Driver
from ftd.errors import PeerError
from ftd.snapshots.persist import Persister
from ftd.snapshots.ports import SnapshotStorage, TrainerControl
from ftd.snapshots.restoring.holders import ReportCorruption
from ftd.snapshots.scrub import PublishEvent, Scrubber
from ftd.snapshots.shards.arenas import Corruption
from ftd.snapshots.trainer_staging import TrainerStaging
from ftd.tasks import cancel_all, start_task
from statemachine.agent.events import (
    SnapshotCopiesChanged,
    SnapshotCopyCommitted,
    SnapshotCopyFailed,
    SnapshotCorrupted,
    SnapshotRepaired,
    SnapshotsFound,
)
from statemachine.effects import SendSnapshotCopy
from statemachine.messages.common import SnapshotFailed
from statemachine.messages.values import Job, Restore
from storage.codes import has_buddy

log = structlog.get_logger("ftd.node")


class SnapshotService:
    """The service; call ``start`` before any trainer runs, and ``close`` when no trainer runs any more."""

    def __init__(
        self,
        config: DaemonConfig,
        storage: SnapshotStorage,
        *,
        driver: Driver,
        publish_event: PublishEvent,
        trainers: TrainerControl,
    ) -> None:
        self.storage, self._node = storage, config.node
        self._driver, self._publish_event = driver, publish_event
        storage.connect(trainers, self._feed_copies)
        self.persister = Persister(
            writing=storage.checkpoints,
            rate_bytes_s=config.checkpoint_rate_bytes_s,
            driver=driver,
            report_corruption=self._corruption_reporter,
        )
        self._scrubber = Scrubber(
            node=config.node,
            operations=storage.scrubbing,
            rate_bytes_s=config.scrub_rate_bytes_s,
            period_s=config.timing.scrub_s,
            publish_event=publish_event,
            on_repaired=lambda step: driver.feed(SnapshotRepaired(**driver.stamp(), step=step)),
            on_unrepairable=lambda step: driver.feed(SnapshotCorrupted(**driver.stamp(), step=step)),
        )
        self.stager = TrainerStaging(
            node=config.node,
            operations=storage.staging,
            driver=driver,
            report_corruption=self._corruption_reporter,
            # A shard that was decoded is repaired at once: it may be needed at the next failure.
            on_staged=lambda restore: self._scrubber.start(restore, at_once=True),
        )
        """Stages layers for trainers that roll back."""
        self._checkpoint_url = ""
        self._sending: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def memory_directory(self) -> Path:
        """Directory of the arenas."""
        return self.storage.root

    @property
    def checkpoint_directory(self) -> Path | None:
        """Directory of the present job's checkpoints; ``None`` if they go to a URL or nowhere."""
        url = self._checkpoint_url
        return Path(url) if url.startswith("/") else None

    async def start(self) -> None:
        """Acquire the arenas and listen.

        :raises ConfigurationError: the directory, the limit or the port cannot be used.
        """
        await self.storage.start()

    async def close(self) -> None:
        """Stop serving. The snapshots stay in memory."""
        await cancel_all([*self._tasks, *((self._sending,) if self._sending is not None else ())])
        await self.stager.close()
        await self.persister.close()
        await self._scrubber.close()
        await self.storage.close()

    async def scan(self) -> None:
        """Feed ``SnapshotsFound``: what earlier daemons of this name left, read and verified."""
        began = self._driver.now()
        held, problems = await self.storage.scan()
        for problem in problems:
            self._report_corruption(self._node, problem)
        if held:
            took_s = round(self._driver.now() - began, 3)
            log.info("snapshots_found", snapshots=held, took_s=took_s)
            self._driver.feed(SnapshotsFound(**self._driver.stamp(), snapshots=held))

    # --- a job's arenas --------------------------------------------------------------------------

    def prepare(self, job: Job, device: int) -> tuple[str, int | None]:
        """Return directory and limit of a device's arena; the directory is empty where no snapshots are taken."""
        self._checkpoint_url = job.checkpoint.url
        if not job.snapshot.every_steps:
            return "", None
        try:
            if self.storage.acquire():
                return self._arena_of(job, device)
            reason = f"another daemon of this name uses {self.storage.root}"
        except OSError as error:  # The trainer waits for its instruction.
            reason = f"{error.filename}: {error.strerror}" if error.filename else str(error)
        self._publish_event("SnapshotsUnavailable", reason, {"device": device})
        return "", None

    def _arena_of(self, job: Job, device: int) -> tuple[str, int | None]:
        self.storage.remove_others(job.job_id)
        self.storage.begin_copies(job.job_id)
        own_bytes = self.storage.device_limit_bytes
        if own_bytes is not None and (has_buddy(job.snapshot.protection) or job.snapshot.auto_protection):
            own_bytes //= 2  # The other half is for another node's copy.
        return str(self.storage.directory(job.job_id, device)), own_bytes

    def remove(self, job_id: str) -> None:
        """Release everything of a job that is over."""
        self.abandon()
        self.persister.stop()
        self._scrubber.stop()
        self.storage.end_copies()
        start_task(self.storage.remove(job_id), self._tasks)

    def abandon(self) -> None:
        """Stop staging and sending, since a newer generation begins or the job ends."""
        self.stager.abandon()
        if self._sending is not None:
            self._sending.cancel()
            self._sending = None

    # --- copies ------------------------------------------------------------------------------------

    def retain_copies(self, job_id: str, step: int, retained: Restore | None = None) -> None:
        """Release older copies, and remove the directories that are not used any more.

        :param retained: the snapshot of ``step``, which is scrubbed from now on.
        """
        if retained is not None:
            self._scrubber.start(retained)
        self.storage.release_copies(job_id, step)

    def has_snapshot_data(self, device: int | None) -> bool:
        """Return whether there is something for ``flip_bit`` to change."""
        return self.storage.has_data(self._scrubber.snapshot, device)

    def flip_bit(self, device: int | None) -> None:
        """Flip a bit in the memory of this node, or of one device, as an injected fault."""
        self.storage.flip_bit(self._scrubber.snapshot, device)

    def send_copy(self, order: SendSnapshotCopy) -> None:
        """Send a copy and feed SnapshotCopyCommitted or SnapshotCopyFailed; an earlier order is cancelled."""
        if self._sending is not None:
            self._sending.cancel()
        self._sending = asyncio.ensure_future(self._send_copy(order))

    async def _send_copy(self, order: SendSnapshotCopy) -> None:
        began = self._driver.now()
        key: dict[str, Any] = {"generation": order.generation, "step": order.step}
        to = order.replica_peer.node
        try:
            size = await self.storage.send_copy(order)
        except (PeerError, OSError, ValueError) as error:
            detail = f"no copy at its replica peer {to}: {error}"
            log.warning("send_copy_failed", reason=detail, **key)
            self._driver.feed(
                SnapshotCopyFailed(**self._driver.stamp(), failure=SnapshotFailed(**key, detail=detail))
            )
        else:
            log.info("copy_sent", to=to, size_bytes=size, took_s=self._driver.now() - began, **key)
            self._driver.feed(SnapshotCopyCommitted(**self._driver.stamp(), **key, size_bytes=size))

    def _feed_copies(self) -> None:
        self._driver.feed(SnapshotCopiesChanged(**self._driver.stamp(), snapshots=self.storage.held_copies()))

    def _corruption_reporter(self, job_id: str, step: int) -> ReportCorruption:
        return lambda node, part, detail: self._report_corruption(
            node, Corruption(job_id=job_id, step=step, part=part, detail=detail)
        )

    def _report_corruption(self, node: str, corruption: Corruption) -> None:
        where = (
            f"{corruption.part} of the snapshot of step {corruption.step}"
            if corruption.step
            else corruption.part
        )
        self._publish_event(
            "ShardCorrupted",
            f"{node}: {where} cannot be used: {corruption.detail}",
            {"owner": node, "job": corruption.job_id, "step": corruption.step, "part": corruption.part},
        )
