"""Snapshots in an arena."""

from storage.arena import Arena, Slot
from storage.manifest import SnapshotManifest, SnapshotPart, digest_of


def fill(slot: Slot, value: int) -> None:
    slot.view[:] = value


def manifest_of(slot: Slot, step: int, *sizes: int) -> SnapshotManifest:
    """Return a manifest of parts ``p0``, ``p1``, … in this order and of these sizes."""
    parts, end = [], 0
    for index, size in enumerate(sizes or (len(slot.view),)):
        digest = digest_of(slot.view[end : end + size])
        parts.append(SnapshotPart(name=f"p{index}", offset=end, size_bytes=size, digest=digest))
        end += size
    return SnapshotManifest(
        job_id="job", step=step, generation=1, slot=slot.number, parts=tuple(parts), layout={"of": "test"}
    )


def snapshot(arena: Arena, step: int, size: int = 10_000) -> SnapshotManifest:
    slot = arena.begin(size)
    fill(slot, step % 251)
    manifest = manifest_of(slot, step)
    arena.commit(manifest)
    return manifest
