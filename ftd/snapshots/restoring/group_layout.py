"""The layout of a group of layers in a manifest, and the nodes that hold its shards."""

import msgspec
import structlog
from msgspec.structs import replace

from statemachine.messages.values import SnapshotGroup
from storage.manifest import SnapshotManifest

log = structlog.get_logger("ftd.node")


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
