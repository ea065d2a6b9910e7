"""A full file system as an injected fault. The space is released by a timer, or when this process ends."""

import asyncio
import os
import shutil
import tempfile
from pathlib import Path
from typing import IO

import structlog

log = structlog.get_logger("ftd.node")

MAX_FILL_MIB = 1024
"""Largest amount of free space that is filled without an explicit limit: the file system may be the machine's
memory.
"""
_MIB = 1 << 20
_LEAST_BYTES = 64 * 1024
_TRIES = 20


class DiskFiller:
    """Unnamed files that fill the free space of a directory and disappear with this process, even after
    SIGKILL.
    """

    def __init__(self) -> None:
        self._files: list[IO[bytes]] = []

    def find_problem(self, directory: Path, most_mib: int | None) -> str | None:
        """Return why ``directory`` cannot be filled, or ``None`` if it can."""
        most_mib = most_mib or MAX_FILL_MIB
        try:
            free = shutil.disk_usage(directory).free
        except OSError as error:
            return f"{directory} cannot be filled: {error.strerror}"
        if free > most_mib * _MIB:
            return (
                f"{directory} has {free // _MIB} MiB free, more than size_mib = {most_mib}: raise it, or "
                "give the node a smaller file system"
            )
        return None

    def fill(self, directory: Path, for_s: float) -> None:
        """Leave no space in ``directory`` for ``for_s``. Call it only where ``find_problem`` returns ``None``."""
        try:
            file = tempfile.TemporaryFile(dir=directory)  # noqa: SIM115  # it is closed by ``_release``
        except OSError as error:
            log.warning("fill_failed", directory=str(directory), reason=error.strerror)
            return
        taken = _take(file, directory)
        log.warning("disk_filled", directory=str(directory), size_bytes=taken)
        self._files.append(file)
        asyncio.get_running_loop().call_later(for_s, self._release, file)

    def close(self) -> None:
        """Release everything now."""
        for file in tuple(self._files):
            self._release(file)

    def _release(self, file: IO[bytes]) -> None:
        if file in self._files:
            self._files.remove(file)
            file.close()


def _take(file: IO[bytes], directory: Path) -> int:
    """Allocate the free space and return the bytes. Others allocate and free meanwhile, so the free space is
    read again until hardly any is left.
    """
    taken = 0
    for _ in range(_TRIES):
        free = shutil.disk_usage(directory).free
        if free < _LEAST_BYTES:
            break
        try:
            os.posix_fallocate(file.fileno(), taken, free)
            taken += free
        except OSError:
            half = free // 2
            try:
                os.posix_fallocate(file.fileno(), taken, half)
                taken += half
            except OSError:
                break
    return taken
