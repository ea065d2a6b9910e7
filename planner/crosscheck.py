"""A second opinion on the shares of a plan: the same batch, distributed by an integer program."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from planner.makespan import PipelineClock
from planner.preview import Preview
from planner.programs import distribute_by_model


@dataclass(frozen=True, slots=True, kw_only=True)
class CrossCheck:
    """The batch distribution of a plan, by the planner's own method and by an integer program."""

    microbatches: tuple[int, ...]
    """In the order of the plan's pipelines."""
    iteration_ms: float
    model_microbatches: tuple[int, ...]
    model_iteration_ms: float

    @property
    def agrees(self) -> bool:
        """Equally quick, to the solver's tolerance; the shares themselves may differ."""
        return abs(self.iteration_ms - self.model_iteration_ms) <= 1e-6 * self.iteration_ms


def cross_check(seen: Preview) -> CrossCheck:
    """Distribute the batch to the chosen pipelines again, with Pyomo: about a second.

    :raises SolverError: the solver is not there, or found no proved optimum.
    """
    chosen, pipelines = seen.instantiation, len(seen.instantiation.sizes)
    per_size: dict[int, Callable[[int], float]] = {}
    for size in chosen.sizes:
        if size not in per_size:
            stages = seen.templates[size].stages
            sync_ms = seen.costs.sync_ms(stages, pipelines)
            per_size[size] = partial(_step_ms, seen.costs.clock(stages), sync_ms)
    costs = [per_size[size] for size in chosen.sizes]
    shares = distribute_by_model(costs, seen.costs.policy.microbatches)
    return CrossCheck(
        microbatches=chosen.microbatches,
        iteration_ms=chosen.iteration_ms,
        model_microbatches=shares,
        model_iteration_ms=max(cost(share) for cost, share in zip(costs, shares, strict=True)),
    )


def _step_ms(clock: PipelineClock, sync_ms: float, microbatches: int) -> float:
    return clock.makespan_ms(microbatches) + sync_ms
