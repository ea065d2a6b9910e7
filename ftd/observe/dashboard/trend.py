"""Loss, throughput, goodput and learning rate over time in bounded memory: when full, neighbours are merged in pairs.

A point stands for a run of committed steps, as a list that goes to the page as it is::

    [step, at_s, loss, samples, productive_s, elapsed_s, steps, tokens, learning_rate]

``step`` is its last, committed at ``at_s`` (seconds since 1970); ``loss`` the mean over those that were
finite, else ``None``; ``samples``, ``steps`` and ``tokens`` (0 where the loss has none) what was committed in
the ``elapsed_s`` since the point before; ``learning_rate`` that of ``step``, ``None`` where it is unknown. Of
the time, ``productive_s`` went into steps that still count: a step that a rollback undid counts no more.
Steps that were heard of all at once, since the broker or the coordinator had been away, are one point, for the
time since the point before: training went on meanwhile.
"""

import math

Point = list[float | None]

MOST_POINTS = 1000
_STEP, _AT, _LOSS, _SAMPLES, _PRODUCTIVE, _ELAPSED, _STEPS, _TOKENS, _RATE = range(9)


class Trend:
    """``points``, oldest first; ``take_delta`` says which of them are new or other since it was last asked."""

    def __init__(self, most: int = MOST_POINTS) -> None:
        """:param most: is even, so that all points have a partner."""
        self.points: list[Point] = []
        self._most = most
        self._stride = 1
        self._fresh_from = 0
        self._cleared = False

    def clear(self) -> None:
        """Another job."""
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
        """A step was committed that took so long; or it stands for the last ``steps``, which were like it."""
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
        """What was committed behind ``step`` is undone: the time that went into it was lost."""
        for index in range(len(self.points) - 1, -1, -1):
            point = self.points[index]
            last, steps = _number(point, _STEP), _number(point, _STEPS)
            if last <= step:
                break
            kept = max(0.0, steps - (last - step))
            point[_PRODUCTIVE] = _number(point, _PRODUCTIVE) * kept / steps
            if kept:  # A rollback into the middle of a point: its beginning stays.
                point[_STEP], point[_STEPS] = step, kept
            self._fresh_from = min(self._fresh_from, index)

    def take(self) -> tuple[int, list[Point]] | None:
        """``(from, points)``: these replace what there was from that index on. ``None``: nothing is new."""
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
