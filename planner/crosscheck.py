"""Comparison of a plan's shares of the batch with those of the other method: combinatorial, or an integer program."""

from dataclasses import dataclass

from planner.pipelines.batch import score_ms
from planner.pipelines.distribution import distribute_batch
from planner.preview import Preview


@dataclass(frozen=True, slots=True, kw_only=True)
class CrossCheck:
    """The batch distribution of a plan by the planner's own method, and by an integer program.

    One of the two is the plan's (``Policy.batch_solver``). A score is what ``Policy.batch_objective``
    minimises (``batch.score_ms``).
    """

    microbatches: tuple[int, ...]
    """Microbatches of each pipeline, in the plan's order."""
    score_ms: float
    model_microbatches: tuple[int, ...]
    model_score_ms: float
    iteration_ms: float

    @property
    def agrees(self) -> bool:
        """Whether both distributions are equally good, to the solver's tolerance; the shares themselves may
        differ.
        """
        return abs(self.score_ms - self.model_score_ms) <= 1e-6 * self.iteration_ms


def cross_check(seen: Preview) -> CrossCheck:
    """Distribute the batch to the chosen pipelines by the method that the plan did not use.

    The integer program takes up to some seconds.

    :raises SolverError: the solver is not there, or found no proved optimum.
    """
    chosen, policy = seen.instantiation, seen.costs.policy
    pipelines = len(chosen.sizes)
    per_size = {
        size: seen.costs.step_cost(seen.templates[size].stages, pipelines) for size in set(chosen.sizes)
    }
    costs = [per_size[size] for size in chosen.sizes]
    objective, own, modelled = policy.batch_objective, chosen.microbatches, chosen.microbatches
    if policy.batch_solver == "pyomo":
        own = distribute_batch(objective, costs, policy.microbatches, "exact")
    else:
        modelled = distribute_batch(objective, costs, policy.microbatches, "pyomo")
    return CrossCheck(
        microbatches=own,
        score_ms=score_ms(objective, costs, own),
        model_microbatches=modelled,
        model_score_ms=score_ms(objective, costs, modelled),
        iteration_ms=chosen.iteration_ms,
    )
