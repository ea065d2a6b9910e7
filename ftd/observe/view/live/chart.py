"""Draws the loss as a small bar chart of block characters, with colours where failures and joins happened, and
a mark at the loss of each evaluation.
"""

import math
from collections.abc import Sequence
from itertools import pairwise

from rich.text import Text

BLOCKS = " ▁▂▃▄▅▆▇█"
FAILURE_STYLE = "red"
CHANGE_STYLE = "green"
LINE_STYLE = "#5fafff"
EVALUATION_MARK, EVALUATION_STYLE = "◆", "bold #ffaf5f"


class LossHistory:
    """The loss of consecutive steps in bounded memory: a full history averages its values in pairs.

    A step that is missing has no finite loss, so that all others keep their places.
    """

    def __init__(self, capacity: int = 4096) -> None:
        """:param capacity: largest number of values; must be even, so that all values form pairs."""
        self._capacity = capacity
        self._stride = 1
        self._first: int | None = None
        self._means: list[float] = []
        self._open: list[float] = []

    def add(self, step: int, value: float) -> None:
        """Add the loss of a step after all that the history has."""
        if self._first is None:
            self._first = step
        known = len(self._means) * self._stride + len(self._open)
        for _ in range(step - self._first - known):
            self._append(math.nan)
        self._append(value)

    def _append(self, value: float) -> None:
        self._open.append(value)
        if len(self._open) < self._stride:
            return
        self._means.append(sum(self._open) / len(self._open))
        self._open.clear()
        if len(self._means) >= self._capacity:
            pairs = zip(self._means[::2], self._means[1::2], strict=False)
            self._means = [(a + b) / 2 for a, b in pairs]
            self._stride *= 2

    def truncate(self, step: int) -> None:
        """Remove the steps after ``step``. If it lies within a mean, the steps up to it keep that mean."""
        remaining = max(0, step + 1 - self.first_step)
        whole, part = divmod(remaining, self._stride)
        if whole < len(self._means):
            self._open = [self._means[whole]] * part
            del self._means[whole:]
        else:
            del self._open[remaining - len(self._means) * self._stride :]
        if not remaining:
            self._first = None

    @property
    def values(self) -> list[float]:
        """Means over runs of equal length, oldest first; the newest run may be shorter."""
        return self._means + ([sum(self._open) / len(self._open)] if self._open else [])

    @property
    def first_step(self) -> int:
        return self._first or 0

    @property
    def steps_per_value(self) -> int:
        return self._stride


def resample(values: Sequence[float], width: int) -> list[float]:
    """Return at most ``width`` means over equal runs of ``values``, and never more than there are values."""
    if len(values) <= width:
        return list(values)
    edges = [len(values) * i // width for i in range(width + 1)]
    return [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]


def column_of(step: int, history: LossHistory, columns: int) -> int:
    """Return the column in which ``step`` is drawn if the whole history fills ``columns`` columns."""
    count = len(history.values)
    index = min(max(step - history.first_step, 0) // history.steps_per_value, count - 1)
    return index if count <= columns else index * columns // count


def loss_chart(
    history: LossHistory,
    *,
    width: int,
    height: int,
    failures: Sequence[int] = (),
    changes: Sequence[int] = (),
    evaluations: Sequence[tuple[int, float | None]] = (),
) -> Text:
    """Return ``height`` lines of at most ``width`` characters; the steps of failures and changes are coloured.

    A value that is not finite leaves its column empty.

    :param evaluations: steps, with the held-out loss after each. The newest one of a column is drawn; those
        before the first value are not.
    """
    columns = resample(history.values, width)
    finite = [v for v in columns if v - v == 0]
    if not finite:
        message = "no loss was a finite number" if columns else "waiting for the first step"
        return Text(message, style="dim")
    held_out = {
        column_of(step, history, width): loss
        for step, loss in evaluations
        if step >= history.first_step and loss is not None and loss - loss == 0
    }
    drawn = [*finite, *held_out.values()]
    low, high = min(drawn), max(drawn)
    span = high - low or 1.0

    def level(value: float) -> int:
        return 1 + round((value - low) / span * (height * 8 - 1))

    levels = [level(v) if v - v == 0 else 0 for v in columns]
    marks = {column: (level(loss) - 1) // 8 for column, loss in held_out.items()}
    styles = [LINE_STYLE] * len(columns)
    for steps, style in ((changes, CHANGE_STYLE), (failures, FAILURE_STYLE)):
        for step in steps:
            styles[column_of(step, history, width)] = style
    chart = Text(no_wrap=True)
    for row in reversed(range(height)):
        for column, (top, style) in enumerate(zip(levels, styles, strict=True)):
            marked = style != LINE_STYLE
            filled = min(max(top - row * 8, 0), 8)
            if marks.get(column) == row:
                chart.append(EVALUATION_MARK, style=EVALUATION_STYLE)
            elif filled == 0 and marked:
                chart.append("╵" if row == height - 1 else "╎", style=f"dim {style}")
            else:
                chart.append(BLOCKS[filled], style=style)
        if row:
            chart.append("\n")
    return chart
