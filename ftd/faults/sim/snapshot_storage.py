"""The snapshot memory of a simulated host as its daemon uses it: transfers and repairs that take virtual time."""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from random import Random

from ftd.errors import PeerError
from ftd.faults.sim.arena import SimShard, SimSnapshotCopy, is_unrecoverable
from ftd.faults.sim.host import SimHost, StagedLayers
from ftd.faults.sim.trainers import DESCRIPTION
from ftd.snapshots.ports import CorruptBlocks, TrainerControl
from ftd.snapshots.repair import RepairError
from ftd.snapshots.restoring.holders import ReportCorruption
from ftd.snapshots.restoring.restore import LayerRestoreError
from ftd.snapshots.shards.arenas import Corruption
from statemachine.cluster.snapshots.replica_peers import copy_of
from statemachine.effects import SendSnapshotCopy
from statemachine.messages.cluster import Persist
from statemachine.messages.values import HeldSnapshot, LayerFile, LinkHealth, ReplicaPeer, Restore
from storage.rate_limit import RateLimiter

_READING_S = (0.02, 0.6)
"""The time until a held snapshot is read, and the time that a repair takes."""
_STAGING_S = (0.1, 0.4)
_LINK_S = (0.005, 0.05)
_LINK_LIMIT_S = 2.0
"""Time after which the test of a link to a node that does not answer ends."""
_ATTEMPTS = 7
_RETRY_S = 0.5


class SimSnapshotStorage:
    """The storage of one daemon process (``ftd.snapshots.ports.SnapshotStorage`` and its parts)."""

    port = 7001
    size_bytes = 1 << 30
    device_limit_bytes: int | None = None

    def __init__(self, host: SimHost) -> None:
        self._host = host
        self.root = Path("/simulated") / host.name
        self.staging = self.checkpoints = self.scrubbing = self
        self.copies_job: str | None = None
        """The job of whose snapshots copies are accepted."""
        self.on_copies_changed: Callable[[], None] = lambda: None
        # A generator of its own: see ``drawing``.
        self._scrub_rng = Random(f"scrub {host.world.seed} {host.name}")
        self._staged_from: Restore | None = None
        """The snapshot that was staged last. A rollback names the nodes that held something at its time."""

    def connect(self, trainers: TrainerControl, on_copies_changed: Callable[[], None]) -> None:
        self.on_copies_changed = on_copies_changed

    def metrics(self) -> dict[str, int]:
        return {}

    async def start(self) -> None:
        self._host.arena.retained_copies = 0
        self._host.staged.clear()

    async def close(self) -> None:
        self.end_copies()

    def acquire(self) -> bool:
        return True

    async def scan(self) -> tuple[tuple[HeldSnapshot, ...], list[Corruption]]:
        host, world = self._host, self._host.world
        await asyncio.sleep(world.between(0.0, 0.5) + world.up_to(host.max_scan_s))
        return host.arena.snapshots(), []

    def directory(self, job_id: str, device: int) -> Path:
        return self.root / job_id / f"device-{device}"

    def remove_others(self, job_id: str) -> None:
        self._host.arena.remove_others(job_id)

    async def remove(self, job_id: str) -> None:
        self._host.arena.remove(job_id)

    def has_data(self, snapshot: Restore | None, device: int | None) -> bool:
        return bool(self._own_shards(snapshot, device))

    def flip_bit(self, snapshot: Restore | None, device: int | None) -> None:
        if shards := self._own_shards(snapshot, device):
            shards[0].corrupt = True

    def _own_shards(self, snapshot: Restore | None, device: int | None = None) -> list[SimShard]:
        if snapshot is None:
            return []
        parts = self._host.arena.parts(key_of(snapshot))
        return [shard for index, shard in sorted(parts.items()) if device in (None, index)]

    # --- copies ----------------------------------------------------------------------------------

    def begin_copies(self, job_id: str) -> None:
        if job_id != self.copies_job:
            self.end_copies()
            self.copies_job = job_id

    def end_copies(self) -> None:
        self.copies_job, self._host.arena.retained_copies = None, 0

    def held_copies(self) -> tuple[HeldSnapshot, ...]:
        return self._host.arena.copy_keys()

    def release_copies(self, job_id: str, step: int) -> None:
        if job_id != self.copies_job:
            return
        before = self.held_copies()
        self._host.arena.keep_copies(step)
        if self.held_copies() != before:
            self.on_copies_changed()

    async def send_copy(self, order: SendSnapshotCopy) -> int:
        """Send the copy. The daemon reports it after the replica peer does, and may die in between."""
        host, world = self._host, self._host.world
        await asyncio.sleep(world.between(0.01, 0.8) + world.up_to(host.max_send_s))
        key = HeldSnapshot(job_id=order.job_id, step=order.step, generation=order.generation)
        peer = host.hosts[order.replica_peer.node]
        reached = peer.serves(host) and peer.copies_job == order.job_id
        if not reached or order.step < peer.arena.retained_copies:
            raise PeerError("the replica peer cannot take it")
        if not host.arena.is_intact(key) or world.chance(host.step_timing.no_room_probability):
            raise PeerError("there is no room, or nothing to send")
        peer.arena.receive(SimSnapshotCopy(key=copy_of(key, host.name), layers=host.arena.layers(key)))
        world.call_later(0.0, peer.on_copies_changed)
        await asyncio.sleep(world.between(0.0, 0.1))
        return 100

    async def check_links(self, peers: Sequence[ReplicaPeer]) -> tuple[LinkHealth, ...]:
        host, rng = self._host, self._host.health_rng
        found: list[LinkHealth] = []
        for peer in peers:
            if not host.hosts[peer.node].serves(host):
                await asyncio.sleep(_LINK_LIMIT_S)
                continue
            await asyncio.sleep(rng.uniform(*_LINK_S))
            found.append(LinkHealth(node=peer.node, latency_ms=0.1, mb_s=1000.0 * rng.uniform(0.8, 1.2)))
        return tuple(found)

    # --- staging ---------------------------------------------------------------------------------

    def make_staging(self, job_id: str, generation: int) -> Path:
        self.remove_staging(job_id)
        return self.root / job_id / f"staging-{generation}"

    def remove_staging(self, job_id: str) -> None:
        self._host.staged.clear()

    async def stage(
        self,
        restore: Restore,
        layers: Sequence[int],
        directory: Path,
        *,
        borrows: bool,
        on_layer: Callable[[int], None],
        on_staged: Callable[[], None],
        report_corruption: ReportCorruption,
    ) -> dict[str, int]:
        """Stage layers from what the hosts or the checkpoint store hold when they are read."""
        host, world, store = self._host, self._host.world, self._host.checkpoint_store
        await asyncio.sleep(world.between(*_STAGING_S) + world.up_to(host.max_read_s))
        found: dict[int, int] = {}
        bad: tuple[str, ...] = ()
        for _ in range(_ATTEMPTS):
            if restore.url:
                await self._store_answers()
                found, bad = store.read(restore, set(layers)), ()
            else:
                found, bad = host.restore_layers(restore, set(layers), borrows=borrows)
            if not bad:
                break
            await asyncio.sleep(_RETRY_S)
        if bad or not found:
            corrupt = bool(restore.url) and not store.unavailable
            raise LayerRestoreError("it cannot be had", bad, corrupt=corrupt)
        changed = set() if restore.url or not borrows else self._changed_layers(restore)
        done: dict[int, int] = {}
        before = host.staged.get(str(directory))
        for layer in layers:
            await asyncio.sleep(world.between(0.0, 0.01))
            done[layer] = found[layer]
            host.staged[str(directory)] = StagedLayers(
                layers={**(before.layers if before is not None else {}), **done},
                corrupt=frozenset(changed.intersection(done))
                if before is None
                else before.corrupt.difference(done),
            )
            on_layer(layer)
        if not restore.url:
            self._staged_from = restore
            on_staged()
        return {}

    def _changed_layers(self, restore: Restore) -> set[int]:
        return {layer for shard in self._own_shards(restore) if shard.corrupt for layer in shard.layers}

    # --- persistent checkpoints --------------------------------------------------------------------

    async def write(
        self, order: Persist, description: bytes, flow: RateLimiter, report_corruption: ReportCorruption
    ) -> list[LayerFile]:
        """Write one layer after the other; each may fail."""
        host, world = self._host, self._host.world
        host.arena.persisting = order
        try:
            if 0 in order.layers and description != DESCRIPTION:
                host.oracle.violated(f"{host.name} writes layer 0 without the description of its model")
            await asyncio.sleep(world.between(0.02, 0.5))
            files: list[LayerFile] = []
            for layer in order.layers:
                await self._store_answers()
                files.append(self._write_layer(order, layer))
                await asyncio.sleep(world.between(0.02, 0.6))
            return files
        except Exception as error:
            if not isinstance(error, PeerError):  # The daemon reports any error to the coordinator.
                world.fail(error)
            raise
        finally:
            if host.arena.persisting is order:
                host.arena.persisting = None

    def _write_layer(self, order: Persist, layer: int) -> LayerFile:
        """Write a layer from what the nodes' memory holds now.

        :raises PeerError: it cannot be read or written.
        """
        host, store, record = self._host, self._host.checkpoint_store, order.record
        parts = Restore(
            job_id=order.job_id,
            step=record.step,
            generation=record.generation,
            groups=record.groups,
            sources=order.sources,
        )
        found, bad = ({}, ()) if store.unavailable else host.restore_layers(parts, {layer})
        if bad or layer not in found or host.world.chance(store.write_failure_probability):
            raise PeerError("no room, or nothing to write")
        return store.write(order, layer, found[layer])

    async def _store_answers(self) -> None:
        """Wait while the checkpoint store hangs."""
        store = self._host.checkpoint_store
        while store.hangs_for_s:  # noqa: ASYNC110  # it may hang again
            await asyncio.sleep(store.hangs_for_s)

    # --- scrubbing -------------------------------------------------------------------------------

    async def find_corrupt(self, snapshot: Restore, flow: RateLimiter) -> Sequence[CorruptBlocks]:
        await asyncio.sleep(self._scrub_rng.uniform(*_READING_S))
        parts = self._host.arena.parts(key_of(snapshot))
        return [
            CorruptBlocks(owner="", part=f"device-{device}", blocks=(0,), size_bytes=1)
            for device, shard in sorted(parts.items())
            if shard.corrupt
        ]

    def is_held(self, snapshot: Restore, corrupt: CorruptBlocks) -> bool:
        return self._shard(snapshot, corrupt) is not None

    async def repair(self, snapshot: Restore, corrupt: CorruptBlocks) -> Sequence[str]:
        """Repair a shard from what other nodes hold now."""
        host = self._host
        await asyncio.sleep(self._scrub_rng.uniform(*_READING_S))
        shard = self._shard(snapshot, corrupt)
        if shard is None:
            raise RepairError(f"the snapshot of step {snapshot.step} was released")
        if not is_repairable(snapshot, host, snapshot.sources):
            if snapshot is not self._staged_from and is_repairable(snapshot, host, host.hosts):
                what = f"its shard of step {snapshot.step}"
                host.oracle.violated(f"{host.name} cannot repair {what}, but others hold what it takes")
            raise RepairError("nobody holds what it takes")
        shard.corrupt = False
        return sorted(snapshot.sources)

    def _shard(self, snapshot: Restore, corrupt: CorruptBlocks) -> SimShard | None:
        return self._host.arena.parts(key_of(snapshot)).get(int(corrupt.part.removeprefix("device-")))


def is_repairable(snapshot: Restore, host: SimHost, names: Iterable[str]) -> bool:
    """Return whether ``names`` hold what it takes to rebuild this host's shards of all its groups."""
    hosts, key = host.hosts, key_of(snapshot)
    others = [n for name in names if (n := hosts[name]) is not host and n.up and not n.frozen]
    there = {other.name for other in others if other.arena.is_intact(key)}
    for group in snapshot.groups:
        if host.name not in group.owners:
            continue
        copied = any(n.name == group.replica_peer and n.arena.copy(key, group.owners[0]) for n in others)
        if is_unrecoverable(group, there, copied=copied):
            return False
    return True


def key_of(snapshot: Restore) -> HeldSnapshot:
    return HeldSnapshot(job_id=snapshot.job_id, step=snapshot.step, generation=snapshot.generation)
