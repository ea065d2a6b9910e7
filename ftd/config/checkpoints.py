"""Checks ``[checkpoint]`` of job files and submitted jobs, and converts it for the state machines."""

from pathlib import Path

import msgspec

from ftd.config.validation import expand_path, require_positive
from ftd.errors import ConfigurationError
from ftd.transport.wire.public import CheckpointData
from statemachine.cluster.snapshots.checkpoint_intervals import FIRST_EVERY_STEPS
from statemachine.messages.values import CheckpointPolicy, SnapshotPolicy


def with_absolute_paths(table: CheckpointData, directory: Path) -> CheckpointData:
    """Return the table with absolute paths, which are valid wherever a process was started.

    :param directory: directory of the job file.
    :raises ConfigurationError: see ``expand_path``.
    """
    written = {key: getattr(table, key) for key in ("url", "huggingface_directory")}
    local = {key: path for key, path in written.items() if path and "://" not in path}
    resolved = {
        key: str(expand_path(path, directory, f"checkpoint.{key}").resolve()) for key, path in local.items()
    }
    return msgspec.structs.replace(table, **resolved)


def check_checkpoint(table: CheckpointData, *, snapshots: bool) -> None:
    """Check the table.

    :param snapshots: whether the job takes snapshots.
    :raises ConfigurationError: a value is wrong; the error names the field and the remedy.
    """
    if not table.url:
        if table.every_steps:
            raise ConfigurationError(
                "checkpoints need a location",
                field="checkpoint.url",
                remedy="write a directory or a URL that the coordinator and all nodes can reach",
            )
        _check_no_exports(table)
        return
    if table.every_steps == 0:
        raise ConfigurationError(
            "the checkpoint interval is missing",
            field="checkpoint.every_steps",
            remedy='write every_steps = "auto" or a number of steps such as 1000 under [checkpoint], or remove url to '
            "write no checkpoints",
        )
    if table.every_steps != "auto" and table.every_steps < 1:
        raise ConfigurationError(
            f"{table.every_steps} is not allowed",
            field="checkpoint.every_steps",
            remedy="write 1 or more, or auto",
        )
    require_positive(table.keep, "checkpoint.keep")
    if not snapshots:
        raise ConfigurationError(
            "checkpoints are written from snapshots, but this job takes no snapshots",
            field="snapshot.every_steps",
            remedy='write every_steps = "auto" or a number of steps under [snapshot]',
        )
    _check_exports(table)


def _check_no_exports(settings: CheckpointData) -> None:
    if settings.huggingface_every_steps or settings.huggingface_directory:
        raise ConfigurationError(
            "exports are made from checkpoints, but this job writes no checkpoints",
            field="checkpoint.url",
            remedy="write url (a directory or a URL) and every_steps under [checkpoint]",
        )


def _check_exports(settings: CheckpointData) -> None:
    every_steps, directory = settings.huggingface_every_steps, settings.huggingface_directory
    if not every_steps and not directory:
        return
    if every_steps < 1:
        raise ConfigurationError(
            f"{every_steps} is not allowed" if every_steps else "the export interval is missing",
            field="checkpoint.huggingface_every_steps",
            remedy="write 1 or more, or remove huggingface_directory to write no exports",
        )
    if not directory:
        raise ConfigurationError(
            "exports need a directory",
            field="checkpoint.huggingface_directory",
            remedy="write a directory that every coordinator can reach",
        )
    scheme, _, path = settings.url.rpartition("://")
    shared = scheme in ("", "file", "local") and Path(path) == Path(directory)
    if "://" in directory or shared:
        raise ConfigurationError(
            f"exports cannot be written to {directory}",
            field="checkpoint.huggingface_directory",
            remedy="write a separate directory on a disk or NFS, because from_pretrained reads no URLs",
        )


def checkpoint_policy(data: CheckpointData, snapshot: SnapshotPolicy) -> CheckpointPolicy:
    """Return the checked checkpoint policy of a submitted job.

    :raises ConfigurationError: a value is wrong; the error names the field and the remedy.
    """
    check_checkpoint(data, snapshots=snapshot.every_steps > 0)
    auto = data.every_steps == "auto"
    every_steps = FIRST_EVERY_STEPS if data.every_steps == "auto" else data.every_steps
    return CheckpointPolicy(
        **msgspec.structs.asdict(data) | {"every_steps": every_steps, "auto_interval": auto}
    )
