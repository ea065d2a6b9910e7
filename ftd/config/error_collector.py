"""What is wrong with a configuration, gathered: all of it is told at once."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import TypeVar

from ftd.errors import ConfigurationError, ConfigurationErrors, IncompleteError

T = TypeVar("T")


class ErrorCollector:
    """Of one file and what goes with it.

    :param where: the file's name, for keys that stand in it.
    :param variables: the keys that the environment says instead, each with its variable.
    """

    def __init__(self, where: str = "", variables: Mapping[str, str] = MappingProxyType({})) -> None:
        self._where, self._variables = where, variables
        self._misfits: set[str] = set()
        self._keys: set[str] = set()
        self.errors: list[ConfigurationError] = []

    def add(self, error: ConfigurationError) -> None:
        """What seems to be missing from a table may be the very key that is misspelt there."""
        for mistake in error.errors:
            key = mistake.field or ""
            if not (isinstance(mistake, IncompleteError) and _table(key) in self._misfits):
                self._keys.add(key)
                self.errors.append(self._placed(mistake, key))

    def add_invalid_key(self, error: ConfigurationError, key: str) -> None:
        """``key`` is unknown, or its value of another type: its table is not what was meant."""
        self._misfits.add(_table(key))
        self._keys.add(key)
        self.errors.append(self._placed(error, error.field or ""))

    @contextmanager
    def collect(self) -> Iterator[None]:
        """Go on behind the block when it finds a mistake."""
        try:
            yield
        except ConfigurationError as error:
            self.add(error)

    def value_or(self, make: Callable[[], T], otherwise: T) -> T:
        """What ``make`` gives, or, when it finds a mistake, ``otherwise``."""
        try:
            return make()
        except ConfigurationError as error:
            self.add(error)
            return otherwise

    def affect(self, *places: str) -> bool:
        """Whether one is of these keys or tables (``""``: of the file as a whole, or of its top's keys)."""
        at_top = "" in places and "" in self._misfits
        return at_top or any(key in places or (_table(key) or key) in places for key in self._keys)

    def raise_any(self) -> None:
        """:raises ConfigurationError: what was found."""
        match self.errors:
            case []:
                return
            case [only]:
                raise only
            case several:
                raise ConfigurationErrors(tuple(several))

    def _placed(self, mistake: ConfigurationError, key: str) -> ConfigurationError:
        if (variable := self._variables.get(key)) is not None:
            field = f"${variable} ({key})"
        elif key and self._where and not key.startswith("$"):
            field = f"{self._where}: {key}"
        else:
            return mistake
        return ConfigurationError(mistake.problem, field=field, remedy=mistake.remedy)


def _table(key: str) -> str:
    """``node`` of ``node.devices``; of a key at the top, nothing."""
    return key.rpartition(".")[0].partition(".")[0]
