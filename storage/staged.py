"""Layers that a node has ready for its trainers: for each a small file that says where its bytes are.

A layer's payload (``runtime.layers.state``) lies in *pieces*: in files that the node made for it, and where a
snapshot in its memory has the bytes as they are, in the very slot (``storage.arena``). What is lent so was
not read by the node: who copies it verifies it block by block, and looks behind the copy whether the
snapshot's manifest is still the same. Slots are written again only after that is gone.
"""

from collections.abc import Sequence
from pathlib import Path

import msgspec

from storage.errors import CorruptDataError
from storage.manifest import SnapshotPart


class PayloadChunk(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The next ``size_bytes`` of a payload: ``data``, or bytes of the file ``path`` from ``offset``."""

    size_bytes: int
    path: str = ""
    offset: int = 0
    data: bytes = b""
    part: SnapshotPart | None = None
    """Of the file: the blocks that the piece is in, for who reads it to verify. ``None``: they are sound."""


class BorrowedSnapshot(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A snapshot whose bytes are lent: the file of its manifest, and how that begins."""

    manifest: str
    digest: str

    def there(self) -> bool:
        """Is the snapshot the one that it was?"""
        try:
            with Path(self.manifest).open("rb") as file:
                return file.readline().strip() == self.digest.encode()
        except OSError:
            return False


class StagedLayer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A layer (``runtime.layers.state``), and whose bytes of it are lent."""

    header: bytes
    chunks: tuple[PayloadChunk, ...]
    """In the order of the payload."""
    borrowed: tuple[BorrowedSnapshot, ...] = ()

    @property
    def size_bytes(self) -> int:
        """Of the payload."""
        return sum(piece.size_bytes for piece in self.chunks)


def write_staged(directory: Path, layer: int, staged: StagedLayer) -> None:
    """Readers see what was there before, or all of this.

    :raises OSError: there is no room.
    """
    path = _path(directory, layer)
    draft = path.with_suffix(".draft")
    draft.write_bytes(msgspec.msgpack.encode(staged))
    draft.replace(path)


def write_staged_payload(directory: Path, layer: int, header: bytes, payload: bytes | memoryview) -> None:
    """A layer whose payload is at hand.

    :raises OSError: there is no room.
    """
    path = directory / f"layer-{layer}.payload"
    path.write_bytes(payload)
    pieces: Sequence[PayloadChunk] = (
        [PayloadChunk(size_bytes=len(payload), path=str(path))] if payload else []
    )
    write_staged(directory, layer, StagedLayer(header=header, chunks=tuple(pieces)))


def read_staged(directory: Path, layer: int) -> StagedLayer:
    """:raises OSError: it is not there. :raises CorruptDataError: it is none."""
    try:
        return msgspec.msgpack.decode(_path(directory, layer).read_bytes(), type=StagedLayer)
    except msgspec.DecodeError as error:
        raise CorruptDataError(f"what is staged of layer {layer} is malformed: {error}") from None


def _path(directory: Path, layer: int) -> Path:
    return directory / f"layer-{layer}.staged"
