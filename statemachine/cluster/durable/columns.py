"""Many values of one kind as plain data, column by column: of a thousand, what all have alike costs next to
nothing, neither to write nor to deflate."""

from collections.abc import Sequence
from operator import attrgetter
from typing import Any


def columns(values: Sequence[Any], names: Sequence[str]) -> dict[str, list[Any]]:
    """These attributes (two at least) of ``values``, each in a list of its own, in their order."""
    if not values:
        return {name: [] for name in names}
    return dict(zip(names, map(list, zip(*map(attrgetter(*names), values), strict=True)), strict=True))


def rows(table: dict[str, list[Any]]) -> list[dict[str, Any]]:
    """The values again, as plain data.

    :raises ValueError: the columns are not of one length.
    """
    return [dict(zip(table, row, strict=True)) for row in zip(*table.values(), strict=True)]
