"""Batch distribution as integer programs (Pyomo): slow, and independent of the methods that they check.

min–max is linear, and HiGHS proves it; Eq. 6 is quadratic, and SCIP does.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

from planner.errors import SolverError
from planner.pipelines.batch import BatchObjective, Cost, check_batch, largest_share, microbatch_ms

SOLVER_LIMIT_S = 20.0
"""For an integer program: min–max of 72 pipelines with 4,096 microbatches takes 8 s."""


def distribute_for_by_model(
    objective: BatchObjective, costs: Sequence[Cost], microbatches: int
) -> tuple[int, ...]:
    """``batch.distribute_for`` by the program that belongs to the objective.

    :raises BatchError: fewer microbatches than pipelines.
    :raises SolverError: no proved optimum, for whatever reason.
    """
    if objective == "minmax":
        return distribute_by_model(costs, microbatches)
    return least_variance_by_model(microbatch_ms(costs, microbatches), microbatches)


def distribute_by_model(costs: Sequence[Cost], microbatches: int) -> tuple[int, ...]:
    """``batch.distribute`` as an integer program.

    gets[i, k] = 1 where pipeline i gets k microbatches; minimise slowest ≥ Σ_k cost_i(k)·gets[i, k].

    :raises BatchError: fewer microbatches than pipelines.
    :raises SolverError: Pyomo or HiGHS is not there or fails, or there is no proof within ``SOLVER_LIMIT_S``.
    """
    check_batch(microbatches, 1, len(costs))
    pyo = _pyomo()
    sensible = _sensible_shares(costs, microbatches)
    pairs = [(i, k) for i, shares in enumerate(sensible) for k in shares]
    unit_ms = max(cost(1) for cost in costs) or 1.0
    model: Any = pyo.ConcreteModel()
    model.gets = pyo.Var(pairs, domain=pyo.Binary)
    model.slowest = pyo.Var(domain=pyo.NonNegativeReals)
    model.whole = pyo.Constraint(expr=sum(k * model.gets[i, k] for i, k in pairs) == microbatches)
    model.one_share = pyo.ConstraintList()
    model.no_slower = pyo.ConstraintList()
    for i, cost in enumerate(costs):
        model.one_share.add(sum(model.gets[i, k] for k in sensible[i]) == 1)
        taken = sum(cost(k) / unit_ms * model.gets[i, k] for k in sensible[i])
        model.no_slower.add(taken <= model.slowest)
    model.objective = pyo.Objective(expr=model.slowest)
    _solved("HiGHS", lambda: _solve_linear(model))
    return tuple(
        next(k for k in shares if pyo.value(model.gets[i, k]) > 0.5) for i, shares in enumerate(sensible)
    )


def least_variance_by_model(times_ms: Sequence[float], microbatches: int) -> tuple[int, ...]:
    """``variance.least_variance`` as an integer program with quadratic constraints.

    Minimise Σ square_i with square_i ≥ (N_i·T_i − mean)². In the objective itself the squares would leave
    SCIP without a useful bound from nine pipelines on; and equal pipelines are put in order, as otherwise
    it would try all their permutations.

    :raises BatchError: fewer microbatches than pipelines.
    :raises SolverError: Pyomo or SCIP is not there or fails, or there is no proof within ``SOLVER_LIMIT_S``.
    """
    check_batch(microbatches, 1, len(times_ms))
    pyo = _pyomo()
    pipelines = range(len(times_ms))
    unit_ms = sum(times_ms) / len(times_ms) or 1.0
    model: Any = pyo.ConcreteModel()
    model.share = pyo.Var(pipelines, domain=pyo.Integers, bounds=(1, microbatches - len(times_ms) + 1))
    model.mean = pyo.Var(domain=pyo.NonNegativeReals)
    model.square = pyo.Var(pipelines, domain=pyo.NonNegativeReals)
    spent = [time_ms / unit_ms * model.share[i] for i, time_ms in enumerate(times_ms)]
    model.whole = pyo.Constraint(expr=sum(model.share[i] for i in pipelines) == microbatches)
    model.average = pyo.Constraint(expr=sum(spent) == len(spent) * model.mean)
    model.deviation = pyo.ConstraintList()
    for i in pipelines:
        model.deviation.add(model.square[i] >= (spent[i] - model.mean) ** 2)
    model.in_order = pyo.ConstraintList()
    for i, j in pairwise(sorted(pipelines, key=lambda i: times_ms[i])):
        if times_ms[i] == times_ms[j]:
            model.in_order.add(model.share[i] >= model.share[j])
    model.objective = pyo.Objective(expr=sum(model.square[i] for i in pipelines))
    _solved("SCIP", lambda: _solve_quadratic(model))
    return tuple(round(pyo.value(model.share[i])) for i in pipelines)


def _pyomo() -> Any:
    """:raises SolverError: Pyomo is not there."""
    # Half a second to import, and nothing on the way to recovery needs it.
    try:
        import pyomo.environ as pyo
    except ImportError as error:
        raise SolverError(f"Pyomo cannot be imported ({error})") from error
    return pyo


def _solved(solver: str, solve: Callable[[], str | None]) -> None:
    """Run ``solve``, which sets the model's variables to a proved optimum or says why it could not.

    :raises SolverError: there is none, for whatever reason.
    """
    try:
        failure = solve()
    except Exception as error:
        # Pyomo passes on what the solver raises, which depends on the versions of both.
        raise SolverError(f"{solver} failed: {error!r}") from error
    if failure is not None:
        raise SolverError(f"{solver} {failure}")


def _solve_linear(model: Any) -> str | None:
    from pyomo.contrib.appsi.base import TerminationCondition
    from pyomo.contrib.appsi.solvers import Highs

    solver = Highs()
    if not solver.available():
        return "cannot be used: the package highspy is missing or broken"
    solver.config.load_solution = False
    solver.config.time_limit = SOLVER_LIMIT_S
    solver.highs_options = {"mip_rel_gap": 0.0, "mip_abs_gap": 0.0, "threads": 1}
    found = solver.solve(model)
    if found.termination_condition == TerminationCondition.optimal:
        found.solution_loader.load_vars()
        return None
    return f"found no proved optimum ({found.termination_condition.name})"


def _solve_quadratic(model: Any) -> str | None:
    from pyomo.contrib.solver.common.factory import SolverFactory
    from pyomo.contrib.solver.common.results import TerminationCondition

    solver = SolverFactory("scip_direct")
    if not solver.available():
        return "cannot be used: the package pyscipopt is missing or broken"
    found = solver.solve(
        model,
        load_solutions=False,
        raise_exception_on_nonoptimal_result=False,
        time_limit=SOLVER_LIMIT_S,
        solver_options={"numerics/feastol": 1e-9},
    )
    if found.termination_condition == TerminationCondition.convergenceCriteriaSatisfied:
        found.solution_loader.load_vars()
        return None
    return f"found no proved optimum ({found.termination_condition.name})"


def _sensible_shares(costs: Sequence[Cost], microbatches: int) -> list[range]:
    """Shares that are not slower than an even split, and what the others must leave to each."""
    even, extra = divmod(microbatches, len(costs))
    enough_ms = max(cost(even + (i < extra)) for i, cost in enumerate(costs))
    most = [largest_share(cost, enough_ms, microbatches - len(costs) + 1) for cost in costs]
    return [range(max(1, microbatches - sum(most) + own), own + 1) for own in most]
