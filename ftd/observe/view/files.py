"""Writes the files that a command was asked for: pages and images, whose suffix names the format. Reads reports."""

import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from ftd.errors import ConfigurationError
from ftd.observe.view.document import Report, ReportError
from storage.atomic import write_whole


def require_format(path: Path, formats: Sequence[str], field: str) -> None:
    """Check the path of a file before the work of which it is the result.

    :raises ConfigurationError: the suffix of ``path`` is none of ``formats`` (such as ``.svg``), or the file cannot
        be written.
    """
    if path.suffix.lower() not in formats:
        offered = " or ".join([", ".join(formats[:-1]), formats[-1]])
        raise ConfigurationError(
            f"{path.name} has no supported suffix", field=field, remedy=f"end it in {offered}"
        )
    require_writable(path, field)


def require_writable(path: Path | None, field: str) -> None:
    """Check that a file can be written, if one was asked for, before the work of which it is the result.

    :raises ConfigurationError: its directory does not exist, it is a directory, or this user may not write it.
    """
    if path is None:
        return
    try:
        require_directory(path, field)
        is_directory, exists = path.is_dir(), path.exists()
    except OSError as error:
        raise ConfigurationError(
            f"{path} cannot be written: {error.strerror}", field=field, remedy="name another file"
        ) from None
    if is_directory:
        raise ConfigurationError(f"{path} is a directory", field=field, remedy="name a file in it")
    if not os.access(path if exists else path.absolute().parent, os.W_OK):
        raise ConfigurationError(f"{path} cannot be written", field=field, remedy="name another file")


def require_distinct(*written: tuple[str, Path | None], read: Iterable[tuple[str, Path | None]] = ()) -> None:
    """Check that a command writes no file that it also reads, and none twice. Devices such as ``/dev/null`` may be
    named again.

    :param written: options with the files that the command writes, as far as they were asked for.
    :param read: arguments and options with the files that it reads.
    :raises ConfigurationError: two of them name the same file.
    """
    taken = {os.path.realpath(path): field for field, path in read if path is not None}
    for field, path in written:
        if path is None or (path.exists() and not path.is_file()):
            continue
        place = os.path.realpath(path)
        if place in taken:
            raise ConfigurationError(
                f"{path} is also the file of {taken[place]}", field=field, remedy="name another file"
            )
        taken[place] = field


def require_directory(path: Path, field: str) -> None:
    """:raises ConfigurationError: the directory of the file does not exist."""
    if not path.absolute().parent.is_dir():
        raise ConfigurationError(
            f"the directory {path.parent} does not exist",
            field=field,
            remedy="create it, or name another directory",
        )


def write_file(path: Path, content: bytes, field: str) -> None:
    """:raises ConfigurationError: the file cannot be written."""
    try:
        write_whole(path, content)
    except OSError as error:
        raise ConfigurationError(
            f"{path} cannot be written: {error.strerror}", field=field, remedy="name another file"
        ) from None


def read_report(path: Path, field: str) -> Report:
    """Return the report in a file.

    :param field: argument that named the file.
    :raises ConfigurationError: the file cannot be read, or is no report.
    """
    try:
        return Report.from_json(json.loads(path.read_bytes()))
    except OSError as error:
        raise ConfigurationError(
            f"{path} cannot be read: {error.strerror}", field=field, remedy="check the path"
        ) from None
    except (ValueError, ReportError) as error:
        raise ConfigurationError(
            f"{path} is not a report: {error}",
            field=field,
            remedy="name a file that ftd local --report or ftd report --json wrote",
        ) from None
