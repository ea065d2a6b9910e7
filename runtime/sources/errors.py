"""The error of all data sources, and the checks and the file search that they share."""

import glob
import importlib
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType


class DataError(ValueError):
    """A data source, or one of its files, cannot be used; the message says where and what to change."""


def expand_home(name: str) -> Path:
    """Return the path with ``~`` replaced by the home directory.

    :raises DataError: that directory is not known here.
    """
    try:
        return Path(name).expanduser()
    except RuntimeError:
        raise DataError(
            f"the home directory in {name} is not known here; write an absolute path instead"
        ) from None


def find_files(files: str | Sequence[str], what: str) -> list[Path]:
    """Return the files that paths and patterns name, in the given order; the matches of a pattern by name.

    :param what: kind of the files, for messages: "token file".
    :raises DataError: no file is named, one is missing or cannot be looked up, a pattern matches none, or a path
        is a directory.
    """
    wanted = [files] if isinstance(files, str) else list(files)
    if not wanted:
        raise DataError(f"no {what} is named; give a path, a pattern such as data/*, or a list of them")
    found: list[Path] = []
    for name in wanted:
        if not isinstance(name, str):
            raise DataError(f"a {what} is named by a string, not by {name!r}")
        path = expand_home(name)
        try:
            is_directory, exists = path.is_dir(), path.exists()
        except OSError as error:
            raise DataError(f"{what} {path} cannot be read: {error.strerror}") from error
        if is_directory:
            raise DataError(f"{path} is a directory, not a {what}; write a pattern such as {path / '*'}")
        if exists:
            found.append(path)
        elif glob.has_magic(name):
            matches = sorted(Path(match) for match in glob.glob(str(path), recursive=True))  # noqa: PTH207
            matches = [match for match in matches if match.is_file()]
            if not matches:
                raise DataError(f"no {what} matches {name} (looked from {Path.cwd()})")
            found += matches
        else:
            raise DataError(f"{what} {path} does not exist (looked from {Path.cwd()})")
    return list(dict.fromkeys(found))


def check_number(what: str, number: object, least: int = 1) -> None:
    """:raises DataError: the number is not a whole number of at least ``least``."""
    if isinstance(number, bool) or not isinstance(number, int) or number < least:
        raise DataError(f"{what} must be a whole number of at least {least}, not {number!r}")


def check_length(length: object) -> None:
    """:raises DataError: the length is not a whole number above 0."""
    check_number("length, the tokens of a sample,", length)


def import_package(name: str, purpose: str) -> ModuleType:
    """Import an optional package.

    :raises DataError: the package is missing; the message gives the command that installs it.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        package = name.partition(".")[0]
        raise DataError(
            f"{purpose} needs the package {package}, which cannot be imported here ({error}); install it "
            f"with: pip install {package} (or pip install 'ftd[hf]' for all of them)"
        ) from error
