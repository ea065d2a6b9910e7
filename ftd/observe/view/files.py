"""Files that a command is asked to write: pages and pictures, whose suffix says the format."""

from collections.abc import Sequence
from pathlib import Path

from ftd.errors import ConfigurationError


def require_format(path: Path, formats: Sequence[str], field: str) -> None:
    """:raises ConfigurationError: ``path`` ends in none of ``formats``, suffixes as ``.svg``."""
    if path.suffix not in formats:
        offered = " or ".join([", ".join(formats[:-1]), formats[-1]])
        raise ConfigurationError(f"{path.name} names no format", field=field, remedy=f"end it in {offered}")


def write_file(path: Path, content: bytes, field: str) -> None:
    """:raises ConfigurationError: the place cannot be written."""
    try:
        path.write_bytes(content)
    except OSError as error:
        raise ConfigurationError(f"cannot write {path}: {error.strerror}", field=field) from None
