"""Batch distribution (Oobleck §4.2.2, Eq. 6): how many microbatches each pipeline computes.

The user sets the global batch, and it never changes. Every pipeline gets at least one microbatch. Shares
are per pipeline, not per template: three equal pipelines share 128 microbatches as 43, 43, 42. They
minimise the slowest pipeline's time or, where the user selects Eq. 6 itself, the variance of the pipelines'
times (planner/pipelines/variance.py). Equal pipelines are handled together, so thousands of them cost no
more than a few.
"""

from bisect import bisect_right
from collections.abc import Callable, Hashable, Mapping, Sequence
from heapq import heapify, heappop, heappush
from statistics import pstdev
from typing import TypeVar

from planner.errors import BatchError
from planner.values import BatchObjective

Cost = Callable[[int], float]
"""Milliseconds for a number of microbatches ≥ 1; never falls as the number grows. Pipelines whose costs are
the same object, or equal ones, are of the same kind.
"""
Kind = TypeVar("Kind", bound=Hashable)

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


def kinds_of(pipelines: Sequence[Kind]) -> dict[Kind, list[int]]:
    """Return the indices of the pipelines of each kind, by their costs or their times."""
    members: dict[Kind, list[int]] = {}
    for index, kind in enumerate(pipelines):
        members.setdefault(kind, []).append(index)
    return members


def largest_share(cost: Cost, target_ms: float, limit: int) -> int:
    """Return the most microbatches, at most ``limit``, that ``cost`` does within ``target_ms``; 0 if none.

    ``cost`` is called with no more than twice as many, as it may be slow for large numbers.
    """
    low, high = 0, 1
    while high <= limit and cost(high) <= target_ms:
        low, high = high, 2 * high
    return low + bisect_right(range(low + 1, min(high, limit + 1)), target_ms, key=cost)


def distribute(costs: Sequence[Cost], microbatches: int) -> tuple[int, ...]:
    """Return the shares with the least maximum cost; exact.

    Giving each microbatch to the pipeline that is then quickest is optimal, as costs only grow. The
    microbatches that a pipeline does within a time too short for the whole batch would be given out first,
    so they are found by halving.

    :raises BatchError: fewer microbatches than pipelines.
    """
    check_batch(microbatches, 1, len(costs))
    members = kinds_of(costs)
    kinds, counts = list(members), [len(indices) for indices in members.values()]
    short_ms, enough_ms = 0.0, max(cost(-(-microbatches // len(costs))) for cost in kinds)
    base, left = [1] * len(kinds), microbatches - len(costs)
    for _ in range(NARROWINGS):
        target_ms = (short_ms + enough_ms) / 2
        shares = [max(1, largest_share(cost, target_ms, microbatches)) for cost in kinds]
        rest = microbatches - sum(count * share for count, share in zip(counts, shares, strict=True))
        if rest >= 0:
            short_ms, base, left = target_ms, shares, rest
        else:
            enough_ms = target_ms
    return by_pipeline(members, *hand_out(counts, base, left, lambda kind, share: kinds[kind](share)))


def hand_out(
    counts: Sequence[int], shares: Sequence[int], left: int, added: Callable[[int, int], float]
) -> tuple[list[int], list[int]]:
    """Distribute ``left`` more microbatches, one at a time to all pipelines of a kind, as they take equally long.

    :param counts: pipelines of each kind; ``shares``: microbatches that each of them has.
    :param added: cost of the next microbatch, given the number of a kind and the share that it makes; the kind with
        the least cost is next.
    :returns: the share of each kind, and how many of its pipelines get one more.
    """
    whole, extra = list(shares), [0] * len(shares)
    queue = [(added(kind, share + 1), kind) for kind, share in enumerate(shares)] if left else []
    heapify(queue)
    while left:
        _, kind = heappop(queue)
        if left < counts[kind]:
            extra[kind] = left
            break
        left -= counts[kind]
        whole[kind] += 1
        if left:
            heappush(queue, (added(kind, whole[kind] + 1), kind))
    return whole, extra


def by_pipeline(
    members: Mapping[Kind, Sequence[int]], shares: Sequence[int], extra: Sequence[int]
) -> tuple[int, ...]:
    """Return the share of each pipeline; the first ``extra`` of a kind get one microbatch more."""
    given = {
        index: share + (place < more)
        for indices, share, more in zip(members.values(), shares, extra, strict=True)
        for place, index in enumerate(indices)
    }
    return tuple(given[index] for index in range(len(given)))
