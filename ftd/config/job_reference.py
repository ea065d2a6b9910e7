"""Lists every key of a job file with its type, default and description, taken from the classes that read it.

The reference page is made from this list, and so is the commented job file of ``ftd init``: it contains every
key, with chosen values as they are and all others as comments with their defaults.
"""

import json
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Literal, get_args, get_origin

import msgspec

from ftd.config.job import JobFile
from ftd.config.validation import field_descriptions, member_types, struct_of

_KINDS = {int: "whole number", float: "number", str: "text", bool: "true or false"}
_WIDTH = 100
_HOW_TO_READ = """\
This file lists every key of a job file. A key that begins with # (and no space) is not set: the value shown is its
default, or an example if its comment says so. To set it, remove the # and change the value. To add a table whose
heading begins with #, remove that # as well."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobKey:
    """One key of a job file."""

    name: str
    kind: str
    """Type of the values in words, or all values that are allowed."""
    default: Any
    """Default value; ``None`` for a key without a fixed default."""
    required: bool
    example: Any
    """Example value of a key without a default; ``None`` for others."""
    meaning: str


@dataclass(frozen=True, slots=True, kw_only=True)
class JobTable:
    """One table of a job file."""

    name: str
    """Dotted name; empty for the top level."""
    meaning: str
    optional: bool
    """Whether the presence of the table, even an empty one, changes the job."""
    keys: tuple[JobKey, ...]


@cache
def job_tables() -> tuple[JobTable, ...]:
    """Return all tables in the order of the file, each before its inner tables."""
    return tuple(_tables("", JobFile, set(), optional=False))


def render_job_reference() -> str:
    """Return the part of docs/reference/keys.md about job files."""
    intro = "This part is generated from the code; [configuration](configuration.md#a-job-file) has examples."
    lines = ["# All keys of a job file", "", intro]
    for table in job_tables():
        lines += ["", f"## `[{table.name}]`" if table.name else "## Top level of a job file", ""]
        lines += [
            table.meaning.replace("``", "`"),
            "",
            "| key | values | default | description |",
            "|---|---|---|---|",
        ]
        for key in table.keys:
            otherwise = "required" if key.required else "–"
            default = otherwise if key.default is None else f"`{to_toml(key.default)}`"
            meaning = key.meaning.replace("``", "`").replace("|", "\\|")
            lines.append(f"| `{key.name}` | {key.kind} | {default} | {meaning} |")
    return "\n".join(lines) + "\n"


def to_toml(value: Any) -> str:
    """Return a value in TOML notation."""
    match value:
        case dict():
            return "{" + ", ".join(f"{name} = {to_toml(inner)}" for name, inner in value.items()) + "}"
        case list() | tuple():
            return "[" + ", ".join(map(to_toml, value)) + "]"
        case float():
            return repr(value)
        case _:
            return json.dumps(value, ensure_ascii=False)


def _tables(name: str, kind: type[Any], seen: set[type[Any]], *, optional: bool) -> Iterator[JobTable]:
    """Yield a table and its inner tables; its own keys come before those shared with a message.

    :param seen: tables that were listed already; a second use of one is listed as a key that refers to the
        first.
    """
    meanings = field_descriptions(kind)
    own = vars(kind).get("__annotations__", {})
    keys: list[JobKey] = []
    inner: list[tuple[str, type[Any], bool]] = []
    for field in sorted(msgspec.structs.fields(kind), key=lambda field: field.name not in own):
        struct = struct_of(field.type)
        if struct is not None and struct not in seen:
            inner.append((f"{name}.{field.name}" if name else field.name, struct, field.default is None))
        else:
            keys.append(_key(field, meanings.get(field.name, "")))
    meaning = " ".join((kind.__doc__ or "").split()).rpartition("]``: ")[2]
    meaning = meaning[:1].upper() + meaning[1:]
    yield JobTable(name=name, meaning=meaning, optional=optional, keys=tuple(keys))
    for inner_name, struct, may_be_absent in inner:
        seen.add(struct)
        yield from _tables(inner_name, struct, seen, optional=may_be_absent)


def _key(field: msgspec.structs.FieldInfo, meaning: str) -> JobKey:
    default = None if field.default is msgspec.NODEFAULT else field.default
    if field.default_factory is not msgspec.NODEFAULT:
        default = field.default_factory()
    examples = _examples(field.type)
    return JobKey(
        name=field.name,
        kind=_in_words(field.type),
        default=default,
        required=field.required,
        example=examples[0] if default is None and examples else None,
        meaning=meaning,
    )


def _examples(kind: Any) -> list[Any]:
    return kind.__metadata__[0].examples or [] if get_origin(kind) is Annotated else []


def _in_words(kind: Any) -> str:
    words: list[str] = []
    for one in member_types(kind):
        if one is type(None):
            continue
        if get_origin(one) is Literal:
            words += [f"`{to_toml(word)}`" for word in get_args(one)]
        elif get_origin(one) in (list, tuple):
            words.append("list")
        elif get_origin(one) is dict or struct_of(one) is not None:
            words.append("table")
        else:
            words.append(_KINDS[one])
    return ", ".join(words)


def render_job(chosen: Mapping[str, Any]) -> str:
    """Return the text of a job file.

    :param chosen: tables with the values that differ from their defaults.
    """
    lines = [*_comment(_HOW_TO_READ)]
    for table in job_tables():
        values = chosen
        for step in filter(None, table.name.split(".")):
            values = values.get(step, {})
        lines += _table(table, values)
    return "\n".join(lines) + "\n"


def _table(table: JobTable, values: Mapping[str, Any]) -> Iterator[str]:
    if table.name:
        yield ""
        yield from _comment(table.meaning)
        yield f"{'#' if table.optional and not values else ''}[{table.name}]"
    for key in table.keys:
        yield ""
        yield from _comment(_explained(key))
        if key.name in values:
            yield f"{key.name} = {to_toml(values[key.name])}"
        else:
            shown = key.example if key.default is None else key.default
            yield f"#{key.name} = {to_toml({} if shown is None else shown)}"


def _explained(key: JobKey) -> str:
    """Return the description, the allowed values, and the default."""
    if key.required:
        default = "required"
    elif key.default is None:
        default = "example"
    else:
        default = f"default {to_toml(key.default)}"
    return f"{key.meaning} ({key.kind}; {default})"


def _comment(text: str) -> Iterator[str]:
    plain = " ".join(text.replace("`", "").split())
    return (f"# {line}" for line in textwrap.wrap(plain, _WIDTH - 2))
