"""Choice of the pipelines for N' nodes (Oobleck §4.2.1), and of each one's share of the batch (§4.2.2).

The templates are those with the quickest step (planner/pipelines/search.py). A step is as long as its
slowest pipeline takes, whatever the shares minimise; so with ``batch_objective = "variance"`` the templates
are the same, and only their shares follow Eq. 6.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial

from planner.errors import TooFewNodesError
from planner.pipelines.batch import check_batch
from planner.pipelines.distribution import distribute_batch
from planner.pipelines.search import Search
from planner.stages.costs import StageCosts
from planner.stages.makespan import PipelineClock
from planner.templates import Templates


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
    """Instantiations of one set of templates, cached so that a failure costs only a look-up."""

    def __init__(self, costs: StageCosts, templates: Templates) -> None:
        self._policy = costs.policy
        self.templates = templates
        self._costs = costs
        self._clocks: dict[int, PipelineClock] = {
            size: costs.clock(template.stages) for size, template in templates.by_nodes.items()
        }
        self._sync_ms: dict[tuple[int, int], float] = {}
        self._of: dict[tuple[int, ...], Instantiation] = {}
        self._best: dict[int, Instantiation] = {}

    @cached_property
    def _search(self) -> Search:
        return Search(self._costs, tuple(self.templates.by_nodes.values()))

    def cost_ms(self, size: int, pipelines: int, microbatches: int) -> float:
        """Return the time of a step of a pipeline of ``size`` nodes with ``microbatches``, as one of
        ``pipelines``.
        """
        key = (size, pipelines)
        sync_ms = self._sync_ms.get(key)
        if sync_ms is None:
            stages = self.templates.by_nodes[size].stages
            sync_ms = self._sync_ms[key] = self._costs.sync_ms(stages, pipelines)
        return self._clocks[size].makespan_ms(microbatches) + sync_ms

    def required(self, nodes: int) -> int:
        """Return the least number of pipelines on ``nodes`` nodes: f + 1, or as many as replicas and
        microbatches permit.
        """
        return min(self._policy.tolerate + 1, nodes // self.templates.n0, self._policy.microbatches)

    def of(self, sizes: Sequence[int]) -> Instantiation:
        """Return these pipelines with the shares that are best by ``Policy.batch_objective``.

        :raises BatchError: more pipelines than microbatches.
        """
        ordered = tuple(sorted(sizes, reverse=True))
        known = self._of.get(ordered)
        if known is None:
            per_size = {size: partial(self.cost_ms, size, len(ordered)) for size in set(ordered)}
            costs = [per_size[size] for size in ordered]
            check_batch(self._policy.global_batch, self._policy.microbatch_rows, len(ordered))
            policy = self._policy
            shares = distribute_batch(policy.batch_objective, costs, policy.microbatches, policy.batch_solver)
            known = self._of[ordered] = Instantiation(
                sizes=ordered,
                microbatches=shares,
                pipeline_ms=tuple(cost(share) for cost, share in zip(costs, shares, strict=True)),
            )
        return known

    def best(self, nodes: int) -> Instantiation:
        """Return the quickest instantiation with ``required`` pipelines or more, on all of ``nodes`` ≥ n₀
        nodes.

        Where all cannot be used (too few layers or microbatches, or gaps between template sizes), it uses
        as many as possible. Among equally quick ones, it has the most pipelines: more replicas of every
        layer.

        :raises TooFewNodesError: fewer nodes than the smallest template has.
        """
        known = self._best.get(nodes)
        if known is None:
            smallest = self.templates.sizes[0]
            if nodes < smallest:
                raise TooFewNodesError(
                    f"{nodes} nodes are fewer than the {smallest} of the smallest template",
                    needed=smallest,
                    present=nodes,
                )
            fewest, most = self.required(nodes), self._policy.microbatches
            sizes: tuple[int, ...] | None = None
            used = min(nodes, most * self.templates.sizes[-1]) + 1
            while sizes is None:
                used -= 1
                sizes = self._search.quickest(used, fewest, most)
            known = self._best[nodes] = self.of(sizes)
        return known

    @property
    def known(self) -> dict[int, Instantiation]:
        """Results of ``best`` so far."""
        return dict(self._best)

    def remember(self, nodes: int, found: Instantiation) -> None:
        """Add ``found`` as the result of ``best(nodes)``, computed before, perhaps in another process."""
        self._best[nodes] = self._of[found.sizes] = found
