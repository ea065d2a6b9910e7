"""Chaos: a file system without room. All of it is given back: by a timer, or by this process's end."""

import asyncio
import os
import shutil
import tempfile
from pathlib import Path
from typing import IO

import structlog

log = structlog.get_logger("ftd.node")

MOST_MIB = 1024
"""Without another bound a larger file system is not filled: it may be the machine's memory."""
_MIB = 1 << 20
_LEAST_BYTES = 64 * 1024
_TRIES = 20


class DiskFiller:
    """Takes what is free, in files without a name: they go with this process, however it ends."""

    def __init__(self) -> None:
        self._files: list[IO[bytes]] = []

    def problem(self, directory: Path, most_mib: int | None) -> str | None:
        """Why ``directory`` cannot be filled; ``None`` where it can."""
        most_mib = most_mib or MOST_MIB
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
        """Leave no room in ``directory`` for so long. Call it where there is no ``problem``."""
        try:
            file = tempfile.TemporaryFile(dir=directory)  # noqa: SIM115  # it is closed by ``_release``
        except OSError as error:
            log.warning("fill", directory=str(directory), reason=error.strerror)
            return
        taken = _take(file, directory)
        log.warning("filled", directory=str(directory), size_bytes=taken)
        self._files.append(file)
        asyncio.get_running_loop().call_later(for_s, self._release, file)

    def close(self) -> None:
        """Give everything back now."""
        for file in tuple(self._files):
            self._release(file)

    def _release(self, file: IO[bytes]) -> None:
        if file in self._files:
            self._files.remove(file)
            file.close()


def _take(file: IO[bytes], directory: Path) -> int:
    """Others may take and give meanwhile: what is free is asked again until hardly anything is."""
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
