"""Environment variables instead of ``ftd.toml``: ``FTD_NODE_DEVICES=8`` is ``devices = 8`` under ``[node]``.

``FTD_CLUSTER``, ``FTD_SECRET`` and ``FTD_SECRET_FILE`` are the keys without a table, and ``FTD_BROKER`` is
``broker.url``, which commands read, too. A variable that begins like one of a table and names no key of it
is an error: a misspelt setting that is silently ignored is worse than a daemon that does not start.
"""

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from ftd.config.reading import nearest
from ftd.errors import ConfigurationError

PREFIX = "FTD_"
_BROKER_URL = "FTD_BROKER"


def overridden(
    data: Mapping[str, Any], environment: Mapping[str, str], keys: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, str]]:
    """``ftd.toml``'s content with what the environment says, and for each key that it says, which variable.

    :param keys: every key, dotted (``node.devices``), with its type.
    :raises ConfigurationError: names a variable that names no key, or whose value does not fit.
    """
    result: dict[str, Any] = copy.deepcopy(dict(data))
    origins: dict[str, str] = {}
    for variable, key in _named(environment, keys):
        *table, name = key.split(".")
        place = result
        for level in table:
            place = place.setdefault(level, {})
            if not isinstance(place, dict):
                raise ConfigurationError("expected a table", field=level, remedy=f"write [{level}]")
        place[name] = _value(environment[variable], keys[key], variable)
        origins[key] = variable
    return result, origins


def variable_of(key: str) -> str:
    """``node.devices`` → ``FTD_NODE_DEVICES``."""
    return _BROKER_URL if key == "broker.url" else PREFIX + key.replace(".", "_").upper()


def _named(environment: Mapping[str, str], keys: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    variables = {variable_of(key): key for key in keys}
    tables = {f"{PREFIX}{key.partition('.')[0].upper()}_" for key in keys if "." in key}
    for variable in sorted(environment):
        if variable in variables:
            yield variable, variables[variable]
        elif any(variable.startswith(table) for table in tables):
            raise ConfigurationError(
                "no such setting", field=f"${variable}", remedy=nearest(variable, list(variables))
            )


def _value(text: str, kind: Any, variable: str) -> Any:
    """The text as the key's type, by the rules that TOML's own values go through afterwards."""
    try:
        return msgspec.convert(text, kind, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigurationError(f"{text!r}: {error}", field=f"${variable}") from None
