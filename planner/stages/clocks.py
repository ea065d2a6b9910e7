"""Step times of many pipelines for any number of microbatches at once, for the search over instantiations,
which needs a hundred templates at a time.

The schedule of 1F1B goes in waves (planner/stages/makespan.py): stage s does its m-th forward in wave 2m +
s and its i-th backward in wave 2i + 2S − 1 − s, and waits only for the last operations of itself and one
neighbour. Pipelines are aligned at their last stages, so a wave is the same operation for all of them.
Three facts do the rest:

* *Drain.* m ≥ S microbatches differ from more of them only after wave 2m − 1. From there to the end the
  time is max over stages of (time of the stage in that wave + the longest path to the end), and these paths
  are the same for every m ≥ S. So one simulation answers all m.
* *Period.* If after p rounds every stage is later by the same g, it is so forever: a round maps the times
  of the stages by maxima and sums, so it commutes with adding a constant. Times then repeat with period p.
* *Rounding.* Such a map never increases the largest difference between two inputs. So if the stages are
  later by g ± ε, after k periods they are later by k·g ± k·ε: with ε ≤ ``PERIODIC``·g that is a relative
  error of ``PERIODIC`` at most.
"""

from collections.abc import Collection, Sequence

import numpy as np

from planner.stages.makespan import PERIODIC, Floats, Ints

Stages = tuple[Sequence[float], Sequence[float], Sequence[float]]
"""Forward and backward times of each stage, and the time of the link from each to the next, in milliseconds."""

ROUNDS = 64
"""Number of rounds simulated at a time."""
NEVER = 1 << 40


class Clocks:
    """Step times of the pipelines 0 … C − 1, simulated only as far as calls have needed."""

    def __init__(self, pipelines: Sequence[Stages]) -> None:
        self._pipelines = pipelines
        self.stages: Ints = np.array([len(forward) for forward, _, _ in pipelines])
        self._depth = int(self.stages.max())
        self._simulation = _Simulation(pipelines, self._depth)
        count = len(pipelines)
        self._table: Floats = np.full((count, 4 * ROUNDS), np.nan)
        """Makespans in milliseconds, by pipeline and number of microbatches."""
        self._known: Ints = np.zeros(count, dtype=np.int64)
        """Number of microbatches up to which ``_table`` is filled; entries below ``stages`` are filled only
        where ``_short``.
        """
        self._period: Ints = np.full(count, NEVER)
        self._growth_ms: Floats = np.zeros(count)
        self._short = np.zeros(count, dtype=np.bool_)

    def times_ms(self, pipelines: Ints, microbatches: Ints) -> Floats:
        """Return the makespans, element by element, for at least one microbatch each."""
        deep = pipelines[microbatches < self.stages[pipelines]]
        for pipeline in np.unique(deep[~self._short[deep]]):
            self._fill_short(int(pipeline))
        while np.any((self._known[pipelines] < microbatches) & (self._period[pipelines] == NEVER)):
            self._extend()
        return self._look_up(pipelines, microbatches)

    def most(self, limits_ms: Floats, batch: int) -> Ints:
        """Return the most microbatches, at most ``batch``, that each pipeline finishes within its limit; 0 if
        none.
        """
        everyone = np.arange(len(limits_ms))
        while True:
            ends = np.minimum(self._known, batch)
            open_ended = (self._period == NEVER) & (self._known < batch)
            reached = self._known >= self.stages
            last_ms = np.where(reached, self._table[everyone, np.where(reached, ends, 0)], -np.inf)
            if not np.any(open_ended & (last_ms <= limits_ms)):
                break
            self._extend()
        full = np.minimum(self.stages, batch)
        low = np.zeros(len(limits_ms), dtype=np.int64)
        fits = np.zeros(len(limits_ms), dtype=np.bool_)
        fits[self.stages <= batch] = True
        fits[fits] = self._look_up(everyone[fits], full[fits]) <= limits_ms[fits]
        for pipeline in np.flatnonzero(~fits & ~self._short & (limits_ms >= 0)):
            self._fill_short(int(pipeline))
        low[fits] = full[fits]
        high = np.where(self._period == NEVER, np.minimum(self._known, batch), batch) + 1
        high = np.where(
            fits, high, np.where(limits_ms >= 0, np.minimum(full + (self.stages > batch), high), 1)
        )
        low, high = self._near(limits_ms, low, high)
        while True:
            asked = high - low > 1
            if not asked.any():
                return low
            middle = np.maximum((low + high) // 2, 1)
            done = self._look_up(everyone, middle) <= limits_ms
            low, high = np.where(asked & done, middle, low), np.where(asked & ~done, middle, high)

    def _near(self, limits_ms: Floats, low: Ints, high: Ints) -> tuple[Ints, Ints]:
        """Narrow the range between ``low`` and ``high``, as times grow by about the same for each microbatch."""
        everyone, known = np.arange(len(limits_ms)), np.maximum(self._known, 1)
        cyclic = (self._period != NEVER) & (self._growth_ms > 0)
        each = self._period[cyclic] / self._growth_ms[cyclic]
        guess = known.copy()
        beyond_ms = limits_ms[cyclic] - self._table[everyone[cyclic], known[cyclic]]
        guess[cyclic] += np.clip(np.floor(beyond_ms * each), -known[cyclic], NEVER).astype(np.int64)
        for near in (guess - 1, guess + 2):
            inside = (near > low) & (near < high)
            done = self._look_up(everyone, np.where(inside, near, np.maximum(low, 1))) <= limits_ms
            low, high = np.where(inside & done, near, low), np.where(inside & ~done, near, high)
        return low, high

    def _look_up(self, pipelines: Ints, microbatches: Ints) -> Floats:
        beyond = np.maximum(microbatches - self._known[pipelines], 0)
        periods = -(-beyond // self._period[pipelines])
        inside = microbatches - periods * np.where(periods, self._period[pipelines], 0)
        times: Floats = self._table[pipelines, inside] + periods * self._growth_ms[pipelines]
        return times

    def _extend(self) -> None:
        """Simulate another ``ROUNDS`` rounds of the pipelines that have no period yet."""
        simulation = self._simulation
        first = simulation.wave
        spans, found = simulation.run(2 * ROUNDS)
        width = (simulation.wave + 1) // 2 + 1
        if width > self._table.shape[1]:
            more = max(width, 2 * self._table.shape[1]) - self._table.shape[1]
            self._table = np.pad(self._table, ((0, 0), (0, more)), constant_values=np.nan)
        for column, pipeline in enumerate(simulation.active):
            # After wave 2m − 1, counted from the pipeline's own first, the span is the time of m
            # microbatches.
            offset = self._depth - int(self.stages[pipeline])
            skipped = (first + 1 - offset) % 2
            microbatches = (first + skipped + 1 - offset) // 2
            values = spans[skipped::2, column]
            values = values[max(0, int(self.stages[pipeline]) - microbatches) :]
            microbatches = max(microbatches, int(self.stages[pipeline]))
            self._table[pipeline, microbatches : microbatches + len(values)] = values
            known = (simulation.wave - offset) // 2
            if column in found:
                wave, self._period[pipeline], self._growth_ms[pipeline] = found[column]
                known = (wave + 1 - offset) // 2
            self._known[pipeline] = max(known, 0)
        simulation.drop(found)

    def _fill_short(self, pipeline: int) -> None:
        """Fill in the times of 1 … S − 1 microbatches, all in parallel: with fewer microbatches than stages
        the drain begins during the warm-up.
        """
        self._short[pipeline] = True
        forward_ms, backward_ms, link_ms = (np.array(times)[:, None] for times in self._pipelines[pipeline])
        stages = len(forward_ms)
        # Row s + 1 is stage s; an operation does not wait for a stage that does not exist.
        free = np.full((stages + 2, stages - 1), -np.inf)
        free[1:-1] = 0.0
        link = np.zeros((stages + 1, 1))
        link[1:-1] = link_ms
        forwards_end = np.arange(stages)[:, None] + 2 * np.arange(1, stages)
        for wave in range(4 * stages - 4):
            # B(0, m − 1), the last of all, is in wave 2m + 2S − 3: columns that have ended are no longer
            # simulated.
            ending, odd = divmod(wave + 3 - 2 * stages, 2)
            going = slice(max(ending - 1, 0), None)
            ahead = slice(wave % 2, min(wave + 1, stages), 2)
            ahead_end = slice(ahead.start + 1, ahead.stop + 1, 2)
            low = max((wave + 1) % 2, 2 * stages - 1 - wave)
            back, back_end, behind = (
                slice(low, None, 2),
                slice(low + 1, stages + 1, 2),
                slice(low + 2, None, 2),
            )
            forwarded = np.maximum(free[ahead_end, going], free[ahead, going] + link[ahead])
            forwarded += forward_ms[ahead]
            backwarded = np.maximum(free[back_end, going], free[behind, going] + link[back_end])
            there = forwards_end[ahead, going] > wave
            np.copyto(free[ahead_end, going], forwarded, where=there)
            np.add(backwarded, backward_ms[back], out=free[back_end, going])
            if ending > 0 and not odd:
                self._table[pipeline, ending] = free[1, ending - 1]


class _Simulation:
    """The waves of several pipelines, aligned at the last stage; rows are stages, columns pipelines.

    Rows before a pipeline's first stage stay at 0; a link of −∞, for which nothing waits, separates them.
    """

    def __init__(self, pipelines: Sequence[Stages], depth: int) -> None:
        count = len(pipelines)
        self.wave = 0
        self.active: Ints = np.arange(count)
        self._depth = depth
        self._forward, self._backward = np.zeros((2, depth, count))
        self._link: Floats = np.full((depth + 1, count), -np.inf)
        self._padding = np.zeros((depth, count), dtype=np.bool_)
        for column, (forward_ms, backward_ms, link_ms) in enumerate(pipelines):
            offset = depth - len(forward_ms)
            self._forward[offset:, column], self._backward[offset:, column] = forward_ms, backward_ms
            self._link[offset + 1 : depth, column] = link_ms
            self._padding[:offset, column] = True
        self._ways = self._ways_to_end(pipelines)
        self._free: Floats = np.full((depth + 2, count), -np.inf)
        self._free[1:-1] = 0.0
        self._seen: Floats = self._free[1:-1].copy()
        self._seen_wave = 0

    def _ways_to_end(self, pipelines: Sequence[Stages]) -> Floats:
        """Return the longest path to the end from each stage's time in wave 2m − 1, computed backwards.

        In step j after that wave, stages with s ≡ j (mod 2) do backwards; the others do forwards while j ≤
        s. The stages are aligned at the first one here, where the end is.
        """
        depth, count = self._forward.shape
        forward, backward, link = np.zeros((3, depth, count))
        for column, (forward_ms, backward_ms, link_ms) in enumerate(pipelines):
            stages = len(forward_ms)
            forward[:stages, column], backward[:stages, column] = forward_ms, backward_ms
            link[: stages - 1, column] = link_ms
        ends: Ints = np.array([2 * len(forward_ms) - 2 for forward_ms, _, _ in pipelines])
        ways: Floats = np.full((depth, count), -np.inf)
        for step in range(2 * depth - 2, -1, -1):
            ways[0, ends == step] = 0.0
            if not step:
                break
            back, ahead = slice(step % 2, depth, 2), slice(step + 1, depth, 2)
            after = ways.copy()
            after[back] += backward[back]
            after[ahead] += forward[ahead]
            ways = after.copy()
            behind = slice(step % 2, depth - 1, 2), slice(step % 2 + 1, depth, 2)
            np.maximum(ways[behind[1]], after[behind[0]] + link[behind[0]], out=ways[behind[1]])
            before = slice(step, depth - 1, 2)
            np.maximum(ways[before], after[ahead] + link[before], out=ways[before])
        aligned: Floats = np.full((depth, count), -np.inf)
        for column, (forward_ms, _, _) in enumerate(pipelines):
            aligned[depth - len(forward_ms) :, column] = ways[: len(forward_ms), column]
        return aligned

    def run(self, waves: int) -> tuple[Floats, dict[int, tuple[int, int, float]]]:
        """Simulate ``waves`` more waves.

        :returns: the step's time if the drain begins after each of them, shape (waves, active); and the
            columns found to be periodic, with the wave, the number of rounds of the period, and its growth
            in milliseconds.
        """
        depth, free = self._depth, self._free
        spans = np.empty((waves, len(self.active)))
        found: dict[int, tuple[int, int, float]] = {}
        for number in range(waves):
            wave = self.wave
            ahead = slice(wave % 2, min(wave + 1, depth), 2)
            ahead_end = slice(ahead.start + 1, ahead.stop + 1, 2)
            low = max((wave + 1) % 2, 2 * depth - 1 - wave)
            back, back_end, behind = (
                slice(low, depth, 2),
                slice(low + 1, depth + 1, 2),
                slice(low + 2, None, 2),
            )
            forwarded = np.maximum(free[ahead_end], free[ahead] + self._link[ahead])
            backwarded = np.maximum(free[back_end], free[behind] + self._link[back_end])
            free[ahead_end] = forwarded + self._forward[ahead]
            free[back_end] = backwarded + self._backward[back]
            np.max(free[1:-1] + self._ways, axis=0, out=spans[number])
            if wave >= 2 * depth and wave % 2 == 0:
                self._compare(found)
            self.wave += 1
        return spans, found

    def _compare(self, found: dict[int, tuple[int, int, float]]) -> None:
        """Compare with the remembered times, which are replaced in rounds 1, 2, 4, 8, … (Brent's cycle
        finding).
        """
        rounds = self.wave // 2 - self._depth
        if rounds:
            later = self._free[1:-1] - self._seen
            np.copyto(later, later[-1:], where=self._padding)
            least = later.min(axis=0)
            for column in np.flatnonzero(later.max(axis=0) - least <= PERIODIC * least):
                period = (self.wave - self._seen_wave) // 2
                found.setdefault(int(column), (self.wave, period, float(least[column])))
        if not rounds & (rounds - 1):
            self._seen, self._seen_wave = self._free[1:-1].copy(), self.wave

    def drop(self, columns: Collection[int]) -> None:
        """Remove these columns from the simulation."""
        if not columns:
            return
        kept = [column for column in range(len(self.active)) if column not in columns]
        self.active = self.active[kept]
        self._forward, self._backward = self._forward[:, kept], self._backward[:, kept]
        self._link, self._padding, self._ways = (
            self._link[:, kept],
            self._padding[:, kept],
            self._ways[:, kept],
        )
        self._free, self._seen = self._free[:, kept], self._seen[:, kept]
