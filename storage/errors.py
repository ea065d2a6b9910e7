"""Errors of what is stored. Each says what is wrong, with the numbers, and what would work.

StorageError
├── ArenaFullError     no room for a snapshot: carries how much is needed and how much there is
├── CorruptDataError       bytes that are not what was written; the reader goes on without them
├── TooManyLossesError          more owners are lost than a code withstands
├── LocationError         where checkpoints are kept cannot be used: read-only, gone, unknown, broken
│   └── LocationFullError    no room for more
├── CheckpointMissingError       no checkpoint of that step, or none at all
├── ForeignCheckpointError       a checkpoint of another job, another model or another version of the format
└── CancelledError     somebody asked to stop writing or reading
"""


class StorageError(RuntimeError):
    """Base of all."""


class ArenaFullError(StorageError):
    """The arena cannot grow: its limit, or the memory behind it, is used up."""

    def __init__(self, message: str, needed_bytes: int, free_bytes: int) -> None:
        super().__init__(message)
        self.needed_bytes = needed_bytes
        self.free_bytes = free_bytes


class CorruptDataError(StorageError):
    """A digest does not match, or a file is not what its name says."""


class TooManyLossesError(StorageError):
    """Nothing that is left says what the lost owners kept."""


class LocationError(StorageError):
    """A directory or a URL that cannot be read or written; names it, and what was done there."""


class LocationFullError(LocationError):
    """The disk, a quota or a limit on the size of files is used up."""


class CheckpointMissingError(StorageError):
    """Nothing complete is there under that name."""


class ForeignCheckpointError(StorageError):
    """Sound, and not ours: another job's, another model's, or in a format of another version."""


class TransferCancelledError(StorageError):
    """``Flow.cancel`` was called. What was being written is not complete and not restorable."""
