"""Writes the files that a command was asked for: pages and images, whose suffix names the format."""

from collections.abc import Sequence
from pathlib import Path

from ftd.errors import ConfigurationError


def require_format(path: Path, formats: Sequence[str], field: str) -> None:
    """:raises ConfigurationError: the suffix of ``path`` is none of ``formats`` (such as ``.svg``)."""
    if path.suffix not in formats:
        offered = " or ".join([", ".join(formats[:-1]), formats[-1]])
        raise ConfigurationError(
            f"{path.name} has no supported suffix", field=field, remedy=f"end it in {offered}"
        )


def write_file(path: Path, content: bytes, field: str) -> None:
    """:raises ConfigurationError: the file cannot be written."""
    try:
        path.write_bytes(content)
    except OSError as error:
        raise ConfigurationError(f"cannot write {path}: {error.strerror}", field=field) from None
