"""``[logging]`` of a job file and of a submitted job: checked, and as the machines take it."""

from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import msgspec
from msgspec.structs import replace

from ftd.errors import ConfigurationError
from ftd.transport.wire.public import LoggingData
from statemachine.messages.values import LoggingPolicy

_PACKAGES = {
    "tensorboard": ("tensorboard",),
    "wandb": ("wandb",),
    "mlflow": ("mlflow-skinny", "mlflow"),
}
"""Sink → the packages of which one must be installed where a coordinator runs."""


def resolve_logging(written: LoggingData, directory: Path, job: str) -> LoggingData:
    """Return the table with absolute paths and what follows for keys that were left out.

    :param directory: of the job file.
    :param job: the job's name.
    """
    mlflow = written.mlflow
    if not (written.directory or written.tensorboard or written.wandb or mlflow):
        return written
    place = (directory / (written.directory or written.tensorboard or "logs")).resolve()
    board = str((directory / written.tensorboard).resolve()) if written.tensorboard else ""
    if mlflow is not None and mlflow.tracking_uri and "://" not in mlflow.tracking_uri:
        mlflow = replace(mlflow, tracking_uri=str((directory / mlflow.tracking_uri).resolve()))
    return _with_defaults(replace(written, directory=str(place), tensorboard=board, mlflow=mlflow), job)


def _with_defaults(data: LoggingData, job: str) -> LoggingData:
    """Return the table with what follows from the job's name and from ``directory`` for keys that were left out."""
    wandb, mlflow = data.wandb, data.mlflow
    if wandb is not None:
        wandb = replace(wandb, project=wandb.project or job)
    if mlflow is not None:
        uri = mlflow.tracking_uri or f"{data.directory}/mlruns"
        mlflow = replace(mlflow, tracking_uri=uri, experiment=mlflow.experiment or job)
    return replace(data, wandb=wandb, mlflow=mlflow)


def logging_policy(data: LoggingData, job: str) -> LoggingPolicy:
    """Return what a submitted job says of its logs, checked.

    :param job: the job's name.
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
    return msgspec.convert(msgspec.to_builtins(_with_defaults(data, job)), LoggingPolicy)


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
