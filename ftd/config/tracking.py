"""Checks ``[logging]`` of job files and submitted jobs, and converts it for the state machines."""

from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import msgspec
from msgspec.structs import replace

from ftd.config.validation import expand_path
from ftd.errors import ConfigurationError
from ftd.transport.wire.public import LoggingData
from statemachine.messages.values import LoggingPolicy

_PACKAGES = {
    "tensorboard": ("tensorboard",),
    "wandb": ("wandb",),
    "mlflow": ("mlflow-skinny", "mlflow"),
}
"""Sink → packages; one of them must be installed on the hosts of the coordinators."""


def resolve_logging(written: LoggingData, directory: Path, job: str) -> LoggingData:
    """Return the table with absolute paths and with defaults for keys that were left out.

    :param directory: directory of the job file.
    :param job: name of the job.
    :raises ConfigurationError: see ``expand_path``.
    """
    mlflow = written.mlflow
    if not (written.directory or written.tensorboard or written.wandb or mlflow):
        return written

    def resolved(path: str, key: str) -> str:
        return str(expand_path(path, directory, f"logging.{key}").resolve())

    board = resolved(written.tensorboard, "tensorboard") if written.tensorboard else ""
    place = (
        resolved(written.directory, "directory")
        if written.directory
        else board or resolved("logs", "directory")
    )
    if mlflow is not None and mlflow.tracking_uri and "://" not in mlflow.tracking_uri:
        mlflow = replace(mlflow, tracking_uri=resolved(mlflow.tracking_uri, "mlflow.tracking_uri"))
    return _with_defaults(replace(written, directory=place, tensorboard=board, mlflow=mlflow), job)


def _with_defaults(data: LoggingData, job: str) -> LoggingData:
    """Return the table with defaults that follow from the name of the job and from ``directory``."""
    wandb, mlflow = data.wandb, data.mlflow
    if wandb is not None:
        wandb = replace(wandb, project=wandb.project or job)
    if mlflow is not None:
        uri = mlflow.tracking_uri or f"{data.directory}/mlruns"
        mlflow = replace(mlflow, tracking_uri=uri, experiment=mlflow.experiment or job)
    return replace(data, wandb=wandb, mlflow=mlflow)


def logging_policy(data: LoggingData, job: str) -> LoggingPolicy:
    """Return the checked logging policy of a submitted job.

    :param job: name of the job.
    :raises ConfigurationError: a value is wrong; the error names the field and the remedy.
    """
    if not data.directory:
        return LoggingPolicy()
    for field, written in (("directory", data.directory), ("tensorboard", data.tensorboard)):
        if written and not Path(written).is_absolute():
            raise ConfigurationError(
                f"{written!r} is not an absolute path",
                field=f"logging.{field}",
                remedy="write the absolute path, because coordinators may be started in other directories",
            )
    return msgspec.convert(msgspec.to_builtins(_with_defaults(data, job)), LoggingPolicy)


def sinks_of(policy: LoggingPolicy) -> tuple[str, ...]:
    """Return the names of the sinks that a job uses besides the record of steps."""
    wanted = {
        "tensorboard": bool(policy.tensorboard),
        "mlflow": policy.mlflow is not None,
        "wandb": policy.wandb is not None,
    }
    return tuple(name for name, is_wanted in wanted.items() if is_wanted)


def check_installed(policy: LoggingPolicy) -> None:
    """Check that the packages of the sinks are installed on a coordinator's host.

    :raises ConfigurationError: a package is missing.
    """
    for sink in sinks_of(policy):
        if not any(map(_is_installed, _PACKAGES[sink])):
            raise ConfigurationError(
                f"the package {_PACKAGES[sink][0]} is not installed on the coordinator's host",
                field=f"logging.{sink}",
                remedy='install it there (pip install "ftd[logging]"), or remove the field',
            )


def _is_installed(package: str) -> bool:
    """Return whether the distribution is installed. Importing would not show that: W&B's files make ``wandb``
    importable.
    """
    try:
        version(package)
    except PackageNotFoundError:
        return False
    return True
