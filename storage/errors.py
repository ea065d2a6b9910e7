"""Errors of what is stored. Each says what is wrong, with the numbers, and what would work.

StorageError
├── ArenaFullError     no room for a snapshot: carries how much is needed and how much there is
├── DamagedError       bytes that are not what was written; the reader goes on without them
└── LostError          more owners are lost than a code withstands
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
