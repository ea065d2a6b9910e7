"""Groups of items of about equal size, each for one call or one task of a thread."""

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")


def grouped(
    items: Iterable[T], size_of: Callable[[T], int], enough: int, most: int | None = None
) -> Iterator[list[T]]:
    """Yield the items in order, in groups that end once their sizes add up to ``enough``, or with ``most`` items."""
    group: list[T] = []
    size = 0
    for item in items:
        group.append(item)
        size += size_of(item)
        if size >= enough or len(group) == most:
            yield group
            group, size = [], 0
    if group:
        yield group
