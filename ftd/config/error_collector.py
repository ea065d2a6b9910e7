"""Collects the errors of a configuration, so that all of them are reported together."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import TypeVar

from ftd.errors import ConfigurationError, ConfigurationErrors, IncompleteError

T = TypeVar("T")


class ErrorCollector:
    """Errors of one file and of what goes with it.

    :param where: name of the file, for keys that are in it.
    :param variables: keys that the environment sets, each with its variable.
    """

    def __init__(self, where: str = "", variables: Mapping[str, str] = MappingProxyType({})) -> None:
        self._where, self._variables = where, variables
        self._invalid_tables: set[str] = set()
        self._wrong_keys: set[str] = set()
        self.errors: list[ConfigurationError] = []

    def add(self, error: ConfigurationError) -> None:
        """Add an error, unless it may follow from a misspelled key.

        A key that seems to be missing from a table may be the very key that is misspelled there.
        """
        for single in error.errors:
            key = single.field or ""
            if not (isinstance(single, IncompleteError) and _table(key) in self._invalid_tables):
                self._wrong_keys.add(key)
                self.errors.append(self._located(single, key))

    def reject(self, problem: str, *, field: str, remedy: str) -> None:
        """Add an error, as ``add`` does."""
        self.add(ConfigurationError(problem, field=field, remedy=remedy))

    def add_invalid_key(self, error: ConfigurationError, key: str) -> None:
        """Add the error of a key that is unknown or has a value of the wrong type.

        Its table is therefore not what the user meant, and keys that seem to be missing from it are not
        reported.
        """
        self._invalid_tables.add(_table(key))
        self._wrong_keys.add(key)
        self.errors.append(self._located(error, error.field or ""))

    @contextmanager
    def collect(self) -> Iterator[None]:
        """Add a ``ConfigurationError`` of the block and continue after the block."""
        try:
            yield
        except ConfigurationError as error:
            self.add(error)

    def value_or(self, make: Callable[[], T], otherwise: T) -> T:
        """Return the result of ``make``, or ``otherwise`` if it raises a ``ConfigurationError``, which is added."""
        try:
            return make()
        except ConfigurationError as error:
            self.add(error)
            return otherwise

    def affect(self, *places: str) -> bool:
        """Return whether an error is about one of these keys or tables (``""``: the whole file, or a key at its
        top level).
        """
        at_top = "" in places and "" in self._invalid_tables
        return at_top or any(key in places or (_table(key) or key) in places for key in self._wrong_keys)

    def raise_any(self) -> None:
        """Raise the errors that were found, if any.

        :raises ConfigurationError: the only error, or all of them.
        """
        match self.errors:
            case []:
                return
            case [only]:
                raise only
            case several:
                raise ConfigurationErrors(tuple(several))

    def _located(self, single: ConfigurationError, key: str) -> ConfigurationError:
        if (variable := self._variables.get(key)) is not None:
            field = f"${variable} ({key})"
        elif key and self._where and not key.startswith("$"):
            field = f"{self._where}: {key}"
        else:
            return single
        return ConfigurationError(single.problem, field=field, remedy=single.remedy)


def _table(key: str) -> str:
    """Return the table of a key: ``node`` for ``node.devices``, and nothing for a key at the top level."""
    return key.rpartition(".")[0].partition(".")[0]
