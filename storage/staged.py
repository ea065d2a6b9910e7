"""Layers that a node has staged for its trainers: for each a small file that says where its bytes are.

A layer's payload (``runtime.layers.state``) consists of *chunks*. They are in files that the node made for
it or, where a snapshot in its memory holds the bytes unchanged, in the snapshot's own slot
(``storage.arena``). The node has not read such borrowed bytes. The reader verifies them block by block as
it copies them, and checks afterwards that the snapshot's manifest is still the same. Slots are written
again only after the manifest is removed.
"""

from pathlib import Path

import msgspec

from storage.atomic import atomic_file
from storage.errors import CorruptDataError
from storage.manifest import SnapshotPart


class PayloadChunk(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The next ``size_bytes`` of a payload: ``data``, or bytes of the file ``path`` from ``offset`` on."""

    size_bytes: int
    path: str = ""
    offset: int = 0
    data: bytes = b""
    part: SnapshotPart | None = None
    """Blocks of the file that contain the chunk, for its reader to verify; ``None`` if the chunk is intact."""


class BorrowedSnapshot(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A snapshot whose bytes are borrowed: the path of its manifest, and the manifest's first line."""

    manifest: str
    digest: str

    def is_present(self) -> bool:
        """Return whether the snapshot is still the same."""
        try:
            with Path(self.manifest).open("rb") as file:
                return file.readline().strip() == self.digest.encode()
        except OSError:
            return False


class StagedLayer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A staged layer (``runtime.layers.state``), and the snapshots that it borrows bytes from."""

    header: bytes
    chunks: tuple[PayloadChunk, ...]
    """Chunks in the order of the payload."""
    borrowed: tuple[BorrowedSnapshot, ...] = ()

    @property
    def size_bytes(self) -> int:
        """Size of the payload."""
        return sum(chunk.size_bytes for chunk in self.chunks)


def write_staged(directory: Path, layer: int, staged: StagedLayer) -> None:
    """Write the file of a staged layer; readers see the old or the new one.

    :raises OSError: there is no room.
    """
    with atomic_file(_path(directory, layer)) as draft:
        draft.write_bytes(msgspec.msgpack.encode(staged))


def read_staged(directory: Path, layer: int) -> StagedLayer:
    """Return a staged layer.

    :raises OSError: it is not there.
    :raises CorruptDataError: it is malformed.
    """
    try:
        return msgspec.msgpack.decode(_path(directory, layer).read_bytes(), type=StagedLayer)
    except msgspec.DecodeError as error:
        raise CorruptDataError(f"what is staged of layer {layer} is malformed: {error}") from None


def _path(directory: Path, layer: int) -> Path:
    return directory / f"layer-{layer}.staged"
