"""The best mapping for one time of the slowest stage: an additive problem, solved by dynamic programming.

Write B for the slowest stage's time and k* for its position. The paper's objective (N_b = 4S) is then a
sum:

    Σ_{k<k*} (t_k + 4B) + 4B + Σ_{k>k*} (2 t_k + 3B)

so neither S nor k* is part of the state (for the iteration objective see ``paths``). With an interval [low,
high] in the place of B, high as the cap on stage times and low in the weights, the minimum is a lower bound
for every mapping whose slowest stage is in the interval; at a single value it is exact.

A stage's time is a difference of prefix sums, and the possible ends v of a stage [u, v) under a cap are
consecutive layers, as are those that fit into memory. So one step of the program is a minimum over a
window, read off two overlapping power-of-two windows, and an evaluation costs O(devices · layers · log
layers) for each allowed number of devices (design §6). Several intervals are evaluated together in one
array.

Where the planner chooses how a stage works, a stage has one *option* for each mode on each number of
devices, each with its own time and its own range of ends that fit.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from planner.stages.costs import StageCosts
from planner.stages.feasibility import memory_ends, sizes_allowed
from planner.stages.makespan import Floats, Ints
from planner.values import StageTemplate

Range = tuple[int, int]
"""Interval of B: indices of ``times_ms``, both included."""
AFTER, AT, DONE = range(3)
"""Kinds of stages: after the slowest stage, the slowest, before it."""
BATCH_CELLS = 20_000
"""Cells of an array of one step of the program: enough to outweigh numpy's cost per call, and still in cache."""
TIME_WEIGHTS = np.array([2.0, 0.0, 1.0])
"""Weight of a stage's own time in the objective, by kind of stage."""
SLOWEST_WEIGHTS = np.array([3.0, 4.0, 4.0])
"""Weight of the slowest stage's time in the objective, by kind of stage."""


class AdditiveMapping:
    """Evaluations of one model for pipelines of up to ``nodes`` nodes; their minima are cached.

    The memory of a stage depends on the number of stages after it. With ``loose`` the fewest possible are
    counted instead: then minima are lower bounds, and mappings that attain them may not fit.
    """

    def __init__(self, costs: StageCosts, nodes: int, *, loose: bool = False) -> None:
        self.costs, self.nodes = costs, nodes
        count = len(costs.modes)
        self.sizes: Ints = np.repeat(np.array(costs.stage_devices, dtype=np.int64), count)
        """Number of devices of each option of a stage, ascending."""
        self.modes: Ints = np.tile(np.arange(count), len(costs.stage_devices))
        """Mode of each option, as a number in ``costs.modes``."""
        table_ms = costs.time_ms[self.modes, self.sizes]
        real = np.isfinite(table_ms)
        times, places = np.unique(table_ms[real], return_inverse=True)
        self.times_ms: Floats = times
        """Every time that a slowest stage can have, ascending."""
        ranks = np.full((*table_ms.shape[:2], costs.layers + 2), len(times), dtype=np.int64)
        ranks[:, :, :-1][real] = places
        self._ranks = ranks
        self.prefix_ms: Floats = np.zeros((len(self.sizes), costs.layers + 1))
        """Time of layers [0, v) in each option, shape (D, L + 1) with D options; 0 for an option that no stage has,
        such as tensor parallelism on a number of devices that the model does not allow.
        """
        np.copyto(self.prefix_ms[:, 1:], table_ms[:, 0, 1:], where=real[:, 0, 1:])
        self.rounding_ms = 4 * np.finfo(float).eps * costs.layers * float(self.prefix_ms[:, -1].max())
        """Largest rounding error of a sum where other numbers of devices take far longer, in milliseconds."""
        self.allowed = [count * sizes for sizes in sizes_allowed(costs)]
        """Number of options of the first stage of the last g devices, by g modulo the devices of a node."""
        by_size = memory_ends(costs, nodes)
        self.memory_ends: Ints = by_size.reshape(len(by_size), len(self.sizes), costs.layers + 1)
        self.loose = loose
        self.rows = 1 if loose else len(self.memory_ends)
        """Number of rows: how many different numbers of stages after a stage are distinguished."""
        devices = np.arange(nodes * costs.devices_per_node + 1)
        whole, rest = devices // costs.devices_per_node, devices % costs.devices_per_node
        fewest = whole * costs.fewest_stages - (-rest // costs.max_devices)
        self.least_after: Ints = np.minimum(fewest, len(self.memory_ends) - 1)
        """Fewest stages on the last g devices, as a row of ``memory_ends``."""
        self.batch = max(1, BATCH_CELLS // (3 * self.rows * self.memory_ends[0].size))
        """Number of intervals that are evaluated together."""
        self._minima: dict[Range, Floats] = {}
        self._latest: _Run | None = None

    def minima(self, ranges: Sequence[Range], nodes: int) -> list[Floats]:
        """Return the least sum for each interval, ``inf`` if no mapping has its slowest stage there.

        ``batch`` intervals are evaluated at a time. Each array has an entry for each of 0 … ``nodes``
        nodes, or more: the smaller pipelines are by-products of the largest.
        """
        known = self._minima
        missing = [
            each
            for each in dict.fromkeys(ranges)
            if (found := known.get(each)) is None or len(found) <= nodes
        ]
        for start in range(0, len(missing), self.batch):
            run = self._run(missing[start : start + self.batch], nodes)
            known.update(zip(run.ranges, run.minima(), strict=True))
        return [known[each] for each in ranges]

    def stages(self, interval: Range, nodes: int) -> tuple[StageTemplate, ...]:
        """Return a mapping that attains the minimum of an interval, which must be finite."""
        run = self._latest
        if run is None or run.nodes < nodes or interval not in run.ranges:
            run = self._run([interval], nodes)
        return run.stages(run.ranges.index(interval), nodes)

    def _run(self, ranges: Sequence[Range], nodes: int) -> "_Run":
        self._latest = None  # Its arrays may be large.
        self._latest = run = _Run(self, ranges, nodes)
        return run

    def ends(self, limits: Ints) -> Ints:
        """Return the last end v ≥ u of a stage [u, v) that takes at most ``times_ms[limit]``, without regard
        to memory.

        The shape is (D, limits, L + 1); the end is u itself where there is none.
        """
        count, width, _ = self._ranks.shape
        ranks, limit = self._ranks.ravel(), limits[None, :, None]
        row = np.arange(count * width).reshape(count, 1, width) * (width + 1)
        ends = np.tile(np.arange(width), (count, len(limits), 1))
        step = 1 << (width - 1).bit_length()
        while step := step >> 1:
            further = np.minimum(ends + step, width)
            ends = np.where(ranks[row + further] <= limit, further, ends)
        return ends


class _Run:
    """One pass of the program over some intervals.

    ``best[g]`` has shape (3, K, rows, L + 1): for interval k the minimum over all ways to put layers [u, L)
    on the pipeline's last g devices. AFTER (and AT, which is equal) stops before the slowest stage, DONE
    includes it. Row r means r stages, the last row that or more; without a memory limit it is the only one.
    """

    def __init__(self, mapping: AdditiveMapping, ranges: Sequence[Range], nodes: int) -> None:
        self.mapping, self.ranges, self.nodes = mapping, list(ranges), nodes
        costs = mapping.costs
        self._rows, self._width = mapping.rows, costs.layers + 1
        shape = (len(mapping.sizes), 3, len(ranges), self._rows, self._width)
        self._from, self._to = self._windows(shape)
        self._end_ms: Floats = TIME_WEIGHTS[None, :, None] * mapping.prefix_ms[:, None, :]
        """Contribution of a stage's end to its cost: shape (D, 3, L + 1)."""
        low_ms = mapping.times_ms[[low for low, _ in ranges]]
        slowest_ms = SLOWEST_WEIGHTS[:, None] * low_ms
        self._start_ms: Floats = slowest_ms[None, :, :, None] - self._end_ms[:, :, None, :]
        """Contribution of a stage's start to its cost: shape (D, 3, K, L + 1)."""
        self.best: Floats = np.full((nodes * costs.devices_per_node + 1, *shape[1:]), np.inf)
        self.best[0, :DONE, :, 0, -1] = 0.0
        self._solve(shape)

    def _windows(self, shape: tuple[int, ...]) -> tuple[Ints, Ints]:
        """Return the first and last end of each kind of stage from u, both of ``shape``; empty where last <
        first.
        """
        mapping = self.mapping
        low, high = np.array(self.ranges, dtype=np.int64).T
        first, last = np.empty(shape, dtype=np.int64), np.empty(shape, dtype=np.int64)
        first[:] = np.arange(self._width) + 1
        first[:, AT] = (mapping.ends(low - 1) + 1)[:, :, None, :]
        last[:] = mapping.ends(high)[:, None, :, None, :]
        # The rightmost slowest stage is k*, so at an exact B the stages after it are quicker.
        last[:, AFTER] = mapping.ends(high - (low == high))[:, :, None, :]
        if not mapping.loose:
            np.minimum(last, mapping.memory_ends.swapaxes(0, 1)[:, None, None], out=last)
            single = (low == high).nonzero()[0]
            if len(mapping.costs.modes) > 1 and len(single):
                first[:, AT, single], last[:, AT, single] = self._quickest_at(
                    first[:, AT, single], last[:, AT, single]
                )
        return first, last

    def _quickest_at(self, first: Ints, last: Ints) -> tuple[Ints, Ints]:
        """Omit stages that would be the slowest although another option, which fits, is quicker.

        Elsewhere the minimum takes the quicker option by itself. Times of stages in such a window, which
        has shape (D, K, rows, L + 1), are equal, so those to omit are at its ends.
        """
        for edge, other, step in ((first, last, 1), (last, first, -1)):
            while True:
                wrong = ((other - edge) * step >= 0) & self._is_slower(edge)
                if not wrong.any():
                    break
                edge[wrong] += step
        return first, last

    def _is_slower(self, ends: Ints) -> NDArray[np.bool_]:
        """Return whether another option on as many devices fits and takes less time, for stages [u, end)."""
        mapping, costs = self.mapping, self.mapping.costs
        starts, inside = np.arange(self._width), np.minimum(ends, costs.layers)
        slower = np.zeros(ends.shape, dtype=np.bool_)
        for option, (mode, size) in enumerate(zip(mapping.modes, mapping.sizes, strict=True)):
            own_ms = costs.time_ms[mode, size][starts, inside[option]]
            for other in range(option - mode, option - mode + len(costs.modes)):
                if other != option:
                    other_ms = costs.time_ms[mapping.modes[other], size][starts, inside[option]]
                    fits = inside[option] <= mapping.memory_ends[:, other]
                    slower[option] |= fits & (other_ms < own_ms)
        return slower

    def _fitting(self, g: int, allowed: int) -> Ints:
        """Return the last end of each stage that may be first of the last ``g`` devices, for the fewest stages
        after it.

        The shape is (allowed options, L + 1).
        """
        sizes = self.mapping.sizes[:allowed]
        ends: Ints = self.mapping.memory_ends[self.mapping.least_after[g - sizes], np.arange(allowed)]
        return ends

    def _lookups(self, last: Ints, count: int, total: int) -> tuple[Ints, Ints]:
        """Return two indices into the flat levels whose minimum is a window's, for windows that end at
        ``last``.

        Level j of 0 … ``count`` holds at each of ``total`` positions the minimum of the 2^j positions from
        there; the levels follow one another, and after them is an infinity for empty windows.
        """
        first = self._from[: len(last)]
        lengths = np.maximum(last - first + 1, 0)
        levels = _doublings(lengths)
        base = levels * total + (np.arange(last.size) // self._width * self._width).reshape(last.shape)
        nowhere = (count + 1) * total
        left = np.where(lengths > 0, base + first, nowhere)
        right = np.where(lengths > 0, base + last + 1 - (1 << levels), nowhere)
        return left.ravel(), right.ravel()

    def _solve(self, shape: tuple[int, ...]) -> None:
        sizes, best = self.mapping.sizes, self.best
        count, total = int(_doublings(self._to - self._from + 1).max()), self._to.size
        left, right = self._lookups(self._to, count, total)
        per_size = total // len(sizes)
        levels = np.full((count + 1) * total + 1, np.inf)
        one, two = np.empty(total), np.empty(total)
        end_ms, start_ms = self._end_ms[:, :, None, None, :], self._start_ms[:, :, :, None, :]
        for g in range(1, len(best)):
            allowed = self.mapping.allowed[g % len(self.mapping.allowed)]
            if not allowed:
                continue  # No stage is as small as the remaining part of the node.
            used, whole = allowed * per_size, (allowed, *shape[1:])
            bottom = levels[:used].reshape(whole)
            np.take(best, g - sizes[:allowed], axis=0, out=bottom, mode="clip")
            bottom += end_ms[:allowed]
            if self.mapping.loose:
                fitting = self._fitting(g, allowed)[:, None, None, None, :]
                left, right = self._lookups(np.minimum(self._to[:allowed], fitting), count, total)
            for level in range(count):
                here, shift = level * total, 1 << level
                narrow = levels[here : here + used]
                # No window crosses the end of its row, so values read across it are never used.
                wide = levels[here + total : here + total + used - shift]
                np.minimum(narrow[:-shift], narrow[shift:], out=wide)
            levels.take(left[:used], out=one[:used], mode="clip")
            levels.take(right[:used], out=two[:used], mode="clip")
            np.minimum(one[:used], two[:used], out=one[:used])
            sums = one[:used].reshape(whole)
            sums += start_ms[:allowed]
            self._enter(g, sums.min(axis=0))

    def _enter(self, g: int, sums: Floats) -> None:
        """Write the minima by kind of stage, shape (3, K, rows, L + 1), with one more stage."""
        np.minimum(sums[AT], sums[DONE], out=sums[DONE])
        best = self.best[g]
        for kind in (AFTER, DONE):
            best[kind, :, 1:] = sums[kind, :, :-1]
            np.minimum(best[kind, :, -1], sums[kind, :, -1], out=best[kind, :, -1])
        best[AT] = best[AFTER]

    def minima(self) -> Floats:
        """Return the minima, shape (K, nodes + 1): for each interval and number of nodes."""
        minima: Floats = self.best[:: self.mapping.costs.devices_per_node, DONE, :, :, 0].min(axis=2).T
        return minima.copy()

    def stages(self, interval: int, nodes: int) -> tuple[StageTemplate, ...]:
        """Follow the minima from the first stage to the last."""
        costs = self.mapping.costs
        total = left = nodes * costs.devices_per_node
        row, first, kind = int(self.best[left, DONE, interval, :, 0].argmin()), 0, DONE
        stages: list[StageTemplate] = []
        while first < costs.layers:
            option, kind, row, end = self._step(interval, left, kind, row, first)
            size = int(self.mapping.sizes[option])
            mode = costs.modes[self.mapping.modes[option]]
            stages.append(
                StageTemplate(
                    first_layer=first,
                    end_layer=end,
                    node_offset=(total - left) // costs.devices_per_node,
                    devices=size,
                    **mode.of(size)._asdict(),
                )
            )
            first, left = end, left - size
        return tuple(stages)

    def _step(self, k: int, left: int, state: int, row: int, first: int) -> tuple[int, int, int, int]:
        """Return the stage that gave a minimum: its option, the kind and the row of what follows it, and its
        end.

        The same additions in the same order give the same sum to the last bit.
        """
        wanted = self.best[left, state, k, row, first]
        allowed = self.mapping.allowed[left % len(self.mapping.allowed)]
        fitting = self._fitting(left, allowed)
        rows = [row] if self._rows == 1 else [row - 1] + ([row] if row == self._rows - 1 else [])
        for index in reversed(range(allowed)):
            size = int(self.mapping.sizes[index])
            for kind in (AT, DONE) if state == DONE else (AFTER,):
                for rest in rows:
                    low = self._from[index, kind, k, rest, first]
                    high = self._to[index, kind, k, rest, first] + 1
                    if self.mapping.loose:
                        high = min(high, fitting[index, first] + 1)
                    if low >= high:
                        continue
                    sums = (
                        self.best[left - size, kind, k, rest, low:high] + self._end_ms[index, kind, low:high]
                    )
                    end = int(sums.argmin())
                    if sums[end] + self._start_ms[index, kind, k, first] == wanted:
                        return index, DONE if kind == DONE else AFTER, rest, int(low) + end
        raise AssertionError("every minimum came from a stage")


def _doublings(lengths: Ints) -> Ints:
    """Return how often 1 can be doubled without exceeding a length; 0 for empty windows."""
    exponents: Ints = np.frexp(np.maximum(lengths, 1))[1].astype(np.int64)
    return exponents - 1
