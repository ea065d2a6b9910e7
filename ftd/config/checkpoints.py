"""``[checkpoint]`` of a job file and of a submitted job: read, checked, and as the machines take it."""

from pathlib import Path

import msgspec

from ftd.config.reading import require_positive
from ftd.errors import ConfigurationError
from ftd.wire.public import CheckpointData
from statemachine.values import CheckpointPolicy, SnapshotPolicy


class CheckpointTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``[checkpoint]``: the state on a disk, for when no memory holds it; needs ``[snapshot]``."""

    url: str = ""
    """A directory, relative to the job file, or a URL of fsspec, that the coordinator and all nodes reach."""
    every_steps: int = 0
    """The first snapshot so many steps after the last checkpoint becomes one."""
    keep: int = 3
    """Complete checkpoints that stay; older ones are removed."""
    resume: bool = True
    """Go on from the newest one there; false: refuse to begin where there are some."""


def checkpoint_data(told: CheckpointTable, directory: Path) -> CheckpointData:
    """A directory becomes the same for everybody, wherever they were started."""
    url = told.url if "://" in told.url or not told.url else str((directory / told.url).resolve())
    return CheckpointData(url=url, every_steps=told.every_steps, keep=told.keep, resume=told.resume)


def check_checkpoint(told: CheckpointTable | CheckpointData, *, snapshots: bool) -> None:
    """:param snapshots: the job takes some. :raises ConfigurationError: names the field and the remedy."""
    if not told.url:
        if told.every_steps:
            raise ConfigurationError(
                "checkpoints need a place",
                field="checkpoint.url",
                remedy="write a directory or a URL that the coordinator and all nodes reach",
            )
        return
    if told.every_steps == 0:
        raise ConfigurationError(
            "checkpoints want a number of steps between them",
            field="checkpoint.every_steps",
            remedy="write every_steps = 1000, say, under [checkpoint]; without checkpoints, leave url out",
        )
    if told.every_steps < 1:
        raise ConfigurationError(
            f"{told.every_steps} is not allowed", field="checkpoint.every_steps", remedy="write 1 or more"
        )
    require_positive(told.keep, "checkpoint.keep")
    if not snapshots:
        raise ConfigurationError(
            "checkpoints are written from snapshots, and this job takes none",
            field="snapshot.every_steps",
            remedy="write a number of steps, or auto, under [snapshot]",
        )


def checkpoint_policy(data: CheckpointData, snapshot: SnapshotPolicy) -> CheckpointPolicy:
    """What a submitted job says of its checkpoints, checked.

    :raises ConfigurationError: names the field and the remedy.
    """
    check_checkpoint(data, snapshots=snapshot.every_steps > 0)
    return CheckpointPolicy(url=data.url, every_steps=data.every_steps, keep=data.keep, resume=data.resume)
