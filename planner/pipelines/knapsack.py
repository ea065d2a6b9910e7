"""The most microbatches that exactly r templates of exactly N' nodes in all can do: an exact-fill knapsack,
solved by halving, and a bound that avoids most of them.

Let w be the difference between the largest and the smallest template. Sort 2k templates by size and divide
them alternately between two groups: the groups' sums differ by at most w. So the best of 2k templates with
sum v is the best pair of k templates each with sums within w/2 of v/2. To compute one sum at r, sums in a
band at most 3·w wide are needed for r/2, r/4, … 1 templates: at an odd count one template is taken out
first, which widens the band by w, and halving removes half of that again. That is log₂ r (max,
+)-convolutions of arrays of at most 3·w entries, whatever N' is.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from planner.stages.makespan import Floats, Ints


@dataclass(frozen=True, slots=True, kw_only=True)
class _Band:
    """Most microbatches of ``count`` templates by their nodes: ``work[v − low]`` for ``low`` ≤ v."""

    count: int
    low: int
    work: Floats


def bound(sizes: Ints, shares: Ints, nodes: int, fewest: int, most: int) -> float:
    """Return an upper bound on ``fill`` with any number of templates from ``fewest`` to ``most``.

    Templates may be divided here: that is the linear program max Σ x·share with Σ x·size = ``nodes`` and Σ
    x within the range. Its optimum for Σ x = r is r·e(nodes / r) for the upper concave envelope e of the
    shares over the sizes, and concave in r; so it is at the templates with most microbatches per node, or
    at the end of the range that is next to their number.
    """
    useful = shares > 0
    if not useful.any():
        return -np.inf
    size, share = sizes[useful], shares[useful].astype(np.float64)
    low, high = max(fewest, nodes / size[-1]), min(most, nodes / size[0])
    if low > high:
        return -np.inf
    densest = int(np.argmax(share / size))
    wanted = nodes / size[densest]
    if low <= wanted <= high:
        return float(nodes * share[densest] / size[densest])
    count = low if wanted < low else high
    mean = min(max(nodes / count, size[0]), size[-1])
    left, right = size <= mean, size >= mean
    apart = size[right] - size[left, None]
    weight = np.where(apart > 0, (mean - size[left, None]) / np.maximum(apart, 1), 0.0)
    return float(count * np.max(share[left, None] * (1 - weight) + share[right] * weight))


def most_work(sizes: Ints, shares: Ints, nodes: int, count: int) -> float:
    """Return the most microbatches that ``count`` templates of exactly ``nodes`` nodes do; −∞ where there are
    none.

    :param sizes: nodes of each template, ascending.
    :param shares: microbatches that each of them does; templates that do none cannot be used.
    """
    item = _single(sizes, shares, nodes, count)
    return -np.inf if item is None else float(_bands(item.work, count, nodes - count * item.low)[-1].work[0])


def fill(sizes: Ints, shares: Ints, nodes: int, count: int) -> tuple[int, ...]:
    """Return the sizes, largest first, of templates that do ``most_work``, which must not be −∞."""
    item = _single(sizes, shares, nodes, count)
    assert item is not None, "there are such templates"
    bands = _bands(item.work, count, nodes - count * item.low)
    taken = _taken(item.work, bands, nodes - count * item.low)
    return tuple(
        item.low + extra for extra, number in sorted(taken.items(), reverse=True) for _ in range(number)
    )


def _single(sizes: Ints, shares: Ints, nodes: int, count: int) -> _Band | None:
    """Return the band of one template, from the smallest that is useful.

    The result is ``None`` where ``count`` templates never have ``nodes`` nodes in all.
    """
    useful = shares > 0
    if not useful.any():
        return None
    size = sizes[useful]
    low, width = int(size[0]), int(size[-1] - size[0])
    over = nodes - count * low
    step = int(np.gcd.reduce(size - low))
    if not 0 <= over <= count * width or (step and over % step):
        return None
    work = np.full(width + 1, -np.inf)
    work[size - low] = shares[useful]
    return _Band(count=1, low=low, work=work)


def _bands(single: Floats, count: int, over: int) -> list[_Band]:
    """Return the bands for 1 to ``count`` templates; nodes are counted beyond the smallest template each."""
    width = len(single) - 1
    needs = [(count, over, over)]
    while needs[-1][0] > 1:
        number, low, high = needs[-1]
        if number % 2:
            number, low = number - 1, low - width
        else:
            number, low, high = number // 2, -((width - low) // 2), (high + width) // 2
        needs.append((number, max(low, 0), min(high, number * width)))
    _, low, high = needs.pop()
    bands = [_Band(count=1, low=low, work=single[low : high + 1])]
    while needs:
        number, low, high = needs.pop()
        before = bands[-1]
        other = before if number == 2 * before.count else _Band(count=1, low=0, work=single)
        work = _sums(before, other, low, high).max(axis=1)
        bands.append(_Band(count=number, low=low, work=work))
    return bands


def _sums(one: _Band, other: _Band, low: int, high: int) -> Floats:
    """Return in row v − ``low`` the work of v nodes, by how many of them (less ``one.low``) are in ``one``."""
    length = len(one.work)
    # Entry i of ``one`` meets entry v − one.low − other.low − i of ``other``: a window that shifts, reversed.
    first, last = low - one.low - other.low, high - one.low - other.low
    before, after = max(length - 1 - first, 0), max(last + 1 - len(other.work), 0)
    padded = np.concatenate((np.full(before, -np.inf), other.work, np.full(after, -np.inf)))
    start = first + before - length + 1
    windows = sliding_window_view(padded[start : start + length + high - low][::-1], length)[::-1]
    sums: Floats = windows + one.work
    return sums


def _taken(single: Floats, bands: Sequence[_Band], over: int) -> dict[int, int]:
    """Return how many templates of each size (less the smallest) make up the optimum, which is split as it was
    computed.
    """
    taken: dict[int, int] = {}
    wanted = {over: 1}
    for number in range(len(bands) - 1, 0, -1):
        band, before = bands[number], bands[number - 1]
        halves = band.count == 2 * before.count
        other = before if halves else _Band(count=1, low=0, work=single)
        parts: dict[int, int] = {}
        for total, times in wanted.items():
            first = int(np.argmax(_sums(before, other, total, total)[0])) + before.low
            parts[first] = parts.get(first, 0) + times
            kind = parts if halves else taken
            kind[total - first] = kind.get(total - first, 0) + times
        wanted = parts
    for extra, times in wanted.items():
        taken[extra] = taken.get(extra, 0) + times
    return taken
