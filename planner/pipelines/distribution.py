"""The method by which a policy distributes the batch: combinatorial, or integer programs."""

from collections.abc import Sequence

from planner.pipelines.batch import Cost, distribute, microbatch_ms
from planner.pipelines.programs import distribute_by_model, least_variance_by_model
from planner.pipelines.variance import least_variance
from planner.values import BatchObjective, BatchSolver


def distribute_batch(
    objective: BatchObjective, costs: Sequence[Cost], microbatches: int, solver: BatchSolver = "exact"
) -> tuple[int, ...]:
    """Return the shares that are best by ``Policy.batch_objective``, found by ``Policy.batch_solver``.

    Both solvers prove the optimum; where several shares are equally good, they may return different ones.

    :raises BatchError: fewer microbatches than pipelines.
    :raises SolverError: the Pyomo model was not solved.
    """
    by_model = solver == "pyomo"
    if objective == "minmax":
        return distribute_by_model(costs, microbatches) if by_model else distribute(costs, microbatches)
    times_ms = microbatch_ms(costs, microbatches)
    if by_model:
        return least_variance_by_model(times_ms, microbatches)
    return least_variance(times_ms, microbatches)
