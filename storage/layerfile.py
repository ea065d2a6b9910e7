"""The file of one layer in a checkpoint: the payload, the header, and an ending (docs/how-to/checkpoints.md).

======================  ========================================================================
payload                 from the beginning of the file
header                  msgpack of ``storage.layerstate.LayerHeader``
8 bytes, little-endian  length of the header
8 bytes                 ``ftdlayer``
======================  ========================================================================

The payload comes first, so that its chunks are written at multiples of their own size. After a header of a
page, writing them took the kernel nearly twice as long (ext4).
"""

from collections.abc import Iterable, Iterator
from typing import Any, BinaryIO

import numpy as np
import xxhash
from numpy.typing import NDArray

from storage.errors import CorruptDataError, TransferCancelledError
from storage.layerstate import LayerHeader, decode_header
from storage.locations import CheckpointLocation
from storage.manifest import digest_of
from storage.rate_limit import RateLimiter
from storage.values import LayerFile

CHUNK_BYTES = 1024 * 1024
"""Number of bytes written, read and hashed at a time, which should fit a core's cache; the unit of rate
limits.
"""
MOST_HEADER_BYTES = 64 * 1024 * 1024

_MAGIC = b"ftdlayer"
_ENDING_BYTES = 16

Bytes = NDArray[np.uint8]


def is_consistent(file: LayerFile) -> bool:
    """Return whether its numbers are possible for a file; a manifest may say anything."""
    return (
        0 < file.header_bytes <= MOST_HEADER_BYTES
        and file.payload_bytes >= 0
        and file.size_bytes == file.payload_bytes + file.header_bytes + _ENDING_BYTES
    )


def write_layer_file(
    location: CheckpointLocation,
    directory: str,
    name: str,
    layer: int,
    header: bytes,
    payload: Iterable[Any],
    flow: RateLimiter | None,
) -> LayerFile:
    """Write a layer; see ``CheckpointStore.write_layer``."""
    digest = xxhash.xxh3_128()
    end, payload_bytes = _ending(header), 0

    def chunks() -> Iterator[memoryview]:
        nonlocal payload_bytes
        for chunk in _cut(payload):
            digest.update(chunk)
            yield chunk
            payload_bytes += len(chunk)
            if flow is not None and not flow.acquire(len(chunk)):
                raise TransferCancelledError("cancelled")
        # Before the file gets its name: reject what is not the state of a layer.
        decode_header(header, layer, payload_bytes)
        digest.update(end)
        yield memoryview(end)

    location.write(directory, name, chunks())
    return LayerFile(
        layer=layer,
        name=name,
        size_bytes=payload_bytes + len(end),
        digest=digest.hexdigest(),
        header_bytes=len(header),
        header_digest=digest_of(header),
        payload_bytes=payload_bytes,
    )


def read_header(location: CheckpointLocation, directory: str, file: LayerFile) -> LayerHeader:
    """Return the header of a layer's file.

    :raises CorruptDataError: it differs from what was written.
    """
    with location.open(directory, file.name) as source:
        source.seek(file.payload_bytes)
        return decode_header(_header(source, file), file.layer, file.payload_bytes)


def read_layer_file(
    location: CheckpointLocation, directory: str, file: LayerFile
) -> tuple[bytes, LayerHeader, Bytes]:
    """Return the header as bytes, the decoded header, and the payload.

    :raises CorruptDataError: a byte differs from what was written.
    """
    payload = np.empty(file.payload_bytes, dtype=np.uint8)
    header = _read(location, directory, file, _cut([payload]))
    return header, decode_header(header, file.layer, file.payload_bytes), payload


def verify_layer_file(location: CheckpointLocation, directory: str, file: LayerFile) -> LayerHeader:
    """Read the whole file with the memory of one chunk, and return its header.

    :raises CorruptDataError: a byte differs from what was written.
    """
    buffer, size = memoryview(bytearray(CHUNK_BYTES)), file.payload_bytes
    chunks = (buffer[: min(CHUNK_BYTES, size - start)] for start in range(0, size, CHUNK_BYTES))
    return decode_header(_read(location, directory, file, chunks), file.layer, size)


def _read(
    location: CheckpointLocation, directory: str, file: LayerFile, chunks: Iterable[memoryview]
) -> bytes:
    """Read the payload into the chunks, check the whole file, and return its header."""
    digest = xxhash.xxh3_128()
    with location.open(directory, file.name) as source:
        for chunk in chunks:
            _fill(source, chunk, file)
            digest.update(chunk)
        header = _header(source, file)
    digest.update(_ending(header))
    if digest.hexdigest() != file.digest:
        raise CorruptDataError(
            f"{file.name}: its bytes are not what was written (digest {digest.hexdigest()})"
        )
    return header


def _ending(header: bytes) -> bytes:
    """Return the bytes after the payload."""
    return header + len(header).to_bytes(8, "little") + _MAGIC


def _header(source: BinaryIO, file: LayerFile) -> bytes:
    """Read the header; ``source`` must be at the end of the payload."""
    ending = bytearray(file.header_bytes + _ENDING_BYTES)
    _fill(source, memoryview(ending), file)
    header = bytes(ending[: file.header_bytes])
    if ending != _ending(header) or digest_of(header) != file.header_digest:
        raise CorruptDataError(f"{file.name}: its header is not what was written")
    return header


def _cut(buffers: Iterable[Any]) -> Iterator[memoryview]:
    for buffer in buffers:
        whole = memoryview(buffer)
        if not whole.nbytes:
            continue
        flat = whole.cast("B")
        for start in range(0, len(flat), CHUNK_BYTES):
            yield flat[start : start + CHUNK_BYTES]


def _fill(source: BinaryIO, chunk: memoryview, file: LayerFile) -> None:
    done = 0
    while done < len(chunk):
        # ``readinto`` works for raw files as well; every reader that fsspec opens has it.
        count = source.readinto(chunk[done:])  # type: ignore[attr-defined]
        if not count:
            raise CorruptDataError(f"{file.name} ends too early")
        done += count
