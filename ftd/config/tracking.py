"""``[logging]`` of a job file and of a submitted job: read, checked, and as the machines take it."""

from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

import msgspec

from ftd.errors import ConfigurationError
from ftd.transport.wire.public import LoggingData, MlflowData, WandbData
from statemachine.messages.values import LoggingPolicy

_PACKAGES = {
    "tensorboard": ("tensorboard",),
    "wandb": ("wandb",),
    "mlflow": ("mlflow-skinny", "mlflow"),
}
"""Sink → the packages of which one must be installed where a coordinator runs."""


class WandbTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``[logging] wandb = {…}``."""

    project: str = ""
    """Project of the run; left out: the job's name."""
    entity: str = ""
    """User or team that owns the project; left out: the one of ``WANDB_API_KEY``."""
    mode: Literal["online", "offline"] = "online"
    """``offline`` writes files below ``directory``, for ``wandb sync``."""
    tags: list[str] = []
    """Tags of the run."""


class MlflowTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``[logging] mlflow = {…}``."""

    tracking_uri: str = ""
    """URL of a server, or a directory, relative to the job file; left out: ``mlruns`` below ``directory``."""
    experiment: str = ""
    """Experiment that the run belongs to; left out: the job's name."""


class LoggingTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``[logging]``."""

    directory: str = ""
    """Directory of ``<job id>/steps.jsonl``, relative to the job file, which all coordinators' hosts share; left
    out: ``tensorboard``'s directory, or ``logs`` if another sink is named."""
    tensorboard: str = ""
    """Directory of event files, relative to the job file; each job has a run below it."""
    wandb: WandbTable | None = None
    mlflow: MlflowTable | None = None


def logging_data(written: LoggingTable, directory: Path, job: str) -> LoggingData:
    """Return the table with absolute paths and all defaults, as everybody takes it.

    :param directory: of the job file.
    :param job: the job's name.
    """
    wandb, mlflow = written.wandb, written.mlflow
    if not (written.directory or written.tensorboard or wandb or mlflow):
        return LoggingData()
    place = (directory / (written.directory or written.tensorboard or "logs")).resolve()
    data = LoggingData(directory=str(place))
    if written.tensorboard:
        data = msgspec.structs.replace(data, tensorboard=str((directory / written.tensorboard).resolve()))
    if wandb is not None:
        made = WandbData(
            project=wandb.project or job, entity=wandb.entity, mode=wandb.mode, tags=tuple(wandb.tags)
        )
        data = msgspec.structs.replace(data, wandb=made)
    if mlflow is not None:
        uri = mlflow.tracking_uri or str(place / "mlruns")
        uri = uri if "://" in uri else str((directory / uri).resolve())
        data = msgspec.structs.replace(
            data, mlflow=MlflowData(tracking_uri=uri, experiment=mlflow.experiment or job)
        )
    return data


def logging_policy(data: LoggingData) -> LoggingPolicy:
    """Return what a submitted job says of its logs, checked.

    :raises ConfigurationError: names the field and the remedy.
    """
    if not data.directory:
        return LoggingPolicy()
    for field, written in (("directory", data.directory), ("tensorboard", data.tensorboard)):
        if written and not Path(written).is_absolute():
            raise ConfigurationError(
                f"{written!r} is not an absolute path",
                field=f"logging.{field}",
                remedy="the coordinators were started elsewhere: write the whole path",
            )
    return msgspec.convert(msgspec.to_builtins(data), LoggingPolicy)


def sinks_of(policy: LoggingPolicy) -> tuple[str, ...]:
    """Return the names of the sinks that a job wants, besides the record of steps."""
    wanted = {
        "tensorboard": bool(policy.tensorboard),
        "mlflow": policy.mlflow is not None,
        "wandb": policy.wandb is not None,
    }
    return tuple(name for name, is_wanted in wanted.items() if is_wanted)


def check_installed(policy: LoggingPolicy) -> None:
    """Check, where a coordinator runs, that the packages of the wanted sinks are there.

    :raises ConfigurationError: one is missing.
    """
    for sink in sinks_of(policy):
        if not any(map(_is_installed, _PACKAGES[sink])):
            raise ConfigurationError(
                f"the package {_PACKAGES[sink][0]} is not installed on the coordinator's host",
                field=f"logging.{sink}",
                remedy='install it there (pip install "ftd[logging]"), or leave the field out',
            )


def _is_installed(package: str) -> bool:
    """Look for the distribution: W&B's own files make a directory ``wandb`` importable."""
    try:
        version(package)
    except PackageNotFoundError:
        return False
    return True
