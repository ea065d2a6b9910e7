"""Batch distribution as integer programs, modelled with Pyomo and solved by HiGHS.

They are slower than the combinatorial methods of planner/pipelines/batch.py and variance.py, and independent of them:
``ftd plan --check`` compares the two, and a job may ask for the models with ``[planner] batch_solver = "pyomo"``.
Pyomo is imported by the first call that solves something.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from planner.errors import SolverError
from planner.pipelines.batch import Cost, by_pipeline, check_batch, kinds_of, largest_share

SOLVER_LIMIT_S = 20.0
"""Limit of the solver's time for one distribution, all rounds of cuts included."""

FIRST_TANGENTS = (-1.0, -0.5, 0.0, 0.5, 1.0)
"""Deviations from the mean, in microbatches of the pipeline, at which the first tangents touch the square: shares that
are rounded from an even split deviate by about so much."""

PROVED_GAP = 1e-9
"""Largest gap, relative to the sum of squares or to the square of the slowest pipeline's time of a microbatch,
whichever is larger, at which a distribution counts as optimal: the rounding of 64-bit numbers, and no more."""

_OPTIONS = {
    "mip_rel_gap": 0.0,
    "mip_abs_gap": 0.0,
    "mip_feasibility_tolerance": 1e-9,
    "primal_feasibility_tolerance": 1e-10,
    "dual_feasibility_tolerance": 1e-10,
    "threads": 1,
}


def distribute_by_model(costs: Sequence[Cost], microbatches: int) -> tuple[int, ...]:
    """Return the shares with the least maximum cost, by a linear integer program.

    Pipelines of equal cost are one kind, and its members' shares differ by one microbatch at most. most[g, k] = 1
    where k is the largest share in kind g, and given[g] is the sum of the kind's shares. The program minimises
    slowest ≥ Σ_k cost_g(k)·most[g, k].

    :raises BatchError: fewer microbatches than pipelines.
    :raises SolverError: Pyomo or HiGHS is missing or fails, or there is no proof within ``SOLVER_LIMIT_S``.
    """
    check_batch(microbatches, 1, len(costs))
    pyo = _pyomo()
    kinds = kinds_of(costs)
    counts = [len(indices) for indices in kinds.values()]
    sensible = _sensible_shares(list(kinds), counts, microbatches)
    pairs = [(g, k) for g, shares in enumerate(sensible) for k in shares]
    unit_ms = max(cost(1) for cost in kinds) or 1.0
    model: Any = pyo.ConcreteModel()
    model.most = pyo.Var(pairs, domain=pyo.Binary)
    model.given = pyo.Var(range(len(counts)), domain=pyo.Integers, bounds=(0, microbatches))
    model.slowest = pyo.Var(domain=pyo.NonNegativeReals)
    model.whole = pyo.Constraint(expr=sum(model.given.values()) == microbatches)
    model.of_kind = pyo.ConstraintList()
    for g, cost in enumerate(kinds):
        model.of_kind.add(sum(model.most[g, k] for k in sensible[g]) == 1)
        model.of_kind.add(model.given[g] >= counts[g])
        model.of_kind.add(model.given[g] <= counts[g] * sum(k * model.most[g, k] for k in sensible[g]))
        taken = sum(cost(k) / unit_ms * model.most[g, k] for k in sensible[g])
        model.of_kind.add(taken <= model.slowest)
    model.objective = pyo.Objective(expr=model.slowest)
    _Solver(model).solve()
    given = [divmod(round(pyo.value(model.given[g])), count) for g, count in enumerate(counts)]
    return by_pipeline(kinds, [share for share, _ in given], [extra for _, extra in given])


def least_variance_by_model(times_ms: Sequence[float], microbatches: int) -> tuple[int, ...]:
    """Return the shares with the least variance of the pipelines' times (Eq. 6), by linear integer programs.

    Minimise Σ square_i with square_i ≥ deviation_i² and deviation_i = N_i·T_i − mean. Each tangent
    square_i ≥ 2d·deviation_i − d² is a linear bound from below, so the program with some tangents in place of the
    squares has an optimum that is at most the true one. It is solved again with the tangents that touch at its own
    solution, until the best solution so far is no worse than that bound. A solution that comes a second time is exact
    in its bound, and there are finitely many shares, so the rounds end. Pipelines of equal time are put in order, since
    the solver would otherwise try all their permutations.

    :raises BatchError: fewer microbatches than pipelines.
    :raises SolverError: Pyomo or HiGHS is missing or fails, or there is no proof within ``SOLVER_LIMIT_S``.
    """
    check_batch(microbatches, 1, len(times_ms))
    pyo = _pyomo()
    pipelines = range(len(times_ms))
    slowest_ms = max(times_ms) or 1.0
    times = [time_ms / slowest_ms for time_ms in times_ms]
    model: Any = pyo.ConcreteModel()
    model.share = pyo.Var(pipelines, domain=pyo.Integers, bounds=(1, microbatches - len(times) + 1))
    model.mean = pyo.Var(domain=pyo.NonNegativeReals)
    model.deviation = pyo.Var(pipelines)
    model.square = pyo.Var(pipelines, domain=pyo.NonNegativeReals)
    model.whole = pyo.Constraint(expr=sum(model.share.values()) == microbatches)
    model.average = pyo.Constraint(expr=sum(model.deviation.values()) == 0)
    model.deviates = pyo.Constraint(
        pipelines, rule=lambda model, i: model.deviation[i] == times[i] * model.share[i] - model.mean
    )
    model.in_order = pyo.ConstraintList()
    for i, j in pairwise(sorted(pipelines, key=lambda i: times[i])):
        if times[i] == times[j]:
            model.in_order.add(model.share[i] >= model.share[j])
            model.in_order.add(model.share[i] <= model.share[j] + 1)
    model.tangents = pyo.ConstraintList()
    model.objective = pyo.Objective(expr=sum(model.square.values()))

    def touch(deviations: Sequence[float]) -> None:
        for i, at in enumerate(deviations):
            model.tangents.add(model.square[i] >= 2 * at * model.deviation[i] - at**2)

    for part in FIRST_TANGENTS:
        touch([part * time for time in times])
    solver = _Solver(model)
    best: tuple[int, ...] = ()
    least = float("inf")
    while True:
        bound = solver.solve()
        shares = tuple(round(pyo.value(model.share[i])) for i in pipelines)
        spent = [share * time for share, time in zip(shares, times, strict=True)]
        mean = sum(spent) / len(spent)
        squares = sum((each - mean) ** 2 for each in spent)
        if squares < least:
            best, least = shares, squares
        if bound >= least - PROVED_GAP * max(1.0, least):
            return best
        touch([each - mean for each in spent])


def check_solver() -> None:
    """Solve a small program, so that a solver that cannot be used is noticed before a job depends on it.

    :raises SolverError: Pyomo or HiGHS is missing or fails.
    """
    least_variance_by_model((1.0, 2.0), 4)


def _pyomo() -> Any:
    """:raises SolverError: Pyomo cannot be imported."""
    # It takes half a second to import, and the combinatorial methods do not need it.
    try:
        import pyomo.environ as pyo
    except ImportError as error:
        raise SolverError(f"Pyomo cannot be imported ({error})") from error
    return pyo


class _Solver:
    """HiGHS for one model, which may get further constraints between two solutions."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._highs: Any = None
        self._left_s = SOLVER_LIMIT_S

    def solve(self) -> float:
        """Set the model's variables to a proved optimum and return the proved bound of the objective.

        :raises SolverError: the solver did not prove an optimum, for whatever reason.
        """
        try:
            failure, bound = self._solve()
        except Exception as error:
            # Pyomo passes on what the solver raises, which depends on the versions of both.
            raise SolverError(f"HiGHS failed: {error!r}") from error
        if failure:
            raise SolverError(f"HiGHS {failure}")
        return bound

    def _solve(self) -> tuple[str, float]:
        from pyomo.contrib.appsi.base import TerminationCondition
        from pyomo.contrib.appsi.solvers import Highs

        if self._highs is None:
            self._highs = Highs()
            if not self._highs.available():
                return "cannot be used: the package highspy is missing or broken", 0.0
            self._highs.config.load_solution = False
            self._highs.highs_options = _OPTIONS
        if self._left_s <= 0:
            return f"found no proved optimum within {SOLVER_LIMIT_S:g} s", 0.0
        self._highs.config.time_limit = self._left_s
        found = self._highs.solve(self._model)
        # HiGHS limits each run and adds up the time of all of them.
        self._left_s = SOLVER_LIMIT_S - found.wallclock_time
        if found.termination_condition != TerminationCondition.optimal:
            return f"found no proved optimum ({found.termination_condition.name})", 0.0
        found.solution_loader.load_vars()
        return "", float(found.best_objective_bound)


def _sensible_shares(kinds: Sequence[Cost], counts: Sequence[int], microbatches: int) -> list[range]:
    """Return, for each kind, the largest shares that can be optimal: not slower than an even split, and no smaller than
    what the others must leave."""
    enough_ms = max(cost(-(-microbatches // sum(counts))) for cost in kinds)
    most = [largest_share(cost, enough_ms, microbatches - sum(counts) + 1) for cost in kinds]
    room = sum(count * own for count, own in zip(counts, most, strict=True))
    return [
        range(max(1, own - (room - microbatches) // count), own + 1)
        for count, own in zip(counts, most, strict=True)
    ]
