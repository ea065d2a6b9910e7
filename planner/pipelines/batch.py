"""Batch distribution (Oobleck §4.2.2, Eq. 6): how many microbatches each pipeline computes.

The user sets the global batch, and it never changes. Every pipeline gets at least one microbatch. Shares
are per pipeline, not per template: three equal pipelines share 128 microbatches as 43, 43, 42. They
minimise the slowest pipeline's time or, where the user selects Eq. 6 itself, the variance of the pipelines'
times (planner/pipelines/variance.py). Equal pipelines are handled together, so thousands of them cost no
more than a few.
"""

from collections.abc import Callable, Sequence
from heapq import heapify, heappop, heappush
from statistics import pstdev

from planner.errors import BatchError
from planner.values import BatchObjective

Cost = Callable[[int], float]
"""Milliseconds for a number of microbatches ≥ 1; never falls as the number grows. Pipelines whose costs are
the same object, or equal ones, are of the same kind.
"""

NARROWINGS = 16
"""Halvings of the target time before single microbatches are distributed."""


def check_batch(global_batch: int, microbatch_rows: int, pipelines: int) -> None:
    """Check that the batch can be distributed to that many pipelines.

    :raises BatchError: the batch is not a multiple of the microbatch, or has fewer microbatches than
        pipelines; the error has the nearest valid batches, the one below (where there is one) first.
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
    recommended = (
        f"below it {nearest[0]} works, and above it {nearest[1]}"
        if len(nearest) == 2
        else f"nothing below it works, and above it {nearest[0]}"
    )
    raise BatchError(f"global_batch {global_batch} {what}; {recommended}", nearest)


def microbatch_ms(costs: Sequence[Cost], microbatches: int) -> list[float]:
    """Return T_i of Eq. 6: each pipeline's time per microbatch.

    The paper's T_i is the step's time with a single microbatch. That counts the filling of the pipeline
    once for every microbatch, and then many nodes seem no quicker than few. So it is measured at the most
    that ``distribute`` gives to pipelines of the kind: there N_i·T_i is the time of the step.

    :raises BatchError: fewer microbatches than pipelines.
    """
    most: dict[Cost, int] = {}
    for cost, share in zip(costs, distribute(costs, microbatches), strict=True):
        most[cost] = max(share, most.get(cost, 0))
    times = {cost: cost(share) / share for cost, share in most.items()}
    return [times[cost] for cost in costs]


def score_ms(objective: BatchObjective, costs: Sequence[Cost], shares: Sequence[int]) -> float:
    """Return the value of an objective: the slowest time, or the standard deviation of N_i·T_i."""
    if objective == "minmax":
        return max(cost(share) for cost, share in set(zip(costs, shares, strict=True)))
    times = microbatch_ms(costs, sum(shares))
    return pstdev(share * time for share, time in zip(shares, times, strict=True))


def kinds_of(costs: Sequence[Cost]) -> dict[Cost, list[int]]:
    """Return the indices of the pipelines of each cost."""
    members: dict[Cost, list[int]] = {}
    for index, cost in enumerate(costs):
        members.setdefault(cost, []).append(index)
    return members


def largest_share(cost: Cost, target_ms: float, limit: int) -> int:
    """Return the most microbatches, at most ``limit``, that ``cost`` does within ``target_ms``; 0 if none.

    ``cost`` is called with no more than twice as many, as it may be slow for large numbers.
    """
    low, high = 0, 1
    while high <= limit and cost(high) <= target_ms:
        low, high = high, 2 * high
    high = min(high, limit + 1)
    while high - low > 1:
        middle = (low + high) // 2
        if cost(middle) <= target_ms:
            low = middle
        else:
            high = middle
    return low


def distribute(costs: Sequence[Cost], microbatches: int) -> tuple[int, ...]:
    """Return the shares with the least maximum cost; exact.

    Giving each microbatch to the pipeline that is then quickest is optimal, as costs only grow. The
    microbatches that a pipeline does within a time too short for the whole batch would be given out first,
    so they are found by halving.

    :raises BatchError: fewer microbatches than pipelines.
    """
    check_batch(microbatches, 1, len(costs))
    members = kinds_of(costs)
    short_ms, enough_ms = 0.0, max(cost(-(-microbatches // len(costs))) for cost in members)
    base = dict.fromkeys(members, 1)
    for _ in range(NARROWINGS):
        target_ms = (short_ms + enough_ms) / 2
        shares = {cost: max(1, largest_share(cost, target_ms, microbatches)) for cost in members}
        if sum(len(members[cost]) * share for cost, share in shares.items()) <= microbatches:
            short_ms, base = target_ms, shares
        else:
            enough_ms = target_ms
    return _hand_out(members, base, microbatches)


def _hand_out(members: dict[Cost, list[int]], base: dict[Cost, int], microbatches: int) -> tuple[int, ...]:
    """Distribute the rest, one microbatch at a time to all pipelines of a kind, as they take equally long."""
    share, extra = dict(base), dict.fromkeys(members, 0)
    left = microbatches - sum(len(members[cost]) * share for cost, share in base.items())
    queue = [(cost(base[cost] + 1), indices[0], cost) for cost, indices in members.items()] if left else []
    heapify(queue)
    while left:
        _, first, cost = heappop(queue)
        if left < len(members[cost]):
            extra[cost] = left
            break
        left -= len(members[cost])
        share[cost] += 1
        if left:
            heappush(queue, (cost(share[cost] + 1), first, cost))
    given = {
        index: share[cost] + (place < extra[cost])
        for cost, indices in members.items()
        for place, index in enumerate(indices)
    }
    return tuple(given[index] for index in range(len(given)))
