"""Batch distribution (Oobleck §4.2.2, Eq. 6): how many microbatches each pipeline computes.

The global batch is the user's and never changed. Shares minimise the slowest pipeline's time, and every
pipeline gets at least one microbatch. Shares are per pipeline, not per template: three equal pipelines share
128 microbatches as 43, 43, 42.
"""

from collections.abc import Callable, Sequence
from heapq import heapify, heapreplace
from typing import Any

from planner.errors import BatchError, SolverError

Cost = Callable[[int], float]
"""Milliseconds for a number of microbatches ≥ 1; never falls as the number grows."""

NARROWINGS = 16
"""Halvings of the target time before single microbatches are handed out."""

SOLVER_LIMIT_S = 20.0
"""For the integer program: 72 pipelines with 4,096 microbatches take 8 s."""


def check_batch(global_batch: int, microbatch_rows: int, pipelines: int) -> None:
    """Whether the batch can be distributed to that many pipelines.

    :raises BatchError: not a multiple of the microbatch, or fewer microbatches than pipelines.
    """
    microbatches, left_over = divmod(global_batch, microbatch_rows)
    if not left_over and microbatches >= pipelines:
        return
    candidates = {max(microbatches, pipelines), max(microbatches + bool(left_over), pipelines)}
    nearest = tuple(sorted(count * microbatch_rows for count in candidates))
    what = (
        f"is not a multiple of the microbatch of {microbatch_rows}"
        if left_over
        else f"has {microbatches} microbatches of {microbatch_rows} for {pipelines} pipelines"
    )
    recommended = " or ".join(map(str, nearest))
    raise BatchError(f"global_batch {global_batch} {what}; the nearest that works is {recommended}", nearest)


def largest_share(cost: Cost, target_ms: float, limit: int) -> int:
    """The most microbatches, at most ``limit``, that ``cost`` does within ``target_ms``; 0 if none."""
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        if cost(middle) <= target_ms:
            low = middle
        else:
            high = middle - 1
    return low


def distribute(costs: Sequence[Cost], microbatches: int) -> tuple[int, ...]:
    """The shares with the least maximum cost; exact.

    Handing each microbatch to whoever is then quickest is optimal as costs only grow. All that a pipeline
    does within a time too short for the whole batch would be handed out first, so that is found by halving.

    :raises BatchError: fewer microbatches than pipelines.
    """
    check_batch(microbatches, 1, len(costs))
    short_ms, enough_ms = 0.0, max(cost(microbatches) for cost in costs)
    base = [1] * len(costs)
    for _ in range(NARROWINGS):
        target_ms = (short_ms + enough_ms) / 2
        shares = [max(1, largest_share(cost, target_ms, microbatches)) for cost in costs]
        if sum(shares) <= microbatches:
            short_ms, base = target_ms, shares
        else:
            enough_ms = target_ms
    return _hand_out(costs, base, microbatches)


def _hand_out(costs: Sequence[Cost], base: list[int], microbatches: int) -> tuple[int, ...]:
    shares = list(base)
    queue = [(cost(shares[index] + 1), index) for index, cost in enumerate(costs)]
    heapify(queue)
    for _ in range(microbatches - sum(shares)):
        _, index = queue[0]
        shares[index] += 1
        heapreplace(queue, (costs[index](shares[index] + 1), index))
    return tuple(shares)


def distribute_by_model(costs: Sequence[Cost], microbatches: int) -> tuple[int, ...]:
    """``distribute`` as an integer program (Pyomo, solved by HiGHS): slower, and independent of it.

    gets[i, k] = 1 where pipeline i gets k microbatches; minimise slowest ≥ Σ_k cost_i(k)·gets[i, k].

    :raises BatchError: fewer microbatches than pipelines.
    :raises SolverError: Pyomo or HiGHS is not there or fails, or there is no proof within ``SOLVER_LIMIT_S``.
    """
    check_batch(microbatches, 1, len(costs))
    # Half a second to import, and nothing on the way to recovery needs it.
    try:
        import pyomo.environ as pyo
    except ImportError as error:
        raise SolverError(f"Pyomo cannot be imported ({error})") from error

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
    _solve(model)
    return tuple(
        next(k for k in shares if pyo.value(model.gets[i, k]) > 0.5) for i, shares in enumerate(sensible)
    )


def _solve(model: Any) -> None:
    """Set the model's variables to a proved optimum.

    :raises SolverError: there is none, for whatever reason.
    """
    from pyomo.contrib.appsi.base import TerminationCondition
    from pyomo.contrib.appsi.solvers import Highs

    solver = Highs()
    if not solver.available():
        raise SolverError("the package highspy (HiGHS) is missing or broken")
    solver.config.load_solution = False
    solver.config.time_limit = SOLVER_LIMIT_S
    solver.highs_options = {"mip_rel_gap": 0.0, "mip_abs_gap": 0.0, "threads": 1}
    try:
        found = solver.solve(model)
        if found.termination_condition == TerminationCondition.optimal:
            found.solution_loader.load_vars()
            return
    except Exception as error:
        # Pyomo passes on what the solver raises, which depends on the versions of both.
        raise SolverError(f"HiGHS failed: {error!r}") from error
    raise SolverError(f"HiGHS found no proved optimum ({found.termination_condition.name})")


def _sensible_shares(costs: Sequence[Cost], microbatches: int) -> list[range]:
    """Shares that are not slower than an even split, and what the others must leave to each."""
    even, extra = divmod(microbatches, len(costs))
    enough_ms = max(cost(even + (i < extra)) for i, cost in enumerate(costs))
    most = [largest_share(cost, enough_ms, microbatches - len(costs) + 1) for cost in costs]
    return [range(max(1, microbatches - sum(most) + own), own + 1) for own in most]
