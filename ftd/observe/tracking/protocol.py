"""Messages between a coordinator and its tracking writer: JSON lines on stdin and stdout."""

from typing import Any

import msgspec

from statemachine.messages.values import LoggingPolicy


class WriterAssignment(msgspec.Struct, frozen=True, kw_only=True, tag="assignment"):
    """First line to the writer. The writer writes until its stdin ends, then writes what is left, and exits."""

    journal: str
    job: str
    """The job's id."""
    term: int
    """Term of the leader whose journal is read; a writer leaves when one with a higher term comes."""
    policy: LoggingPolicy
    parameters: dict[str, Any]
    """Name, steps and training table of the job, for sinks that show them."""


class LoggedJobEnded(msgspec.Struct, frozen=True, kw_only=True, tag="over"):
    """Last line to the writer, sent before its stdin ends, if the job has ended."""

    outcome: str
    """``FINISHED`` or ``FAILED``."""


class SinkFailed(msgspec.Struct, frozen=True, kw_only=True, tag="failed"):
    """A sink that cannot be written to for now. Reported once until it works again; nothing is lost."""

    sink: str
    """``record``, ``tensorboard``, ``mlflow`` or ``wandb``."""
    detail: str


class SinkRestored(msgspec.Struct, frozen=True, kw_only=True, tag="restored"):
    """A sink that works again and has all rows."""

    sink: str


class StepsMissing(msgspec.Struct, frozen=True, kw_only=True, tag="missing"):
    """Steps that the journal lacks although it has later ones; nodes may remember them. Repeated while they
    are missing.
    """

    first: int
    last: int


class StepsSkipped(msgspec.Struct, frozen=True, kw_only=True, tag="skipped"):
    """Missing steps that nobody remembers; the logs continue without them."""

    first: int
    last: int


ToWriter = WriterAssignment | LoggedJobEnded
FromWriter = SinkFailed | SinkRestored | StepsMissing | StepsSkipped
