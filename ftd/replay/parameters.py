"""Parameters of the recovery policies, which are read from TOML.

``parameters.toml`` next to this module has them all, each with its source. A user's file overrides some of them.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec

from ftd.config.validation import convert, read_toml
from ftd.errors import ConfigurationError
from ftd.replay.policy import Checkpoints

_SHIPPED = Path(__file__).with_name("parameters.toml")

MOST_S = 1e12
"""Longest time that a parameter may be; an interval that is longer than every trace means never."""
Seconds = Annotated[float, msgspec.Meta(ge=0, le=MOST_S)]
Interval = Annotated[float, msgspec.Meta(gt=0, le=MOST_S)]
"""Time between two events, in seconds."""
BytesPerS = Annotated[float, msgspec.Meta(ge=1)]

Section = TypeVar("Section", bound=msgspec.Struct)


class TimedCheckpoints(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Checkpoints at a fixed interval, among the parameters of several policies."""

    checkpoint_every_s: Seconds
    """Time between two checkpoints, of which each takes the next end of an iteration."""
    checkpoint_stall_s: Seconds
    """Time for which a checkpoint stops training; it is written after that."""
    store_bytes_per_s: BytesPerS
    """Rate at which the whole state is written or loaded."""

    def checkpoints(self, iteration_s: float, write_s: float) -> Checkpoints:
        """Return the checkpoints of iterations of ``iteration_s``.

        :param write_s: time to write the whole state.
        """
        return Checkpoints(
            every_iterations=max(1, round(self.checkpoint_every_s / iteration_s)),
            stall_s=self.checkpoint_stall_s,
            write_s=write_s,
        )


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
