"""Converts TOML to checked values, with errors that name the field and the remedy.

msgspec checks the types. This module translates its one-line errors: it adds the path of the field as the
user wrote it (``training.global_batch``), and for an unknown field the nearest known one.
"""

import ast
import difflib
import inspect
import os
import re
import textwrap
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

import msgspec

from ftd.config.error_collector import ErrorCollector
from ftd.errors import ConfigurationError

T = TypeVar("T")

_UNKNOWN = re.compile(r"Object contains unknown field `([^`]*)`")
_MISSING = re.compile(r"Object missing required field `([^`]*)`")
_TYPES = re.compile(r"Expected `(?P<wanted>[^`]*)`, got `(?P<got>[^`]*)`")
_RANGE = re.compile(
    r"Expected `(?:int|float)` (?P<compared>[<>]=?) (?P<bound>\S+?)(?: - at `\$\[(?P<index>\d+)\]`)?"
)
"""Error about a number, or one of a list of numbers, that is out of range."""
_RANGES = {">": "above", ">=": "of at least", "<": "below", "<=": "of at most"}
_LENGTH = re.compile(r"Expected `array` of length (?P<wanted>\d+), got (?P<got>\d+)")
_WANTED = {
    "int": "a whole number",
    "float": "a number",
    "str": "text in quotes",
    "bool": "true or false",
    "array": "a list",
    "object": "a table",
}
_GOT = {"float": "a fractional number", "str": "text", "null": "nothing"}

NAME_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", re.ASCII)
"""Valid names of nodes, clusters, jobs and clients."""
MAX_NESTING = 16
MAX_FILE_BYTES = 1024 * 1024


def read_toml(path: Path) -> dict[str, Any]:
    """Return the tables of a TOML file.

    :raises ConfigurationError: it is missing, unreadable, too large, or not valid TOML.
    """
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise ConfigurationError(
                f"{path} is larger than {MAX_FILE_BYTES} bytes", remedy="is it the right file?"
            )
        found = tomllib.loads(path.read_text(encoding="utf-8"))
        _check_values(found, path)
        return found
    except FileNotFoundError:
        raise ConfigurationError(f"{path} does not exist", remedy="check the path") from None
    except IsADirectoryError:
        raise ConfigurationError(f"{path} is a directory", remedy="name the TOML file in it") from None
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be read: {error}", remedy="check its permissions") from None
    except (ValueError, RecursionError) as error:  # ValueError also for bytes and for thousands of digits.
        raise ConfigurationError(f"{path} is not valid TOML: {error}", remedy="correct the file") from None


def _check_values(tables: dict[str, Any], path: Path) -> None:
    """Check the values of a file, at any depth.

    :raises ConfigurationError: tables nest deeper than in any file of ours, too deep for the code that
        follows; or a text ends early for the operating system.
    """
    level: list[Any] = [tables]
    for _ in range(MAX_NESTING):
        inner = [one for outer in level for one in (outer.values() if isinstance(outer, dict) else outer)]
        if any(isinstance(one, str) and "\0" in one for one in inner):
            raise ConfigurationError(f"{path} has a text with \\u0000", remedy="remove this character")
        level = [one for one in inner if isinstance(one, dict | list)]
    if level:
        raise ConfigurationError(
            f"{path} has tables within tables, {MAX_NESTING} deep; is it the right file?"
        )


def convert(data: dict[str, Any], into: type[T], *, where: str = "") -> T:
    """Return ``data`` as ``into``, a tree of Structs that forbid unknown fields.

    :param where: prefix of every message, usually the name of the file.
    :raises ConfigurationError: a value is wrong; the error names each wrong field, dotted from the top, and the
        remedy.
    """
    collector = ErrorCollector(where)
    valid = keep_valid_fields(data, into, collector)
    collector.raise_any()
    try:
        return msgspec.convert(valid, into)
    except ConfigurationError as error:  # A Struct may check its values when it is made.
        collector.add(error)
        collector.raise_any()
        raise


def keep_valid_fields(
    data: dict[str, Any], into: type[Any], collector: ErrorCollector, path: str = ""
) -> dict[str, Any]:
    """Return the part of ``data`` that fits a tree of Structs; the rest is collected as errors, field by field.

    :param path: name of the table that ``data`` is, dotted from the top.
    """
    fields = {field.encode_name: field for field in msgspec.structs.fields(into)}
    fits: dict[str, Any] = {}
    for name, value in data.items():
        place = f"{path}.{name}" if path else name
        if name not in fields:
            collector.add_invalid_key(_unknown_field(place, name, list(fields)), place)
            continue
        kind = fields[name].type
        if isinstance(value, dict) and (inner := struct_of(kind)) is not None:
            fits[name] = keep_valid_fields(value, inner, collector, place)
        elif isinstance(value, dict) and get_origin(kind) is dict:
            of_keys, of_values = get_args(kind)
            fits[name] = {
                key: one
                for key, one in value.items()
                if _accepts(key, of_keys, f"{place}.{key}", collector)
                and _accepts(one, of_values, f"{place}.{key}", collector)
            }
        elif _accepts(value, kind, place, collector):
            fits[name] = value
    for name, field in fields.items():
        if field.required and name not in data:
            place = f"{path}.{name}" if path else name
            collector.add_invalid_key(_missing_field(place), place)
    return fits


def _accepts(value: Any, kind: Any, place: str, collector: ErrorCollector) -> bool:
    """Return whether ``value`` has the type ``kind``; otherwise add an error about ``place``."""
    try:
        msgspec.convert(value, kind)
        return _has_small_integers(value, place, collector)
    except msgspec.ValidationError as invalid:
        message, allowed = str(invalid), _allowed_words(kind)
    if isinstance(value, str) and allowed:
        remedy = suggest_name(value, allowed)
        error = ConfigurationError(f"{value!r} is not known", field=place, remedy=remedy)
        collector.add_invalid_key(error, place)
    elif match := _RANGE.fullmatch(message):
        remedy = f"write a number {_RANGES[match['compared']]} {float(match['bound']):g}"
        if (index := match["index"]) is not None:
            value, place = value[int(index)], f"{place}[{index}]"
        collector.reject(f"{value} is not allowed", field=place, remedy=remedy)
    else:
        error = _explained(message, kind, place)
        collector.add_invalid_key(error, error.field or "")
    return False


def _has_small_integers(value: Any, place: str, collector: ErrorCollector) -> bool:
    """Return whether 64 bits hold each whole number in ``value``, as TOML and the journal require; otherwise add an
    error about the first that is larger.
    """
    for where, single in single_values(value, place):
        if isinstance(single, int) and not -(2**63) <= single < 2**63:
            error = ConfigurationError(
                "the number does not fit into 64 bits",
                field=where,
                remedy="write a number from -2^63 to 2^63 - 1",
            )
            collector.add_invalid_key(error, where)
            return False
    return True


def single_values(value: Any, place: str) -> Iterator[tuple[str, Any]]:
    """Yield each value in ``value`` that is neither a table nor a list, after its place."""
    match value:
        case dict():
            for key, inner in value.items():
                yield from single_values(inner, f"{place}.{key}")
        case list() | tuple():
            for index, inner in enumerate(value):
                yield from single_values(inner, f"{place}[{index}]")
        case _:
            yield place, value


def _explained(message: str, kind: Any, place: str) -> ConfigurationError:
    """Return msgspec's error about a value of the type ``kind`` in our words."""
    problem, _, inner = message.partition(" - at `$")
    inner = inner.removesuffix("`")
    place += inner
    if match := _UNKNOWN.fullmatch(problem):
        return _unknown_field(f"{place}.{match[1]}", match[1], _field_names(kind, inner))
    if match := _MISSING.fullmatch(problem):
        return _missing_field(f"{place}.{match[1]}")
    return ConfigurationError(problem_words(problem), field=place)


def _unknown_field(place: str, name: str, known: list[str]) -> ConfigurationError:
    return ConfigurationError("unknown field", field=place, remedy=suggest_name(name, known))


def _missing_field(place: str) -> ConfigurationError:
    return ConfigurationError("required, but missing", field=place, remedy=f"add {place}")


def member_types(kind: Any) -> list[Any]:
    """Return the types that a field allows: the members of a union, without annotations."""
    if get_origin(kind) is Annotated:
        return member_types(get_args(kind)[0])
    if get_origin(kind) in (Union, UnionType):
        return [one for member in get_args(kind) for one in member_types(member)]
    return [kind]


def field_descriptions(table: type[Any], *, shared: bool = True) -> dict[str, str]:
    """Return each field's description: the string literal after it. Inherited fields have those of their base
    classes.

    :param shared: fields before a common literal share it; otherwise only the last of them has it.
    """
    found: dict[str, str] = {}
    for owner in reversed(table.__mro__):
        if "__annotations__" in vars(owner):
            for names, meaning in _own_descriptions(owner):
                found |= dict.fromkeys(names if shared else names[-1:], meaning)
    return found


@cache
def _own_descriptions(owner: type[Any]) -> list[tuple[list[str], str]]:
    """Return the literals in the body of a class, each with the fields since the previous literal."""
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(owner))).body
    assert isinstance(tree, ast.ClassDef), "the source of a class is a class statement"
    found: list[tuple[list[str], str]] = []
    waiting: list[str] = []
    for node in tree.body:
        match node:
            case ast.AnnAssign(target=ast.Name(id=name)):
                waiting.append(name)
            case ast.Expr(value=ast.Constant(value=str(text))):
                found.append((waiting, " ".join(text.split())))
                waiting = []
    return found


def _allowed_words(kind: Any) -> list[str]:
    """Return the words that a field allows; nothing if it does not list them."""
    return [str(word) for one in member_types(kind) if get_origin(one) is Literal for word in get_args(one)]


def struct_of(kind: Any) -> type[msgspec.Struct] | None:
    """Return the Struct among the types of a field, if any."""
    return next(
        (one for one in member_types(kind) if isinstance(one, type) and issubclass(one, msgspec.Struct)), None
    )


def problem_words(problem: str) -> str:
    """Return a message such as ``Expected `int | null`, got `str` `` in words for the author of the file."""
    if match := _LENGTH.fullmatch(problem):
        return f"expected {match['wanted']} values, got {match['got']}"
    if not (match := _TYPES.fullmatch(problem)):
        return problem
    kinds = [kind for kind in match["wanted"].split(" | ") if kind != "null"]
    wanted = [_WANTED.get(kind, kind) for kind in kinds if not (kind == "int" and "float" in kinds)]
    *others, last = wanted
    either = f"{', '.join(others)} or {last}" if others else last
    got = _GOT.get(match["got"]) or _WANTED.get(match["got"], match["got"])
    return f"expected {either}, got {got}"


def suggest_name(name: str, known: Sequence[str]) -> str:
    """Return a remedy for an unknown name: the most similar known name, or else all known names."""
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    if close:
        return f"did you mean {close[0]!r}?"
    return "known: " + ", ".join(sorted(known))


def _field_names(kind: Any, path: str) -> list[str]:
    """Return the field names of the Struct that a path such as ``[3].split[0]`` leads to from ``kind``."""
    described: Any = msgspec.inspect.type_info(kind)
    for step in re.findall(r"\w+\b(?!\])|\[", path):
        if step == "[":
            described = described.item_type
        else:
            described = next(f.type for f in described.fields if f.encode_name == step)
        if isinstance(described, msgspec.inspect.UnionType):
            described = next(t for t in described.types if isinstance(t, msgspec.inspect.StructType))
    return [f.encode_name for f in described.fields]


def expand_path(written: str, directory: Path, field: str) -> Path:
    """Return a file path with ``~`` and ``$VARIABLES`` expanded; relative paths begin at ``directory``.

    :raises ConfigurationError: a variable is not set, or this host has no such user.
    """
    expanded = os.path.expandvars(written)
    if "$" in expanded:
        raise ConfigurationError(
            f"{expanded} contains an environment variable that is not set",
            field=field,
            remedy="set the variable, or write the path without it",
        )
    try:
        return directory.resolve() / Path(expanded).expanduser()
    except RuntimeError:
        raise ConfigurationError(
            f"the home directory in {expanded} is not known here",
            field=field,
            remedy="write an absolute path instead",
        ) from None


def input_path(written: str, directory: Path, field: str) -> Path:
    """Return what ``expand_path`` does, for a file or directory that is read here; it may be missing.

    :raises ConfigurationError: see ``expand_path``; or this user cannot even look whether it is there.
    """
    path = expand_path(written, directory, field)
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        pass
    except OSError as error:
        raise ConfigurationError(
            f"{path} cannot be read: {error.strerror}", field=field, remedy="check its permissions"
        ) from None
    return path


def require_positive(value: float, field: str) -> None:
    """Check that a number is above zero and finite.

    :raises ConfigurationError: it is not.
    """
    if not 0 < value < float("inf"):
        raise ConfigurationError(f"{value} is not allowed", field=field, remedy="write a number above 0")


def require_memory(mebibytes: float, field: str) -> None:
    """Check that an amount of memory is at least a byte, and that 64 bits hold its number of bytes.

    :raises ConfigurationError: it is not.
    """
    require_positive(mebibytes, field)
    if not 1 <= mebibytes * 2**20 < 2**63:
        raise ConfigurationError(
            f"{mebibytes} is not allowed", field=field, remedy="write a number of MiB from 0.001 to 2^42"
        )


def require_name(value: str, field: str) -> None:
    """Check a name that becomes an MQTT topic level, a file name or a device name: no separators, no wildcards.

    :raises ConfigurationError: the name is invalid.
    """
    if not NAME_PATTERN.fullmatch(value):
        raise ConfigurationError(
            f"{value!r} is not a valid name",
            field=field,
            remedy="write up to 64 letters, digits, '.', '_' and '-', beginning with a letter or digit",
        )


def require_one_of(value: str, allowed: Iterable[str], field: str) -> None:
    """Check that a value is one of the allowed ones.

    :raises ConfigurationError: it is not; the error names the nearest allowed value.
    """
    choices = list(allowed)
    if value not in choices:
        raise ConfigurationError(f"{value!r} is not known", field=field, remedy=suggest_name(value, choices))
