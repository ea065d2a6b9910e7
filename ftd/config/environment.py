"""Environment variables instead of ``ftd.toml``: ``FTD_NODE_DEVICES=8`` is ``devices = 8`` under ``[node]``.

``FTD_CLUSTER``, ``FTD_SECRET`` and ``FTD_SECRET_FILE`` are the keys without a table, and ``FTD_BROKER`` is
``broker.url``, which commands read, too. A variable that begins like one of a table and names no key of it
is an error: a misspelt setting that is silently ignored is worse than a daemon that does not start.
"""

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from ftd.config.mistakes import Mistakes
from ftd.config.reading import nearest
from ftd.errors import ConfigurationError

PREFIX = "FTD_"
_BROKER_URL = "FTD_BROKER"


def overridden(
    data: Mapping[str, Any],
    environment: Mapping[str, str],
    keys: Mapping[str, Any],
    origins: dict[str, str],
    mistakes: Mistakes,
) -> dict[str, Any]:
    """``ftd.toml``'s content with what the environment says.

    :param keys: every key, dotted (``node.devices``), with its type.
    :param origins: filled: for each key that the environment says, which variable.
    :param mistakes: notes a variable that names no key, or whose value does not fit.
    """
    result: dict[str, Any] = copy.deepcopy(dict(data))
    for variable, key in _named(environment, keys, mistakes):
        table, _, name = key.rpartition(".")
        place = result.setdefault(table, {}) if table else result
        try:
            value = _value(environment[variable], keys[key], variable)
        except ConfigurationError as error:
            mistakes.add_misfit(error, key)
            continue
        if isinstance(place, dict):  # Else what stands in its place is a mistake of the file.
            place[name] = value
            origins[key] = variable
    return result


def variable_of(key: str) -> str:
    """``node.devices`` → ``FTD_NODE_DEVICES``."""
    return _BROKER_URL if key == "broker.url" else PREFIX + key.replace(".", "_").upper()


def _named(
    environment: Mapping[str, str], keys: Mapping[str, Any], mistakes: Mistakes
) -> Iterator[tuple[str, str]]:
    variables = {variable_of(key): key for key in keys}
    tables = {key.partition(".")[0] for key in keys if "." in key}
    for variable in sorted(environment):
        if variable in variables:
            yield variable, variables[variable]
            continue
        for table in tables:
            if variable.startswith(f"{PREFIX}{table.upper()}_"):
                remedy = nearest(variable, list(variables))
                error = ConfigurationError("no such setting", field=f"${variable}", remedy=remedy)
                mistakes.add_misfit(error, f"{table}.{variable}")


def _value(text: str, kind: Any, variable: str) -> Any:
    """The text as the key's type, by the rules that TOML's own values go through afterwards."""
    try:
        return msgspec.convert(text, kind, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigurationError(f"{text!r}: {error}", field=f"${variable}") from None
