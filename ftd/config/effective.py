"""What a daemon would be configured with, key by key, and who says so: ``ftd config show``."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ftd.config.daemon import load_with_origins
from ftd.config.reference import Key, keys

HIDDEN = "(hidden)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    key: Key
    shown: Any
    """Its value, or that it is hidden; ``None`` where it is left out."""
    origin: str
    """The file's name, a variable (``$FTD_…``), or ``default``."""


def effective_settings(path: Path | None, environment: Mapping[str, str] = os.environ) -> list[Setting]:
    """All keys, in the order of the file.

    :raises ConfigurationError: the configuration is wrong.
    """
    _, data, variables = load_with_origins(path, environment)
    return [_setting(key, data, variables, path) for key in keys().values()]


def _setting(key: Key, data: Mapping[str, Any], variables: Mapping[str, str], path: Path | None) -> Setting:
    table, _, name = key.name.rpartition(".")
    place = data.get(table, {}) if table else data
    given = name in place
    value = place[name] if given else key.default
    if key.name in variables:
        origin = f"${variables[key.name]}"
    else:
        origin = path.name if given and path is not None else "default"
    return Setting(key=key, shown=HIDDEN if key.secret and value is not None else value, origin=origin)
