"""A checkpoint's parameters and buffers as one safetensors file, layer by layer, without torch.

The package writes such files from tensors that are all in memory at once; here one layer is, whatever the
size of the model. The format: the length of the header (8 bytes, little-endian), the header (JSON, padded
with spaces), and the tensors back to back. The tests read it with the package.
"""

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import msgspec

from storage.checkpoint import Checkpoint
from storage.errors import StorageError
from storage.layerstate import Entry

_NAMES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
    "complex64": "C64",
}
_ALIGNMENT_BYTES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    tensors: int
    size_bytes: int


def export_safetensors(checkpoint: Checkpoint, path: Path) -> Exported:
    """Write the file at once: under another name, then renamed. A tied parameter is written once, under its
    canonical name.

    :raises DamagedError: a layer is not what was written. :raises PlaceError: one cannot be read.
    :raises StorageError: a tensor of a type that the format does not have.
    :raises OSError: the file cannot be written; what was there stays.
    """
    wanted = _wanted(checkpoint)
    header = _header(checkpoint, wanted)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with draft.open("wb") as file:
            file.write(header)
            for layer, entries in enumerate(wanted):
                if entries:
                    _copy(checkpoint, layer, entries, file)
            file.flush()
            os.fsync(file.fileno())
            size_bytes = file.tell()
        draft.replace(path)
    finally:
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)
    return Exported(tensors=sum(map(len, wanted)), size_bytes=size_bytes)


def _wanted(checkpoint: Checkpoint) -> list[list[Entry]]:
    """For each layer, what no layer before it has."""
    seen: set[str] = set()
    wanted = []
    for header in checkpoint.headers():
        entries = [e for e in header.entries if e.role != "optimizer" and e.name not in seen]
        for entry in entries:
            if entry.dtype not in _NAMES:
                raise StorageError(f"{entry.name} is of {entry.dtype}, which safetensors files cannot hold")
        seen.update(entry.name for entry in entries)
        wanted.append(entries)
    return wanted


def _header(checkpoint: Checkpoint, wanted: list[list[Entry]]) -> bytes:
    manifest, end = checkpoint.manifest, 0
    said: dict[str, object] = {
        "__metadata__": {"format": "pt", "job": manifest.job, "step": str(manifest.step)}
    }
    for entry in (entry for entries in wanted for entry in entries):
        start, end = end, end + entry.size_bytes
        said[entry.name] = {
            "dtype": _NAMES[entry.dtype],
            "shape": entry.shape,
            "data_offsets": (start, end),
        }
    body = msgspec.json.encode(said)
    body += b" " * (-len(body) % _ALIGNMENT_BYTES)
    return len(body).to_bytes(8, "little") + body


def _copy(checkpoint: Checkpoint, layer: int, entries: list[Entry], file: BinaryIO) -> None:
    _, _, payload = checkpoint.read_layer(layer)
    for entry in entries:
        file.write(payload[entry.offset : entry.offset + entry.size_bytes].data)
