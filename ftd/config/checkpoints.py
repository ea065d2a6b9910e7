"""``[checkpoint]`` of a job file and of a submitted job: checked, and as the machines take it."""

from pathlib import Path

import msgspec

from ftd.config.validation import require_positive
from ftd.errors import ConfigurationError
from ftd.transport.wire.public import CheckpointData
from statemachine.messages.values import CheckpointPolicy, SnapshotPolicy


def with_absolute_paths(table: CheckpointData, directory: Path) -> CheckpointData:
    """Return the table with paths that mean the same to everybody, wherever they were started.

    :param directory: of the job file.
    """
    written = {key: getattr(table, key) for key in ("url", "huggingface_directory")}
    local = {key: path for key, path in written.items() if path and "://" not in path}
    resolved = {key: str((directory / path).resolve()) for key, path in local.items()}
    return msgspec.structs.replace(table, **resolved)


def check_checkpoint(table: CheckpointData, *, snapshots: bool) -> None:
    """:param snapshots: the job takes some. :raises ConfigurationError: names the field and the remedy."""
    if not table.url:
        if table.every_steps:
            raise ConfigurationError(
                "checkpoints need a place",
                field="checkpoint.url",
                remedy="write a directory or a URL that the coordinator and all nodes reach",
            )
        _check_no_exports(table)
        return
    if table.every_steps == 0:
        raise ConfigurationError(
            "checkpoints want a number of steps between them",
            field="checkpoint.every_steps",
            remedy="write every_steps = 1000, say, under [checkpoint]; without checkpoints, leave url out",
        )
    if table.every_steps < 1:
        raise ConfigurationError(
            f"{table.every_steps} is not allowed", field="checkpoint.every_steps", remedy="write 1 or more"
        )
    require_positive(table.keep, "checkpoint.keep")
    if not snapshots:
        raise ConfigurationError(
            "checkpoints are written from snapshots, and this job takes none",
            field="snapshot.every_steps",
            remedy="write a number of steps, or auto, under [snapshot]",
        )
    _check_exports(table)


def _check_no_exports(told: CheckpointData) -> None:
    if told.huggingface_every_steps or told.huggingface_directory:
        raise ConfigurationError(
            "exports are made from checkpoints, and this job writes none",
            field="checkpoint.url",
            remedy="write a directory or a URL, and every_steps",
        )


def _check_exports(told: CheckpointData) -> None:
    every_steps, directory = told.huggingface_every_steps, told.huggingface_directory
    if not every_steps and not directory:
        return
    if every_steps < 1:
        raise ConfigurationError(
            f"{every_steps} is not allowed" if every_steps else "exports want a number of steps between them",
            field="checkpoint.huggingface_every_steps",
            remedy="write 1 or more; without exports, leave huggingface_directory out",
        )
    if not directory:
        raise ConfigurationError(
            "exports need a directory",
            field="checkpoint.huggingface_directory",
            remedy="write one that every coordinator reaches",
        )
    if "://" in directory or directory == told.url:
        raise ConfigurationError(
            f"{directory} cannot hold exports",
            field="checkpoint.huggingface_directory",
            remedy="write a directory of their own on a disk or NFS, as from_pretrained reads no URLs",
        )


def checkpoint_policy(data: CheckpointData, snapshot: SnapshotPolicy) -> CheckpointPolicy:
    """What a submitted job says of its checkpoints, checked.

    :raises ConfigurationError: names the field and the remedy.
    """
    check_checkpoint(data, snapshots=snapshot.every_steps > 0)
    return CheckpointPolicy(**msgspec.structs.asdict(data))
