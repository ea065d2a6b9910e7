"""The manifest of one snapshot: what is in which bytes. Written last, by renaming: that is its commit.

A file of two lines: the XXH3 digest of the second, and JSON. A manifest that was cut short, changed, or is
of another version is refused as a whole; the bytes it speaks of have digests of their own.
"""

import contextlib
import os
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import xxhash

from storage.errors import DamagedError

FORMAT = 1
MAX_BYTES = 64 * 1024 * 1024

T = TypeVar("T")


class Part(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A run of bytes with a name of its own: a shard, or what belongs to it."""

    name: str
    offset: int
    size_bytes: int
    digest: str
    """XXH3, 128 bits, of the bytes."""


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Of one snapshot in one arena: its parts are runs of bytes of one slot."""

    format: int = FORMAT
    job_id: str
    step: int
    generation: int
    slot: int
    """Which of the arena's buffers holds the bytes."""
    parts: tuple[Part, ...]
    layout: dict[str, Any]
    """What the bytes mean, for those who wrote them; plain data."""

    def part(self, name: str) -> Part:
        """:raises KeyError: there is none of this name."""
        return next(part for part in self.parts if part.name == name)

    @property
    def size_bytes(self) -> int:
        return sum(part.size_bytes for part in self.parts)


def digest_of(data: Any) -> str:
    """Of any contiguous buffer; releases the interpreter lock."""
    return xxhash.xxh3_128_hexdigest(data)


def encode_record(record: msgspec.Struct) -> bytes:
    """The two lines."""
    body = msgspec.json.encode(record)
    return digest_of(body).encode() + b"\n" + body


def decode_record(data: bytes, kind: type[T], where: str) -> T:
    """:raises DamagedError: not what ``encode_record`` made. :param where: names it in the error."""
    digest, newline, body = data.partition(b"\n")
    if not newline or digest != digest_of(body).encode():
        raise DamagedError(f"{where} was cut short or changed: its digest does not match")
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.DecodeError as error:
        raise DamagedError(f"{where} is no {kind.__name__} of this version: {error}") from None


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
    """:raises DamagedError: not what ``write_record`` wrote. :raises OSError: it cannot be read."""
    if path.stat().st_size > MAX_BYTES:
        raise DamagedError(f"{path} is larger than {MAX_BYTES} bytes")
    return decode_record(path.read_bytes(), kind, str(path))


def check_parts(manifest: Manifest, size_bytes: int) -> None:
    """:raises DamagedError: parts that overlap, share a name, or are not within ``size_bytes``."""
    if manifest.format != FORMAT:
        raise DamagedError(f"a manifest of format {manifest.format}; this version reads {FORMAT}")
    end = 0
    for part in sorted(manifest.parts, key=lambda p: p.offset):
        if part.offset < end or part.size_bytes < 0:
            raise DamagedError(f"part {part.name!r} begins at {part.offset}, inside of another one")
        end = part.offset + part.size_bytes
    if end > size_bytes:
        raise DamagedError(f"the parts end at {end}, and there are {size_bytes} bytes")
    if len({part.name for part in manifest.parts}) < len(manifest.parts):
        raise DamagedError("two parts have the same name")
