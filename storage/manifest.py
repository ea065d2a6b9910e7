"""The manifest of one snapshot, which says what is in which bytes. Renaming it into place commits the
snapshot.

The file has two lines: the XXH3 digest of the second line, and JSON. A manifest that is truncated, changed,
or of another version is rejected as a whole. The bytes that it describes have digests of their own: one for
each part, and for a large part also one for each block. So a reader can verify any range of a part, and
corruption is located to the block.
"""

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import xxhash

from storage.atomic import atomic_file
from storage.decoding import decodable
from storage.errors import CorruptDataError

FORMAT = 3
MAX_BYTES = 64 * 1024 * 1024
BLOCK_BYTES = 1024 * 1024
"""Number of bytes for each block digest; they are still in the cache when they are copied."""
_HEX = 16
"""Number of digits of a block's digest."""

T = TypeVar("T")


class SnapshotPart(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A named range of bytes of a slot: a shard, or what belongs to it."""

    name: str
    offset: int
    size_bytes: int
    digest: str
    """XXH3 of the bytes, 128 bits; if there are ``blocks``, XXH3 of those, so that the bytes are read once."""
    blocks: str = ""
    """XXH3, 64 bits, of each ``BLOCK_BYTES`` and of the shorter last block, concatenated. Empty for a part of
    one block, and if the writer computed none; such a part is verified as a whole.
    """

    @classmethod
    def from_bytes(cls, name: str, offset: int, data: Any) -> "SnapshotPart":
        """Return the part of these bytes."""
        digests = PartDigester()
        digests.update(data)
        return digests.part(name, offset)

    @property
    def in_blocks(self) -> bool:
        """Whether ranges of it can be verified."""
        return bool(self.blocks) or self.size_bytes <= BLOCK_BYTES

    def blocks_covering(self, first: int, end: int) -> range:
        """Return the numbers of the blocks that contain bytes [first, end); block 0 if there are no block
        digests.
        """
        if not self.blocks:
            return range(1)
        return range(first // BLOCK_BYTES, -(-end // BLOCK_BYTES))

    def digest_of_block(self, number: int) -> str:
        """Return the digest of one of ``blocks``."""
        return self.blocks[number * _HEX : (number + 1) * _HEX]

    def block(self, number: int) -> tuple[int, int]:
        """Return the first byte of a block, and the byte after its last."""
        if not self.blocks:
            return 0, self.size_bytes
        return number * BLOCK_BYTES, min(self.size_bytes, (number + 1) * BLOCK_BYTES)

    def is_block_intact(self, number: int, data: Any) -> bool:
        """Return whether these bytes are the block that was written."""
        if not self.blocks:
            return self.is_intact(data)
        return xxhash.xxh3_64_hexdigest(data) == self.digest_of_block(number)

    def is_intact(self, data: Any) -> bool:
        """Return whether these bytes, the whole part, are what was written."""
        if not self.blocks:
            return digest_of(data) == self.digest
        numbers = self.blocks_covering(0, self.size_bytes)
        return all(self.is_block_intact(n, data[slice(*self.block(n))]) for n in numbers)

    def slice_blocks(self, first: int, end: int) -> "SnapshotPart":
        """Return the blocks that contain bytes [first, end) as a part of their own, for readers that verify
        whole blocks.
        """
        if not self.blocks:
            return self
        numbers = self.blocks_covering(first, end)
        low, high = self.block(numbers.start)[0], self.block(numbers.stop - 1)[1]
        blocks = self.blocks[numbers.start * _HEX : numbers.stop * _HEX]
        return SnapshotPart(
            name=self.name, offset=self.offset + low, size_bytes=high - low, digest="", blocks=blocks
        )

    def are_ranges_intact(self, memory: Any, ranges: Iterable[range]) -> bool:
        """Return whether the blocks that contain these ranges of ``memory``, the whole part, are what was
        written.

        For a part that can be verified only as a whole it returns true; the caller verifies that elsewhere.
        """
        numbers = {number for some in ranges for number in self.blocks_covering(some.start, some.stop)}
        return not self.in_blocks or all(
            self.is_block_intact(n, memory[slice(*self.block(n))]) for n in numbers
        )


def digests_of_blocks(data: Any) -> list[str]:
    """Return the digests of whole blocks; other threads run meanwhile."""
    return [xxhash.xxh3_64_hexdigest(data[at : at + BLOCK_BYTES]) for at in range(0, len(data), BLOCK_BYTES)]


class PartDigester:
    """The digests of a part, computed while its bytes arrive one after the other and are in the cache."""

    def __init__(self) -> None:
        self.size_bytes = 0
        """Number of bytes so far."""
        self._first, self._block = xxhash.xxh3_128(), xxhash.xxh3_64()
        self._blocks: list[str] = []

    def update(self, data: Any) -> None:
        """Add the next bytes, any contiguous buffer. Other threads run meanwhile."""
        view = memoryview(data)
        start = 0
        while start < len(view):
            some = view[start : start + BLOCK_BYTES - self.size_bytes % BLOCK_BYTES]
            if self.size_bytes < BLOCK_BYTES:
                self._first.update(some)  # It may be the only block.
            self._block.update(some)
            start += len(some)
            self.size_bytes += len(some)
            if self.size_bytes % BLOCK_BYTES == 0:
                self._blocks.append(self._block.hexdigest())
                self._block.reset()

    def add_blocks(self, digests: Sequence[str]) -> None:
        """Add whole blocks by their digests, after whole blocks; they must not be all of their part, if that is one
        block.
        """
        self._blocks += digests
        self.size_bytes += len(digests) * BLOCK_BYTES

    def part(self, name: str, offset: int) -> SnapshotPart:
        """Return the part after all bytes were added."""
        digest, blocks = self._first.hexdigest(), ""
        if self.size_bytes > BLOCK_BYTES:
            last = [self._block.hexdigest()] * (self.size_bytes % BLOCK_BYTES > 0)
            blocks = "".join(self._blocks + last)
            digest = digest_of(blocks.encode())
        return SnapshotPart(
            name=name, offset=offset, size_bytes=self.size_bytes, digest=digest, blocks=blocks
        )


class SnapshotManifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The manifest of one snapshot in one arena: its parts are ranges of one slot."""

    format: int = FORMAT
    job_id: str
    step: int
    generation: int
    slot: int
    """Number of the slot that holds the bytes."""
    parts: tuple[SnapshotPart, ...]
    layout: dict[str, Any]
    """Meaning of the bytes for their writers, as plain data."""

    def part(self, name: str) -> SnapshotPart:
        """Return a part by its name.

        :raises KeyError: there is no such part.
        """
        for part in self.parts:
            if part.name == name:
                return part
        raise KeyError(name)

    @property
    def size_bytes(self) -> int:
        return sum(part.size_bytes for part in self.parts)


class NewerManifest(msgspec.Struct, frozen=True, kw_only=True):
    """The fields that this version reads of a manifest which a newer version of ftd wrote."""

    format: int
    slot: int = -1


def digest_of(data: Any) -> str:
    """Return the digest of any contiguous buffer; the interpreter lock is released meanwhile."""
    return xxhash.xxh3_128_hexdigest(data)


def encode_record(record: msgspec.Struct) -> bytes:
    """Return the two lines."""
    return with_digest(msgspec.json.encode(record))


def with_digest(body: bytes) -> bytes:
    """Return ``body`` after a line with its digest."""
    return digest_of(body).encode() + b"\n" + body


def checked_body(data: bytes, where: str) -> bytes:
    """Return the body that ``with_digest`` was given.

    :param where: names the data in the error.
    :raises CorruptDataError: it was truncated or changed.
    """
    digest, newline, body = data.partition(b"\n")
    if not newline or digest != digest_of(body).encode():
        raise CorruptDataError(f"{where} is truncated or changed: its digest does not match")
    return body


def record_digest(record: msgspec.Struct) -> str:
    """Return the digest of the encoded record, its first line."""
    return digest_of(msgspec.json.encode(record))


def decode_record(data: bytes, kind: type[T], where: str) -> T:
    """Return the decoded record.

    :param where: names the data in the error.
    :raises CorruptDataError: the data differs from what ``encode_record`` returned.
    """
    body = checked_body(data, where)
    try:
        return msgspec.json.decode(body, type=decodable(kind))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CorruptDataError(f"{where} is not a {kind.__name__} of this version: {error}") from None


def write_record(path: Path, record: msgspec.Struct) -> None:
    """Replace the file atomically: readers see the old or the new one.

    :raises OSError: it cannot be written; what was there stays.
    """
    data = encode_record(record)
    try:
        with atomic_file(path) as draft, draft.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:  # For an open file the system does not say which.
        raise OSError(error.errno, error.strerror, str(path)) from None


def read_record(path: Path, kind: type[T]) -> T:
    """Return the record in a file.

    :raises CorruptDataError: the file differs from what ``write_record`` wrote.
    :raises OSError: it cannot be read.
    """
    if path.stat().st_size > MAX_BYTES:
        raise CorruptDataError(f"{path} is larger than {MAX_BYTES} bytes")
    return decode_record(path.read_bytes(), kind, str(path))


def read_newer(path: Path) -> NewerManifest | None:
    """Return an intact manifest of a format that is newer than this version's; ``None`` if the file is none."""
    try:
        found = msgspec.json.decode(checked_body(path.read_bytes(), str(path)), type=decodable(NewerManifest))
    except (CorruptDataError, OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return found if found.format > FORMAT else None


def check_parts(manifest: SnapshotManifest, size_bytes: int) -> None:
    """Check that the parts are consistent.

    :raises CorruptDataError: parts overlap, share a name, or are not within ``size_bytes``.
    """
    if manifest.format != FORMAT:
        raise CorruptDataError(f"a manifest of format {manifest.format}; this version reads {FORMAT}")
    end = 0
    for part in sorted(manifest.parts, key=lambda p: p.offset):
        if part.offset < end or part.size_bytes < 0:
            raise CorruptDataError(f"part {part.name!r} begins at {part.offset}, inside of another part")
        end = part.offset + part.size_bytes
    for part in manifest.parts:
        blocks = -(-part.size_bytes // BLOCK_BYTES) if part.size_bytes > BLOCK_BYTES else 0
        if part.blocks and len(part.blocks) != blocks * _HEX:
            raise CorruptDataError(f"part {part.name!r} does not have digests of {blocks} blocks")
        if part.blocks and digest_of(part.blocks.encode()) != part.digest:
            raise CorruptDataError(f"part {part.name!r} does not have the digest of its blocks")
    if end > size_bytes:
        raise CorruptDataError(f"the parts end at {end}, and there are {size_bytes} bytes")
    if len({part.name for part in manifest.parts}) < len(manifest.parts):
        raise CorruptDataError("two parts have the same name")
