"""The manifest of one snapshot: what is in which bytes. Written last, by renaming: that is its commit.

A file of two lines: the XXH3 digest of the second, and JSON. A manifest that was cut short, changed, or is
of another version is refused as a whole; the bytes it speaks of have digests of their own: each part one,
and a large one beside it one for each block, so that any range of it can be verified by who reads it, and
damage is found to the block.
"""

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import xxhash

from storage.errors import CorruptDataError

FORMAT = 3
MAX_BYTES = 64 * 1024 * 1024
BLOCK_BYTES = 1024 * 1024
"""A digest for so many bytes: they are still in the cache when they are copied."""
_HEX = 16
"""Digits of a block's digest."""

T = TypeVar("T")


class SnapshotPart(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A run of bytes with a name of its own: a shard, or what belongs to it."""

    name: str
    offset: int
    size_bytes: int
    digest: str
    """XXH3, 128 bits, of the bytes; of ``blocks`` where there are some: bytes are read once."""
    blocks: str = ""
    """XXH3, 64 bits, of each ``BLOCK_BYTES``, the last of what is left, one behind the other. Empty for
    a part of one block, and where its writer made none: that is verified as a whole."""

    @classmethod
    def of(cls, name: str, offset: int, data: Any) -> "SnapshotPart":
        """Of these bytes."""
        digests = PartDigester()
        digests.update(data)
        return digests.part(name, offset)

    @property
    def in_blocks(self) -> bool:
        """Can ranges of it be verified?"""
        return bool(self.blocks) or self.size_bytes <= BLOCK_BYTES

    def covering(self, first: int, end: int) -> range:
        """Numbers of the blocks that bytes [first, end) are in; a single one where it has none."""
        if not self.blocks:
            return range(1)
        return range(first // BLOCK_BYTES, -(-end // BLOCK_BYTES))

    def digest_of_block(self, number: int) -> str:
        """The digest of one of ``blocks``."""
        return self.blocks[number * _HEX : (number + 1) * _HEX]

    def block(self, number: int) -> tuple[int, int]:
        """First byte of a block, and the one behind its last."""
        if not self.blocks:
            return 0, self.size_bytes
        return number * BLOCK_BYTES, min(self.size_bytes, (number + 1) * BLOCK_BYTES)

    def is_block_intact(self, number: int, data: Any) -> bool:
        """Are these bytes the block that was written?"""
        if not self.blocks:
            return self.is_intact(data)
        return xxhash.xxh3_64_hexdigest(data) == self.digest_of_block(number)

    def is_intact(self, data: Any) -> bool:
        """Are these bytes, all of the part, as they were written?"""
        if not self.blocks:
            return digest_of(data) == self.digest
        numbers = self.covering(0, self.size_bytes)
        return all(self.is_block_intact(n, data[slice(*self.block(n))]) for n in numbers)

    def cut(self, first: int, end: int) -> "SnapshotPart":
        """The blocks that bytes [first, end) are in, as a part of its own: for who verifies blocks only."""
        if not self.blocks:
            return self
        numbers = self.covering(first, end)
        low, high = self.block(numbers.start)[0], self.block(numbers.stop - 1)[1]
        blocks = self.blocks[numbers.start * _HEX : numbers.stop * _HEX]
        return SnapshotPart(
            name=self.name, offset=self.offset + low, size_bytes=high - low, digest="", blocks=blocks
        )

    def are_ranges_intact(self, memory: Any, ranges: Iterable[range]) -> bool:
        """Are the blocks of ``memory``, the whole part, that these bytes are in as they were written?

        Where it is to be verified as a whole that is another's to do.
        """
        numbers = {number for some in ranges for number in self.covering(some.start, some.stop)}
        return not self.in_blocks or all(
            self.is_block_intact(n, memory[slice(*self.block(n))]) for n in numbers
        )


class PartDigester:
    """Of a part whose bytes come one after the other, each run while it is in the cache."""

    def __init__(self) -> None:
        self.size_bytes = 0
        """Taken so far."""
        self._first, self._block = xxhash.xxh3_128(), xxhash.xxh3_64()
        self._blocks: list[str] = []

    def update(self, data: Any) -> None:
        """What follows; any contiguous bytes. Other threads run."""
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

    def skip(self, digest: str) -> None:
        """A whole block follows, and this is its digest; not the only block of its part."""
        self._blocks.append(digest)
        self.size_bytes += BLOCK_BYTES

    def part(self, name: str, offset: int) -> SnapshotPart:
        """All of it was taken."""
        digest, blocks = self._first.hexdigest(), ""
        if self.size_bytes > BLOCK_BYTES:
            last = [self._block.hexdigest()] * (self.size_bytes % BLOCK_BYTES > 0)
            blocks = "".join(self._blocks + last)
            digest = digest_of(blocks.encode())
        return SnapshotPart(
            name=name, offset=offset, size_bytes=self.size_bytes, digest=digest, blocks=blocks
        )


class SnapshotManifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Of one snapshot in one arena: its parts are runs of bytes of one slot."""

    format: int = FORMAT
    job_id: str
    step: int
    generation: int
    slot: int
    """Which of the arena's buffers holds the bytes."""
    parts: tuple[SnapshotPart, ...]
    layout: dict[str, Any]
    """What the bytes mean, for those who wrote them; plain data."""

    def part(self, name: str) -> SnapshotPart:
        """:raises KeyError: there is none of this name."""
        for part in self.parts:
            if part.name == name:
                return part
        raise KeyError(name)

    @property
    def size_bytes(self) -> int:
        return sum(part.size_bytes for part in self.parts)


def digest_of(data: Any) -> str:
    """Of any contiguous buffer; releases the interpreter lock."""
    return xxhash.xxh3_128_hexdigest(data)


def encode_record(record: msgspec.Struct) -> bytes:
    """The two lines."""
    return with_digest(msgspec.json.encode(record))


def with_digest(body: bytes) -> bytes:
    """Return a line with the digest of ``body``, and ``body``."""
    return digest_of(body).encode() + b"\n" + body


def checked_body(data: bytes, where: str) -> bytes:
    """Return what ``with_digest`` got. :param where: names it in the error.

    :raises CorruptDataError: it was cut short or changed.
    """
    digest, newline, body = data.partition(b"\n")
    if not newline or digest != digest_of(body).encode():
        raise CorruptDataError(f"{where} was cut short or changed: its digest does not match")
    return body


def record_digest(record: msgspec.Struct) -> str:
    """The first of the two lines."""
    return digest_of(msgspec.json.encode(record))


def decode_record(data: bytes, kind: type[T], where: str) -> T:
    """:raises CorruptDataError: not what ``encode_record`` made. :param where: names it in the error."""
    body = checked_body(data, where)
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CorruptDataError(f"{where} is no {kind.__name__} of this version: {error}") from None


def write_record(path: Path, record: msgspec.Struct) -> None:
    """Replace the file at once: readers see the old one, or the whole new one.

    :raises OSError: it cannot be written; what was there stays.
    """
    data = encode_record(record)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with draft.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    except OSError as error:  # Of a file that is written the system does not say which.
        raise OSError(error.errno, error.strerror, str(path)) from None
    finally:
        with contextlib.suppress(FileNotFoundError):
            draft.unlink()


def read_record(path: Path, kind: type[T]) -> T:
    """:raises CorruptDataError: not what ``write_record`` wrote. :raises OSError: it cannot be read."""
    if path.stat().st_size > MAX_BYTES:
        raise CorruptDataError(f"{path} is larger than {MAX_BYTES} bytes")
    return decode_record(path.read_bytes(), kind, str(path))


def check_parts(manifest: SnapshotManifest, size_bytes: int) -> None:
    """:raises CorruptDataError: parts that overlap, share a name, or are not within ``size_bytes``."""
    if manifest.format != FORMAT:
        raise CorruptDataError(f"a manifest of format {manifest.format}; this version reads {FORMAT}")
    end = 0
    for part in sorted(manifest.parts, key=lambda p: p.offset):
        if part.offset < end or part.size_bytes < 0:
            raise CorruptDataError(f"part {part.name!r} begins at {part.offset}, inside of another one")
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
