"""Time of one step of a pipeline: the true 1F1B recurrence, its bounds, and the paper's formula.

Stage s of S runs w = S − 1 − s forwards ahead (warm-up), then one forward and one backward alternating,
then the w remaining backwards. F(s, m) needs F(s−1, m) to have crossed the link, B(s, m) needs B(s+1, m); a
link delays and occupies no stage. All times are milliseconds.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

ROUNDING = 1e-12
"""Relative difference below which two sums of the same terms in another order are equal."""


EXACT_MICROBATCHES = 256
"""Rounds that are simulated whether or not they repeat themselves: their times are exact to the last bit."""

PERIODIC = 1e-11


class PipelineClock:
    """Step times of one pipeline for any number of microbatches.

    Forwards, and all backwards but the last w of a stage, finish at the same time however many microbatches
    follow. Therefore the schedule is extended only once, as far as needed, and each call computes only the
    drain at its end: S²/2 operations.

    After many rounds the schedule repeats itself: a round maps the times at which stages finish by maxima
    and sums, so it commutes with adding a constant. Once all stages finish later by the same time than some
    rounds before, they do so forever. Such a map never increases the largest difference between two inputs
    either; where the stages are later by g up to a relative ``PERIODIC``, every later period takes g with
    the same relative error.
    """

    def __init__(
        self, forward_ms: Sequence[float], backward_ms: Sequence[float], link_ms: Sequence[float]
    ) -> None:
        """:param link_ms: S − 1 times of one microbatch; ``link_ms[s]`` is from stage s to s + 1, or back."""
        self._forward_ms = [float(each) for each in forward_ms]
        self._backward_ms = [float(each) for each in backward_ms]
        self._link_ms = [float(each) for each in link_ms]
        self._forwarded: list[list[float]] = [[] for _ in forward_ms]
        self._backwarded: list[list[float]] = [[] for _ in forward_ms]
        self._known: dict[int, float] = {}
        self._seen: list[float] = []
        self._seen_since = 0
        self._period: tuple[int, float] | None = None
        """Rounds after which all stages finish later by the same time, and that time."""

    def makespan_ms(self, microbatches: int) -> float:
        """Return the time from the first forward to the last backward of ``microbatches`` ≥ 1 microbatches."""
        known = self._known.get(microbatches)
        if known is None:
            while len(self._forwarded[0]) < microbatches and self._period is None:
                self._next_round()
                self._look_for_period()
            rounds = len(self._forwarded[0])
            if microbatches <= rounds or self._period is None:
                known = self._drain(microbatches)
            else:
                period, growth_ms = self._period
                periods = -(-(microbatches - rounds) // period)
                known = self.makespan_ms(microbatches - periods * period) + periods * growth_ms
            self._known[microbatches] = known
        return known

    def _look_for_period(self) -> None:
        """Compare with the remembered round, which is replaced after 1, 2, 4, 8, … rounds (Brent)."""
        stages, rounds = len(self._forward_ms), len(self._forwarded[0])
        since = rounds - max(stages, EXACT_MICROBATCHES)
        if since < 0:
            return
        now = [times[-1] for times in (*self._forwarded, *self._backwarded)]
        if since:
            later = [new - old for new, old in zip(now, self._seen, strict=True)]
            if max(later) - min(later) <= PERIODIC * min(later):
                self._period = since - self._seen_since, min(later)
        if not since & (since - 1):
            self._seen, self._seen_since = now, since

    def _next_round(self) -> None:
        """Add the m-th forward of every stage and the backward that precedes it there."""
        stages = len(self._forward_ms)
        m = len(self._forwarded[0])
        for stage in range(stages):
            i = m - stages + stage
            if i >= 0:
                start = self._forwarded[stage][m - 1]
                if stage + 1 < stages:
                    start = max(start, self._backwarded[stage + 1][i] + self._link_ms[stage])
                self._backwarded[stage].append(start + self._backward_ms[stage])
        arrived = 0.0
        for stage in range(stages):
            start = arrived
            if self._backwarded[stage]:
                start = max(start, self._backwarded[stage][-1])
            elif m:
                start = max(start, self._forwarded[stage][-1])
            done = start + self._forward_ms[stage]
            self._forwarded[stage].append(done)
            if stage + 1 < stages:
                arrived = done + self._link_ms[stage]

    def _drain(self, microbatches: int) -> float:
        """Finish the backwards after the last forward; the first stage is the last to finish."""
        stages = len(self._forward_ms)
        below: list[float] = []
        below_first = free = 0.0
        for stage in reversed(range(stages)):
            first = max(0, microbatches - stages + stage)
            free = self._forwarded[stage][microbatches - 1]
            here: list[float] = []
            for i in range(first, microbatches):
                if stage + 1 < stages:
                    known = i < below_first
                    done_below = self._backwarded[stage + 1][i] if known else below[i - int(below_first)]
                    free = max(free, done_below + self._link_ms[stage])
                free += self._backward_ms[stage]
                here.append(free)
            below, below_first = here, first
        return free


def makespans(forward_ms: Floats, backward_ms: Floats, link_ms: Floats, microbatches: int) -> Floats:
    """Return ``PipelineClock.makespan_ms`` of C pipelines of S stages at once, to the last bit.

    The arguments have shapes (C, S), (C, S) and (C, S − 1), the result (C,).

    The schedule is computed in waves: F(s, m) is done in wave 2m + s and B(s, i) in wave 2i + 2S − 1 − s. A
    wave has at most one operation of each stage, and it waits only for the last operations of this stage
    and its neighbour: the forwards of every other stage and the backwards of those between.
    """
    count, stages = forward_ms.shape
    # Row s + 1 is stage s; an operation does not wait for a stage that does not exist.
    free = np.full((stages + 2, count), -np.inf)
    free[1:-1] = 0.0
    forward, backward = forward_ms.T.copy(), backward_ms.T.copy()
    link = np.zeros((stages + 1, count))
    link[1:-1] = link_ms.T
    last = 2 * (microbatches - 1)
    for wave in range(last + 2 * stages):
        low, high = max(wave % 2, wave - last), min(wave + 1, stages)
        ahead = slice(low, high, 2), slice(low + 1, high + 1, 2)
        low, high = max((wave + 1) % 2, 2 * stages - 1 - wave), min(stages, last + 2 * stages - wave)
        back = slice(low, high, 2), slice(low + 1, high + 1, 2), slice(low + 2, high + 2, 2)
        forwarded = np.maximum(free[ahead[1]], free[ahead[0]] + link[ahead[0]])
        backwarded = np.maximum(free[back[1]], free[back[2]] + link[back[1]])
        free[ahead[1]] = forwarded + forward[ahead[0]]
        free[back[1]] = backwarded + backward[back[0]]
    done: Floats = free[1]
    return done


def path_bounds(forward_ms: Floats, backward_ms: Floats, link_ms: Floats, microbatches: int) -> Floats:
    """Return a lower bound on each of ``makespans``: the longest of some paths through the schedule's graph.

    For a stage k with a stages after it, one path goes down with the first microbatch to the last stage and
    back to k, N − a times through k, and down and back once more. This is the paper's T1 + T2 + T3 (Eq.
    1–3) with k in the place of k*, and it is a path while a ≤ N − 2. The other path is one round trip and
    all N forwards and N backwards of k, without the min(a, N − 1) forwards (or as many backwards) that
    others hide.
    """
    count, stages = forward_ms.shape
    times = forward_ms + backward_ms
    links = np.concatenate((link_ms, np.zeros((count, 1))), axis=1)
    trip = times + 2 * links
    before = np.cumsum(trip, axis=1) - trip
    behind = trip.sum(axis=1, keepdims=True) - before - times
    after = stages - 1 - np.arange(stages)
    hidden = np.minimum(forward_ms, backward_ms) * np.minimum(after, microbatches - 1)
    once = before + behind + times * microbatches - hidden
    twice = before + 2 * behind + times * (microbatches - after)
    paths = np.where(after <= microbatches - 2, np.maximum(once, twice), once)
    bounds: Floats = paths.max(axis=1)
    return bounds


def paper_objective_ms(times_ms: Sequence[float]) -> float:
    """Return T1 + T2 + T3 of Oobleck Eq. 1–4 with N_b = 4S, where k* is the rightmost slowest stage, from 0."""
    stages = len(times_ms)
    slowest_ms = max(times_ms)
    k = max(index for index, time_ms in enumerate(times_ms) if time_ms == slowest_ms)
    return sum(times_ms) + (3 * stages + k - 1) * slowest_ms + sum(times_ms[k:])
