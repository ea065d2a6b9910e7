"""Locations of checkpoints: a directory (on a disk or NFS), or any URL that fsspec supports.

Both kinds offer the same few operations on ``directory/name``. Names are plain, and are made and checked by
``storage.checkpoint``. The kinds differ in how a checkpoint becomes visible atomically:

* A directory is written under a hidden name, fsynced, then renamed.
* An object store cannot rename. Files are written to their final place, the manifest last, with the attempt
  in their names, so that a late writer of an earlier attempt overwrites nothing.
"""

import contextlib
import errno
import os
import re
import shutil
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from storage.atomic import atomic_file
from storage.directfile import sync_path, write_synced
from storage.errors import LocationError, LocationFullError, StorageError

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_REJECTED = {
    errno.EROFS: "it is read-only",
    errno.EACCES: "permission denied",
    errno.EPERM: "not permitted",
    errno.ENOTDIR: "it is not a directory, or is below a file",
}
_REPLACED = re.compile(r"\.(step-\d+)\.replaced", re.ASCII)
_DATA = ".bin"
"""End of the names of data files."""
_MISSING = {errno.ENOENT, errno.ESTALE}


class CheckpointLocation(Protocol):
    """A place for checkpoints. Every method raises a ``LocationError`` that says why an operation failed."""

    url: str

    def create(self) -> None:
        """Make the directory if it is missing."""

    def draft(self, final: str, attempt: str) -> str:
        """Return the name of the directory in which this attempt writes ``final``."""

    def data_name(self, stem: str, attempt: str) -> str:
        """Return the name of a data file."""

    def begin(self, draft: str) -> None:
        """Prepare ``draft`` for files; every writer calls it."""

    def write(self, directory: str, name: str, chunks: Iterable[memoryview]) -> None:
        """Write a whole file, which is durable when this returns; if it fails, no part of it is left."""

    def open(self, directory: str, name: str) -> AbstractContextManager[BinaryIO]:
        """Open a file to read from anywhere in it."""

    def names(self) -> list[str]:
        """Return the names of the directories."""

    def sizes(self, directory: str) -> dict[str, int]:
        """Return name and size of each file; empty if there is no such directory."""

    def publish(self, draft: str, final: str) -> None:
        """Make a draft ``final`` at once; all its files are written, the manifest last."""

    def abandon(self, draft: str, attempt: str) -> None:
        """Remove what this attempt wrote to its draft."""

    def remove(self, directory: str) -> None:
        """Remove a directory, if it is there."""


def open_location(url: str) -> CheckpointLocation:
    """Return the location of a path or URL.

    :raises LocationError: the URL's scheme is unknown, or its package is not installed.
    """
    if not url:
        raise LocationError("the path is empty; give a directory or a URL such as s3://bucket/checkpoints")
    scheme, separator, path = url.partition("://")
    if not separator:
        return LocalLocation(Path(url))
    if scheme in ("file", "local"):
        return LocalLocation(Path(path))
    return RemoteLocation(url)


class LocalLocation:
    """A directory of this host or on NFS."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.url = str(root)

    def create(self) -> None:
        with self._translate_errors("made"):
            self.root.mkdir(parents=True, exist_ok=True)

    def draft(self, final: str, attempt: str) -> str:
        return f".{final}.{attempt}.partial"

    def data_name(self, stem: str, attempt: str) -> str:
        return f"{stem}{_DATA}"

    def begin(self, draft: str) -> None:
        with self._translate_errors("written"):
            for path in list(self.root.iterdir()):
                self._finish(path)
            # Do not make its parents: if a file system is not mounted any more, another one would be
            # filled.
            (self.root / draft).mkdir(exist_ok=True)

    def write(self, directory: str, name: str, chunks: Iterable[memoryview]) -> None:
        # No reader may see a file with its final name and half of its bytes.
        with self._translate_errors("written"), atomic_file(self.root / directory / name) as partial:
            write_synced(partial, chunks)

    @contextlib.contextmanager
    def open(self, directory: str, name: str) -> Iterator[BinaryIO]:
        with self._translate_errors("read"), (self.root / directory / name).open("rb", buffering=0) as file:
            yield file

    def names(self) -> list[str]:
        with self._translate_errors("read"):
            return sorted(entry.name for entry in os.scandir(self.root) if entry.is_dir())

    def sizes(self, directory: str) -> dict[str, int]:
        with self._translate_errors("read"):
            try:
                entries = list(os.scandir(self.root / directory))
            except FileNotFoundError:
                return {}
            return {entry.name: entry.stat().st_size for entry in entries if entry.is_file()}

    def publish(self, draft: str, final: str) -> None:
        target, old = self.root / final, self.root / f".{final}.replaced"
        with self._translate_errors("written"):
            sync_path(self.root / draft)
            for last in (False, True):
                if target.exists():
                    shutil.rmtree(old, ignore_errors=True)
                    target.rename(old)
                try:
                    (self.root / draft).rename(target)
                    break
                except OSError as error:
                    # Another writer that began meanwhile may have moved the old one back.
                    if last or error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                        self._finish(old)
                        raise
            sync_path(self.root)
        shutil.rmtree(old, ignore_errors=True)

    def abandon(self, draft: str, attempt: str) -> None:
        self.remove(draft)

    def remove(self, directory: str) -> None:
        path = self.root / directory
        with self._translate_errors("removed"), contextlib.suppress(FileNotFoundError):
            # Rename it first, so that a directory that is half removed does not look like a corrupt
            # checkpoint.
            renamed = path.with_name(f".{directory.removeprefix('.')}.removed")
            path.rename(renamed)
            shutil.rmtree(renamed)

    def _finish(self, path: Path) -> None:
        """Finish a replacement or removal whose process was killed."""
        name = path.name
        if replaced := _REPLACED.fullmatch(name):
            final = self.root / replaced[1]
            if not final.exists():
                with contextlib.suppress(FileNotFoundError):
                    path.rename(final)
            else:
                shutil.rmtree(path, ignore_errors=True)
        elif name.startswith(".step-") and name.endswith(".removed"):
            shutil.rmtree(path, ignore_errors=True)

    @contextlib.contextmanager
    def _translate_errors(self, done: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise _place_error(self.url, done, error) from error


def _place_error(url: str, done: str, error: OSError) -> LocationError:
    what = f"{url} cannot be {done}"
    path = f" ({error.filename})" if error.filename and str(error.filename) != url else ""
    if error.errno in _FULL:
        if error.errno == errno.EFBIG:
            return LocationFullError(f"{what}: a file would become larger than this process may write{path}")
        return LocationFullError(f"{what}: no space left{path}; remove something or keep fewer checkpoints")
    if error.errno in _REJECTED:
        return LocationError(f"{what}: {_REJECTED[error.errno]}{path}")
    if error.errno in _MISSING:
        return LocationError(f"{what}: it does not exist (any more){path}")
    return LocationError(f"{what}: {error.strerror or error}{path}")


class RemoteLocation:
    """A URL of fsspec, which takes credentials and options from its own configuration and the environment."""

    def __init__(self, url: str) -> None:
        import fsspec

        self.url = url.rstrip("/")
        try:
            if "://" not in self.url:
                raise ValueError("it names no bucket or directory")
            self._files, self._root = fsspec.core.url_to_fs(self.url)
        except (ImportError, ValueError, OSError) as error:  # Some file systems connect at once.
            known = "a path, file://, or a URL whose fsspec package is installed (s3fs for s3://)"
            raise LocationError(f"{url} cannot be used: {error}; use {known}") from None

    def create(self) -> None:
        with self._translate_errors("made"):
            self._files.makedirs(self._root, exist_ok=True)

    def draft(self, final: str, attempt: str) -> str:
        return final

    def data_name(self, stem: str, attempt: str) -> str:
        return f"{stem}-{attempt}{_DATA}"

    def begin(self, draft: str) -> None:
        with self._translate_errors("written"):
            self._files.makedirs(f"{self._root}/{draft}", exist_ok=True)

    def write(self, directory: str, name: str, chunks: Iterable[memoryview]) -> None:
        """Implement ``CheckpointLocation.write``; the file that was there stays if the store discards what it got."""
        path = f"{self._root}/{directory}/{name}"
        # A data file has its attempt in its name: only this attempt writes it, and once.
        before = None if name.endswith(_DATA) else self._identity(path)
        with self._translate_errors("written"):
            file = self._files.open(path, "wb")
        try:
            # The source of the chunks may fail as well; its errors are not this location's.
            for chunk in chunks:
                with self._translate_errors("written"):
                    file.write(chunk)
            with self._translate_errors("written"):
                file.close()
        except BaseException:
            # Some stores discard what they received, and keep the file that was there; others complete the file,
            # which is then removed.
            with contextlib.suppress(Exception):
                file.discard()
            with contextlib.suppress(Exception):
                file.close()
            with contextlib.suppress(Exception):
                if self._identity(path) != before:
                    self._files.rm_file(path)
            raise

    @contextlib.contextmanager
    def open(self, directory: str, name: str) -> Iterator[BinaryIO]:
        with (
            self._translate_errors("read"),
            self._files.open(f"{self._root}/{directory}/{name}", "rb") as file,
        ):
            yield file

    def names(self) -> list[str]:
        return sorted(name for name, entry in self._entries(self._root) if entry["type"] == "directory")

    def sizes(self, directory: str) -> dict[str, int]:
        entries = self._entries(f"{self._root}/{directory}")
        return {name: int(entry["size"]) for name, entry in entries if entry["type"] == "file"}

    def publish(self, draft: str, final: str) -> None:
        """Do nothing: writing the manifest was the commit."""

    def abandon(self, draft: str, attempt: str) -> None:
        names = set(self.sizes(draft))
        written = {name for name in names if name.endswith(f"-{attempt}{_DATA}")}
        for name in written:
            with self._translate_errors("removed"):
                self._files.rm_file(f"{self._root}/{draft}/{name}")
        if names == written:
            self.remove(draft)

    def remove(self, directory: str) -> None:
        path = f"{self._root}/{directory}"
        with self._translate_errors("removed"), contextlib.suppress(FileNotFoundError):
            # Remove the manifest first: without it the rest does not count.
            for name in sorted(self.sizes(directory), key=lambda n: not n.startswith("manifest")):
                self._files.rm_file(f"{path}/{name}")
            if self._files.exists(path):
                self._files.rm(path, recursive=True)

    def _identity(self, path: str) -> str | None:
        """Return a text that differs for each content of a file; ``None`` if there is no such file."""
        with self._translate_errors("read"):
            self._files.invalidate_cache()
            try:
                return str(self._files.ukey(path))
            except FileNotFoundError:
                return None

    def _entries(self, path: str) -> list[tuple[str, dict[str, Any]]]:
        with self._translate_errors("read"):
            self._files.invalidate_cache()
            try:
                entries = self._files.ls(path, detail=True)
            except FileNotFoundError:
                # An object store has no empty directories.
                return []
            return [(entry["name"].rstrip("/").rpartition("/")[2], entry) for entry in entries]

    @contextlib.contextmanager
    def _translate_errors(self, done: str) -> Iterator[None]:
        try:
            yield
        except StorageError:
            raise
        except FileNotFoundError as error:
            raise LocationError(f"{self.url} cannot be {done}: it does not exist (any more)") from error
        except (
            Exception
        ) as error:  # Every store raises its own errors; all of them mean that the operation failed.
            reason = str(error) or type(error).__name__
            raise LocationError(f"{self.url} cannot be {done}: {reason}") from error
