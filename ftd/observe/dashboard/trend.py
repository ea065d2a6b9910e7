"""Loss, throughput, goodput and learning rate over time in bounded memory: a full trend merges its points in
pairs.

A point stands for a run of committed steps. It is a list, which the page receives as it is::

    [step, at_s, loss, samples, productive_s, elapsed_s, steps, tokens, learning_rate]

``step`` is the last step, committed at ``at_s`` (seconds since 1970). ``loss`` is the mean over the finite
losses, or ``None``. ``samples``, ``steps`` and ``tokens`` (0 if the loss has none) were committed during
the ``elapsed_s`` since the previous point. ``learning_rate`` is that of ``step``, or ``None`` if unknown.
``productive_s`` is the part of the time that went into steps which still count; a step that a rollback
undid no longer counts.

Steps that arrived all at once, because the broker or the coordinator had been away, become one point for
the time since the previous point, since training went on in the meantime.
"""

import math

Point = list[float | None]

MAX_POINTS = 1000
_STEP, _AT, _LOSS, _SAMPLES, _PRODUCTIVE, _ELAPSED, _STEPS, _TOKENS, _RATE = range(9)


class Trend:
    """The points, oldest first; ``take`` returns those that changed since its previous call."""

    def __init__(self, most: int = MAX_POINTS) -> None:
        """:param most: largest number of points; must be even, so that all points form pairs."""
        self.points: list[Point] = []
        self._most = most
        self._stride = 1
        self._fresh_from = 0
        self._cleared = False

    def clear(self) -> None:
        """Start over for another job."""
        self.points.clear()
        self._stride, self._fresh_from, self._cleared = 1, 0, True

    def commit(
        self,
        step: int,
        at_s: float,
        loss: float | None,
        step_s: float,
        samples_per_s: float | None,
        steps: int = 1,
        *,
        tokens_per_s: float | None = None,
        learning_rate: float | None = None,
    ) -> None:
        """Add a committed step and its duration; with ``steps`` > 1, it stands for that many equal steps."""
        took_s = max(0.0, step_s) * steps
        last = self.points[-1] if self.points else None
        elapsed_s = took_s if last is None else max(0.0, at_s - _number(last, _AT))
        follows = last is not None and last[_STEP] == step - steps
        idle_s = _number(last, _ELAPSED) - _number(last, _PRODUCTIVE) if last is not None and follows else 0.0
        belated = elapsed_s < took_s / 2 <= idle_s
        new: Point = [
            step,
            at_s,
            loss if loss is not None and math.isfinite(loss) else None,
            (samples_per_s or 0.0) * took_s,
            min(took_s, elapsed_s + (idle_s if belated else 0.0)),
            elapsed_s,
            steps,
            (tokens_per_s or 0.0) * took_s,
            learning_rate or None,
        ]
        if last is not None and follows and (belated or _number(last, _STEPS) + steps <= self._stride):
            self.points[-1] = _merged(last, new)
        else:
            self.points.append(new)
        self._fresh_from = min(self._fresh_from, len(self.points) - 1)
        if len(self.points) >= self._most:
            self._halve()

    def roll_back(self, step: int) -> None:
        """Undo the steps after ``step``: their time no longer counts as productive."""
        for index in range(len(self.points) - 1, -1, -1):
            point = self.points[index]
            last, steps = _number(point, _STEP), _number(point, _STEPS)
            if last <= step:
                break
            remaining = max(0.0, steps - (last - step))
            point[_PRODUCTIVE] = _number(point, _PRODUCTIVE) * remaining / steps
            if remaining:  # The rollback ends inside this point: its beginning stays.
                point[_STEP], point[_STEPS] = step, remaining
            self._fresh_from = min(self._fresh_from, index)

    def take(self) -> tuple[int, list[Point]] | None:
        """Return ``(first, points)``, which replace all points from that index on; ``None`` if nothing
        changed.
        """
        first = self._fresh_from
        if first >= len(self.points) and not self._cleared:
            return None
        self._fresh_from, self._cleared = len(self.points), False
        return first, self.points[first:]

    def _halve(self) -> None:
        whole = len(self.points) // 2 * 2
        pairs = zip(self.points[:whole:2], self.points[1:whole:2], strict=True)
        self.points = [_merged(a, b) for a, b in pairs] + self.points[whole:]
        self._stride *= 2
        self._fresh_from = 0


def _number(point: Point, index: int) -> float:
    return point[index] or 0.0


def _merged(first: Point, second: Point) -> Point:
    losses = [(p[_LOSS], _number(p, _STEPS)) for p in (first, second)]
    finite = [(loss, steps) for loss, steps in losses if loss is not None]
    weight = sum(steps for _, steps in finite)
    sums = [
        _number(first, i) + _number(second, i) for i in (_SAMPLES, _PRODUCTIVE, _ELAPSED, _STEPS, _TOKENS)
    ]
    mean = sum(loss * steps for loss, steps in finite) / weight if weight else None
    return [second[_STEP], second[_AT], mean, *sums, second[_RATE]]
