"""The snapshot memory of a node's host: arenas in files, copies of other nodes' snapshots, and the server from
which other nodes read both.
"""

import asyncio
import shutil
from collections.abc import Callable, Sequence

from ftd.config.daemon import DaemonConfig
from ftd.errors import PeerError
from ftd.snapshots.persist import CheckpointWriter
from ftd.snapshots.ports import TrainerControl
from ftd.snapshots.repair_writer import RepairWriter
from ftd.snapshots.scrub import ArenaScrubbing
from ftd.snapshots.shards.arenas import Corruption, NodeArenas
from ftd.snapshots.shards.client import ShardClient
from ftd.snapshots.shards.copies import CopyStore
from ftd.snapshots.shards.copy_sender import CopySender
from ftd.snapshots.shards.link_check import check_links
from ftd.snapshots.shards.protocol import bearer_token
from ftd.snapshots.shards.server import ShardServer
from ftd.snapshots.shards.sources import SnapshotSource
from ftd.snapshots.trainer_staging import LayerStaging
from ftd.tasks import cancel_all, start_task
from ftd.transport.http_server import listen
from statemachine.effects import SendSnapshotCopy
from statemachine.messages.values import HeldSnapshot, LinkHealth, ReplicaPeer, Restore


class LocalSnapshotStorage:
    """The memory of this host (``ftd.snapshots.ports.SnapshotStorage``)."""

    def __init__(self, config: DaemonConfig) -> None:
        """:raises ConfigurationError: the configuration has no shared secret."""
        self._node, self._configured_port = config.node, config.snapshot_port
        self._token = bearer_token(config.require_secret())
        tls = config.snapshot_tls
        self._tls = tls.client_context() if tls is not None else None
        self._arenas = arenas = NodeArenas(
            config.snapshot_dir, devices=config.devices, limit_bytes=config.snapshot_limit_bytes
        )
        self.root, self.device_limit_bytes = arenas.root, arenas.limit_bytes
        self.acquire, self.directory, self.remove_others = (
            arenas.acquire,
            arenas.directory,
            arenas.remove_others,
        )
        self._copies = copies = CopyStore(arenas, node=config.node)
        self.begin_copies, self.end_copies, self.held_copies = copies.begin, copies.end, copies.held
        self._server = ShardServer(
            arenas,
            self._token,
            host=config.listening_host,
            port=config.snapshot_port,
            rate_bytes_s=config.snapshot_rate_bytes_s,
            copies=copies,
            tls=tls.server_context() if tls is not None else None,
        )
        self.staging = LayerStaging(node=self._node, arenas=arenas, token=self._token, tls=self._tls)
        self.checkpoints = CheckpointWriter(node=self._node, arenas=arenas, token=self._token, tls=self._tls)
        self._serving = False
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def port(self) -> int:
        return self._server.port

    @property
    def size_bytes(self) -> int:
        return self._arenas.size_bytes

    def connect(self, trainers: TrainerControl, on_copies_changed: Callable[[], None]) -> None:
        self._copies.changed = on_copies_changed
        self._repair_writer = RepairWriter(self._arenas, self._copies, trainers)
        self.scrubbing = ArenaScrubbing(
            node=self._node,
            arenas=self._arenas,
            token=self._token,
            tls=self._tls,
            write_block=self._repair_writer.write_block,
        )

    def metrics(self) -> dict[str, int]:
        return {
            "sent_bytes": self._server.rate.acquired_bytes,
            "unauthorised": self._server.unauthorized,
            "snapshot_limit_bytes": self.size_bytes,
        }

    async def start(self) -> None:
        self._arenas.open()
        await listen(self._server.start(), self._configured_port, field="node.snapshot_port")
        self._serving = True

    async def close(self) -> None:
        await cancel_all(self._tasks)
        if self._serving:
            await self._server.close()
        self._copies.end()
        self._arenas.close()

    async def scan(self) -> tuple[tuple[HeldSnapshot, ...], list[Corruption]]:
        return await asyncio.to_thread(self._arenas.scan)

    async def remove(self, job_id: str) -> None:
        await asyncio.to_thread(self._arenas.remove, job_id)

    def has_data(self, snapshot: Restore | None, device: int | None) -> bool:
        return bool(self._repair_writer.find_own_parts(snapshot, device))

    def flip_bit(self, snapshot: Restore | None, device: int | None) -> None:
        if stored := self._repair_writer.find_own_parts(snapshot, device):
            self._repair_writer.flip_bit(stored)

    # --- copies ----------------------------------------------------------------------------------

    def release_copies(self, job_id: str, step: int) -> None:
        """Release older copies, and remove the directories that are not used any more."""
        for directory in self._copies.release_older(job_id, step):
            start_task(asyncio.to_thread(shutil.rmtree, directory, ignore_errors=True), self._tasks)

    async def send_copy(self, order: SendSnapshotCopy) -> int:
        held = [
            one
            for one in self._arenas.find(order.job_id, order.step)
            if not one.owner and one.manifest.generation == order.generation
        ]
        if not held:
            raise PeerError("the snapshot is not in this node's memory")
        to = SnapshotSource(node=order.replica_peer.node, address=order.replica_peer.address)
        async with ShardClient(self._token, tls=self._tls) as client:
            sender = CopySender(client, self._arenas, owner=self._node, rate=self._server.rate)
            return await sender.send(held, to)

    async def check_links(self, peers: Sequence[ReplicaPeer]) -> tuple[LinkHealth, ...]:
        return await check_links(peers, self._token, self._tls)
