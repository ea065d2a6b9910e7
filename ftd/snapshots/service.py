"""Snapshots in a node's memory, for its daemon: arenas, the server, copies, checkpoints, layers staged.

Trainers write into the arenas; the agent machine decides when, and which snapshots count. What is here:
arenas for the job, other nodes' reading, layers staged for a rollback (``ftd.snapshots.trainer_staging``) and the
writing of persistent checkpoints (``ftd.snapshots.persist``).
"""

import asyncio
import shutil
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import structlog

from ftd.config.daemon import DaemonConfig
from ftd.errors import ConfigurationError, PeerError
from ftd.snapshots.persist import Persister
from ftd.snapshots.repair_writer import RepairWriter, TrainerControl
from ftd.snapshots.restoring.restore import DamageTold
from ftd.snapshots.scrub import Scrubber
from ftd.snapshots.shards.arenas import Corruption, NodeArenas
from ftd.snapshots.shards.client import ShardClient
from ftd.snapshots.shards.copies import CopyStore
from ftd.snapshots.shards.copy_sender import CopySender
from ftd.snapshots.shards.protocol import bearer_token
from ftd.snapshots.shards.server import ShardServer
from ftd.snapshots.shards.sources import SnapshotSource
from ftd.snapshots.trainer_staging import TrainerStaging
from statemachine.agent.events import (
    SnapshotCopiesChanged,
    SnapshotCopyCommitted,
    SnapshotCopyFailed,
    SnapshotCorrupted,
    SnapshotsFound,
)
from statemachine.effects import SendSnapshotCopy
from statemachine.events import Event
from statemachine.messages.cluster import Persist
from statemachine.messages.common import SnapshotFailed
from statemachine.messages.values import HeldSnapshot, Job, Restore
from storage.codes import has_buddy

log = structlog.get_logger("ftd.node")

Told = Callable[[str, str, dict[str, Any]], None]
"""Takes an event's name, reason and details."""


class SnapshotService:
    """``await start()`` before any trainer runs; ``await close()`` when none does any more."""

    def __init__(
        self,
        config: DaemonConfig,
        secret: str,
        *,
        host: str,
        feed: Callable[[Event], None],
        stamp: Callable[[], dict[str, Any]],
        tell: Told,
        trainers: TrainerControl,
    ) -> None:
        """:param host: where the server listens. :param stamp: ``at`` and ``cause`` of an event."""
        self._config = config
        self._feed, self._stamp, self._tell = feed, stamp, tell
        self._token = bearer_token(secret)
        tls = config.snapshot_tls
        self._tls = tls.client_context() if tls is not None else None
        self._arenas = NodeArenas(
            config.snapshot_dir, devices=config.devices, limit_bytes=config.snapshot_limit_bytes
        )
        self._copies = CopyStore(self._arenas, node=config.node, changed=self._say_copies)
        self._server = ShardServer(
            self._arenas,
            self._token,
            host=host,
            port=config.snapshot_port,
            rate_bytes_s=config.snapshot_rate_bytes_s,
            copies=self._copies,
            tls=tls.server_context() if tls is not None else None,
        )
        self._persister = Persister(
            node=config.node,
            arenas=self._arenas,
            token=self._token,
            tls=self._tls,
            rate_bytes_s=config.checkpoint_rate_bytes_s,
            feed=feed,
            stamp=stamp,
            tell=self._teller,
        )
        self._mender = RepairWriter(self._arenas, self._copies, trainers)
        self._scrubber = Scrubber(
            node=config.node,
            arenas=self._arenas,
            token=self._token,
            tls=self._tls,
            rate_bytes_s=config.scrub_rate_bytes_s,
            period_s=config.timing.scrub_s,
            mend=self._mender.mend,
            say=tell,
            spoiled=lambda step: feed(SnapshotCorrupted(**stamp(), step=step)),
        )
        self.stager = self._made_stager()
        """Layers staged for trainers that go back."""
        self._serving, self._checkpoint_url = False, ""
        self._sending: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def _made_stager(self) -> TrainerStaging:
        return TrainerStaging(
            node=self._config.node,
            arenas=self._arenas,
            token=self._token,
            tls=self._tls,
            feed=self._feed,
            stamp=self._stamp,
            tell=self._teller,
            # What was decoded around is made again: it may be needed with the next failure.
            staged=lambda restore: self._scrubber.watch(restore, at_once=True),
        )

    @property
    def port(self) -> int:
        return self._server.port

    @property
    def size_bytes(self) -> int:
        """That arenas may take, all devices together."""
        return self._arenas.size_bytes

    @property
    def memory_directory(self) -> Path:
        """Where the arenas are."""
        return self._arenas.root

    @property
    def checkpoint_directory(self) -> Path | None:
        """Of the present job, where its checkpoints go into a directory."""
        url = self._checkpoint_url
        return Path(url) if url.startswith("/") else None

    def figures(self) -> dict[str, int]:
        """For metrics: bytes sent to other nodes, requests without the token, memory that arenas may take."""
        return {
            "sent_bytes": self._server.rate.taken_bytes,
            "unauthorised": self._server.unauthorised,
            "snapshot_limit_bytes": self.size_bytes,
        }

    async def start(self) -> None:
        """Own the arenas and listen.

        :raises ConfigurationError: the directory, the limit or the port cannot be used.
        """
        self._arenas.open()
        try:
            await self._server.start()
        except OSError as error:
            raise ConfigurationError(
                f"cannot listen on port {self._config.snapshot_port}: {error.strerror}",
                field="node.snapshot_port",
                remedy="is another daemon using it? choose another port, or 0 for any free one",
            ) from error
        self._serving = True

    async def close(self) -> None:
        """What the arenas hold stays."""
        tasks = [*self._tasks, *((self._sending,) if self._sending is not None else ())]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.stager.close()
        await self._persister.close()
        await self._scrubber.close()
        if self._serving:
            await self._server.close()
        self._copies.end()
        self._arenas.close()

    async def take_stock(self) -> None:
        """Feed ``SnapshotsFound``: what earlier daemons of this name left, read and verified."""
        began = time.monotonic()
        held, problems = await asyncio.to_thread(self._arenas.take_stock)
        for problem in problems:
            self._say_damaged(self._config.node, problem)
        if held:
            log.info("take_stock", snapshots=held, took_s=round(time.monotonic() - began, 3))
            self._feed(SnapshotsFound(**self._stamp(), snapshots=_named(held)))

    # --- a job's arenas --------------------------------------------------------------------------

    def prepare(self, job: Job, device: int) -> tuple[str, int | None]:
        """Directory and limit of a device's arena; an empty directory where no snapshots are taken."""
        self._checkpoint_url = job.checkpoint.url
        if not job.snapshot.every_steps:
            return "", None
        if not self._arenas.own():
            reason = f"another daemon of this name uses {self._arenas.root}"
            self._tell("SnapshotsUnavailable", reason, {"device": device})
            return "", None
        self._arenas.remove_others(job.job_id)
        self._copies.begin(job.job_id, self._config.snapshot_limit_bytes)
        own_bytes = self._arenas.limit_bytes
        if own_bytes is not None and (has_buddy(job.snapshot.protection) or job.snapshot.auto_protection):
            own_bytes //= 2  # The other half is for another node's copy.
        return str(self._arenas.directory(job.job_id, device)), own_bytes

    def remove(self, job_id: str) -> None:
        """The job is over for good."""
        self.abandon()
        self._persister.stop()
        self._scrubber.stop()
        self._copies.end()
        self._run(asyncio.to_thread(self._arenas.remove, job_id))

    def abandon(self) -> None:
        """A newer generation, or the end: nobody waits for what is being staged or sent."""
        self.stager.abandon()
        if self._sending is not None:
            self._sending.cancel()
            self._sending = None

    # --- persistent checkpoints ------------------------------------------------------------------

    def persist(self, order: Persist) -> None:
        """See ``Persister.begin``."""
        self._persister.begin(order)

    def described(self, job_id: str, description: bytes) -> None:
        """See ``Persister.keep_description``."""
        self._persister.keep_description(job_id, description)

    def stop_persisting(self, attempt: str) -> None:
        self._persister.stop(attempt)

    # --- copies ------------------------------------------------------------------------------------

    def keep_copies(self, job_id: str, step: int, kept: Restore | None = None) -> None:
        """Release what is older, and give back what nobody uses any more.

        :param kept: the snapshot of ``step``, which is verified and repaired from now on.
        """
        if kept is not None:
            self._scrubber.watch(kept)
        for directory in self._copies.keep(job_id, step):
            self._run(asyncio.to_thread(shutil.rmtree, directory, ignore_errors=True))

    def stores(self, device: int | None) -> bool:
        """Is there something for ``flip``?"""
        return bool(self._mender.stored(self._scrubber.kept, device))

    def flip(self, device: int | None) -> None:
        """Chaos: change a bit of what this node, or one device of it, keeps."""
        if stored := self._mender.stored(self._scrubber.kept, device):
            self._mender.flip(stored)

    def send_copy(self, order: SendSnapshotCopy) -> None:
        """Feed SnapshotCopyCommitted or SnapshotCopyFailed; an order that is under way is over."""
        if self._sending is not None:
            self._sending.cancel()
        self._sending = asyncio.ensure_future(self._send_copy(order))

    async def _send_copy(self, order: SendSnapshotCopy) -> None:
        began = time.monotonic()
        said: dict[str, Any] = {"generation": order.generation, "step": order.step}
        held = [
            one
            for one in self._arenas.find(order.job_id, order.step)
            if not one.owner and one.manifest.generation == order.generation
        ]
        to = SnapshotSource(node=order.replica_peer.node, address=order.replica_peer.address)
        try:
            if not held:
                raise PeerError("what was written is not in this node's memory")
            async with ShardClient(self._token, tls=self._tls) as client:
                sender = CopySender(client, self._arenas, owner=self._config.node, rate=self._server.rate)
                size = await sender.send(held, to)
        except (PeerError, OSError, ValueError) as error:
            detail = f"no copy at its buddy {order.replica_peer.node}: {error}"
            log.warning("send_copy", reason=detail, **said)
            self._feed(SnapshotCopyFailed(**self._stamp(), failure=SnapshotFailed(**said, detail=detail)))
        else:
            log.info("send_copy", to=to.node, size_bytes=size, took_s=time.monotonic() - began, **said)
            self._feed(SnapshotCopyCommitted(**self._stamp(), **said, size_bytes=size))

    def _say_copies(self) -> None:
        self._feed(SnapshotCopiesChanged(**self._stamp(), snapshots=_named(self._copies.held())))

    def _teller(self, job_id: str, step: int) -> DamageTold:
        return lambda node, part, detail: self._say_damaged(
            node, Corruption(job_id=job_id, step=step, part=part, detail=detail)
        )

    def _say_damaged(self, node: str, damage: Corruption) -> None:
        where = f"{damage.part} of the snapshot of step {damage.step}" if damage.step else damage.part
        self._tell(
            "ShardCorrupted",
            f"{node}: {where} cannot be used: {damage.detail}",
            {"owner": node, "job": damage.job_id, "step": damage.step, "part": damage.part},
        )

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _named(held: list[tuple[str, int, int, str]]) -> tuple[HeldSnapshot, ...]:
    return tuple(
        HeldSnapshot(job_id=job, step=step, generation=generation, owner=owner)
        for job, step, generation, owner in held
    )
