"""Exports of checkpoints for ``from_pretrained``; adapters are merged in a process that has torch."""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from ftd.errors import CheckpointError, ConfigurationError
from runtime.wire.measurement import INVALID_EXIT
from storage.checkpoint import Checkpoint
from storage.description import is_file_name
from storage.huggingface import MAX_SHARD_BYTES, appearing, export_base, export_huggingface
from storage.safetensors_file import Exported

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".h5", ".msgpack", ".gguf", ".onnx")
_MOST_BYTES = 256 * 1024 * 1024
"""A file beside the weights that is larger is none of a tokenizer's."""


def export_to_huggingface(
    checkpoint: Checkpoint,
    directory: Path,
    *,
    dtype: str | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    files_from: Path | None = None,
    merge: bool = False,
) -> Exported:
    """Write ``directory``, which must not be there yet or be empty.

    :param files_from: take the configuration and the tokenizer from this directory.
    :param merge: an adapter is merged into its base model; else the adapter alone is written.
    :raises StorageError: see ``storage.huggingface.export_huggingface``.
    :raises ConfigurationError: there is nothing to merge, or it cannot be merged here.
    :raises CheckpointError: merging failed.
    :raises OSError: the directory cannot be written; nothing is left.
    """
    files = {} if files_from is None else _files_of(files_from)
    if not merge:
        return export_huggingface(
            checkpoint, directory, dtype=dtype, max_shard_bytes=max_shard_bytes, files=files
        )
    if not checkpoint.description().adapter_files:
        raise ConfigurationError(
            "the model of this checkpoint has no adapter", field="--merge", remedy="leave it out"
        )
    with tempfile.TemporaryDirectory(dir=directory.parent, prefix=f".{directory.name}.") as name:
        parts = Path(name)
        export_base(checkpoint, parts / "base", dtype=dtype)
        adapter = export_huggingface(checkpoint, parts / "adapter", dtype=dtype)
        _merge(parts, max_shard_bytes)
        with appearing(directory) as draft:
            for path in (parts / "merged").iterdir():
                shutil.move(path, draft / path.name)
            for file, data in files.items():
                (draft / file).write_bytes(data)
            size_bytes = sum(path.stat().st_size for path in draft.glob("*.safetensors"))
    return Exported(tensors=adapter.tensors, size_bytes=size_bytes)


def _merge(parts: Path, max_shard_bytes: int) -> None:
    done = subprocess.run(
        # Safe path: a module of that name in the current directory must not be imported for ours.
        [
            *(sys.executable, "-P", "-m", "runtime.merge_adapter", "--parent", str(os.getpid())),
            *("--max-shard-bytes", str(max_shard_bytes)),
            *(str(parts / part) for part in ("base", "adapter", "merged")),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode == INVALID_EXIT:
        raise ConfigurationError((done.stderr.strip() or "it failed").splitlines()[-1], field="--merge")
    if done.returncode != 0:
        raise CheckpointError(
            f"merging the adapter failed (exit code {done.returncode}): {done.stderr[-2000:]}"
        )


def _files_of(directory: Path) -> dict[str, bytes]:
    """The files in ``directory`` that are no weights."""
    return {
        path.name: path.read_bytes()
        for path in sorted(directory.iterdir())
        if path.is_file()
        and is_file_name(path.name)
        and path.suffix not in _WEIGHTS
        and not path.name.endswith(".index.json")
        and path.stat().st_size <= _MOST_BYTES
    }
