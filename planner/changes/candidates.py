"""Which layouts are worth weighing after a change: Oobleck's steps, the optimum, and what lies between.

All use as many nodes as the best instantiation does, and have the pipelines that the user's tolerance asks
for; so which one is taken is only a matter of time: ``planner.changes.tradeoff``.

Oobleck's steps (§5.1, as published) are ``reinstantiate``. A pipeline that lost nodes is replaced by a template of
the size that is left of it (*simple*); if that is too small, it *borrows* nodes of pipelines that can spare some, up
to n₀; if nobody can, it is *merged* with another pipeline. The steps are local, and can dead-end: with f = 1, n₀ = 2
and survivors [1, 1, 2] they may merge [3, 1] and then [4], one pipeline, although 2 + 2 would keep two. The best
instantiation for the survivors is always among the layouts.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from planner.pipelines.instantiation import Instantiation, Instantiator
from planner.values import Method

MAX_KEEP_LAYOUTS = 2
"""How many layouts that keep intact pipelines are weighed."""


@dataclass(frozen=True, slots=True)
class PipelineLayout:
    """Template sizes in the plan's order, each with the previous pipeline it goes on from, if any."""

    method: Method
    pipelines: tuple[tuple[int, int | None], ...]

    @property
    def sizes(self) -> list[int]:
        return [size for size, _ in self.pipelines]


def first_layout(best: Instantiation) -> PipelineLayout:
    """At a job's start."""
    return PipelineLayout("initial", tuple((size, None) for size in best.sizes))


def candidate_layouts(
    before: Sequence[int],
    left: Sequence[int],
    nodes: int,
    templates: Sequence[int],
    instantiator: Instantiator,
    most: int,
) -> list[PipelineLayout]:
    """Different ones, the best instantiation always among them; of equal ones the first of these is named.

    * *simple*, *borrow*, *merge*: the published steps, unless they dead-end or leave nodes out;
    * *grow*: nodes without a pipeline fill the gaps in those that lost some, then join the smallest;
    * *keep*: intact pipelines go on, the rest is instantiated anew as is best for it alone; where it is too
      small, the smallest intact ones give way;
    * *even*: as many pipelines as have survivors, as equal in size as can be;
    * *best*: the best instantiation.

    :param before, left: nodes of each previous pipeline, and how many of them are there.
    :param nodes: all that are there, in a pipeline before or not.
    :param templates: the sizes that there are, ascending.
    :param most: pipelines that the batch suffices for.
    """
    best = instantiator.best(nodes)
    fewest = instantiator.required(nodes)
    available = set(templates)
    proposed = [
        *_stepped(before, left, templates),
        *_grown(before, left, nodes, templates),
        *_kept(before, left, best.nodes, templates[0], instantiator),
        *_evened(before, left, best.nodes),
        PipelineLayout("best", _aligned(best.sizes, before, left, range(len(before)))),
    ]
    found: dict[tuple[int, ...], PipelineLayout] = {}
    for layout in proposed:
        sizes = layout.sizes
        fits = sum(sizes) == best.nodes and fewest <= len(sizes) <= most and available.issuperset(sizes)
        if fits:
            found.setdefault(tuple(sorted(sizes)), layout)
    return list(found.values())


def _stepped(before: Sequence[int], left: Sequence[int], templates: Sequence[int]) -> list[PipelineLayout]:
    mended = reinstantiate(before, left, templates)
    return [] if mended is None else [PipelineLayout(mended.method, _going_on(mended.sizes))]


def _grown(
    before: Sequence[int], left: Sequence[int], nodes: int, templates: Sequence[int]
) -> list[PipelineLayout]:
    free = nodes - sum(left)
    if not free or not any(left):
        return []
    grown, available = list(left), set(templates)
    # The smallest gaps first, so that most pipelines are whole; those without survivors last.
    for index in sorted(range(len(left)), key=lambda i: (left[i] == 0, before[i] - left[i], i)):
        given = min(free, before[index] - grown[index])
        grown[index] += given
        free -= given
    while free:
        takers = [index for index, size in enumerate(grown) if size and size + 1 in available]
        if not takers:
            break
        grown[min(takers, key=lambda index: (grown[index], index))] += 1
        free -= 1
    mended = reinstantiate(before, grown, templates)
    return [] if mended is None else [PipelineLayout("grow", _going_on(mended.sizes))]


def _kept(
    before: Sequence[int], left: Sequence[int], usable: int, n0: int, instantiator: Instantiator
) -> list[PipelineLayout]:
    intact = [index for index, count in enumerate(left) if count and count == before[index]]
    intact.sort(key=lambda index: (-before[index], index))
    found: list[PipelineLayout] = []
    while intact and len(found) < MAX_KEEP_LAYOUTS:
        kept = sum(before[index] for index in intact)
        rest = usable - kept
        if rest == 0:
            found.append(PipelineLayout("keep", tuple((before[index], index) for index in sorted(intact))))
        elif rest >= n0:
            others = sorted(set(range(len(left))).difference(intact))
            anew = _aligned(instantiator.best(rest).sizes, before, left, others)
            going_on = [(before[index], index) for index in intact]
            known = sorted((index, size) for size, index in (*going_on, *anew) if index is not None)
            new = tuple(pair for pair in anew if pair[1] is None)
            found.append(PipelineLayout("keep", (*((size, index) for index, size in known), *new)))
        intact.pop()
    return found


def _evened(before: Sequence[int], left: Sequence[int], usable: int) -> list[PipelineLayout]:
    pipelines = sum(count > 0 for count in left)
    if not pipelines:
        return []
    size, larger = divmod(usable, pipelines)
    sizes = [size + 1] * larger + [size] * (pipelines - larger)
    return [PipelineLayout("even", _aligned(sizes, before, left, range(len(before))))] if size else []


def _going_on(sizes: Sequence[int]) -> tuple[tuple[int, int | None], ...]:
    return tuple((size, index) for index, size in enumerate(sizes) if size)


def _aligned(
    sizes: Iterable[int], before: Sequence[int], left: Sequence[int], among: Iterable[int]
) -> tuple[tuple[int, int | None], ...]:
    """New sizes in the order of the previous pipelines: whole ones keep theirs, then the fullest choose.

    :param among: the previous pipelines to go on from.
    """
    free = Counter(sizes)
    matched: dict[int, int] = {}
    survived = [index for index in among if left[index]]
    order = sorted(survived, key=lambda index: (left[index] != before[index], -left[index], index))
    for exact in (True, False):
        for index in order:
            if index in matched or not free or (exact and left[index] not in free):
                continue
            nearest = min(free, key=lambda size: (abs(size - left[index]), -size))
            matched[index] = nearest
            free[nearest] -= 1
            if not free[nearest]:
                del free[nearest]
    going_on: list[tuple[int, int | None]] = [(size, index) for index, size in sorted(matched.items())]
    return (*going_on, *((size, None) for size in sorted(free.elements(), reverse=True)))


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
