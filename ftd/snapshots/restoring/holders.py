"""Who keeps what of a snapshot: each node's manifests of it, and what of them is sound."""

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from ftd.errors import PeerError
from ftd.snapshots.restoring.group_layout import GroupLayout, keepers_of, layouts_of
from ftd.snapshots.shards.arenas import ArenaSnapshot, NodeArenas
from ftd.snapshots.shards.client import ShardClient
from ftd.snapshots.shards.sources import SnapshotSource
from statemachine.messages.values import Restore, SnapshotGroup
from storage.manifest import SnapshotManifest, SnapshotPart

Lose = Callable[[str, str, str], None]
"""Takes a node, a part and what is wrong with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardHolder:
    """One owner of a group, or its buddy, with what one of its devices has of some layers that is sound."""

    node: str
    owner: int
    shard: SnapshotPart | None
    small: SnapshotPart | None
    layout: GroupLayout
    held: ArenaSnapshot | None
    """``None``: it is another node's."""
    replica: SnapshotPart | None
    """Of the next owner's part, under ZeRO-1."""

    def named(self, kind: str) -> str:
        """Return the name of its ``shard`` or ``small`` part."""
        return self.layout.name_of(kind)


@dataclass(slots=True, kw_only=True)
class SnapshotHolders:
    """Of one snapshot, seen from ``node``; whom it asked it does not ask again."""

    restore: Restore
    node: str
    arenas: NodeArenas
    client: ShardClient
    lose: Lose
    _known: dict[str, list[tuple[SnapshotManifest, ArenaSnapshot | None, set[str]]]] = field(
        default_factory=dict
    )
    """By node: its manifests of this very snapshot, and the names of its damaged parts."""

    async def ask(self, groups: Iterable[SnapshotGroup]) -> None:
        """All who keep something of these, at once."""
        names = {name for group in groups for name in keepers_of(group)}
        asked = sorted((names & {*self.restore.sources, self.node}) - set(self._known))
        answers = await asyncio.gather(*(self._manifests_of(node) for node in asked))
        self._known |= dict(zip(asked, answers, strict=True))

    def of(self, group: SnapshotGroup) -> list[ShardHolder]:
        """Return those of all layers of the group: own memory first, then owners', then their buddies'; of those
        who were asked. All arenas of a node are looked into."""
        keepers = []
        for place, node in enumerate(keepers_of(group)):
            owner = min(place, len(group.owners) - 1)
            for manifest, held, damaged in self._known.get(node, ()):
                parts = {part.name: part for part in manifest.parts if part.name not in damaged}
                for layout in layouts_of(manifest, group, owner):
                    keepers.append(
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
        return sorted(keepers, key=lambda keeper: keeper.node != self.node)

    async def _manifests_of(self, node: str) -> list[tuple[SnapshotManifest, ArenaSnapshot | None, set[str]]]:
        job, step = self.restore.job_id, self.restore.step
        found: list[tuple[SnapshotManifest, ArenaSnapshot | None]]
        if node == self.node:
            held = self.arenas.find(job, step)
            damaged = set(await asyncio.to_thread(self.arenas.damaged, held))
            found = [(one.manifest, one) for one in held]
        else:
            try:
                source = SnapshotSource(node=node, address=self.restore.sources[node])
                answer = await self.client.manifest(source, job, step)
            except PeerError as error:
                self.lose(node, "manifest", str(error))
                return []
            damaged = set(answer.corrupt) if answer is not None else set()
            found = [(manifest, None) for manifest in answer.manifests] if answer is not None else []
        for name in sorted(damaged):
            self.lose(node, name, "its digest does not match")
        return [(m, own, damaged) for m, own in found if m.generation == self.restore.generation]
