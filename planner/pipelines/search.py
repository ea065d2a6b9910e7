"""The quickest pipelines of exactly N' nodes (Oobleck §4.2.1), found without enumerating them; exact.

Whether r templates can do the batch in a target time is an exact-fill knapsack
(planner/pipelines/knapsack.py). For one r the optimum is the first of the templates' step times within
which they can. All r are searched by branch and bound: a range of them is skipped where its linear program,
with the gradient all-reduce of its fewest pipelines (which only grows with their number), cannot do the
batch in less time than the best found so far.
"""

from bisect import bisect_left
from collections.abc import Sequence

import numpy as np

from planner.pipelines.knapsack import bound, fill, most_work
from planner.stages.clocks import Clocks
from planner.stages.costs import StageCosts
from planner.stages.makespan import ROUNDING, Floats, Ints
from planner.values import Template

PRECISION = 1e-9
"""Relative difference below which two iteration times count as equal."""

Found = tuple[float, int]
"""Milliseconds in which the batch can be done, and the number of templates that do it."""


COARSE_PRECISIONS = (3e-3, 3e-4, 3e-5)
"""Precisions of the searches before the last, so that the last does not pass through many small improvements."""

FEW_PIPELINES = 64
"""Number of step times up to which the target is looked for one by one."""


class Search:
    """Search over multisets of these templates, for one batch."""

    def __init__(self, costs: StageCosts, templates: Sequence[Template]) -> None:
        self._batch = costs.policy.microbatches
        self._ring = costs.profile.ring
        self._sizes: Ints = np.array([template.nodes for template in templates])
        self._clocks = Clocks([costs.pipeline_ms(template.stages) for template in templates])
        times = [costs.stage_times_ms(template.stages) for template in templates]
        self._slowest_ms: Floats = np.array([max(of_one) for of_one in times])
        self._once_ms: Floats = np.array([sum(of_one) for of_one in times])
        heaviest = [costs.gradient_bytes(template.stages) for template in templates]
        kinds = sorted({owners for of_one in heaviest for owners in of_one})
        self._owners: Ints = np.array(kinds)
        """Numbers of owners of the same elements in one pipeline, ascending."""
        self._gradient_bytes: Floats = np.array(
            [[of_one.get(owners, -1) for owners in kinds] for of_one in heaviest], dtype=np.float64
        )
        """``StageCosts.gradient_bytes`` by ``_owners``; negative where the template has none."""
        self._last: tuple[int, int] | None = None
        """Nodes and pipelines of the last result, where the next search begins."""

    def quickest(self, nodes: int, fewest: int, most: int) -> tuple[int, ...] | None:
        """Return the sizes, largest first, of ``fewest`` to ``most`` templates of exactly ``nodes`` nodes that
        take least time for the batch.

        Of equally quick choices it has the most templates. The result is ``None`` where there are none.
        """
        most = min(most, self._batch, nodes // int(self._sizes[0]))
        fewest = max(fewest, -(-nodes // int(self._sizes[-1])))
        best = self._guess(nodes, fewest, most) if fewest <= most else None
        if best is None:
            return None
        for precision in (*COARSE_PRECISIONS, PRECISION):
            best = self._improve(nodes, best, fewest, most, precision)
        best = self._most_as_good(nodes, best, most)
        self._last = nodes, best[1]
        return fill(self._sizes, self._shares(*best), nodes, best[1])

    def _improve(self, nodes: int, best: Found, fewest: int, most: int, precision: float) -> Found:
        """Return one of the quickest, to the precision. The more promising half is searched first."""
        ranges = [(fewest, most)]
        while ranges:
            low, high = ranges.pop()
            target_ms = best[0] * (1 - precision)
            if low == high:
                if self._can(nodes, low, self._shares(target_ms, low)):
                    best = self._quicken(nodes, (target_ms, low))
                continue
            middle = (low + high) // 2
            halves: list[tuple[float, int, int]] = []
            for first, last in ((low, middle), (middle + 1, high)):
                work = bound(self._sizes, self._shares(target_ms, first), nodes, first, last)
                if work >= self._batch * (1 - PRECISION):
                    halves.append((work, first, last))
            ranges += [(first, last) for _, first, last in sorted(halves)]
        return best

    def _most_as_good(self, nodes: int, best: Found, most: int) -> Found:
        """Return the result with the most pipelines among those as quick as the best."""
        target_ms = best[0] * (1 + PRECISION)
        ranges = [(best[1] + 1, most)] if best[1] < most else []
        while ranges:
            low, high = ranges.pop()
            shares = self._shares(target_ms, low)
            if bound(self._sizes, shares, nodes, low, high) < self._batch * (1 - PRECISION):
                continue
            if low < high:
                middle = (low + high) // 2
                ranges += [(low, middle), (middle + 1, high)]
            elif most_work(self._sizes, shares, nodes, low) >= self._batch:
                return self._quicken(nodes, (target_ms, low))
        return best

    def _guess(self, nodes: int, fewest: int, most: int) -> Found | None:
        """Return the quickest of the number of pipelines that seems best if all are about equally large."""
        counts = np.arange(fewest, most + 1)
        least = np.zeros(len(counts))
        for side in self._nearest(nodes, counts):
            rounds = -(-self._batch // counts) - 1
            sync_ms = self._sync_ms(side, counts)
            least = np.maximum(least, self._once_ms[side] + rounds * self._slowest_ms[side] + sync_ms)
        order = counts[np.argsort(least, kind="stable")].tolist()
        if self._last is not None:
            like_last = round(self._last[1] * nodes / self._last[0])
            order.insert(0, min(max(like_last, fewest), most))
        for count in order:
            found = self._any(nodes, count)
            if found is not None:
                return self._quicken(nodes, found)
        return None

    def _nearest(self, nodes: int, counts: Ints) -> tuple[Ints, Ints]:
        """Return the templates just below and just above ``nodes / counts`` nodes."""
        mean = nodes / counts
        below = np.searchsorted(self._sizes, mean, side="right") - 1
        return np.maximum(below, 0), np.minimum(np.searchsorted(self._sizes, mean), len(self._sizes) - 1)

    def _any(self, nodes: int, count: int) -> Found | None:
        """Return a time in which ``count`` templates can do the batch.

        The first time that is tried is that of about equal templates; it is doubled until it suffices. The
        result is ``None`` where no such templates have ``nodes`` nodes.
        """
        everything = np.full(len(self._sizes), self._batch)
        if most_work(self._sizes, everything, nodes, count) < 0:
            return None
        counts, share = np.array([count]), np.array([-(-self._batch // count)])
        target_ms = 0.0
        for side in self._nearest(nodes, counts):
            step_ms = self._clocks.times_ms(side, share) + self._sync_ms(side, counts)
            target_ms = max(target_ms, float(step_ms[0]))
        while not self._can(nodes, count, self._shares(target_ms, count)):
            target_ms *= 2
        return target_ms, count

    def _quicken(self, nodes: int, found: Found) -> Found:
        """Return the quickest with the same number of templates.

        The optimum is the step time of some template and share. The target is halved until few of these
        times are left; the first of them that suffices is the result.
        """
        enough_ms, count = found
        short_ms, reach = 0.0, 1 / 32
        all_done, none_done = self._shares(enough_ms, count), np.zeros(len(self._sizes), dtype=np.int64)
        while (all_done - none_done).sum() > FEW_PIPELINES:
            # The result so far is near the optimum, and times far below it are slow to compute.
            middle_ms = max((short_ms + enough_ms) / 2, enough_ms * (1 - reach))
            reach *= 2
            if not short_ms < middle_ms < enough_ms:
                break
            shares = self._shares(middle_ms, count)
            if self._can(nodes, count, shares):
                enough_ms, all_done = middle_ms, shares
            else:
                short_ms, none_done = middle_ms, shares
        number = all_done - none_done
        which = np.repeat(np.arange(len(number)), number)
        share = np.arange(len(which)) - np.repeat(np.cumsum(number) - number, number) + 1 + none_done[which]
        sync_ms = self._sync_ms(which, np.full(len(which), count))
        times: list[float] = np.unique(self._clocks.times_ms(which, share) + sync_ms).tolist()
        first = bisect_left(times, True, key=lambda ms: self._can(nodes, count, self._shares(ms, count)))
        return times[first] if first < len(times) else enough_ms, count

    def _can(self, nodes: int, count: int, shares: Ints) -> bool:
        """Return whether ``count`` templates of exactly ``nodes`` nodes can do the batch with these shares."""
        if bound(self._sizes, shares, nodes, count, count) < self._batch * (1 - PRECISION):
            return False
        return most_work(self._sizes, shares, nodes, count) >= self._batch

    def _shares(self, target_ms: float, pipelines: int) -> Ints:
        """Return the most microbatches of each template within the target, its all-reduce included."""
        everyone = np.arange(len(self._sizes))
        sync_ms = self._sync_ms(everyone, np.full(len(everyone), pipelines))
        # The rounding error of adding and subtracting the all-reduce must not cost a microbatch.
        return self._clocks.most(target_ms * (1 + ROUNDING) - sync_ms, self._batch)

    def _sync_ms(self, templates: Ints, pipelines: Ints) -> Floats:
        """Return ``StageCosts.sync_ms``, element by element. It never falls as ``pipelines`` grows."""
        owners = pipelines[:, None] * self._owners
        size_bytes = self._gradient_bytes[templates]
        # The same as Link.time_ms, for arrays.
        hop_ms = self._ring.latency_ms + size_bytes / owners / self._ring.bytes_per_s * 1e3
        of_kind = 2 * (owners - 1) * hop_ms
        slowest: Floats = np.where(size_bytes >= 0, of_kind, 0.0).max(axis=1)
        return slowest
