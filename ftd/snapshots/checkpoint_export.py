"""Exports of checkpoints for ``from_pretrained``, for the command ``ftd checkpoint export`` and for jobs that
ask for them.

Adapters are merged in a separate process that has torch. A job's export runs next to the coordinator in a
process of its own, ``python -m ftd.snapshots.checkpoint_export``, which writes a ``JobExport`` to stdout.
If it ends with exit code ``INVALID_EXIT``, the last line of stderr says why there is no export.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec

from ftd.errors import CheckpointError, ConfigurationError
from ftd.processes import module_command
from runtime.parent import die_with_parent
from runtime.wire.measurement import INVALID_EXIT
from storage.checkpoint import Checkpoint, CheckpointStore
from storage.description import is_file_name
from storage.errors import ForeignCheckpointError, StorageError
from storage.huggingface import (
    CONFIG,
    MAX_SHARD_BYTES,
    atomic_directory,
    export_base,
    export_huggingface,
    with_dtype,
)
from storage.safetensors_file import ExportSummary, tensor_sizes
from storage.values import job_mark

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".h5", ".msgpack", ".gguf", ".onnx")
_MOST_BYTES = 256 * 1024 * 1024
"""Largest file next to the weights that is taken for one of a tokenizer."""
_ADAPTER_CONFIG = "adapter_config.json"
_ORIGIN = "ftd.json"
_NICENESS = 10
"""Niceness of the process that exports next to training."""


class Origin(msgspec.Struct, frozen=True, kw_only=True):
    """The file ``ftd.json`` of a job's export, which names the checkpoint that it was made from."""

    job: str
    job_id: str
    step: int
    written_at: float
    ftd_version: str


class JobExport(msgspec.Struct, frozen=True, kw_only=True):
    """A complete export of a job."""

    directory: str
    size_bytes: int
    """Bytes of all weights."""


def export_to_huggingface(
    checkpoint: Checkpoint,
    directory: Path,
    *,
    dtype: str | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    files_from: Path | None = None,
    merge: bool = False,
) -> ExportSummary:
    """Write ``directory``, which must be missing or empty.

    :param files_from: directory to take the configuration and the tokenizer from.
    :param merge: merge an adapter into its base model, instead of writing the adapter alone.
    :raises StorageError: see ``storage.huggingface.export_huggingface``.
    :raises ConfigurationError: there is no adapter to merge, or it cannot be merged here; or ``files_from`` cannot
        be read.
    :raises CheckpointError: merging failed.
    :raises OSError: the directory cannot be written; nothing is left.
    """
    files = {} if files_from is None else _files_of(files_from)
    if merge or not checkpoint.description().adapter_files:
        files.pop(_ADAPTER_CONFIG, None)  # ``from_pretrained`` would look for the adapter next to it.
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
        export_huggingface(checkpoint, parts / "adapter", dtype=dtype)
        _merge(parts, max_shard_bytes)
        with atomic_directory(directory) as draft:
            for path in (parts / "merged").iterdir():
                shutil.move(path, draft / path.name)
            weights = list(draft.glob("*.safetensors"))
            tensors = [tensor for path in weights for tensor in tensor_sizes(path)]
            size_bytes = sum(path.stat().st_size for path in weights)
            for file, data in files.items():
                (draft / file).write_bytes(with_dtype(data, tensors) if file == CONFIG else data)
    return ExportSummary(tensors=len(tensors), size_bytes=size_bytes)


def _merge(parts: Path, max_shard_bytes: int) -> None:
    directories = (str(parts / part) for part in ("base", "adapter", "merged"))
    command = module_command("runtime.merge_adapter", "--parent", str(os.getpid()))
    command += ["--max-shard-bytes", str(max_shard_bytes), *directories]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode == INVALID_EXIT:
        raise ConfigurationError((done.stderr.strip() or "it failed").splitlines()[-1], field="--merge")
    if done.returncode != 0:
        raise CheckpointError(
            f"merging the adapter failed (exit code {done.returncode}): {done.stderr[-2000:]}"
        )


def _files_of(directory: Path) -> dict[str, bytes]:
    """Return the files in ``directory`` that are not weights.

    :raises ConfigurationError: one cannot be read, or the configuration is not one.
    """
    try:
        files = {
            path.name: path.read_bytes()
            for path in sorted(directory.iterdir())
            if path.is_file()
            and is_file_name(path.name)
            and path.suffix not in _WEIGHTS
            and not path.name.endswith(".index.json")
            and path.stat().st_size <= _MOST_BYTES
        }
    except OSError as error:
        raise ConfigurationError(
            f"{error.filename or directory} cannot be read: {error.strerror or error}",
            field="--files-from",
            remedy="check its permissions",
        ) from error
    if CONFIG in files:
        try:
            is_object = isinstance(json.loads(files[CONFIG]), dict)
        except (ValueError, RecursionError):
            is_object = False
        if not is_object:
            raise ConfigurationError(
                f"{directory / CONFIG} is not a JSON object",
                field="--files-from",
                remedy="name the directory of the model that was trained",
            )
    return files


def export_for_job(url: str, job: str, step: int, parent: Path) -> JobExport:
    """Write the checkpoint of a step to ``parent / "step-…"``, unless that very checkpoint is there already.

    An export of the same step from a history that was undone is replaced.

    :raises StorageError: the checkpoint cannot be read, or has no configuration; or another job's export is there,
        or something else.
    :raises OSError: the directory cannot be written; what was there stays.
    """
    checkpoint = CheckpointStore.at(url, job=job).open(step)
    origin = msgspec.json.encode(msgspec.convert(checkpoint.manifest, Origin, from_attributes=True))
    target = parent / checkpoint.directory
    parent.mkdir(parents=True, exist_ok=True)
    present = (target / _ORIGIN).read_bytes() if (target / _ORIGIN).is_file() else b""
    if target.exists() and not present:
        raise StorageError(
            f"{target} is there and is no export; write a checkpoint.huggingface_directory for exports alone"
        )
    if present != origin:
        _check_replaceable(target, present, job)
        mark = job_mark(job)  # Another job may be writing to the same directory.
        # The process that wrote them was stopped. The second is what ``atomic_directory`` makes of the first.
        patterns = f".step-*{mark}.partial", f"..step-*{mark}.partial.*.partial", f".step-*{mark}.replaced"
        for pattern in patterns:
            for stale in list(parent.glob(pattern)):
                shutil.rmtree(stale, ignore_errors=True)
        whole = parent / f".{target.name}{mark}.partial"
        export_huggingface(checkpoint, whole, files={_ORIGIN: origin})
        old = parent / f".{target.name}{mark}.replaced"
        if target.exists():
            target.rename(old)
        whole.rename(target)
        shutil.rmtree(old, ignore_errors=True)
    size_bytes = sum(path.stat().st_size for path in target.glob("*.safetensors"))
    return JobExport(directory=str(target), size_bytes=size_bytes)


def _check_replaceable(target: Path, origin: bytes, job: str) -> None:
    """Check that an export may be replaced by one of this job.

    :param target: directory of the export.
    :param origin: content of its ``ftd.json``.
    :raises ForeignCheckpointError: it is an export of another job.
    """
    try:
        other = msgspec.json.decode(origin, type=Origin).job
    except (msgspec.DecodeError, UnicodeDecodeError):
        return
    if other != job:
        raise ForeignCheckpointError(
            f"{target} is of job {other!r}; give {job!r} a checkpoint.huggingface_directory of its own"
        )


def run_export(url: str, job: str, step: int, parent: str, limit_s: float) -> JobExport:
    """Run ``export_for_job`` in a process of its own, which ends with this thread.

    :raises CheckpointError: the export failed, or took longer than ``limit_s``.
    """
    command = module_command("ftd.snapshots.checkpoint_export", "--parent", str(os.getpid()))
    command += [url, job, str(step), parent]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=limit_s)
    except subprocess.TimeoutExpired:
        raise CheckpointError(f"it did not end in {limit_s:g} s") from None
    if done.returncode == INVALID_EXIT:
        raise CheckpointError((done.stderr.strip() or "it failed").splitlines()[-1])
    if done.returncode != 0:
        raise CheckpointError(f"it ended with exit code {done.returncode}: {done.stderr[-2000:].strip()}")
    return msgspec.json.decode(done.stdout, type=JobExport)


def main() -> int:
    """Run the export of a job as a process."""
    parser = argparse.ArgumentParser(
        prog="python -m ftd.snapshots.checkpoint_export", description=export_for_job.__doc__
    )
    parser.add_argument("--parent", type=int, required=True, help="process id of the parent")
    parser.add_argument("url")
    parser.add_argument("job")
    parser.add_argument("step", type=int)
    parser.add_argument("directory", type=Path)
    arguments = parser.parse_args()
    die_with_parent(arguments.parent)
    os.nice(_NICENESS)
    try:
        done = export_for_job(arguments.url, arguments.job, arguments.step, arguments.directory)
    except (StorageError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return INVALID_EXIT
    sys.stdout.write(msgspec.json.encode(done).decode() + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
