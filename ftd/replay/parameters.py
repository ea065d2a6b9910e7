"""Parameters of the recovery policies, which are read from TOML.

``parameters.toml`` next to this module has them all, each with its source. A user's file overrides some of them.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec

from ftd.config.validation import convert, read_toml
from ftd.errors import ConfigurationError

_SHIPPED = Path(__file__).with_name("parameters.toml")

Seconds = Annotated[float, msgspec.Meta(ge=0)]
BytesPerS = Annotated[float, msgspec.Meta(gt=0)]

Section = TypeVar("Section", bound=msgspec.Struct)


class Parameters:
    """Parameters of all policies, by the name of the policy."""

    def __init__(self, tables: dict[str, dict[str, Any]], file: str) -> None:
        self._tables, self._file = tables, file

    def changed(self, policy: str, values: Mapping[str, Any]) -> "Parameters":
        """Return these parameters with other values for a policy."""
        return Parameters({**self._tables, policy: self._tables.get(policy, {}) | dict(values)}, self._file)

    def section(self, policy: str, kind: type[Section]) -> Section:
        """Return the parameters of a policy.

        :param kind: a Struct that rejects unknown fields.
        :raises ConfigurationError: a key is unknown, missing, or has a wrong value.
        """
        return convert(self._tables.get(policy, {}), kind, where=f"{self._file}, [{policy}]")


def read_parameters(path: Path | None = None) -> Parameters:
    """Return the shipped parameters, with those in ``path`` instead where it has some.

    :raises ConfigurationError: the file cannot be read or is no TOML, or it names an unknown policy.
    """
    tables = {name: dict(table) for name, table in read_toml(_SHIPPED).items()}
    if path is None:
        return Parameters(tables, "parameters.toml")
    for name, table in read_toml(path).items():
        if name not in tables:
            raise ConfigurationError(
                f"{path} has {name}; the policies with parameters are {', '.join(sorted(tables))}",
                field="--parameters",
            )
        if not isinstance(table, dict):
            raise ConfigurationError(f"{path}: {name} must be a table, [{name}]", field="--parameters")
        tables[name] |= table
    return Parameters(tables, str(path))
