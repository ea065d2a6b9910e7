"""Export of a checkpoint as a directory that ``from_pretrained`` reads, written without torch.

    config.json, generation_config.json, tokenizer.json, …    as the trainer had them
    model.safetensors                                          or, above a size,
    model-00001-of-00003.safetensors, … model.safetensors.index.json

For a model with an adapter (``peft``), the directory has ``adapter_config.json`` and
``adapter_model.safetensors`` instead, or the base model. A directory appears only when it is complete. One
layer is in memory at a time.
"""

import contextlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from storage.checkpoint import Checkpoint
from storage.directfile import sync_path, write_synced
from storage.errors import StorageError
from storage.safetensors_file import (
    FLOATING,
    ExportSummary,
    FileTensor,
    TensorReader,
    model_tensors,
    write_safetensors,
)

CONFIG = "config.json"
MAX_SHARD_BYTES = 5_000_000_000


def export_huggingface(
    checkpoint: Checkpoint,
    directory: Path,
    *,
    dtype: str | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    files: Mapping[str, bytes] | None = None,
) -> ExportSummary:
    """Write ``directory``, which must be missing or empty. If the model has an adapter, the adapter is
    written.

    :param dtype: type of floating-point tensors; ``None`` keeps their types.
    :param files: files (``config.json``, a tokenizer) to use instead of those of the checkpoint.
    :raises StorageError: the checkpoint is corrupt, cannot be read, or has no configuration.
    :raises OSError: the directory cannot be written; nothing is left.
    """
    description = checkpoint.description()
    other_files = dict(description.adapter_files if description.adapter_files else description.files)
    other_files |= files or {}
    if not description.adapter_files:
        return _export_model(checkpoint, directory, other_files, dtype, max_shard_bytes)
    names = description.adapter_names
    tensors = [
        replace(tensor, name=names[tensor.name])
        for tensor in model_tensors(checkpoint, dtype)
        if tensor.name in names
    ]
    return _write(checkpoint, directory, tensors, other_files, "adapter_model", None)


def export_base(checkpoint: Checkpoint, directory: Path, *, dtype: str | None = None) -> ExportSummary:
    """Write the base model of a model with an adapter, as ``export_huggingface`` writes other models."""
    return _export_model(checkpoint, directory, checkpoint.description().files, dtype, MAX_SHARD_BYTES)


def _export_model(
    checkpoint: Checkpoint,
    directory: Path,
    files: Mapping[str, bytes],
    dtype: str | None,
    max_shard_bytes: int,
) -> ExportSummary:
    """Write the (base) model, with its tensors under each name that ``from_pretrained`` needs."""
    if CONFIG not in files:
        raise StorageError(
            f"the checkpoint of step {checkpoint.manifest.step} has no {CONFIG}: its job was not given a "
            "Hugging Face model. Name a directory that has one (--files-from), or export safetensors"
        )
    description = checkpoint.description()
    tensors = [
        replace(tensor, name=name)
        for tensor in model_tensors(checkpoint, dtype)
        for name in description.names_in_weights(tensor.name)
    ]
    return _write(checkpoint, directory, tensors, files, "model", max_shard_bytes)


def _write(
    checkpoint: Checkpoint,
    directory: Path,
    tensors: Sequence[FileTensor],
    files: Mapping[str, bytes],
    stem: str,
    max_shard_bytes: int | None,
) -> ExportSummary:
    reader = TensorReader(checkpoint)
    shards = _shards(tensors, max_shard_bytes)
    size_bytes = 0
    with atomic_directory(directory) as draft:
        weight_map: dict[str, str] = {}
        for number, shard in enumerate(shards, start=1):
            name = f"{stem}.safetensors"
            if len(shards) > 1:
                name = f"{stem}-{number:05d}-of-{len(shards):05d}.safetensors"
            size_bytes += write_safetensors(draft / name, shard, reader, {"format": "pt"})
            weight_map |= {tensor.name: name for tensor in shard}
        if len(shards) > 1:
            total = {"total_size": sum(tensor.size_bytes for tensor in tensors)}
            index = json.dumps({"metadata": total, "weight_map": weight_map}, indent=2, sort_keys=True)
            write_synced(draft / f"{stem}.safetensors.index.json", [memoryview(index.encode() + b"\n")])
        for name, data in files.items():
            content = data
            if name == CONFIG:
                content = with_dtype(data, ((tensor.dtype, tensor.size_bytes) for tensor in tensors))
            write_synced(draft / name, [memoryview(content)])
    return ExportSummary(tensors=len(tensors), size_bytes=size_bytes)


def _shards(tensors: Sequence[FileTensor], max_shard_bytes: int | None) -> list[list[FileTensor]]:
    """Divide the tensors into files in the order of the layers; a tensor larger than the limit has a file of
    its own.
    """
    shards: list[list[FileTensor]] = [[]]
    filled = 0
    for tensor in tensors:
        if shards[-1] and max_shard_bytes is not None and filled + tensor.size_bytes > max_shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(tensor)
        filled += tensor.size_bytes
    return shards


def with_dtype(config: bytes, tensors: Iterable[tuple[str, int]]) -> bytes:
    """Return the configuration with the type of the weights, since ``from_pretrained`` converts to the type
    named there.

    :param tensors: type and size in bytes of each tensor.
    """
    sizes: dict[str, int] = {}
    for dtype, size_bytes in tensors:
        if dtype in FLOATING:
            sizes[dtype] = sizes.get(dtype, 0) + size_bytes
    configuration = json.loads(config)
    if sizes:
        most = max(sizes, key=lambda dtype: sizes[dtype])
        configuration.pop("torch_dtype", None)  # The same key before transformers 5.
        configuration["dtype"] = most
        _name_dtype(configuration, most)
    return json.dumps(configuration, indent=2, sort_keys=True).encode() + b"\n"


def _name_dtype(config: dict[str, Any], dtype: str) -> None:
    """Set the type where it is named, also in the configurations of submodels."""
    for key in ("dtype", "torch_dtype"):
        if key in config:
            config[key] = dtype
    for key, part in config.items():
        if key.endswith("_config") and isinstance(part, dict):
            _name_dtype(part, dtype)


@contextlib.contextmanager
def atomic_directory(directory: Path) -> Iterator[Path]:
    """Yield a directory to write to, which becomes ``directory`` at once when the block ends without an error.

    :raises OSError: it cannot be made, or ``directory`` is not empty; nothing is left.
    """
    draft = directory.with_name(f".{directory.name}.{os.getpid()}.partial")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir()
    try:
        yield draft
        # Renaming replaces an empty directory, but never one with files.
        draft.rename(directory)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    sync_path(directory.parent)
