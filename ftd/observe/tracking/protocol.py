"""Messages between a coordinator and its writer: JSON lines on stdin and stdout."""

from typing import Any

import msgspec

from statemachine.messages.values import LoggingPolicy


class WriterAssignment(msgspec.Struct, frozen=True, kw_only=True, tag="assignment"):
    """First line to the writer, which writes until its stdin ends, then what is left, and exits."""

    journal: str
    job: str
    """The job's id."""
    term: int
    """Term of the leader whose journal it is; a writer leaves when one of a higher term comes."""
    policy: LoggingPolicy
    parameters: dict[str, Any]
    """Name, steps and training of the job, for sinks that show them."""


class LoggedJobEnded(msgspec.Struct, frozen=True, kw_only=True, tag="over"):
    """The job ended, before stdin does."""

    outcome: str
    """``FINISHED`` or ``FAILED``."""


class SinkFailed(msgspec.Struct, frozen=True, kw_only=True, tag="failed"):
    """Nothing is logged to ``sink`` for now; sent once until it works again. Nothing is lost."""

    sink: str
    """``record``, ``tensorboard``, ``mlflow`` or ``wandb``."""
    detail: str


class SinkRestored(msgspec.Struct, frozen=True, kw_only=True, tag="restored"):
    """``sink`` has everything again."""

    sink: str


class StepsMissing(msgspec.Struct, frozen=True, kw_only=True, tag="missing"):
    """The journal has later steps, but not these, which nodes may remember. Sent again while they are missing."""

    first: int
    last: int


class StepsSkipped(msgspec.Struct, frozen=True, kw_only=True, tag="skipped"):
    """Nobody knows these steps any more; the logs go on without them."""

    first: int
    last: int


ToWriter = WriterAssignment | LoggedJobEnded
FromWriter = SinkFailed | SinkRestored | StepsMissing | StepsSkipped
