"""The error of everything that a user's training function can get wrong."""

from collections.abc import Iterator
from contextlib import contextmanager


class TrainingError(ValueError):
    """The training function, or what it returned, cannot be used; the message says what to change."""


@contextmanager
def errors_of(what: str, where: str = "") -> Iterator[None]:
    """Raise errors of the user's code in this context as a ``TrainingError``: ``{what} raised KeyError{where}: …``."""
    try:
        yield
    except TrainingError:
        raise
    except Exception as error:
        raise TrainingError(f"{what} raised {type(error).__name__}{where}: {error}") from error
