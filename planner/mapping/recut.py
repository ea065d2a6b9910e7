"""The best cuts for stages whose devices are given, each with its own speed (stragglers).

A few cuts are all enumerated. Of more, those that are best for several limits on the slowest stage's time
are candidates, and a local search continues from the best one.
"""

from collections.abc import Sequence
from itertools import combinations, pairwise
from math import comb, isfinite

import numpy as np
from msgspec.structs import replace

from planner.errors import InfeasibleError
from planner.mapping.quickest import quickest, shifted
from planner.stages.costs import StageCosts
from planner.stages.makespan import Floats, Ints
from planner.values import StageTemplate

ENUMERATED_CUTS = 5_000
"""Number of cuts up to which all are enumerated: about ten milliseconds."""
LIMITS = 24
"""Number of limits on the slowest stage's time, from the least possible one upwards, that give a candidate
each.
"""


def recut(
    costs: StageCosts, stages: Sequence[StageTemplate], slowness: Sequence[float], microbatches: int
) -> tuple[StageTemplate, ...]:
    """Return the same devices in the same order with the layers that minimise the time of ``microbatches``.

    The result is never slower than ``stages``, and optimal up to ``ENUMERATED_CUTS`` possible cuts.

    :param stages: a mapping that fits into memory; every stage keeps its devices and node.
    :param slowness: factor > 0 for forward and backward of each stage: 2 takes twice as long as the profile
        says.
    :raises InfeasibleError: ``slowness`` is not one positive number for each stage.
    """
    if len(slowness) != len(stages) or not all(isfinite(factor) and factor > 0 for factor in slowness):
        raise InfeasibleError(
            f"slowness is {list(slowness)} for {len(stages)} stages; it must be a number > 0 for each"
        )
    search = _Recut(costs, stages, slowness, microbatches)
    cut = costs.stages(search.best(), [stage.devices for stage in stages])
    return tuple(replace(new, node_offset=old.node_offset) for new, old in zip(cut, stages, strict=True))


class _Recut:
    def __init__(
        self, costs: StageCosts, stages: Sequence[StageTemplate], slowness: Sequence[float], microbatches: int
    ) -> None:
        self._costs, self._microbatches = costs, microbatches
        self._devices: Ints = np.array([stage.devices for stage in stages], dtype=np.int64)
        self._slowness: Floats = np.array(slowness, dtype=np.float64)
        self._given = [stage.first_layer for stage in stages] + [costs.layers]
        self._best_ms = np.inf
        self._cuts = self._given

    def best(self) -> list[int]:
        layers, stages = self._costs.layers, len(self._devices)
        if comb(layers - 1, stages - 1) <= ENUMERATED_CUTS:
            self._offer([[0, *inner, layers] for inner in combinations(range(1, layers), stages - 1)])
            return self._cuts
        self._offer([self._given, *self._candidates()])
        while self._offer(list(shifted(self._cuts))):
            pass
        return self._cuts

    def _offer(self, rows: list[list[int]]) -> bool:
        """Take the quickest of these cuts if it is quicker than the best so far, and return whether it is."""
        if not rows:
            return False
        cuts = np.array(rows, dtype=np.int64)
        devices = np.broadcast_to(self._devices, (len(rows), len(self._devices)))
        found = quickest(
            self._costs, cuts, devices, self._microbatches, slowness=self._slowness, below_ms=self._best_ms
        )
        if found is None:
            return False
        self._best_ms = found[0]
        self._cuts = [stage.first_layer for stage in found[1]] + [self._costs.layers]
        return True

    def _candidates(self) -> list[list[int]]:
        """Return the cuts with the least work before plus twice the work after the slowest stage, for several
        limits.

        They minimise the path of ``path_bounds`` for a slowest stage k in time B: Σ t + Σ_{j>k} (t_j − B) +
        (N − 1)·B.
        """
        stages = len(self._devices)
        time_ms = np.array(
            [
                self._costs.quickest_ms(int(devices), stages - 1 - stage) * slowness
                for stage, (devices, slowness) in enumerate(zip(self._devices, self._slowness, strict=True))
            ]
        )
        least = _least(time_ms, np.maximum)
        if least is None:
            return []
        slowest_ms = max(float(time_ms[s, u, v]) for s, (u, v) in enumerate(pairwise(least)))
        limits = np.unique(time_ms)
        limits = limits[np.isfinite(limits) & (limits >= slowest_ms)][:LIMITS]
        links = 2 * self._costs.link_ms
        found = [least]
        for limit in limits:
            within = np.where(time_ms <= limit, time_ms + links, np.inf)
            # The sums as if the slowest stage were the last one, or the first.
            for sums in (within, within + time_ms):
                cuts = _least(sums, np.add)
                if cuts is not None:
                    found.append(cuts)
        return found


def _least(stage_ms: Floats, together: np.ufunc) -> list[int] | None:
    """Return the cuts that minimise the sum (or maximum) over stages of ``stage_ms[s, u, v]``, shape (S, L +
    1, L + 1).

    The result is ``None`` if every choice of cuts is infinite.
    """
    stages, width = stage_ms.shape[:2]
    rest = np.full(width, np.inf)
    rest[-1] = 0.0
    ends: list[Ints] = []
    for stage in reversed(range(stages)):
        sums = together(stage_ms[stage], rest)
        chosen = sums.argmin(axis=1)
        ends.append(chosen)
        rest = sums[np.arange(width), chosen]
    if not np.isfinite(rest[0]):
        return None
    cuts = [0]
    for chosen in reversed(ends):
        cuts.append(int(chosen[cuts[-1]]))
    return cuts
