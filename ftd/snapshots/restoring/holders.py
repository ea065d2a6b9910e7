"""The holders of a snapshot: the layouts of groups of layers in their manifests, and the intact parts."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import msgspec
import structlog
from msgspec.structs import replace

from ftd.snapshots.shards.arenas import ArenaSnapshot, NodeArenas
from ftd.snapshots.shards.client import ShardClient
from ftd.snapshots.shards.protocol import NodeManifest
from ftd.snapshots.shards.sources import PartLocation, RangeRequest, SnapshotSource
from statemachine.messages.values import Restore, SnapshotGroup
from storage.manifest import SnapshotManifest, SnapshotPart

log = structlog.get_logger("ftd.node")

ReportCorruption = Callable[[str, str, str], None]
"""Callback for a corrupt part, with the node, the part and the problem."""


class GroupLayout(msgspec.Struct, frozen=True, kw_only=True):
    """A manifest's layout of one group: some layers of a ``SnapshotGroup``, which the devices of a stage
    divide among themselves. ``runtime`` writes it.
    """

    first_layer: int
    end_layer: int
    owners: tuple[str, ...]
    owner: int
    scheme: str
    bucket_bytes: int
    parted: bool = False
    """Whether each owner has parts of its own (``storage.partimage``) instead of a shard of a common bucket."""
    device: int = 0
    """Number of the device in its stage, if others of the stage hold other parts of the same layers."""

    @property
    def layers(self) -> range:
        return range(self.first_layer, self.end_layer)

    def name_of(self, kind: str) -> str:
        """Return the name of a part: ``shard``, ``replica`` or ``small``."""
        group = f"group-{self.first_layer}.{self.device}" if self.device else f"group-{self.first_layer}"
        return f"{group}/{kind}"

    def within(self, group: SnapshotGroup) -> SnapshotGroup:
        """Return these layers of the group."""
        return replace(group, first_layer=self.first_layer, end_layer=self.end_layer)


class _Layout(msgspec.Struct, frozen=True, kw_only=True):
    groups: tuple[GroupLayout, ...]


def holder_nodes(group: SnapshotGroup) -> tuple[str, ...]:
    """Return the owners in their order, then the replica peer of a single owner."""
    return (*group.owners, group.replica_peer) if group.replica_peer else group.owners


def find_layouts(manifest: SnapshotManifest, group: SnapshotGroup, owner: int) -> list[GroupLayout]:
    """Return the layouts of layers of the group in a manifest that names the very same owners."""
    try:
        layout = msgspec.convert(manifest.layout, _Layout)
    except msgspec.ValidationError as error:
        log.warning("layout_invalid", step=manifest.step, reason=str(error))
        return []
    return [
        found
        for found in layout.groups
        if (found.owners, found.owner, found.scheme) == (group.owners, owner, group.protection)
        and group.first_layer <= found.first_layer < found.end_layer <= group.end_layer
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardHolder:
    """An owner of a group, or its replica peer, with the intact parts that one of its devices holds of some
    layers.
    """

    node: str
    owner: int
    shard: SnapshotPart | None
    small: SnapshotPart | None
    layout: GroupLayout
    held: ArenaSnapshot | None
    """The snapshot in this node's memory; ``None`` if another node holds it."""
    replica: SnapshotPart | None
    """The replica of the next owner's part, under ZeRO-1."""


@dataclass(slots=True, kw_only=True)
class SnapshotReader:
    """A reader of one snapshot in the memory of ``node`` and of the nodes that ``restore`` names."""

    restore: Restore
    node: str
    arenas: NodeArenas
    client: ShardClient

    def own_snapshots(self) -> tuple[ArenaSnapshot, ...]:
        """Return what is in this node's memory of the snapshot's step, of any generation."""
        return self.arenas.find(self.restore.job_id, self.restore.step)

    async def manifests_of(self, node: str) -> NodeManifest:
        """Return what another node holds of the snapshot's step, of any generation.

        :raises PeerError: it cannot be reached, or its answer is malformed.
        """
        return await self.client.manifest(self._source(node), self.restore.job_id, self.restore.step)

    async def fetch(self, node: str, part: SnapshotPart, pieces: Iterable[tuple[int, memoryview]]) -> None:
        """Fetch bytes of a part that another node holds: from each offset on, as many as its memory has room for.

        :raises PeerError: they cannot be fetched.
        """
        location = PartLocation(
            source=self._source(node), job_id=self.restore.job_id, step=self.restore.step, part=part
        )
        await self.client.fetch(RangeRequest(location=location, first=at, into=into) for at, into in pieces)

    def _source(self, node: str) -> SnapshotSource:
        return SnapshotSource(node=node, address=self.restore.sources[node])
