"""Every key of ``ftd.toml`` with its type, default and meaning, out of the classes that read it.

The meanings are the docstrings behind the fields, taken from the source: what is shown, checked and written
into the schema cannot differ from what is read.
"""

import dataclasses
import json
from dataclasses import dataclass
from functools import cache
from typing import Any

import msgspec

from ftd.config.daemon_file import DaemonFile
from ftd.config.environment import variable_of
from ftd.config.reading import meanings_of
from statemachine.timing import Timing


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """One key. ``name`` is dotted: ``node.devices``."""

    name: str
    kind: Any
    """Its type, as written in the class."""
    default: Any
    meaning: str
    secret: bool
    """Its value is never shown."""


SECRETS = frozenset({"secret", "broker.password", "dashboard.token"})


@cache
def keys() -> dict[str, Key]:
    """All of them, in the order of the file."""
    found: dict[str, Key] = {}
    for field in msgspec.structs.fields(DaemonFile):
        if isinstance(field.type, type) and issubclass(field.type, msgspec.Struct):
            meanings = meanings_of(field.type)
            for inner in msgspec.structs.fields(field.type):
                _add(found, f"{field.name}.{inner.name}", inner.type, inner.default, meanings)
        elif field.name != "timing":
            _add(found, field.name, field.type, field.default, meanings_of(DaemonFile))
    meanings = meanings_of(Timing)
    for limit in dataclasses.fields(Timing):
        _add(found, f"timing.{limit.name}", type(limit.default), limit.default, meanings)
    return found


def schema() -> dict[str, Any]:
    """JSON Schema (2020-12) of the file, for editors."""
    made: dict[str, Any] = msgspec.json.schema(DaemonFile)
    definitions = made["$defs"]
    tables = {field.name: field.type.__name__ for field in _tables()}
    definitions["Timing"] = {
        "type": "object",
        "title": "Timing",
        "description": "Periods and limits; seconds unless a field counts something.",
        "properties": {},
        "additionalProperties": False,
    }
    definitions["DaemonFile"]["properties"]["timing"] = {"$ref": "#/$defs/Timing"}
    for key in keys().values():
        table, _, name = key.name.rpartition(".")
        owner = "Timing" if table == "timing" else tables.get(table, "DaemonFile")
        entry = definitions[owner]["properties"].setdefault(name, _of_limit(key))
        if key.meaning:
            entry["description"] = key.meaning
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "ftd.toml",
        **{name: value for name, value in made.items() if name != "$defs"},
        "$defs": definitions,
    }


def markdown() -> str:
    """docs/reference.md: every key, its default, its variable, what it means."""
    lines = [
        "# All keys of ftd.toml",
        "",
        "Made of the schema by `ftd config reference`; [configuration](configuration.md) shows them at work.",
        "A key stands under its table's name (`[node]`); a variable of the environment wins over it.",
    ]
    table: str | None = None
    for key in keys().values():
        owner, _, name = key.name.rpartition(".")
        if owner != table:
            table = owner
            title = f"## `[{owner}]`" if owner else "## At the top"
            lines += ["", title, "", "| key | default | variable | meaning |", "|---|---|---|---|"]
        default = "–" if key.default is None else f"`{json.dumps(key.default)}`"
        meaning = key.meaning.replace("``", "`").replace("|", "\\|")
        lines.append(f"| `{name}` | {default} | `{variable_of(key.name)}` | {meaning} |")
    return "\n".join(lines) + "\n"


def _of_limit(key: Key) -> dict[str, Any]:
    kind = "integer" if key.kind is int else "number"
    return {"type": kind, "exclusiveMinimum": 0, "default": key.default}


def _tables() -> list[Any]:
    return [
        field
        for field in msgspec.structs.fields(DaemonFile)
        if isinstance(field.type, type) and issubclass(field.type, msgspec.Struct)
    ]


def _add(found: dict[str, Key], name: str, kind: Any, default: Any, meanings: dict[str, str]) -> None:
    found[name] = Key(
        name=name,
        kind=kind,
        default=default,
        meaning=meanings.get(name.rpartition(".")[2], ""),
        secret=name in SECRETS,
    )
