"""The holders of a snapshot: the manifests of each node, and the parts of them that are intact."""

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from ftd.errors import PeerError
from ftd.snapshots.restoring.group_layout import GroupLayout, find_layouts, holder_nodes
from ftd.snapshots.shards.arenas import ArenaSnapshot, NodeArenas
from ftd.snapshots.shards.client import ShardClient
from ftd.snapshots.shards.sources import SnapshotSource
from statemachine.messages.values import Restore, SnapshotGroup
from storage.manifest import SnapshotManifest, SnapshotPart

ReportCorruption = Callable[[str, str, str], None]
"""Callback for a corrupt part, with the node, the part and the problem."""


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

    def part_name(self, kind: str) -> str:
        """Return the name of its ``shard`` or ``small`` part."""
        return self.layout.name_of(kind)


@dataclass(slots=True, kw_only=True)
class SnapshotHolders:
    """The holders of one snapshot as seen from ``node``. Each node is asked once."""

    restore: Restore
    node: str
    arenas: NodeArenas
    client: ShardClient
    report_corruption: ReportCorruption
    _known: dict[str, list[tuple[SnapshotManifest, ArenaSnapshot | None, set[str]]]] = field(
        default_factory=dict
    )
    """Manifests that each node has of this very snapshot, and the names of its corrupt parts."""

    async def ask(self, groups: Iterable[SnapshotGroup]) -> None:
        """Ask all nodes that hold something of these groups, at once."""
        names = {name for group in groups for name in holder_nodes(group)}
        asked = sorted((names & {*self.restore.sources, self.node}) - set(self._known))
        answers = await asyncio.gather(*(self._manifests_of(node) for node in asked))
        self._known |= dict(zip(asked, answers, strict=True))

    def holders_of(self, group: SnapshotGroup) -> list[ShardHolder]:
        """Return the holders of layers of the group among the nodes that were asked: this node first, then
        owners, then their replica peers. All arenas of a node count.
        """
        holders = []
        for place, node in enumerate(holder_nodes(group)):
            owner = min(place, len(group.owners) - 1)
            for manifest, held, corrupt in self._known.get(node, ()):
                parts = {part.name: part for part in manifest.parts if part.name not in corrupt}
                for layout in find_layouts(manifest, group, owner):
                    holders.append(
                        ShardHolder(
                            node=node,
                            owner=owner,
                            shard=parts.get(layout.name_of("shard")),
                            small=parts.get(layout.name_of("small")),
                            layout=layout,
                            held=held,
                            replica=parts.get(layout.name_of("replica")),
                        )
                    )
        return sorted(holders, key=lambda holder: holder.node != self.node)

    async def _manifests_of(self, node: str) -> list[tuple[SnapshotManifest, ArenaSnapshot | None, set[str]]]:
        job, step = self.restore.job_id, self.restore.step
        found: list[tuple[SnapshotManifest, ArenaSnapshot | None]]
        if node == self.node:
            held = self.arenas.find(job, step)
            corrupt = set(await asyncio.to_thread(self.arenas.find_corrupt, held))
            found = [(one.manifest, one) for one in held]
        else:
            try:
                source = SnapshotSource(node=node, address=self.restore.sources[node])
                answer = await self.client.manifest(source, job, step)
            except PeerError as error:
                self.report_corruption(node, "manifest", str(error))
                return []
            corrupt = set(answer.corrupt) if answer is not None else set()
            found = [(manifest, None) for manifest in answer.manifests] if answer is not None else []
        for name in sorted(corrupt):
            self.report_corruption(node, name, "its digest does not match")
        return [(m, own, corrupt) for m, own in found if m.generation == self.restore.generation]
