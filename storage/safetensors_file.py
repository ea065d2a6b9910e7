"""Tensors of a checkpoint as safetensors files, layer by layer, without torch.

The safetensors package writes files from tensors that are all in memory at once; this module has one layer
in memory, whatever the size of the model. The format: the length of the header (8 bytes, little-endian),
the header (JSON, padded with spaces), and the tensors back to back. The tests read the files with the
package.
"""

import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from storage.atomic import atomic_file
from storage.checkpoint import Checkpoint
from storage.errors import StorageError
from storage.layerstate import DTYPE_BYTES, TensorEntry

DTYPE_NAMES = {
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
"""Name of each type in safetensors files, by torch's name without its prefix."""
FLOATING = ("float64", "float32", "float16", "bfloat16")
_ALIGNMENT_BYTES = 8
_CHUNK_BYTES = 16 * 1024 * 1024
"""Number of bytes converted and written at a time, a multiple of every element's size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportSummary:
    """Number of tensors and bytes that were written."""

    tensors: int
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FileTensor:
    """One tensor of a file, and its place in a checkpoint."""

    name: str
    """Name in the file."""
    layer: int
    entry: TensorEntry
    dtype: str
    """Type in the file; it differs from the checkpoint's only between floating-point types."""

    @property
    def size_bytes(self) -> int:
        """Size in the file."""
        return math.prod(self.entry.shape) * DTYPE_BYTES[self.dtype]


class TensorReader:
    """A reader of tensors from a checkpoint. It holds the layer that was read last in memory."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._layer = -1
        self._payload: NDArray[np.uint8] = np.empty(0, dtype=np.uint8)

    def chunks(self, tensor: FileTensor) -> Iterator[memoryview]:
        """Yield the tensor's bytes in the type of the file.

        :raises CorruptDataError: the layer differs from what was written.
        :raises LocationError: it cannot be read.
        """
        if tensor.layer != self._layer:
            self._payload = np.empty(0, dtype=np.uint8)  # Do not hold two layers at once.
            _, _, self._payload = self._checkpoint.read_layer(tensor.layer)
            self._layer = tensor.layer
        entry = tensor.entry
        for start in range(entry.offset, entry.offset + entry.size_bytes, _CHUNK_BYTES):
            chunk = self._payload[start : min(start + _CHUNK_BYTES, entry.offset + entry.size_bytes)]
            yield convert_dtype(chunk, entry.dtype, tensor.dtype).data


def model_tensors(checkpoint: Checkpoint, dtype: str | None = None) -> list[FileTensor]:
    """Return parameters and buffers in the order of the layers; those that layers share occur once.

    :param dtype: type of floating-point tensors in the file; ``None`` keeps their types.
    :raises StorageError: a tensor has a type that the format does not support.
    """
    seen: set[str] = set()
    tensors = []
    for layer, header in enumerate(checkpoint.headers()):
        for entry in header.entries:
            if entry.role == "optimizer" or entry.name in seen:
                continue
            seen.add(entry.name)
            kept = entry.dtype if dtype is None or entry.dtype not in FLOATING else dtype
            tensors.append(FileTensor(name=entry.name, layer=layer, entry=entry, dtype=kept))
    return tensors


def export_safetensors(checkpoint: Checkpoint, path: Path, dtype: str | None = None) -> ExportSummary:
    """Write parameters and buffers as one file, which is renamed when it is complete.

    A tied parameter is written once, under its canonical name.

    :raises CorruptDataError: a layer differs from what was written.
    :raises LocationError: a layer cannot be read.
    :raises StorageError: a tensor has a type that the format does not support.
    :raises OSError: the file cannot be written; what was there stays.
    """
    tensors = model_tensors(checkpoint, dtype)
    manifest = checkpoint.manifest
    metadata = {"format": "pt", "job": manifest.job, "step": str(manifest.step)}
    with atomic_file(path) as draft:
        size_bytes = write_safetensors(draft, tensors, TensorReader(checkpoint), metadata)
    return ExportSummary(tensors=len(tensors), size_bytes=size_bytes)


def write_safetensors(
    path: Path, tensors: Sequence[FileTensor], reader: TensorReader, metadata: Mapping[str, str]
) -> int:
    """Write a file to the disk, and return its size in bytes.

    :raises StorageError: a tensor has a type that the format does not support, or a layer that cannot be
        read.
    :raises OSError: the file cannot be written.
    """
    with path.open("wb") as file:
        file.write(_header(tensors, metadata))
        for tensor in tensors:
            for chunk in reader.chunks(tensor):
                file.write(chunk)
        file.flush()
        os.fsync(file.fileno())
        return file.tell()


def tensor_sizes(path: Path) -> list[tuple[str, int]]:
    """Return type and size in bytes of each tensor in any safetensors file. The name of a type that checkpoints do not
    have is that of the format.
    """
    names = {name: dtype for dtype, name in DTYPE_NAMES.items()}
    with path.open("rb") as file:
        size_bytes = int.from_bytes(file.read(8), "little")
        header = msgspec.json.decode(file.read(size_bytes), type=dict[str, dict[str, Any]])
    header.pop("__metadata__", None)
    found = []
    for tensor in header.values():
        start, end = tensor["data_offsets"]
        found.append((names.get(tensor["dtype"], tensor["dtype"]), end - start))
    return found


def _header(tensors: Iterable[FileTensor], metadata: Mapping[str, str]) -> bytes:
    header: dict[str, object] = {"__metadata__": metadata}
    end = 0
    for tensor in tensors:
        if tensor.dtype not in DTYPE_NAMES:
            raise StorageError(f"{tensor.name} is of {tensor.dtype}, which safetensors files cannot hold")
        start, end = end, end + tensor.size_bytes
        header[tensor.name] = {
            "dtype": DTYPE_NAMES[tensor.dtype],
            "shape": tensor.entry.shape,
            "data_offsets": (start, end),
        }
    body = msgspec.json.encode(header)
    body += b" " * (-len(body) % _ALIGNMENT_BYTES)
    return len(body).to_bytes(8, "little") + body


def convert_dtype(data: NDArray[np.uint8], source: str, target: str) -> NDArray[np.uint8]:
    """Return the numbers of type ``source`` in ``data`` as numbers of type ``target``, both as bytes.

    They are rounded as in torch: to nearest, ties to even.

    :param source: one of ``FLOATING``, as is ``target``. If both are the same, ``data`` itself is returned.
    """
    if source == target:
        return data
    # An entry that was cut out of a payload need not be aligned to its element's size.
    whole = np.ascontiguousarray(data)
    values: NDArray[Any] = _widened(whole.view(np.uint16)) if source == "bfloat16" else whole.view(source)
    if target == "bfloat16":
        return _bfloat16(values).view(np.uint8)
    with np.errstate(
        over="ignore", invalid="ignore"
    ):  # As in torch, numbers that are too large become infinite.
        return values.astype(target).view(np.uint8)


def _widened(halves: NDArray[np.uint16]) -> NDArray[np.float32]:
    return (halves.astype(np.uint32) << 16).view(np.float32)


def _bfloat16(values: NDArray[Any]) -> NDArray[np.uint16]:
    with np.errstate(over="ignore", invalid="ignore"):
        bits = values.astype(np.float32).view(np.uint32)
    rounded = bits + (((bits >> 16) & 1) + 0x7FFF)  # An overflow of NaNs is corrected below.
    halves = (rounded >> 16).astype(np.uint16)
    halves[(bits & 0x7FFFFFFF) > 0x7F800000] = 0x7FC0
    return halves
