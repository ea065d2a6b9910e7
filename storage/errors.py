"""Errors of storage. Each message says what is wrong, with the numbers, and what would work.

StorageError
├── ArenaFullError            no room for a snapshot: carries how much is needed and how much is free
├── CorruptDataError          bytes differ from what was written; the reader goes on without them
├── TooManyLossesError        more owners are lost than a code withstands
├── LocationError             a location of checkpoints cannot be used: read-only, missing, unknown, broken
│   └── LocationFullError     no room for more
├── CheckpointMissingError    no checkpoint of that step, or none at all
├── ForeignCheckpointError    a checkpoint of another job, another model or another version of the format
└── TransferCancelledError    writing or reading was cancelled
"""


class StorageError(RuntimeError):
    """Base of all errors of this package."""


class ArenaFullError(StorageError):
    """The arena cannot grow: its limit, or the memory of its file system, is exhausted."""

    def __init__(self, message: str, needed_bytes: int, free_bytes: int) -> None:
        super().__init__(message)
        self.needed_bytes = needed_bytes
        self.free_bytes = free_bytes


class CorruptDataError(StorageError):
    """A digest does not match, or a file is not what its name says."""


class TooManyLossesError(StorageError):
    """The remaining owners' cells do not determine those of the lost owners."""


class LocationError(StorageError):
    """A directory or a URL cannot be read or written; the message names it and the operation."""


class LocationFullError(LocationError):
    """The disk, a quota or a limit on the size of files is exhausted."""


class CheckpointMissingError(StorageError):
    """There is no complete checkpoint under that name."""


class ForeignCheckpointError(StorageError):
    """The checkpoint is intact, but another job's, another model's, or in a format of another version."""


class TransferCancelledError(StorageError):
    """The rate limiter was cancelled. What was being written is not complete and cannot be restored."""
