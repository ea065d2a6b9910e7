"""Directories that are computed once and then reused, also if several processes ask for them at the same time."""

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from runtime.sources.errors import DataError, expand_home
from storage.directfile import sync_path

Report = Callable[[str], None]
"""Function that receives a line about the progress."""


def default_cache_directory() -> Path:
    """Return ``$XDG_CACHE_HOME/ftd``, or ``~/.cache/ftd``.

    :raises DataError: this user has no home directory, and the variable is not set.
    """
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base) / "ftd"
    try:
        return expand_home("~/.cache") / "ftd"
    except DataError:
        raise DataError(
            "this user has no home directory for the cache of prepared data; choose a directory with "
            "cache_directory, or set XDG_CACHE_HOME"
        ) from None


def fingerprint(facts: Mapping[str, Any]) -> str:
    """Return a short name that is equal if and only if the facts are equal."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]


def file_signature(path: Path) -> list[str | int]:
    """Return what identifies a file's content without reading it: path, size in bytes and modification time in
    ns.
    """
    try:
        state = path.stat()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    return [str(path.resolve()), state.st_size, state.st_mtime_ns]


def cached_directory(cache: str | None, key: str, compute: Callable[[Path], None], report: Report) -> Path:
    """Return the directory of ``key``; the first process that asks computes it, all others wait for it.

    The directory gets its name when all its files are on disk, and the kernel holds the lock. So a process
    that dies leaves nothing that looks complete, and the next in line computes it.

    :param cache: parent of such directories; None is the default.
    :param compute: writes the files into the empty directory that it gets.
    :raises DataError: the cache cannot be written.
    """
    root = default_cache_directory() if cache is None else expand_home(cache)
    entry = root / key
    if entry.is_dir():
        return entry
    try:
        root.mkdir(parents=True, exist_ok=True)
        with _locked(root / f"{key}.lock", report):
            if not entry.is_dir():
                _compute(entry, compute)
    except OSError as error:
        raise DataError(
            f"the cache {root} cannot be written: {error}; choose another directory with cache_directory"
        ) from error
    return entry


def _compute(entry: Path, compute: Callable[[Path], None]) -> None:
    unfinished = entry.with_name(f"{entry.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir()
    try:
        compute(unfinished)
        for path in (*unfinished.iterdir(), unfinished):
            sync_path(path)
        unfinished.rename(entry)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise


@contextmanager
def _locked(path: Path, report: Report) -> Iterator[None]:
    """Hold the lock; the file stays, because removing it would let two processes lock different files."""
    with path.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            report(f"waiting for another process, which prepares {path.with_suffix('')}")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
