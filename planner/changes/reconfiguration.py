"""Which template sizes to go on with after failures: Oobleck §5.1's three steps, as published.

A pipeline that lost nodes is replaced by a template of the size that is left of it (*simple*); if that is
too small, it *borrows* nodes of pipelines that can spare some, up to n₀; if nobody can, it is *merged* with
another pipeline. The steps are local, and can dead-end: with f = 1, n₀ = 2 and survivors [1, 1, 2] they may
merge [3, 1] and then [4], one pipeline, although 2 + 2 would keep two. The planner then falls back to the
best instantiation for the survivors.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Reinstantiation:
    """New size of each previous pipeline, 0 where it is gone, and the last of the steps that it took."""

    sizes: tuple[int, ...]
    method: Literal["simple", "borrow", "merge"]


def reinstantiate(
    before: Sequence[int], left: Sequence[int], templates: Sequence[int]
) -> Reinstantiation | None:
    """The published steps, for one pipeline after the other.

    :param before: nodes of each running pipeline before the failures.
    :param left: nodes of each that survived.
    :param templates: the sizes that there are, ascending.
    :returns: ``None`` where the published steps lead nowhere.
    """
    sizes, available = list(left), set(templates)
    method: Literal["simple", "borrow", "merge"] = "simple"
    for index, count in enumerate(left):
        if count == before[index] or sizes[index] == 0 or sizes[index] in available:
            continue
        borrowed = _borrow(sizes, index, templates[0], available)
        if borrowed is not None:
            sizes, method = borrowed, "merge" if method == "merge" else "borrow"
            continue
        merged = _merge(sizes, index, available)
        if merged is None:
            return None
        sizes, method = merged, "merge"
    if not any(sizes) or any(size and size not in available for size in sizes):
        return None
    return Reinstantiation(sizes=tuple(sizes), method=method)


def _borrow(sizes: list[int], index: int, n0: int, available: set[int]) -> list[int] | None:
    """Take single nodes from the largest pipelines that stay instantiable, until ``index`` has n₀."""
    lent = list(sizes)
    while lent[index] < n0:
        donors = [other for other in range(len(lent)) if other != index and lent[other] - 1 in available]
        if not donors:
            return None
        lent[max(donors, key=lambda other: (lent[other], -other))] -= 1
        lent[index] += 1
    return lent if lent[index] in available else None


def _merge(sizes: list[int], index: int, available: set[int]) -> list[int] | None:
    """Join ``index`` with the smallest other pipelines until a template fits."""
    merged = list(sizes)
    while merged[index] not in available:
        others = [other for other in range(len(merged)) if other != index and merged[other]]
        if not others:
            return None
        smallest = min(others, key=lambda other: (merged[other], other))
        merged[index] += merged[smallest]
        merged[smallest] = 0
    return merged
