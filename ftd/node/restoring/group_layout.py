"""What a manifest says of a group of layers, and which nodes have its shards."""

import msgspec
import structlog

from statemachine.values import SnapshotGroup
from storage.manifest import Manifest

log = structlog.get_logger("ftd.node")


class GroupLayout(msgspec.Struct, frozen=True, kw_only=True):
    """What a manifest's layout says of one group (``runtime`` writes it)."""

    first_layer: int
    end_layer: int
    owners: tuple[str, ...]
    owner: int
    scheme: str
    bucket_bytes: int
    parts: int = 0
    """Under ZeRO-1 each owner has one of so many parts (``storage.partimage``); 0: all have the same."""


class _Layout(msgspec.Struct, frozen=True, kw_only=True):
    groups: tuple[GroupLayout, ...]


def keepers_of(group: SnapshotGroup) -> tuple[str, ...]:
    """Owners in their order, then the only one's buddy."""
    return (*group.owners, group.buddy) if group.buddy else group.owners


def layout_of(manifest: Manifest, group: SnapshotGroup, owner: int) -> GroupLayout | None:
    """What the manifest says of the group, if it speaks of the very same one."""
    try:
        layout = msgspec.convert(manifest.layout, _Layout)
    except msgspec.ValidationError as error:
        log.warning("layout", step=manifest.step, reason=str(error))
        return None
    for found in layout.groups:
        same = (found.first_layer, found.end_layer, found.owners, found.owner, found.scheme)
        if same == (group.first_layer, group.end_layer, group.owners, owner, group.protection):
            return found
    return None
