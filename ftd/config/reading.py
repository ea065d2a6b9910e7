"""TOML to checked values, with errors that name the field and the remedy.

msgspec checks the types; this module turns its one-line complaints into ours: the path of the field as
the user wrote it (``training.global_batch``), and for an unknown field the nearest known one.
"""

import difflib
import re
import tomllib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from ftd.errors import ConfigurationError

T = TypeVar("T")

_UNKNOWN = re.compile(r"Object contains unknown field `(?P<name>[^`]*)`(?: - at `\$?(?P<path>[^`]*)`)?")
_MISSING = re.compile(r"Object missing required field `(?P<name>[^`]*)`(?: - at `\$?(?P<path>[^`]*)`)?")
_OTHER = re.compile(r"(?P<problem>.*?) - at `\$?(?P<path>[^`]*)`$")

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", re.ASCII)
"""Of a node, a cluster, a job, a client."""
MOST_NESTED = 16
MAX_FILE_BYTES = 1024 * 1024


def read_toml(path: Path) -> dict[str, Any]:
    """The tables of a TOML file.

    :raises ConfigurationError: it is missing, unreadable, too large, or no TOML.
    """
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise ConfigurationError(f"{path} is larger than {MAX_FILE_BYTES} bytes; is it the right file?")
        found = tomllib.loads(path.read_text(encoding="utf-8"))
        _require_flat(found, path)
        return found
    except FileNotFoundError:
        raise ConfigurationError(f"{path} does not exist", remedy="check the path") from None
    except IsADirectoryError:
        raise ConfigurationError(f"{path} is a directory", remedy="name the TOML file in it") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{path} cannot be read: {error}") from None
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ConfigurationError(f"{path} is not valid TOML: {error}") from None


def _require_flat(tables: dict[str, Any], path: Path) -> None:
    """:raises ConfigurationError: nested deeper than any file of ours, and than what reads it can follow."""
    level: list[Any] = [tables]
    for _ in range(MOST_NESTED):
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, dict | list)
        ]
    if level:
        raise ConfigurationError(
            f"{path} has tables within tables, {MOST_NESTED} deep; is it the right file?"
        )


def convert(data: Any, into: type[T], *, where: str = "") -> T:
    """``data`` as ``into``, a tree of Structs that forbid unknown fields.

    ``where`` prefixes every message: the file's name, usually.

    :raises ConfigurationError: names the field, dotted from the top, and the remedy.
    """
    try:
        return msgspec.convert(data, into)
    except msgspec.ValidationError as error:
        raise explained(str(error), into, where) from None


def explained(message: str, into: type[Any], where: str) -> ConfigurationError:
    """msgspec's complaint in our words."""
    prefix = f"{where}: " if where else ""
    if match := _UNKNOWN.match(message):
        path = _dotted(match["path"])
        known = fields_of(into, path)
        name = _joined(path, match["name"])
        return ConfigurationError("unknown field", field=prefix + name, remedy=nearest(match["name"], known))
    if match := _MISSING.match(message):
        name = _joined(_dotted(match["path"]), match["name"])
        return ConfigurationError("required, but missing", field=prefix + name, remedy=f"add {name}")
    if match := _OTHER.match(message):
        return ConfigurationError(match["problem"], field=prefix + _joined(_dotted(match["path"])))
    return ConfigurationError(prefix + message)


def nearest(name: str, known: Sequence[str]) -> str:
    """A remedy for an unknown name: the likeliest one, else all of them."""
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    if close:
        return f"did you mean {close[0]!r}?"
    return "known: " + ", ".join(sorted(known))


def fields_of(into: type[Any], path: Sequence[str]) -> list[str]:
    """Names of the fields of the Struct that ``path`` leads to, also through tuples (``layers[3]``)."""
    described: Any = msgspec.inspect.type_info(into)
    for step in path:
        name = step.partition("[")[0]
        described = next(f.type for f in described.fields if f.encode_name == name)
        if isinstance(described, msgspec.inspect.UnionType):
            described = next(t for t in described.types if isinstance(t, msgspec.inspect.StructType))
        if isinstance(described, msgspec.inspect.VarTupleType):
            described = described.item_type
    return [f.encode_name for f in described.fields]


def require_positive(value: float, field: str) -> None:
    """:raises ConfigurationError: not above zero, or not finite."""
    if not 0 < value < float("inf"):
        raise ConfigurationError(f"{value} is not allowed", field=field, remedy="write a number above 0")


def require_name(value: str, field: str) -> None:
    """Names become MQTT topic levels, file names and device names: no separators, no wildcards.

    :raises ConfigurationError: anything else.
    """
    if not NAME.fullmatch(value):
        raise ConfigurationError(
            f"{value!r} is not a usable name",
            field=field,
            remedy="up to 64 letters, digits, '.', '_' and '-', a letter or digit first",
        )


def require_one_of(value: str, allowed: Iterable[str], field: str) -> None:
    """:raises ConfigurationError: with the nearest allowed value."""
    choices = list(allowed)
    if value not in choices:
        raise ConfigurationError(f"{value!r} is not known", field=field, remedy=nearest(value, choices))


def _dotted(path: str | None) -> list[str]:
    return [step for step in (path or "").lstrip("$").split(".") if step]


def _joined(path: Sequence[str], name: str = "") -> str:
    return ".".join([*path, name] if name else path)
