"""TOML to checked values, with errors that name the field and the remedy.

msgspec checks the types; this module turns its one-line complaints into ours: the path of the field as
the user wrote it (``training.global_batch``), and for an unknown field the nearest known one.
"""

import ast
import difflib
import inspect
import os
import re
import textwrap
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

import msgspec

from ftd.config.error_collector import ErrorCollector
from ftd.errors import ConfigurationError

T = TypeVar("T")

_UNKNOWN = re.compile(r"Object contains unknown field `(?P<name>[^`]*)`(?: - at `\$?(?P<path>[^`]*)`)?")
_MISSING = re.compile(r"Object missing required field `(?P<name>[^`]*)`(?: - at `\$?(?P<path>[^`]*)`)?")
_OTHER = re.compile(r"(?P<problem>.*?) - at `\$?(?P<path>[^`]*)`$")
_TYPES = re.compile(r"Expected `(?P<wanted>[^`]*)`, got `(?P<got>[^`]*)`")
_RANGE = re.compile(
    r"Expected `(?:int|float)` (?P<compared>[<>]=?) (?P<bound>\S+?)(?: - at `\$\[(?P<index>\d+)\]`)?"
)
"""A number, or one of a list of numbers, that is out of its range."""
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
_GOT = {"float": "a fraction", "str": "text", "null": "nothing"}

NAME_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", re.ASCII)
"""Of a node, a cluster, a job, a client."""
MAX_NESTING = 16
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
    for _ in range(MAX_NESTING):
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, dict | list)
        ]
    if level:
        raise ConfigurationError(
            f"{path} has tables within tables, {MAX_NESTING} deep; is it the right file?"
        )


def convert(data: dict[str, Any], into: type[T], *, where: str = "") -> T:
    """``data`` as ``into``: a tree of Structs that forbid unknown fields, or a dataclass.

    ``where`` prefixes every message: the file's name, usually.

    :raises ConfigurationError: names each field of the Structs that is wrong, dotted from the top, and the
        remedy; of a dataclass, the first one.
    """
    mistakes = ErrorCollector(where)
    if _struct_of(into) is not None:
        data = keep_valid_fields(data, into, mistakes)
    else:
        _Sieve(into, mistakes).passes(data, into, ())
    mistakes.raise_any()
    return msgspec.convert(data, into)


def keep_valid_fields(data: dict[str, Any], into: type[Any], mistakes: ErrorCollector) -> dict[str, Any]:
    """What of ``data`` fits into a tree of Structs; what does not is noted, field by field."""
    return _fitting(data, into, (), _Sieve(into, mistakes))


@dataclass(frozen=True, slots=True)
class _Sieve:
    root: type[Any]
    mistakes: ErrorCollector

    def passes(self, value: Any, kind: Any, path: tuple[str, ...]) -> bool:
        """Whether ``value`` is of the type ``kind``; noted if not."""
        try:
            msgspec.convert(value, kind)
        except msgspec.ValidationError as error:
            words, field = _words_of(kind), ".".join(path)
            if isinstance(value, str) and words:
                mistake = ConfigurationError(
                    f"{value!r} is not known", field=field, remedy=suggest_name(value, words)
                )
                self.mistakes.add_invalid_key(mistake, field)
            elif match := _RANGE.fullmatch(str(error)):
                remedy = f"write a number {_RANGES[match['compared']]} {float(match['bound']):g}"
                index = match["index"]
                wrong, place = (value, field) if index is None else (value[int(index)], f"{field}[{index}]")
                self.mistakes.add(ConfigurationError(f"{wrong} is not allowed", field=place, remedy=remedy))
            else:
                self.misfit(str(error), path)
            return False
        return True

    def misfit(self, message: str, path: tuple[str, ...]) -> None:
        """msgspec's complaint about what is at ``path``."""
        place = "".join(f".{step}" for step in path)
        if " - at `$" in message:
            message = message.replace(" - at `$", f" - at `${place}", 1)
        elif place:
            message = f"{message} - at `${place}`"
        error = explain_error(message, self.root)
        self.mistakes.add_invalid_key(error, error.field or "")


def _fitting(data: dict[str, Any], into: type[Any], path: tuple[str, ...], sieve: _Sieve) -> dict[str, Any]:
    fields = {field.encode_name: field for field in msgspec.structs.fields(into)}
    fits: dict[str, Any] = {}
    for name, value in data.items():
        here = (*path, name)
        if name not in fields:
            sieve.misfit(f"Object contains unknown field `{name}`", path)
        elif isinstance(value, dict) and (inner := _struct_of(fields[name].type)) is not None:
            fits[name] = _fitting(value, inner, here, sieve)
        elif isinstance(value, dict) and get_origin(kind := fields[name].type) is dict:
            each = get_args(kind)[1]
            fits[name] = {key: one for key, one in value.items() if sieve.passes(one, each, (*here, key))}
        elif sieve.passes(value, fields[name].type, here):
            fits[name] = value
    for name, field in fields.items():
        if field.required and name not in data:
            sieve.misfit(f"Object missing required field `{name}`", path)
    return fits


def member_types(kind: Any) -> list[Any]:
    """Return what a field's type may be: the members of a union, without their annotations."""
    if get_origin(kind) is Annotated:
        return member_types(get_args(kind)[0])
    if get_origin(kind) in (Union, UnionType):
        return [one for member in get_args(kind) for one in member_types(member)]
    return [kind]


def field_descriptions(table: type[Any], *, shared: bool = True) -> dict[str, str]:
    """Return each field's meaning, the string literal after it; inherited fields have those of the base classes.

    :param shared: fields with one literal after all of them share it; otherwise only the last one has it.
    """
    found: dict[str, str] = {}
    for owner in reversed(table.__mro__):
        if "__annotations__" in vars(owner):
            for names, meaning in _own_meanings(owner):
                found |= dict.fromkeys(names if shared else names[-1:], meaning)
    return found


@cache
def _own_meanings(owner: type[Any]) -> list[tuple[list[str], str]]:
    """Return the literals in a class's own body, each with the fields between it and the one before."""
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(owner))).body
    assert isinstance(tree, ast.ClassDef), "a class's source is a class"
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


def _words_of(kind: Any) -> list[str]:
    """Return what may be written where only some words are allowed."""
    return [str(word) for one in member_types(kind) if get_origin(one) is Literal for word in get_args(one)]


def _struct_of(kind: Any) -> type[Any] | None:
    """The Struct that a field's type is, or may be."""
    for one in member_types(kind):
        if isinstance(one, type) and issubclass(one, msgspec.Struct):
            return one
    return None


def explain_error(message: str, into: type[Any]) -> ConfigurationError:
    """msgspec's complaint in our words."""
    if match := _UNKNOWN.match(message):
        path = _dotted(match["path"])
        known = field_names(into, path)
        name = _joined(path, match["name"])
        return ConfigurationError("unknown field", field=name, remedy=suggest_name(match["name"], known))
    if match := _MISSING.match(message):
        name = _joined(_dotted(match["path"]), match["name"])
        return ConfigurationError("required, but missing", field=name, remedy=f"add {name}")
    if match := _OTHER.match(message):
        return ConfigurationError(_in_words(match["problem"]), field=_joined(_dotted(match["path"])))
    return ConfigurationError(_in_words(message))


def _in_words(problem: str) -> str:
    """``Expected `int | null`, got `str` `` for who writes the file."""
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
    """A remedy for an unknown name: the likeliest one, else all of them."""
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    if close:
        return f"did you mean {close[0]!r}?"
    return "known: " + ", ".join(sorted(known))


def field_names(into: type[Any], path: Sequence[str]) -> list[str]:
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


def expand_path(written: str, directory: Path, field: str) -> Path:
    """Return a path of a file with ``~`` and ``$VARIABLES`` replaced; relative ones begin at ``directory``.

    :raises ConfigurationError: a variable is not set.
    """
    expanded = os.path.expandvars(written)
    if "$" in expanded:
        raise ConfigurationError(
            f"{expanded} names a variable of the environment that is not set", field=field, remedy="set it"
        )
    return directory.resolve() / Path(expanded).expanduser()


def require_positive(value: float, field: str) -> None:
    """:raises ConfigurationError: not above zero, or not finite."""
    if not 0 < value < float("inf"):
        raise ConfigurationError(f"{value} is not allowed", field=field, remedy="write a number above 0")


def require_name(value: str, field: str) -> None:
    """Names become MQTT topic levels, file names and device names: no separators, no wildcards.

    :raises ConfigurationError: anything else.
    """
    if not NAME_PATTERN.fullmatch(value):
        raise ConfigurationError(
            f"{value!r} is not a usable name",
            field=field,
            remedy="up to 64 letters, digits, '.', '_' and '-', a letter or digit first",
        )


def require_one_of(value: str, allowed: Iterable[str], field: str) -> None:
    """:raises ConfigurationError: with the nearest allowed value."""
    choices = list(allowed)
    if value not in choices:
        raise ConfigurationError(f"{value!r} is not known", field=field, remedy=suggest_name(value, choices))


def _dotted(path: str | None) -> list[str]:
    return [step for step in (path or "").lstrip("$").split(".") if step]


def _joined(path: Sequence[str], name: str = "") -> str:
    return ".".join([*path, name] if name else path)
