"""Errors of what is stored. Each says what is wrong, with the numbers, and what would work.

StorageError
├── ArenaFullError     no room for a snapshot: carries how much is needed and how much there is
├── DamagedError       bytes that are not what was written; the reader goes on without them
├── LostError          more owners are lost than a code withstands
├── PlaceError         where checkpoints are kept cannot be used: read-only, gone, unknown, broken
│   └── PlaceFullError    no room for more
├── MissingError       no checkpoint of that step, or none at all
├── ForeignError       a checkpoint of another job, another model or another version of the format
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


class DamagedError(StorageError):
    """A digest does not match, or a file is not what its name says."""


class LostError(StorageError):
    """Nothing that is left says what the lost owners kept."""


class PlaceError(StorageError):
    """A directory or a URL that cannot be read or written; names it, and what was done there."""


class PlaceFullError(PlaceError):
    """The disk, a quota or a limit on the size of files is used up."""


class MissingError(StorageError):
    """Nothing complete is there under that name."""


class ForeignError(StorageError):
    """Sound, and not ours: another job's, another model's, or in a format of another version."""


class CancelledError(StorageError):
    """``Flow.cancel`` was called. What was being written is not complete and not restorable."""
