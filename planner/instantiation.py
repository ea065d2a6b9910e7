"""Which pipelines to make of N' nodes (Oobleck §4.2.1), and each one's share of the batch (§4.2.2).

For a target time each template can do a largest number of microbatches; an exact-fill knapsack (r templates
that take exactly N' nodes, most microbatches) says whether the whole batch can be done in the target, and a
search over the target finds the optimum. No enumeration of multisets.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from planner.batch import check_batch, distribute_for, largest_share
from planner.costs import StageCosts
from planner.makespan import PipelineClock
from planner.templates import Templates

PRECISION = 1e-9
"""Relative: two iteration times that differ by less count as equal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Instantiation:
    """Pipelines by the nodes of their templates, largest first, with their shares of the batch."""

    sizes: tuple[int, ...]
    microbatches: tuple[int, ...]
    pipeline_ms: tuple[float, ...]
    """Estimated time of one step of each pipeline, its gradient all-reduce included."""

    @property
    def nodes(self) -> int:
        return sum(self.sizes)

    @property
    def iteration_ms(self) -> float:
        return max(self.pipeline_ms)


class Instantiator:
    """Answers for one set of templates, remembered: a failure costs a look-up."""

    def __init__(self, costs: StageCosts, templates: Templates) -> None:
        self._policy = costs.policy
        self._templates = templates
        self._costs = costs
        self._clocks: dict[int, PipelineClock] = {
            size: costs.clock(template.stages) for size, template in templates.by_nodes.items()
        }
        self._sync_ms: dict[tuple[int, int], float] = {}
        self._of: dict[tuple[int, ...], Instantiation] = {}
        self._best: dict[int, Instantiation] = {}

    def cost_ms(self, size: int, pipelines: int, microbatches: int) -> float:
        """One step of a pipeline of ``size`` nodes with so many microbatches, one of ``pipelines``."""
        key = (size, pipelines)
        sync_ms = self._sync_ms.get(key)
        if sync_ms is None:
            stages = self._templates.by_nodes[size].stages
            sync_ms = self._sync_ms[key] = self._costs.sync_ms(stages, pipelines)
        return self._clocks[size].makespan_ms(microbatches) + sync_ms

    def required(self, nodes: int) -> int:
        """Pipelines wanted of ``nodes`` nodes: f+1, or as many replicas and shares as there can be."""
        return min(self._policy.tolerate + 1, nodes // self._templates.n0, self._policy.microbatches)

    def of(self, sizes: Sequence[int]) -> Instantiation:
        """These pipelines with the shares that are best by ``Policy.batch_objective``.

        :raises BatchError: more pipelines than microbatches.
        """
        ordered = tuple(sorted(sizes, reverse=True))
        known = self._of.get(ordered)
        if known is None:
            per_size = {size: partial(self.cost_ms, size, len(ordered)) for size in set(ordered)}
            costs = [per_size[size] for size in ordered]
            check_batch(self._policy.global_batch, self._policy.microbatch_rows, len(ordered))
            shares = distribute_for(self._policy.batch_objective, costs, self._policy.microbatches)
            known = self._of[ordered] = Instantiation(
                sizes=ordered,
                microbatches=shares,
                pipeline_ms=tuple(cost(share) for cost, share in zip(costs, shares, strict=True)),
            )
        return known

    def best(self, nodes: int) -> Instantiation:
        """The quickest with ``required`` pipelines or more, on all of ``nodes`` ≥ n₀ nodes.

        Where all cannot be used (too few layers or microbatches, or gaps between template sizes), on as
        many as can. Among equally quick ones, the most pipelines: more copies of every layer.
        """
        known = self._best.get(nodes)
        if known is None:
            found: Instantiation | None = None
            used = nodes
            while found is None:
                found = self._best_of_exactly(used, self.required(nodes))
                used -= 1
            known = self._best[nodes] = found
        return known

    @property
    def known(self) -> dict[int, Instantiation]:
        """What ``best`` has answered so far."""
        return dict(self._best)

    def remember(self, nodes: int, found: Instantiation) -> None:
        """``found`` is what ``best(nodes)`` answered before, perhaps in another process."""
        self._best[nodes] = self._of[found.sizes] = found

    def _best_of_exactly(self, nodes: int, fewest: int) -> Instantiation | None:
        found: Instantiation | None = None
        most = min(self._policy.microbatches, nodes // self._templates.n0)
        for pipelines in range(most, fewest - 1, -1):
            target_ms = np.inf if found is None else found.iteration_ms * (1 - PRECISION)
            sizes = self._fill(nodes, pipelines, target_ms)
            if sizes is not None:
                found = self._quicken(nodes, self.of(sizes))
        return found

    def _quicken(self, nodes: int, found: Instantiation) -> Instantiation:
        """The quickest with the same number of pipelines: halve the target's interval until it is empty."""
        short_ms, pipelines = 0.0, len(found.sizes)
        while found.iteration_ms - short_ms > PRECISION * found.iteration_ms:
            target_ms = (short_ms + found.iteration_ms) / 2
            sizes = self._fill(nodes, pipelines, target_ms)
            if sizes is None:
                short_ms = target_ms
            else:
                found = self.of(sizes)
        return found

    def _fill(self, nodes: int, pipelines: int, target_ms: float) -> tuple[int, ...] | None:
        """``pipelines`` templates of exactly ``nodes`` nodes that do the whole batch in ``target_ms``.

        ``most[c][m]`` is the largest number of microbatches that c templates of m nodes in all can do in
        the target, negative where there are no such templates. Shape (r + 1, N' + 1).
        """
        batch = self._policy.microbatches
        shares = {size: batch for size in self._templates.sizes if size <= nodes}
        if target_ms < np.inf:
            for size in shares:
                shares[size] = largest_share(partial(self.cost_ms, size, pipelines), target_ms, batch)
        useful = {size: share for size, share in shares.items() if share}
        impossible = -(pipelines + 1) * batch
        most = np.full((pipelines + 1, nodes + 1), impossible, dtype=np.int64)
        most[0, 0] = 0
        for count in range(1, pipelines + 1):
            for size, share in useful.items():
                grown = most[count - 1, : nodes + 1 - size] + share
                np.maximum(most[count, size:], grown, out=most[count, size:])
        if most[pipelines, nodes] < batch:
            return None
        sizes, left = [], nodes
        for count in range(pipelines, 0, -1):
            wanted = most[count, left]
            size = next(s for s, n in useful.items() if s <= left and most[count - 1, left - s] + n == wanted)
            sizes.append(size)
            left -= size
        return tuple(sizes)
